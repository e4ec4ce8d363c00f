/* The layers of a decoder. Each instruction set defines the functions that are declared here. */
#pragma once

#include "arguments.h"

void linear_biased(const Matrix *m, const bf16 *x, int64_t stride, int64_t rows, void *out, int64_t out_stride,
                   int32_t add, const float *row_bias, int64_t biased_rows, char *workspace, int32_t threads);
INLINE void norm_row(const bf16 *x, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, ptrdiff_t columns);
void norm(const bf16 *x, int64_t stride, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, int64_t rows,
          int64_t columns, int32_t threads);
void rotate(bf16 *x, int64_t stride, const float *cos, const float *sin, int64_t rows, int64_t heads, int64_t half,
            int32_t threads);
void attend(const AttentionArgs *h, const KVSpan *spans, int64_t count, char *workspace, int32_t threads);
static void add_row(bf16 *x, const bf16 *y, ptrdiff_t count);
static void quantize_head(const bf16 *x, ptrdiff_t width, int8_t *bytes, float *scale);

typedef struct {
    const bf16 *input_norm;
    const Matrix *qkv, *output;
    const bf16 *mlp_norm;
    const Matrix *gate_up, *down;
    const bf16 *query_norm, *key_norm; /* of each head, or null */
} DecoderLayer;

enum { MAX_PARTS = 3 };

typedef struct {                 /* see `LowRank` in types.py */
    const Matrix *down;          /* null if the adapter does not change the linear layer */
    const Matrix *up[MAX_PARTS]; /* null after the last one */
    int64_t first_input[MAX_PARTS], first_output[MAX_PARTS];
} LowRank;

typedef struct {
    LowRank qkv, output, gate_up, down;
} LoraLayer;

typedef struct { /* see `LoraRows` in types.py */
    const LoraLayer *layers;
    int64_t start, stop, last_start, last_stop;
} LoraRows;

typedef struct { /* the new tokens of many requests, see `ForwardBatch` in types.py */
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
    void *cache;         /* [layers, 2 * kv_heads, cache_rows, width], bf16, or int8 if there are scales */
    float *cache_scales; /* [layers, 2 * kv_heads, cache_rows]; null for bf16 */
    int64_t cache_rows;
    bf16 *normed, *qkv, *mixed, *inner; /* intermediate results */
    char *linear_workspace, *attend_workspace;
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
} ForwardBatch;

typedef struct {
    int64_t heads, kv_heads, width;
    float scale, eps;
} DecoderShape;

/* Normalize each query and key head in place. */
static void normalize_heads(const DecoderLayer *l, const ForwardBatch *p, const DecoderShape *s, int threads)
{
    ptrdiff_t stride = (s->heads + 2 * s->kv_heads) * s->width;
#pragma omp parallel for num_threads(threads) if (p->rows > 16)
    for (ptrdiff_t row = 0; row < p->rows; row++)
        for (ptrdiff_t head = 0; head < s->heads + s->kv_heads; head++) {
            bf16 *x = p->qkv + row * stride + head * s->width;
            norm_row(x, head < s->heads ? l->query_norm : l->key_norm, NULL, s->eps, x, s->width);
        }
}

/* Add the rows of one level to the hidden states. */
static void add_level(const ForwardBatch *p, ptrdiff_t level)
{
    for (ptrdiff_t i = 0; i < p->addition_count; i++) {
        const bf16 *from = p->additions + level * p->level_stride + i * p->addition_stride;
        add_row(p->x + p->addition_rows[i] * p->hidden, from, p->hidden);
    }
}

/* One layer of the KV cache. */
typedef struct {
    void *rows;    /* [2 * kv_heads, cache_rows, width], bf16, or int8 if there are scales */
    float *scales; /* [2 * kv_heads, cache_rows]; null for bf16 */
} CacheLayer;

static CacheLayer cache_layer(const ForwardBatch *p, const DecoderShape *s, ptrdiff_t layer)
{
    ptrdiff_t rows = layer * 2 * s->kv_heads * p->cache_rows;
    if (!p->cache_scales) return (CacheLayer){(bf16 *)p->cache + rows * s->width, NULL};
    return (CacheLayer){(int8_t *)p->cache + rows * s->width, p->cache_scales + rows};
}

static void store_keys_values(const ForwardBatch *p, const DecoderShape *s, CacheLayer cache, int threads)
{
    ptrdiff_t stride = (s->heads + 2 * s->kv_heads) * s->width;
#pragma omp parallel for num_threads(threads) if (cache.scales && p->rows > 16)
    for (ptrdiff_t row = 0; row < p->rows; row++)
        for (ptrdiff_t head = 0; head < 2 * s->kv_heads; head++) {
            const bf16 *from = p->qkv + row * stride + (s->heads + head) * s->width;
            ptrdiff_t to = head * p->cache_rows + p->slots[row];
            if (cache.scales) quantize_head(from, s->width, (int8_t *)cache.rows + to * s->width, cache.scales + to);
            else memcpy((bf16 *)cache.rows + to * s->width, from, 2 * s->width);
        }
}

/* Select the requested rows: copy their hidden states to `out` and move their queries to the front. */
static void select_last(const ForwardBatch *p, const DecoderShape *s)
{
    ptrdiff_t stride = (s->heads + 2 * s->kv_heads) * s->width;
    for (ptrdiff_t i = 0; i < p->last_count; i++) {
        memcpy(p->out + i * p->hidden, p->x + p->last[i] * p->hidden, 2 * p->hidden);
        if (p->last[i] > i) memcpy(p->qkv + i * stride, p->qkv + p->last[i] * stride, 2 * s->heads * s->width);
    }
}

/* The linear layers of a decoder layer, as offsets in `LoraLayer`. */
enum {
    QKV = offsetof(LoraLayer, qkv),
    OUTPUT = offsetof(LoraLayer, output),
    GATE_UP = offsetof(LoraLayer, gate_up),
    DOWN = offsetof(LoraLayer, down),
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

static void linear(const LinearCall *c, const ForwardBatch *p, bf16 *out, ptrdiff_t out_stride, int add, int threads)
{
    ptrdiff_t biased = multiply_loras(c, p, threads);
    linear_biased(c->m, c->x, c->stride, c->rows, out, out_stride, add, p->row_bias, biased, p->linear_workspace,
                  threads);
}

/* Add a layer's attention output and then its MLP output to `x`. */
static void attention_and_mlp(const DecoderLayer *l, ptrdiff_t layer, const ForwardBatch *p, const DecoderShape *s,
                              CacheLayer cache, bf16 *x, ptrdiff_t rows, const KVSpan *spans, ptrdiff_t span_count,
                              int threads)
{
    ptrdiff_t head = p->cache_rows * s->width, mixed = s->heads * s->width, inner = l->gate_up->columns;
    AttentionArgs h = {
        p->qkv,
        cache.rows,
        element(cache.rows, cache.scales != NULL, s->kv_heads * head),
        p->mixed,
        mixed + 2 * s->kv_heads * s->width,
        s->width,
        s->width,
        head,
        mixed,
        s->heads,
        s->kv_heads,
        s->width,
        s->scale,
        cache.scales,
        cache.scales ? cache.scales + s->kv_heads * p->cache_rows : NULL,
        p->cache_rows,
    };
    attend(&h, spans, span_count, p->attend_workspace, threads);
    int last = x == p->out;
    linear(&(LinearCall){l->output, layer, OUTPUT, p->mixed, mixed, rows, last}, p, x, p->hidden, 1, threads);
    norm(x, p->hidden, l->mlp_norm, NULL, s->eps, p->normed, rows, p->hidden, threads);
    linear(&(LinearCall){l->gate_up, layer, GATE_UP, p->normed, p->hidden, rows, last}, p, p->inner, inner, 0, threads);
    linear(&(LinearCall){l->down, layer, DOWN, p->inner, inner, rows, last}, p, x, p->hidden, 1, threads);
}

/* Run all layers in one call: releasing and acquiring the GIL for each operation took a tenth of a step. */
void run_layers(const DecoderLayer *layers, int64_t count, const DecoderShape *s, const ForwardBatch *p,
                int32_t threads)
{
    ptrdiff_t heads = s->heads + s->kv_heads, stride = (heads + s->kv_heads) * s->width;
    for (ptrdiff_t i = 0; i < count; i++) {
        CacheLayer cache = cache_layer(p, s, i);
        norm(p->x, p->hidden, layers[i].input_norm, NULL, s->eps, p->normed, p->rows, p->hidden, threads);
        linear(&(LinearCall){layers[i].qkv, i, QKV, p->normed, p->hidden, p->rows, 0}, p, p->qkv, stride, 0, threads);
        if (layers[i].query_norm) normalize_heads(layers + i, p, s, threads);
        rotate(p->qkv, stride, p->cos, p->sin, p->rows, heads, s->width / 2, threads);
        store_keys_values(p, s, cache, threads);
        if (i + 1 < count) {
            attention_and_mlp(layers + i, i, p, s, cache, p->x, p->rows, p->spans, p->span_count, threads);
            if (i < p->levels) add_level(p, i);
        } else if (p->last_count) {
            select_last(p, s);
            attention_and_mlp(layers + i, i, p, s, cache, p->out, p->last_count, p->last_spans, p->last_span_count,
                              threads);
        }
    }
}
