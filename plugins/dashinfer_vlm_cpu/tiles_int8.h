/* Linear layers of 8 bits, and of 4 bits with integer steps, with tile products, see tiles.h. Integer sums are exact,
 * so that the results equal those of `linear_int8`, which is faster for few rows. */
#pragma once

#include "avx512_int8.h"
#include "tiles_linear.h"

enum { FEW_ROWS_INT8 = TILE, PANEL_GROUP_INT8 = 4 };

/* Multiply one block of rows by one panel. `tail` is the panel's last step, padded, if that is incomplete. */
static void multiply_int8(const Quantized *x, ptrdiff_t first, int rows, ptrdiff_t inputs, const char *panel,
                          const char *tail, Tiles *t, float acc[MAX_ROWS][PANEL])
{
    _Alignas(64) int32_t sums[MAX_ROWS][PANEL];
    ptrdiff_t steps = ceil_div(inputs, STEP_INPUTS_INT8), blocks = ceil_div(inputs, QUANT_BLOCK);
    const char *bytes = (const char *)x->bytes + first * steps * STEP_BYTES;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        tiles_zero(t);
        for (ptrdiff_t step = 2 * block; step < 2 * block + 2 && step < steps; step++)
            tiles_step_int8(t, bytes + step * rows * STEP_BYTES,
                            tail && step + 1 == steps ? tail : panel + step * PANEL_STEP);
        tiles_store(t, sums, sizeof sums[0]);
        for (int i = 0; i < rows; i++) {
            __m512i offset = _mm512_set1_epi32(x->offsets[(first + i) * blocks + block]);
            __m512 scale = _mm512_set1_ps(x->scales[(first + i) * blocks + block]);
            UNROLL_FOR (int z = 0; z < PANEL; z += LANES) {
                __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_load_si512(sums[i] + z), offset));
                __m512 before = block ? _mm512_load_ps(acc[i] + z) : _mm512_setzero_ps();
                _mm512_store_ps(acc[i] + z, _mm512_fmadd_ps(sum, scale, before));
            }
        }
    }
}

/* Unpack a panel to the layout of 8-bit weights. */
static void unpack_panel(const Matrix *m, ptrdiff_t panel, uint8_t *to)
{
    const uint8_t *block = (const uint8_t *)m->packed + panel * panel_size(m->group, m->inputs);
    for (ptrdiff_t k = 0; k < m->inputs; k += QUANT_BLOCK, block += PROGRESSIVE_BLOCK) {
        ptrdiff_t stop = m->inputs - k < QUANT_BLOCK ? m->inputs - k : QUANT_BLOCK;
        for (ptrdiff_t g = 0; g < stop; g += STEP_GROUP) {
            StepVectors steps = step_vectors(block + g / STEP_GROUP * PANEL);
            const uint8_t *codes = block + GROUPS_BYTES + g / 4 * QUAD_BYTES;
            ptrdiff_t count = stop - g < STEP_GROUP ? stop - g : STEP_GROUP;
            prefetch((const char *)codes + PREFETCH_BYTES, 4);
            for (ptrdiff_t i = 0; i < count; i += 4, codes += QUAD_BYTES, to += 2 * QUAD_BYTES) {
                __m512i w[2];
                unpack_quad(codes, &steps, w);
                _mm512_storeu_si512(to, w[0]);
                _mm512_storeu_si512(to + QUAD_BYTES, w[1]);
            }
        }
    }
}

/* Multiply all rows by the panels [first, first + count). `plain` is a buffer for unpacked weights. */
static void multiply_group_int8(const Quantized *x, ptrdiff_t rows, const Epilogue *ep, ptrdiff_t first,
                                ptrdiff_t count, char *plain)
{
    _Alignas(64) float acc[MAX_ROWS][PANEL];
    _Alignas(64) char tails[PANEL_GROUP_INT8][PANEL_STEP];
    ptrdiff_t inputs = ep->m->inputs, left = inputs % STEP_INPUTS_INT8;
    const char *weights = (const char *)ep->m->packed + first * inputs * PANEL;
    if (is_progressive(ep->m->group)) {
        for (ptrdiff_t i = 0; i < count; i++) unpack_panel(ep->m, first + i, (uint8_t *)plain + i * inputs * PANEL);
        weights = plain;
    }
    for (ptrdiff_t i = 0; i < count && left; i++) {
        memcpy(tails[i], weights + ((i + 1) * inputs - left) * PANEL, left * PANEL);
        memset(tails[i] + left * PANEL, 0, PANEL_STEP - left * PANEL);
    }
    Tiles t = tiles_open(rows < MAX_ROWS ? rows : MAX_ROWS);
    for (ptrdiff_t row = 0; row < rows; row += MAX_ROWS) {
        int here = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        if (here != t.rows) t = tiles_open(here);
        for (ptrdiff_t i = 0; i < count; i++) {
            const float *scales = ep->m->scales + (first + i) * PANEL;
            multiply_int8(x, row, here, inputs, weights + i * inputs * PANEL, left ? tails[i] : NULL, &t, acc);
            for (int m = 0; m < here; m++)
                finish(ep, row + m, first + i, _mm512_mul_ps(_mm512_load_ps(acc[m]), _mm512_loadu_ps(scales)),
                       _mm512_mul_ps(_mm512_load_ps(acc[m] + LANES), _mm512_loadu_ps(scales + LANES)));
        }
    }
    tiles_close();
}

/* Activations in 8 bits; rounded up, as unpacked weights follow. */
static ptrdiff_t tiles_quantized_size(ptrdiff_t rows, ptrdiff_t inputs)
{
    return round_up(rows * (ceil_div(inputs, STEP_INPUTS_INT8) * STEP_BYTES + 8 * ceil_div(inputs, QUANT_BLOCK)), 64);
}

static ptrdiff_t linear_tiles_int8_workspace_size(const Matrix *m, ptrdiff_t rows, int threads)
{
    ptrdiff_t unpacked = is_progressive(m->group) ? threads * PANEL_GROUP_INT8 * m->inputs * PANEL : 0;
    return 64 + tiles_quantized_size(rows, m->inputs) + unpacked;
}

static void linear_tiles_int8(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                              int threads)
{
    ptrdiff_t inputs = ep->m->inputs, panels = ceil_div(ep->m->outputs, PANEL);
    ptrdiff_t blocks = ceil_div(inputs, QUANT_BLOCK), steps = ceil_div(inputs, STEP_INPUTS_INT8);
    Quantized q = {.bytes = (int8_t *)aligned(workspace)};
    q.scales = (float *)(q.bytes + rows * steps * STEP_BYTES);
    q.offsets = (int32_t *)(q.scales + rows * blocks);
    char *plain = (char *)q.bytes + tiles_quantized_size(rows, inputs);
    ptrdiff_t tasks = ceil_div(ceil_div(panels, PANEL_GROUP_INT8), threads) * threads, group = ceil_div(panels, tasks);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) {
            ptrdiff_t first = row / MAX_ROWS * MAX_ROWS, here = rows - first < MAX_ROWS ? rows - first : MAX_ROWS;
            int8_t *bytes = q.bytes + first * steps * STEP_BYTES + (row - first) * STEP_BYTES;
            memset(bytes + (steps - 1) * here * STEP_BYTES, 0, STEP_BYTES);
            quantize_row(x + row * stride, inputs, bytes, here * STEP_BYTES, q.scales + row * blocks,
                         q.offsets + row * blocks);
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (ptrdiff_t first = 0; first < panels; first += group)
            multiply_group_int8(&q, rows, ep, first, panels - first < group ? panels - first : group,
                                plain + omp_get_thread_num() * PANEL_GROUP_INT8 * inputs * PANEL);
    }
}
