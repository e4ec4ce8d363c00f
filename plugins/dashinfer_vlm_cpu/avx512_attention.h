/* Attention, see avx512.c. */
#pragma once

#include "avx512_chunk.h"

enum { PREFETCH_KEYS = 64 }; /* the distance of prefetches in rows, as measured */

/* Where values are prefetched: PREFETCH_KEYS rows ahead and, in place of rows after the last one of the chunk, the keys
 * that are read next. */
typedef struct {
    const char *row, *next;
    ptrdiff_t left; /* rows up to `next` */
} Ahead;

INLINE Ahead ahead_of(const void *v, ptrdiff_t row_bytes, ptrdiff_t count, const void *next)
{
    if (count <= PREFETCH_KEYS) return (Ahead){next, next, 0};
    return (Ahead){(const char *)v + PREFETCH_KEYS * row_bytes, next, round_up(count - PREFETCH_KEYS, 2)};
}

INLINE void prefetch_two_rows(Ahead *a, ptrdiff_t row_bytes)
{
    _mm_prefetch(a->row, _MM_HINT_T1);
    _mm_prefetch(a->row + row_bytes, _MM_HINT_T1);
    a->left -= 2;
    a->row = a->left ? a->row + 2 * row_bytes : a->next;
}

/* acc[m] = sum over `count` keys of probability times value, for up to PANEL columns of unpacked values: bit-exactly
 * like `tile` with packed values. */
INLINE void tile_values(const int rows, const bf16 *probs, const bf16 *v, ptrdiff_t stride, ptrdiff_t count,
                        ptrdiff_t columns, const void *next, __m512 acc[TILE_ROWS][2])
{
    Ahead ahead = ahead_of(v, 2 * stride, count, next);
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
    __mmask32 lanes = first_of_32(columns);
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t key = 0; key < count; key += 2, v += 2 * stride) {
        prefetch_two_rows(&ahead, 2 * stride);
        __m512i even = _mm512_maskz_loadu_epi16(lanes, v);
        __m512i odd = _mm512_maskz_loadu_epi16(key + 1 < count ? lanes : 0, v + stride);
        __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd), high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m512bh prob = pair(probs + m * KEY_CHUNK + key);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], prob, low);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], prob, high);
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++) {
        __m512 low = acc[m][0], high = acc[m][1];
        acc[m][0] = _mm512_permutex2var_ps(low, left, high);
        acc[m][1] = _mm512_permutex2var_ps(low, right, high);
    }
}

/* The same for 8-bit values. */
INLINE void tile_values_int8(const int rows, const bf16 *probs, const int8_t *v, ptrdiff_t stride, ptrdiff_t count,
                             ptrdiff_t columns, const void *next, Sums acc[TILE_ROWS][2])
{
    Ahead ahead = ahead_of(v, stride, count, next);
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
    __mmask32 lanes = first_of_32(columns);
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = (Sums){0};
    for (ptrdiff_t key = 0; key < count; key += 2, v += 2 * stride) {
        prefetch_two_rows(&ahead, stride);
        __m512i even = load_32(1, v, lanes), odd = load_32(1, v + stride, key + 1 < count ? lanes : 0);
        __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        UNROLL_FOR (int m = 0; m < rows; m++) {
            acc[m][0] = add_products(acc[m][0], probs + m * KEY_CHUNK + key, low);
            acc[m][1] = add_products(acc[m][1], probs + m * KEY_CHUNK + key, high);
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++) {
        __m512i low = (__m512i)acc[m][0], high = (__m512i)acc[m][1];
        acc[m][0] = (Sums)_mm512_permutex2var_epi32(low, left, high);
        acc[m][1] = (Sums)_mm512_permutex2var_epi32(low, right, high);
    }
}

/* Scores of up to TILE_ROWS queries and a panel of PANEL keys, of which `count` exist. */
INLINE void score_panel(const int rows, const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t row,
                        const bf16 *keys, const float *k_scales, ptrdiff_t count, const char *next, float *scores)
{
    const bf16 *queries = s->queries + row * h->width;
    __m512 scale = _mm512_set1_ps(h->scale * 1.44269504f), by[2] = {scale, scale}, acc[TILE_ROWS][2];
    if (is_int8) {
        Sums sums[TILE_ROWS][2];
        tile_int16(rows, 2, next, queries, h->width, keys, PANEL, h->width / 2, sums);
        by[0] = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(first(count), k_scales));
        by[1] = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(first(count - LANES), k_scales + LANES));
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m512 query_scale = _mm512_set1_ps(s->query_scales[row + m]);
            acc[m][0] = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sums[m][0]), query_scale);
            acc[m][1] = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sums[m][1]), query_scale);
        }
    } else {
        tile(rows, 2, next, queries, h->width, keys, PANEL, h->width / 2, acc);
    }
    UNROLL_FOR (int m = 0; m < rows; m++) {
        _mm512_storeu_ps(scores + m * KEY_CHUNK, _mm512_mul_ps(acc[m][0], by[0]));
        _mm512_storeu_ps(scores + m * KEY_CHUNK + LANES, _mm512_mul_ps(acc[m][1], by[1]));
    }
}

/* Sums of probability times value for up to PANEL columns, from column `c` on. */
INLINE void mix_values(const int rows, const int once, const AttentionArgs *h, const Scratch *s, ptrdiff_t c,
                       ptrdiff_t count, Keys from, __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t columns = round_up(h->width, LANES), pairs = (count + 1) / 2;
    const bf16 *values = s->values + 2 * c;
    const void *next = element(from.next, 0, c);
    if (once) tile_values(rows, s->probs, (const bf16 *)from.v + c, from.stride, count, h->width - c, next, acc);
    else if (c + LANES < columns) tile(rows, 2, NULL, s->probs, KEY_CHUNK, values, columns, pairs, acc);
    else tile(rows, 1, NULL, s->probs, KEY_CHUNK, values, columns, pairs, acc);
}

/* The same for 8-bit values. */
INLINE void mix_values_int8(const int rows, const int once, const AttentionArgs *h, const Scratch *s, ptrdiff_t c,
                            ptrdiff_t count, Keys from, const float *prob_scales, __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t columns = round_up(h->width, LANES), pairs = (count + 1) / 2;
    const bf16 *values = s->values + 2 * c;
    Sums sums[TILE_ROWS][2];
    const void *next = element(from.next, 1, c);
    if (once)
        tile_values_int8(rows, s->probs, (const int8_t *)from.v + c, from.stride, count, h->width - c, next, sums);
    else if (c + LANES < columns) tile_int16(rows, 2, NULL, s->probs, KEY_CHUNK, values, columns, pairs, sums);
    else tile_int16(rows, 1, NULL, s->probs, KEY_CHUNK, values, columns, pairs, sums);
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++)
            acc[m][z] = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sums[m][z]), _mm512_set1_ps(prob_scales[m]));
}

/* Attend up to TILE_ROWS queries to a chunk of keys and update their sums, largest scores and totals. Keys and values
 * are packed in `s` or, with `once`, unpacked in `from`, because no other query attends to them. */
INLINE void attend_rows(const int rows, const int once, const int is_int8, const AttentionArgs *h, const Scratch *s,
                        ptrdiff_t row, const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    ptrdiff_t columns = round_up(h->width, LANES), padded = round_up(count, PANEL);
    for (ptrdiff_t key = 0; key < padded; key += PANEL) {
        const char *next = NULL;
        if (once) {
            ptrdiff_t later = key + PREFETCH_KEYS, left = count - key < PANEL ? count - key : PANEL;
            next = later < padded ? element(from.k, is_int8, later * from.stride)
                                  : element(from.v, is_int8, (later - padded) * from.stride);
            pack_keys(is_int8, element(from.k, is_int8, key * from.stride), from.stride, left, h->width, s->keys);
        }
        score_panel(rows, is_int8, h, s, row, s->keys + (once ? 0 : key * h->width),
                    is_int8 ? from.k_scales + key : NULL, count - key, next, s->scores + key);
    }
    float shrink[TILE_ROWS], prob_scales[TILE_ROWS];
    for (int m = 0; m < rows; m++) {
        ptrdiff_t seen = limits[row + m] - chunk < count ? limits[row + m] - chunk : count;
        float *scores = s->scores + m * KEY_CHUNK, *largest = s->largest + row + m, *total = s->total + row + m;
        bf16 *probs = s->probs + m * KEY_CHUNK;
        shrink[m] = is_int8 ? softmax_chunk_int8(scores, probs, from.v_scales, seen, padded, largest, total,
                                                 prob_scales + m)
                            : softmax_chunk(scores, probs, seen, padded, largest, total);
    }
    for (ptrdiff_t c = 0; c < columns; c += PANEL) {
        __m512 acc[TILE_ROWS][2];
        if (is_int8) mix_values_int8(rows, once, h, s, c, count, from, prob_scales, acc);
        else mix_values(rows, once, h, s, c, count, from, acc);
        UNROLL_FOR (int m = 0; m < rows; m++) {
            float *sum = s->sums + (row + m) * columns + c;
            __m512 by = _mm512_set1_ps(shrink[m]);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), by, acc[m][0]));
            if (c + LANES < columns)
                _mm512_storeu_ps(sum + LANES, _mm512_fmadd_ps(_mm512_loadu_ps(sum + LANES), by, acc[m][1]));
        }
    }
}

INLINE void pack_chunk(const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t count, Keys from)
{
    pack_keys(is_int8, from.k, from.stride, count, h->width, s->keys);
    pack_values(is_int8, from.v, from.stride, count, h->width, s->values);
}

/* Attend all queries of a tile to a chunk of keys. */
INLINE void attend_chunk(const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t row_count,
                         const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    if (row_count <= TILE_ROWS) {
        WITH_ROWS(row_count, attend_rows(rows, 1, is_int8, h, s, 0, limits, chunk, count, from))
        return;
    }
    pack_chunk(is_int8, h, s, count, from);
    for (ptrdiff_t row = 0; row < row_count; row += TILE_ROWS) {
        ptrdiff_t here = row_count - row < TILE_ROWS ? row_count - row : TILE_ROWS;
        if (limits[row + here - 1] <= chunk) continue;
        WITH_ROWS(here, attend_rows(rows, 0, is_int8, h, s, row, limits, chunk, count, from))
    }
}

/* Two functions, each small enough for the compiler to keep the strides of its loops in registers. */
static __attribute__((noinline)) void attend_chunk_bf16(const AttentionArgs *h, const Scratch *s, ptrdiff_t row_count,
                                                        const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count,
                                                        Keys from)
{
    attend_chunk(0, h, s, row_count, limits, chunk, count, from);
}

static __attribute__((noinline)) void attend_chunk_int8(const AttentionArgs *h, const Scratch *s, ptrdiff_t row_count,
                                                        const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count,
                                                        Keys from)
{
    attend_chunk(1, h, s, row_count, limits, chunk, count, from);
}

/* Attend the queries [token, end) of a span, for all heads that share the keys of head `kv`. The keys `next` will be
 * read after that. */
static void attend_tile(const AttentionArgs *h, const KVSpan *span, const Scratch *s, ptrdiff_t kv, ptrdiff_t token,
                        ptrdiff_t end, const void *next)
{
    ptrdiff_t group = h->heads / h->kv_heads, rows = (end - token) * group, columns = round_up(h->width, LANES);
    ptrdiff_t limits[QUERY_ROWS];
    for (ptrdiff_t row = 0; row < rows; row++) {
        ptrdiff_t at = token + row / group, head = kv * group + row % group;
        const bf16 *query = h->q + (span->first_query + at) * h->q_token + head * h->q_head;
        if (h->k_scales) s->query_scales[row] = quantize_query(query, h->width, s->queries + row * h->width);
        else memcpy(s->queries + row * h->width, query, 2 * h->width);
        limits[row] = span->start < 0 ? span->num_keys : span->start + at + 1;
        s->largest[row] = -1e30f;
        s->total[row] = 0;
    }
    memset(s->sums, 0, sizeof(float) * rows * columns);
    ptrdiff_t keys = limits[rows - 1];
    for (ptrdiff_t chunk = 0; chunk < keys; chunk += KEY_CHUNK) {
        ptrdiff_t count = keys - chunk < KEY_CHUNK ? keys - chunk : KEY_CHUNK;
        Keys from = keys_at(h, kv, span->first_key + chunk);
        from.next = chunk + KEY_CHUNK < keys ? keys_at(h, kv, span->first_key + chunk + KEY_CHUNK).k : next;
        if (from.k_scales) attend_chunk_int8(h, s, rows, limits, chunk, count, from);
        else attend_chunk_bf16(h, s, rows, limits, chunk, count, from);
    }
    for (ptrdiff_t row = 0; row < rows; row++) {
        bf16 *out = h->out + (span->first_query + token + row / group) * h->out_token +
                    (kv * group + row % group) * h->width;
        __m512 inverse = _mm512_set1_ps(1.0f / s->total[row]);
        for (ptrdiff_t c = 0; c < h->width; c += LANES)
            store(out + c, first(h->width - c), _mm512_mul_ps(_mm512_loadu_ps(s->sums + row * columns + c), inverse));
    }
}
