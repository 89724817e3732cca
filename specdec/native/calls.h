/* What the files of this folder call of each other. */

#include "threads.h"
#include <stdint.h>

/* A number of an operation. An address is a place, in the upper 16 bits, and how far behind it: place 0 is address 0. */
typedef union {
  long integer;
  float number;
} word;

static inline void *address(char *const *places, word w) {
  return places[(unsigned long)w.integer >> 48] + (w.integer & 0xffffffffffff);
}

/* One layer's attention. */
typedef struct {
  const void *query;        /* [row, head, node, dim] by its strides, in numbers; numbers of a vector lie side by side */
  long query_row, query_head, query_node;
  const void *keys, *values; /* [page, head, position, dim], likewise */
  long key_page, key_head, key_position, value_page, value_head, value_position;
  void *output;             /* [row, node, head, value_dim], contiguous */
  int dtype;
  const int64_t *lengths;   /* [row] */
  const int64_t *table;     /* [row, page] */
  long pages, page_size;
  const int64_t *words;     /* [row, node, word]: which cells of the tree a node sees; NULL: those up to its own */
  long words_row, words_node; /* 0 for a row, if all rows are alike */
  const int64_t *depth;     /* [row, cell] */
  long depth_row;
  long rows, heads, key_heads, nodes, cells, dim, value_dim;
  float scale, softcap;     /* softcap: 0 for none */
  const float *sinks;       /* [head], or NULL */
  long window, chunk;       /* 0 for none */
} call;

/* Operations that threads share: attention returns 0 if there is no memory; words are explained where they are read. */
int attend_together(const call *c, loop *l);

void multiply(const word *w, char *const *places, void *room, loop l[2]);

void normalize(const word *w, char *const *places, loop *l);

/* Functions of each number. */
enum { SILU, GELU_TANH, ADDED };
