/* Norms and rotary embedding, see avx512.c. */
#pragma once

#include "avx512_numbers.h"

/* LayerNorm with a bias, RMSNorm without one; the rows of `out` are contiguous. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, ptrdiff_t columns)
{
    __m512 mean = _mm512_setzero_ps(), square = _mm512_setzero_ps();
    if (bias) {
        for (ptrdiff_t k = 0; k < columns; k += LANES) mean = _mm512_add_ps(mean, load(x + k, first(columns - k)));
        mean = _mm512_set1_ps(_mm512_reduce_add_ps(mean) / columns);
    }
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __mmask16 lanes = first(columns - k);
        __m512 value = _mm512_maskz_sub_ps(lanes, load(x + k, lanes), mean);
        square = _mm512_fmadd_ps(value, value, square);
    }
    __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(square) / columns + eps));
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __mmask16 lanes = first(columns - k);
        __m512 value = _mm512_mul_ps(_mm512_sub_ps(load(x + k, lanes), mean), scale);
        value = _mm512_mul_ps(value, load(weight + k, lanes));
        store(out + k, lanes, bias ? _mm512_add_ps(value, load(bias + k, lanes)) : value);
    }
}

void norm(const bf16 *x, int64_t stride, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, int64_t rows,
          int64_t columns, int32_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        norm_row(x + row * stride, weight, bias, eps, out + row * columns, columns);
}

/* Rotate each pair (x[i], x[i + half]) of `heads` heads in place; cos and sin are [rows, half]. */
void rotate(bf16 *x, int64_t stride, const float *cos, const float *sin, int64_t rows, int64_t heads, int64_t half,
            int32_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t head = 0; head < heads; head++)
            for (ptrdiff_t i = 0; i < half; i += LANES) {
                __mmask16 lanes = first(half - i);
                bf16 *low = x + row * stride + head * 2 * half + i, *high = low + half;
                __m512 c = _mm512_maskz_loadu_ps(lanes, cos + row * half + i), a = load(low, lanes);
                __m512 s = _mm512_maskz_loadu_ps(lanes, sin + row * half + i), b = load(high, lanes);
                store(low, lanes, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store(high, lanes, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
            }
}
