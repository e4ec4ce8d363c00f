/* Gated delta nets, with the formulas of kernels/delta_net.py in float. Sums run in one fixed order, and a task
 * computes one head of one sequence: a sequence's result is bit-exact in any batch, and that of a prompt also in any
 * steps that end with its chunks. */
#pragma once

#include "delta_chunk.h"

/* sums += rows^T x */
INLINE void add_rows(const int rows, const float *state, const float *x, ptrdiff_t width, float *sums)
{
    for (ptrdiff_t c = 0; c < width; c += LANES) {
        Floats total = get(sums + c, LANES);
        UNROLL_FOR (int i = 0; i < rows; i++)
            total = multiply_add(splat(x[i]), get(state + i * width + c, width - c), total);
        put(sums + c, LANES, total);
    }
}

typedef struct { /* a token's change of a state */
    const float *q, *k, *update;
    float *mixed; /* the sums of the products of queries and state */
    float decay;
    ptrdiff_t width;
    const float *next; /* the state of the next head, which is prefetched, or null */
    int streamed;      /* whether the new state is written past the caches */
} StateChange;

/* Compute rows of the new state from those of the old one; null for zeros. */
INLINE void change_rows(const int rows, const StateChange *t, ptrdiff_t row, const float *from, float *to)
{
    for (ptrdiff_t c = 0; c < t->width; c += LANES) {
        Floats update = get(t->update + c, LANES), mixed = get(t->mixed + c, LANES);
        UNROLL_FOR (int i = 0; i < rows; i++) {
            ptrdiff_t place = (row + i) * t->width + c;
            Floats x = from ? times(get(from + place, t->width - c), splat(t->decay)) : splat(0);
            x = multiply_add(splat(t->k[row + i]), update, x);
            if (t->next) _mm_prefetch((const char *)(t->next + place), _MM_HINT_T1);
            if (t->streamed) stream(to + place, x);
            else put(to + place, t->width - c, x);
            mixed = multiply_add(splat(t->q[row + i]), x, mixed);
        }
        put(t->mixed + c, LANES, mixed);
    }
}

/* Whether the state is read no more in this step, and its vectors are aligned: 10 to 30 % less time, since the old
 * content of its memory is not read. */
static int is_streamed(const DeltaHead *h, ptrdiff_t token, const float *to)
{
    size_t size = LANES * sizeof *to;
    return token + 1 == h->span->num_tokens && h->a->value_dim % LANES == 0 && (uintptr_t)to % size == 0;
}

/* Compute a token, and the state after it in `to`, which may be `from`; a `from` of null has zeros. */
static void compute_token(const DeltaHead *h, ptrdiff_t token, const float *from, float *to, DeltaScratch *s)
{
    ptrdiff_t rows = h->a->key_dim, width = h->a->value_dim, row, whole = rows / STATE_ROWS * STATE_ROWS;
    compute_inputs(h, token, 1, s);
    float *update = s->update, *mixed = s->sums, decay = expf(s->total[0]);
    memset(update, 0, round_up(width, LANES) * sizeof *update);
    memset(mixed, 0, round_up(width, LANES) * sizeof *mixed);
    if (from) {
        for (row = 0; row < whole; row += STATE_ROWS)
            add_rows(STATE_ROWS, from + row * width, s->k.data + row, width, update);
        for (; row < rows; row++) add_rows(1, from + row * width, s->k.data + row, width, update);
    }
    for (ptrdiff_t c = 0; c < width; c += LANES) {
        Floats v = multiply_add(get(update + c, LANES), splat(-decay), get(panel_at(&s->v, 0, c), LANES));
        put(update + c, LANES, v * splat(s->beta[0]));
    }
    const float *next = from && from != to && h->head + 1 < h->a->value_heads ? from + rows * width : NULL;
    StateChange change = {s->q.data, s->k.data, update, mixed, decay, width, next, is_streamed(h, token, to)};
    for (row = 0; row < whole; row += STATE_ROWS) change_rows(STATE_ROWS, &change, row, from, to);
    for (; row < rows; row++) change_rows(1, &change, row, from, to);
    if (change.streamed) _mm_sfence();
    Panels one_row = {mixed, 0, DELTA_COLUMNS};
    put_output(h, token, &one_row, 0);
}

static float *state_slot(const DeltaHead *h, ptrdiff_t slot)
{
    return h->a->states + (slot * h->a->value_heads + h->head) * h->a->key_dim * h->a->value_dim;
}

/* Copy a state to panels; null for zeros. Columns after the last one are zeros. */
static void unpack_state(const DeltaHead *h, const float *from, const Panels *to)
{
    ptrdiff_t width = h->a->value_dim;
    for (ptrdiff_t row = 0; row < h->a->key_dim; row++)
        for (ptrdiff_t c = 0; c < round_up(width, DELTA_COLUMNS); c += LANES)
            put(panel_at(to, row, c), LANES, from ? get(from + row * width + c, width - c) : splat(0));
}

/* Write the state after so many tokens of the span to a slot, from panels. */
static void save_state(const DeltaHead *h, ptrdiff_t num_tokens, ptrdiff_t slot, const Panels *from)
{
    ptrdiff_t width = h->a->value_dim;
    float *to = state_slot(h, slot);
    for (ptrdiff_t row = 0; row < h->a->key_dim; row++)
        for (ptrdiff_t c = 0; c < width; c += LANES)
            put(to + row * width + c, width - c, get(panel_at(from, row, c), LANES));
    save_conv_state(h, num_tokens, slot);
}

/* Compute the chunks of a span, and save states after them; returns the number of their tokens. */
static ptrdiff_t compute_chunks(const DeltaHead *h, const int64_t *lists, const float *from, DeltaScratch *s)
{
    const StateSpan *span = h->span;
    ptrdiff_t token = 0;
    unpack_state(h, from, &s->state);
    for (ptrdiff_t i = 0; i < span->num_chunks; i++) {
        ptrdiff_t count = lists[span->first_chunk + i];
        compute_chunk(h, token, count, s);
        token += count;
        for (const int64_t *saved = lists + span->first_saved; saved < lists + span->first_saved + 2 * span->num_saved;
             saved += 2)
            if (saved[0] == token) save_state(h, token, saved[1], &s->state);
    }
    save_state(h, token, span->target, &s->state);
    return token;
}

static void compute_head(const DeltaHead *h, const int64_t *lists, DeltaScratch *s)
{
    const float *from = h->span->source < 0 ? NULL : state_slot(h, h->span->source);
    float *to = state_slot(h, h->span->target);
    ptrdiff_t token = 0;
    if (h->span->num_chunks) {
        token = compute_chunks(h, lists, from, s);
        from = to;
    }
    for (; token < h->span->num_tokens; token++, from = to) compute_token(h, token, from, to, s);
    save_conv_state(h, token, h->span->target);
}

/* The number of consecutive heads of a task: chunks take long, and single tokens prefetch the next head's state (a
 * quarter less time). */
static ptrdiff_t heads_per_task(const StateSpan *spans, ptrdiff_t count, ptrdiff_t heads, int threads)
{
    ptrdiff_t most = count * heads / (2 * threads);
    for (ptrdiff_t i = 0; i < count; i++)
        if (spans[i].num_chunks) return 1;
    return most > 4 ? 4 : most > 1 ? most : 1;
}

/* Compute the outputs of a gated delta net, normalized and multiplied by their gates, and write the new states. `lists`
 * follows the spans, and `workspace` has `delta_workspace_size` bytes for each thread. */
void mix_delta_net(const DeltaArgs *a, const StateSpan *spans, int64_t count, const int64_t *lists, char *workspace,
                   int32_t threads)
{
    ptrdiff_t size = delta_workspace_size(a->key_dim, a->value_dim);
    ptrdiff_t channels = 2 * a->key_heads * a->key_dim + a->value_heads * a->value_dim;
    ptrdiff_t heads = heads_per_task(spans, count, a->value_heads, threads);
#pragma omp parallel for schedule(dynamic, heads) num_threads(threads)
    for (ptrdiff_t task = 0; task < count * a->value_heads; task++) {
        DeltaScratch s;
        DeltaHead h = {a, spans + task / a->value_heads, task % a->value_heads, channels};
        lay_out_scratch(&s, a->key_dim, a->value_dim, workspace + omp_get_thread_num() * size);
        compute_head(&h, lists, &s);
    }
}
