/* Attention, see avx2.c. Queries, keys and values are widened to float, keys and values once for all queries of a task.
 * Keys are processed in chunks that start at the first key, so that a query's result depends neither on other queries
 * nor on the number of masked keys. */
#pragma once

#include "arguments.h"
#include "avx2_tile.h"

/* Keys and values of one head, from a certain key on. */
typedef struct {
    const char *k, *v;
    const float *k_scales, *v_scales; /* null for bf16 */
    ptrdiff_t stride;                 /* in bytes */
} Keys;

INLINE Keys skip_keys(Keys from, ptrdiff_t count)
{
    ptrdiff_t bytes = count * from.stride;
    if (!from.k_scales) return (Keys){from.k + bytes, from.v + bytes, NULL, NULL, from.stride};
    return (Keys){from.k + bytes, from.v + bytes, from.k_scales + count, from.v_scales + count, from.stride};
}

static Keys keys_of(const AttentionArgs *h, ptrdiff_t key, ptrdiff_t kv)
{
    ptrdiff_t size = h->k_scales ? 1 : sizeof(bf16), offset = size * kv * h->kv_head, scale = kv * h->scale_head;
    Keys all = {(const char *)h->k + offset, (const char *)h->v + offset, NULL, NULL, size * h->kv_token};
    if (h->k_scales) all.k_scales = h->k_scales + scale, all.v_scales = h->v_scales + scale;
    return skip_keys(all, key);
}

/* Up to LANES bytes times their scale, at most `count`; the others are zero. */
INLINE __m256 dequantized(const char *x, ptrdiff_t count, float scale)
{
    int64_t bytes = 0;
    if (__builtin_expect(count >= LANES, 1)) memcpy(&bytes, x, LANES);
    else memcpy(&bytes, x, count);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bytes))), _mm256_set1_ps(scale));
}

/* Largest numbers of queries of a task, and of those that are multiplied by a chunk at a time; keys of a chunk, and
 * values that are multiplied at a time. */
enum { QUERY_ROWS = 192, QUERY_BLOCK = 24, KEY_CHUNK = 256, VALUE_BLOCK = 64 };

typedef struct { /* per thread; `columns` is the head dimension, rounded up to whole vectors */
    ptrdiff_t columns;
    float *queries; /* [QUERY_ROWS, width], scaled */
    float *keys;    /* [panels of keys][width][PANEL] */
    float *values;  /* [KEY_CHUNK, columns] */
    float *scores;  /* [QUERY_BLOCK, KEY_CHUNK], then the probabilities (probs) */
    float *sums;    /* [QUERY_ROWS, columns] */
    float *largest; /* [QUERY_ROWS], the largest score so far */
    float *total;   /* [QUERY_ROWS], the sum of the probs so far */
} Scratch;

static size_t scratch_bytes(ptrdiff_t width)
{
    ptrdiff_t columns = round_up(width, LANES);
    ptrdiff_t floats = QUERY_ROWS * (width + columns + 2) + KEY_CHUNK * (width + columns + QUERY_BLOCK);
    return sizeof(float) * floats;
}

static Scratch carve_scratch(char *memory, ptrdiff_t width)
{
    Scratch s = {.columns = round_up(width, LANES), .queries = (float *)memory};
    s.keys = s.queries + QUERY_ROWS * width;
    s.values = s.keys + KEY_CHUNK * width;
    s.scores = s.values + KEY_CHUNK * s.columns;
    s.sums = s.scores + QUERY_BLOCK * KEY_CHUNK;
    s.largest = s.sums + QUERY_ROWS * s.columns;
    s.total = s.largest + QUERY_ROWS;
    return s;
}

/* Transpose up to PANEL keys of one head; missing ones are zero. */
static void pack_keys(const bf16 *k, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width, float *packed)
{
    stride /= (ptrdiff_t)sizeof(bf16);
    for (ptrdiff_t key = 0; key < PANEL; key += LANES)
        for (ptrdiff_t i = 0; i < width; i += 2 * LANES) {
            __m256i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                const bf16 *from = k + (key + j) * stride + i;
                if (key + j >= count) rows[j] = _mm256_setzero_si256();
                else if (width - i >= 2 * LANES) rows[j] = _mm256_loadu_si256((const __m256i *)from);
                else rows[j] = _mm256_maskload_epi32((const int *)from, first((width - i) / 2));
                prefetch(from + PREFETCH_KEYS * stride);
            }
            transpose(rows);
            float *to = packed + i * PANEL + key;
            for (int j = 0; j < LANES && i + 2 * j < width; j++, to += 2 * PANEL) {
                _mm256_storeu_ps(to, even(rows[j]));
                _mm256_storeu_ps(to + PANEL, odd(rows[j]));
            }
        }
}

/* The same for keys of 8 bits. */
static void pack_keys_int8(Keys from, ptrdiff_t count, ptrdiff_t width, float *packed)
{
    for (ptrdiff_t key = 0; key < PANEL; key += LANES)
        for (ptrdiff_t i = 0; i < width; i += LANES) {
            __m256i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                const char *k = from.k + (key + j) * from.stride + i;
                rows[j] = key + j < count ? _mm256_castps_si256(dequantized(k, width - i, from.k_scales[key + j]))
                                          : _mm256_setzero_si256();
                prefetch(k + PREFETCH_KEYS * from.stride);
            }
            transpose(rows);
            float *to = packed + i * PANEL + key;
            for (int j = 0; j < LANES && i + j < width; j++, to += PANEL)
                _mm256_storeu_ps(to, _mm256_castsi256_ps(rows[j]));
        }
}

static void pack_panel(Keys from, ptrdiff_t count, ptrdiff_t width, float *packed)
{
    if (from.k_scales) pack_keys_int8(from, count, width, packed);
    else pack_keys((const bf16 *)from.k, from.stride, count, width, packed);
}

static void widen_values(Keys from, ptrdiff_t count, ptrdiff_t width, float *out)
{
    ptrdiff_t columns = round_up(width, LANES);
    for (ptrdiff_t key = 0; key < count; key++, out += columns) {
        const char *v = from.v + key * from.stride;
        prefetch(v + PREFETCH_KEYS * from.stride);
        for (ptrdiff_t c = 0; c < width; c += LANES)
            _mm256_storeu_ps(out + c, from.v_scales ? dequantized(v + c, width - c, from.v_scales[key])
                                                    : load((const bf16 *)v + c, width - c));
    }
}

/* Replace the scores of one row by unnormalized softmax probabilities, relative to the largest score so far; only the
 * first `seen` of `count` are not masked. Returns the factor by which the earlier sums must be scaled. */
static float softmax_chunk(float *scores, ptrdiff_t seen, ptrdiff_t count, float *largest, float *total)
{
    __m256 before = _mm256_set1_ps(*largest), high = before, sum = _mm256_setzero_ps();
    for (ptrdiff_t i = 0; i < seen; i += LANES) {
        __m256 score = _mm256_loadu_ps(scores + i);
        if (seen - i < LANES) score = _mm256_blendv_ps(before, score, _mm256_castsi256_ps(first(seen - i)));
        high = _mm256_max_ps(high, score);
    }
    float now = max_lanes(high);
    float shrink = _mm256_cvtss_f32(exp2_(_mm256_set1_ps(*largest - now), 1));
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        __m256 prob = _mm256_setzero_ps();
        if (i < seen) prob = exp2_(_mm256_sub_ps(_mm256_loadu_ps(scores + i), _mm256_set1_ps(now)), 1);
        if (seen - i < LANES) prob = masked(prob, first(seen - i));
        sum = _mm256_add_ps(sum, prob);
        _mm256_storeu_ps(scores + i, prob);
    }
    *largest = now;
    *total = *total * shrink + sum_lanes(sum);
    return shrink;
}

INLINE void scale_row(float *x, ptrdiff_t columns, float by)
{
    for (ptrdiff_t c = 0; c < columns; c += LANES)
        _mm256_storeu_ps(x + c, _mm256_mul_ps(_mm256_loadu_ps(x + c), _mm256_set1_ps(by)));
}

/* Attend `rows` queries from `row` on to a chunk of keys and update their sums, largest scores and totals. Keys and
 * values are widened in `s` or, with `once`, part by part here, because no other queries attend to them. */
static void attend_rows(const AttentionArgs *h, const Scratch *s, int once, ptrdiff_t row, ptrdiff_t rows,
                        const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    ptrdiff_t width = h->width, vectors = s->columns / LANES, parts = ceil_div(vectors, VECTORS);
    for (ptrdiff_t key = 0; key < count; key += PANEL) {
        const float *keys = s->keys + (once ? 0 : key * width);
        if (once) pack_panel(skip_keys(from, key), count - key, width, s->keys);
        Product p = {s->queries + row * width, width, keys, PANEL, width, s->scores + key, KEY_CHUNK, 1,
                     (const char *)keys,       0};
        add_product(rows, VECTORS, &p);
    }
    for (ptrdiff_t m = row; m < row + rows; m++) {
        ptrdiff_t seen = limits[m] - chunk;
        float shrink = softmax_chunk(s->scores + (m - row) * KEY_CHUNK, least(seen, count), count, s->largest + m,
                                     s->total + m);
        if (shrink != 1.0f) scale_row(s->sums + m * s->columns, s->columns, shrink);
    }
    for (ptrdiff_t key = 0; key < count; key += VALUE_BLOCK) {
        ptrdiff_t here = least(VALUE_BLOCK, count - key);
        const float *values = s->values + (once ? 0 : key * s->columns);
        if (once) widen_values(skip_keys(from, key), here, width, s->values);
        for (ptrdiff_t part = 0; part < parts; part++) {
            ptrdiff_t z = vectors * part / parts, next = vectors * (part + 1) / parts;
            Product p = {s->scores + key,
                         KEY_CHUNK,
                         values + z * LANES,
                         s->columns,
                         here,
                         s->sums + row * s->columns + z * LANES,
                         s->columns,
                         0,
                         (const char *)values,
                         0};
            add_product(rows, next - z, &p);
        }
    }
}

/* Attend all queries of a task to a chunk of keys. */
static void attend_chunk(const AttentionArgs *h, const Scratch *s, ptrdiff_t rows, const ptrdiff_t *limits,
                         ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    int once = rows <= QUERY_BLOCK;
    if (!once) {
        for (ptrdiff_t key = 0; key < count; key += PANEL)
            pack_panel(skip_keys(from, key), count - key, h->width, s->keys + key * h->width);
        widen_values(from, count, h->width, s->values);
    }
    for (ptrdiff_t row = 0; row < rows; row += QUERY_BLOCK) {
        ptrdiff_t here = least(QUERY_BLOCK, rows - row);
        if (limits[row + here - 1] > chunk) attend_rows(h, s, once, row, here, limits, chunk, count, from);
    }
}

/* Attend the queries [token, end) of a span, for all heads that share the keys of head `kv`. */
static void attend_tile(const AttentionArgs *h, const KVSpan *span, const Scratch *s, ptrdiff_t kv, ptrdiff_t token,
                        ptrdiff_t end, const void *next)
{
    (void)next;
    ptrdiff_t group = h->heads / h->kv_heads, rows = (end - token) * group, limits[QUERY_ROWS];
    for (ptrdiff_t row = 0; row < rows; row++) {
        ptrdiff_t at = token + row / group, head = kv * group + row % group;
        const bf16 *query = h->q + (span->first_query + at) * h->q_token + head * h->q_head;
        float *to = s->queries + row * h->width;
        __m256 scale = _mm256_set1_ps(h->scale * 1.44269504f);
        for (ptrdiff_t c = 0; c < h->width; c += LANES) {
            __m256 x = _mm256_mul_ps(load(query + c, h->width - c), scale);
            if (h->width - c >= LANES) _mm256_storeu_ps(to + c, x);
            else _mm256_maskstore_ps(to + c, first(h->width - c), x);
        }
        limits[row] = span->start < 0 ? span->num_keys : span->start + at + 1;
        s->largest[row] = -1e30f;
        s->total[row] = 0;
    }
    memset(s->sums, 0, sizeof(float) * rows * s->columns);
    ptrdiff_t keys = limits[rows - 1];
    for (ptrdiff_t chunk = 0; chunk < keys; chunk += KEY_CHUNK)
        attend_chunk(h, s, rows, limits, chunk, least(KEY_CHUNK, keys - chunk),
                     keys_of(h, span->first_key + chunk, kv));
    for (ptrdiff_t row = 0; row < rows; row++) {
        bf16 *out = h->out + (span->first_query + token + row / group) * h->out_token +
                    (kv * group + row % group) * h->width;
        __m256 inverse = _mm256_set1_ps(1.0f / s->total[row]);
        for (ptrdiff_t c = 0; c < h->width; c += LANES)
            store(out + c, h->width - c, _mm256_mul_ps(_mm256_loadu_ps(s->sums + row * s->columns + c), inverse));
    }
}
