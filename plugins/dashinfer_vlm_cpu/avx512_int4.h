/* Linear layers with 4-bit weights of published checkpoints, see int4.h for their layout and avx512.c. */
#pragma once

#include "avx512_int8.h"
#include "int4.h"

/* Sum the bytes of each group of one row, negated, which compensates for the zero points of the weights. */
static void sum_groups(const int8_t *bytes, ptrdiff_t count, ptrdiff_t group, int32_t *offsets)
{
    for (ptrdiff_t k = 0; k < count; k += group) {
        int32_t sum = 0;
        for (ptrdiff_t i = 0; i < group; i++) sum += bytes[k + i];
        *offsets++ = -sum;
    }
}

/* Quantize one row, as with `quantize_row`, in the order of the weights. `bytes` is zero after the last input. */
static void quantize_row_int4(const Matrix *m, const bf16 *x, int8_t *bytes, ptrdiff_t step, float *scales,
                              int32_t *offsets)
{
    bf16 ordered[m->inputs];
    for (ptrdiff_t k = 0; k < m->inputs && m->order; k++) ordered[k] = x[m->order[k]];
    quantize_row(m->order ? ordered : x, m->inputs, bytes, step, scales, offsets);
}

/* The zero points of 16 columns of a group, as operands of `_mm512_dpwssd_epi32`. */
INLINE __m512i zeros_of(const uint8_t *zeros) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)zeros)); }

INLINE __m512 scales_of(const char *scales) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales)); }

/* With this number of rows, all sums stay in registers. */
enum { TILE_ROWS_INT4 = 4 };
#define WITH_FEW_ROWS(count, BODY) \
    switch (count) { \
        CASE(1, BODY) CASE(2, BODY) CASE(3, BODY) CASE(4, BODY) \
    }

/* The sums for columns 16 to 31 of a panel are computed from whole bytes, which are 16 times their codes plus the codes
 * of columns 0 to 15: that is cheaper than shifting the codes, and as exact, since all sums are integers. */
INLINE void tile_int4(const int rows, const Quantized *q, ptrdiff_t row, const Matrix *m, ptrdiff_t panel,
                      __m512 acc[TILE_ROWS_INT4][2])
{
    ptrdiff_t group = m->group, blocks = int4_blocks(m->inputs), groups = QUANT_BLOCK / group,
              size = int4_block_size(group);
    const char *block = (const char *)m->packed + panel * blocks * size;
    const int8_t *bytes = q->bytes + row * blocks * QUANT_BLOCK;
    __m512i low = _mm512_set1_epi8(15);
    UNROLL_FOR (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, block += size) {
        const char *codes = block + int4_codes_offset(group);
        const uint8_t *zeros = (const uint8_t *)block + int4_zeros_offset(group);
        __m512 parts[TILE_ROWS_INT4][2];
        UNROLL_FOR (int i = 0; i < rows; i++) parts[i][0] = parts[i][1] = _mm512_setzero_ps();
        for (ptrdiff_t offset = 0; offset < size - CODES_BYTES; offset += 64)
            prefetch(prefetch_address(block + offset, rows), 1);
        for (ptrdiff_t g = 0; g < groups; g++, zeros += PANEL) {
            __m512i left_zeros = zeros_of(zeros), sums[TILE_ROWS_INT4][2];
            __m512i both_zeros = _mm512_add_epi32(_mm512_slli_epi32(zeros_of(zeros + LANES), 4), left_zeros);
            UNROLL_FOR (int i = 0; i < rows; i++) {
                __m512i offset = _mm512_set1_epi32(q->offsets[((row + i) * blocks + b) * groups + g]);
                sums[i][0] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), left_zeros, offset);
                sums[i][1] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), both_zeros, offset);
            }
            for (ptrdiff_t k = g * group; k < (g + 1) * group; k += 4, codes += QUAD_BYTES) {
                __m512i both = _mm512_loadu_si512(codes), left = _mm512_and_si512(both, low);
                prefetch(prefetch_address(codes, rows), 1);
                UNROLL_FOR (int i = 0; i < rows; i++) {
                    int32_t quad;
                    memcpy(&quad, bytes + (i * blocks + b) * QUANT_BLOCK + k, sizeof quad);
                    sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], left, _mm512_set1_epi32(quad));
                    sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], both, _mm512_set1_epi32(quad));
                }
            }
            __m512 left = scales_of(block + g * PANEL * 2), right = scales_of(block + (g * PANEL + LANES) * 2);
            right = _mm512_mul_ps(right, _mm512_set1_ps(0x1p-4f));
            UNROLL_FOR (int i = 0; i < rows; i++) {
                __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i][1], sums[i][0]));
                parts[i][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][0]), left, parts[i][0]);
                parts[i][1] = _mm512_fmadd_ps(upper, right, parts[i][1]);
            }
        }
        UNROLL_FOR (int i = 0; i < rows; i++) {
            __m512 scale = _mm512_set1_ps(q->scales[(row + i) * blocks + b]);
            acc[i][0] = _mm512_fmadd_ps(parts[i][0], scale, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(parts[i][1], scale, acc[i][1]);
        }
    }
}

static void linear_rows_int4(const Quantized *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    const float *scales = ep->m->scales + panel * PANEL;
    __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + LANES);
    ptrdiff_t tiles = (stop - start + TILE_ROWS_INT4 - 1) / TILE_ROWS_INT4;
    for (ptrdiff_t tile = 0; tile < tiles; tile++) {
        ptrdiff_t row = start + (stop - start) * tile / tiles, next = start + (stop - start) * (tile + 1) / tiles;
        WITH_FEW_ROWS(next - row, {
            __m512 acc[TILE_ROWS_INT4][2];
            tile_int4(rows, x, row, ep->m, panel, acc);
            UNROLL_FOR (int i = 0; i < rows; i++)
                finish(ep, row + i, panel, _mm512_mul_ps(acc[i][0], left), _mm512_mul_ps(acc[i][1], right));
        })
    }
}

/* Activations of `rows` rows in a workspace, with an offset for each group. */
static Quantized carve_int4(const Matrix *m, ptrdiff_t rows, char *workspace)
{
    ptrdiff_t blocks = int4_blocks(m->inputs);
    Quantized q = {.scales = (float *)workspace, .offsets = (int32_t *)workspace + rows * blocks};
    q.bytes = (int8_t *)(q.offsets + rows * blocks * (QUANT_BLOCK / m->group));
    return q;
}

static ptrdiff_t quantized_size_int4(const Matrix *m, ptrdiff_t rows)
{
    return rows * int4_blocks(m->inputs) * (QUANT_BLOCK + 4 + 4 * (QUANT_BLOCK / m->group));
}

static void linear_int4(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = (ep->m->outputs + PANEL - 1) / PANEL, chunks = (rows + ROW_GROUP - 1) / ROW_GROUP;
    ptrdiff_t group = ep->m->group, blocks = int4_blocks(ep->m->inputs), groups = QUANT_BLOCK / group;
    Quantized q = carve_int4(ep->m, rows, workspace);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) {
            int8_t *bytes = q.bytes + row * blocks * QUANT_BLOCK;
            int32_t *offsets = q.offsets + row * blocks * groups;
            memset(bytes + (blocks - 1) * QUANT_BLOCK, 0, QUANT_BLOCK);
            quantize_row_int4(ep->m, x + row * stride, bytes, 64, q.scales + row * blocks, offsets);
            sum_groups(bytes, blocks * QUANT_BLOCK, group, offsets);
        }
#pragma omp for schedule(guided, chunks > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * chunks; task++)
            linear_rows_int4(&q, task / chunks, rows * (task % chunks) / chunks, rows * (task % chunks + 1) / chunks,
                             ep);
    }
}
