// Gradients of weight matrices in bf16: total[n][k] += sum over tokens of columns[token][n] * rows[token][k] in fp32.
//
// The sum is over tokens, which are the rows of both factors. A library that wants them next to each other transposes a
// factor. Dot products need no more than pairs of tokens next to each other, AMX tiles 32 tokens in the left factor.
#pragma once
#include "rows.h"
#include "tiles.h"

#if KERNEL != KERNEL_FMA
namespace weight_gradients {

#if KERNEL == KERNEL_AMX
constexpr int TILE_ROWS = 32;  // of the total: two AMX tiles below each other, and two beside each other
constexpr int BLOCK_TILES = 4; // of a task: its left factor stays in the L2 cache
constexpr int TOKENS = 32;     // that are multiplied at a time
#else
constexpr int TILE_ROWS = 12; // with two vectors of columns: as many sums as there are registers for
constexpr int BLOCK_TILES = 8;
constexpr int TOKENS = 2;
#endif
constexpr int TILE_COLUMNS = 2 * LANES;
constexpr int BLOCK_ROWS = TILE_ROWS * BLOCK_TILES;
constexpr int AHEAD = 16; // how many pairs of tokens ahead are prefetched

struct Product {
    float* total; // [n][k]
    const bf16 *columns, *rows;
    int tokens, n, k;
    int pairs() const { return round_up(tokens, TOKENS) / 2; }
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

// A vector of words, each a pair of numbers of tokens t and t + 1 at x[t][stride]; 0 where there is no such token.
INLINE vu pairs_at(const bf16* x, int t, int tokens, int stride, int count) {
    const bf16* const at = x + (size_t)t * stride;
    const vu first = load_bits(at, t < tokens ? count : 0);
    const vu second = load_bits(at + stride, t + 1 < tokens ? count : 0);
    return first | second << 16;
}

// Packs `width` columns of x[token][stride] by pairs of tokens, in panels of WIDTH columns: out[panel][pair][WIDTH],
// with `panel` words from one panel to the next. Vectors are written whole, so a panel's last pair needs room for one
// more.
template <int WIDTH>
void pack(const bf16* x, int tokens, int pairs, int stride, int width, uint32_t* out, size_t panel) {
    constexpr int VECTORS = (WIDTH + LANES - 1) / LANES;
    for (int t = 0; t < 2 * pairs; t += 2, out += WIDTH) {
        for (int i = 0; i < width; i += 32)
            for (int row = 0; row < 2; ++row) __builtin_prefetch(x + (t + 2 * AHEAD + row) * (size_t)stride + i);
        uint32_t* to = out;
        for (int i = 0; i < width; i += WIDTH, to += panel)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) {
                const int column = i + v * LANES;
                store(to + v * LANES, pairs_at(x + column, t, tokens, stride, width - column));
            }
    }
}

#if KERNEL == KERNEL_AMX
typedef LeftRows Left;

// The words of 16 vectors: words[i][j] and words[j][i] change places.
INLINE void transpose(vu (&words)[16]) {
#pragma GCC unroll 4
    for (int size = 1; size < 16; size *= 2) {
        const vu lanes = (vu)lane_numbers(), is_upper = (vu)((lanes & size) != 0);
        const vu upper = (is_upper & (lanes + 16 - size)) | (~is_upper & lanes);
        const vu lower = (is_upper & (lanes + 16)) | (~is_upper & (lanes + size));
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
            if (!(i & size)) {
                const vu a = words[i], b = words[i + size];
                words[i] = __builtin_shuffle(a, b, upper);
                words[i + size] = __builtin_shuffle(a, b, lower);
            }
    }
}

// Packs `width` columns of x[token][stride] as tiles of 16 columns by 32 tokens.
inline Left pack_left(const bf16* x, int tokens, int pairs, int stride, int width, uint32_t* out) {
    const size_t below = (size_t)pairs * 16;
    for (int t = 0; t < 2 * pairs; t += TOKENS)
        for (int i = 0; i < width; i += 16) {
            vu words[16];
            for (int p = 0; p < 16; ++p) {
                for (int row = 0; row < 2; ++row)
                    __builtin_prefetch(x + (size_t)(t + TOKENS + 2 * p + row) * stride + i);
                words[p] = pairs_at(x + i, t + 2 * p, tokens, stride, width - i);
            }
            transpose(words);
            uint32_t* const to = out + i / 16 * below + (size_t)t * 8;
            for (int p = 0; p < 16; ++p) store(to + p * 16, words[p]);
        }
    return {(const bf16*)out, 64, 512, 2 * below};
}

// A tile: `rows` columns of left, from `first` on, times right[pair][TILE_COLUMNS], added to rows of total[][stride].
INLINE void add_tile(Left left, int first, int rows, const uint32_t* right, int pairs, float* total, int stride,
                     int columns) {
    alignas(64) float sums[TILE_ROWS * TILE_COLUMNS];
    left.at += first / 16 * left.below;
    if (rows > 16) multiply_tiles<2, false>(left, 2 * pairs, (const bf16*)right, nullptr, sums);
    else multiply_tiles<1, false>(left, 2 * pairs, (const bf16*)right, nullptr, sums);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < std::min(columns, TILE_COLUMNS); j += LANES) {
            float* const out = total + (size_t)i * stride + j;
            store_some(out, load_some(out, columns - j) + load<vf>(sums + i * TILE_COLUMNS + j), columns - j);
        }
}
#else
struct Left {
    const uint32_t* at; // [tile][pair][TILE_ROWS]
    size_t tile;        // words
};

inline Left pack_left(const bf16* x, int tokens, int pairs, int stride, int width, uint32_t* out) {
    const size_t tile = (size_t)pairs * TILE_ROWS + LANES;
    pack<TILE_ROWS>(x, tokens, pairs, stride, width, out, tile);
    return {out, tile};
}

// left[pair][TILE_ROWS] times right[pair][TILE_COLUMNS], added to N rows of total[][stride].
template <int N>
INLINE void add_rows(const uint32_t* left, const uint32_t* right, int pairs, float* total, int stride, int columns) {
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

// A tile: `rows` columns of left, from `first` on, times right[pair][TILE_COLUMNS], added to rows of total[][stride].
INLINE void add_tile(Left left, int first, int rows, const uint32_t* right, int pairs, float* total, int stride,
                     int columns) {
    with_constant<TILE_ROWS>(rows, [&](auto n) {
        const uint32_t* const at = left.at + first / TILE_ROWS * left.tile;
        add_rows<decltype(n)::value>(at, right, pairs, total, stride, columns);
    });
}
#endif

// Adds to at most BLOCK_ROWS rows of the total, from `first` on. `room` is for them, packed; `right` has all columns.
inline void add_block(const Product& p, int first, uint32_t* room, const uint32_t* right) {
    const int end = std::min(first + BLOCK_ROWS, p.n), pairs = p.pairs();
    const Left left = pack_left(p.columns + first, p.tokens, pairs, p.n, end - first, room);
    for (int column = 0; column < p.k; column += TILE_COLUMNS)
        for (int row = first; row < end; row += TILE_ROWS)
            add_tile(left, row - first, std::min(TILE_ROWS, end - row), right + (size_t)column * pairs, pairs,
                     p.total + (size_t)row * p.k + column, p.k, p.k - column);
}

inline void add_product(const Product& p, int threads) {
    const int panels = (p.k + TILE_COLUMNS - 1) / TILE_COLUMNS, pairs = p.pairs();
    static thread_local std::vector<uint32_t> memory; // the caller's, kept for its next call
    const size_t needed = (size_t)panels * pairs * TILE_COLUMNS + 2 * LANES;
    if (memory.size() < needed) memory.resize(needed);
    uint32_t* const right = (uint32_t*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    parallel(threads, panels, [&](int i) {
        const int column = i * TILE_COLUMNS;
        pack<TILE_COLUMNS>(p.rows + column, p.tokens, pairs, p.k, std::min(TILE_COLUMNS, p.k - column),
                           right + (size_t)column * pairs, 0);
    });
    parallel(threads, (p.n + BLOCK_ROWS - 1) / BLOCK_ROWS, [&](int i) {
        const size_t block = BLOCK_TILES * ((size_t)pairs * TILE_ROWS + LANES);
        Scratch scratch(block);
        const Tiles tiles;
        add_block(p, i * BLOCK_ROWS, (uint32_t*)scratch.take(block), right);
    });
}

} // namespace weight_gradients
#endif
