/* Vectors of floats, which each instruction set defines. */
#pragma once

#ifdef __AVX512BF16__
#include "avx512_floats.h"
#else
#include "avx2_floats.h"
#endif
