/* The product of some rows with PANEL columns, from which attention.c and products.c make larger ones. */

#ifndef PANELS_H
#define PANELS_H

#include "vectors.h"

#define PANEL (2 * LANES)
#define TILE_ROWS (LANES == 16 ? 8 : 6) /* two sums each, beside two vectors of b and a number of a: 16 registers */

/* c = a b, or is added to. Element (row, i) of a is row * a_row + i * a_step from its start. Sums go one after the other
   over i: a number depends neither on its place nor on how often the sum is interrupted. */
INLINE void multiply_tile(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row,
                          long inner, int accumulate, int rows) {
    V sums[TILE_ROWS][2] = {{{0}}};
    if (accumulate) {
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            sums[row][0] = load(c + row * c_row);
            sums[row][1] = load(c + row * c_row + LANES);
        }
    }
    for (long i = 0; i < inner; i++, a += a_step, b += b_row) {
        V left = load(b), right = load(b + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            sums[row][0] += a[row * a_row] * left;
            sums[row][1] += a[row * a_row] * right;
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        store(c + row * c_row, sums[row][0]);
        store(c + row * c_row + LANES, sums[row][1]);
    }
}

/* The same for fewer rows than those of a tile. */
INLINE void multiply_last_rows(const float *a, long a_row, long a_step, const float *b, long b_row, float *c, long c_row,
                               long rows, long inner, int accumulate) {
    for (; rows >= 4; rows -= 4, a += 4 * a_row, c += 4 * c_row)
        multiply_tile(a, a_row, a_step, b, b_row, c, c_row, inner, accumulate, 4);
    for (; rows >= 2; rows -= 2, a += 2 * a_row, c += 2 * c_row)
        multiply_tile(a, a_row, a_step, b, b_row, c, c_row, inner, accumulate, 2);
    if (rows) multiply_tile(a, a_row, a_step, b, b_row, c, c_row, inner, accumulate, 1);
}

static long at_most(long size, long limit) { return size < limit ? size : limit; }

static float *aligned(float *scratch) { return (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63); }

#endif
