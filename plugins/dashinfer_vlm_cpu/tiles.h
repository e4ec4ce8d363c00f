/* Products of up to 32 rows, or of 48, with 32 columns, in the summation order of AMX.
 *
 * One interface, two implementations: the tile instructions (TILES_AMX), and bit-exact portable C, so that the code
 * built on it can be tested on every machine. As the Intel SDM defines TDPBF16PS, a step of 32 inputs sums its 16
 * products of even inputs and its 16 products of odd inputs with fused multiply-adds, each from zero; the two sums are
 * added, and that sum is added to the result. Denormal inputs and outputs are flushed to zero.
 *
 * Left operand of a step: [rows][64 bytes]. Right operand: [16][128 bytes], 32 columns, with two inputs (bf16) or four
 * (8 bits) of a column in each 32 bits.
 */
#pragma once

#include "base.h"

enum { TILE = 16, STEP_BYTES = 64, STEP_INPUTS = 32, STEP_INPUTS_INT8 = 64, MAX_ROWS = 2 * TILE, TALL_ROWS = 3 * TILE };

#ifdef TILES_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    int rows;
} Tiles; /* the sums are in the tile registers from 0 on, two for 16 rows */

/* Compiler barrier: the compiler does not know which memory the instructions below read. */
#define MEMORY_IS_WRITTEN() __asm__ volatile("" ::: "memory")

/* Linux requires a process to request tile registers (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). */
int32_t tiles_permitted(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static Tiles tiles_configured(int rows, int low, int high)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = STEP_BYTES, config.rows[i] = TILE;
    if (rows <= MAX_ROWS) {
        config.rows[0] = config.rows[1] = config.rows[4] = low;
        config.rows[2] = config.rows[3] = config.rows[5] = high;
    }
    MEMORY_IS_WRITTEN();
    _tile_loadconfig(&config);
    return (Tiles){rows};
}

/* Configure this thread's tile registers for products of `rows` rows, at most 32 or exactly 48; `tiles_close` releases
 * them. */
static Tiles tiles_open(int rows)
{
    return tiles_configured(rows, rows < TILE ? rows : TILE, rows > TILE ? rows - TILE : TILE);
}

/* The same for `tiles_step_pair`. */
static Tiles tiles_open_pair(int rows) { return tiles_configured(rows, rows, rows); }

static void tiles_close(void) { _tile_release(); }

INLINE void tiles_zero(Tiles *t)
{
    _tile_zero(0);
    _tile_zero(1);
    if (t->rows > TILE) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if (t->rows > MAX_ROWS) {
        _tile_zero(4);
        _tile_zero(5);
    }
}

INLINE void tiles_load(Tiles *t, const void *sums)
{
    const char *from = sums;
    MEMORY_IS_WRITTEN();
    _tile_loadd(0, from, 128);
    _tile_loadd(1, from + 64, 128);
    if (t->rows > TILE) {
        _tile_loadd(2, from + TILE * 128, 128);
        _tile_loadd(3, from + TILE * 128 + 64, 128);
    }
    if (t->rows > MAX_ROWS) {
        _tile_loadd(4, from + MAX_ROWS * 128, 128);
        _tile_loadd(5, from + MAX_ROWS * 128 + 64, 128);
    }
}

/* Store the sums; rows of `sums` are `stride` bytes apart. */
INLINE void tiles_store(const Tiles *t, void *sums, ptrdiff_t stride)
{
    char *to = sums;
    _tile_stored(0, to, stride);
    _tile_stored(1, to + 64, stride);
    if (t->rows > TILE) {
        _tile_stored(2, to + TILE * stride, stride);
        _tile_stored(3, to + TILE * stride + 64, stride);
    }
    if (t->rows > MAX_ROWS) {
        _tile_stored(4, to + MAX_ROWS * stride, stride);
        _tile_stored(5, to + MAX_ROWS * stride + 64, stride);
    }
    MEMORY_IS_WRITTEN();
}

/* With 48 rows, six registers have sums, so that each operand has one: the left ones are loaded in an order in which
 * one of them serves both halves of the right operand. A product reads 5/6 of the memory that one of 32 rows reads. */
#define STEP_OF(NAME, MULTIPLY) \
    INLINE void NAME(Tiles *t, const void *a, const void *b) \
    { \
        MEMORY_IS_WRITTEN(); \
        if (t->rows > MAX_ROWS) { \
            _tile_loadd(7, b, 128); \
            _tile_loadd(6, a, STEP_BYTES); \
            MULTIPLY(0, 6, 7); \
            _tile_loadd(6, (const char *)a + TILE * STEP_BYTES, STEP_BYTES); \
            MULTIPLY(2, 6, 7); \
            _tile_loadd(6, (const char *)a + MAX_ROWS * STEP_BYTES, STEP_BYTES); \
            MULTIPLY(4, 6, 7); \
            _tile_loadd(7, (const char *)b + 64, 128); \
            MULTIPLY(5, 6, 7); \
            _tile_loadd(6, (const char *)a + TILE * STEP_BYTES, STEP_BYTES); \
            MULTIPLY(3, 6, 7); \
            _tile_loadd(6, a, STEP_BYTES); \
            MULTIPLY(1, 6, 7); \
            return; \
        } \
        _tile_loadd(4, a, STEP_BYTES); \
        _tile_loadd(6, b, 128); \
        _tile_loadd(7, (const char *)b + 64, 128); \
        MULTIPLY(0, 4, 6); \
        MULTIPLY(1, 4, 7); \
        if (t->rows > TILE) { \
            _tile_loadd(5, (const char *)a + TILE * STEP_BYTES, STEP_BYTES); \
            MULTIPLY(2, 5, 6); \
            MULTIPLY(3, 5, 7); \
        } \
    }

STEP_OF(tiles_step_bf16, _tile_dpbf16ps)
STEP_OF(tiles_step_int8, _tile_dpbsud)

/* Like two calls of `tiles_step_bf16` for up to 16 rows, with right operands b and c. A product depends on the previous
 * one that adds to the same sums; here the products of the other operand hide that latency. */
INLINE void tiles_step_pair(Tiles *t, const void *a, const void *b, const void *c)
{
    MEMORY_IS_WRITTEN();
    _tile_loadd(4, a, STEP_BYTES);
    _tile_loadd(6, b, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, (const char *)b + 64, 128);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, c, 128);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, (const char *)c + 64, 128);
    _tile_dpbf16ps(3, 4, 7);
}

INLINE void tiles_zero_pair(Tiles *t)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void tiles_store_pair(const Tiles *t, void *first, void *second, ptrdiff_t stride)
{
    _tile_stored(0, first, stride);
    _tile_stored(1, (char *)first + 64, stride);
    _tile_stored(2, second, stride);
    _tile_stored(3, (char *)second + 64, stride);
    MEMORY_IS_WRITTEN();
}

#else

typedef struct {
    int rows;
    union {
        float sums[TALL_ROWS][32];
        int32_t totals[TALL_ROWS][32];
    };
    float second[TILE][32]; /* the sums of the second operand of a pair */
} Tiles;

int32_t tiles_permitted(void) { return 1; }

static Tiles tiles_open(int rows) { return (Tiles){.rows = rows}; }

static Tiles tiles_open_pair(int rows) { return tiles_open(rows); }

static void tiles_close(void) {}

INLINE void tiles_zero(Tiles *t) { memset(t->sums, 0, sizeof t->sums); }

INLINE void tiles_load(Tiles *t, const void *sums) { memcpy(t->sums, sums, t->rows * sizeof t->sums[0]); }

INLINE void tiles_store(const Tiles *t, void *sums, ptrdiff_t stride)
{
    for (int row = 0; row < t->rows; row++) memcpy((char *)sums + row * stride, t->sums[row], sizeof t->sums[0]);
}

INLINE float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

INLINE float flushed_bf16(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return flushed(x);
}

INLINE void add_step(int rows, const void *a, const void *b, float sums[][32])
{
    for (int row = 0; row < rows; row++) {
        float even[32] = {0}, odd[32] = {0};
        for (int pair = 0; pair < 16; pair++) {
            uint32_t x, w[32];
            memcpy(&x, (const char *)a + row * STEP_BYTES + 4 * pair, sizeof x);
            memcpy(w, (const char *)b + 128 * pair, sizeof w);
            float first = flushed_bf16(x << 16), second = flushed_bf16(x & 0xffff0000);
            for (int column = 0; column < 32; column++) {
                even[column] = flushed(__builtin_fmaf(first, flushed_bf16(w[column] << 16), even[column]));
                odd[column] = flushed(__builtin_fmaf(second, flushed_bf16(w[column] & 0xffff0000), odd[column]));
            }
        }
        for (int column = 0; column < 32; column++)
            sums[row][column] = flushed(sums[row][column] + flushed(even[column] + odd[column]));
    }
}

static void tiles_step_bf16(Tiles *t, const void *a, const void *b) { add_step(t->rows, a, b, t->sums); }

static void tiles_step_pair(Tiles *t, const void *a, const void *b, const void *c)
{
    add_step(t->rows, a, b, t->sums);
    add_step(t->rows, a, c, t->second);
}

INLINE void tiles_zero_pair(Tiles *t)
{
    tiles_zero(t);
    memset(t->second, 0, sizeof t->second);
}

INLINE void tiles_store_pair(const Tiles *t, void *first, void *second, ptrdiff_t stride)
{
    tiles_store(t, first, stride);
    for (int row = 0; row < t->rows; row++) memcpy((char *)second + row * stride, t->second[row], sizeof t->second[0]);
}

static void tiles_step_int8(Tiles *t, const void *a, const void *b)
{
    const int8_t *x = a;
    const uint8_t *w = b;
    for (int row = 0; row < t->rows; row++)
        for (int quad = 0; quad < 16; quad++)
            for (int column = 0; column < 32; column++)
                for (int i = 0; i < 4; i++)
                    t->totals[row][column] += x[row * STEP_BYTES + 4 * quad + i] * w[128 * quad + 4 * column + i];
}
#endif
