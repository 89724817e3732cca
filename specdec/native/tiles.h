/* Products in the processor's tiles (AMX): up to 16 rows times a panel, 16 pairs of inputs and 16 channels at a time.

   A panel of bfloat16 is what these instructions take: a vector of it is a line of a tile, and the tile's next line is
   the next pair's. So vectors and tiles read one copy of the weights; int8 and int4 are unpacked, a block at a time. Rows
   are cut into parts of one size, so that tiles are set up once for a panel: the last part begins early enough.

   A sum takes 32 inputs at a time: the even ones, one after the other, and the odd ones; then both are added to it. Its
   bits are not those of products in vectors. They are the same for any number of rows, too. */

static int least_rows; /* that use tiles; 0: none do */

#if PAIRS && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#define LINES 16 /* of a tile: rows, or pairs of weights */
#define ORDERED(P) __asm__ volatile("" ::"r"(P) : "memory") /* not every compiler knows what tile instructions read */

/* Linux gives tiles to all threads of a process that asks (ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA). */
__attribute__((constructor)) static void ask_for_tiles(void) { least_rows = syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static _Thread_local long part_rows; /* of which there are tiles now */

/* Tiles 0 to 3 are sums [rows][16 channels], 4 is inputs [rows][32], 5 to 7 are weights [16 pairs][16 channels][2]. */
static void set_up_tiles(long rows) {
  uint8_t shapes[64] = {1}; /* from 16 on two bytes each for how long lines are, from 48 on how many a tile has */
  for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = tile < 5 ? rows : LINES;
  ORDERED(shapes);
  _tile_loadconfig(shapes);
  ORDERED(shapes);
  part_rows = rows;
}

#define EACH_SUM(DO) DO(0); DO(1); DO(2); DO(3)
#define LOAD_SUM(V) _tile_loadd(V, now + 16 * V, 4 * PANEL)
#define STORE_SUM(V) _tile_stored(V, now + 16 * V, 4 * PANEL)
#define ADD_PRODUCTS(V, WEIGHTS)                                                                                \
  for (long line = 0; line < LINES / VECTORS * lines; line++, next += 64) _mm_prefetch(next, _MM_HINT_T0);      \
  _tile_loadd(WEIGHTS, p + 64 * V, BYTES_bfloat16);                                                             \
  _tile_dpbf16ps(V, 4, WEIGHTS)

/* As other functions of type `tile`, of bfloat16, for as many rows as tiles are set up for. */
static void multiply_part(const char *p, const void *inputs, long stride, float *sums, long pairs, int begin,
                          const float *scales, const char *next, long lines) {
  float group[LINES * PANEL] __attribute__((aligned(64))), *now = scales ? group : sums;
  const uint16_t *x = inputs;
  ORDERED(now);
  if (begin || scales) {
    EACH_SUM(_tile_zero);
  } else {
    EACH_SUM(LOAD_SUM);
  }
  for (; pairs >= LINES; pairs -= LINES, p += LINES * BYTES_bfloat16, x += 2 * LINES) {
    _tile_loadd(4, x, 2 * stride);
    ADD_PRODUCTS(0, 5);
    ADD_PRODUCTS(1, 6);
    ADD_PRODUCTS(2, 7);
    ADD_PRODUCTS(3, 5);
  }
  EACH_SUM(STORE_SUM);
  for (long r = 0; pairs && r < part_rows; r += MOST_ROWS) /* too few for a tile */
    of_bfloat16_pairs.tiles[part_rows - r < MOST_ROWS ? part_rows - r : MOST_ROWS](
        p, x + r * stride, stride, now + r * PANEL, pairs, 0, NULL, next, lines);
  for (long i = 0; scales && i < part_rows * PANEL; i += WIDTH)
    STORE(sums + i, FMA(LOAD(group + i), LOAD(scales + i % PANEL), begin ? ZERO() : LOAD(sums + i)));
}
#else
#define LINES MOST_ROWS
#define set_up_tiles(ROWS) (void)0
#define _tile_release() (void)0
static tile *const multiply_part = NULL;
#endif

/* Returns the least number of rows whose products of bfloat16 use tiles, which is `rows` from now on if that is not 0.
   Where there are no tiles it is 0. */
int tiles_from(int rows) { return least_rows = least_rows && rows ? rows : least_rows; }
