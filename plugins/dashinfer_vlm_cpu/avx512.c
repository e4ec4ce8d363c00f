/* Kernels of the vision encoder and the decoder, for CPUs with AVX-512 BF16 and VNNI.
 *
 * Weight matrices are packed into panels of 32 output columns, with pairs (bf16) or quads (int8) of inputs interleaved,
 * so that one instruction multiplies 16 columns; activations are not repacked. Sums run over the inputs in one fixed
 * order, regardless of the number of rows or threads: a row's result is bit-exact in any batch.
 *
 * Built by build.py and called by native*.py in this folder, whose callers guarantee all shapes. Strides count
 * elements.
 */
#include "avx512_linear.h"
#include "avx512_int8.h"
#include "avx512_int4.h"
#ifdef TILES
#include "tiles_int8.h"
#include "tiles_int4.h"
#endif
#include "avx512_argmax.h"
#include "avx512_sample.h"
#include "avx512_norms.h"
#include "attend.h"
#include "gelu.h"
#include "decoder_layers.h"

/* Whether the groups of 4-bit weights have floats as scales. */
static int has_float_scales(const Matrix *m) { return m->group && !is_progressive(m->group); }

/* Workspace size of `linear` in bytes; the same for all weights of this shape that have 4 bits and the same groups,
 * that have 8 bits, or that have more. */
int64_t linear_workspace_size(const Matrix *m, int64_t rows, int32_t threads)
{
    if (!m->scales) return linear_bf16_workspace_size(rows, m->inputs, threads);
#ifdef TILES
    if (has_float_scales(m) && rows > FEW_ROWS_INT8) return linear_tiles_int4_workspace_size(m, rows, threads);
#endif
    if (has_float_scales(m)) return quantized_size_int4(m, rows);
#ifdef TILES
    if (rows > FEW_ROWS_INT8) return linear_tiles_int8_workspace_size(m, rows, threads);
#endif
    return linear_int8_workspace_size(m, rows, threads);
}

/* Multiply x [rows, inputs] by the weights and write the result to `out` or, with `add`, add it. */
void linear_biased(const Matrix *m, const bf16 *x, int64_t stride, int64_t rows, void *out, int64_t out_stride,
                   int32_t add, const float *row_bias, int64_t biased_rows, char *workspace, int32_t threads)
{
    Epilogue ep = {m, out, out_stride, add, {row_bias, rows - biased_rows}};
    if (!m->scales) linear_bf16(x, stride, rows, &ep, workspace, threads);
#ifdef TILES
    else if (has_float_scales(m) && rows > FEW_ROWS_INT8) linear_tiles_int4(x, stride, rows, &ep, workspace, threads);
#endif
    else if (has_float_scales(m)) linear_int4(x, stride, rows, &ep, workspace, threads);
#ifdef TILES
    else if (rows > FEW_ROWS_INT8) linear_tiles_int8(x, stride, rows, &ep, workspace, threads);
#endif
    else linear_int8(x, stride, rows, &ep, workspace, threads);
    if (m->activation == GELU) apply_gelu(&ep, rows, threads);
}

/* Add y to x, both [count]. */
static void add_row(bf16 *x, const bf16 *y, ptrdiff_t count)
{
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        __mmask16 lanes = first(count - k);
        store(x + k, lanes, _mm512_add_ps(load(x + k, lanes), load(y + k, lanes)));
    }
}

/* Quantize a key or value to bytes with one scale, like `quantize_rows` in kernels/kv_cache.py. */
static void quantize_head(const bf16 *x, ptrdiff_t width, int8_t *bytes, float *scale)
{
    *scale = max_abs(x, width) / 127.0f;
    __m512 inverse = _mm512_set1_ps(inverse_scale(*scale));
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        __mmask16 lanes = first(width - i);
        __m512 quotient = _mm512_mul_ps(load(x + i, lanes), inverse);
        __mmask16 ordered = _mm512_cmp_ps_mask(quotient, quotient, _CMP_ORD_Q); /* NaN is stored as 0 */
        __m512i whole = _mm512_maskz_cvtps_epi32(ordered, quotient);
        _mm_mask_storeu_epi8(bytes + i, lanes, _mm512_cvtsepi32_epi8(whole));
    }
}
