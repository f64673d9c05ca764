// Products of matrices for causal attention, of numbers or of pairs of bf16.
#pragma once
#include "rows.h"

namespace {

constexpr int TILE = LANES == 16 ? 12 : 6; // rows: at two vectors each, the sums leave registers for operands

// Causal attention needs scores of queries with keys up to their own, not beyond. `multiply` leaves out the rest: which
// numbers these are depends on which dimensions are queries, with positions from `first` on, and which are keys.
enum Wanted {
    ROWS_UP_TO_COLUMNS, // c: scores [key][query]. What is left out is not written
    DEPTH_UP_TO_ROWS,   // a: weights [query][key], which are 0 beyond the query, or not read
    DEPTH_FROM_ROWS,    // a: weights [key][query]
};

// Factors come in words of 32 bits: a float or, if the numbers in memory (T) are bf16 and the processor has dot
// products of them, two bf16 that are neighbours in depth.
template <class T> constexpr int PER_WORD = sizeof(T) == 2 && KERNEL != KERNEL_FMA ? 2 : 1;
template <class T> using Factor = std::conditional_t<PER_WORD<T> == 2, bf16, float>;
constexpr int words(int numbers, int per_word) { return (numbers + per_word - 1) / per_word; }
constexpr int RUN = 256; // Words that are added one by one; sums of many are sums of such, which loses fewer bits

// LANES sums plus the products of one word with each of LANES words.
template <int P> INLINE vf add_products(vf sum, const float* word, vf others) {
#if KERNEL != KERNEL_FMA
    if constexpr (P == 2) {
        uint32_t pair;
        memcpy(&pair, word, 4);
        return add_dot(sum, pair, (vu)others);
    }
#endif
    return sum + splat(*word) * others;
}

// c[m][n] = (or += for DEPTH_FROM_ROWS) the sum over k of a[m * am + k * ak] * b[k * ldb + n], for m < rows,
// n < columns (a multiple of LANES), k < depth. a and b hold words of P numbers, and depth counts words.
template <Wanted WANTED, int P>
void multiply(const float* a, size_t am, size_t ak, const float* b, size_t ldb, float* c, size_t ldc, int rows,
              int columns, int depth, int first) {
    for (int n = 0; n < columns; n += 2 * LANES) {
        with_constant<2>(columns - n >= 2 * LANES ? 2 : 1, [&](auto vectors) {
            constexpr int V = decltype(vectors)::value;
            for (int m = 0; m < rows; m += TILE) {
                if (WANTED == ROWS_UP_TO_COLUMNS && m >= first + n + V * LANES) break;
                const int begin = WANTED == DEPTH_FROM_ROWS ? std::max(0, m - first) / P : 0;
                const int end = WANTED == DEPTH_UP_TO_ROWS ? std::min(depth, words(first + m + TILE, P)) : depth;
                with_constant<TILE>(rows - m < TILE ? rows - m : TILE, [&](auto count) {
                    constexpr int N = decltype(count)::value;
                    float* out = c + m * ldc + n;
                    const float *left = a + m * am + begin * ak, *right = b + begin * ldb + n;
                    bool adds = WANTED == DEPTH_FROM_ROWS;
                    int k = begin;
                    do {
                        vf acc[N][V] = {};
                        for (const int stop = std::min(end, k + RUN); k < stop; ++k, left += ak, right += ldb) {
                            vf w[V];
#pragma GCC unroll 2
                            for (int v = 0; v < V; ++v) w[v] = load<vf>(right + v * LANES);
#pragma GCC unroll 16
                            for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
                                for (int v = 0; v < V; ++v) acc[i][v] = add_products<P>(acc[i][v], left + i * am, w[v]);
                        }
#pragma GCC unroll 16
                        for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
                            for (int v = 0; v < V; ++v) {
                                float* at = out + i * ldc + v * LANES;
                                store(at, adds ? load<vf>(at) + acc[i][v] : acc[i][v]);
                            }
                        adds = true;
                    } while (k < end);
                });
            }
        });
    }
}

// A word of one or two numbers per lane.
template <int P> INLINE vf word_of(vf first, vf second) {
#if KERNEL != KERNEL_FMA
    if constexpr (P == 2) return (vf)pairs_of(first, second);
#endif
    return first;
}

// Joins numbers that are neighbours in a column to words: rows [count][width] of factors -> [words(count)][width]; an
// odd last row is joined with zeros. Returns `to`, where they are written, or `rows` itself for words of one number.
template <int P> const float* joined(const float* rows, int count, int width, float* to) {
    if constexpr (P == 1) return rows;
    const bf16* row = (const bf16*)rows;
    for (int t = 0; t < count; t += 2, row += 2 * width)
        for (int i = 0; i < width; i += LANES) {
            const vu second = t + 1 < count ? widen_integers(row + width + i) : vu{};
            store(to + (size_t)(t / 2) * width + i, widen_integers(row + i) | second << 16);
        }
    return to;
}

} // namespace
