/* Chunks of keys and values, and the softmax of their scores; see avx512.c. */
#pragma once

#include "avx512_keys.h"
#include "avx512_tile.h"

/* What QUERY_ROWS queries of width 128 need fits an L2 cache of 1 MB. */
enum { KEY_CHUNK = 512, QUERY_ROWS = 768 };

/* For 8-bit keys and values, everything is multiplied as integers of 16 bits with exact sums: keys and values are
 * sign-extended, which takes one instruction instead of the five of a conversion to bf16, and queries and probs are
 * quantized to 16 bits, with a scale per query, and per query and chunk of keys. */
enum { MAX_INT16 = 32767 };

typedef struct {         /* per thread; bf16, or int16 for 8-bit keys */
    bf16 *queries;       /* [QUERY_ROWS, width] */
    bf16 *keys;          /* KEY_CHUNK / PANEL panels of [width / 2, PANEL] pairs */
    bf16 *values;        /* [KEY_CHUNK / 2, columns] pairs, where columns is the width rounded up to LANES */
    bf16 *probs;         /* [TILE_ROWS, KEY_CHUNK] */
    float *query_scales; /* [QUERY_ROWS], of int16 queries */
    float *scores;       /* [TILE_ROWS, KEY_CHUNK] */
    float *sums;         /* [QUERY_ROWS, columns] */
    float *largest;      /* [QUERY_ROWS], the largest score so far */
    float *total;        /* [QUERY_ROWS], the sum of the probs so far */
} Scratch;

static size_t scratch_bytes(ptrdiff_t width)
{
    ptrdiff_t columns = round_up(width, LANES);
    return 64 * 9 + 2 * (QUERY_ROWS * width + KEY_CHUNK * width + KEY_CHUNK * columns + TILE_ROWS * KEY_CHUNK) +
           4 * (TILE_ROWS * KEY_CHUNK + QUERY_ROWS * columns + 3 * QUERY_ROWS);
}

static Scratch carve_scratch(char *from, ptrdiff_t width)
{
    ptrdiff_t columns = round_up(width, LANES);
    Scratch s;
    s.queries = carve(&from, 2 * QUERY_ROWS * width);
    s.keys = carve(&from, 2 * KEY_CHUNK * width);
    s.values = carve(&from, 2 * KEY_CHUNK * columns);
    s.probs = carve(&from, 2 * TILE_ROWS * KEY_CHUNK);
    s.scores = carve(&from, 4 * TILE_ROWS * KEY_CHUNK);
    s.sums = carve(&from, 4 * QUERY_ROWS * columns);
    s.largest = carve(&from, 4 * QUERY_ROWS);
    s.total = carve(&from, 4 * QUERY_ROWS);
    s.query_scales = carve(&from, 4 * QUERY_ROWS);
    return s;
}

INLINE __m256i to_int16(__m512 x) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)); }

/* Quantize a query to 16 bits; returns its scale. Products with 8-bit keys fit into 32 bits. */
static float quantize_query(const bf16 *query, ptrdiff_t width, bf16 *out)
{
    ptrdiff_t limit = INT32_MAX / 127 / width;
    float scale = max_abs(query, width) / (limit < MAX_INT16 ? limit : MAX_INT16);
    __m512 inverse = _mm512_set1_ps(inverse_scale(scale));
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        __mmask16 lanes = first(width - i);
        _mm256_mask_storeu_epi16(out + i, lanes, to_int16(_mm512_mul_ps(load(query + i, lanes), inverse)));
    }
    return scale;
}

/* Sums of the products below. The compiler would copy sums of the type __m512i, which has 64-bit elements, in each
 * step. */
typedef int32_t Sums __attribute__((vector_size(64)));

/* Add the products of pairs of int16. */
INLINE Sums add_products(Sums sums, const bf16 *both, __m512i pairs)
{
    return (Sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)pair(both), pairs);
}

/* Like `tile`, for int16. */
INLINE void tile_int16(const int rows, const int vectors, const char *next, const bf16 *a, ptrdiff_t lda,
                       const bf16 *panel, ptrdiff_t width, ptrdiff_t pairs, Sums acc[TILE_ROWS][2])
{
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = (Sums){0};
    for (ptrdiff_t p = 0; p < pairs; p++, panel += 2 * width) {
        if (next) prefetch(next + 64 * p, 1);
        __m512i left = _mm512_loadu_si512(panel), right = vectors > 1 ? _mm512_loadu_si512(panel + 2 * LANES) : left;
        UNROLL_FOR (int m = 0; m < rows; m++) {
            acc[m][0] = add_products(acc[m][0], a + m * lda + 2 * p, left);
            if (vectors > 1) acc[m][1] = add_products(acc[m][1], a + m * lda + 2 * p, right);
        }
    }
}

/* Load up to 32 elements of a key or value: bf16 as they are, bytes as int16. */
INLINE __m512i load_32(const int is_int8, const void *from, __mmask32 lanes)
{
    return is_int8 ? _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(lanes, from)) : _mm512_maskz_loadu_epi16(lanes, from);
}

/* Pack `count` keys into panels of PANEL columns; the last panel is padded with zeros. */
INLINE void pack_keys(const int is_int8, const void *k, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width,
                      bf16 *packed)
{
    ptrdiff_t pairs = width / 2;
    for (ptrdiff_t key = 0; key < round_up(count, PANEL); key += LANES)
        for (ptrdiff_t p = 0; p < pairs; p += LANES) {
            __m512i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                __mmask32 lanes = key + j < count ? first_of_32(width - 2 * p) : 0;
                rows[j] = load_32(is_int8, element(k, is_int8, (key + j) * stride + 2 * p), lanes);
            }
            transpose(rows);
            bf16 *to = packed + 2 * (key / PANEL * pairs * PANEL + key % PANEL);
            for (int i = 0; i < LANES && p + i < pairs; i++) _mm512_storeu_si512(to + (p + i) * 2 * PANEL, rows[i]);
        }
}

/* Load up to 16 elements of a value like `load_32`, each into 32 bits. */
INLINE __m512i load_16(const int is_int8, const void *from, __mmask16 lanes)
{
    return _mm512_cvtepu16_epi32(is_int8 ? _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(lanes, from))
                                         : _mm256_maskz_loadu_epi16(lanes, from));
}

/* Pack `count` values with pairs of keys interleaved; an odd last key is paired with zero. */
INLINE void pack_values(const int is_int8, const void *v, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width,
                        bf16 *packed)
{
    ptrdiff_t columns = round_up(width, LANES);
    for (ptrdiff_t key = 0; key < count; key += 2)
        for (ptrdiff_t c = 0; c < width; c += LANES) {
            __mmask16 lanes = first(width - c);
            __m512i low = load_16(is_int8, element(v, is_int8, key * stride + c), lanes);
            __m512i high = key + 1 < count ? load_16(is_int8, element(v, is_int8, (key + 1) * stride + c), lanes)
                                           : _mm512_setzero_si512();
            _mm512_storeu_si512(packed + key * columns + 2 * c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* Update the largest score of a row; returns the factor by which its earlier sums must be scaled. */
INLINE float update_largest(const float *scores, ptrdiff_t count, float *largest)
{
    __m512 high = _mm512_set1_ps(*largest);
    for (ptrdiff_t i = 0; i < count; i += LANES)
        high = _mm512_mask_max_ps(high, first(count - i), high, _mm512_loadu_ps(scores + i));
    float before = *largest;
    *largest = _mm512_reduce_max_ps(high);
    return _mm512_cvtss_f32(exp2_(_mm512_set1_ps(before - *largest), 1));
}

/* Unnormalized softmax probabilities (probs) of 16 keys, from key i of `count` on. */
INLINE __m512 probs_at(const float *scores, ptrdiff_t i, ptrdiff_t count, float largest)
{
    __m512 score = _mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(largest));
    return _mm512_maskz_mov_ps(first(count - i), exp2_(score, 1));
}

/* Compute the probs of one row over a chunk, relative to the largest score so far; returns the factor by which the
 * earlier sums must be scaled. */
INLINE float softmax_chunk(float *scores, bf16 *probs, ptrdiff_t count, ptrdiff_t padded, float *largest, float *total)
{
    float shrink = update_largest(scores, count, largest);
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < padded; i += LANES) {
        __m512 prob = probs_at(scores, i, count, *largest);
        sum = _mm512_add_ps(sum, prob);
        _mm256_storeu_si256((__m256i *)(probs + i), narrow(prob));
    }
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    return shrink;
}

/* The same for 8-bit values, by whose scales the probs are multiplied. They are then quantized with one scale for the
 * chunk, whose sums fit into 32 bits: KEY_CHUNK * MAX_INT16 * 127 < 2^31. */
INLINE float softmax_chunk_int8(float *scores, bf16 *probs, const float *v_scales, ptrdiff_t count, ptrdiff_t padded,
                                float *largest, float *total, float *prob_scale)
{
    float shrink = update_largest(scores, count, largest);
    __m512 sum = _mm512_setzero_ps();
    __m512i high = _mm512_setzero_si512(); /* floats that are not negative are ordered like integers, with NaN last */
    for (ptrdiff_t i = 0; i < padded; i += LANES) {
        __m512 prob = probs_at(scores, i, count, *largest);
        sum = _mm512_add_ps(sum, prob);
        prob = _mm512_mul_ps(prob, _mm512_maskz_loadu_ps(first(count - i), v_scales + i));
        high = _mm512_max_epu32(high, _mm512_castps_si512(prob));
        _mm512_storeu_ps(scores + i, prob);
    }
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    uint32_t bits = _mm512_reduce_max_epu32(high);
    float largest_prob;
    memcpy(&largest_prob, &bits, sizeof bits);
    *prob_scale = largest_prob / MAX_INT16;
    __m512 inverse = _mm512_set1_ps(inverse_scale(*prob_scale));
    for (ptrdiff_t i = 0; i < padded; i += LANES)
        _mm256_storeu_si256((__m256i *)(probs + i), to_int16(_mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse)));
    return shrink;
}
