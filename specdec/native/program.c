/* A forward as a list of operations, run one after the other: what is small between the products costs no more than it
   computes. What a layer computes in several small operations of torch is one here, with the same roundings. */

#include "calls.h"
#include "vectors.h"

#define WORDS 32
enum { MULTIPLY, NORMALIZE, JOIN, TURN, ATTEND };
typedef struct {
  long kind;
  word words[WORDS - 1];
} operation;

/* What the layers of a forward share (specdec/attention/native.py). */
typedef struct {
  long rows;
  const int64_t *lengths, *table;
  long pages;
  const int64_t *words;
  long words_row, words_node;
  const int64_t *depth;
  long depth_row, cells;
} forward;

/* A layer's part of the cache. */
typedef struct {
  void *keys, *values;
  long key_page, key_head, key_position, value_page, value_head, value_position, page_size;
} layer;

/* ---- Functions of each number. ---- */

/* e ** -|x| / (1 + e ** -|x|), or 1 / (1 + e ** -|x|) for x >= 0. */
INLINE vec sigmoid(vec x) {
  const vec e = exponential(ZERO() - MAX(x, ZERO() - x)), below = ALL(1.0f) + e;
  const vec larger = ALL(1.0f) / below, smaller = e / below;
  const ivec negative = SIGNED_RIGHT(BITS(x), 31);
  return FLOATS((negative & BITS(smaller)) | (~negative & BITS(larger)));
}

INLINE vec activated(vec x, int function) {
  if (function == SILU) return x * sigmoid(x);
  /* 0.5 x (1 + tanh y) = x sigmoid(2 y), y = sqrt(2 / pi) (x + 0.044715 x ** 3) */
  const vec inner = FMA(ALL(0.044715f) * (x * x), x, x);
  return x * sigmoid(inner * ALL(2 * 0.7978845608f));
}

void activate(const void *x, void *y, long count, int function, int dtype) {
  _Pragma("omp parallel for schedule(static) if (count >= LEAST_PARALLEL)")
  for (long i = 0; i < count; i += WIDTH)
    store_some(y, i, count - i, dtype, activated(load_some(x, i, count - i, dtype), function));
}

/* Words: a, b, y, each with what is between rows; rows, width; function, dtype. y = a + b, or a function of a times b. */
static void join(const word *w, char *const *places, loop *l) {
  const void *a = address(places, w[0]), *b = address(places, w[2]);
  const int function = w[8].integer, dtype = w[9].integer;
  SHARE(l, w[6].integer, row)
    for (long i = 0, width = w[7].integer; i < width; i += WIDTH) {
      const vec first = load_some(a, row * w[1].integer + i, width - i, dtype);
      const vec second = load_some(b, row * w[3].integer + i, width - i, dtype);
      const vec numbers = function == ADDED ? first + second : rounded(activated(first, function), dtype) * second;
      store_some(address(places, w[4]), row * w[5].integer + i, width - i, dtype, numbers);
    }
}

/* ---- Rotary embeddings, and the write to the cache. ---- */

/* y = x * cosines + cat(-x[half:], x[:half]) * sines of one head, with the roundings of these operations. */
INLINE void rotate(const char *x, const char *cosines, const char *sines, char *y, long dim, int dtype) {
  const long half = dim / 2;
  for (long i = 0; i < half; i += WIDTH) {
    const long count = half - i;
    const vec low = load_some(x, i, count, dtype), high = load_some(x, half + i, count, dtype);
    const vec turned_low = rounded((ZERO() - high) * load_some(sines, i, count, dtype), dtype);
    const vec turned_high = rounded(low * load_some(sines, half + i, count, dtype), dtype);
    const vec kept_low = rounded(low * load_some(cosines, i, count, dtype), dtype);
    const vec kept_high = rounded(high * load_some(cosines, half + i, count, dtype), dtype);
    store_some(y, i, count, dtype, kept_low + turned_low);
    store_some(y, half + i, count, dtype, kept_high + turned_high);
  }
}

/* Words: query, key, value, each with the strides of rows, heads and nodes; cosines, sines; positions, which are looked
   up there, or NULL, with the strides of rows and nodes (without positions: of cosines and sines); the turned query, with
   its strides; layer, heads, key heads, nodes, dim, value dim, dtype. Without cosines nothing is turned: keys and values
   are written only. */
static void turn(const word *w, char *const *places, const forward *f, const layer *layers, loop *shared) {
  const char *q = address(places, w[0]), *k = address(places, w[4]), *v = address(places, w[8]);
  const char *cosines = address(places, w[12]), *sines = address(places, w[13]);
  const int64_t *looked = address(places, w[14]);
  char *out = address(places, w[17]);
  const layer *l = layers + w[21].integer;
  const long heads = w[22].integer, key_heads = w[23].integer, nodes = w[24].integer;
  const long dim = w[25].integer, value_dim = w[26].integer, dtype = w[27].integer, item = dtype == FLOAT32 ? 4 : 2;
  SHARE(shared, f->rows, row)
    for (long node = 0; node < nodes; node++) {
      long position = f->lengths[row] + f->cells - nodes + node;
      if (position > f->pages * l->page_size - 1) position = f->pages * l->page_size - 1;
      const long number = f->pages == 1 ? 0 : position / l->page_size, cell = position - number * l->page_size;
      const long page = f->table[row * f->pages + number];
      char *keys = (char *)l->keys + item * (page * l->key_page + cell * l->key_position);
      char *values = (char *)l->values + item * (page * l->value_page + cell * l->value_position);
      const long place = row * w[15].integer + node * w[16].integer, angle = item * (looked ? dim * looked[place] : place);
      const char *c = cosines + angle, *s = sines + angle;
      const char *key = k + item * (row * w[5].integer + node * w[7].integer);
      const char *value = v + item * (row * w[9].integer + node * w[11].integer);
      for (long head = 0; head < key_heads; head++, key += item * w[6].integer, value += item * w[10].integer) {
        if (cosines)
          rotate(key, c, s, keys + item * head * l->key_head, dim, dtype);
        else
          memcpy(keys + item * head * l->key_head, key, item * dim);
        memcpy(values + item * head * l->value_head, value, item * value_dim);
      }
      const char *query = q + item * (row * w[1].integer + node * w[3].integer);
      char *turned = out + item * (row * w[18].integer + node * w[20].integer);
      for (long head = 0; cosines && head < heads; head++)
        rotate(query + item * head * w[2].integer, c, s, turned + item * head * w[19].integer, dim, dtype);
    }
}

/* Words: query with its strides; output; layer, heads, key heads, nodes, dim, value dim, dtype; scale, softcap; sinks;
   window, chunk. */
static int attend_now(const word *w, char *const *places, const forward *f, const layer *layers, loop *shared) {
  const layer *l = layers + w[5].integer;
  const call c = {
      .query = address(places, w[0]), .query_row = w[1].integer, .query_head = w[2].integer, .query_node = w[3].integer,
      .keys = l->keys, .values = l->values, .key_page = l->key_page, .key_head = l->key_head,
      .key_position = l->key_position, .value_page = l->value_page, .value_head = l->value_head,
      .value_position = l->value_position, .output = address(places, w[4]), .dtype = w[11].integer,
      .lengths = f->lengths, .table = f->table, .pages = f->pages, .page_size = l->page_size, .words = f->words,
      .words_row = f->words_row, .words_node = f->words_node, .depth = f->depth, .depth_row = f->depth_row,
      .rows = f->rows, .heads = w[6].integer, .key_heads = w[7].integer, .nodes = w[8].integer, .cells = f->cells,
      .dim = w[9].integer, .value_dim = w[10].integer, .scale = w[12].number, .softcap = w[13].number,
      .sinks = address(places, w[14]), .window = w[15].integer, .chunk = w[16].integer};
  return attend_together(&c, shared);
}

/* One operation, with two loops of its own. Returns 0 if there is no memory. */
static int perform(const operation *o, char *const *places, const forward *f, const layer *layers, void *room, loop *l) {
  switch (o->kind) {
  case MULTIPLY: multiply(o->words, places, room, l); break;
  case NORMALIZE: normalize(o->words, places, l); break;
  case JOIN: join(o->words, places, l); break;
  case TURN: turn(o->words, places, f, layers, l); break;
  default: return attend_now(o->words, places, f, layers, l);
  }
  return 1;
}

/* What Python calls. Returns 0 if there is no memory. */
int run(const operation *o, long count, char *const *places, const forward *f, const layer *layers) {
  long most = 64, large = 0; /* bytes of a product's inputs; weights or numbers of the largest operation */
  for (long k = 0; k < count; k++) {
    const word *w = o[k].words;
    const long bytes = o[k].kind == MULTIPLY ? 4 * w[7].integer * w[8].integer : 0;
    const long numbers[] = {w[5].integer * w[7].integer, w[3].integer * w[4].integer, w[6].integer * w[7].integer};
    const long here = o[k].kind > JOIN ? (o[k].kind == ATTEND) * LEAST_PARALLEL : numbers[o[k].kind];
    most = bytes > most ? bytes : most, large = here > large ? here : large;
  }
  loop *loops = calloc(count, 2 * sizeof(loop));
  void *room = aligned_alloc(64, (most + 63) / 64 * 64);
  int done = loops && room;
  _Pragma("omp parallel if (done && large >= LEAST_PARALLEL) reduction(&:done)")
  for (long k = 0; k < count && loops && room && done; k++)
    done = perform(o + k, places, f, layers, room, loops + 2 * k);
  free(loops), free(room);
  return done;
}
