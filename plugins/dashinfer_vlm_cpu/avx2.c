/* Kernels of the vision encoder and the decoder, for CPUs with AVX2 and FMA, optionally with AVX-VNNI.
 *
 * Functions and layouts of weights are those of avx512.c: panels of 32 output columns, with pairs (bf16) or quads
 * (int8) of inputs interleaved. There are no bf16 products: weights are widened to float, in registers for few rows,
 * else into a buffer in the L1 cache that all rows use; activations are widened once per call. Sums run over the inputs
 * in one fixed order, regardless of the number of rows or threads: a row's result is bit-exact in any batch.
 *
 * Built by build.py and called by native*.py in this folder, whose callers guarantee all shapes. Strides count
 * elements.
 */
#include "avx2_linear.h"
#include "avx2_int8.h"
#include "avx2_int4.h"
#include "avx2_argmax.h"
#include "avx2_sample.h"
#include "avx2_norms.h"
#include "attend.h"
#include "gelu.h"
#include "decoder_layers.h"

/* With VNNI and more rows than this, 4-bit weights with integer steps are unpacked to 8 bits. */
enum { PROGRESSIVE_ROWS = 4 };
/* A workspace for some rows must suffice for fewer rows. */
_Static_assert(PROGRESSIVE_ROWS *(BLOCK + 4 + 2 * STEP_GROUPS) <= (PROGRESSIVE_ROWS + 1) * (BLOCK + 8), "workspace");

/* Whether the sums of codes are multiplied by the scales of groups. */
static int multiplies_codes(const Matrix *m, ptrdiff_t rows)
{
    return m->group && !(VNNI && is_progressive(m->group) && rows > PROGRESSIVE_ROWS);
}

/* Workspace size of `linear` in bytes; the same for all weights of this shape that have 4 bits and
 * the same groups, that have 8 bits, or that have more. */
int64_t linear_workspace_size(const Matrix *m, int64_t rows, int32_t threads)
{
    (void)threads;
    if (!m->scales) return linear_bf16_workspace_size(rows, m->inputs);
    if (multiplies_codes(m, rows)) return int4_rows_bytes(m, rows);
    return quantized_bytes(rows, m->inputs);
}

/* Multiply x [rows, inputs] by the weights and write the result to `out` or, with `add`, add it. */
void linear_biased(const Matrix *m, const bf16 *x, int64_t stride, int64_t rows, void *out, int64_t out_stride,
                   int32_t add, const float *row_bias, int64_t biased_rows, char *workspace, int32_t threads)
{
    Epilogue ep = {m, out, out_stride, add, {row_bias, rows - biased_rows}};
    if (!m->scales) linear_bf16(x, stride, rows, &ep, workspace, threads);
    else if (multiplies_codes(m, rows)) linear_int4(x, stride, rows, &ep, workspace, threads);
    else linear_int8(x, stride, rows, &ep, workspace, threads);
    if (m->activation == GELU) apply_gelu(&ep, rows, threads);
}

/* Add y to x, both [count]. */
static void add_row(bf16 *x, const bf16 *y, ptrdiff_t count)
{
    for (ptrdiff_t k = 0; k < count; k += LANES)
        store(x + k, count - k, _mm256_add_ps(load(x + k, count - k), load(y + k, count - k)));
}

/* Quantize a key or value to bytes with one scale, like `quantize_rows` in kernels/kv_cache.py. */
static void quantize_head(const bf16 *x, ptrdiff_t width, int8_t *bytes, float *scale)
{
    *scale = max_abs(x, width) / 127.0f;
    __m256 inverse = _mm256_set1_ps(*scale >= 0x1p-126f ? 1.0f / *scale : 0.0f);
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        __m256 quotient = _mm256_mul_ps(load(x + i, width - i), inverse);
        __m256 ordered = _mm256_cmp_ps(quotient, quotient, _CMP_ORD_Q); /* NaN is stored as 0 */
        __m256i whole = _mm256_cvtps_epi32(_mm256_and_ps(quotient, ordered));
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        int64_t packed = _mm_cvtsi128_si64(_mm_packs_epi16(words, words));
        memcpy(bytes + i, &packed, least(LANES, width - i));
    }
}
