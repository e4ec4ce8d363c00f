/* Definitions that all instruction sets share. */
#pragma once

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

/* Weights are packed into panels of PANEL output columns. QUANT_BLOCK is the number of inputs that share a scale of
 * 8-bit activations, and ROW_GROUP the largest number of rows that one task multiplies by a panel. */
enum { PANEL = 32, QUANT_BLOCK = 128, ROW_GROUP = 192 };
enum { NONE = 0, QUICK_GELU = 1, SILU_GATE = 2, GELU = 3, GELU_TANH = 4 };

#define INLINE static inline __attribute__((always_inline))
#define UNROLL_FOR _Pragma("GCC unroll 12") for

INLINE ptrdiff_t round_up(ptrdiff_t x, ptrdiff_t to) { return (x + to - 1) / to * to; }

INLINE ptrdiff_t ceil_div(ptrdiff_t x, ptrdiff_t by) { return (x + by - 1) / by; }

INLINE float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

/* The row of the weights in column `j` of a panel; gate and up projection share a panel. */
INLINE ptrdiff_t source_row(ptrdiff_t panel, int j, ptrdiff_t outputs, int gated)
{
    enum { HALF = PANEL / 2 };
    if (!gated) return panel * PANEL + j;
    return j < HALF ? panel * HALF + j : outputs / 2 + panel * HALF + j - HALF;
}

/* An element of keys or values. */
INLINE const void *element(const void *rows, int is_int8, ptrdiff_t index)
{
    return (const char *)rows + (is_int8 ? index : 2 * index);
}
