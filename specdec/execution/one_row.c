/* One row times a weight matrix, at the speed of the memory: each weight is read once, in the order in which it lies.

   The numbers of an output channel are added in a fixed order, whatever the number of threads. Sums are in float32.
   `wide` says that inputs and outputs are float32, otherwise bfloat16. For quantized weights, inputs are rounded to
   bfloat16 in either case, and so are the outputs (specdec/quantization/dispatch.py says why).

   Needs AVX2 with FMA, or AVX512 (F, BW, VL); with AVX512-BF16, int4 takes its dot products. */

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
#define ADD _mm512_add_ps
#define ALL _mm512_set1_ps
#define SUM _mm512_reduce_add_ps
static inline vec from_int8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline vec from_bfloat16(const uint16_t *p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
typedef __m256 vec;
#define ZERO _mm256_setzero_ps
#define LOAD _mm256_loadu_ps
#define FMA _mm256_fmadd_ps
#define ADD _mm256_add_ps
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
#else
#error "needs AVX2 with FMA, or AVX512"
#endif

#define GROUP 64             /* int4 weights that share a scale */
#define LEAST_PARALLEL 65536 /* weights from which threads pay */

static inline float widened(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float number;
  memcpy(&number, &word, 4);
  return number;
}

static inline uint16_t narrowed(float number) { /* to the nearest, ties to even */
  uint32_t word;
  memcpy(&word, &number, 4);
  if ((word & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
  return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

static inline void put(void *outputs, long at, float number, int wide) {
  if (wide)
    ((float *)outputs)[at] = widened(narrowed(number));
  else
    ((uint16_t *)outputs)[at] = narrowed(number);
}

/* Four sums at a time, so that additions do not wait for each other; the rest one by one. */
#define DOT(weight_at, number_of)                                 \
  vec a = ZERO(), b = ZERO(), c = ZERO(), d = ZERO();             \
  long k = 0;                                                     \
  for (; k + 4 * WIDTH <= in; k += 4 * WIDTH) {                   \
    a = FMA(weight_at(p + k), LOAD(x + k), a);                    \
    b = FMA(weight_at(p + k + WIDTH), LOAD(x + k + WIDTH), b);    \
    c = FMA(weight_at(p + k + 2 * WIDTH), LOAD(x + k + 2 * WIDTH), c); \
    d = FMA(weight_at(p + k + 3 * WIDTH), LOAD(x + k + 3 * WIDTH), d); \
  }                                                               \
  for (; k + WIDTH <= in; k += WIDTH) a = FMA(weight_at(p + k), LOAD(x + k), a); \
  float sum = SUM(ADD(ADD(a, b), ADD(c, d)));                     \
  for (; k < in; k++) sum += number_of(p[k]) * x[k];

#define ITSELF(number) (number)
#define AS_FLOAT(number) ((float)(number))

/* weight[out, in] in float32; bias[out] or NULL. */
void row_float32(const float *weight, const float *bias, const float *x, float *outputs, long out, long in) {
#pragma omp parallel for if (out * in >= LEAST_PARALLEL)
  for (long o = 0; o < out; o++) {
    const float *p = weight + o * in;
    DOT(LOAD, ITSELF)
    outputs[o] = bias ? sum + bias[o] : sum;
  }
}

/* Everything in bfloat16. Returns 0 if there is no memory. */
int row_bfloat16(const uint16_t *weight, const uint16_t *bias, const uint16_t *inputs, uint16_t *outputs, long out,
                 long in) {
  float *x = malloc(in * sizeof(float));
  if (!x) return 0;
  for (long k = 0; k < in; k++) x[k] = widened(inputs[k]);
#pragma omp parallel for if (out * in >= LEAST_PARALLEL)
  for (long o = 0; o < out; o++) {
    const uint16_t *p = weight + o * in;
    DOT(from_bfloat16, widened)
    outputs[o] = narrowed(bias ? sum + widened(bias[o]) : sum);
  }
  free(x);
  return 1;
}

static inline uint16_t rounded_input(const void *inputs, long k, int wide) {
  return wide ? narrowed(((const float *)inputs)[k]) : ((const uint16_t *)inputs)[k];
}

/* weight[out, in] in int8, a scale per output channel. Returns 0 if there is no memory. */
int row_int8(const int8_t *weight, const float *scale, const void *inputs, void *outputs, long out, long in, int wide) {
  float *x = malloc(in * sizeof(float));
  if (!x) return 0;
  for (long k = 0; k < in; k++) x[k] = widened(rounded_input(inputs, k, wide));
#pragma omp parallel for if (out * in >= LEAST_PARALLEL)
  for (long o = 0; o < out; o++) {
    const int8_t *p = weight + o * in;
    DOT(from_int8, AS_FLOAT)
    put(outputs, o, scale[o] * sum, wide);
  }
  free(x);
  return 1;
}

/* One group: 32 bytes with the weight of an even place in the upper half of each, and 8 added to all. The inputs of a
   group stand apart: first those of its 32 even places, then those of the odd ones. */
#if WIDTH == 16 && defined(__AVX512BF16__)
typedef uint16_t input_t;
#define KEPT(bits) (bits)
typedef __m512i table_t;
static table_t make_table(void) {
  uint16_t numbers[32];
  for (int i = 0; i < 32; i++) numbers[i] = narrowed((float)((i & 15) - 8));
  return _mm512_loadu_si512(numbers);
}
static inline vec group_sum(const uint8_t *p, const input_t *x, table_t table) {
  __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
  __m512i even = _mm512_permutexvar_epi16(_mm512_srli_epi16(pairs, 4), table);
  __m512i odd = _mm512_permutexvar_epi16(pairs, table); /* takes five bits, of which the table ignores one */
  vec sum = _mm512_dpbf16_ps(ZERO(), (__m512bh)even, (__m512bh)_mm512_loadu_si512(x));
  return _mm512_dpbf16_ps(sum, (__m512bh)odd, (__m512bh)_mm512_loadu_si512(x + 32));
}
#elif WIDTH == 16
typedef float input_t;
#define KEPT(bits) widened(bits)
typedef vec table_t;
static table_t make_table(void) {
  float numbers[16];
  for (int i = 0; i < 16; i++) numbers[i] = (float)(i - 8);
  return LOAD(numbers);
}
static inline vec group_sum(const uint8_t *p, const input_t *x, table_t table) {
  vec sum = ZERO();
  for (int k = 0; k < 32; k += 16) {
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p + k)));
    sum = FMA(_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), table), LOAD(x + k), sum);
    sum = FMA(_mm512_permutexvar_ps(pairs, table), LOAD(x + 32 + k), sum);
  }
  return sum;
}
#else
typedef float input_t;
#define KEPT(bits) widened(bits)
typedef __m256i table_t;
static table_t make_table(void) { return _mm256_set1_epi32(8); }
static inline vec group_sum(const uint8_t *p, const input_t *x, table_t eight) {
  vec sum = ZERO();
  for (int k = 0; k < 32; k += 8) {
    __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + k)));
    __m256i even = _mm256_sub_epi32(_mm256_srli_epi32(pairs, 4), eight);
    __m256i odd = _mm256_sub_epi32(_mm256_and_si256(pairs, _mm256_set1_epi32(15)), eight);
    sum = FMA(_mm256_cvtepi32_ps(even), LOAD(x + k), sum);
    sum = FMA(_mm256_cvtepi32_ps(odd), LOAD(x + 32 + k), sum);
  }
  return sum;
}
#endif

/* A group's inputs in the order of `group_sum`. */
static inline void spread(input_t *x, const void *inputs, long from, const int wide) {
  for (int i = 0; i < 32; i++) {
    x[i] = KEPT(rounded_input(inputs, from + 2 * i, wide));
    x[32 + i] = KEPT(rounded_input(inputs, from + 2 * i + 1, wide));
  }
}

/* weight[out, groups, 32] in int4 pairs, scale[out, groups]. Returns 0 if there is no memory. */
int row_int4(const uint8_t *weight, const float *scale, const void *inputs, void *outputs, long out, long groups,
             int wide) {
  input_t *x = malloc(groups * GROUP * sizeof(input_t));
  if (!x) return 0;
  for (long g = 0; g < groups; g++) {
    if (wide)
      spread(x + g * GROUP, inputs, g * GROUP, 1);
    else
      spread(x + g * GROUP, inputs, g * GROUP, 0);
  }
  const table_t table = make_table();
#pragma omp parallel for if (out * groups * GROUP >= LEAST_PARALLEL)
  for (long o = 0; o < out; o++) {
    const uint8_t *p = weight + o * groups * 32;
    vec sum = ZERO();
    for (long g = 0; g < groups; g++)
      sum = FMA(group_sum(p + g * 32, x + g * GROUP, table), ALL(scale[o * groups + g]), sum);
    put(outputs, o, SUM(sum), wide);
  }
  free(x);
  return 1;
}
