/* Numbers in vectors of AVX2, see avx2.c. */
#pragma once

#include <immintrin.h>

#include "base.h"

enum { LANES = 8, VECTORS = PANEL / LANES };
/* Distances of prefetches, as measured: of weights in bytes, of keys and values in rows. */
enum { PREFETCH_BYTES = 8192, PREFETCH_KEYS = 64 };

INLINE ptrdiff_t least(ptrdiff_t x, ptrdiff_t y) { return x < y ? x : y; }

INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE __m128i narrow(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* The lanes below `count`. */
INLINE __m256i first(ptrdiff_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count > LANES ? LANES : count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE __m256 masked(__m256 x, __m256i lanes) { return _mm256_and_ps(x, _mm256_castsi256_ps(lanes)); }

/* Load up to LANES values, at most `count`; the others are zero. */
INLINE __m256 load(const bf16 *x, ptrdiff_t count)
{
    if (__builtin_expect(count >= LANES, 1)) return widen(_mm_loadu_si128((const __m128i *)x));
    bf16 values[LANES] = {0};
    for (ptrdiff_t i = 0; i < count; i++) values[i] = x[i];
    return widen(_mm_loadu_si128((const __m128i *)values));
}

INLINE void store(bf16 *out, ptrdiff_t count, __m256 x)
{
    if (__builtin_expect(count >= LANES, 1)) {
        _mm_storeu_si128((__m128i *)out, narrow(x));
        return;
    }
    bf16 values[LANES];
    _mm_storeu_si128((__m128i *)values, narrow(x));
    for (ptrdiff_t i = 0; i < count; i++) out[i] = values[i];
}

INLINE __m256 load_floats(const float *x, ptrdiff_t count) { return _mm256_maskload_ps(x, first(count)); }

INLINE float sum_lanes(__m256 x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE float max_lanes(__m256 x)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

INLINE __m256 power_of_2(__m256i exponent)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}

/* 2^x with a polynomial on [-1/2, 1/2] and an error of 2e-7; 0 below -126. `bounded` promises x < 128, or NaN. */
INLINE __m256 exp2_(__m256 x, const int bounded)
{
    if (!bounded) x = _mm256_min_ps(_mm256_set1_ps(130.0f), x); /* NaN if x is NaN */
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = _mm256_sub_ps(x, whole);
    __m256 y = _mm256_set1_ps(1.535336188e-4f);
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.339887440e-3f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(9.618437357e-3f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(5.550332548e-2f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(2.402264791e-1f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(6.931472028e-1f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_cvtps_epi32(whole);
    if (bounded) {
        y = _mm256_mul_ps(y, power_of_2(exponent));
    } else { /* in two steps: 2^128 is infinite, but a smaller y times it may not be */
        __m256i half = _mm256_srai_epi32(exponent, 1);
        y = _mm256_mul_ps(_mm256_mul_ps(y, power_of_2(half)), power_of_2(_mm256_sub_epi32(exponent, half)));
    }
    return _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}

/* x * sigmoid(slope * x) */
INLINE __m256 swish(__m256 x, float slope)
{
    __m256 e = exp2_(_mm256_mul_ps(x, _mm256_set1_ps(-1.44269504f * slope)), 0);
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

/* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as x * sigmoid of twice the argument of tanh */
INLINE __m256 gelu_tanh(__m256 x)
{
    __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.044715f), _mm256_set1_ps(1.0f));
    __m256 e = exp2_(_mm256_mul_ps(_mm256_mul_ps(x, cubic), _mm256_set1_ps(-1.44269504f * 1.59576912f)), 0);
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

/* Transpose 8 rows of 8 dwords. */
INLINE void transpose(__m256i r[LANES])
{
    __m256i t[LANES];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    UNROLL_FOR (int i = 0; i < LANES; i++) r[i] = t[i];
}

/* The first and the second bf16 of each dword. */
INLINE __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

INLINE __m256 odd(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))); }

INLINE __m256i broadcast_dword(const void *x)
{
    int32_t dword;
    memcpy(&dword, x, sizeof dword);
    return _mm256_set1_epi32(dword);
}

/* Without it, gcc reorders products and sums so that there are too few registers for them. */
#define IN_REGISTERS(x, y) __asm__("" : "+x"(x), "+x"(y))
