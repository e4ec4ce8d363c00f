/* The layers of a decoder. The file that includes this one defines the functions `linear`, `norm`, `norm_row`, `rotate` and
 * `attend`, and those for numbers: `element`, `add_row` and `quantize_head`. */

typedef struct {
    const bf16 *input_norm;
    const Matrix *qkv, *output;
    const bf16 *mlp_norm;
    const Matrix *gate_up, *down;
    const bf16 *query_norm, *key_norm; /* of each head, or null */
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
    void *cache; /* [layers, 2 * kv_heads, cache_rows, width], bf16, or int8 if there are scales */
    float *cache_scales; /* [layers, 2 * kv_heads, cache_rows]; null for bf16 */
    int64_t cache_rows;
    bf16 *normed, *qkv, *mixed, *inner; /* intermediate results */
    char *linear_workspace, *attend_workspace;
    const bf16 *additions; /* [levels, addition_count, hidden] */
    const int64_t *addition_rows; /* the row of `x` that each is added to */
    int64_t addition_count, levels, level_stride, addition_stride;
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

/* Add a layer's attention output and then its MLP output to `x`. */
static void attention_and_mlp(const DecoderLayer *l, const ForwardBatch *p, const DecoderShape *s, CacheLayer cache,
                              bf16 *x, ptrdiff_t rows, const KVSpan *spans, ptrdiff_t span_count, int threads)
{
    ptrdiff_t head = p->cache_rows * s->width, mixed = s->heads * s->width, inner = l->gate_up->columns;
    AttentionArgs h = {
        p->qkv, cache.rows, element(cache.rows, cache.scales != NULL, s->kv_heads * head), p->mixed,
        mixed + 2 * s->kv_heads * s->width, s->width, s->width, head, mixed, s->heads, s->kv_heads, s->width, s->scale,
        cache.scales, cache.scales ? cache.scales + s->kv_heads * p->cache_rows : NULL, p->cache_rows,
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
        CacheLayer cache = cache_layer(p, s, i);
        norm(p->x, p->hidden, layers[i].input_norm, NULL, s->eps, p->normed, p->rows, p->hidden, threads);
        linear(layers[i].qkv, p->normed, p->hidden, p->rows, p->qkv, stride, 0, p->linear_workspace, threads);
        if (layers[i].query_norm) normalize_heads(layers + i, p, s, threads);
        rotate(p->qkv, stride, p->cos, p->sin, p->rows, heads, s->width / 2, threads);
        store_keys_values(p, s, cache, threads);
        if (i + 1 < count) {
            attention_and_mlp(layers + i, p, s, cache, p->x, p->rows, p->spans, p->span_count, threads);
            if (i < p->levels) add_level(p, i);
        } else if (p->last_count) {
            select_last(p, s);
            attention_and_mlp(layers + i, p, s, cache, p->out, p->last_count, p->last_spans, p->last_count, threads);
        }
    }
}
