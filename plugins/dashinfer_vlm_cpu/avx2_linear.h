/* Linear layers with weights of 16 and 12 bits, see avx2.c. */
#pragma once

#include "arguments.h"
#include "avx2_tile.h"

/* Up to DIRECT_ROWS rows are multiplied while weights are unpacked in registers; more rows share a buffer of unpacked
 * weights. More than FEW_ROWS rows of activations are widened before, WIDE_ROWS at a time. */
enum { FEW_ROWS = 2, DIRECT_ROWS = 5, WIDE_ROWS = 768 };

/* What to do with the sums: activation, bias, and where to store them. */
typedef struct {
    const Matrix *m;
    void *out;      /* [rows, columns] */
    int64_t stride; /* of the rows of `out` */
    int32_t add;    /* add to `out` instead of overwriting it */
    RowBias bias;
} Epilogue;

INLINE void store_output(const Epilogue *ep, ptrdiff_t row, ptrdiff_t column, __m256 x)
{
    ptrdiff_t count = ep->m->columns - column;
    if (count <= 0) return;
    if (ep->m->fp32_output) {
        _mm256_maskstore_ps((float *)ep->out + row * ep->stride + column, first(count), x);
        return;
    }
    bf16 *out = (bf16 *)ep->out + row * ep->stride + column;
    store(out, count, ep->add ? _mm256_add_ps(x, load(out, count)) : x);
}

INLINE __m256 biased(const Epilogue *ep, ptrdiff_t row, ptrdiff_t output, __m256 x)
{
    const Matrix *m = ep->m;
    if (m->bias) x = _mm256_add_ps(x, load(m->bias + output, m->outputs - output));
    if (row < ep->bias.first) return x;
    const float *bias = ep->bias.values + (row - ep->bias.first) * m->outputs;
    return _mm256_add_ps(x, load_floats(bias + output, m->outputs - output));
}

INLINE void finish(const Epilogue *ep, ptrdiff_t row, ptrdiff_t panel, const __m256 sums[VECTORS])
{
    const Matrix *m = ep->m;
    if (m->activation == SILU_GATE) {
        UNROLL_FOR (int z = 0; z < VECTORS / 2; z++) {
            ptrdiff_t column = panel * PANEL / 2 + z * LANES;
            __m256 gate = biased(ep, row, column, sums[z]);
            __m256 up = biased(ep, row, m->columns + column, sums[z + VECTORS / 2]);
            store_output(ep, row, column, _mm256_mul_ps(swish(gate, 1.0f), up));
        }
        return;
    }
    UNROLL_FOR (int z = 0; z < VECTORS; z++) {
        ptrdiff_t column = panel * PANEL + z * LANES;
        __m256 x = biased(ep, row, column, sums[z]);
        if (m->activation == QUICK_GELU) x = swish(x, 1.702f);
        if (m->activation == GELU_TANH) x = gelu_tanh(x);
        store_output(ep, row, column, x);
    }
}

void pack_bf16(const uint32_t *weight, int64_t outputs, int64_t inputs, int32_t gated, uint32_t *packed,
               int32_t threads)
{
    ptrdiff_t panels = ceil_div(outputs, PANEL), pairs = inputs / 2;
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = 0; panel < panels; panel++)
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
                    _mm256_storeu_si256((__m256i *)(packed + (panel * pairs + p + i) * PANEL + column), rows[i]);
            }
}

/* The upper eight bits of a bf16 weight (its sign, and its exponent except for one bit) almost always have one of a few
 * values. The 16 most frequent ones of each panel get a code of 4 bits; all others, the outliers, are stored in a list.
 * The idea is that of DFloat11 (arXiv:2504.11651); codes of a fixed length are unpacked with one shuffle.
 *
 * A group is four inputs of a panel, which are 128 weights: their lower bytes, then two codes per byte. A pair of
 * inputs is in four vectors of eight columns. The bytes of the vectors z and z + 2 are packed into one, so that
 * `unpack_bytes` restores both: bytes 0 to 31 are from the vectors 0 and 2, the next 32 from 1 and 3. */
enum { GROUP = 4, GROUP_BYTES = 3 * 64, SAMPLE = 64, WEIGHTS_PER_OUTLIER = 256, CODES = 16 };

typedef struct {
    uint32_t group;
    uint8_t index; /* in the group */
    uint8_t high;
} Outlier;

typedef struct {
    uint8_t high[CODES]; /* the byte of each code */
    Outlier outliers[];  /* in order, terminated by one with an invalid group */
} Codes;

static ptrdiff_t max_outliers(ptrdiff_t inputs) { return ceil_div(inputs * PANEL, WEIGHTS_PER_OUTLIER); }

/* Size of a panel's code table in bytes. */
int64_t codes_size(int64_t inputs) { return sizeof(Codes) + (max_outliers(inputs) + 1) * sizeof(Outlier); }

INLINE const Codes *codes_of(const char *codes, ptrdiff_t panel, ptrdiff_t inputs)
{
    return (const Codes *)(codes + panel * codes_size(inputs));
}

/* Split a group into its 128 lower and 128 upper bytes. */
static void split_bytes(const __m256i w[2 * VECTORS], uint8_t lower[128], uint8_t upper[128])
{
    __m256i byte = _mm256_set1_epi16(0xff);
    for (int i = 0; i < 4; i++) {
        __m256i left = w[i / 2 * 4 + i % 2], right = w[i / 2 * 4 + i % 2 + 2];
        _mm256_storeu_si256((__m256i *)(lower + 32 * i),
                            _mm256_packus_epi16(_mm256_and_si256(left, byte), _mm256_and_si256(right, byte)));
        _mm256_storeu_si256((__m256i *)(upper + 32 * i),
                            _mm256_packus_epi16(_mm256_srli_epi16(left, 8), _mm256_srli_epi16(right, 8)));
    }
}

/* Choose the 16 most frequent upper bytes of a panel, estimated from a sample. */
static void choose_codes(const __m256i *panel, ptrdiff_t groups, uint8_t high[CODES])
{
    uint32_t counts[256] = {0};
    uint8_t lower[128], upper[128];
    for (ptrdiff_t i = 0; i < SAMPLE; i++) {
        split_bytes(panel + 2 * VECTORS * (groups * i / SAMPLE), lower, upper);
        for (int k = 0; k < 128; k++) counts[upper[k]]++;
    }
    for (int code = 0; code < CODES; code++) {
        int best = 0;
        for (int byte = 1; byte < 256; byte++) best = counts[byte] > counts[best] ? byte : best;
        high[code] = best;
        counts[best] = 0;
    }
}

INLINE __m256i at(const char *memory, int vector) { return _mm256_loadu_si256((const __m256i *)memory + vector); }

/* Encode 32 upper bytes; those without a code get the code 0. Returns which of them have none. */
static uint32_t encode(const uint8_t upper[32], const uint8_t high[CODES], uint8_t codes[32])
{
    __m256i bytes = at((const char *)upper, 0), found = _mm256_setzero_si256(), result = found;
    for (int code = CODES - 1; code >= 0; code--) { /* the smallest of equal ones is valid */
        __m256i equal = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(high[code]));
        result = _mm256_blendv_epi8(result, _mm256_set1_epi8(code), equal);
        found = _mm256_or_si256(found, equal);
    }
    _mm256_storeu_si256((__m256i *)codes, result);
    return ~(uint32_t)_mm256_movemask_epi8(found);
}

/* Encode a panel; returns 0 if there are too many outliers. */
static int code_panel(const __m256i *panel, ptrdiff_t inputs, uint8_t *packed, Codes *codes)
{
    ptrdiff_t groups = inputs / GROUP, count = 0, limit = max_outliers(inputs);
    choose_codes(panel, groups, codes->high);
    for (ptrdiff_t group = 0; group < groups; group++, panel += 2 * VECTORS, packed += GROUP_BYTES) {
        uint8_t upper[128], found[128];
        split_bytes(panel, packed, upper);
        for (int i = 0; i < 4; i++)
            for (uint32_t rest = encode(upper + 32 * i, codes->high, found + 32 * i); rest; rest &= rest - 1) {
                int index = 32 * i + __builtin_ctz(rest);
                if (count == limit) return 0;
                codes->outliers[count++] = (Outlier){group, index, upper[index]};
            }
        for (int i = 0; i < 64; i++) packed[128 + i] = found[i] | found[64 + i] << 4;
    }
    codes->outliers[count].group = UINT32_MAX;
    return 1;
}

/* Compress the panels of `pack_bf16`, aligned to 32 bytes, to 12 bits; returns 0 if there are too many outliers. */
int32_t pack_codes(const bf16 *panels, int64_t outputs, int64_t inputs, uint8_t *packed, char *codes, int32_t threads)
{
    int good = 1;
#pragma omp parallel for num_threads(threads) reduction(& : good)
    for (ptrdiff_t panel = 0; panel < ceil_div(outputs, PANEL); panel++)
        good &= code_panel((const __m256i *)(panels + panel * inputs * PANEL), inputs,
                           packed + panel * (inputs / GROUP) * GROUP_BYTES, (Codes *)codes_of(codes, panel, inputs));
    return good;
}

/* Reads a panel of 12-bit or 16-bit weights sequentially, a group at a time. */
typedef struct {
    const char *packed;
    const Outlier *outlier; /* the next one */
    __m256i high;           /* the byte of each code */
} Reader;

INLINE Reader read_panel(const Matrix *m, ptrdiff_t panel)
{
    ptrdiff_t groups = panel * (m->inputs / GROUP);
    if (!m->codes) return (Reader){.packed = (const char *)m->packed + groups * 2 * GROUP * PANEL};
    const Codes *codes = codes_of(m->codes, panel, m->inputs);
    prefetch(codes_of(m->codes, panel + 1, m->inputs));
    __m256i high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)codes->high));
    return (Reader){(const char *)m->packed + groups * GROUP_BYTES, codes->outliers, high};
}

/* Replace the upper bytes of the outliers of a group. */
static void __attribute__((noinline)) replace_outliers(Reader *r, ptrdiff_t group, __m256i upper[4])
{
    uint8_t bytes[128];
    for (int i = 0; i < 4; i++) _mm256_storeu_si256((__m256i *)bytes + i, upper[i]);
    for (; r->outlier->group == group; r->outlier++) bytes[r->outlier->index % 128] = r->outlier->high;
    for (int i = 0; i < 4; i++) upper[i] = at((const char *)bytes, i);
}

/* Read the bf16 pairs of four inputs: w[0] to w[3] are the first pair of all columns. With half 0 only those of the
 * vectors 0 and 2 are read, with half 1 those of 1 and 3; with 2 all. */
INLINE void read_group(const int coded, const int half, Reader *r, ptrdiff_t group, __m256i w[2 * VECTORS])
{
    __m256i low = _mm256_set1_epi8(15), upper[4];
    UNROLL_FOR (int i = 0; i < 2; i++) {
        if (!coded || half == 1 - i) continue;
        __m256i codes = at(r->packed, 4 + i);
        upper[i] = _mm256_shuffle_epi8(r->high, _mm256_and_si256(codes, low));
        upper[2 + i] = _mm256_shuffle_epi8(r->high, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
    }
    if (coded && __builtin_expect(r->outlier->group == group, 0)) {
        __m256i replaced[4];
        UNROLL_FOR (int i = 0; i < 4; i++) replaced[i] = upper[half == 2 ? i : i / 2 * 2 + half];
        replace_outliers(r, group, replaced);
        UNROLL_FOR (int i = 0; i < 4; i++)
            if (half == 2 || i % 2 == half) upper[i] = replaced[i];
    }
    UNROLL_FOR (int i = 0; i < 4; i++) {
        if (half == 1 - i % 2) continue;
        __m256i *to = w + i / 2 * VECTORS + i % 2, lower = at(r->packed, i);
        to[0] = coded ? _mm256_unpacklo_epi8(lower, upper[i]) : at(r->packed, i / 2 * VECTORS + i % 2);
        to[2] = coded ? _mm256_unpackhi_epi8(lower, upper[i]) : at(r->packed, i / 2 * VECTORS + i % 2 + 2);
    }
    r->packed += coded ? GROUP_BYTES : sizeof(__m256i) * 2 * VECTORS;
}

INLINE void prefetch_group(const int coded, const char *packed)
{
    UNROLL_FOR (int line = 0; line < 4; line++)
        if (line < 3 || !coded) prefetch(packed + 64 * line);
}

/* acc[m] = row m times a panel, unpacked in registers. */
INLINE void tile_unpacked(const int rows, const int coded, const bf16 *x, ptrdiff_t stride, ptrdiff_t inputs, Reader r,
                          __m256 acc[FEW_ROWS][VECTORS])
{
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < VECTORS; z++) acc[m][z] = _mm256_setzero_ps();
    for (ptrdiff_t group = 0; group < inputs / GROUP; group++, x += GROUP) {
        __m256i w[2 * VECTORS];
        prefetch_group(coded, r.packed + PREFETCH_BYTES);
        read_group(coded, 2, &r, group, w);
        UNROLL_FOR (int i = 0; i < 2 * VECTORS; i++)
            UNROLL_FOR (int m = 0; m < rows; m++) {
                __m256i pair = broadcast_dword(x + m * stride + i / VECTORS * 2);
                __m256 *sum = &acc[m][i % VECTORS];
                *sum = _mm256_fmadd_ps(even(pair), even(w[i]), *sum);
                *sum = _mm256_fmadd_ps(odd(pair), odd(w[i]), *sum);
            }
    }
}

INLINE void linear_few_rows(const int rows, const bf16 *x, ptrdiff_t stride, ptrdiff_t panel, const Epilogue *ep)
{
    __m256 acc[FEW_ROWS][VECTORS];
    const Matrix *m = ep->m;
    if (m->codes) tile_unpacked(rows, 1, x, stride, m->inputs, read_panel(m, panel), acc);
    else tile_unpacked(rows, 0, x, stride, m->inputs, read_panel(m, panel), acc);
    UNROLL_FOR (int i = 0; i < rows; i++) finish(ep, i, panel, acc[i]);
}

/* Multiply one row by one panel, for `update_argmax`. */
static void multiply_row(const Matrix *m, const bf16 *x, ptrdiff_t panel, float sums[PANEL])
{
    __m256 acc[FEW_ROWS][VECTORS];
    if (m->codes) tile_unpacked(1, 1, x, 0, m->inputs, read_panel(m, panel), acc);
    else tile_unpacked(1, 0, x, 0, m->inputs, read_panel(m, panel), acc);
    for (int z = 0; z < VECTORS; z++) _mm256_storeu_ps(sums + z * LANES, acc[0][z]);
}

/* Rows of activations as floats: [blocks of inputs][rows][BLOCK]. */
typedef struct {
    float *values;
    ptrdiff_t rows;
} Wide;

INLINE const float *wide_block(const Wide *x, ptrdiff_t block, ptrdiff_t row)
{
    return x->values + (block * x->rows + row) * BLOCK;
}

static size_t wide_bytes(ptrdiff_t rows, ptrdiff_t inputs) { return sizeof(float) * rows * round_up(inputs, BLOCK); }

static void widen_row(const bf16 *from, ptrdiff_t inputs, const Wide *x, ptrdiff_t row)
{
    for (ptrdiff_t k = 0; k < inputs; k += LANES)
        _mm256_storeu_ps(x->values + (k / BLOCK * x->rows + row) * BLOCK + k % BLOCK, load(from + k, inputs - k));
}

/* Unpack the next `count` inputs of a panel to floats [count, PANEL]. */
INLINE void unpack(const int coded, Reader *r, ptrdiff_t start, ptrdiff_t count, float *out)
{
    for (ptrdiff_t k = 0; k < count; k += GROUP, out += GROUP * PANEL) {
        __m256i w[2 * VECTORS];
        read_group(coded, 2, r, (start + k) / GROUP, w);
        UNROLL_FOR (int i = 0; i < 2 * VECTORS; i++) {
            float *to = out + i / VECTORS * 2 * PANEL + i % VECTORS * LANES;
            _mm256_store_ps(to, even(w[i]));
            _mm256_store_ps(to + PANEL, odd(w[i]));
        }
    }
}

/* sums[m] (+)= row m of `a` times `count` inputs of half of a panel, the vectors `half` and `half` + 2, unpacked in
 * registers. */
INLINE void tile_half(const int rows, const int coded, const int half, const float *a, Reader *reader, ptrdiff_t start,
                      ptrdiff_t count, float *sums)
{
    __m256 acc[DIRECT_ROWS][2];
    Reader r = *reader;
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++)
            acc[m][z] = start ? _mm256_load_ps(sums + m * PANEL + (half + 2 * z) * LANES) : _mm256_setzero_ps();
    for (ptrdiff_t k = 0; k < count; k += GROUP) {
        __m256i w[2 * VECTORS];
        if (!half) prefetch_group(coded, r.packed + PREFETCH_BYTES);
        read_group(coded, half, &r, (start + k) / GROUP, w);
        UNROLL_FOR (int i = 0; i < GROUP; i++, a++) {
            __m256i left = w[i / 2 * VECTORS + half], right = w[i / 2 * VECTORS + half + 2];
            __m256 columns[2] = {i % 2 ? odd(left) : even(left), i % 2 ? odd(right) : even(right)};
            UNROLL_FOR (int m = 0; m < rows; m++) {
                __m256 x = _mm256_broadcast_ss(a + m * BLOCK);
                UNROLL_FOR (int z = 0; z < 2; z++) acc[m][z] = _mm256_fmadd_ps(x, columns[z], acc[m][z]);
                IN_REGISTERS(acc[m][0], acc[m][1]);
            }
        }
    }
    *reader = r;
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int z = 0; z < 2; z++) _mm256_store_ps(sums + m * PANEL + (half + 2 * z) * LANES, acc[m][z]);
}

/* Multiply up to DIRECT_ROWS rows by the next `count` inputs of a panel. */
INLINE void multiply_direct(const int coded, const float *a, ptrdiff_t row_count, Reader *r, ptrdiff_t start,
                            ptrdiff_t count, float *sums)
{
    Reader left = *r;
    switch (8 * 2 + row_count) {
        CASES_TO_5(2, tile_half(rows, coded, 0, a, &left, start, count, sums);
                   tile_half(rows, coded, 1, a, r, start, count, sums))
    }
}

/* Multiply the rows [start, stop) by a panel, one block of inputs after the other. `first_row` is the row of the result
 * for the first row of `x`. */
static void linear_rows(const Wide *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep,
                        ptrdiff_t first_row)
{
    _Alignas(64) float weights[BLOCK * PANEL], sums[ROW_GROUP * PANEL];
    const Matrix *m = ep->m;
    Reader r = read_panel(m, panel);
    for (ptrdiff_t k = 0; k < m->inputs; k += BLOCK) {
        const float *a = wide_block(x, k / BLOCK, start);
        ptrdiff_t count = least(BLOCK, m->inputs - k);
        if (stop - start <= DIRECT_ROWS) {
            if (m->codes) multiply_direct(1, a, stop - start, &r, k, count, sums);
            else multiply_direct(0, a, stop - start, &r, k, count, sums);
            continue;
        }
        if (m->codes) unpack(1, &r, k, count, weights);
        else unpack(0, &r, k, count, weights);
        Product p = {a, BLOCK, weights, PANEL, count, sums, PANEL, k == 0, r.packed, 64};
        add_product(stop - start, VECTORS, &p);
    }
    for (ptrdiff_t row = start; row < stop; row++) {
        const float *from = sums + (row - start) * PANEL;
        __m256 found[VECTORS];
        UNROLL_FOR (int z = 0; z < VECTORS; z++) found[z] = _mm256_load_ps(from + z * LANES);
        finish(ep, first_row + row, panel, found);
    }
}

static int64_t linear_bf16_workspace_size(int64_t rows, int64_t inputs)
{
    return rows > FEW_ROWS ? wide_bytes(least(rows, WIDE_ROWS), inputs) : 0;
}

static void linear_bf16(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t panels = ceil_div(ep->m->outputs, PANEL), inputs = ep->m->inputs;
    if (rows <= FEW_ROWS) {
#pragma omp parallel for schedule(guided, 2) num_threads(threads)
        for (ptrdiff_t panel = 0; panel < panels; panel++)
            if (rows == 1) linear_few_rows(1, x, stride, panel, ep);
            else linear_few_rows(2, x, stride, panel, ep);
        return;
    }
#pragma omp parallel num_threads(threads)
    for (ptrdiff_t first = 0; first < rows; first += WIDE_ROWS) {
        Wide wide = {(float *)workspace, least(WIDE_ROWS, rows - first)};
        ptrdiff_t groups = ceil_div(wide.rows, ROW_GROUP);
#pragma omp for
        for (ptrdiff_t row = 0; row < wide.rows; row++) widen_row(x + (first + row) * stride, inputs, &wide, row);
#pragma omp for schedule(guided, groups > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * groups; task++) {
            ptrdiff_t panel = task / groups, group = task % groups;
            linear_rows(&wide, panel, wide.rows * group / groups, wide.rows * (group + 1) / groups, ep, first);
        }
    }
}
