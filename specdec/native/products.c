/* Rows times a weight matrix, for any number of rows: the weights are read from memory once for up to GROUP_ROWS of them.

   The weights lie in panels of PANEL output channels. Within a panel they come in the order in which they are used: the
   first two inputs of all channels, the next two, and so on. A tile is a panel times up to six rows. Its sums stay in
   registers, with neighbouring channels in one vector, while it walks along the inputs: a step multiplies the weights of
   two inputs by the rows' own numbers. For one row that is bound by the memory. For more, a block of the panel is used
   again while it is in the nearest cache, and meanwhile the next block is fetched.

   Every sum is one lane of a register that takes the inputs one after the other. So a row's outputs are the same bits
   whatever the number of rows, its place among them, and the number of threads.

   Sums are in float32. Where inputs and outputs are float32 and the weights are not quantized, nothing is rounded.
   Otherwise inputs are bfloat16, or are rounded to it, and so are the outputs (specdec/quantization/base.py says why).
   Inputs of quantized weights are integers, too, outside of tiles.h: of 16 bits, for 64 inputs times a power of two. */

#include "calls.h"
#include "vectors.h"

#define VECTORS 4 /* of a panel */
#define PANEL (VECTORS * WIDTH)
#define MOST_ROWS 6 /* of a tile */
#define PART(ROWS) (WIDTH == 16 || ROWS < 3 ? VECTORS : 2) /* vectors at a time, whose sums fit into the registers */
#define GROUP_ROWS 64                      /* rows for which a block of weights is used again */
#define BLOCK 96                           /* pairs of inputs: the numbers of a block fit into the nearest cache */
#define GROUP 32                           /* pairs of inputs that share a scale */

/* ---- Formats. A pair is the weights of a panel for two inputs. `even_x` and `odd_x` return some channels' weights for
   the first and the second input as float32; `both_x` returns both side by side, in bfloat16 or as integers. ---- */

#define BYTES_float32 (8 * PANEL) /* all channels for the first input, all for the second */
#define even_float32(p, v) LOAD((const float *)(p) + (v) * WIDTH)
#define odd_float32(p, v) LOAD((const float *)(p) + PANEL + (v) * WIDTH)

#define BYTES_float16 (4 * PANEL) /* likewise */
#define even_float16(p, v) load_float16((const uint16_t *)(p) + (v) * WIDTH)
#define odd_float16(p, v) load_float16((const uint16_t *)(p) + PANEL + (v) * WIDTH)

#define BYTES_bfloat16 (4 * PANEL) /* both inputs of a channel side by side */
#define even_bfloat16(p, v) FLOATS(LEFT(load_words((const uint16_t *)(p) + 2 * (v) * WIDTH), 16))
#if WIDTH == 16
#define odd_bfloat16(p, v) FLOATS(load_words((const uint16_t *)(p) + 2 * (v) * WIDTH) & IALL(0xffff0000))
#else /* the mask would take a register that six rows need */
#define odd_bfloat16(p, v) FLOATS(LEFT(RIGHT(load_words((const uint16_t *)(p) + 2 * (v) * WIDTH), 16), 16))
#endif
#define both_bfloat16(p, v) load_words((const uint16_t *)(p) + 2 * (v) * WIDTH)

/* Integers: of 16 bits, for the first input in a word's lower half; of 8 bits, likewise; of 4 bits, plus 8, for each
   vector, the first one's lowest, in either half: every other vector's are multiplied where they are, 16 times as large. */
#define BYTES_int16 (4 * PANEL)
#define both_int16(p, v) load_words((const float *)(p) + (v) * WIDTH)
#define BYTES_int8 (2 * PANEL)
#define both_int8(p, v) load_int8((const int8_t *)(p) + 2 * (v) * WIDTH)
#define BYTES_int4 PANEL
#define both_int4(p, v) ((ivec)((signed_halves)load_words(p) >> 4 * ((v) & 2)) & IALL((v) & 1 ? 0xf000f0 : 0xf000f))

/* ---- Tiles: ROWS rows at `x`, which are `stride` inputs apart, times `pairs` pairs of a panel at `p`. Adds to `sums`
   [row][channel], or begins them. Sums of a group of integers are multiplied with its `scales` first. Fetches `lines`
   lines of the cache from `next` on with every pair. ---- */

typedef void tile(const char *p, const void *x, long stride, float *sums, long pairs, int begin, const float *scales,
                  const char *next, long lines);

#define WALK(F, ROWS, T, STEP)                                                                              \
  const T *rows = x;                                                                                        \
  for (int first = 0; first < VECTORS; first += PART(ROWS)) {                                               \
    vec s[ROWS][PART(ROWS)];                                                                                \
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART(ROWS); v++) s[r][v] =             \
        begin ? ZERO() : LOAD(sums + r * PANEL + (first + v) * WIDTH);                                      \
    const long share = 64 * lines * PART(ROWS) / VECTORS; /* for each walk along the inputs */              \
    const char *at = p, *ahead = next + first / PART(ROWS) * pairs * share;                                 \
    for (long k = 0; k < pairs; k++, at += BYTES_##F, ahead += share) {                                     \
      for (long line = 0; line < share; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);                \
      STEP                                                                                                  \
    }                                                                                                       \
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART(ROWS); v++)                       \
        STORE(sums + r * PANEL + (first + v) * WIDTH, s[r][v]);                                             \
  }

#define IN_FLOAT(F, ROWS, WHICH, NUMBER)                                                                    \
  UNROLL for (int v = 0; v < PART(ROWS); v++) w[v] = WHICH##_##F(at, first + v);                            \
  UNROLL for (int r = 0; r < ROWS; r++) {                                                                   \
    const vec number = ALL(rows[r * stride + 2 * k + NUMBER]);                                              \
    UNROLL for (int v = 0; v < PART(ROWS); v++) s[r][v] = FMA(w[v], number, s[r][v]);                       \
  }

/* Where registers are few, weights are read again for the second input, so that no sum has to leave. */
#define FORGET(ROWS) if (WIDTH == 8 && ROWS == 6) __asm__ volatile("" ::: "memory")
#define TILE(F, ROWS)                                                                                       \
  static void F##_##ROWS(const char *p, const void *x, long stride, float *sums, long pairs, int begin,     \
                         const float *scales, const char *next, long lines) {                               \
    WALK(F, ROWS, float, vec w[PART(ROWS)]; IN_FLOAT(F, ROWS, even, 0) FORGET(ROWS); IN_FLOAT(F, ROWS, odd, 1)) \
  }

#define PAIR_TILE(F, ROWS)                                                                                  \
  static void F##_pairs_##ROWS(const char *p, const void *x, long stride, float *sums, long pairs,          \
                               int begin, const float *scales, const char *next, long lines) {              \
    WALK(F, ROWS, uint16_t, __m512bh w[VECTORS]; int both;                                                  \
      UNROLL for (int v = 0; v < VECTORS; v++) w[v] = (__m512bh)both_##F(at, v);                            \
      UNROLL for (int r = 0; r < ROWS; r++) {                                                               \
        memcpy(&both, rows + r * stride + 2 * k, 4);                                                        \
        UNROLL for (int v = 0; v < VECTORS; v++) s[r][v] = _mm512_dpbf16_ps(s[r][v], w[v], (__m512bh)IALL(both)); \
      })                                                                                                    \
  }

/* Inputs as integers, a group after the other, each with what they are multiplied by. A group's sums are exact. */
typedef struct {
  int numbers[GROUP], start; /* of 16 bits, in pairs; -8 times their sum */
  float step;
} group_of_inputs;

#define KEPT(S) __asm__ volatile("" : "+v"(S)) /* in its register: else compilers move all sums to memory */
#define INTEGER_TILE(F, ROWS)                                                                               \
  static void F##_##ROWS(const char *p, const void *x, long stride, float *sums, long pairs, int begin,     \
                         const float *scales, const char *next, long lines) {                               \
    const long share = 64 * lines * PART(ROWS) / VECTORS, apart = stride / (2 * GROUP);                     \
    UNROLL for (int first = 0; first < VECTORS; first += PART(ROWS)) {                                      \
      const group_of_inputs *rows = x;                                                                      \
      const char *at = p;                                                                                   \
      for (long g = 0; g < pairs / GROUP; g++, rows++) {                                                    \
        ivec w[PART(ROWS)], s[ROWS][PART(ROWS)], done[ROWS][PART(ROWS)];                                    \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART(ROWS); v++) s[r][v] =         \
            IALL(BYTES_##F == BYTES_int4 ? rows[r * apart].start * (v & 1 ? 16 : 1) : 0);                   \
        for (long k = 0; k < GROUP; k++, at += BYTES_##F, next += share) {                                  \
          for (long line = 0; line < share; line += 64) _mm_prefetch(next + line, _MM_HINT_T0);             \
          UNROLL for (int v = 0; v < PART(ROWS); v++) w[v] = both_##F(at, first + v);                       \
          UNROLL for (int r = 0; r < ROWS; r++) {                                                           \
            const ivec both = IALL(rows[r * apart].numbers[k]);                                             \
            UNROLL for (int v = 0; v < PART(ROWS); v++) s[r][v] = ADD_PAIRS(s[r][v], w[v], both);           \
            UNROLL for (int v = 0; v < PART(ROWS); v++) KEPT(s[r][v]);                                      \
          }                                                                                                 \
        }                                                                                                   \
        UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART(ROWS); v++) done[r][v] = s[r][v]; \
        __asm__ volatile("" ::"r"(done) : "memory");                                                        \
        for (int r = 0; r < ROWS; r++) for (int v = 0; v < PART(ROWS); v++) {                               \
          float *into = sums + r * PANEL + (first + v) * WIDTH;                                             \
          vec factor = ALL(rows[r * apart].step / (BYTES_##F == BYTES_int4 && v & 1 ? 16 : 1));             \
          if (scales) factor *= LOAD(scales + g * PANEL + (first + v) * WIDTH);                             \
          STORE(into, FMA(TO_FLOAT(done[r][v]), factor, begin && !g ? ZERO() : LOAD(into)));                \
        }                                                                                                   \
      }                                                                                                     \
    }                                                                                                       \
  }

/* What a format needs: its tiles; and for small integers how a block is unpacked into larger ones. */
typedef struct format {
  long bytes; /* of a pair */
  tile *tiles[7]; /* by their rows */
  void (*unpack)(const char *p, float *into, long pairs);
} format;

#define FORMAT(MAKE, F, NAME, UNPACK) \
  EVERY(MAKE, F)                      \
  static const format of_##NAME = {BYTES_##F, ALL_OF(NAME), UNPACK};
#define UNPACKING(F, WORDS)                                                                                 \
  static void unpack_##F(const char *restrict p, float *restrict into, long pairs) {                        \
    for (long k = 0; k < pairs; k++, p += BYTES_##F, into += PANEL)                                         \
      UNROLL for (int v = 0; v < VECTORS; v++) STORE(into + v * WIDTH, FLOATS(WORDS));                      \
  }
UNPACKING(int8, both_int8(p, v))
UNPACKING(int4, (ivec)((signed_halves)(load_words(p) ^ IALL(0x88888888)) << (12 - 4 * v) >> 12))
FORMAT(TILE, float32, float32, NULL)
FORMAT(TILE, float16, float16, NULL)
FORMAT(TILE, bfloat16, bfloat16, NULL)
#if PAIRS
FORMAT(PAIR_TILE, bfloat16, bfloat16_pairs, NULL)
#endif
FORMAT(INTEGER_TILE, int16, int16, NULL)
FORMAT(INTEGER_TILE, int8, int8, unpack_int8)
FORMAT(INTEGER_TILE, int4, int4, unpack_int4)

/* Integers that bfloat16 holds, in it. */
INLINE vec in_bfloat16(const float *p) {
  const ivec first = BITS(TO_FLOAT(SIGNED_RIGHT(LEFT(load_words(p), 16), 16)));
  return FLOATS(RIGHT(first, 16) | BITS(TO_FLOAT(SIGNED_RIGHT(load_words(p), 16))));
}

#include "tiles.h"

/* ---- All tiles. ---- */

enum { EXACT, HALF, ROUNDED }; /* inputs and outputs are float32; bfloat16; float32 that is rounded to bfloat16 */

typedef struct {
  const format *format;
  const char *panels;
  const float *scales; /* [out] or, for int4, [panel][group][channel]; or NULL */
  int grouped;
  const void *bias; /* [out] in the outputs' dtype, or NULL */
  const void *x;    /* [rows, in], as the tiles read them */
  long item;        /* bytes of 64 numbers of x */
  void *y;          /* [rows, out] */
  long out, in, rows;
  int kind, tiled;
} job;

/* Rows' sums of a panel whose first channel is `first`, scaled, with the bias, in the outputs' dtype. */
static void finish(const job *j, const float *sums, long first, long row, long rows) {
  const long channels = j->out - first < PANEL ? j->out - first : PANEL;
  for (long r = 0; r < rows; r++, sums += PANEL)
    for (long c = 0; c < channels; c += WIDTH) {
      vec numbers = LOAD(sums + c);
      if (j->scales && !j->grouped) numbers *= load_some(j->scales, first + c, channels - c, FLOAT32);
      /* Products with quantized weights are rounded before the bias is added. */
      if (j->kind == ROUNDED || (j->scales && j->bias)) numbers = rounded(numbers, BFLOAT16);
      if (j->bias) numbers += load_some(j->bias, first + c, channels - c, j->kind == HALF ? BFLOAT16 : FLOAT32);
      store_some(j->y, (row + r) * j->out + first + c, channels - c, j->kind == HALF ? BFLOAT16 : FLOAT32, numbers);
    }
}

/* A panel times up to GROUP_ROWS rows from `row`. `again` says that the panel is used for others afterwards. */
static void multiply_panel(const job *j, long panel, long row, long rows, int again) {
  const format *f = j->format;
  const long most = j->tiled ? LINES : MOST_ROWS, parts = (rows + most - 1) / most;
  const long pairs = j->in / 2, groups = pairs / GROUP, each = rows / parts, more = rows % parts;
  /* The sums of three rows are too few for two units that take four cycles each: one tile has four or five, one two. */
  const long first = WIDTH == 8 && each == 3 && parts > 1;
  /* Tiles are set up once, for parts of one size: the last part begins early enough, and its sums are kept apart. */
  const long same = j->tiled ? each + (more > 0) : 0, apart = j->tiled ? (parts - 1) * same : rows;
  const char *p = j->panels + panel * pairs * f->bytes;
  const long lines = (f->bytes + 64 * parts - 1) / (64 * parts);
  float sums[GROUP_ROWS * PANEL] __attribute__((aligned(64)));
  float unpacked[BLOCK * PANEL] __attribute__((aligned(64)));
  if (j->tiled) set_up_tiles(same);
  for (long k = 0; k < pairs; k += BLOCK) {
    const long count = pairs - k < BLOCK ? pairs - k : BLOCK, step = j->tiled && j->grouped ? GROUP : count;
    const char *next = p + (again ? 0 : count * f->bytes), *numbers = p;
    const format *used = f;
    if (f->unpack && (j->tiled || parts > 2)) { /* fewer unpack in registers */
      f->unpack(p, unpacked, count);
      for (long i = 0; j->tiled && i < count * PANEL; i += WIDTH) STORE(unpacked + i, in_bfloat16(unpacked + i));
      numbers = (const char *)unpacked, used = &of_int16;
    }
    for (long part = 0, r = 0; part < parts; part++) {
      const long some = same ? same : part + 1 == parts ? rows - r : each + (part < more) + (part ? 0 : first);
      const long from = row + (r == apart ? rows - same : r);
      for (long g = 0; g < count; g += step, next += 64 * lines * step)
        (same ? multiply_part : used->tiles[some])(
            numbers + g * used->bytes, (const char *)j->x + (from * j->in + 2 * (k + g)) * j->item / 64, j->in,
            sums + r * PANEL, step, k + g == 0,
            j->grouped ? j->scales + (panel * groups + (k + g) / GROUP) * PANEL : NULL, next, lines);
      r += some;
    }
    p += count * f->bytes;
  }
  if (j->tiled) _tile_release();
  finish(j, sums, panel * PANEL, row, apart);
  finish(j, sums + apart * PANEL, panel * PANEL, row + rows - same, same);
}

/* A group of `count` inputs from x[at] on. What bfloat16 holds is kept as it is down to 2 ** -7 of the largest one. */
static void to_integers(const void *x, long at, long count, int dtype, group_of_inputs *group) {
  vec numbers[2 * GROUP / WIDTH];
  ivec sizes = IALL(0);
  for (long i = 0; i < 2 * GROUP; i += WIDTH) {
    numbers[i / WIDTH] = rounded(load_some(x, at + i, count - i, dtype), dtype == FLOAT32 ? BFLOAT16 : FLOAT32);
    sizes = IMAX(sizes, BITS(numbers[i / WIDTH]) & IALL(0x7fffffff));
  }
  int largest = 0;
  for (int i = 0; i < WIDTH; i++) largest = ((signed_words)sizes)[i] > largest ? ((signed_words)sizes)[i] : largest;
  const int exponent = largest >> 23, one = exponent > 14 ? exponent - 14 : 1; /* the largest one gets 15 bits */
  for (long i = 0; i < 2 * GROUP; i += WIDTH)
    store_int16(&group->numbers[i / 2], TO_INT(numbers[i / WIDTH] * FLOATS(IALL((254 - one) << 23))) & IALL(0xffff));
  group->start = 0;
  for (int i = 0; i < GROUP; i++) group->start -= 8 * ((int16_t)group->numbers[i] + (group->numbers[i] >> 16));
  group->step = FLOATS(IALL(exponent == 255 ? 0x7fc00000 : one << 23))[0]; /* NaN */
}

/* ---- What Python calls. ---- */

int panel_channels(void) { return PANEL; }

/* Words: panels, scales, bias, x, y; out, in, width, rows; format, kind. Writes y[rows, out], the product of x[rows, in]
   with panels of `width` inputs, at least as many. `room` is for 4 * rows * width bytes. */
void multiply(const word *w, char *const *places, void *room, loop l[2]) {
  const format *const formats[] = {&of_float32, &of_bfloat16, &of_float16, &of_int8, &of_int4};
  const long out = w[5].integer, in = w[6].integer, width = w[7].integer, rows = w[8].integer;
  const int number = w[9].integer, kind = w[10].integer;
  const void *x = address(places, w[3]);
  job j = {.format = formats[number], .panels = address(places, w[0]), .scales = address(places, w[1]),
           .grouped = number == INT4, .bias = address(places, w[2]), .x = x, .y = address(places, w[4]), .out = out,
           .in = width, .rows = rows, .kind = kind};
  /* In models of float32 no row may have other bits than the rest. */
  j.tiled = least_rows && rows >= least_rows && (kind == HALF || (kind == ROUNDED && least_rows == 1));
  const int integers = number >= INT8 && !j.tiled, half = kind == HALF ? BFLOAT16 : FLOAT32;
  const int pairs = kind != EXACT && (j.tiled || in_pairs(BFLOAT16));
  j.item = integers ? sizeof(group_of_inputs) : pairs ? 128 : 256;
#if PAIRS
  if (pairs && number == BFLOAT16) j.format = &of_bfloat16_pairs;
#endif
  if (integers || in != width || kind == ROUNDED || (kind == HALF && !pairs)) {
    j.x = room;
    SHARE(l, rows, row) /* as the tiles read it: in their type, and filled up with zeros */
      for (long i = 0; i < width; i += integers ? 2 * GROUP : WIDTH)
        if (integers)
          to_integers(x, row * in + i, in - i, half, (group_of_inputs *)room + (row * width + i) / (2 * GROUP));
        else
          store_some(room, row * width + i, width - i, j.item == 128 ? BFLOAT16 : FLOAT32,
                     rounded(load_some(x, row * in + i, in - i, half), kind == ROUNDED ? BFLOAT16 : FLOAT32));
  }
  const long most = j.tiled ? GROUP_ROWS : GROUP_ROWS / MOST_ROWS * MOST_ROWS;
  SHARE(l + 1, (out + PANEL - 1) / PANEL, panel)
    for (long row = 0; row < rows; row += most) {
      const long some = rows - row < most ? rows - row : most;
      multiply_panel(&j, panel, row, some, row + some < rows);
    }
}
