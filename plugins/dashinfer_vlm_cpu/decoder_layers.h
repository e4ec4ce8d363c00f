/* The layers of a decoder. Each instruction set defines the functions that are declared here. */
#pragma once

#include "decoder_linear.h"
#include "delta_net.h"

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
    const Matrix *qkv, *output; /* of a gated delta net: its first and last projection */
    const bf16 *mlp_norm;
    const Matrix *gate_up, *down;
    const bf16 *query_norm, *key_norm; /* of each head, or null */
    const Matrix *gates;               /* of a gated delta net */
    const DeltaArgs *delta;            /* its shape and weights; null for attention */
} DecoderLayer;

typedef struct {
    int64_t heads, kv_heads, width;
    int64_t gate_heads; /* gates before the queries: one for each of them, or none */
    float scale, eps;
} DecoderShape;

typedef struct { /* a layer, and its numbers among all layers and among those with the same kind of mixer */
    const DecoderLayer *l;
    ptrdiff_t number, number_of_kind;
} NumberedLayer;

/* Multiply x [rows, columns], whose rows are contiguous, by the sigmoid of gates. */
void multiply_gates(bf16 *x, const bf16 *gates, int64_t gates_stride, int64_t rows, int64_t columns, int32_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t c = 0; c < columns; c += LANES) {
            Floats gate = get_bf16(gates + row * gates_stride + c, columns - c);
            Floats value = get_bf16(x + row * columns + c, columns - c);
            put_bf16(x + row * columns + c, columns - c, value / (splat(1) + exponential(-gate)));
        }
}

/* Normalize each query and key head in place. */
static void normalize_heads(const DecoderLayer *l, bf16 *queries, ptrdiff_t stride, ptrdiff_t rows,
                            const DecoderShape *s, int threads)
{
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t head = 0; head < s->heads + s->kv_heads; head++) {
            bf16 *x = queries + row * stride + head * s->width;
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

static void store_keys_values(const ForwardBatch *p, const DecoderShape *s, const bf16 *keys, ptrdiff_t stride,
                              CacheLayer cache, int threads)
{
#pragma omp parallel for num_threads(threads) if (cache.scales && p->rows > 16)
    for (ptrdiff_t row = 0; row < p->rows; row++)
        for (ptrdiff_t head = 0; head < 2 * s->kv_heads; head++) {
            const bf16 *from = keys + row * stride + head * s->width;
            ptrdiff_t to = head * p->cache_rows + p->slots[row];
            if (cache.scales) quantize_head(from, s->width, (int8_t *)cache.rows + to * s->width, cache.scales + to);
            else memcpy((bf16 *)cache.rows + to * s->width, from, 2 * s->width);
        }
}

/* Move the requested ones of rows to the front. */
static void select_rows(const ForwardBatch *p, bf16 *rows, ptrdiff_t stride, ptrdiff_t width)
{
    for (ptrdiff_t i = 0; i < p->last_count; i++)
        if (p->last[i] > i) memcpy(rows + i * stride, rows + p->last[i] * stride, 2 * width);
}

/* Compute queries, keys, values and gates, and write keys and values to the cache. Of the last layer, the requested
 * queries and gates are moved to the front. */
static void project_attention(const NumberedLayer *n, const ForwardBatch *p, const DecoderShape *s, int last,
                              int threads)
{
    ptrdiff_t stride = n->l->qkv->columns, heads = s->heads + s->kv_heads, queries = s->gate_heads + s->heads;
    bf16 *rows = p->qkv + s->gate_heads * s->width;
    CacheLayer cache = cache_layer(p, s, n->number_of_kind);
    if (n->l->query_norm) normalize_heads(n->l, rows, stride, p->rows, s, threads);
    rotate(rows, stride, p->cos, p->sin, p->rows, heads, s->width / 2, threads);
    store_keys_values(p, s, rows + s->heads * s->width, stride, cache, threads);
    if (last) select_rows(p, p->qkv, stride, queries * s->width);
}

static void attend_layer(const NumberedLayer *n, const ForwardBatch *p, const DecoderShape *s, int last, int threads)
{
    ptrdiff_t head = p->cache_rows * s->width, mixed = s->heads * s->width, stride = n->l->qkv->columns;
    CacheLayer cache = cache_layer(p, s, n->number_of_kind);
    AttentionArgs h = {
        p->qkv + s->gate_heads * s->width,
        cache.rows,
        element(cache.rows, cache.scales != NULL, s->kv_heads * head),
        p->mixed,
        stride,
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
    attend(&h, last ? p->last_spans : p->spans, last ? p->last_span_count : p->span_count, p->attend_workspace,
           threads);
    if (s->gate_heads) multiply_gates(p->mixed, p->qkv, stride, last ? p->last_count : p->rows, mixed, threads);
}

/* Keep the inputs of the rows whose states may have to be computed again. */
static void keep_inputs(const NumberedLayer *n, const ForwardBatch *p)
{
    const RecurrentBatch *r = p->recurrent;
    ptrdiff_t width = n->l->qkv->columns, gates = n->l->gates->columns;
    for (ptrdiff_t i = 0; i < r->kept_count; i++) {
        ptrdiff_t from = r->kept_rows[i], to = n->number_of_kind * r->kept_count + i;
        memcpy(r->kept_qkvz + to * width, p->qkv + from * width, width * sizeof *p->qkv);
        memcpy(r->kept_gates + to * gates, p->gates + from * gates, gates * sizeof *p->gates);
    }
}

/* Compute a gated delta net up to its output projection, and write the new states. Of the last layer, the requested rows
 * are moved to the front. */
static void mix_layer(const NumberedLayer *n, const ForwardBatch *p, int last, int threads)
{
    const RecurrentBatch *r = p->recurrent;
    const DecoderLayer *l = n->l;
    DeltaArgs a = *l->delta;
    ptrdiff_t values = a.value_heads * a.value_dim, channels = 2 * a.key_heads * a.key_dim + values;
    linear(&(LinearCall){l->gates, n->number, GATES, p->normed, p->hidden, p->rows, 0}, p, p->gates, l->gates->columns,
           0, threads);
    keep_inputs(n, p);
    a.rows = p->qkv;
    a.row_stride = l->qkv->columns;
    a.gates = p->gates;
    a.out = p->mixed;
    a.conv_states = r->conv_states + n->number_of_kind * r->slots * (a.taps - 1) * channels;
    a.states = r->states + n->number_of_kind * r->slots * values * a.key_dim;
    mix_delta_net(&a, r->spans, r->span_count, r->lists, p->delta_workspace, threads);
    if (last) select_rows(p, p->mixed, values, values);
}

/* Add a layer's output projection and then its MLP output to `x`. */
static void add_mixed_and_mlp(const NumberedLayer *n, const ForwardBatch *p, const DecoderShape *s, int last,
                              int threads)
{
    const DecoderLayer *l = n->l;
    bf16 *x = last ? p->out : p->x;
    ptrdiff_t rows = last ? p->last_count : p->rows, mixed = l->output->inputs, inner = l->gate_up->columns;
    linear(&(LinearCall){l->output, n->number, OUTPUT, p->mixed, mixed, rows, last}, p, x, p->hidden, 1, threads);
    norm(x, p->hidden, l->mlp_norm, NULL, s->eps, p->normed, rows, p->hidden, threads);
    linear(&(LinearCall){l->gate_up, n->number, GATE_UP, p->normed, p->hidden, rows, last}, p, p->inner, inner, 0,
           threads);
    linear(&(LinearCall){l->down, n->number, DOWN, p->inner, inner, rows, last}, p, x, p->hidden, 1, threads);
}

/* Run a layer; the last one computes the requested rows only. */
static void run_layer(const NumberedLayer *n, const ForwardBatch *p, const DecoderShape *s, int last, int threads)
{
    const DecoderLayer *l = n->l;
    norm(p->x, p->hidden, l->input_norm, NULL, s->eps, p->normed, p->rows, p->hidden, threads);
    linear(&(LinearCall){l->qkv, n->number, QKV, p->normed, p->hidden, p->rows, 0}, p, p->qkv, l->qkv->columns, 0,
           threads);
    if (l->delta) mix_layer(n, p, last, threads);
    else project_attention(n, p, s, last, threads);
    if (last && !p->last_count) return;
    if (!l->delta) attend_layer(n, p, s, last, threads);
    for (ptrdiff_t i = 0; last && i < p->last_count; i++)
        memcpy(p->out + i * p->hidden, p->x + p->last[i] * p->hidden, 2 * p->hidden);
    add_mixed_and_mlp(n, p, s, last, threads);
}

/* Run all layers in one call: releasing and acquiring the GIL for each operation took a tenth of a step. */
void run_layers(const DecoderLayer *layers, int64_t count, const DecoderShape *s, const ForwardBatch *p,
                int32_t threads)
{
    ptrdiff_t attention = 0, delta = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        NumberedLayer n = {layers + i, i, layers[i].delta ? delta++ : attention++};
        int last = i + 1 == count;
        run_layer(&n, p, s, last, threads);
        if (!last && i < p->levels) add_level(p, i);
    }
}
