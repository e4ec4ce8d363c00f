/* The largest results of an LM head, see avx2.c. */
#pragma once

#include "argmax.h"
#include "avx2_linear.h"
#include "avx2_int8.h"

static float norm_bound(__m256 squares) { return 1.001f * __builtin_sqrtf(sum_lanes(squares)); }

/* Add the squares of values and of their rounding errors in 8 bits. */
INLINE void add_squares(__m256 value, float scale, __m256 *whole, __m256 *lost)
{
    __m256 near = _mm256_cvtepi32_ps(quantize(value, _mm256_set1_ps(inverse_of(scale))));
    __m256 part = _mm256_fnmadd_ps(near, _mm256_set1_ps(scale), value);
    *lost = _mm256_fmadd_ps(part, part, *lost);
    *whole = _mm256_fmadd_ps(value, value, *whole);
}

void compute_argmax_bounds(const bf16 *weight, int64_t outputs, int64_t inputs, const float *scales, float *norms,
                           float *errors, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t row = 0; row < outputs; row++) {
        __m256 whole = _mm256_setzero_ps(), lost = _mm256_setzero_ps();
        for (ptrdiff_t k = 0; k < inputs; k += LANES)
            add_squares(load(weight + row * inputs + k, inputs - k), scales[row], &whole, &lost);
        errors[row] = norm_bound(lost);
        norms[row] = norm_bound(whole) + errors[row];
    }
}

static void quantize_with_factors(const bf16 *x, ptrdiff_t inputs, const Quantized *q, ptrdiff_t row, float factors[2])
{
    quantize_row(x, inputs, q, row);
    __m256 whole = _mm256_setzero_ps(), lost = _mm256_setzero_ps();
    for (ptrdiff_t k = 0; k < inputs; k += LANES)
        add_squares(load(x + k, inputs - k), q->scales[k / BLOCK * q->rows + row], &whole, &lost);
    factors[1] = norm_bound(whole);
    factors[0] = norm_bound(lost) + (inputs + 2 * LANES) * 0x1p-23f * factors[1];
}

static void bound_panel(const ArgmaxBounds *s, const Quantized *q, const float *factors, ptrdiff_t rows,
                        ptrdiff_t panel, float *upper, ptrdiff_t panels)
{
    _Alignas(64) float sums[ROW_GROUP * PANEL];
    ptrdiff_t inputs = s->quantized->inputs, column = panel * PANEL, count = s->quantized->outputs - column;
    prefetch_columns(s->quantized->scales, panel);
    prefetch_columns(s->norms, panel);
    prefetch_columns(s->errors, panel);
    for (ptrdiff_t start = 0; start < rows; start += ROW_GROUP) {
        ptrdiff_t here = least(ROW_GROUP, rows - start);
        multiply_int8(q, start, here, inputs, (const char *)s->quantized->packed + panel * inputs * PANEL, 0, sums);
        for (ptrdiff_t m = 0; m < here; m++) {
            __m256 lost = _mm256_set1_ps(factors[2 * (start + m)]), norm = _mm256_set1_ps(factors[2 * (start + m) + 1]);
            __m256 high = _mm256_set1_ps(-INFINITY);
            for (int j = 0; j < PANEL && j < count; j += LANES) {
                __m256 scales = _mm256_loadu_ps(s->quantized->scales + column + j);
                __m256 far = _mm256_mul_ps(load_floats(s->norms + column + j, count - j), lost);
                far = _mm256_fmadd_ps(load_floats(s->errors + column + j, count - j), norm, far);
                __m256 bound = _mm256_fmadd_ps(_mm256_load_ps(sums + m * PANEL + j), scales, far);
                __m256 lanes = _mm256_castsi256_ps(first(count - j));
                high = _mm256_max_ps(high, _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), bound, lanes));
            }
            upper[(start + m) * panels + panel] = max_lanes(high);
        }
    }
}

static void update_argmax(const ArgmaxBounds *s, const bf16 *x, ptrdiff_t panel, ArgmaxResult *found)
{
    float sums[PANEL];
    multiply_row(s->exact, x, panel, sums);
    ptrdiff_t best = 0, count = least(PANEL, s->exact->outputs - panel * PANEL);
    for (ptrdiff_t j = 1; j < count; j++) best = sums[j] > sums[best] ? j : best;
    ArgmaxResult here = {sums[best], panel * PANEL + best};
#pragma omp critical
    if (here.value > found->value || (here.value == found->value && here.column < found->column)) *found = here;
}
