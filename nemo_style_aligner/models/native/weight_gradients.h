// Gradients of weight matrices in bf16: total[n][k] += sum over tokens of columns[token][n] * rows[token][k] in fp32.
//
// The sum is over tokens, which are the rows of both factors. A library that wants them next to each other transposes a
// factor. Dot products need no more than pairs of tokens next to each other.
#pragma once
#include "rows.h"

#if KERNEL == KERNEL_DOT
namespace weight_gradients {

constexpr int TILE_ROWS = 12; // of the total, with two vectors of columns: as many sums as there are registers for
constexpr int TILE_COLUMNS = 2 * LANES;
constexpr int BLOCK_TILES = 8; // of a task: its left factor stays in the L2 cache
constexpr int BLOCK_ROWS = TILE_ROWS * BLOCK_TILES;
constexpr int AHEAD = 16; // how many pairs of tokens ahead are prefetched

struct Product {
    float* total; // [n][k]
    const bf16 *columns, *rows;
    int tokens, n, k;
    int pairs() const { return (tokens + 1) / 2; }
};

// The first `count` of LANES numbers, as bits; the others are 0.
INLINE vu load_bits(const bf16* x, int count) {
#if EMULATE
    vu v = {};
    for (int i = 0; i < std::min(count, LANES); ++i) v[i] = x[i];
    return v;
#else
    const __mmask16 mask = count >= LANES ? 0xffff : (1u << std::max(count, 0)) - 1;
    return (vu)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
#endif
}

// Packs `width` columns of x[token][stride] by pairs of tokens, in panels of WIDTH columns: out[panel][pair][WIDTH], with
// `panel` words from one panel to the next. Vectors are written whole, so a panel's last pair needs room for one more.
template <int WIDTH>
void pack(const bf16* x, int tokens, int stride, int width, uint32_t* out, size_t panel) {
    constexpr int VECTORS = (WIDTH + LANES - 1) / LANES;
    for (int t = 0; t < tokens; t += 2, x += 2 * (size_t)stride, out += WIDTH) {
        const bool has_second = t + 1 < tokens;
        for (int i = 0; i < width; i += 32)
            for (int row = 0; row < 2; ++row) __builtin_prefetch(x + (2 * AHEAD + row) * (size_t)stride + i);
        uint32_t* to = out;
        for (int i = 0; i < width; i += WIDTH, to += panel)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) {
                const int left = width - i - v * LANES;
                const vu first = load_bits(x + i + v * LANES, left);
                const vu second = load_bits(x + stride + i + v * LANES, has_second ? left : 0);
                store(to + v * LANES, first | second << 16);
            }
    }
}

// A tile: left[pair][TILE_ROWS] times right[pair][TILE_COLUMNS], added to N rows of total[][stride].
template <int N>
INLINE void add_tile(const uint32_t* left, const uint32_t* right, int pairs, float* total, int stride, int columns) {
    for (int i = 0; i < N; ++i)
        for (int v = 0; v < 2; ++v) __builtin_prefetch(total + (size_t)i * stride + v * LANES, 1);
    vf sums[N][2] = {};
    for (int p = 0; p < pairs; ++p, left += TILE_ROWS, right += TILE_COLUMNS) {
        const vu w[2] = {load<vu>(right), load<vu>(right + LANES)};
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) sums[i][v] = add_dot(sums[i][v], left[i], w[v]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            float* out = total + (size_t)i * stride + v * LANES;
            if (columns >= (v + 1) * LANES) store(out, load<vf>(out) + sums[i][v]);
            else
                for (int j = 0; j < columns - v * LANES; ++j) out[j] += sums[i][v][j];
        }
}

// Adds to at most BLOCK_ROWS rows of the total, from `first` on. `left` is room to pack them, `right` has all columns.
inline void add_block(const Product& p, int first, uint32_t* left, const uint32_t* right) {
    const int end = std::min(first + BLOCK_ROWS, p.n), pairs = p.pairs();
    const size_t panel = (size_t)pairs * TILE_ROWS + LANES;
    pack<TILE_ROWS>(p.columns + first, p.tokens, p.n, end - first, left, panel);
    for (int column = 0; column < p.k; column += TILE_COLUMNS)
        for (int row = first, i = 0; row < end; row += TILE_ROWS, ++i)
            with_constant<TILE_ROWS>(std::min(TILE_ROWS, end - row), [&](auto rows) {
                add_tile<decltype(rows)::value>(left + i * panel, right + (size_t)column * pairs, pairs,
                                                p.total + (size_t)row * p.k + column, p.k, p.k - column);
            });
}

inline void add_product(const Product& p, int threads) {
    const int panels = (p.k + TILE_COLUMNS - 1) / TILE_COLUMNS, pairs = p.pairs();
    static thread_local std::vector<uint32_t> memory; // the caller's, kept for its next call
    const size_t needed = (size_t)panels * pairs * TILE_COLUMNS + 2 * LANES;
    if (memory.size() < needed) memory.resize(needed);
    uint32_t* const right = (uint32_t*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    parallel(threads, panels, [&](int i) {
        const int column = i * TILE_COLUMNS;
        pack<TILE_COLUMNS>(p.rows + column, p.tokens, p.k, std::min(TILE_COLUMNS, p.k - column),
                           right + (size_t)column * pairs, 0);
    });
    parallel(threads, (p.n + BLOCK_ROWS - 1) / BLOCK_ROWS, [&](int i) {
        const size_t block = BLOCK_TILES * ((size_t)pairs * TILE_ROWS + LANES);
        Scratch scratch(block);
        add_block(p, i * BLOCK_ROWS, (uint32_t*)scratch.take(block), right);
    });
}

} // namespace weight_gradients
#endif
