/* Attention with tile products, see tiles.h. Keys are processed in chunks that start at the first key, so that a
 * query's result depends neither on other queries nor on the number of masked keys. */
#pragma once

#include "avx512_keys.h"
#include "tiles_linear.h"

enum { QUERY_ROWS = 384, TILE_CHUNK = 256, CHUNK_STEPS = TILE_CHUNK / STEP_INPUTS };

typedef struct { /* per thread; `width` is the head dimension, rounded up to whole steps */
    ptrdiff_t width;
    char *queries;  /* blocks of rows, as in tiles_linear.h */
    char *keys;     /* [panels of 32 keys][steps][PANEL_STEP] */
    char *values;   /* [panels of 32 columns][steps of 32 keys][PANEL_STEP] */
    char *probs;    /* [steps of 32 keys][rows][64 bytes] */
    float *scores;  /* [MAX_ROWS, TILE_CHUNK] */
    float *sums;    /* [QUERY_ROWS, width] */
    float *largest; /* [QUERY_ROWS], the largest score so far */
    float *total;   /* [QUERY_ROWS], the sum of the probs so far */
} Scratch;

static size_t scratch_bytes(ptrdiff_t head_width)
{
    ptrdiff_t width = round_up(head_width, STEP_INPUTS);
    return 64 * 9 + 2 * (QUERY_ROWS * width + 2 * TILE_CHUNK * width + MAX_ROWS * TILE_CHUNK) +
           4 * (MAX_ROWS * TILE_CHUNK + QUERY_ROWS * width + 2 * QUERY_ROWS);
}

static Scratch carve_scratch(char *from, ptrdiff_t head_width)
{
    Scratch s = {.width = round_up(head_width, STEP_INPUTS)};
    from = aligned(from);
    s.queries = carve(&from, 2 * QUERY_ROWS * s.width);
    s.keys = carve(&from, 2 * TILE_CHUNK * s.width);
    s.values = carve(&from, 2 * TILE_CHUNK * s.width);
    s.probs = carve(&from, 2 * MAX_ROWS * TILE_CHUNK);
    s.scores = carve(&from, 4 * MAX_ROWS * TILE_CHUNK);
    s.sums = carve(&from, 4 * QUERY_ROWS * s.width);
    s.largest = carve(&from, 4 * QUERY_ROWS);
    s.total = carve(&from, 4 * QUERY_ROWS);
    return s;
}

/* Load up to 32 elements of a key or value as bf16. Bytes are converted without their scale, which is exact: the scales
 * of keys are applied to the scores, and those of values to the probabilities. */
INLINE __m512i load_32(const int is_int8, const void *from, __mmask32 lanes)
{
    if (!is_int8) return _mm512_maskz_loadu_epi16(lanes, from);
    __m256i bytes = _mm256_maskz_loadu_epi8(lanes, from);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Pack `count` keys as right operands, padded with zeros. */
INLINE void pack_keys(const int is_int8, const void *k, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width,
                      char *packed)
{
    ptrdiff_t steps = ceil_div(width, STEP_INPUTS);
    for (ptrdiff_t key = 0; key < round_up(count, PANEL); key += LANES)
        for (ptrdiff_t step = 0; step < steps; step++) {
            __m512i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                __mmask32 lanes = key + j < count ? first_of_32(width - step * STEP_INPUTS) : 0;
                rows[j] = load_32(is_int8, element(k, is_int8, (key + j) * stride + step * STEP_INPUTS), lanes);
            }
            transpose(rows);
            char *to = packed + (key / PANEL * steps + step) * PANEL_STEP + key % PANEL * 4;
            UNROLL_FOR (int i = 0; i < LANES; i++) _mm512_store_si512(to + i * 128, rows[i]);
        }
}

/* Pack `count` values as right operands, padded with zeros: two keys of a column in each 32 bits. */
INLINE void pack_values(const int is_int8, const void *v, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width,
                        char *packed)
{
    __m512i left = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                    36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i right = _mm512_add_epi16(left, _mm512_set1_epi16(16));
    for (ptrdiff_t column = 0; column < width; column += PANEL) {
        __mmask32 lanes = first_of_32(width - column);
        char *to = packed + column / PANEL * CHUNK_STEPS * PANEL_STEP;
        for (ptrdiff_t key = 0; key < round_up(count, STEP_INPUTS); key += 2, to += 128) {
            const void *from = element(v, is_int8, key * stride + column);
            __m512i even = load_32(is_int8, from, key < count ? lanes : 0);
            __m512i odd = load_32(is_int8, element(from, is_int8, stride), key + 1 < count ? lanes : 0);
            _mm512_store_si512(to, _mm512_permutex2var_epi16(even, left, odd));
            _mm512_store_si512(to + 64, _mm512_permutex2var_epi16(even, right, odd));
        }
    }
}

INLINE void pack_chunk(const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t count, Keys from)
{
    pack_keys(is_int8, from.k, from.stride, count, h->width, s->keys);
    pack_values(is_int8, from.v, from.stride, count, h->width, s->values);
}

/* 2^x with an error of 3e-6, for probabilities, which are rounded to bf16. */
INLINE __m512 exp2_of_score(__m512 x)
{
    static const float coefficients[] = {9.582852945e-3f, 5.590642616e-2f, 2.402409911e-1f, 6.931241751e-1f, 1.0f};
    return exp2_by(coefficients, 4, x);
}

/* 16 of the `scales` of `count` keys. */
INLINE __m512 scales_at(const float *scales, ptrdiff_t i, ptrdiff_t count)
{
    return _mm512_maskz_loadu_ps(first(count - i), scales + i);
}

/* The largest of `count` scores, which are multiplied by the scales of the keys if they have 8 bits. */
INLINE float largest_score(const int is_int8, const float *scores, Keys keys, ptrdiff_t count)
{
    __m512 high = _mm512_set1_ps(-INFINITY);
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        __m512 score = _mm512_load_ps(scores + i);
        if (is_int8) score = _mm512_mul_ps(score, scales_at(keys.k_scales, i, count));
        if (count - i >= LANES) high = _mm512_max_ps(high, score);
        else high = _mm512_mask_max_ps(high, first(count - i), high, score);
    }
    return _mm512_reduce_max_ps(high);
}

/* Compute the unnormalized softmax probabilities (probs) of one row over a chunk, relative to the largest score so far,
 * in steps that are `step` bytes apart; returns the factor by which the earlier sums must be scaled. Scores are not
 * multiplied by `scale` and by the scales of the keys yet; the stored probs are multiplied by those of the values. */
INLINE float softmax_chunk(const int is_int8, const float *scores, float scale, Keys keys, char *probs, ptrdiff_t step,
                           ptrdiff_t count, ptrdiff_t padded, float *largest, float *total)
{
    float high = count > 0 ? scale * largest_score(is_int8, scores, keys, count) : -INFINITY;
    float now = high > *largest ? high : *largest;
    float shrink = _mm512_cvtss_f32(exp2_(_mm512_set1_ps(*largest - now), 1));
    __m512 minus = _mm512_set1_ps(-now), by = _mm512_set1_ps(scale), sum = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < padded; i += STEP_INPUTS, probs += step) {
        __m512 low = _mm512_load_ps(scores + i), upper = _mm512_load_ps(scores + i + LANES);
        if (is_int8) {
            low = _mm512_mul_ps(low, scales_at(keys.k_scales, i, count));
            upper = _mm512_mul_ps(upper, scales_at(keys.k_scales, i + LANES, count));
        }
        low = exp2_of_score(_mm512_fmadd_ps(low, by, minus));
        upper = exp2_of_score(_mm512_fmadd_ps(upper, by, minus));
        if (i + STEP_INPUTS > count) {
            low = _mm512_maskz_mov_ps(first(count - i), low);
            upper = _mm512_maskz_mov_ps(first(count - i - LANES), upper);
        }
        sum = _mm512_add_ps(sum, _mm512_add_ps(low, upper));
        if (is_int8) {
            low = _mm512_mul_ps(low, scales_at(keys.v_scales, i, count));
            upper = _mm512_mul_ps(upper, scales_at(keys.v_scales, i + LANES, count));
        }
        _mm512_store_si512(probs, (__m512i)_mm512_cvtne2ps_pbh(upper, low));
    }
    *largest = now;
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    return shrink;
}

/* Attend up to 32 queries, from `row` on, to the packed chunk and update their sums, largest scores and totals. */
static void attend_block(const AttentionArgs *h, const Scratch *s, ptrdiff_t row, Tiles *t, const ptrdiff_t *limits,
                         ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    _Alignas(64) float found[MAX_ROWS][PANEL];
    ptrdiff_t steps = s->width / STEP_INPUTS, padded = round_up(count, PANEL);
    const char *queries = s->queries + 2 * row * s->width;
    for (ptrdiff_t key = 0; key < padded; key += PANEL) {
        tiles_zero(t);
        for (ptrdiff_t step = 0; step < steps; step++)
            tiles_step_bf16(t, queries + step * t->rows * STEP_BYTES,
                            s->keys + (key / PANEL * steps + step) * PANEL_STEP);
        tiles_store(t, s->scores + key, TILE_CHUNK * sizeof(float));
    }
    float shrink[MAX_ROWS];
    for (int m = 0; m < t->rows; m++) {
        ptrdiff_t seen = limits[row + m] - chunk;
        ptrdiff_t known = seen < count ? seen : count, step = t->rows * STEP_BYTES;
        const float *scores = s->scores + m * TILE_CHUNK, scale = h->scale * 1.44269504f;
        float *largest = s->largest + row + m, *total = s->total + row + m;
        char *probs = s->probs + m * STEP_BYTES;
        shrink[m] = from.k_scales ? softmax_chunk(1, scores, scale, from, probs, step, known, padded, largest, total)
                                  : softmax_chunk(0, scores, scale, from, probs, step, known, padded, largest, total);
    }
    for (ptrdiff_t column = 0; column < s->width; column += PANEL) {
        const char *values = s->values + column / PANEL * CHUNK_STEPS * PANEL_STEP;
        tiles_zero(t);
        for (ptrdiff_t step = 0; step < padded / STEP_INPUTS; step++)
            tiles_step_bf16(t, s->probs + step * t->rows * STEP_BYTES, values + step * PANEL_STEP);
        tiles_store(t, found, sizeof found[0]);
        for (int m = 0; m < t->rows; m++) {
            float *sum = s->sums + (row + m) * s->width + column;
            __m512 by = _mm512_set1_ps(shrink[m]);
            UNROLL_FOR (int z = 0; z < PANEL; z += LANES)
                _mm512_store_ps(sum + z, _mm512_fmadd_ps(_mm512_load_ps(sum + z), by, _mm512_load_ps(found[m] + z)));
        }
    }
}

/* Attend the queries [token, end) of a span, for all heads that share the keys of head `kv`. */
static void attend_tile(const AttentionArgs *h, const KVSpan *span, const Scratch *s, ptrdiff_t kv, ptrdiff_t token,
                        ptrdiff_t end, const void *next)
{
    (void)next;
    ptrdiff_t group = h->heads / h->kv_heads, rows = (end - token) * group;
    ptrdiff_t limits[QUERY_ROWS];
    Blocks queries = {s->queries, rows, s->width / STEP_INPUTS, 0};
    for (ptrdiff_t row = 0; row < rows; row++) {
        ptrdiff_t at = token + row / group, head = kv * group + row % group;
        pack_row(&queries, row, h->q + (span->first_query + at) * h->q_token + head * h->q_head, h->width);
        limits[row] = span->start < 0 ? span->num_keys : span->start + at + 1;
        s->largest[row] = -1e30f;
        s->total[row] = 0;
    }
    memset(s->sums, 0, sizeof(float) * rows * s->width);
    ptrdiff_t keys = limits[rows - 1];
    Tiles t = tiles_open(block_rows(&queries, 0));
    for (ptrdiff_t chunk = 0; chunk < keys; chunk += TILE_CHUNK) {
        ptrdiff_t count = keys - chunk < TILE_CHUNK ? keys - chunk : TILE_CHUNK;
        Keys from = keys_at(h, kv, span->first_key + chunk);
        if (from.k_scales) pack_chunk(1, h, s, count, from);
        else pack_chunk(0, h, s, count, from);
        for (ptrdiff_t row = 0; row < rows; row += MAX_ROWS) {
            int here = block_rows(&queries, row / MAX_ROWS);
            if (limits[row + here - 1] <= chunk) continue;
            if (here != t.rows) t = tiles_open(here);
            attend_block(h, s, row, &t, limits, chunk, count, from);
        }
    }
    tiles_close();
    for (ptrdiff_t row = 0; row < rows; row++) {
        bf16 *out = h->out + (span->first_query + token + row / group) * h->out_token +
                    (kv * group + row % group) * h->width;
        __m512 inverse = _mm512_set1_ps(1.0f / s->total[row]);
        for (ptrdiff_t c = 0; c < h->width; c += LANES)
            store(out + c, first(h->width - c), _mm512_mul_ps(_mm512_loadu_ps(s->sums + row * s->width + c), inverse));
    }
}
