/* Products of bf16, the packing of their weights, and what is done with the sums; see avx512.c. */
#pragma once

#include "arguments.h"
#include "avx512_numbers.h"
#include "panels.h"

enum { TILE_ROWS = 12 };
/* Prefetch distances of weights in bytes, as measured, with a shorter one for weights of 4, 8 and 16 bits if there are
 * few rows. */
enum { PREFETCH_BYTES = 8192, PREFETCH_BYTES_FEW_ROWS = 1024, FEW_ROWS = 2 };

/* Prefetch cache lines into L2 during the multiplications. Only a few at a time, between multiplications: many at once
 * would delay the lines that are needed first. */
INLINE void prefetch(const void *memory, const int lines)
{
    UNROLL_FOR (int line = 0; line < lines; line++) _mm_prefetch((const char *)memory + 64 * line, _MM_HINT_T1);
}

INLINE const char *prefetch_address(const void *weights, const int rows)
{
    return (const char *)weights + (rows > FEW_ROWS ? PREFETCH_BYTES : PREFETCH_BYTES_FEW_ROWS);
}

/* acc[m][z] = sum over `pairs` of row m of `a` times columns [16 z, 16 z + 16) of a panel with `width` columns.
 * `next` is prefetched, two lines for each pair; it may be null. */
INLINE void tile(const int rows, const int vectors, const char *next, const bf16 *a, ptrdiff_t lda, const bf16 *panel,
                 ptrdiff_t width, ptrdiff_t pairs, __m512 acc[TILE_ROWS][2])
{
    UNROLL_FOR (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t p = 0; p < pairs; p++, panel += 2 * width) {
        if (next) prefetch(next + 128 * p, 2);
        __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
        __m512bh right = vectors > 1 ? (__m512bh)_mm512_loadu_si512(panel + 2 * LANES) : left;
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m512bh x = pair(a + m * lda + 2 * p);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], x, left);
            if (vectors > 1) acc[m][1] = _mm512_dpbf16_ps(acc[m][1], x, right);
        }
    }
}

/* Expand BODY with the constant `rows`, so that registers are allocated for each number of rows. */
/* clang-format off */
#define CASE(count, BODY) case count: { enum { rows = count }; BODY; } break;
#define CASES_TO_12(BODY) \
    CASE(1, BODY) CASE(2, BODY) CASE(3, BODY) CASE(4, BODY) CASE(5, BODY) CASE(6, BODY) \
    CASE(7, BODY) CASE(8, BODY) CASE(9, BODY) CASE(10, BODY) CASE(11, BODY) CASE(12, BODY)
#define WITH_ROWS(count, BODY) switch (count) { CASES_TO_12(BODY) }
/* clang-format on */

INLINE void store_output(const Epilogue *ep, ptrdiff_t row, ptrdiff_t column, __m512 x)
{
    __mmask16 lanes = first(ep->m->columns - column);
    if (ep->m->fp32_output) {
        _mm512_mask_storeu_ps((float *)ep->out + row * ep->stride + column, lanes, x);
        return;
    }
    bf16 *out = (bf16 *)ep->out + row * ep->stride + column;
    store(out, lanes, ep->add ? _mm512_add_ps(x, load(out, lanes)) : x);
}

INLINE void finish(const Epilogue *ep, ptrdiff_t row, ptrdiff_t panel, __m512 left, __m512 right)
{
    const Matrix *m = ep->m;
    const int gated = m->activation == SILU_GATE;
    ptrdiff_t column = panel * (gated ? LANES : PANEL);
    if (m->bias) {
        ptrdiff_t next = gated ? m->columns + column : column + LANES; /* the output in the first lane of `right` */
        left = _mm512_add_ps(left, load(m->bias + column, first(m->outputs - column)));
        right = _mm512_add_ps(right, load(m->bias + next, first(m->outputs - next)));
    }
    if (row >= ep->bias.first) {
        const float *bias = ep->bias.values + (row - ep->bias.first) * m->outputs;
        ptrdiff_t next = gated ? m->columns + column : column + LANES;
        left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(first(m->outputs - column), bias + column));
        right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(first(m->outputs - next), bias + next));
    }
    if (gated) {
        store_output(ep, row, column, _mm512_mul_ps(swish(left, 1.0f), right));
        return;
    }
    if (m->activation == QUICK_GELU) left = swish(left, 1.702f), right = swish(right, 1.702f);
    if (m->activation == GELU_TANH) left = gelu_tanh(left), right = gelu_tanh(right);
    store_output(ep, row, column, left);
    store_output(ep, row, column + LANES, right);
}

static void interleave_panel(const uint32_t *weight, ptrdiff_t panel, int64_t outputs, int64_t inputs, int32_t gated,
                             uint32_t *packed)
{
    ptrdiff_t pairs = inputs / 2;
    for (ptrdiff_t p = 0; p < pairs; p += LANES)
        for (int half = 0; half < PANEL; half += LANES) {
            __m512i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                ptrdiff_t row = source_row(panel, half + j, outputs, gated);
                rows[j] = _mm512_maskz_loadu_epi32(row < outputs ? first(pairs - p) : 0, weight + row * pairs + p);
            }
            transpose(rows);
            for (int i = 0; i < LANES && p + i < pairs; i++)
                _mm512_storeu_si512(packed + (p + i) * PANEL + half, rows[i]);
        }
}
