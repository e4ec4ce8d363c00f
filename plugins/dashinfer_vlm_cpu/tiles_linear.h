/* Linear layers with tile products, see tiles.h. They replace those of avx512_linear.h.
 *
 * Rows are packed into blocks, with the 64 bytes of each step contiguous over the block's rows. The steps of a row are
 * always added in order from the first to the last, so that its result does not depend on how the work is divided.
 */
#pragma once

#include "avx512_codes.h"
#include "tiles.h"

/* A task is up to `PANEL_GROUP` panels: their weights, unpacked to 16 bits, stay in L2 while all rows are multiplied.
 * Longer sums are computed in parts of at most `PART` steps for the same reason. Steps are unpacked `LEAD` steps before
 * they are multiplied for the first time: loading tiles from just-unpacked weights would stall on the stores. A single
 * block of rows needs them only once, and unpacks them into a ring buffer in L1. */
enum { PANEL_GROUP = 8, PART = 40, RING = 4, LEAD = 2, PANEL_STEP = 2 * STEP_BYTES * TILE };
/* On processors with AMX, weights of 12 bits are read 4 % faster with this distance than with that of AVX-512. */
enum { PREFETCH_BYTES_TILES = 3072 };

/* Packed rows of one linear layer: blocks of 48 rows, followed by blocks of at most 32. */
typedef struct {
    char *bytes;
    ptrdiff_t rows, steps;
    ptrdiff_t tall; /* number of blocks of 48 rows; the last of them may be padded */
} Blocks;

/* The number of blocks of 48 rows that leave no less than 17 rows for the last block. */
static ptrdiff_t tall_blocks(ptrdiff_t rows)
{
    ptrdiff_t tiles = ceil_div(rows, TILE), small[3] = {0, 2, 1};
    return rows > MAX_ROWS ? (tiles - 2 * small[tiles % 3]) / 3 : 0;
}

INLINE ptrdiff_t block_count(const Blocks *x)
{
    ptrdiff_t rest = x->rows - x->tall * TALL_ROWS;
    return x->tall + (rest > 0 ? ceil_div(rest, MAX_ROWS) : 0);
}

INLINE ptrdiff_t block_start(const Blocks *x, ptrdiff_t block)
{
    return block < x->tall ? block * TALL_ROWS : x->tall * TALL_ROWS + (block - x->tall) * MAX_ROWS;
}

/* The number of rows of a block, including those that pad it. */
INLINE int block_rows(const Blocks *x, ptrdiff_t block)
{
    if (block < x->tall) return TALL_ROWS;
    ptrdiff_t left = x->rows - block_start(x, block);
    return left < MAX_ROWS ? left : MAX_ROWS;
}

INLINE char *block_step(const Blocks *x, ptrdiff_t block, ptrdiff_t step)
{
    return x->bytes + (block_start(x, block) * x->steps + step * block_rows(x, block)) * STEP_BYTES;
}

/* Pack one row; rows after the last one are zero. */
static void pack_row(const Blocks *to, ptrdiff_t row, const bf16 *x, ptrdiff_t inputs)
{
    ptrdiff_t tall = to->tall * TALL_ROWS, block = row < tall ? row / TALL_ROWS : to->tall + (row - tall) / MAX_ROWS;
    char *at = block_step(to, block, 0) + (row - block_start(to, block)) * STEP_BYTES;
    ptrdiff_t stride = block_rows(to, block) * STEP_BYTES;
    for (ptrdiff_t step = 0; step < to->steps; step++, at += stride) {
        __mmask32 lanes = row < to->rows ? first_of_32(inputs - step * STEP_INPUTS) : 0;
        _mm512_store_si512(at, _mm512_maskz_loadu_epi16(lanes, x + step * STEP_INPUTS));
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
        prefetch(s->coded.packed + PREFETCH_BYTES_TILES, 3);
        read_group(&s->coded, s->group++, w);
        return;
    }
    prefetch((const char *)s->plain + PREFETCH_BYTES, 4);
    UNROLL_FOR (int i = 0; i < 4; i++) w[i] = (__m512bh)_mm512_loadu_si512(s->plain + i * PANEL);
    s->plain += 4 * PANEL;
}

/* Read the next `steps` steps, padded with zeros after the last input. */
INLINE void read_steps(Source *s, ptrdiff_t steps, char *to)
{
    ptrdiff_t here = steps * TILE < s->pairs ? steps * TILE : s->pairs;
    for (ptrdiff_t pair = 0; pair < here; pair += 2, to += 256) {
        __m512bh w[4];
        read_next(s, w);
        UNROLL_FOR (int i = 0; i < 4; i++) _mm512_store_si512(to + 64 * i, (__m512i)w[i]);
    }
    s->pairs -= here;
    if (here < steps * TILE) memset(to, 0, (steps * TILE - here) * 128);
}

static void finish_block(const Epilogue *ep, ptrdiff_t row, int rows, ptrdiff_t panel, const float sums[][PANEL])
{
    for (int i = 0; i < rows; i++) finish(ep, row + i, panel, _mm512_load_ps(sums[i]), _mm512_load_ps(sums[i] + LANES));
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
            UNROLL_FOR (int i = 0; i < 4; i++) {
                __m512i pairs = (__m512i)w[i];
                const float *inputs = x + i / 2 * 2;
                even[i % 2] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[0]), (__m512)_mm512_slli_epi32(pairs, 16),
                                              even[i % 2]);
                odd[i % 2] = _mm512_fmadd_ps(_mm512_set1_ps(inputs[1]), (__m512)_mm512_and_si512(pairs, high),
                                             odd[i % 2]);
            }
        }
        left = _mm512_add_ps(left, _mm512_add_ps(even[0], odd[0]));
        right = _mm512_add_ps(right, _mm512_add_ps(even[1], odd[1]));
    }
    _mm512_store_ps(sums, left);
    _mm512_store_ps(sums + LANES, right);
}

/* The sums of a block and a panel, whose activation is computed row by row between the next products, while the tile
 * unit multiplies. */
typedef struct {
    _Alignas(64) float sums[TALL_ROWS][PANEL];
    ptrdiff_t row, panel; /* of the first sums */
    int next, rows;       /* rows from `next` on are left */
} Finishing;

static __attribute__((noinline)) void finish_rows(const Epilogue *ep, Finishing *f, int count)
{
    for (; count && f->next < f->rows; count--, f->next++) {
        const float *sums = f->sums[f->next];
        finish(ep, f->row + f->next, f->panel, _mm512_load_ps(sums), _mm512_load_ps(sums + LANES));
    }
}

/* Some steps of one block. */
typedef struct {
    const char *rows, *later; /* the block; the next one, which is prefetched into L2, `lines` of it in each step */
    ptrdiff_t steps, stride, lines;
} Part;

/* Multiply a part of a block by a part of a panel. With `unpack`, the weights are unpacked from `source` first. */
INLINE void multiply_part(const int unpack, Part *p, Source *source, char *weights, Tiles *t, const Epilogue *ep,
                          Finishing *before)
{
    const char *rows = p->rows, *now = weights;
    for (ptrdiff_t step = unpack ? -LEAD : 0; step < p->steps; step++) {
        if (unpack && step + LEAD < p->steps) read_steps(source, 1, weights + (step + LEAD) * PANEL_STEP);
        if (step < 0) continue;
        tiles_step_bf16(t, rows, now);
        rows += p->stride, now += PANEL_STEP;
        for (ptrdiff_t line = 0; line < p->lines; line++, p->later += 64) prefetch(p->later, 1);
        if (before->next < before->rows) finish_rows(ep, before, 2);
    }
    finish_rows(ep, before, TALL_ROWS);
}

/* Multiply all rows by the panels [first, first + count). `weights` is a buffer for one part of each panel,
 * `partial_sums` for their sums. */
static void multiply_many(const Blocks *x, const Epilogue *ep, ptrdiff_t first, ptrdiff_t count, char *weights,
                          float (*partial_sums)[TALL_ROWS][PANEL], Tiles *t)
{
    Source sources[PANEL_GROUP];
    Finishing before = {.rows = 0};
    ptrdiff_t blocks = block_count(x), parts = ceil_div(x->steps, PART);
    for (ptrdiff_t i = 0; i < count; i++) sources[i] = open_panel(ep->m, first + i);
    for (ptrdiff_t part = 0; part < parts; part++) {
        ptrdiff_t step = x->steps * part / parts, steps = x->steps * (part + 1) / parts - step;
        for (ptrdiff_t block = 0; block < blocks; block++) {
            ptrdiff_t row = block_start(x, block);
            int rows = block_rows(x, block);
            if (rows != t->rows) *t = tiles_open(rows);
            Part p = {block_step(x, block, step), NULL, steps, rows * STEP_BYTES, 0};
            if (block + 1 < blocks) {
                p.later = block_step(x, block + 1, step);
                p.lines = ceil_div(block_rows(x, block + 1), count);
            }
            for (ptrdiff_t i = 0; i < count; i++) {
                float (*later)[PANEL] = partial_sums[block * PANEL_GROUP + i];
                char *panel = weights + i * steps * PANEL_STEP;
                if (part) tiles_load(t, later);
                else tiles_zero(t);
                if (block) multiply_part(0, &p, sources + i, panel, t, ep, &before);
                else multiply_part(1, &p, sources + i, panel, t, ep, &before);
                if (part + 1 < parts) {
                    tiles_store(t, later, sizeof later[0]);
                    continue;
                }
                tiles_store(t, before.sums, sizeof before.sums[0]);
                before.row = row, before.panel = first + i;
                before.next = 0, before.rows = x->rows - row < rows ? x->rows - row : rows;
            }
        }
    }
    finish_rows(ep, &before, TALL_ROWS);
}

/* Number of tasks: each fits in L2, and all threads get equally many. */
static ptrdiff_t task_count(ptrdiff_t panels, int threads)
{
    ptrdiff_t tasks = ceil_div(ceil_div(panels, PANEL_GROUP), threads) * threads;
    return tasks < panels ? tasks : panels;
}

static ptrdiff_t blocks_size(ptrdiff_t rows, ptrdiff_t steps) { return round_up(rows, TILE) * steps * STEP_BYTES; }

/* Size of the weights of a task. */
static ptrdiff_t weights_size(ptrdiff_t steps) { return PANEL_GROUP * (steps < PART ? steps : PART) * PANEL_STEP; }

/* Size of its weights and partial sums. */
static ptrdiff_t task_size(ptrdiff_t rows, ptrdiff_t steps)
{
    if (rows <= TALL_ROWS) return 0;
    Blocks x = {.rows = rows, .tall = tall_blocks(rows)};
    ptrdiff_t partial_sums = block_count(&x) * PANEL_GROUP * TALL_ROWS * PANEL * sizeof(float);
    return weights_size(steps) + (steps > PART ? partial_sums : 0);
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

static void linear_bf16(const bf16 *x, ptrdiff_t stride, ptrdiff_t rows, const Epilogue *ep, char *workspace,
                        int threads)
{
    ptrdiff_t inputs = ep->m->inputs, panels = ceil_div(ep->m->outputs, PANEL), tasks = task_count(panels, threads);
    Blocks packed = {aligned(workspace), rows, ceil_div(inputs, STEP_INPUTS), tall_blocks(rows)};
    ptrdiff_t padded = packed.tall * TALL_ROWS > rows ? packed.tall * TALL_ROWS : rows;
    char *rest = packed.bytes + blocks_size(rows, packed.steps);
    if (rows == 1) {
        linear_one(x, ep, (float *)packed.bytes, threads);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < padded; row++) pack_row(&packed, row, x + row * stride, inputs);
        if (rows > TALL_ROWS) {
            char *weights = rest + omp_get_thread_num() * task_size(rows, packed.steps);
            char *partial_sums = weights + weights_size(packed.steps);
            Tiles t = tiles_open(block_rows(&packed, 0));
#pragma omp for schedule(dynamic, 1) nowait
            for (ptrdiff_t task = 0; task < tasks; task++) {
                ptrdiff_t first = panels * task / tasks, count = panels * (task + 1) / tasks - first;
                multiply_many(&packed, ep, first, count, weights, (float (*)[TALL_ROWS][PANEL])partial_sums, &t);
            }
            tiles_close();
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
            _Alignas(64) float sums[TALL_ROWS][PANEL];
            Tiles t = tiles_open(block_rows(&packed, 0));
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
