/* Kernels of the vision encoder and the decoder, for CPUs with AVX-512 BF16 and VNNI.
 *
 * Weight matrices are packed into panels of 32 output columns, with pairs (bf16) or quads (int8) of inputs interleaved,
 * so that one instruction multiplies 16 columns; activations are not repacked. Sums run over the inputs in one fixed
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

enum { PANEL = 32, LANES = 16, TILE_ROWS = 12, TILE_ROWS_INT8 = 8, ROW_GROUP = 192, QUANT_BLOCK = 128, KEY_CHUNK = 512 };
/* Prefetch distances, as measured: of weights in bytes, with a shorter distance for weights of 8 and 16 bits if there are
 * few rows; of keys and values in rows. */
enum { PREFETCH_BYTES = 8192, PREFETCH_BYTES_FEW_ROWS = 1024, FEW_ROWS = 2, PREFETCH_KEYS = 64 };
enum { NONE = 0, QUICK_GELU = 1, SILU_GATE = 2, GELU_TANH = 4 }; /* native_linear.py applies GELU */

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 12")

/* Numbers ---------------------------------------------------------------------------------------------------------- */

INLINE __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

INLINE __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE __mmask16 first(ptrdiff_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

INLINE __mmask32 first_of_32(ptrdiff_t count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

INLINE ptrdiff_t round_up(ptrdiff_t x, ptrdiff_t to) { return (x + to - 1) / to * to; }

INLINE __m512 load(const bf16 *x, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, x)); }

INLINE void store(bf16 *out, __mmask16 lanes, __m512 x) { _mm256_mask_storeu_epi16(out, lanes, narrow(x)); }

INLINE __m512bh pair(const bf16 *x)
{
    int32_t both;
    memcpy(&both, x, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/* 2^x with a polynomial on [-1/2, 1/2], whose coefficients begin with that of the highest power; 0 below -126. */
INLINE __m512 exp2_by(const float *coefficients, const int degree, __m512 x)
{
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(coefficients[0]);
    UNROLL for (int i = 1; i <= degree; i++) y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(coefficients[i]));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, whole);
}

/* 2^x with an error of 2e-7. */
INLINE __m512 exp2_(__m512 x)
{
    static const float coefficients[] = {1.535336188e-4f, 1.339887440e-3f, 9.618437357e-3f, 5.550332548e-2f,
                                         2.402264791e-1f, 6.931472028e-1f, 1.0f};
    return exp2_by(coefficients, 6, x);
}

/* x * sigmoid(slope * x) */
INLINE __m512 swish(__m512 x, float slope)
{
    __m512 e = exp2_(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f * slope)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), as x * sigmoid of twice the argument of tanh */
INLINE __m512 gelu_tanh(__m512 x)
{
    __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    __m512 e = exp2_(_mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(-1.44269504f * 1.59576912f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* Transpose 16 rows of 16 dwords. */
INLINE void transpose(__m512i r[LANES])
{
    __m512i t[LANES];
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

/* bf16 products ---------------------------------------------------------------------------------------------------- */

/* Prefetch cache lines into L2 during the multiplications. Only a few at a time, between multiplications: many at once
 * would delay the lines that are needed first. */
INLINE void prefetch(const void *memory, const int lines)
{
    UNROLL for (int line = 0; line < lines; line++) _mm_prefetch((const char *)memory + 64 * line, _MM_HINT_T1);
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
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t p = 0; p < pairs; p++, panel += 2 * width) {
        if (next) prefetch(next + 128 * p, 2);
        __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
        __m512bh right = vectors > 1 ? (__m512bh)_mm512_loadu_si512(panel + 2 * LANES) : left;
        UNROLL for (int m = 0; m < rows; m++) {
            __m512bh x = pair(a + m * lda + 2 * p);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], x, left);
            if (vectors > 1) acc[m][1] = _mm512_dpbf16_ps(acc[m][1], x, right);
        }
    }
}

/* Expand BODY with the constant `rows`, so that registers are allocated for each number of rows. */
#define CASE(count, BODY) case count: { enum { rows = count }; BODY; } break;
#define CASES_TO_12(BODY) \
    CASE(1, BODY) CASE(2, BODY) CASE(3, BODY) CASE(4, BODY) CASE(5, BODY) CASE(6, BODY) \
    CASE(7, BODY) CASE(8, BODY) CASE(9, BODY) CASE(10, BODY) CASE(11, BODY) CASE(12, BODY)
#define WITH_ROWS(count, BODY) switch (count) { CASES_TO_12(BODY) }

#include "arguments.h"

/* What to do with the sums: activation, bias, and where to store them. */
typedef struct {
    const Matrix *m;
    void *out;      /* [rows, columns] */
    int64_t stride; /* of the rows of `out` */
    int32_t add;    /* add to `out` instead of overwriting it */
    RowBias bias;
} Epilogue;

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

/* The row of the weights in column `j` of a panel; gate and up projection share a panel. */
INLINE ptrdiff_t source_row(ptrdiff_t panel, int j, ptrdiff_t outputs, int gated)
{
    if (!gated) return panel * PANEL + j;
    return j < LANES ? panel * LANES + j : outputs / 2 + panel * LANES + j - LANES;
}

void pack_bf16(const uint32_t *weight, int64_t outputs, int64_t inputs, int32_t gated, uint32_t *packed, int32_t threads)
{
    ptrdiff_t panels = (outputs + PANEL - 1) / PANEL, pairs = inputs / 2;
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = 0; panel < panels; panel++)
        for (ptrdiff_t p = 0; p < pairs; p += LANES)
            for (int half = 0; half < PANEL; half += LANES) {
                __m512i rows[LANES];
                for (int j = 0; j < LANES; j++) {
                    ptrdiff_t row = source_row(panel, half + j, outputs, gated);
                    rows[j] = _mm512_maskz_loadu_epi32(row < outputs ? first(pairs - p) : 0, weight + row * pairs + p);
                }
                transpose(rows);
                for (int i = 0; i < LANES && p + i < pairs; i++)
                    _mm512_storeu_si512(packed + (panel * pairs + p + i) * PANEL + half, rows[i]);
            }
}

/* Lossless 12-bit weights -------------------------------------------------------------------------------------------- */

/* The upper eight bits of a bf16 weight (its sign, and its exponent except for one bit) almost always have one of a few
 * values. The 16 most frequent ones of each panel get a code of 4 bits; all others, the outliers, are stored in a list. The
 * idea is that of DFloat11 (arXiv:2504.11651); codes of a fixed length are unpacked with one shuffle.
 *
 * A group is four inputs of a panel, which are 128 weights: their lower bytes, then two codes per byte. */
enum { GROUP = 4, GROUP_BYTES = 3 * 64, SAMPLE = 64, WEIGHTS_PER_OUTLIER = 256 };

typedef struct {
    uint32_t group;
    uint8_t index; /* in the group */
    uint8_t high;
} Outlier;

typedef struct {
    uint8_t high[LANES]; /* the byte of each code */
    Outlier outliers[];  /* in order, terminated by one with an invalid group */
} Codes;

static ptrdiff_t max_outliers(ptrdiff_t inputs) { return (inputs * PANEL + WEIGHTS_PER_OUTLIER - 1) / WEIGHTS_PER_OUTLIER; }

/* Size of a panel's code table in bytes. */
int64_t codes_size(int64_t inputs) { return sizeof(Codes) + (max_outliers(inputs) + 1) * sizeof(Outlier); }

INLINE const Codes *codes_of(const char *codes, ptrdiff_t panel, ptrdiff_t inputs)
{
    return (const Codes *)(codes + panel * codes_size(inputs));
}

/* Lower and upper bytes of 64 weights, in the order that `both_bytes` expects. */
INLINE __m512i lower_bytes(const __m512i w[2])
{
    __m512i byte = _mm512_set1_epi16(0xff);
    return _mm512_packus_epi16(_mm512_and_si512(w[0], byte), _mm512_and_si512(w[1], byte));
}

INLINE __m512i upper_bytes(const __m512i w[2])
{
    return _mm512_packus_epi16(_mm512_srli_epi16(w[0], 8), _mm512_srli_epi16(w[1], 8));
}

INLINE void both_bytes(__m512i lower, __m512i upper, __m512bh w[2])
{
    w[0] = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
    w[1] = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
}

/* Choose the 16 most frequent upper bytes of a panel, estimated from a sample. */
static void choose_codes(const __m512i *panel, ptrdiff_t groups, uint8_t high[LANES])
{
    uint32_t counts[256] = {0};
    uint8_t bytes[64];
    for (ptrdiff_t i = 0; i < SAMPLE; i++) {
        const __m512i *group = panel + 4 * (groups * i / SAMPLE);
        for (int half = 0; half < 4; half += 2) {
            _mm512_storeu_si512(bytes, upper_bytes(group + half));
            for (int k = 0; k < 64; k++) counts[bytes[k]]++;
        }
    }
    for (int code = 0; code < LANES; code++) {
        int best = 0;
        for (int byte = 1; byte < 256; byte++) best = counts[byte] > counts[best] ? byte : best;
        high[code] = best;
        counts[best] = 0;
    }
}

/* Encode 64 upper bytes; also returns which of them have no code. */
static __m512i coded(__m512i upper, const uint8_t high[LANES], __mmask64 *outliers)
{
    __m512i codes = _mm512_setzero_si512();
    *outliers = ~(__mmask64)0;
    for (int code = 0; code < LANES; code++) {
        __mmask64 equal = _mm512_cmpeq_epi8_mask(upper, _mm512_set1_epi8(high[code])) & *outliers;
        codes = _mm512_mask_mov_epi8(codes, equal, _mm512_set1_epi8(code));
        *outliers &= ~equal;
    }
    return codes;
}

/* Encode a panel; returns 0 if there are too many outliers. */
static int code_panel(const __m512i *panel, ptrdiff_t inputs, uint8_t *packed, Codes *codes)
{
    ptrdiff_t groups = inputs / GROUP, count = 0, limit = max_outliers(inputs);
    choose_codes(panel, groups, codes->high);
    for (ptrdiff_t group = 0; group < groups; group++, panel += 4, packed += GROUP_BYTES) {
        __m512i pieces[2];
        for (int half = 0; half < 2; half++) {
            __mmask64 outliers;
            __m512i upper = upper_bytes(panel + 2 * half);
            uint8_t bytes[64];
            _mm512_storeu_si512(bytes, upper);
            _mm512_storeu_si512(packed + 64 * half, lower_bytes(panel + 2 * half));
            pieces[half] = coded(upper, codes->high, &outliers);
            for (; outliers; outliers &= outliers - 1) {
                int index = __builtin_ctzll(outliers);
                if (count == limit) return 0;
                codes->outliers[count++] = (Outlier){group, 64 * half + index, bytes[index]};
            }
        }
        _mm512_storeu_si512(packed + 128, _mm512_or_si512(pieces[0], _mm512_slli_epi16(pieces[1], 4)));
    }
    codes->outliers[count].group = UINT32_MAX;
    return 1;
}

/* Compress the panels of `pack_bf16`, aligned to 64 bytes, to 12 bits; returns 0 if there are too many outliers. */
int32_t pack_codes(const bf16 *panels, int64_t outputs, int64_t inputs, uint8_t *packed, char *codes, int32_t threads)
{
    int good = 1;
#pragma omp parallel for num_threads(threads) reduction(& : good)
    for (ptrdiff_t panel = 0; panel < (outputs + PANEL - 1) / PANEL; panel++)
        good &= code_panel((const __m512i *)(panels + panel * inputs * PANEL), inputs,
                           packed + panel * (inputs / GROUP) * GROUP_BYTES, (Codes *)codes_of(codes, panel, inputs));
    return good;
}

/* Reads a panel's groups sequentially. */
typedef struct {
    const uint8_t *packed;
    const Outlier *outlier; /* the next one */
    __m512i high;           /* the byte of each code */
} Reader;

INLINE Reader read_panel(const Matrix *m, ptrdiff_t panel)
{
    const Codes *codes = codes_of(m->codes, panel, m->inputs);
    prefetch(codes_of(m->codes, panel + 1, m->inputs), 2);
    __m512i high = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes->high));
    return (Reader){(const uint8_t *)m->packed + panel * (m->inputs / GROUP) * GROUP_BYTES, codes->outliers, high};
}

INLINE void read_group(Reader *r, ptrdiff_t group, __m512bh w[4])
{
    __m512i low = _mm512_set1_epi8(15), codes = _mm512_loadu_si512(r->packed + 128), upper[2];
    upper[0] = _mm512_shuffle_epi8(r->high, _mm512_and_si512(codes, low));
    upper[1] = _mm512_shuffle_epi8(r->high, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
    for (; __builtin_expect(r->outlier->group == group, 0); r->outlier++) {
        __mmask64 bit = (__mmask64)1 << r->outlier->index % 64, front = r->outlier->index < 64 ? bit : 0;
        __m512i high = _mm512_set1_epi8(r->outlier->high);
        upper[0] = _mm512_mask_mov_epi8(upper[0], front, high);
        upper[1] = _mm512_mask_mov_epi8(upper[1], bit & ~front, high);
    }
    both_bytes(_mm512_loadu_si512(r->packed), upper[0], w);
    both_bytes(_mm512_loadu_si512(r->packed + 64), upper[1], w + 2);
    r->packed += GROUP_BYTES;
}

/* Like `tile`, bit-exactly; unless `plain` is null, the unpacked panel is written to it in the layout of `tile`. */
INLINE void tile_coded(const int rows, const bf16 *a, ptrdiff_t lda, Reader r, ptrdiff_t inputs, bf16 *plain,
                       __m512 acc[TILE_ROWS][2])
{
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t group = 0; group < inputs / GROUP; group++, a += GROUP) {
        __m512bh w[4];
        prefetch(r.packed + PREFETCH_BYTES, 3);
        read_group(&r, group, w);
        if (plain) UNROLL for (int i = 0; i < 4; i++) _mm512_storeu_si512(plain + (4 * group + i) * PANEL, (__m512i)w[i]);
        UNROLL for (int m = 0; m < rows; m++) {
            __m512bh x = pair(a + m * lda), y = pair(a + m * lda + 2);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], x, w[0]);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], x, w[1]);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], y, w[2]);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], y, w[3]);
        }
    }
}

#ifdef TILES
#include "tiles.h"
#include "tiles_linear.h"
#else
/* bf16 linear layers ----------------------------------------------------------------------------------------------- */

/* Up to this many tiles unpack a panel separately; with more, the first one stores the unpacked panel for the others. */
enum { CODED_TILES = 6 };

/* `plain` is a buffer for one panel if there are rows for more than `CODED_TILES`. */
static void linear_rows(const bf16 *x, ptrdiff_t stride, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop,
                        const Epilogue *ep, bf16 *plain)
{
    const Matrix *m = ep->m;
    const bf16 *weights = m->codes ? plain : (const bf16 *)m->packed + panel * m->inputs * PANEL;
    ptrdiff_t blocks = (stop - start + TILE_ROWS - 1) / TILE_ROWS;
    int write = blocks > CODED_TILES;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = start + (stop - start) * block / blocks, next = start + (stop - start) * (block + 1) / blocks;
        const bf16 *a = x + row * stride;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            if (!m->codes)
                tile(rows, 2, prefetch_address(weights, rows), a, stride, weights, PANEL, m->inputs / 2, acc);
            else if (block && write)
                tile(rows, 2, NULL, a, stride, weights, PANEL, m->inputs / 2, acc);
            else
                tile_coded(rows, a, stride, read_panel(m, panel), m->inputs, write ? plain : NULL, acc);
            UNROLL for (int i = 0; i < rows; i++) finish(ep, row + i, panel, acc[i][0], acc[i][1]);
        })
    }
}

/* Multiply one row by one panel, for `update_argmax`. */
static void multiply_row(const Matrix *m, const bf16 *x, ptrdiff_t panel, __m512 sums[2])
{
    __m512 acc[TILE_ROWS][2];
    if (m->codes) tile_coded(1, x, 0, read_panel(m, panel), m->inputs, NULL, acc);
    else tile(1, 2, NULL, x, 0, (const bf16 *)m->packed + panel * m->inputs * PANEL, PANEL, m->inputs / 2, acc);
    sums[0] = acc[0][0];
    sums[1] = acc[0][1];
}

/* One unpacked panel per thread. */
static int64_t linear_bf16_workspace_size(int64_t rows, int64_t inputs, int32_t threads)
{
    return rows > CODED_TILES * TILE_ROWS ? threads * inputs * PANEL * (int64_t)sizeof(bf16) : 0;
}

static void linear_bf16(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace, int threads)
{
    ptrdiff_t panels = (ep->m->outputs + PANEL - 1) / PANEL, groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
#pragma omp parallel for schedule(guided, groups > 1 ? 1 : 2) num_threads(threads)
    for (ptrdiff_t task = 0; task < panels * groups; task++) {
        ptrdiff_t panel = task / groups, group = task % groups;
        linear_rows(x, stride, panel, rows * group / groups, rows * (group + 1) / groups, ep,
                    (bf16 *)workspace + omp_get_thread_num() * ep->m->inputs * PANEL);
    }
}

#endif

/* int8 products ---------------------------------------------------------------------------------------------------- */

/* The largest magnitude, NaN if any value is NaN: without the sign, floats are ordered like integers, with NaN last. */
static float max_abs(const bf16 *x, ptrdiff_t count)
{
    __m512i largest = _mm512_setzero_si512();
    for (ptrdiff_t k = 0; k < count; k += LANES)
        largest = _mm512_max_epu32(largest, _mm512_castps_si512(_mm512_abs_ps(load(x + k, first(count - k)))));
    uint32_t bits = _mm512_reduce_max_epu32(largest);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Quantize weights to unsigned bytes with an offset of 128: row r is (byte - 128) * scales[r]. Scales are stored in the
 * order of the packed rows. */
void pack_int8(const bf16 *weight, int64_t outputs, int64_t inputs, int32_t gated, uint8_t *packed, float *scales,
               int32_t threads)
{
    ptrdiff_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = 0; panel < panels; panel++) {
        uint8_t *to = packed + panel * inputs * PANEL;
        for (int j = 0; j < PANEL; j++) {
            ptrdiff_t row = source_row(panel, j, outputs, gated);
            const bf16 *from = weight + row * inputs;
            float scale = row < outputs ? max_abs(from, inputs) / 127.0f : 0.0f, inverse = scale > 0 ? 1.0f / scale : 0.0f;
            scales[panel * PANEL + j] = scale;
            for (ptrdiff_t k = 0; k < inputs; k++) {
                uint32_t bits = row < outputs ? (uint32_t)from[k] << 16 : 0;
                float value;
                memcpy(&value, &bits, sizeof value);
                to[(k / 4 * PANEL + j) * 4 + k % 4] = (uint8_t)(128 + (int)__builtin_rintf(value * inverse));
            }
        }
    }
}

/* Quantize the activations of one row to bytes, stored 64 at a time, `step` bytes apart. Each block of inputs has a scale
 * and -128 times the sum of its bytes, which compensates for the offset of the weights. Blocks are used because these
 * models have outlier activations: a few inputs are hundreds of times larger than the others. */
static void quantize_row(const bf16 *x, ptrdiff_t inputs, int8_t *bytes, ptrdiff_t step, float *scales, int32_t *offsets)
{
    for (ptrdiff_t k = 0, block = 0; k < inputs; k += QUANT_BLOCK, block++) {
        ptrdiff_t count = inputs - k < QUANT_BLOCK ? inputs - k : QUANT_BLOCK;
        float scale = max_abs(x + k, count) / 127.0f;
        __m512 inverse = _mm512_set1_ps(scale > 0 ? 1.0f / scale : 0.0f);
        __m512i sum = _mm512_setzero_si512();
        for (ptrdiff_t i = 0; i < count; i += LANES) {
            __mmask16 lanes = first(count - i);
            __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + k + i, lanes), inverse));
            sum = _mm512_add_epi32(sum, whole);
            _mm_mask_storeu_epi8(bytes + (k + i) / 64 * step + (k + i) % 64, lanes, _mm512_cvtsepi32_epi8(whole));
        }
        scales[block] = scale;
        offsets[block] = -128 * _mm512_reduce_add_epi32(sum);
    }
}

typedef struct {
    int8_t *bytes;    /* [rows, inputs] */
    float *scales;    /* [rows, blocks] */
    int32_t *offsets; /* [rows, blocks] */
} Quantized;

/* Up to twelve rows use one tile, which reads a panel once; with more rows, tiles of eight are faster. */
INLINE ptrdiff_t int8_tiles(ptrdiff_t rows) { return rows <= TILE_ROWS ? 1 : (rows + TILE_ROWS_INT8 - 1) / TILE_ROWS_INT8; }

INLINE void tile_int8(const int rows, const Quantized *x, ptrdiff_t row, ptrdiff_t inputs, const uint8_t *panel,
                      __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    const int8_t *bytes = x->bytes + row * inputs;
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t block = 0; block < blocks; block++) {
        __m512i sums[TILE_ROWS][2];
        UNROLL for (int m = 0; m < rows; m++)
            sums[m][0] = sums[m][1] = _mm512_set1_epi32(x->offsets[(row + m) * blocks + block]);
        ptrdiff_t stop = (block + 1) * QUANT_BLOCK < inputs ? (block + 1) * QUANT_BLOCK : inputs;
        for (ptrdiff_t k = block * QUANT_BLOCK; k < stop; k += 4, panel += 4 * PANEL) {
            __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 4 * LANES);
            prefetch(prefetch_address(panel, rows), 2);
            UNROLL for (int m = 0; m < rows; m++) {
                int32_t quad;
                memcpy(&quad, bytes + m * inputs + k, sizeof quad);
                sums[m][0] = _mm512_dpbusd_epi32(sums[m][0], left, _mm512_set1_epi32(quad));
                sums[m][1] = _mm512_dpbusd_epi32(sums[m][1], right, _mm512_set1_epi32(quad));
            }
        }
        UNROLL for (int m = 0; m < rows; m++) {
            __m512 scale = _mm512_set1_ps(x->scales[(row + m) * blocks + block]);
            acc[m][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][0]), scale, acc[m][0]);
            acc[m][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m][1]), scale, acc[m][1]);
        }
    }
}

static void linear_rows_int8(const Quantized *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    const float *scales = ep->m->scales + panel * PANEL;
    __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + LANES);
    ptrdiff_t inputs = ep->m->inputs;
    const uint8_t *weights = (const uint8_t *)ep->m->packed + panel * inputs * PANEL;
    ptrdiff_t blocks = int8_tiles(stop - start);
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = start + (stop - start) * block / blocks, next = start + (stop - start) * (block + 1) / blocks;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            tile_int8(rows, x, row, inputs, weights, acc);
            UNROLL for (int m = 0; m < rows; m++)
                finish(ep, row + m, panel, _mm512_mul_ps(acc[m][0], left), _mm512_mul_ps(acc[m][1], right));
        })
    }
}

static int64_t quantized_bytes(int64_t rows, int64_t inputs)
{
    return rows * (inputs + 8 * ((inputs + QUANT_BLOCK - 1) / QUANT_BLOCK));
}

/* Use `quantized_bytes()` of memory. */
static Quantized quantized_at(char *memory, ptrdiff_t rows, ptrdiff_t inputs)
{
    ptrdiff_t count = rows * ((inputs + QUANT_BLOCK - 1) / QUANT_BLOCK);
    float *scales = (float *)memory;
    int32_t *offsets = (int32_t *)(scales + count);
    return (Quantized){(int8_t *)(offsets + count), scales, offsets};
}

static void linear_int8(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace, int threads)
{
    ptrdiff_t panels = (ep->m->outputs + PANEL - 1) / PANEL, groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
    ptrdiff_t inputs = ep->m->inputs, blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    Quantized q = quantized_at(workspace, rows, inputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++)
            quantize_row(x + row * stride, inputs, q.bytes + row * inputs, 64, q.scales + row * blocks,
                         q.offsets + row * blocks);
#pragma omp for schedule(guided, groups > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int8(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups, ep);
    }
}

/* int4 products ---------------------------------------------------------------------------------------------------- */

#include "int4.h"
#include "int8.h"

/* Sum the bytes of each group of one row, negated, which compensates for the zero points of the weights. */
static void sum_groups(const int8_t *bytes, ptrdiff_t count, ptrdiff_t group, int32_t *offsets)
{
    for (ptrdiff_t k = 0; k < count; k += group) {
        int32_t sum = 0;
        for (ptrdiff_t i = 0; i < group; i++) sum += bytes[k + i];
        *offsets++ = -sum;
    }
}

/* Quantize one row, as with `quantize_row`, in the order of the weights. `bytes` is zero after the last input. */
static void quantize_row_int4(const Matrix *m, const bf16 *x, int8_t *bytes, ptrdiff_t step, float *scales, int32_t *offsets)
{
    bf16 ordered[m->inputs];
    for (ptrdiff_t k = 0; k < m->inputs && m->order; k++) ordered[k] = x[m->order[k]];
    quantize_row(m->order ? ordered : x, m->inputs, bytes, step, scales, offsets);
}

/* The zero points of 16 columns of a group, as operands of `_mm512_dpwssd_epi32`. */
INLINE __m512i zeros_of(const uint8_t *zeros) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)zeros)); }

INLINE __m512 scales_of(const char *scales) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales)); }

/* With this number of rows, all sums stay in registers. */
#ifndef TILE_ROWS_INT4
#define TILE_ROWS_INT4 4
#endif
#define CASES_TO_4(BODY) CASE(1, BODY) CASE(2, BODY) CASE(3, BODY) CASE(4, BODY)
#if TILE_ROWS_INT4 > 4
#define WITH_FEW_ROWS(count, BODY) switch (count) { CASES_TO_4(BODY) CASE(5, BODY) CASE(6, BODY) CASE(7, BODY) CASE(8, BODY) }
#else
#define WITH_FEW_ROWS(count, BODY) switch (count) { CASES_TO_4(BODY) }
#endif

/* The sums for columns 16 to 31 of a panel are computed from whole bytes, which are 16 times their codes plus the codes of
 * columns 0 to 15: that is cheaper than shifting the codes, and as exact, since all sums are integers. */
INLINE void tile_int4(const int rows, const Quantized *q, ptrdiff_t row, const Matrix *m, ptrdiff_t panel,
                      __m512 acc[TILE_ROWS_INT4][2])
{
    ptrdiff_t group = m->group, blocks = int4_blocks(m->inputs), groups = QUANT_BLOCK / group, size = int4_block_size(group);
    const char *block = (const char *)m->packed + panel * blocks * size;
    const int8_t *bytes = q->bytes + row * blocks * QUANT_BLOCK;
    __m512i low = _mm512_set1_epi8(15);
    UNROLL for (int i = 0; i < rows; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (ptrdiff_t b = 0; b < blocks; b++, block += size) {
        const char *codes = block + int4_codes_offset(group);
        const uint8_t *zeros = (const uint8_t *)block + int4_zeros_offset(group);
        __m512 parts[TILE_ROWS_INT4][2];
        UNROLL for (int i = 0; i < rows; i++) parts[i][0] = parts[i][1] = _mm512_setzero_ps();
        for (ptrdiff_t offset = 0; offset < size - CODES_BYTES; offset += 64)
            prefetch(prefetch_address(block + offset, rows), 1);
        for (ptrdiff_t g = 0; g < groups; g++, zeros += PANEL) {
            __m512i left_zeros = zeros_of(zeros), sums[TILE_ROWS_INT4][2];
            __m512i both_zeros = _mm512_add_epi32(_mm512_slli_epi32(zeros_of(zeros + LANES), 4), left_zeros);
            UNROLL for (int i = 0; i < rows; i++) {
                __m512i offset = _mm512_set1_epi32(q->offsets[((row + i) * blocks + b) * groups + g]);
                sums[i][0] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), left_zeros, offset);
                sums[i][1] = _mm512_dpwssd_epi32(_mm512_setzero_si512(), both_zeros, offset);
            }
            for (ptrdiff_t k = g * group; k < (g + 1) * group; k += 4, codes += QUAD_BYTES) {
                __m512i both = _mm512_loadu_si512(codes), left = _mm512_and_si512(both, low);
                prefetch(prefetch_address(codes, rows), 1);
                UNROLL for (int i = 0; i < rows; i++) {
                    int32_t quad;
                    memcpy(&quad, bytes + (i * blocks + b) * QUANT_BLOCK + k, sizeof quad);
                    sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], left, _mm512_set1_epi32(quad));
                    sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], both, _mm512_set1_epi32(quad));
                }
            }
            __m512 left = scales_of(block + g * PANEL * 2), right = scales_of(block + (g * PANEL + LANES) * 2);
            right = _mm512_mul_ps(right, _mm512_set1_ps(0x1p-4f));
            UNROLL for (int i = 0; i < rows; i++) {
                __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i][1], sums[i][0]));
                parts[i][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][0]), left, parts[i][0]);
                parts[i][1] = _mm512_fmadd_ps(upper, right, parts[i][1]);
            }
        }
        UNROLL for (int i = 0; i < rows; i++) {
            __m512 scale = _mm512_set1_ps(q->scales[(row + i) * blocks + b]);
            acc[i][0] = _mm512_fmadd_ps(parts[i][0], scale, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(parts[i][1], scale, acc[i][1]);
        }
    }
}

static void linear_rows_int4(const Quantized *x, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    const float *scales = ep->m->scales + panel * PANEL;
    __m512 left = _mm512_loadu_ps(scales), right = _mm512_loadu_ps(scales + LANES);
    ptrdiff_t tiles = (stop - start + TILE_ROWS_INT4 - 1) / TILE_ROWS_INT4;
    for (ptrdiff_t tile = 0; tile < tiles; tile++) {
        ptrdiff_t row = start + (stop - start) * tile / tiles, next = start + (stop - start) * (tile + 1) / tiles;
        WITH_FEW_ROWS(next - row, {
            __m512 acc[TILE_ROWS_INT4][2];
            tile_int4(rows, x, row, ep->m, panel, acc);
            UNROLL for (int i = 0; i < rows; i++)
                finish(ep, row + i, panel, _mm512_mul_ps(acc[i][0], left), _mm512_mul_ps(acc[i][1], right));
        })
    }
}

/* Activations of `rows` rows in a workspace, with an offset for each group. */
static Quantized carve_int4(const Matrix *m, ptrdiff_t rows, char *workspace)
{
    ptrdiff_t blocks = int4_blocks(m->inputs);
    Quantized q = {.scales = (float *)workspace, .offsets = (int32_t *)workspace + rows * blocks};
    q.bytes = (int8_t *)(q.offsets + rows * blocks * (QUANT_BLOCK / m->group));
    return q;
}

static ptrdiff_t quantized_size_int4(const Matrix *m, ptrdiff_t rows)
{
    return rows * int4_blocks(m->inputs) * (QUANT_BLOCK + 4 + 4 * (QUANT_BLOCK / m->group));
}

static void linear_int4(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace, int threads)
{
    ptrdiff_t panels = (ep->m->outputs + PANEL - 1) / PANEL, chunks = (rows + ROW_GROUP - 1) / ROW_GROUP;
    ptrdiff_t group = ep->m->group, blocks = int4_blocks(ep->m->inputs), groups = QUANT_BLOCK / group;
    Quantized q = carve_int4(ep->m, rows, workspace);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) {
            int8_t *bytes = q.bytes + row * blocks * QUANT_BLOCK;
            int32_t *offsets = q.offsets + row * blocks * groups;
            memset(bytes + (blocks - 1) * QUANT_BLOCK, 0, QUANT_BLOCK);
            quantize_row_int4(ep->m, x + row * stride, bytes, 64, q.scales + row * blocks, offsets);
            sum_groups(bytes, blocks * QUANT_BLOCK, group, offsets);
        }
#pragma omp for schedule(guided, chunks > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * chunks; task++)
            linear_rows_int4(&q, task / chunks, rows * (task % chunks) / chunks, rows * (task % chunks + 1) / chunks, ep);
    }
}

#ifdef TILES
#include "tiles_int8.h"
#include "tiles_int4.h"
#endif

/* Workspace size of `linear` in bytes; the same for all weights of this shape that have 4 bits and the same groups, that
 * have 8 bits, or that have more. */
int64_t linear_workspace_size(const Matrix *m, int64_t rows, int32_t threads)
{
    if (!m->scales) return linear_bf16_workspace_size(rows, m->inputs, threads);
#ifdef TILES
    if (m->group && rows > FEW_ROWS_INT8) return linear_tiles_int4_workspace_size(m, rows, threads);
#endif
    if (m->group) return quantized_size_int4(m, rows);
#ifdef TILES
    if (rows > FEW_ROWS_INT8) return linear_tiles_int8_workspace_size(rows, m->inputs);
#endif
    return quantized_bytes(rows, m->inputs);
}

/* Multiply x [rows, inputs] by the weights and write the result to `out` or, with `add`, add it. */
void linear_biased(const Matrix *m, const bf16 *x, int64_t stride, int64_t rows, void *out, int64_t out_stride,
                   int32_t add, const float *row_bias, int64_t biased_rows, char *workspace, int32_t threads)
{
    Epilogue ep = {m, out, out_stride, add, {row_bias, rows - biased_rows}};
    if (!m->scales) linear_bf16(x, stride, rows, &ep, workspace, threads);
#ifdef TILES
    else if (m->group && rows > FEW_ROWS_INT8) linear_tiles_int4(x, stride, rows, &ep, workspace, threads);
#endif
    else if (m->group) linear_int4(x, stride, rows, &ep, workspace, threads);
#ifdef TILES
    else if (rows > FEW_ROWS_INT8) linear_tiles_int8(x, stride, rows, &ep, workspace, threads);
#endif
    else linear_int8(x, stride, rows, &ep, workspace, threads);
}

/* Argmax ----------------------------------------------------------------------------------------------------------- */

#include "argmax.h"

static float norm_bound(__m512 squares) { return 1.001f * __builtin_sqrtf(_mm512_reduce_add_ps(squares)); }

void compute_argmax_bounds(const bf16 *weight, int64_t outputs, int64_t inputs, const float *scales, float *norms,
                           float *errors, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t row = 0; row < outputs; row++) {
        __m512 scale = _mm512_set1_ps(scales[row]), inverse = _mm512_set1_ps(scales[row] > 0 ? 1.0f / scales[row] : 0.0f);
        __m512 whole = _mm512_setzero_ps(), lost = _mm512_setzero_ps();
        for (ptrdiff_t k = 0; k < inputs; k += LANES) {
            __m512 x = load(weight + row * inputs + k, first(inputs - k));
            __m512i near = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
            __m512 part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(near), scale, x);
            lost = _mm512_fmadd_ps(part, part, lost);
            whole = _mm512_fmadd_ps(x, x, whole);
        }
        errors[row] = norm_bound(lost);
        norms[row] = norm_bound(whole) + errors[row];
    }
}

static void quantize_with_factors(const bf16 *x, ptrdiff_t inputs, const Quantized *q, ptrdiff_t row, float factors[2])
{
    ptrdiff_t blocks = (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK;
    quantize_row(x, inputs, q->bytes + row * inputs, 64, q->scales + row * blocks, q->offsets + row * blocks);
    __m512 whole = _mm512_setzero_ps(), lost = _mm512_setzero_ps();
    for (ptrdiff_t k = 0; k < inputs; k += LANES) {
        __mmask16 lanes = first(inputs - k);
        __m512 value = load(x + k, lanes), scale = _mm512_set1_ps(q->scales[row * blocks + k / QUANT_BLOCK]);
        __m512i bytes = _mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, q->bytes + row * inputs + k));
        __m512 part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(bytes), scale, value);
        lost = _mm512_fmadd_ps(part, part, lost);
        whole = _mm512_fmadd_ps(value, value, whole);
    }
    factors[1] = norm_bound(whole);
    factors[0] = norm_bound(lost) + (inputs + LANES) * 0x1p-23f * factors[1];
}

static void bound_panel(const ArgmaxBounds *s, const Quantized *q, const float *factors, ptrdiff_t rows, ptrdiff_t panel,
                         float *upper, ptrdiff_t panels)
{
    ptrdiff_t inputs = s->quantized->inputs, column = panel * PANEL, blocks = (rows + TILE_ROWS_INT8 - 1) / TILE_ROWS_INT8;
    const uint8_t *weights = (const uint8_t *)s->quantized->packed + panel * inputs * PANEL;
    __mmask16 lanes[2];
    __m512 scales[2], norms[2], errors[2];
    UNROLL for (int z = 0; z < 2; z++) {
        lanes[z] = first(s->quantized->outputs - column - z * LANES);
        scales[z] = _mm512_loadu_ps(s->quantized->scales + column + z * LANES);
        norms[z] = _mm512_maskz_loadu_ps(lanes[z], s->norms + column + z * LANES);
        errors[z] = _mm512_maskz_loadu_ps(lanes[z], s->errors + column + z * LANES);
    }
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t row = rows * block / blocks, next = rows * (block + 1) / blocks;
        WITH_ROWS(next - row, {
            __m512 acc[TILE_ROWS][2];
            tile_int8(rows, q, row, inputs, weights, acc);
            for (int m = 0; m < rows; m++) {
                __m512 norm = _mm512_set1_ps(factors[2 * (row + m) + 1]);
                __m512 lost = _mm512_set1_ps(factors[2 * (row + m)]);
                float high[2];
                UNROLL for (int z = 0; z < 2; z++) {
                    __m512 far = _mm512_fmadd_ps(errors[z], norm, _mm512_mul_ps(norms[z], lost));
                    high[z] = _mm512_mask_reduce_max_ps(lanes[z], _mm512_fmadd_ps(acc[m][z], scales[z], far));
                }
                upper[(row + m) * panels + panel] = high[0] > high[1] ? high[0] : high[1];
            }
        })
    }
}

static void update_argmax(const ArgmaxBounds *s, const bf16 *x, ptrdiff_t panel, ArgmaxResult *found)
{
    const Matrix *m = s->exact;
    __m512 acc[1][2];
    multiply_row(m, x, panel, acc[0]);
    for (int z = 0; z < 2; z++) {
        ptrdiff_t column = panel * PANEL + z * LANES;
        __mmask16 lanes = first(s->exact->outputs - column);
        float value = _mm512_mask_reduce_max_ps(lanes, acc[0][z]);
        __mmask16 equal = _mm512_mask_cmp_ps_mask(lanes, acc[0][z], _mm512_set1_ps(value), _CMP_EQ_OQ);
        if (!equal) continue;
        column += __builtin_ctz(equal);
#pragma omp critical
        if (value > found->value || (value == found->value && column < found->column))
            *found = (ArgmaxResult){value, column};
    }
}

/* Drawing ---------------------------------------------------------------------------------------------------------- */

#include "draw.h"

static float largest_logit(const float *logits, ptrdiff_t count)
{
    __m512 least = _mm512_set1_ps(-INFINITY), largest = least;
    for (ptrdiff_t k = 0; k < count; k += LANES)
        largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(least, first(count - k), logits + k));
    return _mm512_reduce_max_ps(largest);
}

static void compute_weights(const float *logits, ptrdiff_t count, const DrawScale *s, float weights[DRAW_BLOCK])
{
    __m512 temperature = _mm512_set1_ps(s->temperature), largest = _mm512_set1_ps(s->largest);
    __m512 floor = _mm512_set1_ps(s->floor), log2_e = _mm512_set1_ps(1.44269504f), least = _mm512_set1_ps(-INFINITY);
    for (ptrdiff_t k = 0; k < DRAW_BLOCK; k += LANES) {
        __m512 x = _mm512_div_ps(_mm512_mask_loadu_ps(least, first(count - k), logits + k), temperature);
        __mmask16 kept = _mm512_cmp_ps_mask(x, floor, _CMP_NLT_UQ);
        x = exp2_(_mm512_mul_ps(_mm512_sub_ps(x, largest), log2_e));
        _mm512_store_ps(weights + k, _mm512_maskz_mov_ps(kept, x));
    }
}

/* Norms and rotary embedding --------------------------------------------------------------------------------------- */

/* LayerNorm with a bias, RMSNorm without one; the rows of `out` are contiguous. */
INLINE void norm_row(const bf16 *x, const bf16 *weight, const bf16 *bias, float eps, bf16 *out, ptrdiff_t columns)
{
    __m512 mean = _mm512_setzero_ps(), square = _mm512_setzero_ps();
    if (bias) {
        for (ptrdiff_t k = 0; k < columns; k += LANES) mean = _mm512_add_ps(mean, load(x + k, first(columns - k)));
        mean = _mm512_set1_ps(_mm512_reduce_add_ps(mean) / columns);
    }
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __mmask16 lanes = first(columns - k);
        __m512 value = _mm512_maskz_sub_ps(lanes, load(x + k, lanes), mean);
        square = _mm512_fmadd_ps(value, value, square);
    }
    __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(square) / columns + eps));
    for (ptrdiff_t k = 0; k < columns; k += LANES) {
        __mmask16 lanes = first(columns - k);
        __m512 value = _mm512_mul_ps(_mm512_sub_ps(load(x + k, lanes), mean), scale);
        value = _mm512_mul_ps(value, load(weight + k, lanes));
        store(out + k, lanes, bias ? _mm512_add_ps(value, load(bias + k, lanes)) : value);
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
                __mmask16 lanes = first(half - i);
                bf16 *low = x + row * stride + head * 2 * half + i, *high = low + half;
                __m512 c = _mm512_maskz_loadu_ps(lanes, cos + row * half + i), a = load(low, lanes);
                __m512 s = _mm512_maskz_loadu_ps(lanes, sin + row * half + i), b = load(high, lanes);
                store(low, lanes, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
                store(high, lanes, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
            }
}

/* Attention -------------------------------------------------------------------------------------------------------- */

/* Keys and values of one head, from the first key of a chunk on. */
typedef struct {
    const void *k, *v;
    const float *k_scales, *v_scales; /* null for bf16 */
    ptrdiff_t stride;
    const void *next; /* the keys that are read after these keys and values */
} Keys;

INLINE const void *element(const void *rows, int is_int8, ptrdiff_t index)
{
    return (const char *)rows + (is_int8 ? index : 2 * index);
}

/* The keys of head `kv`, from row `key` on. */
INLINE Keys keys_at(const AttentionArgs *h, ptrdiff_t kv, ptrdiff_t key)
{
    ptrdiff_t offset = key * h->kv_token + kv * h->kv_head, scale = kv * h->scale_head + key;
    if (!h->k_scales) return (Keys){.k = element(h->k, 0, offset), .v = element(h->v, 0, offset), .stride = h->kv_token};
    return (Keys){element(h->k, 1, offset), element(h->v, 1, offset), h->k_scales + scale, h->v_scales + scale,
                  h->kv_token, NULL};
}

/* 1 / scale, or 0 if that could overflow; see MIN_SCALE in kernels/kv_cache.py. */
INLINE float inverse_scale(float scale) { return scale >= 0x1p-126f ? 1.0f / scale : 0.0f; }

static void *carve(char **from, size_t bytes)
{
    char *part = *from;
    *from += round_up(bytes, 64);
    return part;
}

#ifdef TILES
#include "tiles_attention.h"
#else
/* For 8-bit keys and values, everything is multiplied as integers of 16 bits with exact sums: keys and values are sign-extended,
 * which takes one instruction instead of the five of a conversion to bf16, and queries and probs are quantized to 16 bits,
 * with a scale per query, and per query and chunk of keys. */
enum { QUERY_ROWS = ROW_GROUP, MAX_INT16 = 32767 };

typedef struct { /* per thread; bf16, or int16 for 8-bit keys */
    bf16 *queries; /* [ROW_GROUP, width] */
    bf16 *keys;    /* KEY_CHUNK / PANEL panels of [width / 2, PANEL] pairs */
    bf16 *values;  /* [KEY_CHUNK / 2, columns] pairs, where columns is the width rounded up to LANES */
    bf16 *probs;   /* [TILE_ROWS, KEY_CHUNK] */
    float *query_scales; /* [ROW_GROUP], of int16 queries */
    float *scores; /* [TILE_ROWS, KEY_CHUNK] */
    float *sums;   /* [ROW_GROUP, columns] */
    float *largest; /* [ROW_GROUP], the largest score so far */
    float *total;   /* [ROW_GROUP], the sum of the probs so far */
} Scratch;

static size_t scratch_bytes(ptrdiff_t width)
{
    ptrdiff_t columns = round_up(width, LANES);
    return 64 * 9 + 2 * (ROW_GROUP * width + KEY_CHUNK * width + KEY_CHUNK * columns + TILE_ROWS * KEY_CHUNK) +
           4 * (TILE_ROWS * KEY_CHUNK + ROW_GROUP * columns + 3 * ROW_GROUP);
}

static Scratch carve_scratch(char *from, ptrdiff_t width)
{
    ptrdiff_t columns = round_up(width, LANES);
    Scratch s;
    s.queries = carve(&from, 2 * ROW_GROUP * width);
    s.keys = carve(&from, 2 * KEY_CHUNK * width);
    s.values = carve(&from, 2 * KEY_CHUNK * columns);
    s.probs = carve(&from, 2 * TILE_ROWS * KEY_CHUNK);
    s.scores = carve(&from, 4 * TILE_ROWS * KEY_CHUNK);
    s.sums = carve(&from, 4 * ROW_GROUP * columns);
    s.largest = carve(&from, 4 * ROW_GROUP);
    s.total = carve(&from, 4 * ROW_GROUP);
    s.query_scales = carve(&from, 4 * ROW_GROUP);
    return s;
}

INLINE __m256i to_int16(__m512 x) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)); }

/* Quantize a query to 16 bits; returns its scale. Products with 8-bit keys fit into 32 bits. */
static float quantize_query(const bf16 *query, ptrdiff_t width, bf16 *out)
{
    ptrdiff_t limit = INT32_MAX / 127 / width;
    float scale = max_abs(query, width) / (limit < MAX_INT16 ? limit : MAX_INT16);
    __m512 inverse = _mm512_set1_ps(inverse_scale(scale));
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        __mmask16 lanes = first(width - i);
        _mm256_mask_storeu_epi16(out + i, lanes, to_int16(_mm512_mul_ps(load(query + i, lanes), inverse)));
    }
    return scale;
}

/* Sums of the products below. The compiler would copy sums of the type __m512i, which has 64-bit elements, in each step. */
typedef int32_t Sums __attribute__((vector_size(64)));

/* Add the products of pairs of int16. */
INLINE Sums add_products(Sums sums, const bf16 *both, __m512i pairs)
{
    return (Sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)pair(both), pairs);
}

/* Like `tile`, for int16. */
INLINE void tile_int16(const int rows, const int vectors, const char *next, const bf16 *a, ptrdiff_t lda, const bf16 *panel,
                       ptrdiff_t width, ptrdiff_t pairs, Sums acc[TILE_ROWS][2])
{
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = (Sums){0};
    for (ptrdiff_t p = 0; p < pairs; p++, panel += 2 * width) {
        if (next) prefetch(next + 64 * p, 1);
        __m512i left = _mm512_loadu_si512(panel), right = vectors > 1 ? _mm512_loadu_si512(panel + 2 * LANES) : left;
        UNROLL for (int m = 0; m < rows; m++) {
            acc[m][0] = add_products(acc[m][0], a + m * lda + 2 * p, left);
            if (vectors > 1) acc[m][1] = add_products(acc[m][1], a + m * lda + 2 * p, right);
        }
    }
}

/* Load up to 32 elements of a key or value: bf16 as they are, bytes as int16. */
INLINE __m512i load_32(const int is_int8, const void *from, __mmask32 lanes)
{
    return is_int8 ? _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(lanes, from)) : _mm512_maskz_loadu_epi16(lanes, from);
}

/* Pack `count` keys into panels of PANEL columns; the last panel is padded with zeros. */
INLINE void pack_keys(const int is_int8, const void *k, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width, bf16 *packed)
{
    ptrdiff_t pairs = width / 2;
    for (ptrdiff_t key = 0; key < round_up(count, PANEL); key += LANES)
        for (ptrdiff_t p = 0; p < pairs; p += LANES) {
            __m512i rows[LANES];
            for (int j = 0; j < LANES; j++) {
                __mmask32 lanes = key + j < count ? first_of_32(width - 2 * p) : 0;
                rows[j] = load_32(is_int8, element(k, is_int8, (key + j) * stride + 2 * p), lanes);
            }
            transpose(rows);
            bf16 *to = packed + 2 * (key / PANEL * pairs * PANEL + key % PANEL);
            for (int i = 0; i < LANES && p + i < pairs; i++) _mm512_storeu_si512(to + (p + i) * 2 * PANEL, rows[i]);
        }
}

/* Load up to 16 elements of a value like `load_32`, each into 32 bits. */
INLINE __m512i load_16(const int is_int8, const void *from, __mmask16 lanes)
{
    return _mm512_cvtepu16_epi32(is_int8 ? _mm256_cvtepi8_epi16(_mm_maskz_loadu_epi8(lanes, from))
                                         : _mm256_maskz_loadu_epi16(lanes, from));
}

/* Pack `count` values with pairs of keys interleaved; an odd last key is paired with zero. */
INLINE void pack_values(const int is_int8, const void *v, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width, bf16 *packed)
{
    ptrdiff_t columns = round_up(width, LANES);
    for (ptrdiff_t key = 0; key < count; key += 2)
        for (ptrdiff_t c = 0; c < width; c += LANES) {
            __mmask16 lanes = first(width - c);
            __m512i low = load_16(is_int8, element(v, is_int8, key * stride + c), lanes);
            __m512i high = key + 1 < count ? load_16(is_int8, element(v, is_int8, (key + 1) * stride + c), lanes)
                                           : _mm512_setzero_si512();
            _mm512_storeu_si512(packed + key * columns + 2 * c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
}

/* Update the largest score of a row; returns the factor by which its earlier sums must be scaled. */
INLINE float update_largest(const float *scores, ptrdiff_t count, float *largest)
{
    __m512 high = _mm512_set1_ps(*largest);
    for (ptrdiff_t i = 0; i < count; i += LANES)
        high = _mm512_mask_max_ps(high, first(count - i), high, _mm512_loadu_ps(scores + i));
    float before = *largest;
    *largest = _mm512_reduce_max_ps(high);
    return _mm512_cvtss_f32(exp2_(_mm512_set1_ps(before - *largest)));
}

/* Unnormalized softmax probabilities (probs) of 16 keys, from key i of `count` on. */
INLINE __m512 probs_at(const float *scores, ptrdiff_t i, ptrdiff_t count, float largest)
{
    __m512 score = _mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(largest));
    return _mm512_maskz_mov_ps(first(count - i), exp2_(score));
}

/* Compute the probs of one row over a chunk, relative to the largest score so far; returns the factor by which the earlier
 * sums must be scaled. */
INLINE float softmax_chunk(float *scores, bf16 *probs, ptrdiff_t count, ptrdiff_t padded, float *largest, float *total)
{
    float shrink = update_largest(scores, count, largest);
    __m512 sum = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < padded; i += LANES) {
        __m512 prob = probs_at(scores, i, count, *largest);
        sum = _mm512_add_ps(sum, prob);
        _mm256_storeu_si256((__m256i *)(probs + i), narrow(prob));
    }
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    return shrink;
}

/* The same for 8-bit values, by whose scales the probs are multiplied. They are then quantized with one scale for the chunk,
 * whose sums fit into 32 bits: KEY_CHUNK * MAX_INT16 * 127 < 2^31. */
INLINE float softmax_chunk_int8(float *scores, bf16 *probs, const float *v_scales, ptrdiff_t count, ptrdiff_t padded,
                                float *largest, float *total, float *prob_scale)
{
    float shrink = update_largest(scores, count, largest);
    __m512 sum = _mm512_setzero_ps();
    __m512i high = _mm512_setzero_si512(); /* floats that are not negative are ordered like integers, with NaN last */
    for (ptrdiff_t i = 0; i < padded; i += LANES) {
        __m512 prob = probs_at(scores, i, count, *largest);
        sum = _mm512_add_ps(sum, prob);
        prob = _mm512_mul_ps(prob, _mm512_maskz_loadu_ps(first(count - i), v_scales + i));
        high = _mm512_max_epu32(high, _mm512_castps_si512(prob));
        _mm512_storeu_ps(scores + i, prob);
    }
    *total = *total * shrink + _mm512_reduce_add_ps(sum);
    uint32_t bits = _mm512_reduce_max_epu32(high);
    float largest_prob;
    memcpy(&largest_prob, &bits, sizeof bits);
    *prob_scale = largest_prob / MAX_INT16;
    __m512 inverse = _mm512_set1_ps(inverse_scale(*prob_scale));
    for (ptrdiff_t i = 0; i < padded; i += LANES)
        _mm256_storeu_si256((__m256i *)(probs + i), to_int16(_mm512_mul_ps(_mm512_loadu_ps(scores + i), inverse)));
    return shrink;
}

/* Where values are prefetched: PREFETCH_KEYS rows ahead and, in place of rows after the last one of the chunk, the keys that
 * are read next. */
typedef struct {
    const char *row, *next;
    ptrdiff_t left; /* rows up to `next` */
} Ahead;

INLINE Ahead ahead_of(const void *v, ptrdiff_t row_bytes, ptrdiff_t count, const void *next)
{
    if (count <= PREFETCH_KEYS) return (Ahead){next, next, 0};
    return (Ahead){(const char *)v + PREFETCH_KEYS * row_bytes, next, round_up(count - PREFETCH_KEYS, 2)};
}

INLINE void prefetch_two_rows(Ahead *a, ptrdiff_t row_bytes)
{
    _mm_prefetch(a->row, _MM_HINT_T1);
    _mm_prefetch(a->row + row_bytes, _MM_HINT_T1);
    a->left -= 2;
    a->row = a->left ? a->row + 2 * row_bytes : a->next;
}

/* acc[m] = sum over `count` keys of probability times value, for up to PANEL columns of unpacked values: bit-exactly like
 * `tile` with packed values. */
INLINE void tile_values(const int rows, const bf16 *probs, const bf16 *v, ptrdiff_t stride, ptrdiff_t count,
                        ptrdiff_t columns, const void *next, __m512 acc[TILE_ROWS][2])
{
    Ahead ahead = ahead_of(v, 2 * stride, count, next);
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
    __mmask32 lanes = first_of_32(columns);
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (ptrdiff_t key = 0; key < count; key += 2, v += 2 * stride) {
        prefetch_two_rows(&ahead, 2 * stride);
        __m512i even = _mm512_maskz_loadu_epi16(lanes, v);
        __m512i odd = _mm512_maskz_loadu_epi16(key + 1 < count ? lanes : 0, v + stride);
        __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd), high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
        UNROLL for (int m = 0; m < rows; m++) {
            __m512bh prob = pair(probs + m * KEY_CHUNK + key);
            acc[m][0] = _mm512_dpbf16_ps(acc[m][0], prob, low);
            acc[m][1] = _mm512_dpbf16_ps(acc[m][1], prob, high);
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        __m512 low = acc[m][0], high = acc[m][1];
        acc[m][0] = _mm512_permutex2var_ps(low, left, high);
        acc[m][1] = _mm512_permutex2var_ps(low, right, high);
    }
}

/* The same for 8-bit values. */
INLINE void tile_values_int8(const int rows, const bf16 *probs, const int8_t *v, ptrdiff_t stride, ptrdiff_t count,
                             ptrdiff_t columns, const void *next, Sums acc[TILE_ROWS][2])
{
    Ahead ahead = ahead_of(v, stride, count, next);
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
    __mmask32 lanes = first_of_32(columns);
    UNROLL for (int m = 0; m < rows; m++) acc[m][0] = acc[m][1] = (Sums){0};
    for (ptrdiff_t key = 0; key < count; key += 2, v += 2 * stride) {
        prefetch_two_rows(&ahead, stride);
        __m512i even = load_32(1, v, lanes), odd = load_32(1, v + stride, key + 1 < count ? lanes : 0);
        __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
        UNROLL for (int m = 0; m < rows; m++) {
            acc[m][0] = add_products(acc[m][0], probs + m * KEY_CHUNK + key, low);
            acc[m][1] = add_products(acc[m][1], probs + m * KEY_CHUNK + key, high);
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        __m512i low = (__m512i)acc[m][0], high = (__m512i)acc[m][1];
        acc[m][0] = (Sums)_mm512_permutex2var_epi32(low, left, high);
        acc[m][1] = (Sums)_mm512_permutex2var_epi32(low, right, high);
    }
}

/* Scores of up to TILE_ROWS queries and a panel of PANEL keys, of which `count` exist. */
INLINE void score_panel(const int rows, const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t row,
                        const bf16 *keys, const float *k_scales, ptrdiff_t count, const char *next, float *scores)
{
    const bf16 *queries = s->queries + row * h->width;
    __m512 scale = _mm512_set1_ps(h->scale * 1.44269504f), by[2] = {scale, scale}, acc[TILE_ROWS][2];
    if (is_int8) {
        Sums sums[TILE_ROWS][2];
        tile_int16(rows, 2, next, queries, h->width, keys, PANEL, h->width / 2, sums);
        by[0] = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(first(count), k_scales));
        by[1] = _mm512_mul_ps(scale, _mm512_maskz_loadu_ps(first(count - LANES), k_scales + LANES));
        UNROLL for (int m = 0; m < rows; m++) {
            __m512 query_scale = _mm512_set1_ps(s->query_scales[row + m]);
            acc[m][0] = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sums[m][0]), query_scale);
            acc[m][1] = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sums[m][1]), query_scale);
        }
    } else {
        tile(rows, 2, next, queries, h->width, keys, PANEL, h->width / 2, acc);
    }
    UNROLL for (int m = 0; m < rows; m++) {
        _mm512_storeu_ps(scores + m * KEY_CHUNK, _mm512_mul_ps(acc[m][0], by[0]));
        _mm512_storeu_ps(scores + m * KEY_CHUNK + LANES, _mm512_mul_ps(acc[m][1], by[1]));
    }
}

/* Sums of probability times value for up to PANEL columns, from column `c` on. */
INLINE void mix_values(const int rows, const int once, const AttentionArgs *h, const Scratch *s, ptrdiff_t c,
                       ptrdiff_t count, Keys from, __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t columns = round_up(h->width, LANES), pairs = (count + 1) / 2;
    const bf16 *values = s->values + 2 * c;
    const void *next = element(from.next, 0, c);
    if (once) tile_values(rows, s->probs, (const bf16 *)from.v + c, from.stride, count, h->width - c, next, acc);
    else if (c + LANES < columns) tile(rows, 2, NULL, s->probs, KEY_CHUNK, values, columns, pairs, acc);
    else tile(rows, 1, NULL, s->probs, KEY_CHUNK, values, columns, pairs, acc);
}

/* The same for 8-bit values. */
INLINE void mix_values_int8(const int rows, const int once, const AttentionArgs *h, const Scratch *s, ptrdiff_t c,
                            ptrdiff_t count, Keys from, const float *prob_scales, __m512 acc[TILE_ROWS][2])
{
    ptrdiff_t columns = round_up(h->width, LANES), pairs = (count + 1) / 2;
    const bf16 *values = s->values + 2 * c;
    Sums sums[TILE_ROWS][2];
    const void *next = element(from.next, 1, c);
    if (once) tile_values_int8(rows, s->probs, (const int8_t *)from.v + c, from.stride, count, h->width - c, next, sums);
    else if (c + LANES < columns) tile_int16(rows, 2, NULL, s->probs, KEY_CHUNK, values, columns, pairs, sums);
    else tile_int16(rows, 1, NULL, s->probs, KEY_CHUNK, values, columns, pairs, sums);
    UNROLL for (int m = 0; m < rows; m++) UNROLL for (int z = 0; z < 2; z++)
        acc[m][z] = _mm512_mul_ps(_mm512_cvtepi32_ps((__m512i)sums[m][z]), _mm512_set1_ps(prob_scales[m]));
}

/* Attend up to TILE_ROWS queries to a chunk of keys and update their sums, largest scores and totals. Keys and values are
 * packed in `s` or, with `once`, unpacked in `from`, because no other query attends to them. */
INLINE void attend_rows(const int rows, const int once, const int is_int8, const AttentionArgs *h, const Scratch *s,
                        ptrdiff_t row, const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    ptrdiff_t columns = round_up(h->width, LANES), padded = round_up(count, PANEL);
    for (ptrdiff_t key = 0; key < padded; key += PANEL) {
        const char *next = NULL;
        if (once) {
            ptrdiff_t later = key + PREFETCH_KEYS, left = count - key < PANEL ? count - key : PANEL;
            next = later < padded ? element(from.k, is_int8, later * from.stride)
                                  : element(from.v, is_int8, (later - padded) * from.stride);
            pack_keys(is_int8, element(from.k, is_int8, key * from.stride), from.stride, left, h->width, s->keys);
        }
        score_panel(rows, is_int8, h, s, row, s->keys + (once ? 0 : key * h->width), is_int8 ? from.k_scales + key : NULL,
                    count - key, next, s->scores + key);
    }
    float shrink[TILE_ROWS], prob_scales[TILE_ROWS];
    for (int m = 0; m < rows; m++) {
        ptrdiff_t seen = limits[row + m] - chunk < count ? limits[row + m] - chunk : count;
        float *scores = s->scores + m * KEY_CHUNK, *largest = s->largest + row + m, *total = s->total + row + m;
        bf16 *probs = s->probs + m * KEY_CHUNK;
        shrink[m] = is_int8
            ? softmax_chunk_int8(scores, probs, from.v_scales, seen, padded, largest, total, prob_scales + m)
            : softmax_chunk(scores, probs, seen, padded, largest, total);
    }
    for (ptrdiff_t c = 0; c < columns; c += PANEL) {
        __m512 acc[TILE_ROWS][2];
        if (is_int8) mix_values_int8(rows, once, h, s, c, count, from, prob_scales, acc);
        else mix_values(rows, once, h, s, c, count, from, acc);
        UNROLL for (int m = 0; m < rows; m++) {
            float *sum = s->sums + (row + m) * columns + c;
            __m512 by = _mm512_set1_ps(shrink[m]);
            _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), by, acc[m][0]));
            if (c + LANES < columns)
                _mm512_storeu_ps(sum + LANES, _mm512_fmadd_ps(_mm512_loadu_ps(sum + LANES), by, acc[m][1]));
        }
    }
}

INLINE void pack_chunk(const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t count, Keys from)
{
    pack_keys(is_int8, from.k, from.stride, count, h->width, s->keys);
    pack_values(is_int8, from.v, from.stride, count, h->width, s->values);
}

/* Attend all queries of a tile to a chunk of keys. */
INLINE void attend_chunk(const int is_int8, const AttentionArgs *h, const Scratch *s, ptrdiff_t row_count,
                         const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    if (row_count <= TILE_ROWS) {
        WITH_ROWS(row_count, attend_rows(rows, 1, is_int8, h, s, 0, limits, chunk, count, from))
        return;
    }
    pack_chunk(is_int8, h, s, count, from);
    for (ptrdiff_t row = 0; row < row_count; row += TILE_ROWS) {
        ptrdiff_t here = row_count - row < TILE_ROWS ? row_count - row : TILE_ROWS;
        if (limits[row + here - 1] <= chunk) continue;
        WITH_ROWS(here, attend_rows(rows, 0, is_int8, h, s, row, limits, chunk, count, from))
    }
}

/* Two functions, each small enough for the compiler to keep the strides of its loops in registers. */
static __attribute__((noinline)) void attend_chunk_bf16(const AttentionArgs *h, const Scratch *s, ptrdiff_t row_count,
                                                        const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    attend_chunk(0, h, s, row_count, limits, chunk, count, from);
}

static __attribute__((noinline)) void attend_chunk_int8(const AttentionArgs *h, const Scratch *s, ptrdiff_t row_count,
                                                        const ptrdiff_t *limits, ptrdiff_t chunk, ptrdiff_t count, Keys from)
{
    attend_chunk(1, h, s, row_count, limits, chunk, count, from);
}

/* Attend the queries [token, end) of a span, for all heads that share the keys of head `kv`. The keys `next` will be read
 * after that. */
static void attend_tile(const AttentionArgs *h, const KVSpan *span, const Scratch *s, ptrdiff_t kv, ptrdiff_t token,
                        ptrdiff_t end, const void *next)
{
    ptrdiff_t group = h->heads / h->kv_heads, rows = (end - token) * group, columns = round_up(h->width, LANES);
    ptrdiff_t limits[ROW_GROUP];
    for (ptrdiff_t row = 0; row < rows; row++) {
        ptrdiff_t at = token + row / group, head = kv * group + row % group;
        const bf16 *query = h->q + (span->first_query + at) * h->q_token + head * h->q_head;
        if (h->k_scales) s->query_scales[row] = quantize_query(query, h->width, s->queries + row * h->width);
        else memcpy(s->queries + row * h->width, query, 2 * h->width);
        limits[row] = span->start < 0 ? span->num_keys : span->start + at + 1;
        s->largest[row] = -1e30f;
        s->total[row] = 0;
    }
    memset(s->sums, 0, sizeof(float) * rows * columns);
    ptrdiff_t keys = limits[rows - 1];
    for (ptrdiff_t chunk = 0; chunk < keys; chunk += KEY_CHUNK) {
        ptrdiff_t count = keys - chunk < KEY_CHUNK ? keys - chunk : KEY_CHUNK;
        Keys from = keys_at(h, kv, span->first_key + chunk);
        from.next = chunk + KEY_CHUNK < keys ? keys_at(h, kv, span->first_key + chunk + KEY_CHUNK).k : next;
        if (from.k_scales) attend_chunk_int8(h, s, rows, limits, chunk, count, from);
        else attend_chunk_bf16(h, s, rows, limits, chunk, count, from);
    }
    for (ptrdiff_t row = 0; row < rows; row++) {
        bf16 *out = h->out + (span->first_query + token + row / group) * h->out_token +
                    (kv * group + row % group) * h->width;
        __m512 inverse = _mm512_set1_ps(1.0f / s->total[row]);
        for (ptrdiff_t c = 0; c < h->width; c += LANES)
            store(out + c, first(h->width - c), _mm512_mul_ps(_mm512_loadu_ps(s->sums + row * columns + c), inverse));
    }
}

#endif

/* The queries of a span are divided into tiles of `step` tokens. */
INLINE ptrdiff_t tiles_of(const KVSpan *span, ptrdiff_t step) { return (span->num_queries + step - 1) / step; }

/* The span of tile `*index` of all spans; `*index` becomes its index in that span. */
static const KVSpan *find_span(const KVSpan *spans, ptrdiff_t step, ptrdiff_t *index)
{
    for (; *index >= tiles_of(spans, step); spans++) *index -= tiles_of(spans, step);
    return spans;
}

/* Attend each span's queries to its keys. `workspace` has `attend_workspace_size()` bytes per thread. */
void attend(const AttentionArgs *h, const KVSpan *spans, int64_t count, char *workspace, int32_t threads)
{
    ptrdiff_t group = h->heads / h->kv_heads, step = QUERY_ROWS / group, bytes = round_up(scratch_bytes(h->width), 64);
    ptrdiff_t tasks = 0;
    for (ptrdiff_t i = 0; i < count; i++) tasks += tiles_of(spans + i, step) * h->kv_heads;
#pragma omp parallel num_threads(threads)
    {
        Scratch s = carve_scratch(workspace + omp_get_thread_num() * bytes, h->width);
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < tasks; task++) {
            ptrdiff_t kv = task % h->kv_heads, index = task / h->kv_heads;
            ptrdiff_t later = task + threads < tasks ? task + threads : task, later_index = later / h->kv_heads;
            const KVSpan *span = find_span(spans, step, &index), *later_span = find_span(spans, step, &later_index);
            ptrdiff_t token = index * step, end = token + step < span->num_queries ? token + step : span->num_queries;
            attend_tile(h, span, &s, kv, token, end, keys_at(h, later % h->kv_heads, later_span->first_key).k);
        }
    }
}

int64_t attend_workspace_size(int64_t width) { return round_up(scratch_bytes(width), 64); }

/* Decoder layers --------------------------------------------------------------------------------------------------- */

/* Add y to x, both [count]. */
static void add_row(bf16 *x, const bf16 *y, ptrdiff_t count)
{
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        __mmask16 lanes = first(count - k);
        store(x + k, lanes, _mm512_add_ps(load(x + k, lanes), load(y + k, lanes)));
    }
}

/* Quantize a key or value to bytes with one scale, like `quantize_rows` in kernels/kv_cache.py. */
static void quantize_head(const bf16 *x, ptrdiff_t width, int8_t *bytes, float *scale)
{
    *scale = max_abs(x, width) / 127.0f;
    __m512 inverse = _mm512_set1_ps(inverse_scale(*scale));
    for (ptrdiff_t i = 0; i < width; i += LANES) {
        __mmask16 lanes = first(width - i);
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(x + i, lanes), inverse));
        _mm_mask_storeu_epi8(bytes + i, lanes, _mm512_cvtsepi32_epi8(whole));
    }
}

#include "decoder_layers.h"
