/* The columns of the largest results of an LM head. Each instruction set defines the functions that are declared
 * here. */
#pragma once

#ifdef __AVX512BF16__
#include "avx512_int8.h"
#else
#include "avx2_int8.h"
#endif

typedef struct {
    float value;
    int64_t column;
} ArgmaxResult;

enum { RECOMPUTE_SHARE = 8 }; /* at most an eighth of the panels are recomputed */

/* Quantize a row of activations. The factors of the norm of a weight row and of the norm of its error are the norm of
 * the row's rounding error, including the error of float summation, and the norm of the row. */
static void quantize_with_factors(const bf16 *x, ptrdiff_t inputs, const Quantized *q, ptrdiff_t row, float factors[2]);

/* Upper bound of a panel's largest result, for each row. */
static void bound_panel(const ArgmaxBounds *s, const Quantized *q, const float *factors, ptrdiff_t rows,
                        ptrdiff_t panel, float *upper, ptrdiff_t panels);

/* Compute a panel of one row from the original weights, and keep its largest result if it is larger. */
static void update_argmax(const ArgmaxBounds *s, const bf16 *x, ptrdiff_t panel, ArgmaxResult *found);

/* Compute the panel with the largest upper bound, and return the value that others must reach; NaN if so many panels
 * could reach it that computing all of them is faster. */
static float row_threshold(const ArgmaxBounds *s, const bf16 *x, const float *upper, ptrdiff_t panels, float norm,
                           ArgmaxResult *found)
{
    ptrdiff_t best = 0, count = 0;
    for (ptrdiff_t panel = 1; panel < panels; panel++) best = upper[panel] > upper[best] ? panel : best;
    update_argmax(s, x, best, found);
    for (ptrdiff_t panel = 0; panel < panels; panel++) count += upper[panel] >= found->value;
    if (norm < 1e18f && RECOMPUTE_SHARE * count <= panels + RECOMPUTE_SHARE) return found->value;
    found->column = -1;
    return NAN;
}

/* The column of the largest result in each row of x times the weights, the first of equal ones; -1 if computing all
 * results is faster, or if values are too large.
 *
 * The 8-bit weights, which are a third smaller, give the results with an error that the Cauchy-Schwarz inequality
 * bounds: |w h - w' h'| <= |w'| |h - h'| + |w - w'| |h|. The panel with the largest upper bound is then computed from
 * the original weights, bit-exactly as in `linear`, and so is every panel whose upper bound is not below that panel's
 * result. */
void argmax_columns(const ArgmaxBounds *s, const bf16 *x, int64_t stride, int64_t rows, int64_t *out, char *workspace,
                    int32_t threads)
{
    ptrdiff_t inputs = s->quantized->inputs, panels = (s->quantized->outputs + PANEL - 1) / PANEL;
    Quantized q = quantized_at(workspace, rows, inputs);
    ArgmaxResult *found = (ArgmaxResult *)(workspace + (quantized_bytes(rows, inputs) + 63) / 64 * 64);
    float *factors = (float *)(found + rows), *thresholds = factors + 2 * rows, *upper = thresholds + rows;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++) {
            quantize_with_factors(x + row * stride, inputs, &q, row, factors + 2 * row);
            found[row] = (ArgmaxResult){-INFINITY, -1};
        }
#pragma omp for schedule(guided, 2)
        for (ptrdiff_t panel = 0; panel < panels; panel++) bound_panel(s, &q, factors, rows, panel, upper, panels);
#pragma omp for
        for (ptrdiff_t row = 0; row < rows; row++)
            thresholds[row] = row_threshold(s, x + row * stride, upper + row * panels, panels, factors[2 * row + 1],
                                            found + row);
#pragma omp for schedule(dynamic, 16)
        for (ptrdiff_t panel = 0; panel < panels; panel++)
            for (ptrdiff_t row = 0; row < rows; row++)
                if (upper[row * panels + panel] >= thresholds[row])
                    update_argmax(s, x + row * stride, panel, found + row);
    }
    for (ptrdiff_t row = 0; row < rows; row++) out[row] = found[row].column;
}

/* Workspace size of `argmax_columns` in bytes. */
int64_t argmax_workspace_size(int64_t rows, int64_t inputs, int64_t outputs)
{
    ptrdiff_t panels = (outputs + PANEL - 1) / PANEL;
    return (quantized_bytes(rows, inputs) + 63) / 64 * 64 +
           rows * (sizeof(ArgmaxResult) + sizeof(float) * (3 + panels));
}
