/* Vectors of floats, see floats.h. */
#pragma once

#include "avx512_numbers.h"

/* The size of a tile of a product in registers, and the number of rows of a state that a token changes at once. */
enum { DELTA_ROWS = 6, DELTA_VECTORS = 4, STATE_ROWS = 8 };

typedef __m512 Floats;

INLINE Floats splat(float x) { return _mm512_set1_ps(x); }

INLINE Floats times(Floats x, Floats y) { return x * y; }

INLINE Floats magnitude(Floats x) { return _mm512_abs_ps(x); }

/* The larger one of 0 and x; NaN if x is NaN. */
INLINE Floats positive(Floats x) { return _mm512_max_ps(splat(0), x); }

INLINE Floats multiply_add(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }

/* The first `count` lanes of x, and zeros. */
INLINE Floats first_lanes(Floats x, ptrdiff_t count) { return _mm512_maskz_mov_ps(first(count), x); }

INLINE Floats get(const float *x, ptrdiff_t count) { return _mm512_maskz_loadu_ps(first(count), x); }

INLINE void put(float *out, ptrdiff_t count, Floats x) { _mm512_mask_storeu_ps(out, first(count), x); }

/* Write LANES values to memory past the caches, at a multiple of their size. */
INLINE void stream(float *out, Floats x) { _mm512_stream_ps(out, x); }

INLINE Floats get_bf16(const bf16 *x, ptrdiff_t count) { return load(x, first(count)); }

INLINE void put_bf16(bf16 *out, ptrdiff_t count, Floats x) { store(out, first(count), x); }

INLINE float sum(Floats x) { return _mm512_reduce_add_ps(x); }

INLINE Floats exponential(Floats x) { return exp2_(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0); }

INLINE void transpose_floats(Floats x[LANES])
{
    __m512i rows[LANES];
    UNROLL_FOR (int i = 0; i < LANES; i++) rows[i] = (__m512i)x[i];
    transpose(rows);
    UNROLL_FOR (int i = 0; i < LANES; i++) x[i] = (Floats)rows[i];
}
