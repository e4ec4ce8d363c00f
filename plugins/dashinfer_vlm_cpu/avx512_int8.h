/* Linear layers with weights of 8 bits, see avx512.c. */
#pragma once

#include "avx512_tile.h"
#include "int8.h"

enum { TILE_ROWS_INT8 = 8 };

/* Quantize the activations of one row to bytes, stored 64 at a time, `step` bytes apart. Each block of inputs has a
 * scale and -128 times the sum of its bytes, which compensates for the offset of the weights. Blocks are used because
 * these models have outlier activations: a few inputs are hundreds of times larger than the others. */
static void quantize_row(const bf16 *x, ptrdiff_t inputs, int8_t *bytes, ptrdiff_t step, float *scales,
                         int32_t *offsets)
{
    for (ptrdiff_t k = 0, block = 0; k < inputs; k += QUANT_BLOCK, block++) {
        ptrdiff_t count = inputs - k < QUANT_BLOCK ? inputs - k : QUANT_BLOCK;
        float scale = max_abs(x + k, count) / 127.0f;
        __m512 inverse = _mm512_set1_ps(inverse_of(scale));
        __m512i sum = _mm512_setzero_si512();
        for (ptrdiff_t i = 0; i < count; i += LANES) {
            __mmask16 lanes = first(count - i);
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + k + i, lanes), inverse));
            sum = _mm512_add_epi32(sum, whole);
            _mm_mask_storeu_epi8(bytes + (k + i) / 64 * step + (k + i) % 64, lanes, _mm512_cvtsepi32_epi8(whole));
        }
        scales[block] = scale;
        offsets[block] = -128 * _mm512_reduce_add_epi32(sum);
    }
}

typedef struct {
    int8_t *bytes;    /* [rows, inputs] */
    float *scales;    /* [rows, blocks] */
    int32_t *offsets; /* [rows, blocks] */
} Quantized;

/* Up to twelve rows use one tile, which reads a panel once; with more rows, tiles of eight are faster. */
INLINE ptrdiff_t int8_tiles(ptrdiff_t rows)
{
    return rows <= TILE_ROWS ? 1 : (rows + TILE_ROWS_INT8 - 1) / TILE_ROWS_INT8;
}

INLINE void tile_int8(const int rows, const Quantized *x, ptrdiff_t row, ptrdiff_t inputs, const uint8_t *panel,
                      __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    const int8_t *bytes = x->bytes + row * inputs;
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t block = 0; block < blocks; block++) {
        __m512i sums[TILE_ROWS][2];
        UNROLL_FOR (int m = 0; m < rows; m++)
            sums[m][0] = sums[m][1] = _mm512_set1_epi32(x->offsets[(row + m) * blocks + block]);
        ptrdiff_t stop = (block + 1) * QUANT_BLOCK < inputs ? (block + 1) * QUANT_BLOCK : inputs;
        for (ptrdiff_t k = block * QUANT_BLOCK; k < stop; k += 4, panel += 4 * PANEL) {
            __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 4 * LANES);
            prefetch(prefetch_address(panel, rows), 2);
            UNROLL_FOR (int m = 0; m < rows; m++) {
                int32_t quad;
                memcpy(&quad, bytes + m * inputs + k, sizeof quad);
                sums[m][0] = _mm512_dpbusd_epi32(sums[m][0], left, _mm512_set1_epi32(quad));
                sums[m][1] = _mm512_dpbusd_epi32(sums[m][1], right, _mm512_set1_epi32(quad));
            }
        }
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m512 scale = _mm512_set1_ps(x->scales[(row + m) * blocks + block]);
            acc[m][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][0]), scale, acc[m][0]);
            acc[m][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][1]), scale, acc[m][1]);
        }
    }
}

static void linear_rows_int8(const Quantized *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    const float *scales = ep->m->scales + panel * PANEL;
    __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + LANES);
    ptrdiff_t inputs = ep->m->inputs;
    const uint8_t *weights = (const uint8_t *)ep->m->packed + panel * inputs * PANEL;
    ptrdiff_t blocks = int8_tiles(stop - start);
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = start + (stop - start) * block / blocks, next = start + (stop - start) * (block + 1) / blocks;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            tile_int8(rows, x, row, inputs, weights, acc);
            UNROLL_FOR (int m = 0; m < rows; m++)
                finish(ep, row + m, panel, _mm512_mul_ps(acc[m][0], left), _mm512_mul_ps(acc[m][1], right));
        })
    }
}

static int64_t quantized_bytes(int64_t rows, int64_t inputs)
{
    return rows * (inputs + 8 * ((inputs + QUANT_BLOCK - 1) / QUANT_BLOCK));
}

/* Use `quantized_bytes()` of memory. */
static Quantized quantized_at(char *memory, ptrdiff_t rows, ptrdiff_t inputs)
{
    ptrdiff_t count = rows * ((inputs + QUANT_BLOCK - 1) / QUANT_BLOCK);
    float *scales = (float *)memory;
    int32_t *offsets = (int32_t *)(scales + count);
    return (Quantized){(int8_t *)(offsets + count), scales, offsets};
}

static void linear_int8(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = (ep->m->outputs + PANEL - 1) / PANEL, groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
    ptrdiff_t inputs = ep->m->inputs, blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    Quantized q = quantized_at(workspace, rows, inputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++)
            quantize_row(x + row * stride, inputs, q.bytes + row * inputs, 64, q.scales + row * blocks,
                         q.offsets + row * blocks);
#pragma omp for schedule(guided, groups > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int8(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups,
                             ep);
    }
}
