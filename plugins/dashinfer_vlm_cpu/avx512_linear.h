/* Linear layers with weights of 16 and 12 bits, see avx512.c. */
#pragma once

#include "avx512_codes.h"

#ifdef TILES
#include "tiles_linear.h"
#else
/* Up to this many tiles unpack a panel separately; with more, the first one stores the unpacked panel for the others.
 */
enum { CODED_TILES = 6 };

/* `plain` is a buffer for one panel if there are rows for more than `CODED_TILES`. */
static void linear_rows(const bf16 *x, ptrdiff_t stride, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop,
                        const Epilogue *ep, bf16 *plain)
{
    const Matrix *m = ep->m;
    const bf16 *weights = m->codes ? plain : (const bf16 *)m->packed + panel * m->inputs * PANEL;
    ptrdiff_t blocks = (stop - start + TILE_ROWS - 1) / TILE_ROWS;
    int write = blocks > CODED_TILES;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = start + (stop - start) * block / blocks, next = start + (stop - start) * (block + 1) / blocks;
        const bf16 *a = x + row * stride;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            if (!m->codes)
                tile(rows, 2, prefetch_address(weights, rows), a, stride, weights, PANEL, m->inputs / 2, acc);
            else if (block && write) tile(rows, 2, NULL, a, stride, weights, PANEL, m->inputs / 2, acc);
            else tile_coded(rows, a, stride, read_panel(m, panel), m->inputs, write ? plain : NULL, acc);
            UNROLL_FOR (int i = 0; i < rows; i++) finish(ep, row + i, panel, acc[i][0], acc[i][1]);
        })
    }
}

/* Multiply one row by one panel, for `update_argmax`. */
static void multiply_row(const Matrix *m, const bf16 *x, ptrdiff_t panel, __m512 sums[2])
{
    __m512 acc[TILE_ROWS][2];
    if (m->codes) tile_coded(1, x, 0, read_panel(m, panel), m->inputs, NULL, acc);
    else tile(1, 2, NULL, x, 0, (const bf16 *)m->packed + panel * m->inputs * PANEL, PANEL, m->inputs / 2, acc);
    sums[0] = acc[0][0];
    sums[1] = acc[0][1];
}

/* One unpacked panel per thread. */
static int64_t linear_bf16_workspace_size(int64_t rows, int64_t inputs, int32_t threads)
{
    return rows > CODED_TILES * TILE_ROWS ? threads * inputs * PANEL * (int64_t)sizeof(bf16) : 0;
}

static void linear_bf16(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = (ep->m->outputs + PANEL - 1) / PANEL, groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
#pragma omp parallel for schedule(guided, groups > 1 ? 1 : 2) num_threads(threads)
    for (ptrdiff_t task = 0; task < panels * groups; task++) {
        ptrdiff_t panel = task / groups, group = task % groups;
        linear_rows(x, stride, panel, rows * group / groups, rows * (group + 1) / groups, ep,
                    (bf16 *)workspace + omp_get_thread_num() * ep->m->inputs * PANEL);
    }
}

#endif
