/* Linear layers with weights of 8 bits, see avx2.c. Integer sums are exact, so that the results equal those of avx512.c.
 *
 * With AVX-VNNI, one instruction multiplies quads of unsigned weights by signed activations. Without it, weights and
 * activations are widened to 16 bits, because the product of bytes (vpmaddubsw) saturates. The even and the odd bytes of a
 * quad are widened separately, with one instruction each. */

#if defined(__AVXVNNI__) || defined(__AVX512VNNI__)
#define VNNI 1
#define TILE_CASES(BODY) CASES_TO_3(4, BODY)
typedef int8_t Quantum;
#else
#define VNNI 0
#define TILE_CASES(BODY) CASES_TO_6(2, BODY)
typedef int16_t Quantum;
#endif

/* Otherwise gcc computes all products before it adds any of them, and has too few registers for them. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

/* Vectors of a tile; up to FEW_ROWS_INT8 rows are multiplied without a buffer for widened weights. */
enum { TILE_VECTORS = VNNI ? 4 : 2, TILE_ROWS_INT8 = VNNI ? 3 : 6, FEW_ROWS_INT8 = 2 };

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

INLINE float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

/* Quantize weights to unsigned bytes with an offset of 128: row r is (byte - 128) * scales[r]. Scales are stored in the
 * order of the packed rows. */
void pack_int8(const bf16 *weight, int64_t outputs, int64_t inputs, int32_t gated, uint8_t *packed, float *scales,
               int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = 0; panel < ceil_div(outputs, PANEL); panel++) {
        uint8_t *to = packed + panel * inputs * PANEL;
        for (int j = 0; j < PANEL; j++) {
            ptrdiff_t row = source_row(panel, j, outputs, gated);
            const bf16 *from = weight + row * inputs;
            float scale = row < outputs ? max_abs(from, inputs) / 127.0f : 0.0f, inverse = inverse_of(scale);
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

/* Rows of activations in 8 bits. Each block of inputs has a scale and -128 times the sum of its values, which compensates
 * for the offset of the weights. Blocks are used because these models have outlier activations: a few inputs are hundreds of
 * times larger than the others. */
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

/* Add the products of a quad of inputs of a row to the sums of eight columns. */
INLINE __m256i add_quad(__m256i sum, __m256i quads, const Quantum *x)
{
#if VNNI
    return _mm256_dpbusd_epi32(sum, quads, broadcast_dword(x));
#else
    __m256i low = _mm256_and_si256(quads, _mm256_set1_epi16(0xff)), high = _mm256_srli_epi16(quads, 8);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(low, broadcast_dword(x)));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(high, broadcast_dword(x + 2)));
#endif
}

/* sums[m] (+)= row `row` + m times a block of a panel, `quads` quads of inputs. */
INLINE void block_of_few_rows(const int rows, const Quantized *q, ptrdiff_t row, ptrdiff_t block, const char *panel,
                              ptrdiff_t quads, __m256 acc[FEW_ROWS_INT8][VECTORS])
{
    ptrdiff_t place = block * q->rows + row;
    const Quantum *x = q->values + place * BLOCK;
    __m256i sums[FEW_ROWS_INT8][VECTORS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < VECTORS; z++) sums[m][z] = _mm256_set1_epi32(q->offsets[place + m]);
    for (ptrdiff_t i = 0; i < quads; i++, panel += 4 * PANEL) {
        prefetch(panel + PREFETCH_BYTES);
        prefetch(panel + PREFETCH_BYTES + 64);
        UNROLL for (int z = 0; z < VECTORS; z++)
            UNROLL for (int m = 0; m < rows; m++) {
                sums[m][z] = add_quad(sums[m][z], at(panel, z), x + m * BLOCK + 4 * i);
                IN_REGISTER(sums[m][z]);
            }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < VECTORS; z++)
            acc[m][z] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m][z]), _mm256_set1_ps(q->scales[place + m]), acc[m][z]);
}

INLINE void few_rows_int8(const int rows, const Quantized *q, ptrdiff_t row, ptrdiff_t inputs, const char *panel,
                          float *out)
{
    __m256 acc[FEW_ROWS_INT8][VECTORS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < VECTORS; z++) acc[m][z] = _mm256_setzero_ps();
    for (ptrdiff_t k = 0; k < inputs; k += BLOCK, panel += BLOCK * PANEL)
        block_of_few_rows(rows, q, row, k / BLOCK, panel, least(BLOCK, inputs - k) / 4, acc);
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < VECTORS; z++) _mm256_storeu_ps(out + m * PANEL + z * LANES, acc[m][z]);
}

/* Widen the quads of a block of a panel: [2 * quads][PANEL] pairs of 16 bits, even bytes and odd bytes. */
static void widen_quads(const char *panel, ptrdiff_t quads, char *out)
{
    for (ptrdiff_t i = 0; i < quads; i++, panel += 4 * PANEL, out += 8 * PANEL)
        UNROLL for (int z = 0; z < VECTORS; z++) {
            __m256i bytes = at(panel, z);
            _mm256_store_si256((__m256i *)out + z, _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)));
            _mm256_store_si256((__m256i *)out + VECTORS + z, _mm256_srli_epi16(bytes, 8));
        }
}

/* sums[m] += row `row` + m times a block of TILE_VECTORS vectors of a panel: quads or, without VNNI, widened pairs. For each
 * of `steps`, a line is prefetched, `ahead` bytes after the previous one. */
INLINE void tile_int8(const int rows, const Quantized *q, ptrdiff_t block, ptrdiff_t row, const char *weights,
                      ptrdiff_t steps, float *sums, const char *next, ptrdiff_t ahead)
{
    enum { STEP = 4 / sizeof(Quantum) };
    ptrdiff_t place = block * q->rows + row;
    const Quantum *x = q->values + place * BLOCK, *stop = x + STEP * steps;
    __m256i acc[MAX_TILE_ROWS][TILE_VECTORS];
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < TILE_VECTORS; z++) acc[m][z] = _mm256_set1_epi32(q->offsets[place + m]);
    for (; x < stop; x += STEP, weights += 4 * PANEL, next += ahead) {
        __m256i w[TILE_VECTORS];
        prefetch(next);
        UNROLL for (int z = 0; z < TILE_VECTORS; z++) w[z] = at(weights, z);
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i both = broadcast_dword(x + m * BLOCK);
            UNROLL for (int z = 0; z < TILE_VECTORS; z++) {
#if VNNI
                acc[m][z] = _mm256_dpbusd_epi32(acc[m][z], w[z], both);
#else
                acc[m][z] = _mm256_add_epi32(acc[m][z], _mm256_madd_epi16(w[z], both));
#endif
                IN_REGISTER(acc[m][z]);
            }
        }
    }
    UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int z = 0; z < TILE_VECTORS; z++) {
            float *sum = sums + m * PANEL + z * LANES;
            __m256 before = block ? _mm256_load_ps(sum) : _mm256_setzero_ps();
            __m256 scale = _mm256_set1_ps(q->scales[place + m]);
            _mm256_store_ps(sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[m][z]), scale, before));
        }
}

/* sums[m] = row `row` + m times a panel, without the scales of the weights. */
static void multiply_int8(const Quantized *q, ptrdiff_t row, ptrdiff_t rows, ptrdiff_t inputs, const char *panel, float *sums)
{
    _Alignas(64) char wide[VNNI ? 1 : 2 * BLOCK * PANEL];
    if (rows == 1) return few_rows_int8(1, q, row, inputs, panel, sums);
    if (rows == 2) return few_rows_int8(2, q, row, inputs, panel, sums);
    ptrdiff_t tiles = ceil_div(rows, TILE_ROWS_INT8);
    for (ptrdiff_t k = 0; k < inputs; k += BLOCK, panel += BLOCK * PANEL) {
        ptrdiff_t quads = least(BLOCK, inputs - k) / 4;
        if (!VNNI) widen_quads(panel, quads, wide);
        for (ptrdiff_t tile = 0; tile < tiles; tile++) {
            ptrdiff_t at = rows * tile / tiles, count = rows * (tile + 1) / tiles - at;
            for (int z = 0; z < VECTORS; z += TILE_VECTORS) {
                const char *weights = (VNNI ? panel : wide) + z * sizeof(__m256i), *next = panel + BLOCK * PANEL;
                switch (8 * TILE_VECTORS + count) {
                    TILE_CASES(tile_int8(rows, q, k / BLOCK, row + at, weights, VNNI ? quads : 2 * quads,
                                         sums + at * PANEL + z * LANES, next, tile || z ? 0 : 64))
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
        UNROLL for (int z = 0; z < VECTORS; z++)
            found[z] = _mm256_mul_ps(_mm256_load_ps(sums + (row - start) * PANEL + z * LANES),
                                     _mm256_loadu_ps(scales + z * LANES));
        finish(ep, row, panel, found);
    }
}

static void linear_rows_int8(const Quantized *q, ptrdiff_t panel, ptrdiff_t start, ptrdiff_t stop, const Epilogue *ep)
{
    _Alignas(64) float sums[ROW_GROUP * PANEL];
    ptrdiff_t inputs = ep->m->inputs;
    multiply_int8(q, start, stop - start, inputs, (const char *)ep->m->packed + panel * inputs * PANEL, sums);
    finish_scaled(ep, panel, start, stop, sums);
}

static void linear_int8(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace, int threads)
{
    ptrdiff_t panels = ceil_div(ep->m->outputs, PANEL), groups = ceil_div(rows, ROW_GROUP), inputs = ep->m->inputs;
    Quantized q = quantized_at(workspace, rows, inputs);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) quantize_row(x + row * stride, inputs, &q, row);
#pragma omp for schedule(guided, groups > 1 ? 1 : 2)
        for (ptrdiff_t task = 0; task < panels * groups; task++)
            linear_rows_int8(&q, task / groups, rows * (task % groups) / groups, rows * (task % groups + 1) / groups, ep);
    }
}
