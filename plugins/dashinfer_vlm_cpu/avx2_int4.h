/* Linear layers with weights of 4 bits, see int4.h for their layout and avx2.c. Results equal those of avx512.c.
 *
 * Products of codes and 8-bit activations fit into 16 bits, and so do the sums of 16 of them, which are two inputs of
 * each quad in a group of 32 inputs. */
#pragma once

#include "avx2_int8.h"
#include "int4.h"

enum { SUM_QUADS = 8 };

/* Rows of activations in 8 bits, with the negated sum of each group, which compensates for the zero points. */
typedef struct {
    int8_t *values;   /* [blocks][rows][BLOCK] */
    float *scales;    /* [blocks][rows] */
    int32_t *offsets; /* [blocks][rows][BLOCK / group] */
    ptrdiff_t rows;
} Int4Rows;

static size_t int4_rows_bytes(const Matrix *m, ptrdiff_t rows)
{
    return rows * int4_blocks(m->inputs) * (BLOCK + sizeof(float) + BLOCK / m->group * sizeof(int32_t));
}

/* Use `int4_rows_bytes()` of memory. */
static Int4Rows int4_rows_at(char *memory, const Matrix *m, ptrdiff_t rows)
{
    ptrdiff_t count = rows * int4_blocks(m->inputs);
    float *scales = (float *)(memory + count * BLOCK);
    return (Int4Rows){(int8_t *)memory, scales, (int32_t *)(scales + count), rows};
}

/* Quantize one row in the order of the weights; the values after the last input are zero. */
static void quantize_row_int4(const Matrix *m, const bf16 *x, const Int4Rows *q, ptrdiff_t row)
{
    ptrdiff_t groups = BLOCK / m->group;
    for (ptrdiff_t k = 0; k < m->inputs; k += BLOCK) {
        ptrdiff_t count = least(BLOCK, m->inputs - k), place = k / BLOCK * q->rows + row;
        int8_t *values = q->values + place * BLOCK;
        bf16 ordered[BLOCK];
        for (ptrdiff_t i = 0; i < count && m->order; i++) ordered[i] = x[m->order[k + i]];
        int32_t total;
        memset(values, 0, BLOCK);
        q->scales[place] = quantize_block(1, m->order ? ordered : x + k, count, values, &total);
        for (ptrdiff_t group = 0; group < groups; group++, values += m->group) {
            int32_t sum = 0;
            for (ptrdiff_t i = 0; i < m->group; i++) sum += values[i];
            q->offsets[place * groups + group] = -sum;
        }
    }
}

/* A block of a panel with one code per byte. */
typedef struct {
    uint8_t codes[BLOCK / 4][PANEL][4];
    float scales[BLOCK / 32][PANEL];
    int32_t zeros[BLOCK / 32][PANEL];
} Int4Block;

static void unpack_int4(const char *packed, ptrdiff_t group, Int4Block *block)
{
    const char *codes = packed + int4_codes_offset(group), *zeros = packed + int4_zeros_offset(group);
    __m256i low = _mm256_set1_epi8(15);
    for (int quad = 0; quad < BLOCK / 4; quad++, codes += QUAD_BYTES) {
        __m256i *to = (__m256i *)block->codes[quad];
        prefetch(codes + PREFETCH_BYTES);
        UNROLL_FOR (int z = 0; z < VECTORS / 2; z++) {
            __m256i both = at(codes, z);
            _mm256_store_si256(to + z, _mm256_and_si256(both, low));
            _mm256_store_si256(to + VECTORS / 2 + z, _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
        }
    }
    for (int i = 0; i < BLOCK / group; i++)
        for (int j = 0; j < PANEL; j += LANES) {
            __m128i scales = _mm_loadu_si128((const __m128i *)(packed + 2 * (i * PANEL + j)));
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(zeros + i * PANEL + j));
            _mm256_store_ps(block->scales[i] + j, _mm256_cvtph_ps(scales));
            _mm256_store_si256((__m256i *)(block->zeros[i] + j), _mm256_cvtepu8_epi32(bytes));
        }
}

/* Add SUM_QUADS quads of inputs of each row times two vectors to the integer sums. */
INLINE void add_quads_int4(const int rows, const int8_t *x, const char *codes, __m256i sums[MAX_TILE_ROWS][2])
{
    __m256i acc[MAX_TILE_ROWS][2];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++) acc[m][z] = VNNI ? sums[m][z] : _mm256_setzero_si256();
    for (int quad = 0; quad < SUM_QUADS; quad++, x += 4, codes += 4 * PANEL) {
        __m256i w[2];
        UNROLL_FOR (int z = 0; z < 2; z++) w[z] = at(codes, z);
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m256i both = broadcast_dword(x + m * BLOCK);
            UNROLL_FOR (int z = 0; z < 2; z++)
#if VNNI
                acc[m][z] = _mm256_dpbusd_epi32(acc[m][z], w[z], both);
#else
                acc[m][z] = _mm256_add_epi16(acc[m][z], _mm256_maddubs_epi16(w[z], both));
#endif
            IN_REGISTERS(acc[m][0], acc[m][1]);
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++)
            sums[m][z] = VNNI ? acc[m][z]
                              : _mm256_add_epi32(sums[m][z], _mm256_madd_epi16(acc[m][z], _mm256_set1_epi16(1)));
}

/* sums[m] (+)= row `row` + m times two vectors of a block, from vector `first` on. */
INLINE void tile_int4(const int rows, const Int4Rows *q, ptrdiff_t block, ptrdiff_t row, const Int4Block *weights,
                      int first, ptrdiff_t group, float *out)
{
    ptrdiff_t place = block * q->rows + row, groups = BLOCK / group;
    __m256 parts[MAX_TILE_ROWS][2];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++) parts[m][z] = _mm256_setzero_ps();
    for (ptrdiff_t g = 0; g < groups; g++) {
        __m256i sums[MAX_TILE_ROWS][2];
        UNROLL_FOR (int z = 0; z < 2; z++) {
            __m256i zeros = at((const char *)weights->zeros[g], first + z);
            UNROLL_FOR (int m = 0; m < rows; m++) /* both have 16 bits */
                sums[m][z] = _mm256_madd_epi16(zeros, _mm256_set1_epi32(q->offsets[(place + m) * groups + g] & 0xffff));
        }
        for (ptrdiff_t k = g * group; k < (g + 1) * group; k += 4 * SUM_QUADS)
            add_quads_int4(rows, q->values + place * BLOCK + k, (const char *)(weights->codes[k / 4]) + 32 * first,
                           sums);
        UNROLL_FOR (int z = 0; z < 2; z++) {
            __m256 scales = _mm256_load_ps(weights->scales[g] + (first + z) * LANES);
            UNROLL_FOR (int m = 0; m < rows; m++)
                parts[m][z] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m][z]), scales, parts[m][z]);
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++) {
            float *sum = out + m * PANEL + (first + z) * LANES;
            __m256 before = block ? _mm256_load_ps(sum) : _mm256_setzero_ps();
            _mm256_store_ps(sum, _mm256_fmadd_ps(parts[m][z], _mm256_set1_ps(q->scales[place + m]), before));
        }
}

static void linear_rows_int4(const Int4Rows *q, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    _Alignas(64) float sums[ROW_GROUP * PANEL];
    _Alignas(64) Int4Block weights;
    const Matrix *m = ep->m;
    ptrdiff_t blocks = int4_blocks(m->inputs), size = int4_block_size(m->group), rows = stop - start;
    ptrdiff_t tiles = ceil_div(rows, MAX_TILE_ROWS);
    const char *packed = (const char *)m->packed + panel * blocks * size;
    for (ptrdiff_t block = 0; block < blocks; block++, packed += size) {
        unpack_int4(packed, m->group, &weights);
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t row = rows * tile / tiles, count = rows * (tile + 1) / tiles - row;
            for (int z = 0; z < VECTORS; z += 2) switch (8 * 2 + count) {
                    CASES_TO_6(2, tile_int4(rows, q, block, start + row, &weights, z, m->group, sums + row * PANEL))
                }
        }
    }
    finish_scaled(ep, panel, start, stop, sums);
}

static void linear_int4(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = ceil_div(ep->m->outputs, PANEL), groups = ceil_div(rows, ROW_GROUP);
    Int4Rows q = int4_rows_at(workspace, ep->m, rows);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) quantize_row_int4(ep->m, x + row * stride, &q, row);
#pragma omp for schedule(guided, groups > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int4(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups,
                             ep);
    }
}
