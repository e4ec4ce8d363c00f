/* Sampling tokens, see avx2.c. */
#pragma once

#include "avx2_numbers.h"
#include "sample.h"

static float largest_logit(const float *logits, ptrdiff_t count)
{
    __m256 least = _mm256_set1_ps(-INFINITY), largest = least;
    for (ptrdiff_t k = 0; k < count; k += LANES) {
        __m256 lanes = _mm256_castsi256_ps(first(count - k));
        largest = _mm256_max_ps(largest, _mm256_blendv_ps(least, load_floats(logits + k, count - k), lanes));
    }
    return max_lanes(largest);
}

static void compute_weights(const float *logits, ptrdiff_t count, const SampleScale *s, float weights[SAMPLE_BLOCK])
{
    __m256 temperature = _mm256_set1_ps(s->temperature), largest = _mm256_set1_ps(s->largest);
    __m256 lower_bound = _mm256_set1_ps(s->lower_bound), log2_e = _mm256_set1_ps(1.44269504f);
    for (ptrdiff_t k = 0; k < SAMPLE_BLOCK; k += LANES) {
        __m256i lanes = first(count - k);
        __m256 x = _mm256_div_ps(load_floats(logits + k, count - k), temperature);
        __m256 kept = _mm256_and_ps(_mm256_cmp_ps(x, lower_bound, _CMP_NLT_UQ), _mm256_castsi256_ps(lanes));
        x = exp2_(_mm256_mul_ps(_mm256_sub_ps(x, largest), log2_e), 1);
        _mm256_store_ps(weights + k, _mm256_and_ps(x, kept));
    }
}
