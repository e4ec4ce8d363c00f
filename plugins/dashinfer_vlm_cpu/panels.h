/* Packing of bf16 weights into panels, with 16 or with 12 bits. Each instruction set defines the functions that are
 * declared here. */
#pragma once

#include "base.h"

/* Interleave the rows of a panel: pairs of inputs of 32 outputs. */
static void interleave_panel(const uint32_t *weight, ptrdiff_t panel, int64_t outputs, int64_t inputs, int32_t gated,
                             uint32_t *packed);

void pack_bf16(const uint32_t *weight, int64_t outputs, int64_t inputs, int32_t gated, uint32_t *packed,
               int64_t first, int64_t end, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = first; panel < end; panel++)
        interleave_panel(weight, panel, outputs, inputs, gated, packed + panel * (inputs / 2) * PANEL);
}

/* Lossless weights of 12 bits: the upper eight bits of a bf16 weight (its sign, and its exponent except for one bit)
 * almost always have one of a few values. The 16 most frequent ones of each panel get a code of 4 bits; all others, the
 * outliers, are stored in a list. The idea is that of DFloat11 (arXiv:2504.11651); codes of a fixed length are unpacked
 * with one shuffle.
 *
 * A group is four inputs of a panel, which are 128 weights: their lower bytes, then two codes per byte. */
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

/* Give codes to the most frequent upper bytes, and overwrite their counts. */
static void choose_most_frequent(uint32_t counts[256], uint8_t high[CODES])
{
    for (int code = 0; code < CODES; code++) {
        int best = 0;
        for (int byte = 1; byte < 256; byte++) best = counts[byte] > counts[best] ? byte : best;
        high[code] = best;
        counts[best] = 0;
    }
}

/* Encode a panel; returns 0 if there are too many outliers. */
static int code_panel(const bf16 *weights, ptrdiff_t inputs, uint8_t *packed, Codes *codes);

/* Pack weights as `pack_bf16` does, and compress the panels to 12 bits; returns 0 if there are too many outliers.
 * `panels` has space for a panel of each thread, aligned to 64 bytes. */
int32_t pack_codes(const uint32_t *weight, int64_t outputs, int64_t inputs, int32_t gated, bf16 *panels,
                   uint8_t *packed, char *codes, int64_t first, int64_t end, int32_t threads)
{
    int good = 1;
#pragma omp parallel for num_threads(threads) reduction(& : good)
    for (ptrdiff_t panel = first; panel < end; panel++) {
        bf16 *own = panels + omp_get_thread_num() * inputs * PANEL;
        interleave_panel(weight, panel, outputs, inputs, gated, (uint32_t *)own);
        good &= code_panel(own, inputs, packed + panel * (inputs / GROUP) * GROUP_BYTES,
                           (Codes *)codes_of(codes, panel, inputs));
    }
    return good;
}
