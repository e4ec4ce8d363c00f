/* The largest results of an LM head, see avx512.c. */
#pragma once

#include "argmax.h"
#include "avx512_linear.h"
#include "avx512_int8.h"

static float norm_bound(__m512 squares) { return 1.001f * __builtin_sqrtf(_mm512_reduce_add_ps(squares)); }

void compute_argmax_bounds(const bf16 *weight, int64_t outputs, int64_t inputs, const float *scales, float *norms,
                           float *errors, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t row = 0; row < outputs; row++) {
        __m512 scale = _mm512_set1_ps(scales[row]), inverse = _mm512_set1_ps(inverse_of(scales[row]));
        __m512 whole = _mm512_setzero_ps(), lost = _mm512_setzero_ps();
        for (ptrdiff_t k = 0; k < inputs; k += LANES) {
            __m512 x = load(weight + row * inputs + k, first(inputs - k));
            __m512i near = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
            __m512 part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(near), scale, x);
            lost = _mm512_fmadd_ps(part, part, lost);
            whole = _mm512_fmadd_ps(x, x, whole);
        }
        errors[row] = norm_bound(lost);
        norms[row] = norm_bound(whole) + errors[row];
    }
}

static void quantize_with_factors(const bf16 *x, ptrdiff_t inputs, const Quantized *q, ptrdiff_t row, float factors[2])
{
    ptrdiff_t blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    quantize_row(x, inputs, q->bytes + row * inputs, 64, q->scales + row * blocks, q->offsets + row * blocks);
    __m512 whole = _mm512_setzero_ps(), lost = _mm512_setzero_ps();
    for (ptrdiff_t k = 0; k < inputs; k += LANES) {
        __mmask16 lanes = first(inputs - k);
        __m512 value = load(x + k, lanes), scale = _mm512_set1_ps(q->scales[row * blocks + k / QUANT_BLOCK]);
        __m512i bytes = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, q->bytes + row * inputs + k));
        __m512 part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(bytes), scale, value);
        lost = _mm512_fmadd_ps(part, part, lost);
        whole = _mm512_fmadd_ps(value, value, whole);
    }
    factors[1] = norm_bound(whole);
    factors[0] = norm_bound(lost) + (inputs + LANES) * 0x1p-23f * factors[1];
}

static void bound_panel(const ArgmaxBounds *s, const Quantized *q, const float *factors, ptrdiff_t rows,
                        ptrdiff_t panel, float *upper, ptrdiff_t panels)
{
    ptrdiff_t inputs = s->quantized->inputs, column = panel * PANEL,
              blocks = (rows + TILE_ROWS_INT8 - 1) / TILE_ROWS_INT8;
    const uint8_t *weights = (const uint8_t *)s->quantized->packed + panel * inputs * PANEL;
    __mmask16 lanes[2];
    __m512 scales[2], norms[2], errors[2];
    UNROLL_FOR (int z = 0; z < 2; z++) {
        lanes[z] = first(s->quantized->outputs - column - z * LANES);
        scales[z] = _mm512_loadu_ps(s->quantized->scales + column + z * LANES);
        norms[z] = _mm512_maskz_loadu_ps(lanes[z], s->norms + column + z * LANES);
        errors[z] = _mm512_maskz_loadu_ps(lanes[z], s->errors + column + z * LANES);
    }
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = rows * block / blocks, next = rows * (block + 1) / blocks;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            tile_int8(rows, 0, 1, q, row, inputs, weights, NULL, acc);
            for (int m = 0; m < rows; m++) {
                __m512 norm = _mm512_set1_ps(factors[2 * (row + m) + 1]);
                __m512 lost = _mm512_set1_ps(factors[2 * (row + m)]);
                float high[2];
                UNROLL_FOR (int z = 0; z < 2; z++) {
                    __m512 far = _mm512_fmadd_ps(errors[z], norm, _mm512_mul_ps(norms[z], lost));
                    high[z] = _mm512_mask_reduce_max_ps(lanes[z], _mm512_fmadd_ps(acc[m][z], scales[z], far));
                }
                upper[(row + m) * panels + panel] = high[0] > high[1] ? high[0] : high[1];
            }
        })
    }
}

static void update_argmax(const ArgmaxBounds *s, const bf16 *x, ptrdiff_t panel, ArgmaxResult *found)
{
    const Matrix *m = s->exact;
    __m512 acc[1][2];
    multiply_row(m, x, panel, acc[0]);
    for (int z = 0; z < 2; z++) {
        ptrdiff_t column = panel * PANEL + z * LANES;
        __mmask16 lanes = first(s->exact->outputs - column);
        float value = _mm512_mask_reduce_max_ps(lanes, acc[0][z]);
        __mmask16 equal = _mm512_mask_cmp_ps_mask(lanes, acc[0][z], _mm512_set1_ps(value), _CMP_EQ_OQ);
        if (!equal) continue;
        column += __builtin_ctz(equal);
#pragma omp critical
        if (value > found->value || (value == found->value && column < found->column))
            *found = (ArgmaxResult){value, column};
    }
}
