/* Vectors of float32 numbers, as wide as the processor has them: AVX512 (F, BW, VL), or AVX2 with FMA and F16C. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef LEAST_PARALLEL
#define LEAST_PARALLEL 65536 /* numbers, or weights, from which threads pay */
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* A function for each number of rows, and their table by it. */
#define EVERY(MAKE, F) MAKE(F, 1) MAKE(F, 2) MAKE(F, 3) MAKE(F, 4) MAKE(F, 5) MAKE(F, 6)
#define ALL_OF(F) {NULL, F##_1, F##_2, F##_3, F##_4, F##_5, F##_6}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDTH 16
typedef __m512 vec;
typedef __m512i ivec;
typedef __v16su words_of_32;
typedef __v16si signed_words;
typedef __v32hi signed_halves;
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define ALL _mm512_set1_ps
#define SQRT _mm512_sqrt_ps
#define MAX _mm512_max_ps
#define FMA _mm512_fmadd_ps
#define IALL _mm512_set1_epi32
#define IMAX _mm512_max_epi32
#ifdef __AVX512VNNI__
#define ADD_PAIRS _mm512_dpwssd_epi32 /* products of 16 bits, two to a word */
#else
#define ADD_PAIRS(SUMS, A, B) _mm512_add_epi32(SUMS, _mm512_madd_epi16(A, B))
#endif
#define TO_INT _mm512_cvtps_epi32
#define LARGEST _mm512_reduce_max_ps
#define SUM _mm512_reduce_add_ps
INLINE ivec load_words(const void *p) { return _mm512_loadu_si512(p); }
INLINE ivec load_int8(const void *p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
INLINE ivec load_uint16(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vec load_float16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void store_int16(void *p, ivec words) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(words)); }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDTH 8
typedef __m256 vec;
typedef __m256i ivec;
typedef __v8su words_of_32;
typedef __v8si signed_words;
typedef __v16hi signed_halves;
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define ALL _mm256_set1_ps
#define SQRT _mm256_sqrt_ps
#define MAX _mm256_max_ps
#define FMA _mm256_fmadd_ps
#define IALL _mm256_set1_epi32
#define IMAX _mm256_max_epi32
#define ADD_PAIRS(SUMS, A, B) _mm256_add_epi32(SUMS, _mm256_madd_epi16(A, B))
#define TO_INT _mm256_cvtps_epi32
#define OVER_LANES(NAME, OF)                                                                \
  INLINE float NAME(vec v) {                                                                \
    __m128 a = OF##_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));             \
    a = OF##_ps(a, _mm_movehl_ps(a, a));                                                    \
    return _mm_cvtss_f32(OF##_ss(a, _mm_movehdup_ps(a)));                                   \
  }
OVER_LANES(LARGEST, _mm_max)
OVER_LANES(SUM, _mm_add)
INLINE ivec load_words(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE ivec load_int8(const void *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
INLINE ivec load_uint16(const void *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE vec load_float16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE void store_int16(void *p, ivec words) { /* of numbers below 2 ** 16 */
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
#else
#error "needs AVX2 with FMA and F16C, or AVX512"
#endif

/* Float32 vectors have operators (a + b); vectors of 32-bit integers have these. */
#define ZERO() ((vec){0})
#define IADD(A, B) ((ivec)((words_of_32)(A) + (words_of_32)(B)))
#define LEFT(A, COUNT) ((ivec)((words_of_32)(A) << (COUNT)))
#define RIGHT(A, COUNT) ((ivec)((words_of_32)(A) >> (COUNT)))
#define SIGNED_RIGHT(A, COUNT) ((ivec)((signed_words)(A) >> (COUNT)))
#define BITS(A) ((ivec)(A))
#define FLOATS(A) ((vec)(A))
#define TO_FLOAT(A) __builtin_convertvector((signed_words)(A), vec)

/* Dtypes, as Python numbers them (specdec/native/library.py, specdec/execution/products.py). */
enum { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 };

#if WIDTH == 16 && defined(__AVX512BF16__)
#define PAIRS 1 /* bfloat16 can be multiplied as it is, in pairs */
#else
#define PAIRS 0 /* bfloat16 is widened first */
#endif
/* Whether it is: Intel's processors multiply twice as many numbers of float32 in the same time. */
INLINE int in_pairs(int dtype) { return PAIRS && dtype == BFLOAT16 && !__builtin_cpu_is("intel"); }

INLINE vec load_bfloat16(const void *p) { return FLOATS(LEFT(load_uint16(p), 16)); }

/* The numbers whose bits are set, lane by lane from the lowest bit, and `other` in place of the rest. */
INLINE vec selected(uint64_t bits, vec numbers, vec other) {
#if WIDTH == 16
  return _mm512_mask_blend_ps((__mmask16)bits, other, numbers);
#else
  const ivec lanes = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  return _mm256_blendv_ps(other, numbers, FLOATS(_mm256_cmpeq_epi32(IALL((int)(bits & 255)) & lanes, lanes)));
#endif
}

/* Rounded to the nearest, ties to even; a NaN stays one. */
INLINE void store_bfloat16(void *p, vec numbers) {
  ivec words = BITS(numbers);
  ivec odd = RIGHT(words, 16) & IALL(1);
  ivec rounded = RIGHT(IADD(words, IADD(odd, IALL(0x7fff))), 16);
  const ivec nan = (ivec)(numbers != numbers);
  store_int16(p, (nan & IALL(0x7fc0)) | (~nan & rounded));
}

/* Rounded likewise, as float32. */
INLINE vec rounded(vec numbers, int dtype) {
  if (dtype == FLOAT32) return numbers;
  uint16_t narrow[WIDTH];
  store_bfloat16(narrow, numbers);
  return load_bfloat16(narrow);
}

/* 2 ** x for x <= 0, to about 3e-7 of it. */
INLINE vec power_of_two(vec x) {
  x = MAX(x, ALL(-126.0f));
  const ivec n = TO_INT(x);
  const vec rest = x - TO_FLOAT(n);
  vec sum = FMA(ALL(1.338130254e-3f), rest, ALL(9.666368515e-3f));
  sum = FMA(sum, rest, ALL(5.550381014e-2f));
  sum = FMA(sum, rest, ALL(2.402234904e-1f));
  sum = FMA(sum, rest, ALL(6.931471806e-1f));
  sum = FMA(sum, rest, ALL(1.0f));
  return FLOATS(IADD(BITS(sum), LEFT(n, 23)));
}

/* e ** x for x <= 0, to about 2e-7 (1 - x) of it. */
INLINE vec exponential(vec x) { return power_of_two(x * ALL(1.44269504f)); }

INLINE vec load_numbers(const void *p, long at, int dtype) {
  return dtype == FLOAT32 ? LOAD((const float *)p + at) : load_bfloat16((const uint16_t *)p + at);
}

/* The numbers of a vector that are in the first `bytes`, filled up with zeros: nothing behind them is read. */
INLINE vec load_bytes(const void *p, long bytes, int dtype) {
  if (bytes >= (dtype == FLOAT32 ? 4 : 2) * WIDTH) return load_numbers(p, 0, dtype);
  char some[4 * WIDTH] = {0};
  memcpy(some, p, bytes > 0 ? bytes : 0);
  return load_numbers(some, 0, dtype);
}

INLINE vec load_some(const void *p, long at, long count, int dtype) {
  const long item = dtype == FLOAT32 ? 4 : 2;
  return load_bytes((const char *)p + item * at, item * count, dtype);
}

/* Writes the first `count` numbers of a vector, or all. */
INLINE void store_some(void *p, long at, long count, int dtype, vec numbers) {
  const long item = dtype == FLOAT32 ? 4 : 2;
  char some[4 * WIDTH], *into = (char *)p + item * at, *first = count < WIDTH ? some : into;
  if (dtype == FLOAT32)
    STORE((float *)first, numbers);
  else
    store_bfloat16(first, numbers);
  if (count < WIDTH) memcpy(into, some, item * count);
}
