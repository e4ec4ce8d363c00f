/* A chunk of a gated delta net, see delta_net.h and `_mix_chunk` in kernels/delta_net.py. */
#pragma once

#include "delta_inputs.h"

typedef struct { /* what a thread needs for a head; padded columns are zeros or not used */
    Panels q, k, v, mixed, state;
    float *keys;          /* [key_dim, DELTA_CHUNK], transposed */
    float *scores;        /* [DELTA_CHUNK, DELTA_CHUNK]: of queries and keys, with the decay */
    float *between;       /* the same: minus the effect of an update on later ones */
    float *update, *sums; /* [value_dim], of a single token */
    float beta[DELTA_CHUNK], total[DELTA_CHUNK];
} DeltaScratch;

static float *take(char **workspace, ptrdiff_t count)
{
    float *part = (float *)*workspace;
    *workspace += count * sizeof *part;
    return part;
}

static ptrdiff_t lay_out_scratch(DeltaScratch *s, ptrdiff_t key_dim, ptrdiff_t value_dim, char *workspace)
{
    ptrdiff_t keys = round_up(key_dim, LANES), values = round_up(value_dim, DELTA_COLUMNS);
    char *start = workspace;
    s->q = (Panels){take(&workspace, DELTA_CHUNK * keys), keys, DELTA_COLUMNS};
    s->k = (Panels){take(&workspace, DELTA_CHUNK * keys), keys, DELTA_COLUMNS};
    s->v = (Panels){take(&workspace, DELTA_CHUNK * values), DELTA_COLUMNS, DELTA_CHUNK * DELTA_COLUMNS};
    s->mixed = (Panels){take(&workspace, DELTA_CHUNK * values), DELTA_COLUMNS, DELTA_CHUNK * DELTA_COLUMNS};
    s->state = (Panels){take(&workspace, keys * values), DELTA_COLUMNS, keys * DELTA_COLUMNS};
    s->keys = take(&workspace, keys * DELTA_CHUNK);
    s->scores = take(&workspace, DELTA_CHUNK * DELTA_CHUNK);
    s->between = take(&workspace, DELTA_CHUNK * DELTA_CHUNK);
    s->update = take(&workspace, values);
    s->sums = take(&workspace, values);
    return workspace - start;
}

/* The maximum number of tokens of a chunk. */
int64_t delta_chunk_size(void) { return DELTA_CHUNK; }

/* Workspace size of `mix_delta_net` in bytes for each thread. */
int64_t delta_workspace_size(int64_t key_dim, int64_t value_dim)
{
    DeltaScratch s;
    return lay_out_scratch(&s, key_dim, value_dim, NULL);
}

typedef struct { /* c = c_scale * c + a b, for DELTA_COLUMNS columns; a c_scale of 0 sets c */
    float *c;
    const float *a, *b;
    ptrdiff_t c_row, a_row, b_row, depth;
    float c_scale;
} DeltaProduct;

INLINE void product_rows(const int rows, const DeltaProduct *p, ptrdiff_t first_row)
{
    Floats acc[DELTA_ROWS][DELTA_VECTORS], b[DELTA_VECTORS];
    const float *a = p->a + first_row * p->a_row;
    float *c = p->c + first_row * p->c_row;
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int n = 0; n < DELTA_VECTORS; n++)
            acc[m][n] = p->c_scale ? times(get(c + m * p->c_row + n * LANES, LANES), splat(p->c_scale)) : splat(0);
    for (ptrdiff_t k = 0; k < p->depth; k++) {
        UNROLL_FOR (int n = 0; n < DELTA_VECTORS; n++) b[n] = get(p->b + k * p->b_row + n * LANES, LANES);
        UNROLL_FOR (int m = 0; m < rows; m++) {
            Floats x = splat(a[m * p->a_row + k]);
            UNROLL_FOR (int n = 0; n < DELTA_VECTORS; n++) acc[m][n] = multiply_add(x, b[n], acc[m][n]);
        }
    }
    UNROLL_FOR (int m = 0; m < rows; m++)
        UNROLL_FOR (int n = 0; n < DELTA_VECTORS; n++) put(c + m * p->c_row + n * LANES, LANES, acc[m][n]);
}

/* Up to DELTA_ROWS rows. */
static void product_tile(const DeltaProduct *p, ptrdiff_t first_row, ptrdiff_t rows)
{
    switch (rows) {
    case 1:
        product_rows(1, p, first_row);
        break;
    case 2:
        product_rows(2, p, first_row);
        break;
    case 3:
        product_rows(3, p, first_row);
        break;
    case 4:
        product_rows(4, p, first_row);
        break;
    case 5:
        product_rows(5, p, first_row);
        break;
    default:
        product_rows(DELTA_ROWS, p, first_row);
    }
}

static void delta_product(const DeltaProduct *p, ptrdiff_t rows)
{
    for (ptrdiff_t row = 0; row < rows; row += DELTA_ROWS)
        product_tile(p, row, rows - row < DELTA_ROWS ? rows - row : DELTA_ROWS);
}

static void scale_panels(const Panels *x, ptrdiff_t row, ptrdiff_t width, float scale)
{
    for (ptrdiff_t c = 0; c < width; c += LANES)
        put(panel_at(x, row, c), LANES, get(panel_at(x, row, c), LANES) * splat(scale));
}

/* Compute queries, keys and values of `count` tokens, and their gates; `total` has the sums of the decay's logarithm.
 */
static void compute_inputs(const DeltaHead *h, ptrdiff_t token, ptrdiff_t count, DeltaScratch *s)
{
    const DeltaArgs *a = h->a;
    const bf16 *inputs[count + a->taps - 1];
    float total = 0;
    for (ptrdiff_t i = 0; i < count + a->taps - 1; i++) inputs[i] = conv_input(h, token + i - (a->taps - 1));
    convolve(h, inputs, count, query_channel(h), a->key_dim, 0, &s->q);
    convolve(h, inputs, count, key_channel(h), a->key_dim, 0, &s->k);
    convolve(h, inputs, count, value_channel(h), a->value_dim, round_up(a->value_dim, DELTA_COLUMNS), &s->v);
    normalize(s->q.data, s->q.row, count, a->key_dim, 1 / __builtin_sqrtf(a->key_dim));
    normalize(s->k.data, s->k.row, count, a->key_dim, 1);
    for (ptrdiff_t i = 0; i < count; i++) {
        float decay;
        delta_gates(h, token + i, s->beta + i, &decay);
        s->total[i] = total += decay;
    }
}

/* Transpose keys to `s->keys`; rows up to a multiple of LANES are set to zeros. */
static void transpose_keys(const DeltaScratch *s, ptrdiff_t count, ptrdiff_t key_dim)
{
    for (ptrdiff_t token = 0; token < count; token += LANES)
        for (ptrdiff_t c = 0; c < key_dim; c += LANES) {
            Floats block[LANES];
            UNROLL_FOR (int i = 0; i < LANES; i++)
                block[i] = token + i < count ? get(s->k.data + (token + i) * s->k.row + c, LANES) : splat(0);
            transpose_floats(block);
            UNROLL_FOR (int i = 0; i < LANES; i++) put(s->keys + (c + i) * DELTA_CHUNK + token, LANES, block[i]);
        }
}

/* Compute the products of queries and keys, and of keys, up to each token, with the decay in between. */
static void compute_scores(const DeltaScratch *s, ptrdiff_t count, ptrdiff_t key_dim)
{
    for (ptrdiff_t c = 0; c < count; c += DELTA_COLUMNS) {
        ptrdiff_t skipped = c / DELTA_ROWS * DELTA_ROWS, row = skipped * DELTA_CHUNK + c; /* rows before the columns */
        DeltaProduct p = {s->scores + row, s->q.data + skipped * s->q.row,
                          s->keys + c,     DELTA_CHUNK,
                          s->q.row,        DELTA_CHUNK,
                          key_dim,         0};
        delta_product(&p, count - skipped);
        p.c = s->between + row;
        p.a = s->k.data + skipped * s->k.row;
        delta_product(&p, count - skipped);
    }
    for (ptrdiff_t i = 0; i < count; i++) {
        ptrdiff_t stop = i - i % DELTA_ROWS + DELTA_ROWS; /* the outputs of a tile of rows have sums up to here */
        for (ptrdiff_t j = 0; j < stop && j < DELTA_CHUNK; j += LANES) {
            float *score = s->scores + i * DELTA_CHUNK + j, *between = s->between + i * DELTA_CHUNK + j;
            Floats decay = exponential(splat(s->total[i]) - get(s->total + j, LANES));
            put(score, LANES, first_lanes(get(score, LANES) * decay, i + 1 - j));
            put(between, LANES, first_lanes(get(between, LANES) * decay * splat(-s->beta[i]), i - j));
        }
    }
}

/* Solve for the updates of a panel in place: each value has the effect of earlier ones subtracted. */
static void solve_updates(const DeltaScratch *s, float *updates, ptrdiff_t count)
{
    DeltaProduct p = {updates, s->between, updates, DELTA_COLUMNS, DELTA_CHUNK, DELTA_COLUMNS, 0, 1};
    for (ptrdiff_t first = 0; first < count; first += DELTA_ROWS) {
        ptrdiff_t stop = first + DELTA_ROWS < count ? first + DELTA_ROWS : count;
        p.depth = first;
        product_tile(&p, first, stop - first);
        for (ptrdiff_t i = first + 1; i < stop; i++)
            for (ptrdiff_t c = 0; c < DELTA_COLUMNS; c += LANES) {
                Floats x = get(updates + i * DELTA_COLUMNS + c, LANES);
                for (ptrdiff_t j = first; j < i; j++)
                    x = multiply_add(splat(s->between[i * DELTA_CHUNK + j]),
                                     get(updates + j * DELTA_COLUMNS + c, LANES), x);
                put(updates + i * DELTA_COLUMNS + c, LANES, x);
            }
    }
}

/* Compute a panel of outputs and of the state from queries, keys and values that are scaled by `compute_chunk`. */
static void compute_panel(const DeltaScratch *s, ptrdiff_t column, ptrdiff_t count, ptrdiff_t key_dim)
{
    float *state = panel_at(&s->state, 0, column), *updates = panel_at(&s->v, 0, column),
          *mixed = panel_at(&s->mixed, 0, column);
    float last = s->total[count - 1];
    DeltaProduct p = {updates, s->k.data, state, DELTA_COLUMNS, s->k.row, DELTA_COLUMNS, key_dim, 1};
    delta_product(&p, count);
    solve_updates(s, updates, count);
    p = (DeltaProduct){mixed, s->q.data, state, DELTA_COLUMNS, s->q.row, DELTA_COLUMNS, key_dim, 0};
    delta_product(&p, count);
    p = (DeltaProduct){mixed, s->scores, updates, DELTA_COLUMNS, DELTA_CHUNK, DELTA_COLUMNS, 0, 1};
    for (ptrdiff_t first = 0; first < count; first += DELTA_ROWS) {
        ptrdiff_t rows = count - first < DELTA_ROWS ? count - first : DELTA_ROWS;
        p.depth = first + rows;
        product_tile(&p, first, rows);
    }
    Panels all = {updates, DELTA_COLUMNS, DELTA_COLUMNS};
    for (ptrdiff_t i = 0; i < count; i++) scale_panels(&all, i, DELTA_COLUMNS, expf(last - s->total[i]));
    p = (DeltaProduct){state, s->keys, updates, DELTA_COLUMNS, DELTA_CHUNK, DELTA_COLUMNS, count, expf(last)};
    delta_product(&p, key_dim);
}

/* Compute a chunk, and the state after it. */
static void compute_chunk(const DeltaHead *h, ptrdiff_t token, ptrdiff_t count, DeltaScratch *s)
{
    const DeltaArgs *a = h->a;
    compute_inputs(h, token, count, s);
    transpose_keys(s, count, a->key_dim);
    compute_scores(s, count, a->key_dim);
    for (ptrdiff_t i = 0; i < count; i++) {
        float since_start = expf(s->total[i]);
        scale_panels(&s->q, i, a->key_dim, since_start);
        scale_panels(&s->k, i, a->key_dim, -s->beta[i] * since_start);
        scale_panels(&s->v, i, a->value_dim, s->beta[i]);
    }
    for (ptrdiff_t c = 0; c < a->value_dim; c += DELTA_COLUMNS) compute_panel(s, c, count, a->key_dim);
    for (ptrdiff_t i = 0; i < count; i++) put_output(h, token + i, &s->mixed, i);
}
