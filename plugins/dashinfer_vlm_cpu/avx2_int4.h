/* Linear layers with weights of 4 bits, see int4.h and progressive.h for their layouts and avx2.c. Results equal those
 * of avx512.c.
 *
 * Products of codes and 8-bit activations fit into 16 bits, and so do the sums of 16 of them, which are two inputs of
 * each quad in a group of 32 inputs. With integer steps (see progressive.h), the sums of a group are multiplied by its
 * step; only for many rows with VNNI is it faster to unpack weights to 8 bits. */
#pragma once

#include "avx2_int8.h"

enum { SUM_QUADS = 8 };

/* Rows of activations in 8 bits, with the negated sum of each group, which compensates for the zero points. */
typedef struct {
    int8_t *values; /* [blocks][rows][BLOCK] */
    float *scales;  /* [blocks][rows] */
    float *offsets; /* [blocks][rows][BLOCK / group]; of 16 bits with integer steps */
    ptrdiff_t rows;
} Int4Rows;

static size_t int4_rows_bytes(const Matrix *m, ptrdiff_t rows)
{
    size_t offset = is_progressive(m->group) ? sizeof(int16_t) : sizeof(float);
    return rows * int4_blocks(m->inputs) * (BLOCK + sizeof(float) + BLOCK / m->group * offset);
}

/* Use `int4_rows_bytes()` of memory. */
static Int4Rows int4_rows_at(char *memory, const Matrix *m, ptrdiff_t rows)
{
    ptrdiff_t count = rows * int4_blocks(m->inputs);
    float *scales = (float *)(memory + count * BLOCK);
    return (Int4Rows){(int8_t *)memory, scales, scales + count, rows};
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
            if (is_progressive(m->group)) ((int16_t *)q->offsets)[place * groups + group] = -sum;
            else q->offsets[place * groups + group] = -sum;
        }
    }
}

/* Add `quads` quads of inputs of each row times `halves` times two vectors, which are the halves of the same bytes, to
 * the sums: in 32 bits with VNNI, else in 16. Each tile unpacks the codes for itself: a buffer for all tiles saves 6 %
 * of the time of 64 or more rows, and costs a fifth of that of one row. Prefetching costs a tenth of it. */
INLINE void multiply_quads(const int rows, const int halves, const int quads, const int8_t *x, const char *codes,
                           __m256i acc[MAX_TILE_ROWS][VECTORS])
{
    __m256i low = _mm256_set1_epi8(15);
    for (int quad = 0; quad < quads; quad++, x += 4, codes += QUAD_BYTES) {
        __m256i w[VECTORS];
        UNROLL_FOR (int h = 0; h < halves; h++) {
            __m256i both = at(codes, h);
            w[2 * h] = _mm256_and_si256(both, low);
            w[2 * h + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        UNROLL_FOR (int m = 0; m < rows; m++) {
            __m256i four = broadcast_dword(x + m * BLOCK);
            UNROLL_FOR (int z = 0; z < 2 * halves; z++)
#if VNNI
                acc[m][z] = _mm256_dpbusd_epi32(acc[m][z], w[z], four);
#else
                acc[m][z] = _mm256_add_epi16(acc[m][z], _mm256_maddubs_epi16(w[z], four));
#endif
            UNROLL_FOR (int h = 0; h < halves; h++) IN_REGISTERS(acc[m][2 * h], acc[m][2 * h + 1]);
        }
    }
}

/* Add SUM_QUADS quads to the integer sums; with `fresh`, overwrite these. */
INLINE void add_quads_int4(const int rows, const int halves, const int fresh, const int8_t *x, const char *codes,
                           __m256i sums[MAX_TILE_ROWS][VECTORS])
{
    __m256i acc[MAX_TILE_ROWS][VECTORS];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) acc[m][z] = VNNI && !fresh ? sums[m][z] : _mm256_setzero_si256();
    multiply_quads(rows, halves, SUM_QUADS, x, codes, acc);
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) {
            if (!VNNI) acc[m][z] = _mm256_madd_epi16(acc[m][z], _mm256_set1_epi16(1));
            sums[m][z] = VNNI || fresh ? acc[m][z] : _mm256_add_epi32(sums[m][z], acc[m][z]);
        }
}

/* The columns of vector `z` of a tile, from the first vector of each half panel on. */
INLINE int tile_column(int first, int z) { return z % 2 * HALF_PANEL + (first + z / 2) * LANES; }

/* sums[m] (+)= the sums of a block, times the scales of the activations. */
INLINE void add_block_sums(const int rows, const int halves, const Int4Rows *q, ptrdiff_t block, ptrdiff_t row,
                           int first, __m256 parts[MAX_TILE_ROWS][VECTORS], float *out)
{
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) {
            float *sum = out + m * PANEL + tile_column(first, z);
            __m256 before = block ? _mm256_load_ps(sum) : _mm256_setzero_ps();
            __m256 scale = _mm256_set1_ps(q->scales[block * q->rows + row + m]);
            _mm256_store_ps(sum, _mm256_fmadd_ps(parts[m][z], scale, before));
        }
}

/* sum + the products of words of `x` and `y`. */
INLINE __m256i add_words(__m256i sum, __m256i x, __m256i y)
{
#if VNNI
    return _mm256_dpwssd_epi32(sum, x, y);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
#endif
}

/* sums[m] (+)= row `row` + m times `halves` times two vectors of a packed block with integer steps. The sums of a group
 * and its offset fit into 16 bits. */
INLINE void tile_progressive(const int rows, const int halves, const Int4Rows *q, ptrdiff_t block, ptrdiff_t row,
                             const char *packed, int first, float *out)
{
    ptrdiff_t place = block * q->rows + row;
    const char *codes = packed + GROUPS_BYTES + QUAD_BYTES / 2 * first;
    const int8_t *x = q->values + place * BLOCK;
    const int16_t *offsets = (const int16_t *)q->offsets + place * STEP_GROUPS;
    __m256i sums[MAX_TILE_ROWS][VECTORS];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) sums[m][z] = _mm256_setzero_si256();
    for (ptrdiff_t pair = 0; pair < STEP_GROUPS / 2; pair++, packed += 2 * PANEL, offsets += 2) {
        UNROLL_FOR (int g = 0; g < 2; g++) {
            __m256i acc[MAX_TILE_ROWS][VECTORS];
            UNROLL_FOR (int m = 0; m < rows; m++)
                UNROLL_FOR (int z = 0; z < 2 * halves; z++) acc[m][z] = _mm256_setzero_si256();
            multiply_quads(rows, halves, STEP_GROUP / 4, x, codes, acc);
            x += STEP_GROUP;
            codes += STEP_GROUP / 4 * QUAD_BYTES;
            UNROLL_FOR (int z = 0; z < 2 * halves; z++) {
                __m256i step = step_vector(packed + g * PANEL + tile_column(first, z)).step;
                if (!VNNI) step = _mm256_or_si256(step, _mm256_slli_epi32(step, 16)); /* of two sums of 16 bits */
                UNROLL_FOR (int m = 0; m < rows; m++) sums[m][z] = add_words(sums[m][z], acc[m][z], step);
            }
        }
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) {
            const char *groups = packed + tile_column(first, z);
            __m256i odd = _mm256_slli_epi32(step_vector(groups + PANEL).offset, 16);
            __m256i zeros = _mm256_or_si256(step_vector(groups).offset, odd);
            UNROLL_FOR (int m = 0; m < rows; m++)
                sums[m][z] = add_words(sums[m][z], broadcast_dword(offsets + m * STEP_GROUPS), zeros);
        }
    }
    __m256 parts[MAX_TILE_ROWS][VECTORS];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) parts[m][z] = _mm256_cvtepi32_ps(sums[m][z]);
    add_block_sums(rows, halves, q, block, row, first, parts, out);
}

/* sums[m] (+)= row `row` + m times `halves` times two vectors of a packed block, from the vector `first` of each half
 * panel on. All integers of a group are smaller than 2^24, hence exact as floats. */
INLINE void tile_int4(const int rows, const int halves, const Int4Rows *q, ptrdiff_t block, ptrdiff_t row,
                      const char *packed, int first, ptrdiff_t group, float *out)
{
    ptrdiff_t place = block * q->rows + row, groups = BLOCK / group;
    const char *scales = packed + 2 * LANES * first, *zeros = packed + int4_zeros_offset(group) + LANES * first;
    const char *codes = packed + int4_codes_offset(group) + QUAD_BYTES / 2 * first;
    const int8_t *x = q->values + place * BLOCK;
    const float *offsets = q->offsets + place * groups;
    __m256 parts[MAX_TILE_ROWS][VECTORS];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) parts[m][z] = _mm256_setzero_ps();
    for (ptrdiff_t g = 0; g < groups; g++, scales += 2 * PANEL, zeros += PANEL, offsets++) {
        __m256i sums[MAX_TILE_ROWS][VECTORS];
        add_quads_int4(rows, halves, 1, x, codes, sums);
        for (ptrdiff_t k = 4 * SUM_QUADS; k < group; k += 4 * SUM_QUADS)
            add_quads_int4(rows, halves, 0, x + k, codes + k / 4 * QUAD_BYTES, sums);
        x += group;
        codes += group / 4 * QUAD_BYTES;
        UNROLL_FOR (int z = 0; z < 2 * halves; z++) {
            int column = tile_column(0, z);
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(zeros + column));
            __m256 zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
            __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + 2 * column)));
            UNROLL_FOR (int m = 0; m < rows; m++) {
                __m256 offset = _mm256_broadcast_ss(offsets + m * groups);
                __m256 sum = _mm256_fmadd_ps(zero, offset, _mm256_cvtepi32_ps(sums[m][z]));
                parts[m][z] = _mm256_fmadd_ps(sum, scale, parts[m][z]);
            }
        }
    }
    add_block_sums(rows, halves, q, block, row, first, parts, out);
}

INLINE void tile_4_bits(const int rows, const int halves, const Int4Rows *q, ptrdiff_t block, ptrdiff_t row,
                        const char *packed, int first, ptrdiff_t group, float *out)
{
    if (is_progressive(group)) tile_progressive(rows, halves, q, block, row, packed, first, out);
    else tile_int4(rows, halves, q, block, row, packed, first, group, out);
}

static void linear_rows_int4(const Int4Rows *q, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    _Alignas(64) float sums[ROW_GROUP * PANEL];
    const Matrix *m = ep->m;
    int progressive = is_progressive(m->group);
    ptrdiff_t blocks = int4_blocks(m->inputs), size = progressive ? PROGRESSIVE_BLOCK : int4_block_size(m->group);
    ptrdiff_t rows = stop - start, tiles = ceil_div(rows, MAX_TILE_ROWS);
    int halves = rows <= WHOLE_ROWS ? 2 : 1;
    const char *packed = (const char *)m->packed + panel * blocks * size;
    prefetch_columns(m->scales, panel);
    for (ptrdiff_t block = 0; block < blocks; block++, packed += size)
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t row = rows * tile / tiles, count = rows * (tile + 1) / tiles - row;
            float *to = sums + row * PANEL;
            for (int first = 0; first < 2; first += halves) switch (8 * halves + count) {
                    CASES_TO_6(1, tile_4_bits(rows, vectors, q, block, start + row, packed, first, m->group, to))
                    CASE(1, 2, tile_4_bits(rows, vectors, q, block, start + row, packed, first, m->group, to))
                    CASE(2, 2, tile_4_bits(rows, vectors, q, block, start + row, packed, first, m->group, to))
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
#pragma omp for schedule(guided)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int4(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups,
                             ep);
    }
}
