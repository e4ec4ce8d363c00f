/* 4-bit weights with integer steps: their layout and quantization, in portable C.
 *
 * A weight is (code - zero) * step * scale, with a code, a zero point of 0 to 15 and a step of 1 to 15. STEP_GROUP
 * inputs of an output share the zero point and the step, and all of them the scale. Every (code - zero) * step is an
 * integer of -127 to 127: a matrix is one of 8 bits (see int8.h) that takes 4.5 bits per weight, with the same results
 * to the bit. The idea is that of QServe's progressive group quantization (arXiv:2405.04532), with smaller groups.
 *
 * Weights are packed into panels of 32 columns, and a panel into blocks of 128 inputs, the last one padded. A block is
 *
 *   groups  [8][32] bytes: the lower four bits are the step, the upper four the zero point
 *   codes   as in int4.h
 */
#pragma once

#include "int4.h"

enum { STEP_GROUP = 16, STEP_GROUPS = QUANT_BLOCK / STEP_GROUP, MAX_CODE = 15, MAX_STEP = 15 };
enum { GROUPS_BYTES = STEP_GROUPS * PANEL, PROGRESSIVE_BLOCK = GROUPS_BYTES + CODES_BYTES };
/* avx2_int4.h multiplies the sum of a group as a number of 16 bits. */
_Static_assert(STEP_GROUP * MAX_CODE * 128 <= INT16_MAX, "STEP_GROUP");

INLINE int is_progressive(int32_t group) { return group == STEP_GROUP; }

/* Size of a packed panel in bytes, of these weights or of those with 8 bits. */
INLINE ptrdiff_t panel_size(int32_t group, ptrdiff_t inputs)
{
    return is_progressive(group) ? int4_blocks(inputs) * PROGRESSIVE_BLOCK : inputs * PANEL;
}

/* Size of packed weights in bytes. */
int64_t progressive_size(int64_t outputs, int64_t inputs)
{
    return ceil_div(outputs, PANEL) * panel_size(STEP_GROUP, inputs);
}

typedef struct {
    float x[STEP_GROUP], low, high; /* the range includes zero */
} StepGroup;

/* The group of `count` weights from `from` on, padded with zeros. */
INLINE StepGroup read_step_group(const bf16 *from, ptrdiff_t count)
{
    StepGroup g = {0};
    for (ptrdiff_t k = 0; k < count; k++) {
        uint32_t bits = (uint32_t)from[k] << 16;
        memcpy(g.x + k, &bits, sizeof bits);
        g.low = g.x[k] < g.low ? g.x[k] : g.low;
        g.high = g.x[k] > g.high ? g.x[k] : g.high;
    }
    return g;
}

INLINE int32_t zero_point(float nearest) { return nearest > 0 ? nearest < MAX_CODE ? nearest : MAX_CODE : 0; }

/* The largest step with which no integer is beyond 127. */
INLINE int32_t max_step(int32_t zero) { return 127 / (zero > MAX_CODE - zero ? zero : MAX_CODE - zero); }

typedef struct {
    int32_t step, zero;
    float inverse; /* of the distance of two codes */
    float gain;    /* how much smaller the squared error is than that of zeros */
} Steps;

/* A weight as a number of steps, which is its code minus the zero point. Limits are applied to integers, which the
 * compiler vectorizes. */
INLINE int32_t steps_of(float x, const Steps *s)
{
    int32_t steps = (int32_t)__builtin_rintf(x * s->inverse);
    steps = steps > -s->zero ? steps : -s->zero;
    return steps < MAX_CODE - s->zero ? steps : MAX_CODE - s->zero;
}

/* Fit codes to a range from `low` on. */
INLINE Steps fit_steps(const StepGroup *g, float low, float unit, int32_t step)
{
    Steps s = {.zero = zero_point(__builtin_rintf(-low * inverse_of(step * unit)))};
    s.step = step < max_step(s.zero) ? step : max_step(s.zero);
    float distance = s.step * unit, gains[STEP_GROUP];
    s.inverse = inverse_of(distance);
    for (int k = 0; k < STEP_GROUP; k++) {
        float rounded = distance * steps_of(g->x[k], &s);
        /* As a product that no compiler adds to another one with a single rounding: all instruction sets choose the
         * same steps. */
        gains[k] = __builtin_fmaf(rounded, 2 * g->x[k] - rounded, 0);
    }
    for (int width = STEP_GROUP / 2; width; width /= 2)
        for (int k = 0; k < width; k++) gains[k] += gains[k + width];
    s.gain = gains[0];
    return s;
}

/* The best of the steps next to the range, or next to nine tenths of it: clipping a few outliers makes the distance of
 * all other codes smaller. */
INLINE Steps best_steps(const StepGroup *g, float unit)
{
    static const float shares[] = {1.0f, 0.9f};
    Steps best = {.gain = -INFINITY};
    for (int i = 0; i < 2; i++)
        for (int more = 0; more < 2; more++) {
            float step = __builtin_floorf((g->high - g->low) / MAX_CODE * shares[i] * inverse_of(unit)) + more;
            Steps s = fit_steps(g, g->low * shares[i], unit, step > 1 ? step < MAX_STEP ? step : MAX_STEP : 1);
            if (s.gain > best.gain) best = s;
        }
    return best;
}

/* The unit of an output's steps: its ranges are at most the largest steps. */
INLINE float step_unit(const bf16 *row, ptrdiff_t inputs)
{
    float unit = 0;
    for (ptrdiff_t k = 0; k < inputs; k += STEP_GROUP) {
        StepGroup g = read_step_group(row + k, inputs - k < STEP_GROUP ? inputs - k : STEP_GROUP);
        float distance = (g.high - g.low) / MAX_CODE;
        float largest = distance / max_step(zero_point(__builtin_rintf(-g.low * inverse_of(distance))));
        unit = largest > unit ? largest : unit;
    }
    return unit;
}

/* Quantize an output into column `j` of a panel, which is zero before; returns its scale, which is fitted to the
 * integers by least squares. */
INLINE float pack_steps(const bf16 *row, ptrdiff_t inputs, uint8_t *panel, int j)
{
    float unit = step_unit(row, inputs), products = 0, squares = 0;
    for (ptrdiff_t k = 0; k < inputs; k += STEP_GROUP) {
        StepGroup g = read_step_group(row + k, inputs - k < STEP_GROUP ? inputs - k : STEP_GROUP);
        Steps s = best_steps(&g, unit);
        uint8_t *block = panel + k / QUANT_BLOCK * PROGRESSIVE_BLOCK;
        uint8_t *codes = block + GROUPS_BYTES + k % QUANT_BLOCK / 4 * QUAD_BYTES + 4 * (j % HALF_PANEL);
        block[k % QUANT_BLOCK / STEP_GROUP * PANEL + j] = s.step | s.zero << 4;
        for (int i = 0; i < STEP_GROUP; i++) {
            int32_t steps = steps_of(g.x[i], &s);
            float integer = steps * s.step;
            products += g.x[i] * integer;
            squares += integer * integer;
            codes[i / 4 * QUAD_BYTES + i % 4] |= (steps + s.zero) << (j < HALF_PANEL ? 0 : 4);
        }
    }
    return squares > 0 ? products / squares : products;
}

/* Quantize weights, and store the scales in the order of the packed rows. `packed` is zero before. */
void pack_progressive(const bf16 *weight, int64_t outputs, int64_t inputs, int32_t gated, uint8_t *packed,
                      float *scales, int64_t first, int64_t end, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = first; panel < end; panel++) {
        uint8_t *to = packed + panel * panel_size(STEP_GROUP, inputs);
        for (int j = 0; j < PANEL; j++) {
            ptrdiff_t row = source_row(panel, j, outputs, gated);
            scales[panel * PANEL + j] = row < outputs ? pack_steps(weight + row * inputs, inputs, to, j) : 0;
        }
    }
}
