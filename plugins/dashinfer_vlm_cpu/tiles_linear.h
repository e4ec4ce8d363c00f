/* Linear layers with tile products, see tiles.h. Included by avx512.c instead of its own linear layers.
 *
 * Rows are packed into blocks of 32, with the 64 bytes of each step contiguous over the block's rows. The steps of a row are
 * always added in order from the first to the last, so that its result does not depend on how the work is divided.
 */

/* A task is up to `PANEL_GROUP` panels: their weights, unpacked to 16 bits, stay in L2 while all rows are multiplied. Longer
 * sums are computed in parts of `PART` steps for the same reason. For a single block of rows, steps are unpacked into a ring
 * buffer in L1, `LEAD` steps before they are multiplied: loading tiles from just-unpacked weights would stall on the
 * stores. */
enum { PANEL_GROUP = 8, PART = 40, RING = 4, LEAD = 2, PANEL_STEP = 2 * STEP_BYTES * TILE };

INLINE ptrdiff_t ceil_div(ptrdiff_t x, ptrdiff_t by) { return (x + by - 1) / by; }

/* Packed rows of one linear layer. */
typedef struct {
    char *bytes;
    ptrdiff_t rows, steps;
} Blocks;

INLINE int block_rows(const Blocks *x, ptrdiff_t block)
{
    ptrdiff_t left = x->rows - block * MAX_ROWS;
    return left < MAX_ROWS ? left : MAX_ROWS;
}

INLINE char *block_step(const Blocks *x, ptrdiff_t block, ptrdiff_t step)
{
    return x->bytes + (block * MAX_ROWS * x->steps + step * block_rows(x, block)) * STEP_BYTES;
}

static void pack_row(const Blocks *to, ptrdiff_t row, const bf16 *x, ptrdiff_t inputs)
{
    ptrdiff_t block = row / MAX_ROWS;
    for (ptrdiff_t step = 0; step < to->steps; step++) {
        ptrdiff_t left = inputs - step * STEP_INPUTS;
        __mmask32 lanes = left >= STEP_INPUTS ? ~0u : (1u << left) - 1;
        _mm512_store_si512(block_step(to, block, step) + row % MAX_ROWS * STEP_BYTES,
                           _mm512_maskz_loadu_epi16(lanes, x + step * STEP_INPUTS));
    }
}

/* Reads the steps of a panel sequentially, from weights of 12 or 16 bits. */
typedef struct {
    const Matrix *m;
    const bf16 *plain; /* weights of 16 bits */
    Reader coded;
    ptrdiff_t group, pairs; /* next group of 12-bit weights; number of remaining pairs */
} Source;

INLINE Source open_panel(const Matrix *m, ptrdiff_t panel)
{
    Source s = {.m = m, .pairs = m->inputs / 2};
    if (m->codes) s.coded = read_panel(m, panel);
    else s.plain = (const bf16 *)m->packed + panel * m->inputs * PANEL;
    return s;
}

/* Read the next four inputs. */
INLINE void read_next(Source *s, __m512bh w[4])
{
    if (s->m->codes) {
        prefetch(s->coded.packed + PREFETCH_BYTES, 3);
        read_group(&s->coded, s->group++, w);
        return;
    }
    prefetch((const char *)s->plain + PREFETCH_BYTES, 4);
    UNROLL for (int i = 0; i < 4; i++) w[i] = (__m512bh)_mm512_loadu_si512(s->plain + i * PANEL);
    s->plain += 4 * PANEL;
}

/* Read the next `steps` steps, padded with zeros after the last input. */
INLINE void read_steps(Source *s, ptrdiff_t steps, char *to)
{
    ptrdiff_t here = steps * TILE < s->pairs ? steps * TILE : s->pairs;
    for (ptrdiff_t pair = 0; pair < here; pair += 2, to += 256) {
        __m512bh w[4];
        read_next(s, w);
        UNROLL for (int i = 0; i < 4; i++) _mm512_store_si512(to + 64 * i, (__m512i)w[i]);
    }
    s->pairs -= here;
    memset(to, 0, (steps * TILE - here) * 128);
}

static void finish_block(const Epilogue *ep, ptrdiff_t row, int rows, ptrdiff_t panel, const float sums[][PANEL])
{
    for (int i = 0; i < rows; i++)
        finish(ep, row + i, panel, _mm512_load_ps(sums[i]), _mm512_load_ps(sums[i] + LANES));
}

/* Multiply one block of rows by a panel: weights are streamed through L1, and the sums stay in the tiles. */
static void multiply_block(const Blocks *x, const Matrix *m, ptrdiff_t panel, Tiles *t, float sums[][PANEL])
{
    _Alignas(64) char ring[RING][PANEL_STEP];
    Source source = open_panel(m, panel);
    tiles_zero(t);
    for (ptrdiff_t step = 0; step < x->steps + LEAD; step++) {
        if (step < x->steps) read_steps(&source, 1, ring[step % RING]);
        if (step >= LEAD) tiles_step_bf16(t, block_step(x, 0, step - LEAD), ring[(step - LEAD) % RING]);
    }
    tiles_store(t, sums, sizeof sums[0]);
}

/* The same for up to 16 rows and two panels, `panel` and `panel + 1`. */
static void multiply_panel_pair(const Blocks *x, const Matrix *m, ptrdiff_t panel, Tiles *t, float sums[2][TILE][PANEL])
{
    _Alignas(64) char rings[2][RING][PANEL_STEP];
    Source first = open_panel(m, panel), second = open_panel(m, panel + 1);
    tiles_zero_pair(t);
    for (ptrdiff_t step = 0; step < x->steps + LEAD; step++) {
        if (step < x->steps) {
            read_steps(&first, 1, rings[0][step % RING]);
            read_steps(&second, 1, rings[1][step % RING]);
        }
        ptrdiff_t now = (step + RING - LEAD) % RING;
        if (step >= LEAD) tiles_step_pair(t, block_step(x, 0, step - LEAD), rings[0][now], rings[1][now]);
    }
    tiles_store_pair(t, sums[0], sums[1], sizeof sums[0][0]);
}

/* Multiply one row in vector registers, which is faster than tiles: the same sums in the same order. x is float32
 * [inputs]; `flush_denormals` must have set the CPU mode that flushes denormal numbers to zero. */
static void multiply_one(const float *x, ptrdiff_t steps, const Matrix *m, ptrdiff_t panel, float sums[PANEL])
{
    Source source = open_panel(m, panel);
    __m512i high = _mm512_set1_epi32(0xffff0000);
    __m512 left = _mm512_setzero_ps(), right = left;
    for (ptrdiff_t step = 0; step < steps; step++) {
        __m512 even[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, odd[2] = {even[0], even[0]};
        for (ptrdiff_t group = 0; group < TILE / 2 && source.pairs; group++, source.pairs -= 2, x += GROUP) {
            __m512bh w[4];
            read_next(&source, w);
            UNROLL for (int i = 0; i < 4; i++) {
                __m512i pairs = (__m512i)w[i];
                const float *inputs = x + i / 2 * 2;
                even[i % 2] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[0]), (__m512)_mm512_slli_epi32(pairs, 16), even[i % 2]);
                odd[i % 2] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[1]), (__m512)_mm512_and_si512(pairs, high), odd[i % 2]);
            }
        }
        left = _mm512_add_ps(left, _mm512_add_ps(even[0], odd[0]));
        right = _mm512_add_ps(right, _mm512_add_ps(even[1], odd[1]));
    }
    _mm512_store_ps(sums, left);
    _mm512_store_ps(sums + LANES, right);
}

/* Multiply all rows by the panels [first, first + count). `weights` is a buffer for one part of each panel,
 * `partial_sums` for their sums. */
static void multiply_many(const Blocks *x, const Epilogue *ep, ptrdiff_t first, ptrdiff_t count, char *weights,
                          float (*partial_sums)[MAX_ROWS][PANEL])
{
    _Alignas(64) float sums[MAX_ROWS][PANEL];
    Source sources[PANEL_GROUP];
    for (ptrdiff_t i = 0; i < count; i++) sources[i] = open_panel(ep->m, first + i);
    for (ptrdiff_t step = 0; step < x->steps; step += PART) {
        ptrdiff_t here = x->steps - step < PART ? x->steps - step : PART;
        for (ptrdiff_t i = 0; i < count; i++) read_steps(sources + i, here, weights + i * here * PANEL_STEP);
        Tiles t = tiles_open(block_rows(x, 0));
        for (ptrdiff_t block = 0; block * MAX_ROWS < x->rows; block++) {
            int rows = block_rows(x, block);
            if (rows != t.rows) t = tiles_open(rows);
            for (ptrdiff_t i = 0; i < count; i++) {
                float(*later)[PANEL] = partial_sums[block * PANEL_GROUP + i];
                if (step) tiles_load(&t, later);
                else tiles_zero(&t);
                const char *a = block_step(x, block, step), *b = weights + i * here * PANEL_STEP;
                for (ptrdiff_t s = 0; s < here; s++) tiles_step_bf16(&t, a + s * rows * STEP_BYTES, b + s * PANEL_STEP);
                if (step + here < x->steps) {
                    tiles_store(&t, later, sizeof later[0]);
                    continue;
                }
                tiles_store(&t, sums, sizeof sums[0]);
                finish_block(ep, block * MAX_ROWS, rows, first + i, sums);
            }
        }
        tiles_close();
    }
}

/* Number of panels of a task: as many as fit in L2, with the work divided as evenly between threads as possible. */
static ptrdiff_t panel_group(ptrdiff_t panels, int threads)
{
    ptrdiff_t tasks = ceil_div(ceil_div(panels, PANEL_GROUP), threads) * threads;
    return ceil_div(panels, tasks);
}

static ptrdiff_t blocks_size(ptrdiff_t rows, ptrdiff_t steps) { return rows * steps * STEP_BYTES; }

static ptrdiff_t task_size(ptrdiff_t rows, ptrdiff_t steps)
{
    if (rows <= MAX_ROWS) return 0;
    ptrdiff_t partial_sums = steps > PART ? ceil_div(rows, MAX_ROWS) * PANEL_GROUP * MAX_ROWS * PANEL * sizeof(float) : 0;
    return PANEL_GROUP * (steps < PART ? steps : PART) * PANEL_STEP + partial_sums;
}

static ptrdiff_t linear_bf16_workspace_size(ptrdiff_t rows, ptrdiff_t inputs, int threads)
{
    ptrdiff_t steps = ceil_div(inputs, STEP_INPUTS);
    ptrdiff_t one = sizeof(float) * steps * STEP_INPUTS;
    return 64 + (rows == 1 ? one : blocks_size(rows, steps) + threads * task_size(rows, steps));
}

/* Flush denormal numbers to zero; returns the previous mode. */
static unsigned flush_denormals(void)
{
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    return before;
}

static void widen_row(const bf16 *x, ptrdiff_t inputs, float *to)
{
    for (ptrdiff_t k = 0; k < inputs; k += LANES) _mm512_store_ps(to + k, load(x + k, first(inputs - k)));
}

static void linear_one(const bf16 *x, const Epilogue *ep, float *workspace, int threads)
{
    ptrdiff_t panels = ceil_div(ep->m->outputs, PANEL), steps = ceil_div(ep->m->inputs, STEP_INPUTS);
    widen_row(x, ep->m->inputs, workspace);
#pragma omp parallel num_threads(threads)
    {
        _Alignas(64) float sums[1][PANEL];
#pragma omp for schedule(guided, 2) nowait
        for (ptrdiff_t panel = 0; panel < panels; panel++) {
            unsigned mode = flush_denormals();
            multiply_one(workspace, steps, ep->m, panel, sums[0]);
            _mm_setcsr(mode);
            finish_block(ep, 0, 1, panel, sums);
        }
    }
}

static char *aligned(char *workspace) { return (char *)(((uintptr_t)workspace + 63) / 64 * 64); }

static void linear_bf16(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace, int threads)
{
    ptrdiff_t inputs = ep->m->inputs, panels = ceil_div(ep->m->outputs, PANEL), group = panel_group(panels, threads);
    Blocks packed = {aligned(workspace), rows, ceil_div(inputs, STEP_INPUTS)};
    char *rest = packed.bytes + blocks_size(rows, packed.steps);
    if (rows == 1) {
        linear_one(x, ep, (float *)packed.bytes, threads);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) pack_row(&packed, row, x + row * stride, inputs);
        if (rows > MAX_ROWS) {
            char *weights = rest + omp_get_thread_num() * task_size(rows, packed.steps);
            char *partial_sums = weights + PANEL_GROUP * (packed.steps < PART ? packed.steps : PART) * PANEL_STEP;
#pragma omp for schedule(dynamic, 1) nowait
            for (ptrdiff_t first = 0; first < panels; first += group)
                multiply_many(&packed, ep, first, panels - first < group ? panels - first : group, weights,
                              (float(*)[MAX_ROWS][PANEL])partial_sums);
        } else if (rows <= TILE) {
            _Alignas(64) float sums[2][TILE][PANEL];
            Tiles t = tiles_open_pair(rows);
#pragma omp for schedule(guided, 1) nowait
            for (ptrdiff_t panel = 0; panel < panels; panel += 2) {
                if (panel + 1 < panels) multiply_panel_pair(&packed, ep->m, panel, &t, sums);
                else multiply_block(&packed, ep->m, panel, &t, sums[0]);
                for (ptrdiff_t i = 0; i < 2 && panel + i < panels; i++) finish_block(ep, 0, rows, panel + i, sums[i]);
            }
            tiles_close();
        } else {
            _Alignas(64) float sums[MAX_ROWS][PANEL];
            Tiles t = tiles_open(rows);
#pragma omp for schedule(guided, 2) nowait
            for (ptrdiff_t panel = 0; panel < panels; panel++) {
                multiply_block(&packed, ep->m, panel, &t, sums);
                finish_block(ep, 0, rows, panel, sums);
            }
            tiles_close();
        }
    }
}

/* Multiply one row by one panel, for `update_argmax`. */
static void multiply_row(const Matrix *m, const bf16 *x, ptrdiff_t panel, __m512 acc[2])
{
    _Alignas(64) float sums[PANEL], row[m->inputs + LANES];
    widen_row(x, m->inputs, row);
    unsigned mode = flush_denormals();
    multiply_one(row, ceil_div(m->inputs, STEP_INPUTS), m, panel, sums);
    _mm_setcsr(mode);
    acc[0] = _mm512_load_ps(sums);
    acc[1] = _mm512_load_ps(sums + LANES);
}
