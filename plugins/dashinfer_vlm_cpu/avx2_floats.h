/* Vectors of floats, see floats.h. */
#pragma once

#include "avx2_numbers.h"

/* The size of a tile of a product in registers, and the number of rows of a state that a token changes at once. */
enum { DELTA_ROWS = 6, DELTA_VECTORS = 2, STATE_ROWS = 4 };

typedef __m256 Floats;

INLINE Floats splat(float x) { return _mm256_set1_ps(x); }

INLINE Floats times(Floats x, Floats y) { return x * y; }

INLINE Floats magnitude(Floats x) { return _mm256_andnot_ps(splat(-0.0f), x); }

/* The larger one of 0 and x; NaN if x is NaN. */
INLINE Floats positive(Floats x) { return _mm256_max_ps(splat(0), x); }

INLINE Floats multiply_add(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }

/* The first `count` lanes of x, and zeros. */
INLINE Floats first_lanes(Floats x, ptrdiff_t count) { return masked(x, first(count)); }

INLINE Floats get(const float *x, ptrdiff_t count)
{
    return __builtin_expect(count >= LANES, 1) ? _mm256_loadu_ps(x) : load_floats(x, count);
}

INLINE void put(float *out, ptrdiff_t count, Floats x)
{
    if (__builtin_expect(count >= LANES, 1)) _mm256_storeu_ps(out, x);
    else _mm256_maskstore_ps(out, first(count), x);
}

/* Write LANES values to memory past the caches, at a multiple of their size. */
INLINE void stream(float *out, Floats x) { _mm256_stream_ps(out, x); }

INLINE Floats get_bf16(const bf16 *x, ptrdiff_t count) { return load(x, count); }

INLINE void put_bf16(bf16 *out, ptrdiff_t count, Floats x) { store(out, count, x); }

INLINE float sum(Floats x) { return sum_lanes(x); }

INLINE Floats exponential(Floats x) { return exp2_(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), 0); }

INLINE void transpose_floats(Floats x[LANES])
{
    __m256i rows[LANES];
    UNROLL_FOR (int i = 0; i < LANES; i++) rows[i] = (__m256i)x[i];
    transpose(rows);
    UNROLL_FOR (int i = 0; i < LANES; i++) x[i] = (Floats)rows[i];
}
