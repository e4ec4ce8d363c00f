/* Structures that native*.py pass to the kernels of all instruction sets, and those that are made of them. */
#pragma once

#include "base.h"

/* A linear layer, see native_linear.py. */
typedef struct {
    const void *packed;
    const float *scales; /* scales of the packed rows if the weights have 4 or 8 bits, else null */
    const char *codes;   /* code tables of the panels if the weights have 12 bits, else null */
    const bf16 *bias;    /* [outputs], or null */
    int64_t outputs;     /* rows of the weights */
    int64_t inputs;
    int64_t columns; /* columns of the result; half of the outputs with SILU_GATE */
    int32_t activation;
    int32_t fp32_output; /* results are float */
    int32_t group; /* number of inputs that share a scale if the weights have 4 bits, see int4.h and progressive.h; else
                      0 */
    const int32_t *order; /* input k of the packed weights is input order[k] of the activations, with 4 bits; or null */
} Matrix;

/* Values that a linear layer adds to the products of the last rows, before the activation. */
typedef struct {
    const float *values; /* [rows from `first` on, outputs] */
    int64_t first;       /* the first of these rows; the number of rows if there are none */
} RowBias;

/* What to do with the sums of a linear layer: activation, bias, and where to store them. */
typedef struct {
    const Matrix *m;
    void *out;      /* [rows, columns] */
    int64_t stride; /* of the rows of `out` */
    int32_t add;    /* add to `out` instead of overwriting it */
    RowBias bias;
} Epilogue;

/* A matrix in its original form and in 8 bits, and bounds of their difference. */
typedef struct {
    const Matrix *exact, *quantized;
    const float *norms;  /* [outputs]: upper bounds of the norms of the 8-bit rows */
    const float *errors; /* [outputs]: upper bounds of the norms of their rounding errors */
} ArgmaxBounds;

typedef struct {
    int64_t first_query; /* its row in q and out */
    int64_t num_queries;
    int64_t first_key; /* its row in k and v */
    int64_t num_keys;
    int64_t start; /* query i attends to keys [0, start + i]; -1: to all keys */
} KVSpan;

typedef struct {
    const bf16 *q;
    const void *k, *v; /* bf16, or int8 if there are scales */
    bf16 *out;
    int64_t q_token, q_head, kv_token, kv_head, out_token; /* strides; heads of `out` are contiguous */
    int64_t heads, kv_heads, width;
    float scale;
    const float *k_scales, *v_scales; /* one per key; null for bf16 */
    int64_t scale_head;               /* stride of the scales' heads */
} AttentionArgs;
