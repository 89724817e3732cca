/* Root mean square norms of the last axis, with a weight: one pass over a row for its sum, one for its result.

   Sums are in float32, and a row's are the same bits whatever the other rows are. */

#include "vectors.h"

/* y[rows, width] = x / sqrt(mean(x ** 2) + eps) times (offset + weight). `rounds` says that what is multiplied by the
   weight is rounded to bfloat16 before; the result is in any case, if that is the dtype. */
void normalize(const void *x, const void *weight, void *y, long rows, long width, float eps, float offset, int rounds,
               int dtype) {
  for (long row = 0; row < rows; row++) {
    vec sums[4] = {ZERO(), ZERO(), ZERO(), ZERO()};
    for (long i = 0, part = 0; i < width; i += WIDTH, part = (part + 1) % 4) {
      const vec numbers = load_some(x, row * width + i, width - i, dtype);
      sums[part] = FMA(numbers, numbers, sums[part]);
    }
    const float mean = SUM(ADD(ADD(sums[0], sums[1]), ADD(sums[2], sums[3]))) / width;
    const vec factor = DIV(ALL(1.0f), SQRT(ALL(mean + eps)));
    for (long i = 0; i < width; i += WIDTH) {
      const long count = width - i < WIDTH ? width - i : WIDTH;
      vec numbers = MUL(load_some(x, row * width + i, count, dtype), factor);
      uint16_t narrow[WIDTH];
      if (rounds && dtype == BFLOAT16) {
        store_bfloat16(narrow, numbers);
        numbers = load_bfloat16(narrow);
      }
      numbers = MUL(numbers, ADD(ALL(offset), load_some(weight, i, count, dtype)));
      store_some(y, row * width + i, count, dtype, numbers);
    }
  }
}
