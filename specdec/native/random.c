/* Random numbers that are hashes of counters (specdec/random.py). */

#include "calls.h"
#include "vectors.h"

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
