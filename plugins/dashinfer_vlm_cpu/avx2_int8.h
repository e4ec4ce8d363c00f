/* Linear layers with weights of 8 bits, and of 4 bits that are unpacked to these, see avx2.c. Integer sums are exact,
 * so that the results equal those of avx512.c.
 *
 * With AVX-VNNI, one instruction multiplies quads of unsigned weights by signed activations. Without it, weights and
 * activations are widened to 16 bits, because the product of bytes (vpmaddubsw) saturates. The even and the odd bytes
 * of a quad are widened separately, with one instruction each: for each tile, since sharing them between tiles is
 * slower. */
#pragma once

#include "avx2_linear.h"
#include "int8.h"
#include "progressive.h"

/* Up to WHOLE_ROWS rows are multiplied by all vectors of a panel at a time: weights are read in order, which takes a
 * tenth less time. More rows are multiplied by two vectors, for which there are enough registers. */
enum { WHOLE_ROWS = 2 };

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
#define VNNI 1
typedef int8_t Quantum;
#else
#define VNNI 0
typedef int16_t Quantum;
#endif

/* The largest magnitude, NaN if any value is NaN: without the sign, floats are ordered like integers, with NaN last. */
static float max_abs(const bf16 *x, ptrdiff_t count)
{
    __m256i largest = _mm256_setzero_si256(), magnitude = _mm256_set1_epi32(0x7fffffff);
    for (ptrdiff_t k = 0; k < count; k += LANES)
        largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(load(x + k, count - k)), magnitude));
    uint32_t bits[LANES], most = 0;
    _mm256_storeu_si256((__m256i *)bits, largest);
    for (int i = 0; i < LANES; i++) most = bits[i] > most ? bits[i] : most;
    float value;
    memcpy(&value, &most, sizeof value);
    return value;
}

/* Rows of activations in 8 bits. Each block of inputs has a scale and -128 times the sum of its values, which
 * compensates for the offset of the weights. Blocks are used because these models have outlier activations: a few
 * inputs are hundreds of times larger than the others. */
typedef struct {
    Quantum *values;  /* [blocks][rows][BLOCK] */
    float *scales;    /* [blocks][rows] */
    int32_t *offsets; /* [blocks][rows] */
    ptrdiff_t rows;
} Quantized;

static size_t quantized_bytes(ptrdiff_t rows, ptrdiff_t inputs)
{
    return rows * ceil_div(inputs, BLOCK) * (BLOCK * sizeof(Quantum) + sizeof(float) + sizeof(int32_t));
}

/* Use `quantized_bytes()` of memory, aligned to 64 bytes. */
static Quantized quantized_at(char *memory, ptrdiff_t rows, ptrdiff_t inputs)
{
    ptrdiff_t count = rows * ceil_div(inputs, BLOCK);
    Quantum *values = (Quantum *)memory;
    float *scales = (float *)(values + count * BLOCK);
    return (Quantized){values, scales, (int32_t *)(scales + count), rows};
}

INLINE __m256i quantize(__m256 x, __m256 inverse) { return _mm256_cvtps_epi32(_mm256_mul_ps(x, inverse)); }

/* Store eight values: bytes, or 16 bits with the even ones of each quad before the odd ones. */
INLINE void store_quads(const int bytes, void *out, __m256i values)
{
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
    if (bytes) {
        _mm_storel_epi64((__m128i *)out, _mm_packs_epi16(words, words));
    } else {
        words = _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
        _mm_storeu_si128((__m128i *)out, words);
    }
}

/* Quantize a block of inputs; returns the scale and the sum of the values. */
INLINE float quantize_block(const int bytes, const bf16 *x, ptrdiff_t count, void *out, int32_t *total)
{
    float scale = max_abs(x, count) / 127.0f;
    __m256 inverse = _mm256_set1_ps(inverse_of(scale));
    __m256i sum = _mm256_setzero_si256();
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        __m256i whole = quantize(load(x + i, count - i), inverse);
        sum = _mm256_add_epi32(sum, whole);
        store_quads(bytes, (char *)out + i * (bytes ? 1 : 2), whole);
    }
    int32_t sums[LANES];
    _mm256_storeu_si256((__m256i *)sums, sum);
    *total = 0;
    for (int i = 0; i < LANES; i++) *total += sums[i];
    return scale;
}

static void quantize_row(const bf16 *x, ptrdiff_t inputs, const Quantized *q, ptrdiff_t row)
{
    for (ptrdiff_t k = 0; k < inputs; k += BLOCK) {
        ptrdiff_t place = k / BLOCK * q->rows + row;
        int32_t total;
        q->scales[place] = quantize_block(VNNI, x + k, least(BLOCK, inputs - k), q->values + place * BLOCK, &total);
        q->offsets[place] = -128 * total;
    }
}

/* sums[m] (+)= row `row` + m times `quads` quads of a block of a panel, `vectors` vectors of it. For each quad, two
 * lines are prefetched, `step` bytes after the previous ones. */
INLINE void tile_int8(const int rows, const int vectors, const Quantized *q, ptrdiff_t block, ptrdiff_t row,
                      const char *panel, ptrdiff_t quads, float *sums, const char *next, ptrdiff_t step)
{
    ptrdiff_t place = block * q->rows + row;
    const Quantum *x = q->values + place * BLOCK, *stop = x + 4 * quads;
    __m256i acc[MAX_TILE_ROWS][VECTORS];
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < vectors; z++) acc[m][z] = _mm256_set1_epi32(q->offsets[place + m]);
    for (; x < stop; x += 4, panel += 4 * PANEL, next += step) {
        prefetch(next);
        prefetch(next + 64);
        UNROLL_FOR (int part = 0; part < (VNNI ? 1 : 2); part++) {
            __m256i w[VECTORS];
            UNROLL_FOR (int z = 0; z < vectors; z++) {
                w[z] = at(panel, z);
                if (!VNNI) w[z] = part ? _mm256_srli_epi16(w[z], 8) : _mm256_and_si256(w[z], _mm256_set1_epi16(0xff));
            }
            UNROLL_FOR (int m = 0; m < rows; m++) {
                __m256i both = broadcast_dword(x + m * BLOCK + 2 * part);
                UNROLL_FOR (int z = 0; z < vectors; z++)
#if VNNI
                    acc[m][z] = _mm256_dpbusd_epi32(acc[m][z], w[z], both);
#else
                    acc[m][z] = _mm256_add_epi32(acc[m][z], _mm256_madd_epi16(w[z], both));
#endif
                UNROLL_FOR (int z = 0; z < vectors; z += 2) IN_REGISTERS(acc[m][z], acc[m][z + 1]);
            }
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < vectors; z++) {
            float *sum = sums + m * PANEL + z * LANES;
            __m256 before = block ? _mm256_load_ps(sum) : _mm256_setzero_ps();
            __m256 scale = _mm256_set1_ps(q->scales[place + m]);
            _mm256_store_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[m][z]), scale, before));
        }
}

/* The steps of the groups of one vector, and their products with the zero points. */
typedef struct {
    __m256i step, offset;
} StepVector;

INLINE StepVector step_vector(const char *groups)
{
    __m256i columns = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)groups));
    __m256i step = _mm256_and_si256(columns, _mm256_set1_epi32(15));
    return (StepVector){step, _mm256_mullo_epi16(_mm256_srli_epi32(columns, 4), step)};
}

/* Unpack a block with integer steps to the layout of 8-bit weights. */
static void unpack_block(const char *block, char *to)
{
    const char *codes = block + GROUPS_BYTES;
    __m256i low = _mm256_set1_epi8(15);
    for (ptrdiff_t g = 0; g < STEP_GROUPS; g++, block += PANEL) {
        __m256i steps[VECTORS], offsets[VECTORS];
        UNROLL_FOR (int z = 0; z < VECTORS; z++) {
            StepVector columns = step_vector(block + z * LANES);
            __m256i zero = _mm256_or_si256(columns.offset, _mm256_slli_epi32(columns.offset, 16));
            steps[z] = _mm256_or_si256(columns.step, _mm256_slli_epi32(columns.step, 16));
            offsets[z] = _mm256_sub_epi8(_mm256_set1_epi8(-128), _mm256_or_si256(zero, _mm256_slli_epi16(zero, 8)));
        }
        for (int quad = 0; quad < STEP_GROUP / 4; quad++, codes += QUAD_BYTES, to += 2 * QUAD_BYTES)
            UNROLL_FOR (int z = 0; z < VECTORS; z++) {
                /* Products of the bytes of a word with a step fit into these bytes. */
                __m256i both = at(codes, z % 2), four = z < 2 ? both : _mm256_srli_epi16(both, 4);
                __m256i products = _mm256_mullo_epi16(_mm256_and_si256(four, low), steps[z]);
                _mm256_store_si256((__m256i *)to + z, _mm256_add_epi8(products, offsets[z]));
            }
    }
}

/* Prefetch floats of the columns of a panel, which are read after its weights. */
INLINE void prefetch_columns(const float *x, ptrdiff_t panel)
{
    for (int j = 0; j < PANEL; j += 16) prefetch(x + panel * PANEL + j);
}

/* sums[m] = row `row` + m times a panel, which may have integer steps, without the scales of the weights. */
static void multiply_int8(const Quantized *q, ptrdiff_t row, ptrdiff_t row_count, ptrdiff_t inputs, const char *panel,
                          int progressive, float *sums)
{
    _Alignas(64) char plain[BLOCK * PANEL];
    ptrdiff_t size = progressive ? PROGRESSIVE_BLOCK : BLOCK * PANEL;
    ptrdiff_t tiles = ceil_div(row_count, MAX_TILE_ROWS), vectors = row_count <= WHOLE_ROWS ? VECTORS : 2;
    for (ptrdiff_t k = 0; k < inputs; k += BLOCK, panel += size) {
        ptrdiff_t quads = least(BLOCK, inputs - k) / 4;
        if (progressive) unpack_block(panel, plain);
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t start = row_count * tile / tiles, count = row_count * (tile + 1) / tiles - start;
            for (int z = 0; z < VECTORS; z += vectors) {
                const char *weights = (progressive ? plain : panel) + z * sizeof(__m256i);
                float *to = sums + start * PANEL + z * LANES;
                const char *next = panel + PREFETCH_BYTES;
                ptrdiff_t from = row + start, block = k / BLOCK, step = tile || z ? 0 : size / (BLOCK / 4);
                switch (8 * vectors + count) {
                    CASES_TO_6(2, tile_int8(rows, vectors, q, block, from, weights, quads, to, next, step))
                    CASE(1, 4, tile_int8(rows, vectors, q, block, from, weights, quads, to, next, step))
                    CASE(2, 4, tile_int8(rows, vectors, q, block, from, weights, quads, to, next, step))
                }
            }
        }
    }
}

/* Multiply the sums of the rows [start, stop) by the scales of the weights. */
static void finish_scaled(const Epilogue *ep, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const float *sums)
{
    const float *scales = ep->m->scales + panel * PANEL;
    for (ptrdiff_t row = start; row < stop; row++) {
        __m256 found[VECTORS];
        UNROLL_FOR (int z = 0; z < VECTORS; z++)
            found[z] = _mm256_mul_ps(_mm256_load_ps(sums + (row - start) * PANEL + z * LANES),
                                     _mm256_loadu_ps(scales + z * LANES));
        finish(ep, row, panel, found);
    }
}

static void linear_rows_int8(const Quantized *q, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    _Alignas(64) float sums[ROW_GROUP * PANEL];
    ptrdiff_t inputs = ep->m->inputs;
    int32_t group = ep->m->group;
    const char *packed = (const char *)ep->m->packed + panel * panel_size(group, inputs);
    prefetch_columns(ep->m->scales, panel);
    multiply_int8(q, start, stop - start, inputs, packed, is_progressive(group), sums);
    finish_scaled(ep, panel, start, stop, sums);
}

static void linear_int8(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = ceil_div(ep->m->outputs, PANEL), groups = ceil_div(rows, ROW_GROUP), inputs = ep->m->inputs;
    Quantized q = quantized_at(workspace, rows, inputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) quantize_row(x + row * stride, inputs, &q, row);
#pragma omp for schedule(guided)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int8(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups,
                             ep);
    }
}
