/* Draw tokens from logits. Each instruction set defines the functions that are declared here. */
#pragma once

#include "base.h"

enum { DRAW_BLOCK = 128 };

typedef struct {
    float temperature;
    float largest; /* the largest quotient of a logit and the temperature */
    float floor;   /* smaller quotients have no weight */
} DrawScale;

static float largest_logit(const float *logits, ptrdiff_t count);

/* weights[i] = e^(logits[i] / temperature - largest) for i < count, and 0 from there to DRAW_BLOCK. */
static void compute_weights(const float *logits, ptrdiff_t count, const DrawScale *s, float weights[DRAW_BLOCK]);

static double sum_weights(const float weights[DRAW_BLOCK])
{
    double sums[8] = {0};
    for (int i = 0; i < DRAW_BLOCK; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += weights[i + j];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

/* The first token of a block at which the cumulative sum exceeds `point`. If rounding leaves it below, the last token
 * that has a weight. */
static ptrdiff_t draw_in_block(const float weights[DRAW_BLOCK], double point)
{
    double sum = 0;
    ptrdiff_t token = 0;
    for (ptrdiff_t i = 0; i < DRAW_BLOCK; i++) {
        if (weights[i] > 0) token = i;
        sum += weights[i];
        if (sum > point) break;
    }
    return token;
}

static ptrdiff_t draw_token(const float *logits, ptrdiff_t count, float temperature, float floor, double share,
                            double *total)
{
    ptrdiff_t blocks = (count + DRAW_BLOCK - 1) / DRAW_BLOCK, block = 0;
    DrawScale scale = {temperature, largest_logit(logits, count) / temperature, floor};
    _Alignas(64) float weights[DRAW_BLOCK];
    double sums[blocks], before = 0;
    *total = 0;
    for (ptrdiff_t b = 0; b < blocks; b++) {
        compute_weights(logits + b * DRAW_BLOCK, count - b * DRAW_BLOCK, &scale, weights);
        *total += sums[b] = sum_weights(weights);
    }
    double point = share * *total;
    while (block + 1 < blocks && before + sums[block] <= point) before += sums[block++];
    compute_weights(logits + block * DRAW_BLOCK, count - block * DRAW_BLOCK, &scale, weights);
    return block * DRAW_BLOCK + draw_in_block(weights, point - before);
}

/* Draw a token from each of some rows of `logits` [.., count], with weights e^(logit / temperature), and 0 where that
 * quotient is below the row's floor: the first token at which the cumulative sum of the weights exceeds the row's share
 * of their total. Writes the total relative to the largest weight, too; it is not finite if the logits are not.
 *
 * Weights are summed in blocks first, so that only those of one block are added one by one, and none are stored. */
void draw_tokens(const float *logits, int64_t stride, const int64_t *rows, int64_t row_count, int64_t count,
                 const float *temperatures, const float *floors, const double *shares, int64_t *tokens, double *totals,
                 int32_t threads)
{
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (row_count > 1)
    for (ptrdiff_t i = 0; i < row_count; i++)
        tokens[i] = draw_token(logits + rows[i] * stride, count, temperatures[i], floors[i], shares[i], totals + i);
}
