/* Lossless weights of 12 bits, see avx2.c. */
#pragma once

#include "arguments.h"
#include "avx2_tile.h"

/* Split a group into its 128 lower and 128 upper bytes. A pair of inputs is in four vectors of eight columns. The bytes
 * of the vectors z and z + 2 are packed into one, from which `read_group` unpacks both: bytes 0 to 31 are from the
 * vectors 0 and 2, the next 32 from 1 and 3. */
static void split_bytes(const __m256i w[2 * VECTORS], uint8_t lower[128], uint8_t upper[128])
{
    __m256i byte = _mm256_set1_epi16(0xff);
    for (int i = 0; i < 4; i++) {
        __m256i left = w[i / 2 * 4 + i % 2], right = w[i / 2 * 4 + i % 2 + 2];
        _mm256_storeu_si256((__m256i *)(lower + 32 * i),
                            _mm256_packus_epi16(_mm256_and_si256(left, byte), _mm256_and_si256(right, byte)));
        _mm256_storeu_si256((__m256i *)(upper + 32 * i),
                            _mm256_packus_epi16(_mm256_srli_epi16(left, 8), _mm256_srli_epi16(right, 8)));
    }
}

/* Choose the 16 most frequent upper bytes of a panel, estimated from a sample. */
static void choose_codes(const __m256i *panel, ptrdiff_t groups, uint8_t high[CODES])
{
    uint32_t counts[256] = {0};
    uint8_t lower[128], upper[128];
    for (ptrdiff_t i = 0; i < SAMPLE; i++) {
        split_bytes(panel + 2 * VECTORS * (groups * i / SAMPLE), lower, upper);
        for (int k = 0; k < 128; k++) counts[upper[k]]++;
    }
    choose_most_frequent(counts, high);
}

INLINE __m256i at(const char *memory, int vector) { return _mm256_loadu_si256((const __m256i *)memory + vector); }

/* Encode 32 upper bytes; those without a code get the code 0. Returns which of them have none. */
static uint32_t encode(const uint8_t upper[32], const uint8_t high[CODES], uint8_t codes[32])
{
    __m256i bytes = at((const char *)upper, 0), found = _mm256_setzero_si256(), result = found;
    for (int code = CODES - 1; code >= 0; code--) { /* the smallest of equal ones is valid */
        __m256i equal = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(high[code]));
        result = _mm256_blendv_epi8(result, _mm256_set1_epi8(code), equal);
        found = _mm256_or_si256(found, equal);
    }
    _mm256_storeu_si256((__m256i *)codes, result);
    return ~(uint32_t)_mm256_movemask_epi8(found);
}

static int code_panel(const bf16 *weights, ptrdiff_t inputs, uint8_t *packed, Codes *codes)
{
    const __m256i *panel = (const __m256i *)weights;
    ptrdiff_t groups = inputs / GROUP, count = 0, limit = max_outliers(inputs);
    choose_codes(panel, groups, codes->high);
    for (ptrdiff_t group = 0; group < groups; group++, panel += 2 * VECTORS, packed += GROUP_BYTES) {
        uint8_t upper[128], found[128];
        split_bytes(panel, packed, upper);
        for (int i = 0; i < 4; i++)
            for (uint32_t rest = encode(upper + 32 * i, codes->high, found + 32 * i); rest; rest &= rest - 1) {
                int index = 32 * i + __builtin_ctz(rest);
                if (count == limit) return 0;
                codes->outliers[count++] = (Outlier){group, index, upper[index]};
            }
        for (int i = 0; i < 64; i++) packed[128 + i] = found[i] | found[64 + i] << 4;
    }
    codes->outliers[count].group = UINT32_MAX;
    return 1;
}

/* Reads a panel of 12-bit or 16-bit weights sequentially, a group at a time. */
typedef struct {
    const char *packed;
    const Outlier *outlier; /* the next one */
    __m256i high;           /* the byte of each code */
} Reader;

INLINE Reader read_panel(const Matrix *m, ptrdiff_t panel)
{
    ptrdiff_t groups = panel * (m->inputs / GROUP);
    if (!m->codes) return (Reader){.packed = (const char *)m->packed + groups * 2 * GROUP * PANEL};
    const Codes *codes = codes_of(m->codes, panel, m->inputs);
    prefetch(codes_of(m->codes, panel + 1, m->inputs));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes->high));
    return (Reader){(const char *)m->packed + groups * GROUP_BYTES, codes->outliers, high};
}

/* Replace the upper bytes of the outliers of a group. */
static void __attribute__((noinline)) replace_outliers(Reader *r, ptrdiff_t group, __m256i upper[4])
{
    uint8_t bytes[128];
    for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)bytes + i, upper[i]);
    for (; r->outlier->group == group; r->outlier++) bytes[r->outlier->index % 128] = r->outlier->high;
    for (int i = 0; i < 4; i++) upper[i] = at((const char *)bytes, i);
}

/* Read the bf16 pairs of four inputs: w[0] to w[3] are the first pair of all columns. With half 0 only those of the
 * vectors 0 and 2 are read, with half 1 those of 1 and 3; with 2 all. */
INLINE void read_group(const int coded, const int half, Reader *r, ptrdiff_t group, __m256i w[2 * VECTORS])
{
    __m256i low = _mm256_set1_epi8(15), upper[4];
    UNROLL_FOR (int i = 0; i < 2; i++) {
        if (!coded || half == 1 - i) continue;
        __m256i codes = at(r->packed, 4 + i);
        upper[i] = _mm256_shuffle_epi8(r->high, _mm256_and_si256(codes, low));
        upper[2 + i] = _mm256_shuffle_epi8(r->high, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
    }
    if (coded && __builtin_expect(r->outlier->group == group, 0)) {
        __m256i replaced[4];
        UNROLL_FOR (int i = 0; i < 4; i++) replaced[i] = upper[half == 2 ? i : i / 2 * 2 + half];
        replace_outliers(r, group, replaced);
        UNROLL_FOR (int i = 0; i < 4; i++)
            if (half == 2 || i % 2 == half) upper[i] = replaced[i];
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        if (half == 1 - i % 2) continue;
        __m256i *to = w + i / 2 * VECTORS + i % 2, lower = at(r->packed, i);
        to[0] = coded ? _mm256_unpacklo_epi8(lower, upper[i]) : at(r->packed, i / 2 * VECTORS + i % 2);
        to[2] = coded ? _mm256_unpackhi_epi8(lower, upper[i]) : at(r->packed, i / 2 * VECTORS + i % 2 + 2);
    }
    r->packed += coded ? GROUP_BYTES : sizeof(__m256i) * 2 * VECTORS;
}

INLINE void prefetch_group(const int coded, const char *packed)
{
    UNROLL_FOR (int line = 0; line < 4; line++)
        if (line < 3 || !coded) prefetch(packed + 64 * line);
}
