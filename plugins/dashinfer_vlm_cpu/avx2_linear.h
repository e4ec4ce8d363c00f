/* Linear layers with weights of 16 and 12 bits, see avx2.c. */
#pragma once

#include "avx2_codes.h"

/* Up to DIRECT_ROWS rows are multiplied while weights are unpacked in registers; more rows share a buffer of unpacked
 * weights. More than FEW_ROWS rows of activations are widened before, WIDE_ROWS at a time. */
enum { FEW_ROWS = 2, DIRECT_ROWS = 5, WIDE_ROWS = 768 };

INLINE void store_output(const Epilogue *ep, ptrdiff_t row, ptrdiff_t column, __m256 x)
{
    ptrdiff_t count = ep->m->columns - column;
    if (count <= 0) return;
    if (ep->m->fp32_output) {
        _mm256_maskstore_ps((float *)ep->out + row * ep->stride + column, first(count), x);
        return;
    }
    bf16 *out = (bf16 *)ep->out + row * ep->stride + column;
    store(out, count, ep->add ? _mm256_add_ps(x, load(out, count)) : x);
}

INLINE __m256 biased(const Epilogue *ep, ptrdiff_t row, ptrdiff_t output, __m256 x)
{
    const Matrix *m = ep->m;
    if (m->bias) x = _mm256_add_ps(x, load(m->bias + output, m->outputs - output));
    if (row < ep->bias.first) return x;
    const float *bias = ep->bias.values + (row - ep->bias.first) * m->outputs;
    return _mm256_add_ps(x, load_floats(bias + output, m->outputs - output));
}

INLINE void finish(const Epilogue *ep, ptrdiff_t row, ptrdiff_t panel, const __m256 sums[VECTORS])
{
    const Matrix *m = ep->m;
    if (m->activation == SILU_GATE) {
        UNROLL_FOR (int z = 0; z < VECTORS / 2; z++) {
            ptrdiff_t column = panel * PANEL / 2 + z * LANES;
            __m256 gate = biased(ep, row, column, sums[z]);
            __m256 up = biased(ep, row, m->columns + column, sums[z + VECTORS / 2]);
            store_output(ep, row, column, _mm256_mul_ps(swish(gate, 1.0f), up));
        }
        return;
    }
    UNROLL_FOR (int z = 0; z < VECTORS; z++) {
        ptrdiff_t column = panel * PANEL + z * LANES;
        __m256 x = biased(ep, row, column, sums[z]);
        if (m->activation == QUICK_GELU) x = swish(x, 1.702f);
        if (m->activation == GELU_TANH) x = gelu_tanh(x);
        store_output(ep, row, column, x);
    }
}

/* acc[m] = row m times a panel, unpacked in registers. */
INLINE void tile_unpacked(const int rows, const int coded, const bf16 *x, ptrdiff_t stride, ptrdiff_t inputs, Reader r,
                          __m256 acc[FEW_ROWS][VECTORS])
{
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < VECTORS; z++) acc[m][z] = _mm256_setzero_ps();
    for (ptrdiff_t group = 0; group < inputs / GROUP; group++, x += GROUP) {
        __m256i w[2 * VECTORS];
        prefetch_group(coded, r.packed + PREFETCH_BYTES);
        read_group(coded, 2, &r, group, w);
        UNROLL_FOR (int i = 0; i < 2 * VECTORS; i++)
            UNROLL_FOR (int m = 0; m < rows; m++) {
                __m256i pair = broadcast_dword(x + m * stride + i / VECTORS * 2);
                __m256 *sum = &acc[m][i % VECTORS];
                *sum = _mm256_fmadd_ps(even(pair), even(w[i]), *sum);
                *sum = _mm256_fmadd_ps(odd(pair), odd(w[i]), *sum);
            }
    }
}

INLINE void linear_few_rows(const int rows, const bf16 *x, ptrdiff_t stride, ptrdiff_t panel, const Epilogue *ep)
{
    __m256 acc[FEW_ROWS][VECTORS];
    const Matrix *m = ep->m;
    if (m->codes) tile_unpacked(rows, 1, x, stride, m->inputs, read_panel(m, panel), acc);
    else tile_unpacked(rows, 0, x, stride, m->inputs, read_panel(m, panel), acc);
    UNROLL_FOR (int i = 0; i < rows; i++) finish(ep, i, panel, acc[i]);
}

/* Multiply one row by one panel, for `update_argmax`. */
static void multiply_row(const Matrix *m, const bf16 *x, ptrdiff_t panel, float sums[PANEL])
{
    __m256 acc[FEW_ROWS][VECTORS];
    if (m->codes) tile_unpacked(1, 1, x, 0, m->inputs, read_panel(m, panel), acc);
    else tile_unpacked(1, 0, x, 0, m->inputs, read_panel(m, panel), acc);
    for (int z = 0; z < VECTORS; z++) _mm256_storeu_ps(sums + z * LANES, acc[0][z]);
}

/* Rows of activations as floats: [blocks of inputs][rows][BLOCK]. */
typedef struct {
    float *values;
    ptrdiff_t rows;
} Wide;

INLINE const float *wide_block(const Wide *x, ptrdiff_t block, ptrdiff_t row)
{
    return x->values + (block * x->rows + row) * BLOCK;
}

static size_t wide_bytes(ptrdiff_t rows, ptrdiff_t inputs) { return sizeof(float) * rows * round_up(inputs, BLOCK); }

static void widen_row(const bf16 *from, ptrdiff_t inputs, const Wide *x, ptrdiff_t row)
{
    for (ptrdiff_t k = 0; k < inputs; k += LANES)
        _mm256_storeu_ps(x->values + (k / BLOCK * x->rows + row) * BLOCK + k % BLOCK, load(from + k, inputs - k));
}

/* Unpack the next `count` inputs of a panel to floats [count, PANEL]. */
INLINE void unpack(const int coded, Reader *r, ptrdiff_t start, ptrdiff_t count, float *out)
{
    for (ptrdiff_t k = 0; k < count; k += GROUP, out += GROUP * PANEL) {
        __m256i w[2 * VECTORS];
        read_group(coded, 2, r, (start + k) / GROUP, w);
        UNROLL_FOR (int i = 0; i < 2 * VECTORS; i++) {
            float *to = out + i / VECTORS * 2 * PANEL + i % VECTORS * LANES;
            _mm256_store_ps(to, even(w[i]));
            _mm256_store_ps(to + PANEL, odd(w[i]));
        }
    }
}

/* sums[m] (+)= row m of `a` times `count` inputs of half of a panel, the vectors `half` and `half` + 2, unpacked in
 * registers. */
INLINE void tile_half(const int rows, const int coded, const int half, const float *a, Reader *reader, ptrdiff_t start,
                      ptrdiff_t count, float *sums)
{
    __m256 acc[DIRECT_ROWS][2];
    Reader r = *reader;
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++)
            acc[m][z] = start ? _mm256_load_ps(sums + m * PANEL + (half + 2 * z) * LANES) : _mm256_setzero_ps();
    for (ptrdiff_t k = 0; k < count; k += GROUP) {
        __m256i w[2 * VECTORS];
        if (!half) prefetch_group(coded, r.packed + PREFETCH_BYTES);
        read_group(coded, half, &r, (start + k) / GROUP, w);
        UNROLL_FOR (int i = 0; i < GROUP; i++, a++) {
            __m256i left = w[i / 2 * VECTORS + half], right = w[i / 2 * VECTORS + half + 2];
            __m256 columns[2] = {i % 2 ? odd(left) : even(left), i % 2 ? odd(right) : even(right)};
            UNROLL_FOR (int m = 0; m < rows; m++) {
                __m256 x = _mm256_broadcast_ss(a + m * BLOCK);
                UNROLL_FOR (int z = 0; z < 2; z++) acc[m][z] = _mm256_fmadd_ps(x, columns[z], acc[m][z]);
                IN_REGISTERS(acc[m][0], acc[m][1]);
            }
        }
    }
    *reader = r;
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++) _mm256_store_ps(sums + m * PANEL + (half + 2 * z) * LANES, acc[m][z]);
}

/* Multiply up to DIRECT_ROWS rows by the next `count` inputs of a panel. */
INLINE void multiply_direct(const int coded, const float *a, ptrdiff_t row_count, Reader *r, ptrdiff_t start,
                            ptrdiff_t count, float *sums)
{
    Reader left = *r;
    switch (8 * 2 + row_count) {
        CASES_TO_5(2, tile_half(rows, coded, 0, a, &left, start, count, sums);
                   tile_half(rows, coded, 1, a, r, start, count, sums))
    }
}

/* Multiply the rows [start, stop) by a panel, one block of inputs after the other. `first_row` is the row of the result
 * for the first row of `x`. */
static void linear_rows(const Wide *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep,
                        ptrdiff_t first_row)
{
    _Alignas(64) float weights[BLOCK * PANEL], sums[ROW_GROUP * PANEL];
    const Matrix *m = ep->m;
    Reader r = read_panel(m, panel);
    for (ptrdiff_t k = 0; k < m->inputs; k += BLOCK) {
        const float *a = wide_block(x, k / BLOCK, start);
        ptrdiff_t count = least(BLOCK, m->inputs - k);
        if (stop - start <= DIRECT_ROWS) {
            if (m->codes) multiply_direct(1, a, stop - start, &r, k, count, sums);
            else multiply_direct(0, a, stop - start, &r, k, count, sums);
            continue;
        }
        if (m->codes) unpack(1, &r, k, count, weights);
        else unpack(0, &r, k, count, weights);
        Product p = {a, BLOCK, weights, PANEL, count, sums, PANEL, k == 0, r.packed, 64};
        add_product(stop - start, VECTORS, &p);
    }
    for (ptrdiff_t row = start; row < stop; row++) {
        const float *from = sums + (row - start) * PANEL;
        __m256 found[VECTORS];
        UNROLL_FOR (int z = 0; z < VECTORS; z++) found[z] = _mm256_load_ps(from + z * LANES);
        finish(ep, first_row + row, panel, found);
    }
}

static int64_t linear_bf16_workspace_size(int64_t rows, int64_t inputs)
{
    return rows > FEW_ROWS ? wide_bytes(least(rows, WIDE_ROWS), inputs) : 0;
}

static void linear_bf16(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = ceil_div(ep->m->outputs, PANEL), inputs = ep->m->inputs;
    if (rows <= FEW_ROWS) {
#pragma omp parallel for schedule(guided) num_threads(threads)
        for (ptrdiff_t panel = 0; panel < panels; panel++)
            if (rows == 1) linear_few_rows(1, x, stride, panel, ep);
            else linear_few_rows(2, x, stride, panel, ep);
        return;
    }
#pragma omp parallel num_threads(threads)
    for (ptrdiff_t first = 0; first < rows; first += WIDE_ROWS) {
        Wide wide = {(float *)workspace, least(WIDE_ROWS, rows - first)};
        ptrdiff_t groups = ceil_div(wide.rows, ROW_GROUP);
#pragma omp for
        for (ptrdiff_t row = 0; row < wide.rows; row++) widen_row(x + (first + row) * stride, inputs, &wide, row);
#pragma omp for schedule(guided)
        for (ptrdiff_t task = 0; task < panels * groups; task++) {
            ptrdiff_t panel = task / groups, group = task % groups;
            linear_rows(&wide, panel, wide.rows * group / groups, wide.rows * (group + 1) / groups, ep, first);
        }
    }
}
