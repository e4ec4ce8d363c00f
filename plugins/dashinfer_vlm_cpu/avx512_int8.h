/* Linear layers with weights of 8 bits, and of 4 bits with integer steps (see progressive.h). */
#pragma once

#include "avx512_tile.h"
#include "int8.h"
#include "progressive.h"

/* Up to PROGRESSIVE_TILES tiles unpack a progressive panel separately; with more, the first one stores it for the
 * others. */
enum { TILE_ROWS_INT8 = 8, PROGRESSIVE_TILES = 2 };

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

/* The two halves of a panel's columns, with 16 inputs of the same step and zero point. */
typedef struct {
    __m512i steps[2];   /* in words */
    __m512i offsets[2]; /* 128 - zero * step, in bytes */
} StepVectors;

INLINE StepVectors step_vectors(const uint8_t *groups)
{
    StepVectors v;
    UNROLL_FOR (int half = 0; half < 2; half++) {
        /* Bytes of 16 columns in 32 bits each. Products of the bytes of a word with a step fit into these bytes. */
        __m512i columns = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)groups + half));
        __m512i four = _mm512_shuffle_epi8(columns, _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
        __m512i zeros = _mm512_and_si512(_mm512_srli_epi16(four, 4), _mm512_set1_epi8(15));
        v.steps[half] = _mm512_and_si512(four, _mm512_set1_epi16(15));
        v.offsets[half] = _mm512_sub_epi8(_mm512_set1_epi8(-128), _mm512_mullo_epi16(zeros, v.steps[half]));
    }
    return v;
}

/* Unpack a quad of inputs of all columns to 8 bits. */
INLINE void unpack_quad(const uint8_t *codes, const StepVectors *v, __m512i w[2])
{
    __m512i both = _mm512_loadu_si512(codes), low = _mm512_set1_epi8(15);
    __m512i halves[2] = {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)};
    UNROLL_FOR (int half = 0; half < 2; half++)
        w[half] = _mm512_add_epi8(_mm512_mullo_epi16(halves[half], v->steps[half]), v->offsets[half]);
}

/* acc[m] = row `row` + m times a panel of 8-bit weights or, if it is `progressive`, of weights that are unpacked to
 * these (see progressive.h), without the scales of the weights. Unless `plain` is null, the unpacked panel is written
 * to it. */
INLINE void tile_int8(const int rows, const int progressive, const int prefetches, const Quantized *x, ptrdiff_t row,
                      ptrdiff_t inputs, const uint8_t *panel, uint8_t *plain, __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    const int8_t *bytes = x->bytes + row * inputs;
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t block = 0; block < blocks; block++) {
        __m512i sums[TILE_ROWS][2];
        UNROLL_FOR (int m = 0; m < rows; m++)
            sums[m][0] = sums[m][1] = _mm512_set1_epi32(x->offsets[(row + m) * blocks + block]);
        ptrdiff_t stop = (block + 1) * QUANT_BLOCK < inputs ? (block + 1) * QUANT_BLOCK : inputs;
        const uint8_t *groups = panel, *at = progressive ? panel + GROUPS_BYTES : panel;
        if (progressive) prefetch(prefetch_address(panel, rows), GROUPS_BYTES / 64);
        for (ptrdiff_t k = block * QUANT_BLOCK; k < stop; groups += PANEL) {
            ptrdiff_t end = progressive && k + STEP_GROUP < stop ? k + STEP_GROUP : stop;
            StepVectors steps;
            if (progressive) steps = step_vectors(groups);
            for (; k < end; k += 4, at += progressive ? QUAD_BYTES : 2 * QUAD_BYTES) {
                __m512i w[2];
                if (progressive) unpack_quad(at, &steps, w);
                else w[0] = _mm512_loadu_si512(at), w[1] = _mm512_loadu_si512(at + QUAD_BYTES);
                if (progressive && plain) {
                    _mm512_storeu_si512(plain + k * PANEL, w[0]);
                    _mm512_storeu_si512(plain + k * PANEL + QUAD_BYTES, w[1]);
                }
                if (prefetches) prefetch(prefetch_address(at, rows), progressive ? 1 : 2);
                UNROLL_FOR (int m = 0; m < rows; m++) {
                    int32_t quad;
                    memcpy(&quad, bytes + m * inputs + k, sizeof quad);
                    sums[m][0] = _mm512_dpbusd_epi32(sums[m][0], w[0], _mm512_set1_epi32(quad));
                    sums[m][1] = _mm512_dpbusd_epi32(sums[m][1], w[1], _mm512_set1_epi32(quad));
                }
            }
        }
        panel += progressive ? PROGRESSIVE_BLOCK : QUANT_BLOCK * PANEL;
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m512 scale = _mm512_set1_ps(x->scales[(row + m) * blocks + block]);
            acc[m][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][0]), scale, acc[m][0]);
            acc[m][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][1]), scale, acc[m][1]);
        }
    }
}

/* `plain` is a buffer for one panel if there are rows for more than `PROGRESSIVE_TILES`. */
static void linear_rows_int8(const Quantized *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep,
                             uint8_t *plain)
{
    const float *scales = ep->m->scales + panel * PANEL;
    __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + LANES);
    ptrdiff_t inputs = ep->m->inputs, blocks = int8_tiles(stop - start);
    const uint8_t *weights = (const uint8_t *)ep->m->packed + panel * panel_size(ep->m->group, inputs);
    int progressive = is_progressive(ep->m->group), write = blocks > PROGRESSIVE_TILES;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = start + (stop - start) * block / blocks, next = start + (stop - start) * (block + 1) / blocks;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            if (!progressive) tile_int8(rows, 0, 1, x, row, inputs, weights, NULL, acc);
            else if (block && write) tile_int8(rows, 0, 0, x, row, inputs, plain, NULL, acc);
            else tile_int8(rows, 1, 1, x, row, inputs, weights, write ? plain : NULL, acc);
            UNROLL_FOR (int m = 0; m < rows; m++)
                finish(ep, row + m, panel, _mm512_mul_ps(acc[m][0], left), _mm512_mul_ps(acc[m][1], right));
        })
    }
}

/* Rounded up, as an unpacked panel may follow. */
static int64_t quantized_bytes(int64_t rows, int64_t inputs)
{
    return round_up(rows * (inputs + 8 * ceil_div(inputs, QUANT_BLOCK)), 64);
}

/* Rows of activations in 8 bits and, for progressive weights, an unpacked panel of each thread. */
static int64_t linear_int8_workspace_size(const Matrix *m, int64_t rows, int32_t threads)
{
    int is_unpacked = is_progressive(m->group) && int8_tiles(rows) > PROGRESSIVE_TILES;
    return quantized_bytes(rows, m->inputs) + (is_unpacked ? threads * m->inputs * PANEL : 0);
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
    uint8_t *plain = (uint8_t *)workspace + quantized_bytes(rows, inputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++)
            quantize_row(x + row * stride, inputs, q.bytes + row * inputs, 64, q.scales + row * blocks,
                         q.offsets + row * blocks);
#pragma omp for schedule(guided, groups > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int8(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups,
                             ep, plain + omp_get_thread_num() * inputs * PANEL);
    }
}
