/* Attention of a batch. Each instruction set defines `attend_tile`, and Scratch for up to QUERY_ROWS queries. */
#pragma once

#ifdef TILES
#include "tiles_attention.h"
#elif defined(__AVX512BF16__)
#include "avx512_attention.h"
#else
#include "avx2_attention.h"
#endif

enum { TASKS_PER_THREAD = 4, FEW_QUERIES = 96 };

/* The tasks of a span: `step` queries of all heads that share the keys of a head. Those of a head follow each other,
 * because its keys and values are in the caches then. */
typedef struct {
    const KVSpan *span;
    ptrdiff_t first; /* the first task */
} Tasks;

INLINE ptrdiff_t count_tasks(const KVSpan *span, const AttentionArgs *h, ptrdiff_t step)
{
    return h->kv_heads * ceil_div(span->num_queries, step);
}

static ptrdiff_t count_all_tasks(const KVSpan *spans, ptrdiff_t count, const AttentionArgs *h, ptrdiff_t step)
{
    ptrdiff_t tasks = 0;
    for (ptrdiff_t i = 0; i < count; i++) tasks += count_tasks(spans + i, h, step);
    return tasks;
}

/* Go on to the span of a task. */
INLINE Tasks skip_to(Tasks at, ptrdiff_t task, const AttentionArgs *h, ptrdiff_t step)
{
    for (ptrdiff_t count; task - at.first >= (count = count_tasks(at.span, h, step)); at.span++) at.first += count;
    return at;
}

INLINE const void *keys_of_task(Tasks at, ptrdiff_t task, const AttentionArgs *h, ptrdiff_t step)
{
    at = skip_to(at, task, h, step);
    ptrdiff_t kv = (task - at.first) / ceil_div(at.span->num_queries, step);
    return element(h->k, h->k_scales != NULL, at.span->first_key * h->kv_token + kv * h->kv_head);
}

int64_t attend_workspace_size(int64_t width) { return round_up(scratch_bytes(width), 64); }

/* Attend each span's queries to its keys. `workspace` has `attend_workspace_size()` bytes per thread. Each task packs
 * keys and values for itself, so that tasks are large where there are enough of them. */
void attend(const AttentionArgs *h, const KVSpan *spans, int64_t count, char *workspace, int32_t threads)
{
    ptrdiff_t step = QUERY_ROWS / (h->heads / h->kv_heads), tasks = count_all_tasks(spans, count, h, step);
    while (tasks < TASKS_PER_THREAD * threads && step > FEW_QUERIES)
        tasks = count_all_tasks(spans, count, h, step /= 2);
#pragma omp parallel num_threads(threads)
    {
        Scratch s = carve_scratch(workspace + omp_get_thread_num() * attend_workspace_size(h->width), h->width);
        Tasks at = {spans, 0};
#pragma omp for schedule(monotonic : dynamic, 1)
        for (ptrdiff_t task = 0; task < tasks; task++) {
            at = skip_to(at, task, h, step);
            ptrdiff_t tiles = ceil_div(at.span->num_queries, step), index = task - at.first;
            ptrdiff_t token = index % tiles * step, left = at.span->num_queries - token;
            const void *next = keys_of_task(at, task + threads < tasks ? task + threads : task, h, step);
            attend_tile(h, at.span, &s, index / tiles, token, token + (left < step ? left : step), next);
        }
    }
}
