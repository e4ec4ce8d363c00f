/* Find the largest logits, and sample tokens from logits. Each instruction set defines the functions that are declared
 * here. */
#pragma once

#include "base.h"

enum { SAMPLE_BLOCK = 128 };

typedef struct {
    float temperature;
    float largest;     /* the largest quotient of a logit and the temperature */
    float lower_bound; /* smaller quotients have no weight */
} SampleScale;

static float largest_logit(const float *logits, ptrdiff_t count);

/* weights[i] = e^(logits[i] / temperature - largest) for i < count, and 0 from there to SAMPLE_BLOCK. */
static void compute_weights(const float *logits, ptrdiff_t count, const SampleScale *s, float weights[SAMPLE_BLOCK]);

static double sum_weights(const float weights[SAMPLE_BLOCK])
{
    double sums[8] = {0};
    for (int i = 0; i < SAMPLE_BLOCK; i += 8)
        for (int j = 0; j < 8; j++) sums[j] += weights[i + j];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

/* The first token of a block at which the cumulative sum exceeds `point`. If rounding leaves it below, the last token
 * that has a weight. */
static ptrdiff_t sample_in_block(const float weights[SAMPLE_BLOCK], double point)
{
    double sum = 0;
    ptrdiff_t token = 0;
    for (ptrdiff_t i = 0; i < SAMPLE_BLOCK; i++) {
        if (weights[i] > 0) token = i;
        sum += weights[i];
        if (sum > point) break;
    }
    return token;
}

static ptrdiff_t sample_token(const float *logits, ptrdiff_t count, float temperature, float lower_bound,
                              float max_difference, double uniform, double *total)
{
    ptrdiff_t blocks = (count + SAMPLE_BLOCK - 1) / SAMPLE_BLOCK, block = 0;
    float largest = largest_logit(logits, count) / temperature;
    SampleScale scale = {temperature, largest, fmaxf(lower_bound, largest - max_difference)};
    _Alignas(64) float weights[SAMPLE_BLOCK];
    double sums[blocks], before = 0;
    *total = 0;
    for (ptrdiff_t b = 0; b < blocks; b++) {
        compute_weights(logits + b * SAMPLE_BLOCK, count - b * SAMPLE_BLOCK, &scale, weights);
        *total += sums[b] = sum_weights(weights);
    }
    double point = uniform * *total;
    while (block + 1 < blocks && before + sums[block] <= point) before += sums[block++];
    compute_weights(logits + block * SAMPLE_BLOCK, count - block * SAMPLE_BLOCK, &scale, weights);
    return block * SAMPLE_BLOCK + sample_in_block(weights, point - before);
}

/* The first token with the largest logit; -1 if that is not finite, or if any logit is NaN. */
static int64_t largest_token(const float *logits, ptrdiff_t count)
{
    float largest = largest_logit(logits, count);
    int64_t token = -1;
    int is_invalid = !isfinite(largest);
    for (ptrdiff_t start = 0; start < count; start += SAMPLE_BLOCK) {
        ptrdiff_t end = start + SAMPLE_BLOCK < count ? start + SAMPLE_BLOCK : count;
        int is_here = 0;
        for (ptrdiff_t i = start; i < end; i++) {
            is_here |= logits[i] == largest;
            is_invalid |= logits[i] != logits[i];
        }
        if (is_here && token < 0)
            for (token = start; logits[token] != largest;) token++;
    }
    return is_invalid ? -1 : token;
}

/* Write the first token with the largest logit of each row; returns whether all of these logits are finite, and none is
 * NaN. */
int32_t largest_tokens(const float *logits, int64_t stride, int64_t rows, int64_t count, int64_t *tokens,
                       int32_t threads)
{
    int32_t found = 1;
#pragma omp parallel for reduction(&& : found) num_threads(threads) if (rows > 1)
    for (ptrdiff_t row = 0; row < rows; row++) {
        tokens[row] = largest_token(logits + row * stride, count);
        found = found && tokens[row] >= 0;
    }
    return found;
}

/* Sample a token from each of some rows of `logits` [.., count], with weights e^(logit / temperature), and 0 where that
 * quotient is below the row's lower bound, or below the row's largest one by more than its maximum difference: the first
 * token at which the cumulative sum of the weights exceeds their total times the row's uniform number. Writes the total
 * relative to the largest weight, too; it is not finite if the logits are not.
 *
 * Weights are summed in blocks first, so that only those of one block are added one by one, and none are stored. */
void sample_tokens(const float *logits, int64_t stride, const int64_t *rows, int64_t row_count, int64_t count,
                   const float *temperatures, const float *lower_bounds, const float *max_differences,
                   const double *uniforms, int64_t *tokens, double *totals, int32_t threads)
{
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (row_count > 1)
    for (ptrdiff_t i = 0; i < row_count; i++)
        tokens[i] = sample_token(logits + rows[i] * stride, count, temperatures[i], lower_bounds[i], max_differences[i],
                                 uniforms[i], totals + i);
}
