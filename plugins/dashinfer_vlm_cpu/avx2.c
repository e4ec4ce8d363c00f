/* Kernels of the vision encoder and the decoder, for CPUs with AVX2 and FMA, optionally with AVX-VNNI.
 *
 * Functions and layouts of weights are those of avx512.c: panels of 32 output columns, with pairs (bf16) or quads (int8) of
 * inputs interleaved. There are no bf16 products: weights are widened to float, in registers for few rows, else into a
 * buffer in the L1 cache that all rows use; activations are widened once per call. Sums run over the inputs in one fixed
 * order, regardless of the number of rows or threads: a row's result is bit-exact in any batch.
 *
 * Built by build.py and called by native*.py in this folder, whose callers guarantee all shapes. Strides count elements.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

/* BLOCK is the number of inputs that are unpacked at a time: 16 KB of floats. It is also that of a scale of 8-bit
 * activations. ROW_GROUP is the largest number of rows that one task multiplies by a panel. */
enum { PANEL = 32, LANES = 8, VECTORS = PANEL / LANES, BLOCK = 128, ROW_GROUP = 192,
       MAX_TILE_ROWS = 6 };
/* Distances of prefetches, as measured: of weights in bytes, of keys and values in rows. */
enum { PREFETCH_BYTES = 8192, PREFETCH_KEYS = 64 };
enum { NONE = 0, QUICK_GELU = 1, SILU_GATE = 2, GELU_TANH = 4 }; /* native_linear.py applies GELU */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 12")

/* Numbers ---------------------------------------------------------------------------------------------------------- */

INLINE ptrdiff_t round_up(ptrdiff_t x, ptrdiff_t to) { return (x + to - 1) / to * to; }

INLINE ptrdiff_t ceil_div(ptrdiff_t x, ptrdiff_t by) { return (x + by - 1) / by; }

INLINE ptrdiff_t least(ptrdiff_t x, ptrdiff_t y) { return x < y ? x : y; }

INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }

/* Round to nearest, ties to even; NaN stays NaN. */
INLINE __m128i narrow(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc0), nan);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* The lanes below `count`. */
INLINE __m256i first(ptrdiff_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count > LANES ? LANES : count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE __m256 masked(__m256 x, __m256i lanes) { return _mm256_and_ps(x, _mm256_castsi256_ps(lanes)); }

/* Load up to LANES values, at most `count`; the others are zero. */
INLINE __m256 load(const bf16 *x, ptrdiff_t count)
{
    if (__builtin_expect(count >= LANES, 1)) return widen(_mm_loadu_si128((const __m128i *)x));
    bf16 values[LANES] = {0};
    for (ptrdiff_t i = 0; i < count; i++) values[i] = x[i];
    return widen(_mm_loadu_si128((const __m128i *)values));
}

INLINE void store(bf16 *out, ptrdiff_t count, __m256 x)
{
    if (__builtin_expect(count >= LANES, 1)) {
        _mm_storeu_si128((__m128i *)out, narrow(x));
        return;
    }
    bf16 values[LANES];
    _mm_storeu_si128((__m128i *)values, narrow(x));
    for (ptrdiff_t i = 0; i < count; i++) out[i] = values[i];
}

INLINE __m256 load_floats(const float *x, ptrdiff_t count) { return _mm256_maskload_ps(x, first(count)); }

INLINE float sum_lanes(__m256 x)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE float max_lanes(__m256 x)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

INLINE __m256 power_of_2(__m256i exponent)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
}

/* 2^x with a polynomial on [-1/2, 1/2] and an error of 2e-7; 0 below -126. `bounded` promises x < 128, or NaN. */
INLINE __m256 exp2_(__m256 x, const int bounded)
{
    if (!bounded) x = _mm256_min_ps(_mm256_set1_ps(130.0f), x); /* NaN if x is NaN */
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = _mm256_sub_ps(x, whole);
    __m256 y = _mm256_set1_ps(1.535336188e-4f);
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.339887440e-3f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(9.618437357e-3f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(5.550332548e-2f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(2.402264791e-1f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(6.931472028e-1f));
    y = _mm256_fmadd_ps(y, part, _mm256_set1_ps(1.0f));
    __m256i exponent = _mm256_cvtps_epi32(whole);
    if (bounded) {
        y = _mm256_mul_ps(y, power_of_2(exponent));
    } else { /* in two steps: 2^128 is infinite, but a smaller y times it may not be */
        __m256i half = _mm256_srai_epi32(exponent, 1);
        y = _mm256_mul_ps(_mm256_mul_ps(y, power_of_2(half)), power_of_2(_mm256_sub_epi32(exponent, half)));
    }
    return _mm256_and_ps(y, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}

/* x * sigmoid(slope * x) */
INLINE __m256 swish(__m256 x, float slope)
{
    __m256 e = exp2_(_mm256_mul_ps(x, _mm256_set1_ps(-1.44269504f * slope)), 0);
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

/* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as x * sigmoid of twice the argument of tanh */
INLINE __m256 gelu_tanh(__m256 x)
{
    __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.044715f), _mm256_set1_ps(1.0f));
    __m256 e = exp2_(_mm256_mul_ps(_mm256_mul_ps(x, cubic), _mm256_set1_ps(-1.44269504f * 1.59576912f)), 0);
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

/* Transpose 8 rows of 8 dwords. */
INLINE void transpose(__m256i r[LANES])
{
    __m256i t[LANES];
    UNROLL for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    UNROLL for (int i = 0; i < LANES; i++) r[i] = t[i];
}

/* The first and the second bf16 of each dword. */
INLINE __m256 even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }

INLINE __m256 odd(__m256i pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000))); }

INLINE __m256i broadcast_dword(const void *x)
{
    int32_t dword;
    memcpy(&dword, x, sizeof dword);
    return _mm256_set1_epi32(dword);
}

/* Without it, gcc reorders products and sums so that there are too few registers for them. */
#define IN_REGISTERS(x, y) __asm__("" : "+x"(x), "+x"(y))

/* Float products --------------------------------------------------------------------------------------------------- */

INLINE void prefetch(const void *memory) { _mm_prefetch((const char *)memory, _MM_HINT_T1); }

/* A product of up to 6 rows with up to 32 columns: sums[m][c] += sum over i < count of a[m][i] * b[i][c]. For each i, one
 * line is prefetched, `step` bytes after the previous one. */
typedef struct {
    const float *a;
    ptrdiff_t lda;
    const float *b;
    ptrdiff_t ldb, count;
    float *sums;
    ptrdiff_t stride;
    int fresh; /* overwrite `sums` instead of adding to them */
    const char *next;
    ptrdiff_t step;
} Product;

INLINE void add_tile(const int rows, const int vectors, const Product *p)
{
    __m256 acc[MAX_TILE_ROWS][VECTORS], x[MAX_TILE_ROWS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < vectors; z++)
            acc[m][z] = p->fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(p->sums + m * p->stride + z * LANES);
    const float *a = p->a, *b = p->b, *stop = a + p->count;
    const char *next = p->next;
    for (; a < stop; a++, b += p->ldb, next += p->step) {
        prefetch(next);
        UNROLL for (int m = 0; m < rows; m++) x[m] = _mm256_broadcast_ss(a + m * p->lda);
        UNROLL for (int z = 0; z < vectors; z++) {
            __m256 w = _mm256_loadu_ps(b + z * LANES);
            UNROLL for (int m = 0; m < rows; m++) acc[m][z] = _mm256_fmadd_ps(x[m], w, acc[m][z]);
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < vectors; z++) _mm256_storeu_ps(p->sums + m * p->stride + z * LANES, acc[m][z]);
}

/* Expand BODY with the constants `rows` and `vectors`, so that registers are allocated for each size of a tile. */
#define CASE(row_count, vector_count, BODY) \
    case 8 * (vector_count) + (row_count): { enum { rows = row_count, vectors = vector_count }; BODY; } break;
#define CASES_TO_3(n, BODY) CASE(1, n, BODY) CASE(2, n, BODY) CASE(3, n, BODY)
#define CASES_TO_5(n, BODY) CASES_TO_3(n, BODY) CASE(4, n, BODY) CASE(5, n, BODY)
#define CASES_TO_6(n, BODY) CASES_TO_5(n, BODY) CASE(6, n, BODY)

/* The largest number of rows whose sums fit into registers. */
INLINE ptrdiff_t tile_rows(ptrdiff_t vectors) { return vectors == 4 ? 3 : vectors == 3 ? 4 : MAX_TILE_ROWS; }

/* Add products of `rows` rows with `vectors` times LANES columns, in tiles of about the same size. */
static void add_product(ptrdiff_t rows, ptrdiff_t vectors, const Product *p)
{
    ptrdiff_t tiles = ceil_div(rows, tile_rows(vectors));
    Product part = *p;
    for (ptrdiff_t tile = 0; tile < tiles; tile++) {
        ptrdiff_t row = rows * tile / tiles, stop = rows * (tile + 1) / tiles;
        part.a = p->a + row * p->lda;
        part.sums = p->sums + row * p->stride;
        switch (8 * vectors + stop - row) {
            CASES_TO_6(1, add_tile(rows, vectors, &part))
            CASES_TO_6(2, add_tile(rows, vectors, &part))
            CASES_TO_3(3, add_tile(rows, vectors, &part)) CASE(4, 3, add_tile(rows, vectors, &part))
            CASES_TO_3(4, add_tile(rows, vectors, &part))
        }
        part.step = 0;
    }
}

#include "avx2_linear.h"
#include "avx2_int8.h"
#include "avx2_int4.h"

/* Workspace size of `linear` in bytes; the same for all weights of this shape that have 8 bits, or that have more. */
int64_t linear_workspace_size(const Matrix *m, int64_t rows, int32_t threads)
{
    (void)threads;
    if (!m->scales) return linear_bf16_workspace_size(rows, m->inputs);
    if (m->group) return int4_rows_bytes(m, rows);
    return quantized_bytes(rows, m->inputs);
}

/* Multiply x [rows, inputs] by the weights and write the result to `out` or, with `add`, add it. */
void linear_biased(const Matrix *m, const bf16 *x, int64_t stride, int64_t rows, void *out, int64_t out_stride,
                   int32_t add, const float *row_bias, int64_t biased_rows, char *workspace, int32_t threads)
{
    Epilogue ep = {m, out, out_stride, add, {row_bias, rows - biased_rows}};
    if (!m->scales) linear_bf16(x, stride, rows, &ep, workspace, threads);
    else if (m->group) linear_int4(x, stride, rows, &ep, workspace, threads);
    else linear_int8(x, stride, rows, &ep, workspace, threads);
}

#include "avx2_argmax.h"
#include "avx2_draw.h"

/* Norms and rotary embedding --------------------------------------------------------------------------------------- */

/* LayerNorm with a bias, RMSNorm without one; the rows of `out` are contiguous. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, ptrdiff_t columns)
{
    __m256 mean = _mm256_setzero_ps(), square = _mm256_setzero_ps();
    if (bias) {
        for (ptrdiff_t k = 0; k < columns; k += LANES) mean = _mm256_add_ps(mean, load(x + k, columns - k));
        mean = _mm256_set1_ps(sum_lanes(mean) / columns);
    }
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __m256 value = masked(_mm256_sub_ps(load(x + k, columns - k), mean), first(columns - k));
        square = _mm256_fmadd_ps(value, value, square);
    }
    __m256 scale = _mm256_set1_ps(1.0f / __builtin_sqrtf(sum_lanes(square) / columns + eps));
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __m256 value = _mm256_mul_ps(_mm256_sub_ps(load(x + k, columns - k), mean), scale);
        value = _mm256_mul_ps(value, load(weight + k, columns - k));
        store(out + k, columns - k, bias ? _mm256_add_ps(value, load(bias + k, columns - k)) : value);
    }
}

void norm(const bf16 *x, int64_t stride, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, int64_t rows,
          int64_t columns, int32_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        norm_row(x + row * stride, weight, bias, eps, out + row * columns, columns);
}

/* Rotate each pair (x[i], x[i + half]) of `heads` heads in place; cos and sin are [rows, half]. */
void rotate(bf16 *x, int64_t stride, const float *cos, const float *sin, int64_t rows, int64_t heads, int64_t half,
            int32_t threads)
{
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t head = 0; head < heads; head++)
            for (ptrdiff_t i = 0; i < half; i += LANES) {
                bf16 *low = x + row * stride + head * 2 * half + i, *high = low + half;
                __m256 c = load_floats(cos + row * half + i, half - i), a = load(low, half - i);
                __m256 s = load_floats(sin + row * half + i, half - i), b = load(high, half - i);
                store(low, half - i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
                store(high, half - i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
            }
}

#include "avx2_attention.h"

INLINE const void *element(const void *rows, int is_int8, ptrdiff_t index)
{
    return (const char *)rows + (is_int8 ? index : 2 * index);
}

/* Add y to x, both [count]. */
static void add_row(bf16 *x, const bf16 *y, ptrdiff_t count)
{
    for (ptrdiff_t k = 0; k < count; k += LANES)
        store(x + k, count - k, _mm256_add_ps(load(x + k, count - k), load(y + k, count - k)));
}

/* Quantize a key or value to bytes with one scale, like `quantize_rows` in kernels/kv_cache.py. */
static void quantize_head(const bf16 *x, ptrdiff_t width, int8_t *bytes, float *scale)
{
    *scale = max_abs(x, width) / 127.0f;
    __m256 inverse = _mm256_set1_ps(*scale >= 0x1p-126f ? 1.0f / *scale : 0.0f);
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(load(x + i, width - i), inverse));
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        int64_t packed = _mm_cvtsi128_si64(_mm_packs_epi16(words, words));
        memcpy(bytes + i, &packed, least(LANES, width - i));
    }
}

#include "decoder_layers.h"
