/* Which thread packs and multiplies which panels.
 *
 * The memory of a page is on the NUMA node of the thread that writes it first. So a thread packs the panels that it
 * will read: with T threads, thread t owns the panels from P * t / T to P * (t + 1) / T. It reads three quarters of
 * them; the others go to whichever thread is ready first, since threads do not run equally fast. No result depends on
 * the division. */
#pragma once

#include "base.h"

/* Each group of rows reads the weights once more: with fewer rows, that takes longer than the products. */
enum { MIN_ROW_GROUP = 48, TASKS_PER_THREAD = 4 };

INLINE ptrdiff_t first_of_thread(ptrdiff_t count, int thread) { return count * thread / omp_get_num_threads(); }

typedef struct {
    ptrdiff_t first, end;
} Range;

/* The panels that this thread packs in a block, from panel `first` to `end` of `panels`: the same part of those that it
 * owns. */
INLINE Range panels_to_pack(ptrdiff_t panels, ptrdiff_t first, ptrdiff_t end)
{
    int self = omp_get_thread_num();
    ptrdiff_t start = first_of_thread(panels, self), count = first_of_thread(panels, self + 1) - start;
    return (Range){start + count * first / panels, start + count * end / panels};
}

typedef struct {          /* the tasks of a thread */
    ptrdiff_t task;       /* the current one */
    ptrdiff_t next, end;  /* the first three quarters of those that it owns */
    ptrdiff_t count, own; /* the number of all tasks, and of those that each thread computes itself */
    ptrdiff_t *taken;     /* shared by all threads: how many of the others were taken; zero at first */
} Tasks;

INLINE Tasks divide_tasks(ptrdiff_t count, ptrdiff_t *taken)
{
    ptrdiff_t own = (count / omp_get_num_threads() * 3 + 3) / 4, next = first_of_thread(count, omp_get_thread_num());
    return (Tasks){-1, next, next + own, count, own, taken};
}

/* Go to the next task of this thread; returns 0 if there is none. There is no barrier after the last one. */
INLINE int next_task(Tasks *t)
{
    if (t->next < t->end) {
        t->task = t->next++;
        return 1;
    }
    ptrdiff_t threads = omp_get_num_threads(), most = ceil_div(t->count, threads) - t->own;
    for (;;) {
        ptrdiff_t index = __atomic_fetch_add(t->taken, 1, __ATOMIC_RELAXED);
        if (index >= most * threads) return 0;
        ptrdiff_t owner = index / most;
        t->task = first_of_thread(t->count, owner) + t->own + index % most;
        if (t->task < first_of_thread(t->count, owner + 1)) return 1;
    }
}

/* The number of groups that rows are divided into: each has at most ROW_GROUP rows, and there are enough for all
 * threads if `panels` are few. */
INLINE ptrdiff_t row_groups(ptrdiff_t rows, ptrdiff_t panels, int threads)
{
    ptrdiff_t least = ceil_div(rows, ROW_GROUP), wanted = ceil_div((ptrdiff_t)TASKS_PER_THREAD * threads, panels),
              most = rows / MIN_ROW_GROUP;
    if (wanted > most) wanted = most;
    return wanted > least ? wanted : least;
}
