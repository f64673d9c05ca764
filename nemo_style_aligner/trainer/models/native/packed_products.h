// Products with weight matrices in bf16 that were packed before: out[row][column] = sum over depth of a[row][depth] *
// weight[depth][column], in fp32, rounded once.
//
// A row's result has the same bits whatever rows it is computed with: each number is summed in the order of depth.
#pragma once
#include "weight_gradients.h"

#if KERNEL != KERNEL_FMA
namespace packed_products {

using weight_gradients::TILE_COLUMNS;
using weight_gradients::TILE_ROWS;

constexpr int BLOCK_BYTES = 288 << 10; // of the left factor: a block of rows stays in the L2 cache for all panels
constexpr int TASK_PANELS = 3;         // that a thread multiplies a block with at a time

struct Product {
    const bf16* a;          // [rows][depth]
    const uint32_t* packed; // panels of TILE_COLUMNS columns: [panel][depth / 2][TILE_COLUMNS] pairs of neighbours in depth
    bf16* out;              // [rows][columns]
    int rows, depth, columns;
    int panels() const { return (columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }
    size_t panel_words() const { return (size_t)depth / 2 * TILE_COLUMNS; }
};

// Packs a panel of weight[columns][depth], whose rows are the product's columns: words are transposed.
inline void pack_rows(const bf16* weight, int columns, int depth, int panel, uint32_t* out) {
    const int pairs = depth / 2, first = panel * TILE_COLUMNS;
    const auto word = [&](int lane, int pair) {
        uint32_t bits = 0;
        if (first + lane < columns) memcpy(&bits, weight + (size_t)(first + lane) * depth + 2 * pair, 4);
        return bits;
    };
    for (int lane = 0; lane < TILE_COLUMNS; lane += 8) {
        int pair = 0;
        for (; first + lane + 8 <= columns && pair + 8 <= pairs; pair += 8) {
            vu8 in[8], turned[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i)
                in[i] = load<vu8>((const uint32_t*)(weight + (size_t)(first + lane + i) * depth + 2 * pair));
            transpose8(in, turned);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) store(out + (size_t)(pair + i) * TILE_COLUMNS + lane, turned[i]);
        }
        for (; pair < pairs; ++pair)
            for (int i = lane; i < lane + 8; ++i) out[(size_t)pair * TILE_COLUMNS + i] = word(i, pair);
    }
}

// Packs weight[n][k] for the product with its transpose (is_transposed: columns n, depth k) or itself (columns k, depth n).
inline void pack(const bf16* weight, int n, int k, bool is_transposed, uint32_t* out, int threads) {
    const Product shape{nullptr, nullptr, nullptr, 0, is_transposed ? k : n, is_transposed ? n : k};
    parallel(threads, shape.panels(), [&](int panel) {
        const int column = panel * TILE_COLUMNS;
        uint32_t* to = out + panel * shape.panel_words();
        if (is_transposed) pack_rows(weight, n, k, panel, to);
        else
            weight_gradients::pack<TILE_COLUMNS>(weight + column, n, n / 2, k, std::min(TILE_COLUMNS, k - column), to,
                                                 0);
    });
}

// A tile's `rows` rows in a panel that ends within a vector.
__attribute__((noinline)) inline void store_tile(const float* sums, int rows, bf16* out, int stride, int columns) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; j += LANES)
            store_some(out + (size_t)i * stride + j, load<vf>(sums + i * TILE_COLUMNS + j), columns - j);
}

// What is multiplied with next, prefetched evenly meanwhile: `step` bytes for each pair of depth.
struct Ahead {
    const char* at;
    int step;
};

#if KERNEL == KERNEL_AMX
// A tile: some rows of a[][2 * pairs] times a panel, to rows of out[][stride], of which `columns` columns exist.
INLINE void multiply_tile(const bf16* a, int rows, const uint32_t* panel, int pairs, bf16* out, int stride, int columns,
                          Ahead&) {
    const size_t depth = 2 * (size_t)pairs;
    alignas(64) float sums[TILE_ROWS * TILE_COLUMNS];
    if (rows % 16) { // rows of a tile that do not exist must be readable
        Scratch scratch(TILE_ROWS * pairs);
        a = (const bf16*)memcpy(scratch.take(TILE_ROWS * pairs), a, 2 * depth * rows);
    }
    const LeftRows left{a, 2 * depth, 32, 16 * depth};
    if (rows > 16) multiply_tiles<2, false>(left, (int)depth, (const bf16*)panel, nullptr, sums);
    else multiply_tiles<1, false>(left, (int)depth, (const bf16*)panel, nullptr, sums);
    if (columns < TILE_COLUMNS) return store_tile(sums, rows, out, stride, columns);
    for (int i = 0; i < rows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
            store_as(out + (size_t)i * stride + v * LANES, load<vf>(sums + i * TILE_COLUMNS + v * LANES));
}
#else
template <int N>
INLINE void multiply_rows(const bf16* a, const uint32_t* panel, int pairs, bf16* out, int stride, int columns,
                          Ahead& ahead) {
    // Three rows share a pointer: one for each would take more registers than there are.
    const size_t row_bytes = 4 * (size_t)pairs, step = ahead.step;
    const char *first = (const char*)a, *second = first + 3 * row_bytes, *third = second + 3 * row_bytes,
               *fourth = third + 3 * row_bytes, *next = ahead.at;
    const auto row = [&](int i) {
        return (i < 3 ? first : i < 6 ? second : i < 9 ? third : fourth) + i % 3 * row_bytes;
    };
    vf acc[N][2] = {};
    const uint32_t* const end = panel + (size_t)pairs * TILE_COLUMNS;
    for (; panel != end; panel += TILE_COLUMNS, next += step) {
        __builtin_prefetch(next);
        const vu w[2] = {load<vu>(panel), load<vu>(panel + LANES)};
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
            uint32_t pair;
            memcpy(&pair, row(i), 4);
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) acc[i][v] = add_dot(acc[i][v], pair, w[v]);
        }
        first += 4, second += 4, third += 4, fourth += 4;
        // Keeps the compiler from making pointers of its own.
        __asm__("" : "+r"(first), "+r"(second), "+r"(third), "+r"(fourth));
    }
    ahead.at = next;
    if (columns >= TILE_COLUMNS) {
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) store_as(out + (size_t)i * stride + v * LANES, acc[i][v]);
        return;
    }
    alignas(64) float sums[N * TILE_COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) store(sums + i * TILE_COLUMNS + v * LANES, acc[i][v]);
    store_tile(sums, N, out, stride, columns);
}

// A tile: some rows of a[][2 * pairs] times a panel, to rows of out[][stride], of which `columns` columns exist.
INLINE void multiply_tile(const bf16* a, int rows, const uint32_t* panel, int pairs, bf16* out, int stride, int columns,
                          Ahead& ahead) {
    with_constant<TILE_ROWS>(
        rows, [&](auto n) { multiply_rows<decltype(n)::value>(a, panel, pairs, out, stride, columns, ahead); });
}
#endif

inline void multiply(const Product& p, int threads) {
    const int pairs = p.depth / 2, panels = p.panels();
    const int block = std::max(1, BLOCK_BYTES / (2 * p.depth * TILE_ROWS)) * TILE_ROWS;
    const int blocks = (p.rows + block - 1) / block, groups = (panels + TASK_PANELS - 1) / TASK_PANELS;
    parallel(threads, blocks * groups, [&](int task) {
        const int first = task / groups * block, end = std::min(first + block, p.rows);
        const int first_panel = task % groups * TASK_PANELS, end_panel = std::min(first_panel + TASK_PANELS, panels);
        const int readings = (end - first + TILE_ROWS - 1) / TILE_ROWS;
        const Tiles tiles;
        for (int panel = first_panel; panel < end_panel; ++panel) {
            const uint32_t* words = p.packed + panel * p.panel_words();
            Ahead ahead{(const char*)(words + p.panel_words()), 4 * TILE_COLUMNS / readings};
            const int column = panel * TILE_COLUMNS;
            for (int row = first; row < end; row += TILE_ROWS)
                multiply_tile(p.a + (size_t)row * p.depth, std::min(TILE_ROWS, end - row), words, pairs,
                              p.out + (size_t)row * p.columns + column, p.columns, p.columns - column, ahead);
        }
    });
}

} // namespace packed_products
#endif
