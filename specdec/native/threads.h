/* Loops that threads share. Every thread of a forward goes through all of its loops and does what of each is left to take;
   nobody waits for a thread that other programs keep from running: when it comes, it finds the loops done. */

#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#define PATIENCE 4096 /* looks at a number before others may have the core */

/* How much of a loop is taken, and how much is done. All zero before. */
typedef struct {
  atomic_long taken, done;
} loop;

typedef struct {
  long begin, end;
} part;

/* Ends a part and takes the next one, smaller towards the end. Of 0 numbers if none is left, when all are done. */
static inline part next_part(loop *l, long count, part before) {
  atomic_fetch_add(&l->done, before.end - before.begin);
  long seen = atomic_load(&l->taken), end;
  do {
    for (long looks = 0; seen >= count && atomic_load(&l->done) < count; looks++)
      looks < PATIENCE ? _mm_pause() : (void)sched_yield();
    if (seen >= count) return (part){0, 0};
    end = seen + (count - seen) / (4 * omp_get_num_threads()) + 1;
  } while (!atomic_compare_exchange_weak(&l->taken, &seen, end));
  return (part){seen, end};
}

#define SHARE(L, COUNT, I)                                                                                \
  for (part some = next_part(L, COUNT, (part){0, 0}); some.end; some = next_part(L, COUNT, some))        \
    for (long I = some.begin; I < some.end; I++)
