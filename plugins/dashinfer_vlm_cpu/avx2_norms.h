/* Norms and rotary embedding, see avx2.c. */
#pragma once

#include "avx2_numbers.h"

/* LayerNorm with a bias, RMSNorm without one; the rows of `out` are contiguous. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, ptrdiff_t columns)
{
    __m256 mean = _mm256_setzero_ps(), square = _mm256_setzero_ps();
    if (bias) {
        for (ptrdiff_t k = 0; k < columns; k += LANES) mean = _mm256_add_ps(mean, load(x + k, columns - k));
        mean = _mm256_set1_ps(sum_lanes(mean) / columns);
    }
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __m256 value = masked(_mm256_sub_ps(load(x + k, columns - k), mean), first(columns - k));
        square = _mm256_fmadd_ps(value, value, square);
    }
    __m256 scale = _mm256_set1_ps(1.0f / __builtin_sqrtf(sum_lanes(square) / columns + eps));
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __m256 value = _mm256_mul_ps(_mm256_sub_ps(load(x + k, columns - k), mean), scale);
        value = _mm256_mul_ps(value, load(weight + k, columns - k));
        store(out + k, columns - k, bias ? _mm256_add_ps(value, load(bias + k, columns - k)) : value);
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
                bf16 *low = x + row * stride + head * 2 * half + i, *high = low + half;
                __m256 c = load_floats(cos + row * half + i, half - i), a = load(low, half - i);
                __m256 s = load_floats(sin + row * half + i, half - i), b = load(high, half - i);
                store(low, half - i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
                store(high, half - i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
            }
}
