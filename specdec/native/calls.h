/* What the files of this folder call of each other, and Python of them. */

#include <stdint.h>

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

int attend(const call *c);

int multiply(const void *panels, const float *scales, const void *bias, const void *x, void *y, long out, long in,
             long width, long rows, int number, int kind);

void normalize(const void *x, const void *weight, void *y, long rows, long width, long inner, long outer, long step,
               float eps, float offset, int rounds, int dtype);

/* Functions of each number. */
enum { SILU, GELU_TANH, ADDED };

void activate(const void *x, void *y, long count, int function, int dtype);

void first_largest(const void *x, int64_t *ids, long rows, long width, int dtype);

void uniforms(const int64_t *keys, const int64_t *rounds, double *numbers, long rows, long count, long purpose);
