/* Rows times a weight matrix, for any number of rows: the weights are read from memory once for up to GROUP_ROWS of them.

   The weights lie in panels of PANEL output channels. Within a panel they come in the order in which they are used: the
   first two inputs of all channels, the next two, and so on. A tile is a panel times up to six rows. Its sums stay in
   registers, with neighbouring channels in one vector, while it walks along the inputs: a step multiplies the weights of
   two inputs by the rows' own numbers. For one row that is bound by the memory. For more, a block of the panel is used
   again while it is in the nearest cache, and meanwhile the next block is fetched.

   Every sum is one lane of a register that takes the inputs one after the other. So a row's outputs are the same bits
   whatever the number of rows, its place among them, and the number of threads.

   Sums are in float32. Where inputs and outputs are float32 and the weights are not quantized, nothing is rounded.
   Otherwise inputs are bfloat16, or are rounded to it, and so are the outputs (specdec/quantization/base.py says
   why). */

#include "calls.h"
#include "vectors.h"

#define VECTORS 4 /* of a panel */
#define PANEL (VECTORS * WIDTH)
#define MOST_ROWS 6 /* of a tile */
#define PART(ROWS) (WIDTH == 16 || ROWS < 3 ? VECTORS : 2) /* vectors at a time, whose sums fit into the registers */
#define GROUP_ROWS 64                      /* rows for which a block of weights is used again */
#define BLOCK 96                           /* pairs of inputs: the numbers of a block fit into the nearest cache */
#define GROUP 32                           /* pairs of inputs of int4 weights that share a scale */

/* ---- Formats. A pair is the weights of a panel for two inputs. `even_x` and `odd_x` return some channels' weights for
   the first and the second input as float32; `both_x` returns both in bfloat16, side by side. ---- */

#define BYTES_float32 (8 * PANEL) /* all channels for the first input, all for the second */
#define even_float32(p, v) LOAD((const float *)(p) + (v) * WIDTH)
#define odd_float32(p, v) LOAD((const float *)(p) + PANEL + (v) * WIDTH)

#define BYTES_float16 (4 * PANEL) /* likewise */
#define even_float16(p, v) load_float16((const uint16_t *)(p) + (v) * WIDTH)
#define odd_float16(p, v) load_float16((const uint16_t *)(p) + PANEL + (v) * WIDTH)

#define BYTES_bfloat16 (4 * PANEL) /* both inputs of a channel side by side */
#define even_bfloat16(p, v) FLOATS(LEFT(load_words((const uint16_t *)(p) + 2 * (v) * WIDTH), 16))
#if WIDTH == 16
#define odd_bfloat16(p, v) FLOATS(IAND(load_words((const uint16_t *)(p) + 2 * (v) * WIDTH), IALL(0xffff0000)))
#else /* the mask would take a register that six rows need */
#define odd_bfloat16(p, v) FLOATS(LEFT(RIGHT(load_words((const uint16_t *)(p) + 2 * (v) * WIDTH), 16), 16))
#endif
#define both_bfloat16(p, v) load_words((const uint16_t *)(p) + 2 * (v) * WIDTH)

#define BYTES_int8 (2 * PANEL) /* both inputs of a channel side by side; the channel's scale is multiplied at the end */
#define even_int8(p, v) TO_FLOAT(SIGNED_RIGHT(LEFT(load_int16((const int8_t *)(p) + 2 * (v) * WIDTH), 24), 24))
#define odd_int8(p, v) TO_FLOAT(SIGNED_RIGHT(load_int16((const int8_t *)(p) + 2 * (v) * WIDTH), 8))

/* A lane's word has four bits for each vector, in its lower half for the first input and in its upper half for the
   second. */
#define BYTES_int4 PANEL
#define four_bits(p, first) TO_FLOAT(SIGNED_RIGHT(LEFT(load_words(p), 28 - (first)), 28))
#define even_int4(p, v) four_bits(p, 4 * (v))
#define odd_int4(p, v) four_bits(p, 16 + 4 * (v))

#if PAIRS && defined(__AVX512VBMI__)
/* The two bytes of the numbers 0 to 127 in bfloat16, which holds every one of them. */
static uint8_t low_byte[128], high_byte[128];
__attribute__((constructor)) static void fill_bytes(void) {
  for (int number = 0; number < 128; number++) {
    const ivec words = BITS(ALL(number));
    low_byte[number] = ((const uint8_t *)&words)[2], high_byte[number] = ((const uint8_t *)&words)[3];
  }
}
INLINE ivec looked_up(const uint8_t *table, ivec numbers) {
  return _mm512_permutex2var_epi8(load_words(table), numbers, load_words(table + 64));
}
INLINE ivec both_int8(const char *panel, int v) {
  /* Two vectors at once; the halves of both are interleaved where they are put together. */
  const ivec order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  const ivec numbers = _mm512_permutexvar_epi64(order, load_words(panel + 2 * (v & ~1) * WIDTH));
  const ivec size = _mm512_abs_epi8(numbers), low = looked_up(low_byte, size), sign = _mm512_set1_epi8((char)128);
  const ivec high = looked_up(high_byte, size) | IAND(numbers, sign);
  return v & 1 ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
}
#elif PAIRS
#define both_int8(p, v) (RIGHT(BITS(even_int8(p, v)), 16) | IAND(BITS(odd_int8(p, v)), IALL(0xffff0000)))
#endif
#if PAIRS
INLINE ivec both_int4(const char *panel, int v) {
  /* The numbers 0 to 7 and -8 to -1 in bfloat16, twice: an index has five bits, of which the fifth is the next vector's. */
  const ivec table = _mm512_set_epi64(
      0xbf80c000c040c080, 0xc0a0c0c0c0e0c100, 0x40e040c040a04080, 0x404040003f800000, 0xbf80c000c040c080,
      0xc0a0c0c0c0e0c100, 0x40e040c040a04080, 0x404040003f800000);
  const ivec words = load_words(panel);
  return _mm512_permutexvar_epi16(v ? _mm512_srli_epi16(words, 4 * v) : words, table);
}
#endif

/* ---- Tiles: ROWS rows at `x`, which are `stride` inputs apart, times `pairs` pairs of a panel at `p`. Adds to `sums`
   [row][channel], or begins them. Sums of a group are multiplied with its `scales` first. Fetches `lines` lines of the
   cache from `next` on with every pair. ---- */

typedef void tile(const char *p, const void *x, long stride, float *sums, long pairs, int begin, const float *scales,
                  const char *next, long lines);

#define WALK(F, ROWS, T, STEP)                                                                              \
  const T *rows = x;                                                                                        \
  for (int first = 0; first < VECTORS; first += PART(ROWS)) {                                               \
    vec s[ROWS][PART(ROWS)];                                                                                \
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART(ROWS); v++) s[r][v] =             \
        begin || scales ? ZERO() : LOAD(sums + r * PANEL + (first + v) * WIDTH);                            \
    /* Each walk along the inputs fetches its share: if one fetched all, the memory would idle in the others. */ \
    const long share = 64 * lines * PART(ROWS) / VECTORS;                                                   \
    const char *at = p, *ahead = next + first / PART(ROWS) * pairs * share;                                 \
    for (long k = 0; k < pairs; k++, at += BYTES_##F, ahead += share) {                                     \
      for (long line = 0; line < share; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);                \
      STEP                                                                                                  \
    }                                                                                                       \
    UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int v = 0; v < PART(ROWS); v++) {                     \
      float *into = sums + r * PANEL + (first + v) * WIDTH;                                                 \
      if (scales) s[r][v] = begin ? (vec)(s[r][v] * LOAD(scales + (first + v) * WIDTH))                     \
                                  : FMA(s[r][v], LOAD(scales + (first + v) * WIDTH), LOAD(into));           \
      STORE(into, s[r][v]);                                                                                 \
    }                                                                                                       \
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

#define IN_PAIRS(F, ROWS)                                                                                   \
  __m512bh w[VECTORS];                                                                                      \
  UNROLL for (int v = 0; v < VECTORS; v++) w[v] = (__m512bh)both_##F(at, v);                                \
  UNROLL for (int r = 0; r < ROWS; r++) {                                                                   \
    int both;                                                                                               \
    memcpy(&both, rows + r * stride + 2 * k, 4);                                                            \
    const __m512bh number = (__m512bh)IALL(both);                                                           \
    UNROLL for (int v = 0; v < VECTORS; v++) s[r][v] = _mm512_dpbf16_ps(s[r][v], w[v], number);             \
  }

#define PAIR_TILE(F, ROWS)                                                                                  \
  static void F##_pairs_##ROWS(const char *p, const void *x, long stride, float *sums, long pairs,          \
                               int begin, const float *scales, const char *next, long lines) {              \
    WALK(F, ROWS, uint16_t, IN_PAIRS(F, ROWS))                                                              \
  }

/* What a format needs: its tiles; and for quantized weights how a block is unpacked, and into what. */
typedef struct format {
  long bytes; /* of a pair */
  tile *tiles[7]; /* by their rows */
  void (*unpack)(const char *p, float *into, long pairs);
  const struct format *unpacked;
} format;

#define FORMAT(F)  \
  EVERY(TILE, F)     \
  static const format of_##F = {BYTES_##F, ALL_OF(F), NULL, NULL};
FORMAT(float32)
FORMAT(float16)
FORMAT(bfloat16)

#define UNPACKING(F, MAKE, NAME, WIDE, WRITE)                                                 \
  EVERY(MAKE, F)                                                                              \
  static void unpack_##F(const char *restrict p, float *restrict into, long pairs) {          \
    for (long k = 0; k < pairs; k++, p += BYTES_##F, into += WIDE.bytes / 4)                  \
      UNROLL for (int v = 0; v < VECTORS; v++) { WRITE; }                                     \
  }                                                                                           \
  static const format of_##F = {BYTES_##F, ALL_OF(NAME), unpack_##F, &WIDE};
#if PAIRS
EVERY(PAIR_TILE, bfloat16)
static const format pairs_of_bfloat16 = {BYTES_bfloat16, ALL_OF(bfloat16_pairs), NULL, NULL};
#define WRITE_PAIRS(F) STORE(into + v * WIDTH, FLOATS(both_##F(p, v)))
#define QUANTIZED(F) UNPACKING(F, PAIR_TILE, F##_pairs, pairs_of_bfloat16, WRITE_PAIRS(F))
#else
/* In bfloat16, which holds them: a block of float32 would fill the nearest cache. */
#define HALVES(F) RIGHT(BITS(even_##F(p, v)), 16) | IAND(BITS(odd_##F(p, v)), IALL(0xffff0000))
#define QUANTIZED(F) UNPACKING(F, TILE, F, of_bfloat16, STORE(into + v * WIDTH, FLOATS(HALVES(F))))
#endif
QUANTIZED(int8)
QUANTIZED(int4)

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
  long item;        /* bytes of a number of x */
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
  float unpacked[BLOCK * BYTES_float32 / 4] __attribute__((aligned(64)));
  if (j->tiled) set_up_tiles(same);
  for (long k = 0; k < pairs; k += BLOCK) {
    const long count = pairs - k < BLOCK ? pairs - k : BLOCK, step = j->grouped ? GROUP : count;
    const char *next = p + (again ? 0 : count * f->bytes), *numbers = p;
    const format *used = f;
    if (f->unpack && (j->tiled || parts > 3)) { /* fewer unpack in registers */
      f->unpack(p, unpacked, count);
      numbers = (const char *)unpacked, used = f->unpacked;
    }
    for (long part = 0, r = 0; part < parts; part++) {
      const long some = same ? same : part + 1 == parts ? rows - r : each + (part < more) + (part ? 0 : first);
      const long from = row + (r == apart ? rows - same : r);
      for (long g = 0; g < count; g += step, next += 64 * lines * step)
        (same ? multiply_part : used->tiles[some])(
            numbers + g * used->bytes, (const char *)j->x + (from * j->in + 2 * (k + g)) * j->item, j->in,
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

/* ---- What Python calls. ---- */

/* Returns the channels of a panel. */
int panel_channels(void) { return PANEL; }

/* Words: panels, scales, bias, x, y; out, in, width, rows; format, kind. Writes y[rows, out], the product of x[rows, in]
   with panels of `width` inputs, at least as many. `room` is for 4 * rows * width bytes. */
void multiply(const word *w, char *const *places, void *room, loop l[2]) {
  const format *const formats[] = {&of_float32, &of_bfloat16, &of_float16, &of_int8, &of_int4};
  const long out = w[5].integer, in = w[6].integer, width = w[7].integer, rows = w[8].integer;
  const int number = w[9].integer, kind = w[10].integer;
  const void *x = address(places, w[3]);
  job j = {.format = formats[number], .panels = address(places, w[0]), .scales = address(places, w[1]),
           .grouped = number == INT4, .bias = address(places, w[2]), .x = x, .item = PAIRS && kind != EXACT ? 2 : 4,
           .y = address(places, w[4]), .out = out, .in = width, .rows = rows, .kind = kind};
#if PAIRS
  if (kind != EXACT && number == BFLOAT16) j.format = &pairs_of_bfloat16;
#endif
  if (in != width || kind == ROUNDED || (kind == HALF && !PAIRS)) {
    j.x = room;
    SHARE(l, rows, row) /* as the tiles read it: in their type, and filled up with zeros */
      for (long i = 0; i < width; i += WIDTH) {
        const vec numbers = load_some(x, row * in + i, in - i, kind == HALF ? BFLOAT16 : FLOAT32);
        store_some(room, row * width + i, width - i, j.item == 2 ? BFLOAT16 : FLOAT32,
                   rounded(numbers, kind == ROUNDED ? BFLOAT16 : FLOAT32));
      }
  }
  /* In models of float32 no row may have other bits than the rest. */
  j.tiled = least_rows && rows >= least_rows && (kind == HALF || (kind == ROUNDED && least_rows == 1));
  const long most = j.tiled ? GROUP_ROWS : GROUP_ROWS / MOST_ROWS * MOST_ROWS;
  SHARE(l + 1, (out + PANEL - 1) / PANEL, panel)
    for (long row = 0; row < rows; row += most) {
      const long some = rows - row < most ? rows - row : most;
      multiply_panel(&j, panel, row, some, row + some < rows);
    }
}
