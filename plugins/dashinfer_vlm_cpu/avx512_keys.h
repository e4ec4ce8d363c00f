/* Keys and values, see avx512.c. */
#pragma once

#include "arguments.h"
#include "avx512_numbers.h"

/* Keys and values of one head, from the first key of a chunk on. */
typedef struct {
    const void *k, *v;
    const float *k_scales, *v_scales; /* null for bf16 */
    ptrdiff_t stride;
    const void *next; /* the keys that are read after these keys and values */
} Keys;

/* The keys of head `kv`, from row `key` on. */
INLINE Keys keys_at(const AttentionArgs *h, ptrdiff_t kv, ptrdiff_t key)
{
    ptrdiff_t offset = key * h->kv_token + kv * h->kv_head, scale = kv * h->scale_head + key;
    if (!h->k_scales)
        return (Keys){.k = element(h->k, 0, offset), .v = element(h->v, 0, offset), .stride = h->kv_token};
    return (Keys){element(h->k, 1, offset),
                  element(h->v, 1, offset),
                  h->k_scales + scale,
                  h->v_scales + scale,
                  h->kv_token,
                  NULL};
}

/* 1 / scale, or 0 if that could overflow; see MIN_SCALE in kernels/kv_cache.py. */
INLINE float inverse_scale(float scale) { return scale >= 0x1p-126f ? 1.0f / scale : 0.0f; }

static void *carve(char **from, size_t bytes)
{
    char *part = *from;
    *from += round_up(bytes, 64);
    return part;
}
