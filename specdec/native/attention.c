/* Attention of some queries over a cache as it lies: pages of keys and values, a prefix that all queries see, and a tree
   behind it, of whose nodes a query sees its ancestors.

   The queries of a key head are its query heads times the row's nodes. Keys are taken in blocks. A block's keys are laid
   out in the nearest cache with neighbouring keys in one vector, its values as they are; then all queries use them. Both
   are float32, or where the processor multiplies bfloat16 in pairs, pairs of such numbers: of a key's neighbouring
   numbers, and of neighbouring keys' values, whose weights are rounded to it. Sums are in float32. The softmax runs
   along (Milakov and Gimelshein 2018; FlashAttention): a query's sums are rescaled when a block has a larger score.

   A query's output is the same bits whatever the other queries are, and whatever the number of threads. A node of a tree
   has those that it has in a line: its ancestors, between which others stand, are taken in the order of their positions,
   and so in the same blocks, lanes and pairs. */

#include "calls.h"
#include "vectors.h"

#define KEYS 64 /* of a block, as many as a word of a tree's ancestors has bits */
#define MOST 6  /* queries at a time */
#define QUERIES 96 /* of a task */
#define BLOCKS(C) ((C)->cells / KEYS + 2) /* that a tree can touch */
#define NONE (-3.0e38f)
#define LOG2_E 1.44269504f

/* Numbers of a vector that is filled up with zeros. */
INLINE long filled_up(long dim) { return (dim + WIDTH - 1) / WIDTH * WIDTH; }

/* Exchanges rows and columns of WIDTH vectors. Each round interleaves the first half of the vectors with the second. */
INLINE void transpose(vec *m) {
  vec other[WIDTH];
#if WIDTH == 16
  const ivec low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const ivec high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
#endif
  UNROLL for (int round = 1; round < WIDTH; round *= 2) {
    UNROLL for (int i = 0; i < WIDTH / 2; i++) {
#if WIDTH == 16
      other[2 * i] = _mm512_permutex2var_ps(m[i], low, m[i + 8]);
      other[2 * i + 1] = _mm512_permutex2var_ps(m[i], high, m[i + 8]);
#else
      vec low = _mm256_unpacklo_ps(m[i], m[i + 4]), high = _mm256_unpackhi_ps(m[i], m[i + 4]);
      other[2 * i] = _mm256_permute2f128_ps(low, high, 0x20);
      other[2 * i + 1] = _mm256_permute2f128_ps(low, high, 0x31);
#endif
    }
    UNROLL for (int i = 0; i < WIDTH; i++) m[i] = other[i];
  }
}

/* A bit for each key of a block, up to a last one. */
INLINE uint64_t up_to(long last) { return last >= 63 ? ~0ull : last < 0 ? 0 : (2ull << last) - 1; }

/* Which keys of the block of positions from `start` on no window or chunk hides from a query at the position `own`. */
INLINE uint64_t within_reach(const call *c, long own, long start) {
  long first = c->window ? own - c->window + 1 - start : 0;
  uint64_t seen = ~0ull;
  if (c->chunk) {
    const long chunk = own / c->chunk * c->chunk - start;
    first = chunk > first ? chunk : first, seen = up_to(chunk + c->chunk - 1);
  }
  return first >= KEYS ? 0 : first > 0 ? seen & ~0ull << first : seen;
}

/* Finds the first `most` cells of the tree that a node sees, in their order, which is that of their positions. */
INLINE long find_path(const call *c, long row, long node, long most, int *path) {
  const uint64_t *words = (const uint64_t *)c->words + row * c->words_row + node * c->words_node;
  long count = 0;
  for (long word = 0; 64 * word < most; word++)
    for (uint64_t left = words[word]; left; left &= left - 1) {
      const long cell = 64 * word + __builtin_ctzll(left);
      if (cell < most) path[count++] = cell;
    }
  return count;
}

/* Adds numbers times one to all sums: vectors of words, which are float32, or pairs of bfloat16. */
#define TIMES_float32(S, NUMBERS, WORD) FMA(NUMBERS, WORD, S)
#if PAIRS
#define TIMES_pairs(S, NUMBERS, WORD) _mm512_dpbf16_ps(S, (__m512bh)(NUMBERS), (__m512bh)(WORD))
#else /* never computed */
#define TIMES_pairs TIMES_float32
#endif

/* Scores of ROWS queries, `dim` words each, with a block's keys at `keys` [dim][KEYS]. */
#define PART (WIDTH == 16 ? 4 : 2)
#define SCORES(F, ROWS)                                                                                      \
  static void scores_##F##_##ROWS(const float *q, const float *keys, float *scores, long dim, float scale) { \
    for (int first = 0; first < KEYS; first += PART * WIDTH) {                                               \
      vec s[ROWS][PART];                                                                                     \
      UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART; v++) s[r][v] = ZERO();          \
      for (long d = 0; d < dim; d++) {                                                                       \
        vec k[PART];                                                                                         \
        UNROLL for (int v = 0; v < PART; v++) k[v] = LOAD(keys + d * KEYS + first + v * WIDTH);              \
        UNROLL for (int r = 0; r < ROWS; r++) {                                                              \
          const vec word = ALL(q[r * dim + d]);                                                              \
          UNROLL for (int v = 0; v < PART; v++) s[r][v] = TIMES_##F(s[r][v], k[v], word);                    \
        }                                                                                                    \
      }                                                                                                      \
      UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART; v++)                            \
          STORE(scores + r * KEYS + first + v * WIDTH, s[r][v] * ALL(scale));                                \
    }                                                                                                        \
  }
/* Adds ROWS queries' weights [KEYS] times `count` words of values [KEYS][dim] to sums [dim]: of SOME vectors. */
#define ADD_VALUES(F, ROWS, SOME)                                                                            \
  for (; dim - first >= SOME * WIDTH; first += SOME * WIDTH) {                                               \
    vec s[ROWS][SOME];                                                                                       \
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < SOME; v++)                              \
        s[r][v] = LOAD(sums + r * dim + first + v * WIDTH) * ALL(factors[r]);                                \
    for (long key = 0; key < count; key++) {                                                                 \
      vec numbers[SOME];                                                                                     \
      UNROLL for (int v = 0; v < SOME; v++) numbers[v] = LOAD(values + key * dim + first + v * WIDTH);       \
      UNROLL for (int r = 0; r < ROWS; r++) {                                                                \
        const vec weight = ALL(weights[r * KEYS + key]);                                                     \
        UNROLL for (int v = 0; v < SOME; v++) s[r][v] = TIMES_##F(s[r][v], numbers[v], weight);              \
      }                                                                                                      \
    }                                                                                                        \
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < SOME; v++)                              \
        STORE(sums + r * dim + first + v * WIDTH, s[r][v]);                                                  \
  }
#define VALUES(F, ROWS)                                                                                      \
  static void values_##F##_##ROWS(const float *weights, const float *values, float *sums,                    \
                                  const float *factors, long dim, long count) {                              \
    long first = 0;                                                                                          \
    ADD_VALUES(F, ROWS, PART)                                                                                \
    ADD_VALUES(F, ROWS, 1)                                                                                   \
  }
EVERY(SCORES, float32)
EVERY(VALUES, float32)
EVERY(SCORES, pairs)
EVERY(VALUES, pairs)
typedef void scores_function(const float *, const float *, float *, long, float);
typedef void values_function(const float *, const float *, float *, const float *, long, long);
static scores_function *const scores_of[2][MOST + 1] = {ALL_OF(scores_float32), ALL_OF(scores_pairs)};
static values_function *const values_of[2][MOST + 1] = {ALL_OF(values_float32), ALL_OF(values_pairs)};

/* Where a position's keys and values of a head stand. */
INLINE void find(const call *c, long row, long head, long position, long *key, long *value) {
  const long number = c->pages == 1 ? 0 : position / c->page_size, place = position - number * c->page_size;
  const long page = c->table[row * c->pages + number];
  *key = page * c->key_page + head * c->key_head + place * c->key_position;
  *value = page * c->value_page + head * c->value_head + place * c->value_position;
}

/* Whether numbers stand in pairs, and how many words they take then. */
INLINE long words_of(const call *c, long numbers) { return in_pairs(c->dtype) ? (numbers + 1) / 2 : numbers; }

/* A vector of words from a word on, of `dim` numbers at `at`; zeros behind the last number. */
INLINE vec load_part(const call *c, const void *p, long at, long word, long dim) {
  if (!in_pairs(c->dtype)) return load_some(p, at + word, dim - word, c->dtype);
  return load_bytes((const uint16_t *)p + at + 2 * word, 2 * (dim - 2 * word), FLOAT32);
}

/* Has a position's keys and values of a head brought nearer. */
INLINE void fetch(const call *c, long row, long head, long position) {
  const long item = c->dtype == FLOAT32 ? 4 : 2;
  long key, value;
  find(c, row, head, position, &key, &value);
  for (long at = 0; at < c->dim * item; at += 64) _mm_prefetch((const char *)c->keys + key * item + at, _MM_HINT_T1);
  for (long at = 0; at < c->value_dim * item; at += 64)
    _mm_prefetch((const char *)c->values + value * item + at, _MM_HINT_T1);
}

/* Lays out a block's values [words of KEYS][value_dim], which stand at `at`, from a key on that begins a word; what is
   behind the last key is 0. Meanwhile fetches keys and values that are used next: `more` of a head from a position on. */
INLINE void lay_out_values(const call *c, long row, const long *at, long first, long count, long next_head, long next,
                           long more, float *values) {
  const long dim = c->value_dim, wide = filled_up(dim);
  const int pairs = in_pairs(c->dtype), dtype = c->dtype;
  for (long key = first; key < count; key += 1 + pairs, values += wide) {
    if (key < more) fetch(c, row, next_head, next + key);
    if (pairs && key + 1 < more) fetch(c, row, next_head, next + key + 1);
    for (long d = 0; d < wide; d += WIDTH) {
      vec numbers = load_some(c->values, at[key] + d, dim - d, dtype);
      if (pairs) {
        const ivec high = key + 1 < count ? BITS(load_some(c->values, at[key + 1] + d, dim - d, BFLOAT16)) : IALL(0);
        numbers = FLOATS(RIGHT(BITS(numbers), 16) | high);
      }
      STORE(values + d, numbers);
    }
  }
}

/* Lays out a block's keys [words of dim][KEYS] and values; what is behind the last key is 0. */
static void lay_out(const call *c, long row, long head, long start, long count, long next_head, long next, long more,
                    float *keys, float *values) {
  long at_key[KEYS], at_value[KEYS];
  for (long key = 0; key < count; key++) find(c, row, head, start + key, at_key + key, at_value + key);
  for (long first = 0; first < KEYS; first += WIDTH)
    for (long d = 0; d < words_of(c, c->dim); d += WIDTH) {
      vec m[WIDTH];
      if (first + WIDTH <= count) {
        UNROLL for (int i = 0; i < WIDTH; i++) m[i] = load_part(c, c->keys, at_key[first + i], d, c->dim);
      } else {
        for (int i = 0; i < WIDTH; i++)
          m[i] = first + i < count ? load_part(c, c->keys, at_key[first + i], d, c->dim) : ZERO();
      }
      transpose(m);
      UNROLL for (int i = 0; i < WIDTH; i++) STORE(keys + (d + i) * KEYS + first, m[i]);
    }
  lay_out_values(c, row, at_value, 0, count, next_head, next, more, values);
}

/* Replaces a query's scores, which are logarithms to the base of two, by weights, in `pairs` or not, adds these to
   `total`, and returns the factor of what was summed before. */
INLINE float softmax(float *scores, uint64_t seen, float softcap, float *largest, float *total, int pairs) {
  if (softcap > 0)
    for (int v = 0; v < KEYS; v += WIDTH) { /* tanh x = sign (1 - 2 / (1 + e ** 2|x|)) = (1 - e ** -2|x|) / (1 + ...) */
      const vec x = LOAD(scores + v) * ALL(1 / (LOG2_E * softcap)), size = MAX(x, ZERO() - x);
      const vec e = exponential(size * ALL(-2.0f));
      const vec tanh = (ALL(1.0f) - e) / (ALL(1.0f) + e);
      const ivec sign = BITS(x) & IALL(0x80000000);
      STORE(scores + v, FLOATS(IADD(BITS(tanh), sign)) * ALL(LOG2_E * softcap));
    }
  vec numbers[KEYS / WIDTH], best = ALL(NONE), sum = ZERO();
  UNROLL for (int v = 0; v < KEYS / WIDTH; v++) {
    numbers[v] = LOAD(scores + v * WIDTH);
    if (~seen) numbers[v] = selected(seen >> v * WIDTH, numbers[v], ALL(NONE));
    best = MAX(best, numbers[v]);
  }
  const float here = LARGEST(best), before = *largest, now = here > before ? here : before;
  float factor = 1;
  if (now > before) {
    float factors[WIDTH];
    STORE(factors, power_of_two(ALL(before - now)));
    factor = factors[0], *largest = now;
  }
  UNROLL for (int v = 0; v < KEYS / WIDTH; v++) {
    numbers[v] = power_of_two(numbers[v] - ALL(now));
    if (~seen) numbers[v] = selected(seen >> v * WIDTH, numbers[v], ZERO()); /* what is hidden has none */
    sum += numbers[v];
    if (!pairs) STORE(scores + v * WIDTH, numbers[v]);
  }
#if PAIRS
  if (pairs)
    UNROLL for (int v = 0; v < KEYS / WIDTH; v += 2)
        STORE(scores + v * WIDTH / 2, FLOATS((ivec)_mm512_cvtne2ps_pbh(numbers[v + 1], numbers[v])));
#endif
  STORE(total, FMA(LOAD(total), ALL(factor), sum));
  return factor;
}

/* What a task computes with. */
typedef struct {
  float *keys, *values, *scores;                 /* of a block; scores are [MOST][KEYS] */
  float *q, *sums;                               /* [QUERIES][dim] */
  float largest[QUERIES], total[QUERIES][WIDTH]; /* of the softmax */
  float *tree, *own;                             /* scores of a tree's blocks [block][QUERIES][KEYS]; a node's own values */
  int *paths;                                    /* [MOST][cell] */
} workspace;

/* The keys of a tree's queries, from the block on in which the prefix ends up to `stop`: `count` queries from `first` on,
   of one head of `heads`, which are in the workspace from `at` on. All scores are computed in the order of the cells; then
   every query takes its own in the order of their positions. */
static void attend_tree(const call *c, workspace *w, long row, long head, long heads, long at, long first, long count,
                        long stop) {
  const long groups = c->heads / c->key_heads, length = c->lengths[row], base = length / KEYS * KEYS;
  const long dim = filled_up(words_of(c, c->dim)), wide = filled_up(c->value_dim), last = (stop - 1) / KEYS * KEYS;
  const int pairs = in_pairs(c->dtype), in_word = pairs ? 2 : 1;
  const long shared = length - base, common = shared / in_word; /* keys of the first block that all see; whole words */
  const float same[MOST] = {1, 1, 1, 1, 1, 1};
  for (long start = last; start >= base; start -= KEYS) { /* so that the first block's values stay */
    const long here = stop - start < KEYS ? stop - start : KEYS;
    if (start > base)
      lay_out(c, row, head, start, here, head, start - KEYS, KEYS, w->keys, w->values);
    else
      lay_out(c, row, head, start, here, head + 1, last, heads > 1 ? stop - last : 0, w->keys, w->values);
    for (long i = 0; i < count; i += MOST)
      scores_of[pairs][count - i < MOST ? count - i : MOST](
          w->q + (at + i) * dim, w->keys, w->tree + ((start - base) / KEYS * QUERIES + i) * KEYS, dim, LOG2_E * c->scale);
  }
  for (long i = 0; i < count; i += MOST) {
    const long some = count - i < MOST ? count - i : MOST;
    const int *path[MOST];
    long ends[MOST], longest = 0;
    for (long r = 0; r < some; r++) {
      const int known = r && (first + i + r) % groups;
      path[r] = known ? path[r - 1] : w->paths + r * c->cells;
      ends[r] = known ? ends[r - 1] : shared + find_path(c, row, (first + i + r) / groups, stop - length, (int *)path[r]);
      longest = ends[r] > longest ? ends[r] : longest;
    }
    for (long start = 0; start < longest; start += KEYS) {
      const long begin = start ? 0 : shared, word = start ? 0 : common;
      float factors[MOST];
      for (long r = 0; r < some; r++) {
        const float *of_cells = w->tree + (i + r) * KEYS;
        float *scores = w->scores + r * KEYS;
        memcpy(scores, of_cells, 4 * KEYS);
        for (long key = begin; key < KEYS && start + key < ends[r]; key++) {
          const long cell = shared + path[r][start + key - shared];
          scores[key] = of_cells[cell / KEYS * QUERIES * KEYS + cell % KEYS];
        }
        const long own = length + c->depth[row * c->depth_row + c->cells - c->nodes + (first + i + r) / groups];
        const uint64_t seen = up_to(ends[r] - start - 1) & within_reach(c, own, base + start);
        factors[r] = softmax(scores, seen, c->softcap, w->largest + at + i + r, w->total[at + i + r], pairs);
      }
      values_of[pairs][some](w->scores, w->values, w->sums + (at + i) * wide, factors, wide, word);
      for (long r = 0, alike; r < some; r += alike) {
        for (alike = 1; r + alike < some && path[r + alike] == path[r];) alike++;
        const long here = ends[r] - start < KEYS ? ends[r] - start : KEYS;
        if (here <= word * in_word) continue;
        long places[KEYS], key_place;
        for (long key = word * in_word; key < here; key++) {
          const long place = start + key < shared ? key : shared + path[r][start + key - shared];
          find(c, row, head, base + place, &key_place, places + key);
        }
        lay_out_values(c, row, places, word * in_word, here, 0, 0, 0, w->own);
        values_of[pairs][alike](w->scores + r * KEYS + word, w->own, w->sums + (at + i + r) * wide, same, wide,
                                (here + in_word - 1) / in_word - word);
      }
    }
  }
}

/* The queries from `first` on of one row and some key heads. A query is a node and one of the heads that share a key
   head. All heads of a block of keys are read before the next block, because they lie side by side. */
static void attend_task(const call *c, long row, long head, long heads, long first, long count, float *room) {
  const long groups = c->heads / c->key_heads, length = c->lengths[row];
  const long own = length + c->cells - c->nodes; /* where node 0 stands */
  const long dim = filled_up(words_of(c, c->dim)), wide = filled_up(c->value_dim);
  const int pairs = in_pairs(c->dtype);
  workspace w;
  w.keys = room, w.values = w.keys + KEYS * dim, w.scores = w.values + KEYS * wide, w.q = w.scores + MOST * KEYS;
  w.sums = w.q + QUERIES * dim, w.own = w.sums + QUERIES * wide, w.tree = w.own + KEYS * wide;
  w.paths = (int *)(w.tree + BLOCKS(c) * QUERIES * KEYS);
  float factors[MOST];
  for (long i = 0; i < heads * count; i++) {
    const long query = first + i % count, node = query / groups, of = (head + i / count) * groups + query % groups;
    const long at = row * c->query_row + of * c->query_head + node * c->query_node;
    for (long d = 0; d < dim; d += WIDTH) STORE(w.q + i * dim + d, load_part(c, c->query, at, d, c->dim));
    for (long d = 0; d < wide; d += WIDTH) STORE(w.sums + i * wide + d, ZERO());
    w.largest[i] = c->sinks ? LOG2_E * c->sinks[of] : NONE;
    STORE(w.total[i], ZERO());
    w.total[i][0] = c->sinks ? 1 : 0;
  }
  /* The keys of a line end with the last query's own; a tree's with its last cell. */
  long stop = c->words ? length + c->cells : own + (first + count - 1) / groups + 1, start = 0;
  if (stop > c->pages * c->page_size) stop = c->pages * c->page_size;
  if (c->window) {
    start = (c->words ? length : own + first / groups) - c->window + 1;
    start = start > 0 ? start / KEYS * KEYS : 0;
  }
  /* Blocks in which cells are positions. */
  for (const long end = c->words ? length / KEYS * KEYS : stop; start < end; start += KEYS) {
    const long here = stop - start < KEYS ? stop - start : KEYS, next = start + KEYS;
    for (long h = 0; h < heads; h++) {
      if (h + 1 < heads)
        lay_out(c, row, head + h, start, here, head + h + 1, start, here, w.keys, w.values);
      else
        lay_out(c, row, head + h, start, here, head, next, stop - next, w.keys, w.values);
      for (long i = 0; i < count; i += MOST) {
        const long some = count - i < MOST ? count - i : MOST, at = h * count + i;
        scores_of[pairs][some](w.q + at * dim, w.keys, w.scores, dim, LOG2_E * c->scale);
        for (long r = 0; r < some; r++) {
          const long node = (first + i + r) / groups;
          const long place = c->words ? length + c->depth[row * c->depth_row + c->cells - c->nodes + node] : own + node;
          const uint64_t seen = up_to((place < stop ? place : stop - 1) - start) & within_reach(c, place, start);
          factors[r] = softmax(w.scores + r * KEYS, seen, c->softcap, w.largest + at + r, w.total[at + r], pairs);
        }
        values_of[pairs][some](w.scores, w.values, w.sums + at * wide, factors, wide, pairs ? (here + 1) / 2 : here);
      }
    }
  }
  for (long h = 0; c->words && h < heads; h++)
    attend_tree(c, &w, row, head + h, heads - h, h * count, first, count, stop);
  for (long i = 0; i < heads * count; i++) {
    const long query = first + i % count, node = query / groups, of = (head + i / count) * groups + query % groups;
    const long at = ((row * c->nodes + node) * c->heads + of) * c->value_dim;
    const float all = SUM(LOAD(w.total[i]));
    for (long d = 0; d < wide; d += WIDTH) {
      const vec numbers = LOAD(w.sums + i * wide + d) * ALL(all > 0 ? 1 / all : 0);
      store_some(c->output, at + d, c->value_dim - d, c->dtype, numbers);
    }
  }
}

/* Returns 0 if there is no memory. */
int attend_together(const call *c, loop *l) {
  const long queries = c->nodes * (c->heads / c->key_heads), blocks = (queries + QUERIES - 1) / QUERIES;
  const long each = (queries + blocks - 1) / blocks, dims = filled_up(c->dim) + filled_up(c->value_dim);
  const long of_tree = c->words ? KEYS * filled_up(c->value_dim) + BLOCKS(c) * QUERIES * KEYS + MOST * c->cells : 0;
  const long room = 4 * (KEYS * (dims + MOST) + QUERIES * dims + of_tree), threads = omp_get_num_threads();
  /* As many heads together as there is room for, as long as every thread has a task. */
  long tasks_of_row = (c->key_heads * each + QUERIES - 1) / QUERIES;
  if (tasks_of_row * c->rows * blocks < threads) tasks_of_row = (threads + c->rows * blocks - 1) / (c->rows * blocks);
  long together = (c->key_heads + tasks_of_row - 1) / tasks_of_row;
  if (together > QUERIES / each) together = QUERIES / each;
  const long parts = (c->key_heads + together - 1) / together, tasks = c->rows * parts * blocks;
  float *own = aligned_alloc(64, (room + 63) / 64 * 64);
  if (!own) return 0;
  SHARE(l, tasks, task) {
    const long first = task % blocks * each, head = task / blocks % parts * together;
    const long count = queries - first < each ? queries - first : each;
    const long heads = c->key_heads - head < together ? c->key_heads - head : together;
    if (count > 0) attend_task(c, task / blocks / parts, head, heads, first, count, own);
  }
  free(own);
  return 1;
}

/* What Python calls. Returns 0 if there is no memory. */
int attend(const call *c) {
  loop l = {0};
  int done = 1;
  _Pragma("omp parallel reduction(&:done)")
  done = attend_together(c, &l);
  return done;
}
