// The innermost loop of the engine's products, both with weights and in attention.
#pragma once
#include "vectors.h"

#if KERNEL == KERNEL_FMA
typedef float act_t; // activations, as they are multiplied with weights
#else
typedef bf16 act_t;
#endif
#if STORAGE_F32
typedef float panel_t; // what matrix products read: weights, keys and values
#else
typedef bf16 panel_t;
#endif

// Right-hand matrices lie in memory as rows of pairs: two neighbouring k of `width` columns. bf16:
// [k / 2][width][2], the order that dot products and tiles want. fp32: [k][width].
template <class B = panel_t> static INLINE size_t pair_index(int k, int column, int width) {
    if (sizeof(B) == 4) return (size_t)k * width + column;
    return (size_t)(k / 2) * 2 * width + column * 2 + (k & 1);
}
template <class B> constexpr int COLUMN_STEP = sizeof(B) == 4 ? 1 : 2; // elements from one column to the next

#if KERNEL == KERNEL_FMA
// LANES columns from j * LANES on of a pair's even or odd k, as floats.
static INLINE vf widen_columns(const float* pair, int width, int j, int odd) {
    return load<vf>(pair + odd * width + j * LANES);
}
static INLINE vf widen_columns(const bf16* pair, int, int j, int odd) {
    vu raw = load<vu>(pair + j * LANES * 2);
    return odd ? (vf)(raw & 0xffff0000u) : (vf)(raw << 16);
}
#else
// LANES pairs of bf16.
static INLINE vu load_pairs(const bf16* pairs) { return load<vu>(pairs); }
#endif

// What the next products will read, prefetched while this one is computed: `step` bytes for each pair of k.
struct Ahead {
    const char* at;
    int step;
};

// acc[i][j] += sum over `pairs` pairs of k of a[i][k] * b[k][column j * LANES ...]. Every element is summed in the
// order of k in one accumulator, whatever ROWS and VECTORS are: a row's result does not depend on the rows it is
// computed with. LINES_AHEAD cache lines of `ahead` are prefetched with each pair.
template <int ROWS, int VECTORS, int LINES_AHEAD = 0, class B>
static INLINE void multiply_pairs(const act_t* const (&a)[ROWS], int pairs, const B* b, int width,
                                  vf (&acc)[ROWS][VECTORS], Ahead ahead = {}) {
    for (int p = 0; p < pairs; ++p, b += 2 * width) {
#pragma GCC unroll 4
        for (int line = 0; line < LINES_AHEAD; ++line) __builtin_prefetch(ahead.at + 64 * line);
        ahead.at += ahead.step;
#if KERNEL == KERNEL_FMA
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
            vf w[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; ++j) w[j] = widen_columns(b, width, j, odd);
#pragma GCC unroll 16
            for (int i = 0; i < ROWS; ++i) {
                vf x = splat(a[i][2 * p + odd]);
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; ++j) acc[i][j] += x * w[j];
            }
        }
#else
        vu w[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; ++j) w[j] = load_pairs(b + j * LANES * 2);
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; ++i) {
            uint32_t pair;
            memcpy(&pair, a[i] + 2 * p, 4);
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; ++j) acc[i][j] = add_dot(acc[i][j], pair, w[j]);
        }
#endif
    }
}
