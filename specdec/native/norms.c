/* Root mean square norms of the last axis, with a weight: one pass over a row for its sum, one for its result.

   Sums are in float32, and a row's are the same bits whatever the other rows are. */

#include "calls.h"
#include "vectors.h"

/* y[rows, width] = x / sqrt(mean(x ** 2) + eps) times (offset + weight). `rounds` says that what is multiplied by the
   weight is rounded to bfloat16 before; the result is in any case, if that is the dtype. Rows of x are `step` numbers
   apart, and after `inner` rows the next is `outer` numbers from the first of these. */
void normalize(const void *x, const void *weight, void *y, long rows, long width, long inner, long outer, long step,
               float eps, float offset, int rounds, int dtype) {
  _Pragma("omp parallel for schedule(static) if (rows * width >= LEAST_PARALLEL)")
  for (long row = 0; row < rows; row++) {
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
