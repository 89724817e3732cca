/* The first of the largest numbers of rows: one pass for the largest, one for where it is. */

#include "calls.h"
#include "vectors.h"

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
  _Pragma("omp parallel for schedule(static) if (rows * width >= LEAST_PARALLEL)")
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
