/* Numbers in vectors of AVX-512, see avx512.c. */
#pragma once

#include <immintrin.h>

#include "base.h"

enum { LANES = 16 };

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE __mmask16 first(ptrdiff_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

INLINE __mmask32 first_of_32(ptrdiff_t count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

INLINE __m512 load(const bf16 *x, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, x)); }

INLINE void store(bf16 *out, __mmask16 lanes, __m512 x) { _mm256_mask_storeu_epi16(out, lanes, narrow(x)); }

INLINE __m512bh pair(const bf16 *x)
{
    int32_t both;
    memcpy(&both, x, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* 2^x with a polynomial on [-1/2, 1/2], whose coefficients begin with that of the highest power; 0 below -126.
 * x is finite, -infinity or NaN. */
INLINE __m512 exp2_by(const float *coefficients, const int degree, __m512 x)
{
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
           part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(coefficients[0]);
    UNROLL_FOR (int i = 1; i <= degree; i++) y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(coefficients[i]));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, whole);
}

/* 2^x with an error of 2e-7. `bounded` promises x < 128, or NaN. */
INLINE __m512 exp2_(__m512 x, const int bounded)
{
    static const float coefficients[] = {
        1.535336188e-4f, 1.339887440e-3f, 9.618437357e-3f, 5.550332548e-2f, 2.402264791e-1f, 6.931472028e-1f, 1.0f};
    if (!bounded) x = _mm512_min_ps(_mm512_set1_ps(130.0f), x); /* NaN if x is NaN */
    return exp2_by(coefficients, 6, x);
}

/* x * sigmoid(slope * x) */
INLINE __m512 swish(__m512 x, float slope)
{
    __m512 e = exp2_(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f * slope)), 0);
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as x * sigmoid of twice the argument of tanh */
INLINE __m512 gelu_tanh(__m512 x)
{
    __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    __m512 e = exp2_(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(-1.44269504f * 1.59576912f)), 0);
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* Transpose 16 rows of 16 dwords. */
INLINE void transpose(__m512i r[LANES])
{
    __m512i t[LANES];
    UNROLL_FOR (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL_FOR (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* The largest magnitude, NaN if any value is NaN: without the sign, floats are ordered like integers, with NaN last. */
static float max_abs(const bf16 *x, ptrdiff_t count)
{
    __m512i largest = _mm512_setzero_si512();
    for (ptrdiff_t k = 0; k < count; k += LANES)
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(load(x + k, first(count - k)))));
    uint32_t bits = _mm512_reduce_max_epu32(largest);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
