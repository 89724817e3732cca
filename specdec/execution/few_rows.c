/* A few rows times a weight matrix, at the speed of the memory: each weight is read from memory once, for all rows.

   A tile is some output channels times some rows. Its sums stay in registers while it walks along the inputs: a step's
   weights are unpacked once and multiplied by every row. Several tiles cover all rows while the weights are in the
   nearest cache.

   Every sum is one register that takes the steps one after the other. So a row's outputs are the same bits whatever the
   number of rows, the place of a channel in its tile, and the number of threads.

   Sums are in float32. `wide` says that inputs and outputs are float32, otherwise bfloat16. For quantized weights, inputs
   are rounded to bfloat16 in either case, and so are the outputs (specdec/quantization/dispatch.py says why).

   Needs AVX2 with FMA, or AVX512 (F, BW, VL); AVX512-BF16 multiplies bfloat16 in pairs. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDTH 16
typedef __m512 vec;
#define ZERO _mm512_setzero_ps
#define LOAD _mm512_loadu_ps
#define FMA _mm512_fmadd_ps
#define MUL _mm512_mul_ps
#define ALL _mm512_set1_ps
#define SUM _mm512_reduce_add_ps
static inline vec from_int8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vec from_bfloat16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
#define CHANNELS 4 /* of a tile: times six rows, they leave registers for the weights and the inputs */
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
typedef __m256 vec;
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define FMA _mm256_fmadd_ps
#define MUL _mm256_mul_ps
#define ALL _mm256_set1_ps
static inline float SUM(vec v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
static inline vec from_int8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
static inline vec from_bfloat16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
#define CHANNELS 2
#else
#error "needs AVX2 with FMA, or AVX512"
#endif

#if WIDTH == 16 && defined(__AVX512BF16__)
#define PAIRS 1 /* bfloat16 is multiplied as it is */
#else
#define PAIRS 0 /* bfloat16 is widened first */
#endif

#define MOST_ROWS 6          /* of a tile */
#define GROUP 64             /* int4 weights that share a scale */
#define LEAST_PARALLEL 65536 /* weights from which threads pay */
#define INLINE static inline __attribute__((always_inline))

INLINE float widened(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float number;
  memcpy(&number, &word, 4);
  return number;
}

INLINE uint16_t narrowed(float number) { /* to the nearest, ties to even */
  uint32_t word;
  memcpy(&word, &number, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
  return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

/* What is to be computed. */
typedef struct {
  const char *numbers; /* [out, row_bytes] */
  long row_bytes;
  const float *scales; /* [out, row_scales], or NULL */
  long row_scales;
  int per_channel;    /* one scale per channel, which is multiplied at the end */
  const void *bias;   /* [out] in the outputs' dtype, or NULL */
  const void *inputs; /* [rows, in] */
  void *outputs;      /* [rows, stride] */
  long out, in, rows, stride;
  int exact; /* everything is float32, and nothing is rounded */
  int wide;  /* inputs and outputs are float32, rounded to bfloat16 */
} job;

/* ---- Formats. Each says for one step along the inputs
     STEP_x     how many inputs it takes,
     BYTES_x    how many bytes of weights,
     input_x    what an input is kept as,
     operand_x  what the weights become: `unpack_x` of one channel's numbers and scales, at a step,
   and `multiply_x` adds the products with a row's inputs to a sum. ---- */

#define STEP_float32 WIDTH
#define BYTES_float32 (4 * WIDTH)
typedef float input_float32;
typedef vec operand_float32;
INLINE vec unpack_float32(const void *numbers, const float *scales, long step) {
  return LOAD((const float *)numbers + step * WIDTH);
}
INLINE vec multiply_float32(vec sum, vec weights, const float *x) { return FMA(weights, LOAD(x), sum); }

#if PAIRS
#define STEP_bfloat16 32
typedef uint16_t input_bfloat16;
typedef __m512i operand_bfloat16;
INLINE __m512i unpack_bfloat16(const void *numbers, const float *scales, long step) {
  return _mm512_loadu_si512((const uint16_t *)numbers + step * 32);
}
INLINE vec multiply_bfloat16(vec sum, __m512i weights, const uint16_t *x) {
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x));
}
#else
#define STEP_bfloat16 WIDTH
typedef float input_bfloat16;
typedef vec operand_bfloat16;
INLINE vec unpack_bfloat16(const void *numbers, const float *scales, long step) {
  return from_bfloat16((const uint16_t *)numbers + step * WIDTH);
}
#define multiply_bfloat16 multiply_float32
#endif
#define BYTES_bfloat16 (2 * STEP_bfloat16)

/* The scale of an int8 channel is multiplied at the end. */
#define STEP_int8 STEP_bfloat16
#define BYTES_int8 STEP_int8
typedef input_bfloat16 input_int8;
typedef operand_bfloat16 operand_int8;
#define multiply_int8 multiply_bfloat16
INLINE operand_int8 unpack_int8(const void *numbers, const float *scales, long step) {
  const int8_t *p = (const int8_t *)numbers + step * STEP_int8;
#if PAIRS
  return (__m512i)_mm512_cvtne2ps_pbh(from_int8(p + 16), from_int8(p)); /* bfloat16 holds every one of them */
#else
  return from_int8(p);
#endif
}

/* A byte of int4 holds the weight of an even place in its upper half, and 8 is added to all. The inputs of a step stand
   apart: first those of the even places, then those of the odd ones. */
#if PAIRS
#define BYTES_int4 32 /* one group; its scale is multiplied with its sum */
typedef uint16_t input_int4;
typedef struct {
  __m512i even, odd;
  vec scale;
} operand_int4;
INLINE operand_int4 unpack_int4(const void *numbers, const float *scales, long step) {
  /* The numbers -8 to 7 in bfloat16, twice: an index has five bits, of which the fifth is any. */
  const __m512i table = _mm512_set_epi64(
      0x40e040c040a04080, 0x404040003f800000, 0xbf80c000c040c080, 0xc0a0c0c0c0e0c100, 0x40e040c040a04080,
      0x404040003f800000, 0xbf80c000c040c080, 0xc0a0c0c0c0e0c100);
  __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)((const uint8_t *)numbers + step * 32)));
  operand_int4 weights = {_mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table),
                          _mm512_permutexvar_epi16(pairs, table), ALL(scales[step])};
  return weights;
}
INLINE vec multiply_int4(vec sum, operand_int4 weights, const uint16_t *x) {
  vec own = _mm512_dpbf16_ps(ZERO(), (__m512bh)weights.even, (__m512bh)_mm512_loadu_si512(x));
  own = _mm512_dpbf16_ps(own, (__m512bh)weights.odd, (__m512bh)_mm512_loadu_si512(x + 32));
  return FMA(own, weights.scale, sum);
}
#else
#define BYTES_int4 WIDTH /* a part of a group; float32 holds every weight times its scale */
typedef float input_int4;
typedef struct {
  vec even, odd;
} operand_int4;
INLINE operand_int4 unpack_int4(const void *numbers, const float *scales, long step) {
  const uint8_t *p = (const uint8_t *)numbers + step * WIDTH;
  vec scale = ALL(scales[step * WIDTH / 32]);
#if WIDTH == 16
  const __m512 table = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
  __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  vec even = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table), odd = _mm512_permutexvar_ps(pairs, table);
#else
  const __m256i eight = _mm256_set1_epi32(8);
  __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  vec even = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(pairs, 4), eight));
  vec odd = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(15)), eight));
#endif
  operand_int4 weights = {MUL(even, scale), MUL(odd, scale)};
  return weights;
}
INLINE vec multiply_int4(vec sum, operand_int4 weights, const float *x) {
  return FMA(weights.odd, LOAD(x + WIDTH), FMA(weights.even, LOAD(x), sum));
}
#endif
#define STEP_int4 (2 * BYTES_int4)

/* ---- Inputs, as the tiles read them. ---- */

INLINE uint16_t rounded_input(const job *j, long at) {
  return j->wide ? narrowed(((const float *)j->inputs)[at]) : ((const uint16_t *)j->inputs)[at];
}

INLINE uint16_t keep_bits(uint16_t bits) { return bits; }
#if PAIRS
#define KEPT keep_bits
#else
#define KEPT widened
#endif

/* `take_x` writes one row's `count` inputs from `at` on for one step, filled up with zeros. */
INLINE void take_float32(float *x, const job *j, long at, long count) {
  for (long i = 0; i < count; i++) x[i] = ((const float *)j->inputs)[at + i];
  for (long i = count; i < STEP_float32; i++) x[i] = 0;
}
INLINE void take_bfloat16(input_bfloat16 *x, const job *j, long at, long count) {
  for (long i = 0; i < count; i++) x[i] = KEPT(rounded_input(j, at + i));
  for (long i = count; i < STEP_bfloat16; i++) x[i] = 0;
}
#define take_int8 take_bfloat16
INLINE void take_int4(input_int4 *x, const job *j, long at, long count) { /* always whole groups */
  for (long i = 0; i < BYTES_int4; i++) {
    x[i] = KEPT(rounded_input(j, at + 2 * i));
    x[BYTES_int4 + i] = KEPT(rounded_input(j, at + 2 * i + 1));
  }
}

/* ---- Tiles. ---- */

/* Writes a tile's outputs from its sums. */
INLINE void finish_here(const job *j, const vec *sums, long first, long row, int channels, int rows) {
  for (long o = first; o < j->out && o < first + channels; o++)
    for (long r = row; r < row + rows; r++) {
      float number = SUM(*sums++);
      long at = r * j->stride + o;
      if (j->per_channel) number *= j->scales[o];
      if (j->exact)
        ((float *)j->outputs)[at] = j->bias ? number + ((const float *)j->bias)[o] : number;
      else {
        uint16_t bits = narrowed(j->bias ? number + widened(((const uint16_t *)j->bias)[o]) : number);
        if (j->wide)
          ((float *)j->outputs)[at] = widened(bits);
        else
          ((uint16_t *)j->outputs)[at] = bits;
      }
    }
}

/* The same, compiled once for all large tiles. */
static __attribute__((noinline)) void finish(const job *j, const vec *sums, long first, long row, int channels,
                                             int rows) {
  finish_here(j, sums, first, row, channels, rows);
}

/* COUNT channels from `first` times ROWS rows from `row`, whose inputs are at `x`. A tile that sticks out below takes the
   last channel several times. The loop takes the whole steps, and meanwhile fetches the next tile's weights in the order
   in which they lie; the second time it takes what is left of the inputs, filled up with zeros. */
#define UNROLL _Pragma("GCC unroll 8")
#define TILE(F, COUNT, ROWS)                                                                       \
  static void F##_##ROWS(const job *j, const input_##F *x, long first, long row) {                 \
    const char *p[COUNT];                                                                          \
    const float *s[COUNT];                                                                         \
    vec sums[COUNT][ROWS];                                                                         \
    char rest[COUNT][BYTES_##F];                                                                   \
    UNROLL for (int c = 0; c < COUNT; c++) {                                                       \
      long o = first + c < j->out ? first + c : j->out - 1;                                        \
      p[c] = j->numbers + o * j->row_bytes;                                                        \
      s[c] = j->scales + o * j->row_scales;                                                        \
      UNROLL for (int r = 0; r < ROWS; r++) sums[c][r] = ZERO();                                   \
    }                                                                                              \
    const char *next = p[0] + COUNT * j->row_bytes;                                                \
    long steps = j->in / STEP_##F;                                                                 \
    for (int left = j->in % STEP_##F;; left = 0) {                                                 \
      for (long step = 0; step < steps; step++, x += ROWS * STEP_##F, next += COUNT * BYTES_##F) { \
        operand_##F w[COUNT];                                                                      \
        UNROLL for (int c = 0; c < COUNT; c++) {                                                   \
          w[c] = unpack_##F(p[c], s[c], step);                                                     \
          _mm_prefetch(next + c * BYTES_##F, _MM_HINT_T0);                                         \
        }                                                                                          \
        UNROLL for (int r = 0; r < ROWS; r++)                                                      \
          UNROLL for (int c = 0; c < COUNT; c++)                                                   \
            sums[c][r] = multiply_##F(sums[c][r], w[c], x + r * STEP_##F);                         \
      }                                                                                            \
      if (!left) break;                                                                            \
      memset(rest, 0, sizeof rest);                                                                \
      for (int c = 0; c < COUNT; c++)                                                              \
        memcpy(rest[c], p[c] + steps * BYTES_##F, j->row_bytes - steps * BYTES_##F);               \
      UNROLL for (int c = 0; c < COUNT; c++) p[c] = rest[c];                                       \
      steps = 1;                                                                                   \
    }                                                                                              \
    vec kept[COUNT][ROWS];                                                                         \
    UNROLL for (int c = 0; c < COUNT; c++)                                                         \
      UNROLL for (int r = 0; r < ROWS; r++) kept[c][r] = sums[c][r];                               \
    if (ROWS == 1)                                                                                 \
      finish_here(j, &kept[0][0], first, row, COUNT, ROWS);                                        \
    else                                                                                           \
      finish(j, &kept[0][0], first, row, COUNT, ROWS);                                             \
  }

/* One row of wide weights is bound by the memory alone, which is fastest channel by channel. */
#define ONE_float32 1
#define ONE_bfloat16 1
#define ONE_int8 CHANNELS
#define ONE_int4 CHANNELS

/* A format's tiles, by their rows, and the loop over all of them. The rows come in parts of almost the same size. A
   part's inputs are laid out in the order in which its tile reads them, [step][row][input], where no vector lies across
   two lines of a cache, and where rows of a power of two of bytes do not all want the same places of it. A single row
   lies so already if it has the format's own type. Returns 0 if there is no memory. */
#define MULTIPLY(F)                                                                                                \
  TILE(F, ONE_##F, 1)                                                                                              \
  TILE(F, CHANNELS, 2) TILE(F, CHANNELS, 3) TILE(F, CHANNELS, 4) TILE(F, CHANNELS, 5) TILE(F, CHANNELS, 6)         \
  static void (*const F##_tiles[])(const job *, const input_##F *, long, long) = {NULL,  F##_1, F##_2, F##_3,      \
                                                                                   F##_4, F##_5, F##_6};           \
  static int multiply_all_##F(const job *j, int as_they_are) {                                                     \
    const long step = STEP_##F, steps = (j->in + step - 1) / step, whole = j->in / step * step;                    \
    const long parts = (j->rows + MOST_ROWS - 1) / MOST_ROWS, each = j->rows / parts, more = j->rows % parts;      \
    const long channels = j->rows == 1 ? ONE_##F : CHANNELS;                                                       \
    const input_##F *x = j->inputs;                                                                                \
    input_##F *laid_out = NULL;                                                                                    \
    if (!as_they_are || j->rows > 1 || whole < j->in) {                                                            \
      x = laid_out = aligned_alloc(64, (j->rows * steps * step * sizeof *x + 63) / 64 * 64);                       \
      if (!x) return 0;                                                                                            \
      for (long part = 0, row = 0; part < parts; part++) {                                                         \
        const long rows = each + (part < more);                                                                    \
        for (long r = 0; r < rows; r++) {                                                                          \
          input_##F *into = laid_out + (row * steps + r) * step;                                                   \
          const long from = (row + r) * j->in;                                                                     \
          for (long k = 0; k < whole; k += step, into += rows * step) take_##F(into, j, from + k, step);           \
          if (whole < j->in) take_##F(into, j, from + whole, j->in - whole);                                       \
        }                                                                                                          \
        row += rows;                                                                                               \
      }                                                                                                            \
    }                                                                                                              \
    _Pragma("omp parallel for if (j->out * j->in >= LEAST_PARALLEL)")                                              \
    for (long first = 0; first < j->out; first += channels)                                                        \
      for (long part = 0, row = 0; part < parts; part++) {                                                         \
        const long rows = each + (part < more);                                                                    \
        F##_tiles[rows](j, x + row * steps * step, first, row);                                                    \
        row += rows;                                                                                               \
      }                                                                                                            \
    free(laid_out);                                                                                                \
    return 1;                                                                                                      \
  }
MULTIPLY(float32)
MULTIPLY(bfloat16)
MULTIPLY(int8)
MULTIPLY(int4)

/* ---- What Python calls. Outputs are [rows, stride], of which `out` columns are written. Each returns 0 if there is no
   memory. ---- */

/* weight[out, in] in float32; bias[out] or NULL. */
int rows_float32(const float *weight, const float *bias, const float *inputs, float *outputs, long out, long in,
                 long rows, long stride) {
  const job j = {.numbers = (const char *)weight, .row_bytes = 4 * in, .bias = bias, .inputs = inputs,
                 .outputs = outputs, .out = out, .in = in, .rows = rows, .stride = stride, .exact = 1};
  return multiply_all_float32(&j, 1);
}

/* Everything in bfloat16. */
int rows_bfloat16(const uint16_t *weight, const uint16_t *bias, const uint16_t *inputs, uint16_t *outputs, long out,
                  long in, long rows, long stride) {
  const job j = {.numbers = (const char *)weight, .row_bytes = 2 * in, .bias = bias, .inputs = inputs,
                 .outputs = outputs, .out = out, .in = in, .rows = rows, .stride = stride};
  return multiply_all_bfloat16(&j, PAIRS);
}

/* weight[out, in] in int8, a scale per output channel. */
int rows_int8(const int8_t *weight, const float *scales, const void *inputs, void *outputs, long out, long in,
              long rows, long stride, int wide) {
  const job j = {.numbers = (const char *)weight, .row_bytes = in, .scales = scales, .row_scales = 1,
                 .per_channel = 1, .inputs = inputs, .outputs = outputs, .out = out, .in = in, .rows = rows,
                 .stride = stride, .wide = wide};
  return multiply_all_int8(&j, PAIRS && !wide);
}

/* weight[out, groups, 32] in int4 pairs, scales[out, groups]. */
int rows_int4(const uint8_t *weight, const float *scales, const void *inputs, void *outputs, long out, long groups,
              long rows, long stride, int wide) {
  const long in = groups * GROUP;
  const job j = {.numbers = (const char *)weight, .row_bytes = in / 2, .scales = scales, .row_scales = groups,
                 .inputs = inputs, .outputs = outputs, .out = out, .in = in, .rows = rows, .stride = stride,
                 .wide = wide};
  return multiply_all_int4(&j, 0);
}
