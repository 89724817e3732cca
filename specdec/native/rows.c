/* Operations row by row: norms, where the largest number is, and random numbers, which are hashes of counters
   (specdec/random.py). */

#include "calls.h"
#include "vectors.h"

/* Words: x, weight, y; rows, width; inner, outer, step; eps, offset; rounds, dtype. y[rows, width] =
   x / sqrt(mean(x ** 2) + eps) times (offset + weight), summed in float32, the same bits whatever the other rows are.
   `rounds` says that what is multiplied by the weight is rounded to bfloat16 before; the result is in any case, if that is
   the dtype. Rows of x are `step` numbers apart, and after `inner` rows the next is `outer` from the first of these. */
void normalize(const word *w, char *const *places, loop *l) {
  const void *x = address(places, w[0]), *weight = address(places, w[1]);
  void *y = address(places, w[2]);
  const long rows = w[3].integer, width = w[4].integer, inner = w[5].integer, outer = w[6].integer, step = w[7].integer;
  const float eps = w[8].number, offset = w[9].number;
  const int rounds = w[10].integer, dtype = w[11].integer;
  SHARE(l, rows, row) {
    const long at = row / inner * outer + row % inner * step;
    vec sums[4] = {ZERO(), ZERO(), ZERO(), ZERO()};
    for (long i = 0, part = 0; i < width; i += WIDTH, part = (part + 1) % 4) {
      const vec numbers = load_some(x, at + i, width - i, dtype);
      sums[part] = FMA(numbers, numbers, sums[part]);
    }
    const float mean = SUM((sums[0] + sums[1]) + (sums[2] + sums[3])) / width;
    const vec factor = ALL(1.0f) / SQRT(ALL(mean + eps));
    for (long i = 0; i < width; i += WIDTH) {
      const long count = width - i;
      vec numbers = load_some(x, at + i, count, dtype) * factor;
      if (rounds) numbers = rounded(numbers, dtype);
      numbers *= ALL(offset) + load_some(weight, i, count, dtype);
      store_some(y, row * width + i, count, dtype, numbers);
    }
  }
}

/* A lane for each number: 1 where they are equal, or where the first one is NaN. */
INLINE uint64_t found(vec numbers, vec wanted) {
#if WIDTH == 16
  return _mm512_cmp_ps_mask(numbers, wanted, _CMP_EQ_OQ) | _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
#else
  const vec equal = _mm256_cmp_ps(numbers, wanted, _CMP_EQ_OQ), nan = _mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q);
  return _mm256_movemask_ps(_mm256_or_ps(equal, nan));
#endif
}

/* Numbers of a row from its i-th on, filled up with -inf. */
INLINE vec of_row(const void *x, long row, long width, long i, int dtype) {
  const vec numbers = load_some(x, row * width + i, width - i, dtype);
  return width - i >= WIDTH ? numbers : selected((1ull << (width - i)) - 1, numbers, ALL(-__builtin_inff()));
}

/* ids[rows] of x[rows, width]: where the largest number is, the first of equal ones; if there is a NaN, the first. */
void first_largest(const void *x, int64_t *ids, long rows, long width, int dtype) {
  _Pragma("omp parallel for schedule(static) if (rows > 1 && rows * width >= LEAST_PARALLEL)")
  for (long row = 0; row < rows; row++) {
    vec some = ALL(-__builtin_inff());
    for (long i = 0; i < width; i += WIDTH) some = MAX(of_row(x, row, width, i, dtype), some); /* NaN are left out */
    const vec largest = ALL(LARGEST(some)), none = ALL(__builtin_nanf(""));
    ids[row] = -1;
    long first = -1;
    for (long i = 0; i < width; i += WIDTH) {
      const vec numbers = of_row(x, row, width, i, dtype);
      const uint64_t nan = found(numbers, none), here = nan ? nan : first < 0 ? found(numbers, largest) : 0;
      if (here && (nan || first < 0)) first = i + __builtin_ctzll(here);
      if (nan) break;
    }
    ids[row] = first;
  }
}

INLINE uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/* numbers[rows, count] of a purpose, uniform in [0, 1), for the round of each row. */
void uniforms(const int64_t *keys, const int64_t *rounds, double *numbers, long rows, long count, long purpose) {
  const uint64_t step = 0x9E3779B97F4A7C15u;
  for (long row = 0; row < rows; row++) {
    const uint64_t state = mix((uint64_t)keys[row] + (uint64_t)rounds[row] * step);
    for (long i = 0; i < count; i++) {
      const uint64_t counter = (uint64_t)(i + 1) + ((uint64_t)purpose << 40);
      numbers[row * count + i] = (double)(mix(state + counter * step) >> 12) * 0x1p-52;
    }
  }
}
