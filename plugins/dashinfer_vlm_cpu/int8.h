/* Packing of 8-bit weights, in portable C. */
#pragma once

#include "base.h"

/* The largest magnitude, NaN if any value is NaN. Each instruction set defines it. */
static float max_abs(const bf16 *x, ptrdiff_t count);

/* Quantize weights to unsigned bytes with an offset of 128: row r is (byte - 128) * scales[r]. Scales are stored in the
 * order of the packed rows. */
void pack_int8(const bf16 *weight, int64_t outputs, int64_t inputs, int32_t gated, uint8_t *packed, float *scales,
               int64_t first, int64_t end, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = first; panel < end; panel++) {
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

/* Pack codes [outputs, inputs] into the layout of `pack_int8`: row r is (codes[r] - 128) * row_scales[r]. The number of
 * inputs is a multiple of 4. */
void pack_int8_codes(const uint8_t *codes, const float *row_scales, int64_t outputs, int64_t inputs, int32_t gated,
                     uint8_t *packed, float *scales, int64_t first, int64_t end, int32_t threads)
{
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = first; panel < end; panel++) {
        uint8_t *to = packed + panel * inputs * PANEL;
        for (int j = 0; j < PANEL; j++) {
            ptrdiff_t row = source_row(panel, j, outputs, gated);
            const uint8_t *from = row < outputs ? codes + row * inputs : NULL; /* NULL: a column of padding */
            scales[panel * PANEL + j] = from ? row_scales[row] : 0;
            for (ptrdiff_t k = 0; k < inputs; k += 4) {
                uint8_t *quad = to + k * PANEL + 4 * j;
                if (from) memcpy(quad, from + k, 4);
                else memset(quad, 128, 4);
            }
        }
    }
}
