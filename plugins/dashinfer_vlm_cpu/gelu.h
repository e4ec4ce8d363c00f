/* GELU of the results of linear layers. */
#pragma once

#include "arguments.h"
#include "floats.h"

/* x / 2 * (1 + erf(x / sqrt(2))), as max(x, 0) - |x| / 2 * erfc(|x| / sqrt(2)), which does not cancel for negative x.
 * With t = 1 / (1 + 0.33 |x|), that erfc is 2 t * 2^(polynomial of t - x^2 / ln(4)), with an error of 4e-7. */
INLINE Floats gelu(Floats x)
{
    static const float coefficients[] = {-2.808769941e-1f, 1.257250071f,    -1.994251132f, 1.139450431f,
                                         -2.940870523e-1f, 6.667191982e-1f, 1.430391908f,  -2.924596071f};
    Floats size = magnitude(x), t = splat(1) / multiply_add(size, splat(0.33f), splat(1)), y = splat(coefficients[0]);
    UNROLL_FOR (int i = 1; i <= 7; i++) y = multiply_add(y, t, splat(coefficients[i]));
    y = exp2_(multiply_add(times(x, x), splat(-0.72134752f), y), 1);
    return multiply_add(times(size, t), -y, positive(x));
}

/* Replace results by their GELU. Before they are stored the first time, it would take registers from the products. */
static void apply_gelu(const Epilogue *ep, ptrdiff_t rows, int threads)
{
    ptrdiff_t columns = ep->m->columns;
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t c = 0; c < columns; c += LANES) {
            ptrdiff_t place = row * ep->stride + c;
            float *wide = (float *)ep->out + place;
            bf16 *out = (bf16 *)ep->out + place;
            if (ep->m->fp32_output) put(wide, columns - c, gelu(get(wide, columns - c)));
            else put_bf16(out, columns - c, gelu(get_bf16(out, columns - c)));
        }
}
