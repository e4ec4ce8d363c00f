/* The inputs of a head of a gated delta net: convolution, norms of queries and keys, and gates. */
#pragma once

#include "floats.h"

enum { DELTA_CHUNK = 64, DELTA_COLUMNS = DELTA_VECTORS * LANES };

typedef struct {        /* a gated delta net, its inputs and its states, see kernels/types/recurrent.py */
    const bf16 *rows;   /* [tokens, row_stride]: queries, keys, values, and the gates of the output */
    const float *gates; /* [tokens, 2 * value_heads]: beta and step of each head */
    bf16 *out;          /* [tokens, value_heads * value_dim] */
    bf16 *conv_states;  /* [slots, taps - 1, channels] */
    float *states;      /* [slots, value_heads, key_dim, value_dim] */
    const float *conv, *rate, *step_bias, *norm;
    int64_t row_stride, key_heads, value_heads, key_dim, value_dim, taps;
    float eps;
} DeltaArgs;

typedef struct { /* see `StateSpan` in kernels/types/recurrent.py */
    int64_t first_token, num_tokens, source, target;
    int64_t first_chunk, num_chunks; /* in the list that follows the spans */
    int64_t first_saved, num_saved;  /* pairs in this list */
} StateSpan;

typedef struct { /* a value head of a sequence */
    const DeltaArgs *a;
    const StateSpan *span;
    ptrdiff_t head, channels;
} DeltaHead;

/* Rows in panels of DELTA_COLUMNS columns; a panel stride of DELTA_COLUMNS makes them ordinary rows. */
typedef struct {
    float *data;
    ptrdiff_t row, panel;
} Panels;

INLINE float *panel_at(const Panels *p, ptrdiff_t row, ptrdiff_t column)
{
    return p->data + column / DELTA_COLUMNS * p->panel + row * p->row + column % DELTA_COLUMNS;
}

/* The channel of the first query, key or value of a head. */
INLINE ptrdiff_t query_channel(const DeltaHead *h)
{
    return h->head / (h->a->value_heads / h->a->key_heads) * h->a->key_dim;
}

INLINE ptrdiff_t key_channel(const DeltaHead *h) { return h->a->key_heads * h->a->key_dim + query_channel(h); }

INLINE ptrdiff_t value_channel(const DeltaHead *h)
{
    return 2 * h->a->key_heads * h->a->key_dim + h->head * h->a->value_dim;
}

/* The inputs of the convolution at a position in a span, which is negative before it; null for zeros. */
static const bf16 *conv_input(const DeltaHead *h, ptrdiff_t position)
{
    ptrdiff_t kept = h->a->taps - 1;
    if (position >= 0) return h->a->rows + (h->span->first_token + position) * h->a->row_stride;
    return h->span->source < 0 ? NULL : h->a->conv_states + (h->span->source * kept + kept + position) * h->channels;
}

/* Apply the convolution and SiLU for `count` tokens of `inputs`, which begin before the first of them. Whole vectors
 * after the last channel, up to `padded` columns, are set to zeros. */
static void convolve(const DeltaHead *h, const bf16 *const *inputs, ptrdiff_t count, ptrdiff_t channel, ptrdiff_t width,
                     ptrdiff_t padded, const Panels *out)
{
    ptrdiff_t c = 0;
    for (; c < width; c += LANES)
        for (ptrdiff_t token = 0; token < count; token++) {
            const float *weights = h->a->conv + channel + c;
            Floats x = splat(0);
            for (ptrdiff_t tap = 0; tap < h->a->taps; tap++, weights += h->channels) {
                const bf16 *row = inputs[token + tap];
                if (row) x = multiply_add(get_bf16(row + channel + c, width - c), get(weights, width - c), x);
            }
            put(panel_at(out, token, c), LANES, swish(x, 1));
        }
    for (; c < padded; c += LANES)
        for (ptrdiff_t token = 0; token < count; token++) put(panel_at(out, token, c), LANES, splat(0));
}

/* Divide rows by their lengths, like `_heads` in kernels/delta_net.py, and multiply them by `scale`. */
static void normalize(float *x, ptrdiff_t stride, ptrdiff_t count, ptrdiff_t width, float scale)
{
    for (ptrdiff_t token = 0; token < count; token++, x += stride) {
        Floats square = splat(0);
        for (ptrdiff_t c = 0; c < width; c += LANES)
            square = multiply_add(get(x + c, LANES), get(x + c, LANES), square);
        Floats factor = splat(scale / __builtin_sqrtf(sum(square) + 1e-6f));
        for (ptrdiff_t c = 0; c < width; c += LANES) put(x + c, LANES, get(x + c, LANES) * factor);
    }
}

/* Compute the strength of the update by a token, and the logarithm of the decay before it. */
INLINE void delta_gates(const DeltaHead *h, ptrdiff_t token, float *beta, float *decay)
{
    const float *gates = h->a->gates + (h->span->first_token + token) * 2 * h->a->value_heads + h->head;
    float step = gates[h->a->value_heads] + h->a->step_bias[h->head];
    *beta = 1 / (1 + expf(-gates[0]));
    *decay = h->a->rate[h->head] * (step > 20 ? step : log1pf(expf(step)));
}

/* Normalize a token's output, multiply it by SiLU of its gate, and write it. */
static void put_output(const DeltaHead *h, ptrdiff_t token, const Panels *mixed, ptrdiff_t row)
{
    ptrdiff_t width = h->a->value_dim, number = h->span->first_token + token;
    const bf16 *gate = h->a->rows + number * h->a->row_stride + h->channels + h->head * width;
    bf16 *out = h->a->out + (number * h->a->value_heads + h->head) * width;
    Floats square = splat(0);
    for (ptrdiff_t c = 0; c < width; c += LANES) {
        Floats x = first_lanes(get(panel_at(mixed, row, c), LANES), width - c);
        square = multiply_add(x, x, square);
    }
    Floats scale = splat(1 / __builtin_sqrtf(sum(square) / width + h->a->eps));
    for (ptrdiff_t c = 0; c < width; c += LANES) {
        Floats x = get(panel_at(mixed, row, c), LANES) * scale * get(h->a->norm + c, width - c);
        put_bf16(out + c, width - c, x * swish(get_bf16(gate + c, width - c), 1));
    }
}

/* Copy the inputs of the convolution before a position to a slot; those of queries and keys with one of their value
 * heads. */
static void save_conv_state(const DeltaHead *h, ptrdiff_t position, ptrdiff_t slot)
{
    ptrdiff_t kept = h->a->taps - 1;
    ptrdiff_t starts[] = {value_channel(h), query_channel(h), key_channel(h)};
    ptrdiff_t widths[] = {h->a->value_dim, h->a->key_dim, h->a->key_dim};
    int parts = h->head % (h->a->value_heads / h->a->key_heads) ? 1 : 3;
    for (ptrdiff_t i = 0; i < kept; i++) {
        const bf16 *from = conv_input(h, position - kept + i);
        bf16 *to = h->a->conv_states + (slot * kept + i) * h->channels;
        for (int part = 0; part < parts; part++) {
            size_t size = widths[part] * sizeof *to;
            if (from) memcpy(to + starts[part], from + starts[part], size);
            else memset(to + starts[part], 0, size);
        }
    }
}
