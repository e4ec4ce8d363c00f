/* 4-bit weights of published checkpoints: their layout and packing, in portable C.
 *
 * A weight is (code - zero) * scale with a code of 0 to 15; the inputs of a group share the scale and the zero point.
 * Weights are packed into panels of 32 columns, as with other weights, and a panel into blocks of 128 inputs, the last
 * one padded with zeros. A block is
 *
 *   scales  [groups][32] fp16, relative to the scale of the column (`Matrix.scales`)
 *   zeros   [groups][32] bytes, 0 to 16; padded to 64 bytes
 *   codes   [32][16][4] bytes: in byte [k][j][i], the lower four bits are the code of input 4 k + i and column j, the
 * upper four bits that of the same input and column 16 + j
 *
 * so that a block is a multiple of 64 bytes: 4.75 bits per weight with groups of 32 inputs, 4.375 with 64, 4.25 with
 * 128.
 *
 * A result is defined, to the bit, by the integer sums over a group and the order of the operations on floats:
 *   part = 0; for each group of a block: part = fma(float(sum of (code - zero) * activation), scale, part)
 *   total = 0; for each block: total = fma(part, scale of the activations, total)
 *   result = total * scale of the column
 */
#pragma once

#include "base.h"

enum { HALF_PANEL = PANEL / 2, QUAD_BYTES = 4 * HALF_PANEL, CODES_BYTES = QUANT_BLOCK / 4 * QUAD_BYTES };

INLINE ptrdiff_t int4_blocks(ptrdiff_t inputs) { return (inputs + QUANT_BLOCK - 1) / QUANT_BLOCK; }

/* Offset of a block's zero points. */
INLINE ptrdiff_t int4_zeros_offset(ptrdiff_t group) { return QUANT_BLOCK / group * PANEL * 2; }

/* Offset of a block's codes. */
INLINE ptrdiff_t int4_codes_offset(ptrdiff_t group)
{
    return int4_zeros_offset(group) + (QUANT_BLOCK / group * PANEL + 63) / 64 * 64;
}

INLINE ptrdiff_t int4_block_size(ptrdiff_t group) { return int4_codes_offset(group) + CODES_BYTES; }

/* Size of packed weights in bytes. */
int64_t int4_size(int64_t outputs, int64_t inputs, int64_t group)
{
    return (outputs + PANEL - 1) / PANEL * int4_blocks(inputs) * int4_block_size(group);
}

/* Four codes of a row from input k on; zeros after the last input, and for a row that does not exist. */
INLINE uint32_t four_codes(const uint8_t *codes, ptrdiff_t row, ptrdiff_t k, ptrdiff_t outputs, ptrdiff_t inputs)
{
    uint32_t four = 0;
    if (row < outputs) memcpy(&four, codes + row * inputs + k, inputs - k < 4 ? inputs - k : 4);
    return four;
}

/* Pack codes [outputs, inputs] with one scale (fp16) and one zero point per group, both [outputs, groups], where the
 * last group may be incomplete, and one scale per output; `column_scales` are those in the order of the packed columns.
 * `packed` is zero before. */
void pack_int4(const uint8_t *codes, const uint16_t *scales, const uint8_t *zeros, const float *row_scales,
               int64_t outputs, int64_t inputs, int64_t group, int32_t gated, uint8_t *packed, float *column_scales,
               int64_t first, int64_t end, int32_t threads)
{
    ptrdiff_t size = int4_block_size(group), blocks = int4_blocks(inputs);
    ptrdiff_t groups = (inputs + group - 1) / group, per_block = QUANT_BLOCK / group;
#pragma omp parallel for num_threads(threads)
    for (ptrdiff_t panel = first; panel < end; panel++) {
        uint8_t *to = packed + panel * blocks * size;
        ptrdiff_t rows[PANEL];
        for (int j = 0; j < PANEL; j++) {
            rows[j] = source_row(panel, j, outputs, gated);
            column_scales[panel * PANEL + j] = rows[j] < outputs ? row_scales[rows[j]] : 0;
            for (ptrdiff_t g = 0; g < groups && rows[j] < outputs; g++) {
                uint8_t *block = to + g / per_block * size;
                ptrdiff_t place = g % per_block * PANEL + j;
                memcpy(block + 2 * place, scales + rows[j] * groups + g, sizeof *scales);
                block[int4_zeros_offset(group) + place] = zeros[rows[j] * groups + g];
            }
        }
        for (ptrdiff_t k = 0; k < inputs; k += 4) {
            uint8_t *quad = to + k / QUANT_BLOCK * size + int4_codes_offset(group) + k % QUANT_BLOCK / 4 * QUAD_BYTES;
            for (int j = 0; j < HALF_PANEL; j++) {
                uint32_t both = four_codes(codes, rows[j], k, outputs, inputs) |
                                four_codes(codes, rows[j + HALF_PANEL], k, outputs, inputs) << 4;
                memcpy(quad + 4 * j, &both, sizeof both);
            }
        }
    }
}
