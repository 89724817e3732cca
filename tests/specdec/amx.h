/* The tile instructions (AMX) in plain C, by the manual (Intel's Instruction Set Extensions, volume 2, TDPBF16PS), for
   processors without them: included before a source, it is compiled against these. A use that the processor would refuse
   ends the process. */

#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Thread_local struct {
  uint8_t config[64]; /* palette; from 16 on the bytes of a line, from 48 on the number of lines */
  uint8_t lines[8][16][64];
} amx;

static inline int amx_bytes(int tile) { return amx.config[16 + 2 * tile] | amx.config[17 + 2 * tile] << 8; }
static inline int amx_lines(int tile) { return amx.config[48 + tile]; }

static inline void amx_need(int fits, const char *what) {
  if (fits) return;
  fprintf(stderr, "the processor refuses: %s\n", what);
  abort();
}

static inline void amx_loadconfig(const void *config) {
  memset(&amx, 0, sizeof amx);
  memcpy(amx.config, config, 64);
  amx_need(amx.config[0] == 1, "palette");
  for (int tile = 0; tile < 8; tile++)
    amx_need(amx_lines(tile) >= 1 && amx_lines(tile) <= 16 && amx_bytes(tile) >= 1 && amx_bytes(tile) <= 64, "shape");
}

static inline void amx_zero(int tile) {
  amx_need(amx.config[0] == 1, "no configuration");
  memset(amx.lines[tile], 0, sizeof amx.lines[tile]);
}

static inline void amx_load(int tile, const void *at, long stride) {
  amx_zero(tile);
  for (int i = 0; i < amx_lines(tile); i++) memcpy(amx.lines[tile][i], (const char *)at + i * stride, amx_bytes(tile));
}

static inline void amx_store(int tile, void *at, long stride) {
  amx_need(amx.config[0] == 1, "no configuration");
  for (int i = 0; i < amx_lines(tile); i++) memcpy((char *)at + i * stride, amx.lines[tile][i], amx_bytes(tile));
}

/* Denormal numbers count as zero, as inputs and as results. */
static inline float amx_flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }

static inline float amx_float(const uint8_t *at) {
  const uint32_t word = (uint32_t)at[1] << 24 | (uint32_t)at[0] << 16;
  float x;
  memcpy(&x, &word, 4);
  return amx_flushed(x);
}

static inline void amx_dpbf16ps(int sums, int a, int b) {
  amx_need(sums != a && sums != b && a != b, "one tile twice");
  amx_need(amx_lines(sums) == amx_lines(a) && amx_bytes(sums) == amx_bytes(b), "shape of sums");
  amx_need(amx_bytes(a) == 4 * amx_lines(b) && amx_bytes(a) % 4 == 0 && amx_bytes(b) % 4 == 0, "shape of factors");
  for (int m = 0; m < amx_lines(sums); m++)
    for (int n = 0; n < amx_bytes(sums) / 4; n++) {
      float of[2] = {0, 0}, sum;
      for (int k = 0; k < amx_bytes(a) / 4; k++)
        for (int i = 0; i < 2; i++)
          of[i] = amx_flushed(
              fmaf(amx_float(&amx.lines[a][m][4 * k + 2 * i]), amx_float(&amx.lines[b][k][4 * n + 2 * i]), of[i]));
      memcpy(&sum, &amx.lines[sums][m][4 * n], 4);
      sum = amx_flushed(amx_flushed(sum) + amx_flushed(of[0] + of[1]));
      memcpy(&amx.lines[sums][m][4 * n], &sum, 4);
    }
}

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_loadconfig
#define _tile_release() memset(&amx, 0, sizeof amx)
#define _tile_loadd amx_load
#define _tile_stored amx_store
#define _tile_zero amx_zero
#define _tile_dpbf16ps amx_dpbf16ps
#define syscall(number, what, component) \
  (amx_need((number) == SYS_arch_prctl && (what) == 0x1023 && (component) == 18, "request"), \
   getenv("AMX_REFUSED") ? -1 : 0)
