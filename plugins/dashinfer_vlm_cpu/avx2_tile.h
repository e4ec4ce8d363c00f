/* Products of floats, see avx2.c. */
#pragma once

#include "avx2_numbers.h"
#include "panels.h"

/* BLOCK is the number of inputs that are unpacked at a time: 16 KB of floats. */
enum { BLOCK = QUANT_BLOCK, MAX_TILE_ROWS = 6 };

INLINE void prefetch(const void *memory) { _mm_prefetch((const char *)memory, _MM_HINT_T1); }

/* A product of up to 6 rows with up to 32 columns: sums[m][c] += sum over i < count of a[m][i] * b[i][c]. For each i,
 * one line is prefetched, `step` bytes after the previous one. */
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
    __m256 acc[MAX_TILE_ROWS][VECTORS], x[MAX_TILE_ROWS], w[VECTORS];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < vectors; z++)
            acc[m][z] = p->fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(p->sums + m * p->stride + z * LANES);
    const float *a = p->a, *b = p->b, *stop = a + p->count;
    const char *next = p->next;
    for (; a < stop; a++, b += p->ldb, next += p->step) {
        prefetch(next);
        if (rows < vectors) { /* the smaller operand stays in registers */
            UNROLL_FOR (int m = 0; m < rows; m++) x[m] = _mm256_broadcast_ss(a + m * p->lda);
            UNROLL_FOR (int z = 0; z < vectors; z++) {
                w[0] = _mm256_loadu_ps(b + z * LANES);
                UNROLL_FOR (int m = 0; m < rows; m++) acc[m][z] = _mm256_fmadd_ps(x[m], w[0], acc[m][z]);
            }
        } else {
            UNROLL_FOR (int z = 0; z < vectors; z++) w[z] = _mm256_loadu_ps(b + z * LANES);
            UNROLL_FOR (int m = 0; m < rows; m++) {
                x[0] = _mm256_broadcast_ss(a + m * p->lda);
                UNROLL_FOR (int z = 0; z < vectors; z++) acc[m][z] = _mm256_fmadd_ps(x[0], w[z], acc[m][z]);
            }
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < vectors; z++) _mm256_storeu_ps(p->sums + m * p->stride + z * LANES, acc[m][z]);
}

/* Expand BODY with the constants `rows` and `vectors`, so that registers are allocated for each size of a tile. */
#define CASE(row_count, vector_count, BODY) \
    case 8 * (vector_count) + (row_count): { \
        enum { rows = row_count, vectors = vector_count }; \
        BODY; \
    } break;
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
            CASES_TO_3(3, add_tile(rows, vectors, &part))
            CASE(4, 3, add_tile(rows, vectors, &part)) CASES_TO_3(4, add_tile(rows, vectors, &part))
        }
        part.step = 0;
    }
}

static void interleave_panel(const uint32_t *weight, ptrdiff_t panel, int64_t outputs, int64_t inputs, int32_t gated,
                       uint32_t *packed)
{
    ptrdiff_t pairs = inputs / 2;
    for (ptrdiff_t p = 0; p < pairs; p += LANES)
        for (int column = 0; column < PANEL; column += LANES) {
            __m256i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                ptrdiff_t row = source_row(panel, column + j, outputs, gated);
                rows[j] = row < outputs
                              ? _mm256_maskload_epi32((const int *)weight + row * pairs + p, first(pairs - p))
                              : _mm256_setzero_si256();
            }
            transpose(rows);
            for (int i = 0; i < LANES && p + i < pairs; i++)
                _mm256_storeu_si256((__m256i *)(packed + (p + i) * PANEL + column), rows[i]);
        }
}
