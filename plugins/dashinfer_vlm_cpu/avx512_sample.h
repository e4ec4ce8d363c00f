/* Sampling tokens, see avx512.c. */
#pragma once

#include "avx512_numbers.h"
#include "sample.h"

static float largest_logit(const float *logits, ptrdiff_t count)
{
    __m512 least = _mm512_set1_ps(-INFINITY), largest = least;
    for (ptrdiff_t k = 0; k < count; k += LANES)
        largest = _mm512_max_ps(largest, _mm512_mask_loadu_ps(least, first(count - k), logits + k));
    return _mm512_reduce_max_ps(largest);
}

static void compute_weights(const float *logits, ptrdiff_t count, const SampleScale *s, float weights[SAMPLE_BLOCK])
{
    __m512 temperature = _mm512_set1_ps(s->temperature), largest = _mm512_set1_ps(s->largest);
    __m512 lower_bound = _mm512_set1_ps(s->lower_bound), log2_e = _mm512_set1_ps(1.44269504f),
           least = _mm512_set1_ps(-INFINITY);
    for (ptrdiff_t k = 0; k < SAMPLE_BLOCK; k += LANES) {
        __m512 x = _mm512_div_ps(_mm512_mask_loadu_ps(least, first(count - k), logits + k), temperature);
        __mmask16 kept = _mm512_cmp_ps_mask(x, lower_bound, _CMP_NLT_UQ);
        x = exp2_(_mm512_mul_ps(_mm512_sub_ps(x, largest), log2_e), 1);
        _mm512_store_ps(weights + k, _mm512_maskz_mov_ps(kept, x));
    }
}
