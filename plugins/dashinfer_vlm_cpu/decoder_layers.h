/* The layers of a decoder, of the functions `linear`, `norm`, `rotate` and `attend` of the file that includes this one. */

typedef struct {
    const bf16 *input_norm;
    const Matrix *qkv, *output;
    const bf16 *mlp_norm;
    const Matrix *gate_up, *down;
} DecoderLayer;

typedef struct { /* the new tokens of many requests, see `ForwardBatch` in types.py */
    bf16 *x; /* [rows, hidden]; overwritten */
    int64_t rows, hidden;
    const float *cos, *sin;
    const int64_t *slots; /* the row of `cache` for each token */
    const KVSpan *spans;
    int64_t span_count;
    const int64_t *last; /* increasing */
    int64_t last_count;
    const KVSpan *last_spans;
    bf16 *out;   /* [last_count, hidden] */
    bf16 *cache; /* [layers, 2 * kv_heads, cache_rows, width] */
    int64_t cache_rows;
    bf16 *normed, *qkv, *mixed, *inner; /* intermediate results */
    char *linear_workspace, *attend_workspace;
} ForwardBatch;

typedef struct {
    int64_t heads, kv_heads, width;
    float scale, eps;
} DecoderShape;

static void store_keys_values(const ForwardBatch *p, const DecoderShape *s, bf16 *cache)
{
    ptrdiff_t stride = (s->heads + 2 * s->kv_heads) * s->width;
    for (ptrdiff_t row = 0; row < p->rows; row++)
        for (ptrdiff_t head = 0; head < 2 * s->kv_heads; head++)
            memcpy(cache + (head * p->cache_rows + p->slots[row]) * s->width,
                   p->qkv + row * stride + (s->heads + head) * s->width, 2 * s->width);
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

/* Add a layer's attention output and then its MLP output to `x`. */
static void attention_and_mlp(const DecoderLayer *l, const ForwardBatch *p, const DecoderShape *s, const bf16 *cache,
                              bf16 *x, ptrdiff_t rows, const KVSpan *spans, ptrdiff_t span_count, int threads)
{
    ptrdiff_t head = p->cache_rows * s->width, mixed = s->heads * s->width, inner = l->gate_up->columns;
    AttentionArgs h = {
        p->qkv, cache, cache + s->kv_heads * head, p->mixed, mixed + 2 * s->kv_heads * s->width, s->width, s->width,
        head, mixed, s->heads, s->kv_heads, s->width, s->scale,
    };
    attend(&h, spans, span_count, p->attend_workspace, threads);
    linear(l->output, p->mixed, mixed, rows, x, p->hidden, 1, p->linear_workspace, threads);
    norm(x, p->hidden, l->mlp_norm, NULL, s->eps, p->normed, rows, p->hidden, threads);
    linear(l->gate_up, p->normed, p->hidden, rows, p->inner, inner, 0, p->linear_workspace, threads);
    linear(l->down, p->inner, inner, rows, x, p->hidden, 1, p->linear_workspace, threads);
}

/* Run all layers in one call: releasing and acquiring the GIL for each operation took a tenth of a step. */
void run_layers(const DecoderLayer *layers, int64_t count, const DecoderShape *s, const ForwardBatch *p, int32_t threads)
{
    ptrdiff_t heads = s->heads + s->kv_heads, stride = (heads + s->kv_heads) * s->width;
    for (ptrdiff_t i = 0; i < count; i++) {
        bf16 *cache = p->cache + i * 2 * s->kv_heads * p->cache_rows * s->width;
        norm(p->x, p->hidden, layers[i].input_norm, NULL, s->eps, p->normed, p->rows, p->hidden, threads);
        linear(layers[i].qkv, p->normed, p->hidden, p->rows, p->qkv, stride, 0, p->linear_workspace, threads);
        rotate(p->qkv, stride, p->cos, p->sin, p->rows, heads, s->width / 2, threads);
        store_keys_values(p, s, cache);
        if (i + 1 < count) {
            attention_and_mlp(layers + i, p, s, cache, p->x, p->rows, p->spans, p->span_count, threads);
        } else if (p->last_count) {
            select_last(p, s);
            attention_and_mlp(layers + i, p, s, cache, p->out, p->last_count, p->last_spans, p->last_count, threads);
        }
    }
}
