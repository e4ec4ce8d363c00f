/* The input of a decoder's layers, and their linear layers, to whose products adapters add. */
#pragma once

#include "arguments.h"
#include "delta_inputs.h"

void linear_biased(const Matrix *m, const bf16 *x, int64_t stride, int64_t rows, void *out, int64_t out_stride,
                   int32_t add, const float *row_bias, int64_t biased_rows, char *workspace, int32_t threads);

enum { MAX_PARTS = 3 };

typedef struct {                 /* see `LowRank` in kernels/types/lora.py */
    const Matrix *down;          /* null if the adapter does not change the linear layer */
    const Matrix *up[MAX_PARTS]; /* null after the last one */
    int64_t first_input[MAX_PARTS], first_output[MAX_PARTS];
} LowRank;

typedef struct {
    LowRank qkv, output, gate_up, down, gates;
} LoraLayer;

typedef struct { /* see `LoraRows` in kernels/types/lora.py */
    const LoraLayer *layers;
    int64_t start, stop, last_start, last_stop;
} LoraRows;

typedef struct { /* see `RecurrentBatch` in kernels/types/recurrent.py */
    bf16 *conv_states; /* [delta net layers, slots, taps - 1, channels] */
    float *states;     /* [delta net layers, slots, value_heads, key_dim, value_dim] */
    int64_t slots;
    const StateSpan *spans;
    int64_t span_count;
    const int64_t *lists;
    const int64_t *kept_rows; /* the rows of spans with drafts, whose inputs are kept */
    int64_t kept_count;
    bf16 *kept_qkvz;   /* [delta net layers, kept_count, channels + value_heads * value_dim] */
    float *kept_gates; /* [delta net layers, kept_count, 2 * value_heads] */
} RecurrentBatch;

typedef struct { /* the new tokens of many requests, see `ForwardBatch` in kernels/types/batch.py */
    bf16 *x;     /* [rows, hidden]; overwritten */
    int64_t rows, hidden;
    const float *cos, *sin;
    const int64_t *slots; /* the row of `cache` for each token */
    const KVSpan *spans;
    int64_t span_count;
    const int64_t *last; /* increasing */
    int64_t last_count;
    const KVSpan *last_spans;
    int64_t last_span_count;
    bf16 *out;           /* [last_count, hidden] */
    void *cache;         /* [attention layers, 2 * kv_heads, cache_rows, width], bf16, or int8 if there are scales */
    float *cache_scales; /* [attention layers, 2 * kv_heads, cache_rows]; null for bf16 */
    int64_t cache_rows;
    bf16 *normed, *qkv, *mixed, *inner; /* intermediate results */
    float *gates;                       /* [rows, 2 * value_heads], the same */
    char *linear_workspace, *attend_workspace, *delta_workspace;
    const bf16 *additions;        /* [levels, addition_count, hidden] */
    const int64_t *addition_rows; /* the row of `x` that each is added to */
    int64_t addition_count, levels, level_stride, addition_stride;
    const LoraRows *loras;
    int64_t lora_count;
    float *row_bias; /* [rows with an adapter, most outputs] */
    bf16 *ranks;     /* [rows, most ranks] */
    int64_t ranks_stride;
    char *lora_workspace;        /* for `linear` with the matrices of adapters, one for each thread */
    int64_t lora_workspace_size; /* of each */
    const RecurrentBatch *recurrent; /* null without gated delta nets */
} ForwardBatch;

/* The linear layers of a decoder layer, as offsets in `LoraLayer`. */
enum {
    QKV = offsetof(LoraLayer, qkv),
    OUTPUT = offsetof(LoraLayer, output),
    GATE_UP = offsetof(LoraLayer, gate_up),
    DOWN = offsetof(LoraLayer, down),
    GATES = offsetof(LoraLayer, gates),
};

typedef struct { /* one linear layer */
    const Matrix *m;
    ptrdiff_t layer; /* the index of the decoder layer */
    size_t part;     /* one of the above */
    const bf16 *x;   /* [rows, inputs] */
    ptrdiff_t stride, rows;
    int last; /* whether the rows are those of `last` */
} LinearCall;

typedef struct {           /* the rows of one adapter, and what it adds to a linear layer */
    const LowRank *change; /* null if nothing, or if there are no rows */
    ptrdiff_t start, stop;
} Change;

static Change find_change(const LinearCall *c, const LoraRows *a)
{
    ptrdiff_t start = c->last ? a->last_start : a->start, stop = c->last ? a->last_stop : a->stop;
    const LowRank *change = (const LowRank *)((const char *)(a->layers + c->layer) + c->part);
    return (Change){change->down && start < stop ? change : NULL, start, stop};
}

/* Compute what adapter `i` adds to the products of a linear layer, for the row bias, which begins at row `first`. */
static void multiply_low_rank(const LinearCall *c, const ForwardBatch *p, ptrdiff_t i, ptrdiff_t first, char *workspace,
                              int threads)
{
    Change found = find_change(c, p->loras + i);
    const LowRank *l = found.change;
    if (!l) return;
    ptrdiff_t rows = found.stop - found.start, stride = p->ranks_stride;
    bf16 *ranks = p->ranks + found.start * stride;
    float *out = p->row_bias + (found.start - first) * c->m->outputs;
    linear_biased(l->down, c->x + found.start * c->stride, c->stride, rows, ranks, stride, 0, NULL, 0, workspace,
                  threads);
    for (int part = 0; part < MAX_PARTS && l->up[part]; part++)
        linear_biased(l->up[part], ranks + l->first_input[part], stride, rows, out + l->first_output[part],
                      c->m->outputs, 0, NULL, 0, workspace, threads);
}

/* Compute what the adapters add to a linear layer; returns the number of rows of the row bias. Few rows of several
 * adapters are divided among the threads by adapter, since starting a parallel region takes longer than such a product.
 */
static ptrdiff_t multiply_loras(const LinearCall *c, const ForwardBatch *p, int threads)
{
    ptrdiff_t first = c->rows, count = 0;
    for (ptrdiff_t i = p->lora_count - 1; i >= 0; i--) {
        Change found = find_change(c, p->loras + i);
        if (found.change) first = found.start, count++;
    }
    ptrdiff_t rows = c->rows - first;
    if (!count) return 0;
    memset(p->row_bias, 0, rows * c->m->outputs * sizeof *p->row_bias);
    if (count == 1 || rows > 16 * count) {
        for (ptrdiff_t i = 0; i < p->lora_count; i++)
            multiply_low_rank(c, p, i, first, p->lora_workspace, threads);
        return rows;
    }
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t i = 0; i < p->lora_count; i++)
        multiply_low_rank(c, p, i, first, p->lora_workspace + omp_get_thread_num() * p->lora_workspace_size, 1);
    return rows;
}

static void linear(const LinearCall *c, const ForwardBatch *p, void *out, ptrdiff_t out_stride, int add, int threads)
{
    ptrdiff_t biased = multiply_loras(c, p, threads);
    linear_biased(c->m, c->x, c->stride, c->rows, out, out_stride, add, p->row_bias, biased, p->linear_workspace,
                  threads);
}
