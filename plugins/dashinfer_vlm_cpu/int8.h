/* Packing of 8-bit weights that are quantized already, in portable C. */
#pragma once

#include "base.h"

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
