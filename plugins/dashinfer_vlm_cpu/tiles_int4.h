/* Linear layers with 4-bit weights of published checkpoints, with tile products, see tiles.h and int4.h. Integer sums
 * are exact, so that the results equal those of `linear_int4`, which is faster for few rows. */
#pragma once

#include "avx512_int4.h"
#include "tiles_int8.h"

/* Number of steps of a block; a step of 64 inputs with groups of 32 is multiplied twice, each time with the weights of
 * one group and zeros. */
INLINE ptrdiff_t int4_steps(ptrdiff_t group)
{
    return QUANT_BLOCK / (group < STEP_INPUTS_INT8 ? group : STEP_INPUTS_INT8);
}

/* Unpack a block to 8 bits, in the layout of `tiles_step_int8`. */
static void unpack_int4(const char *block, ptrdiff_t group, char *to)
{
    const char *codes = block + int4_codes_offset(group);
    __m512i low = _mm512_set1_epi8(15);
    if (group < STEP_INPUTS_INT8) memset(to, 0, int4_steps(group) * PANEL_STEP);
    for (ptrdiff_t k = 0; k < QUANT_BLOCK; k += 4, codes += QUAD_BYTES) {
        __m512i both = _mm512_loadu_si512(codes);
        char *quad = to +
                     (group < STEP_INPUTS_INT8 ? k / group * PANEL_STEP + k % STEP_INPUTS_INT8 * PANEL : k * PANEL);
        _mm512_store_si512(quad, _mm512_and_si512(both, low));
        _mm512_store_si512(quad + QUAD_BYTES, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
}

/* Add a group's sums, weighted by its scales, to `parts`. */
static void add_group(const Quantized *x, ptrdiff_t first, int rows, ptrdiff_t blocks, ptrdiff_t b, ptrdiff_t groups,
                      ptrdiff_t g, const char *block, const int32_t sums[MAX_ROWS][PANEL], float parts[MAX_ROWS][PANEL])
{
    const uint8_t *zeros = (const uint8_t *)block + int4_zeros_offset(QUANT_BLOCK / groups) + g * PANEL;
    UNROLL_FOR (int z = 0; z < PANEL; z += LANES) {
        __m512 scales = scales_of(block + (g * PANEL + z) * 2);
        __m512i zero = zeros_of(zeros + z);
        for (int i = 0; i < rows; i++) {
            __m512i offset = _mm512_set1_epi32(x->offsets[((first + i) * blocks + b) * groups + g]);
            __m512i sum = _mm512_dpwssd_epi32(_mm512_load_si512(sums[i] + z), zero, offset);
            __m512 before = g ? _mm512_load_ps(parts[i] + z) : _mm512_setzero_ps();
            _mm512_store_ps(parts[i] + z, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales, before));
        }
    }
}

/* Multiply one block of rows by one panel, whose unpacked codes are at `codes`. */
static void multiply_int4(const Quantized *x, ptrdiff_t first, int rows, const Matrix *m, ptrdiff_t panel,
                          const char *codes, Tiles *t, float acc[MAX_ROWS][PANEL])
{
    _Alignas(64) int32_t sums[MAX_ROWS][PANEL];
    _Alignas(64) float parts[MAX_ROWS][PANEL];
    ptrdiff_t blocks = int4_blocks(m->inputs), groups = QUANT_BLOCK / m->group, steps = int4_steps(m->group);
    const char *block = (const char *)m->packed + panel * blocks * int4_block_size(m->group);
    const char *bytes = (const char *)x->bytes + first * blocks * QUANT_BLOCK;
    for (ptrdiff_t b = 0; b < blocks; b++, block += int4_block_size(m->group)) {
        for (ptrdiff_t g = 0; g < groups; g++) {
            tiles_zero(t);
            for (ptrdiff_t step = g * steps / groups; step < (g + 1) * steps / groups; step++)
                tiles_step_int8(t, bytes + (2 * b + 2 * step / steps) * rows * STEP_BYTES,
                                codes + (b * steps + step) * PANEL_STEP);
            tiles_store(t, sums, sizeof sums[0]);
            add_group(x, first, rows, blocks, b, groups, g, block, sums, parts);
        }
        for (int i = 0; i < rows; i++) {
            __m512 scale = _mm512_set1_ps(x->scales[(first + i) * blocks + b]);
            UNROLL_FOR (int z = 0; z < PANEL; z += LANES) {
                __m512 before = b ? _mm512_load_ps(acc[i] + z) : _mm512_setzero_ps();
                _mm512_store_ps(acc[i] + z, _mm512_fmadd_ps(_mm512_load_ps(parts[i] + z), scale, before));
            }
        }
    }
}

/* Multiply all rows by one panel; `codes` is a buffer for its unpacked codes. */
static void multiply_panel_int4(const Quantized *x, ptrdiff_t rows, const Epilogue *ep, ptrdiff_t panel, char *codes)
{
    _Alignas(64) float acc[MAX_ROWS][PANEL];
    const Matrix *m = ep->m;
    const float *scales = m->scales + panel * PANEL;
    ptrdiff_t blocks = int4_blocks(m->inputs), size = int4_block_size(m->group), steps = int4_steps(m->group);
    for (ptrdiff_t b = 0; b < blocks; b++)
        unpack_int4((const char *)m->packed + (panel * blocks + b) * size, m->group, codes + b * steps * PANEL_STEP);
    Tiles t = tiles_open(rows < MAX_ROWS ? rows : MAX_ROWS);
    for (ptrdiff_t row = 0; row < rows; row += MAX_ROWS) {
        int here = rows - row < MAX_ROWS ? rows - row : MAX_ROWS;
        if (here != t.rows) t = tiles_open(here);
        multiply_int4(x, row, here, m, panel, codes, &t, acc);
        for (int i = 0; i < here; i++)
            finish(ep, row + i, panel, _mm512_mul_ps(_mm512_load_ps(acc[i]), _mm512_loadu_ps(scales)),
                   _mm512_mul_ps(_mm512_load_ps(acc[i] + LANES), _mm512_loadu_ps(scales + LANES)));
    }
    tiles_close();
}

/* Size of a panel's unpacked codes. */
static ptrdiff_t unpacked_size(const Matrix *m) { return int4_blocks(m->inputs) * int4_steps(m->group) * PANEL_STEP; }

static ptrdiff_t linear_tiles_int4_workspace_size(const Matrix *m, ptrdiff_t rows, int threads)
{
    return 128 + quantized_size_int4(m, rows) + threads * unpacked_size(m);
}

static void linear_tiles_int4(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                              int threads)
{
    const Matrix *m = ep->m;
    ptrdiff_t panels = ceil_div(m->outputs, PANEL), blocks = int4_blocks(m->inputs), groups = QUANT_BLOCK / m->group;
    Quantized q = {.bytes = (int8_t *)aligned(workspace)};
    char *unpacked = (char *)q.bytes + rows * blocks * QUANT_BLOCK;
    q.scales = (float *)(unpacked + threads * unpacked_size(m));
    q.offsets = (int32_t *)(q.scales + rows * blocks);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) {
            ptrdiff_t first = row / MAX_ROWS * MAX_ROWS, here = rows - first < MAX_ROWS ? rows - first : MAX_ROWS;
            int8_t *bytes = q.bytes + first * blocks * QUANT_BLOCK + (row - first) * STEP_BYTES;
            int32_t *offsets = q.offsets + row * blocks * groups;
            for (int step = 2; step; step--) memset(bytes + (2 * blocks - step) * here * STEP_BYTES, 0, STEP_BYTES);
            quantize_row_int4(m, x + row * stride, bytes, here * STEP_BYTES, q.scales + row * blocks, offsets);
            ptrdiff_t part = m->group < STEP_BYTES ? m->group : STEP_BYTES, parts = STEP_BYTES / part;
            int32_t sums[2 * STEP_BYTES / 32];
            for (ptrdiff_t b = 0; b < blocks; b++) {
                for (int step = 0; step < 2; step++)
                    sum_groups(bytes + (2 * b + step) * here * STEP_BYTES, STEP_BYTES, part, sums + step * parts);
                if (groups == 1) offsets[b] = sums[0] + sums[1];
                else memcpy(offsets + b * groups, sums, groups * sizeof *sums);
            }
        }
#pragma omp for schedule(dynamic, 1) nowait
        for (ptrdiff_t panel = 0; panel < panels; panel++)
            multiply_panel_int4(&q, rows, ep, panel, unpacked + omp_get_thread_num() * unpacked_size(m));
    }
}
