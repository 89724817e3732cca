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
#define MOST_ROWS 12 /* rows of a tile: two channels times as many sums leave registers for the weights */
#define MOST_ROWS_OF_FOUR 6 /* the same with four channels */
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
#define MOST_ROWS 6
#define MOST_ROWS_OF_FOUR 2
#else
#error "needs AVX2 with FMA, or AVX512"
#endif

#if WIDTH == 16 && defined(__AVX512BF16__)
#define PAIRS 1 /* bfloat16 is multiplied as it is */
#else
#define PAIRS 0 /* bfloat16 is widened first */
#endif

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
static __attribute__((noinline)) void finish(const job *j, const vec *sums, long first, long row, int channels,
                                             int rows) {
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

/* CHANNELS channels from `first` times ROWS rows from `row`. A tile that sticks out below takes the last channel several
   times. The first loop takes the whole steps, and meanwhile fetches the weights of the next tile; the second time it
   takes what is left, filled up with zeros. */
#define UNROLL _Pragma("GCC unroll 16")
#define TILE(FORMAT, CHANNELS, ROWS)                                                                      \
  static void FORMAT##_##CHANNELS##_##ROWS(const job *j, const input_##FORMAT *x, long first, long row) { \
    const char *p[CHANNELS];                                                                              \
    const float *s[CHANNELS];                                                                             \
    vec sums[CHANNELS][ROWS];                                                                             \
    char rest[CHANNELS][BYTES_##FORMAT];                                                                  \
    UNROLL for (int c = 0; c < CHANNELS; c++) {                                                           \
      long o = first + c < j->out ? first + c : j->out - 1;                                               \
      p[c] = j->numbers + o * j->row_bytes;                                                               \
      s[c] = j->scales + o * j->row_scales;                                                               \
      UNROLL for (int r = 0; r < ROWS; r++) sums[c][r] = ZERO();                                          \
    }                                                                                                     \
    long steps = j->in / STEP_##FORMAT, ahead = CHANNELS * j->row_bytes;                                  \
    for (int left = j->in % STEP_##FORMAT;; left = 0) {                                                   \
      for (long step = 0; step < steps; step++, x += ROWS * STEP_##FORMAT) {                              \
        operand_##FORMAT w[CHANNELS];                                                                     \
        UNROLL for (int c = 0; c < CHANNELS; c++) {                                                       \
          w[c] = unpack_##FORMAT(p[c], s[c], step);                                                       \
          _mm_prefetch(p[c] + ahead + step * BYTES_##FORMAT, _MM_HINT_T0);                                \
        }                                                                                                 \
        UNROLL for (int r = 0; r < ROWS; r++)                                                             \
          UNROLL for (int c = 0; c < CHANNELS; c++)                                                       \
            sums[c][r] = multiply_##FORMAT(sums[c][r], w[c], x + r * STEP_##FORMAT);                      \
      }                                                                                                   \
      if (!left) break;                                                                                   \
      memset(rest, 0, sizeof rest);                                                                       \
      for (int c = 0; c < CHANNELS; c++)                                                                  \
        memcpy(rest[c], p[c] + steps * BYTES_##FORMAT, j->row_bytes - steps * BYTES_##FORMAT);            \
      UNROLL for (int c = 0; c < CHANNELS; c++) p[c] = rest[c];                                           \
      steps = 1;                                                                                          \
    }                                                                                                     \
    vec kept[CHANNELS][ROWS];                                                                             \
    UNROLL for (int c = 0; c < CHANNELS; c++)                                                             \
      UNROLL for (int r = 0; r < ROWS; r++) kept[c][r] = sums[c][r];                                      \
    finish(j, &kept[0][0], first, row, CHANNELS, ROWS);                                                   \
  }

/* All tiles of a format, by their rows: with four channels, and with two. Parts of almost the same number of rows share
   the channels, so the larger number of rows of a tile with four also has a tile with two. */
#if WIDTH == 16
#define TILES(F)                                                                                                   \
  TILE(F, 4, 1) TILE(F, 4, 2) TILE(F, 4, 3) TILE(F, 4, 4) TILE(F, 4, 5) TILE(F, 4, 6)                              \
  TILE(F, 2, 6) TILE(F, 2, 7) TILE(F, 2, 8) TILE(F, 2, 9) TILE(F, 2, 10) TILE(F, 2, 11) TILE(F, 2, 12)             \
  static void (*const F##_fours[])(const job *, const input_##F *, long, long) = {                                 \
      NULL, F##_4_1, F##_4_2, F##_4_3, F##_4_4, F##_4_5, F##_4_6};                                                 \
  static void (*const F##_twos[])(const job *, const input_##F *, long, long) = {                                  \
      NULL, NULL, NULL, NULL, NULL, NULL, F##_2_6, F##_2_7, F##_2_8, F##_2_9, F##_2_10, F##_2_11, F##_2_12};
#else
#define TILES(F)                                                                                                   \
  TILE(F, 4, 1) TILE(F, 4, 2) TILE(F, 2, 2) TILE(F, 2, 3) TILE(F, 2, 4) TILE(F, 2, 5) TILE(F, 2, 6)                \
  static void (*const F##_fours[])(const job *, const input_##F *, long, long) = {NULL, F##_4_1, F##_4_2};         \
  static void (*const F##_twos[])(const job *, const input_##F *, long, long) = {NULL,    NULL,    F##_2_2,        \
                                                                                 F##_2_3, F##_2_4, F##_2_5, F##_2_6};
#endif

#ifndef MOST_float32
#define MOST_float32 MOST_ROWS
#define MOST_bfloat16 MOST_ROWS
#define MOST_int8 MOST_ROWS
#define MOST_int4 MOST_ROWS
#endif

/* The loop over all tiles. The rows come in parts of almost the same size. The inputs of a part are laid out in the order
   in which a tile reads them, [step][row][input]: rows of a power of two of bytes would all want the same places of the
   nearest cache. A single row lies so already, in the format's own type. Returns 0 if there is no memory. */
#define MULTIPLY(F)                                                                                                \
  TILES(F)                                                                                                         \
  static int multiply_all_##F(const job *j, int as_they_are) {                                                     \
    const long most = MOST_##F, step = STEP_##F, steps = (j->in + step - 1) / step, whole = j->in / step * step;   \
    const long parts = (j->rows + most - 1) / most, each = j->rows / parts, more = j->rows % parts;                \
    const long channels = each + (more > 0) <= MOST_ROWS_OF_FOUR ? 4 : 2;                                          \
    const input_##F *x = j->inputs;                                                                                \
    input_##F *laid_out = NULL;                                                                                    \
    if (!as_they_are || j->rows > 1 || whole < j->in) {                                                            \
      x = laid_out = malloc(j->rows * steps * step * sizeof *x);                                                   \
      if (!x) return 0;                                                                                            \
      for (long part = 0, row = 0; part < parts; part++) {                                                         \
        const long rows = each + (part < more);                                                                    \
        for (long r = 0; r < rows; r++) {                                                                          \
          input_##F *into = laid_out + row * steps * step + r * step;                                              \
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
        (channels == 4 ? F##_fours : F##_twos)[rows](j, x + row * steps * step, first, row);                       \
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
