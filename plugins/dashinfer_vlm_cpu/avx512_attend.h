/* Attention of a batch, see avx512.c. */
#pragma once

#include "avx512_keys.h"

#ifdef TILES
#include "tiles_attention.h"
#else
#include "avx512_attention.h"
#endif

/* The queries of a span are divided into tiles of `step` tokens. */
INLINE ptrdiff_t tiles_of(const KVSpan *span, ptrdiff_t step) { return (span->num_queries + step - 1) / step; }

/* The span of tile `*index` of all spans; `*index` becomes its index in that span. */
static const KVSpan *find_span(const KVSpan *spans, ptrdiff_t step, ptrdiff_t *index)
{
    for (; *index >= tiles_of(spans, step); spans++) *index -= tiles_of(spans, step);
    return spans;
}

/* Attend each span's queries to its keys. `workspace` has `attend_workspace_size()` bytes per thread. */
void attend(const AttentionArgs *h, const KVSpan *spans, int64_t count, char *workspace, int32_t threads)
{
    ptrdiff_t group = h->heads / h->kv_heads, step = QUERY_ROWS / group, bytes = round_up(scratch_bytes(h->width), 64);
    ptrdiff_t tasks = 0;
    for (ptrdiff_t i = 0; i < count; i++) tasks += tiles_of(spans + i, step) * h->kv_heads;
#pragma omp parallel num_threads(threads)
    {
        Scratch s = carve_scratch(workspace + omp_get_thread_num() * bytes, h->width);
#pragma omp for schedule(dynamic, 1)
        for (ptrdiff_t task = 0; task < tasks; task++) {
            ptrdiff_t kv = task % h->kv_heads, index = task / h->kv_heads;
            ptrdiff_t later = task + threads < tasks ? task + threads : task, later_index = later / h->kv_heads;
            const KVSpan *span = find_span(spans, step, &index), *later_span = find_span(spans, step, &later_index);
            ptrdiff_t token = index * step, end = token + step < span->num_queries ? token + step : span->num_queries;
            attend_tile(h, span, &s, kv, token, end, keys_at(h, later % h->kv_heads, later_span->first_key).k);
        }
    }
}

int64_t attend_workspace_size(int64_t width) { return round_up(scratch_bytes(width), 64); }
