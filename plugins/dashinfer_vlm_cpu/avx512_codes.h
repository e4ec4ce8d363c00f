/* Lossless weights of 12 bits. */
#pragma once

#include "avx512_tile.h"

/* Lower and upper bytes of 64 weights, in the order that `both_bytes` expects. */
INLINE __m512i lower_bytes(const __m512i w[2])
{
    __m512i byte = _mm512_set1_epi16(0xff);
    return _mm512_packus_epi16(_mm512_and_si512(w[0], byte), _mm512_and_si512(w[1], byte));
}

INLINE __m512i upper_bytes(const __m512i w[2])
{
    return _mm512_packus_epi16(_mm512_srli_epi16(w[0], 8), _mm512_srli_epi16(w[1], 8));
}

INLINE void both_bytes(__m512i lower, __m512i upper, __m512bh w[2])
{
    w[0] = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
    w[1] = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
}

/* Choose the 16 most frequent upper bytes of a panel, estimated from a sample. */
static void choose_codes(const __m512i *panel, ptrdiff_t groups, uint8_t high[CODES])
{
    uint32_t counts[256] = {0};
    uint8_t bytes[64];
    for (ptrdiff_t i = 0; i < SAMPLE; i++) {
        const __m512i *group = panel + 4 * (groups * i / SAMPLE);
        for (int half = 0; half < 4; half += 2) {
            _mm512_storeu_si512(bytes, upper_bytes(group + half));
            for (int k = 0; k < 64; k++) counts[bytes[k]]++;
        }
    }
    choose_most_frequent(counts, high);
}

/* Encode 64 upper bytes; also returns which of them have no code. */
static __m512i coded(__m512i upper, const uint8_t high[CODES], __mmask64 *outliers)
{
    __m512i codes = _mm512_setzero_si512();
    *outliers = ~(__mmask64)0;
    for (int code = 0; code < CODES; code++) {
        __mmask64 equal = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(high[code])) & *outliers;
        codes = _mm512_mask_mov_epi8(codes, equal, _mm512_set1_epi8(code));
        *outliers &= ~equal;
    }
    return codes;
}

static int code_panel(const bf16 *weights, ptrdiff_t inputs, uint8_t *packed, Codes *codes)
{
    const __m512i *panel = (const __m512i *)weights;
    ptrdiff_t groups = inputs / GROUP, count = 0, limit = max_outliers(inputs);
    choose_codes(panel, groups, codes->high);
    for (ptrdiff_t group = 0; group < groups; group++, panel += 4, packed += GROUP_BYTES) {
        __m512i pieces[2];
        for (int half = 0; half < 2; half++) {
            __mmask64 outliers;
            __m512i upper = upper_bytes(panel + 2 * half);
            uint8_t bytes[64];
            _mm512_storeu_si512(bytes, upper);
            _mm512_storeu_si512(packed + 64 * half, lower_bytes(panel + 2 * half));
            pieces[half] = coded(upper, codes->high, &outliers);
            for (; outliers; outliers &= outliers - 1) {
                int index = __builtin_ctzll(outliers);
                if (count == limit) return 0;
                codes->outliers[count++] = (Outlier){group, 64 * half + index, bytes[index]};
            }
        }
        _mm512_storeu_si512(packed + 128, _mm512_or_si512(pieces[0], _mm512_slli_epi16(pieces[1], 4)));
    }
    codes->outliers[count].group = UINT32_MAX;
    return 1;
}

/* Reads a panel's groups sequentially. */
typedef struct {
    const uint8_t *packed;
    const Outlier *outlier; /* the next one */
    __m512i high;           /* the byte of each code */
} Reader;

INLINE Reader read_panel(const Matrix *m, ptrdiff_t panel)
{
    const Codes *codes = codes_of(m->codes, panel, m->inputs);
    prefetch(codes_of(m->codes, panel + 1, m->inputs), 2);
    __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes->high));
    return (Reader){(const uint8_t *)m->packed + panel * (m->inputs / GROUP) * GROUP_BYTES, codes->outliers, high};
}

INLINE void read_group(Reader *r, ptrdiff_t group, __m512bh w[4])
{
    __m512i low = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(r->packed + 128), upper[2];
    upper[0] = _mm512_shuffle_epi8(r->high, _mm512_and_si512(codes, low));
    upper[1] = _mm512_shuffle_epi8(r->high, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
    for (; __builtin_expect(r->outlier->group == group, 0); r->outlier++) {
        __mmask64 bit = (__mmask64)1 << r->outlier->index % 64, front = r->outlier->index < 64 ? bit : 0;
        __m512i high = _mm512_set1_epi8(r->outlier->high);
        upper[0] = _mm512_mask_mov_epi8(upper[0], front, high);
        upper[1] = _mm512_mask_mov_epi8(upper[1], bit & ~front, high);
    }
    both_bytes(_mm512_loadu_si512(r->packed), upper[0], w);
    both_bytes(_mm512_loadu_si512(r->packed + 64), upper[1], w + 2);
    r->packed += GROUP_BYTES;
}

/* Like `tile`, bit-exactly; unless `plain` is null, the unpacked panel is written to it in the layout of `tile`. */
INLINE void tile_coded(const int rows, const bf16 *a, ptrdiff_t lda, Reader r, ptrdiff_t inputs, bf16 *plain,
                       __m512 acc[TILE_ROWS][2])
{
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t group = 0; group < inputs / GROUP; group++, a += GROUP) {
        __m512bh w[4];
        prefetch(r.packed + PREFETCH_BYTES, 3);
        read_group(&r, group, w);
        if (plain)
            UNROLL_FOR (int i = 0; i < 4; i++) _mm512_storeu_si512(plain + (4 * group + i) * PANEL, (__m512i)w[i]);
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m512bh x = pair(a + m * lda), y = pair(a + m * lda + 2);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], x, w[0]);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], x, w[1]);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], y, w[2]);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], y, w[3]);
        }
    }
}
