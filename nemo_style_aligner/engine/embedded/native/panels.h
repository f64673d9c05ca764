// Weight matrices as panels: 32 output features each, k in pairs (see pair_index), padded with zeros to whole panels
// and to a multiple of 32 in k. A refit packs them, a pass multiplies with them.
#pragma once
#include "pairs.h"
#include "threads.h"
#include "tiles.h"

constexpr int PANEL = 32;

constexpr int ACCUMULATORS = EMULATE      ? 8
                             : LANES == 8 ? 12
                                          : 24; // vectors of sums that fit in the registers beside the operands
constexpr int VECTOR_ROWS = ACCUMULATORS / 2;   // rows of the vector kernels, with two vectors of columns
constexpr int BLOCK_ROWS = KERNEL == KERNEL_AMX ? 32 : VECTOR_ROWS;

// ---- vector kernel --------------------------------------------------------------------------------------------------

// How often a panel is read for a block of n rows: as many columns are taken at a time as there are registers for.
constexpr int readings(int n) { return n * (PANEL / LANES) <= ACCUMULATORS ? 1 : PANEL / LANES / 2; }

// c[n][32] = a[n rows][k] * panel, n <= VECTOR_ROWS. Advances `ahead` by what was prefetched.
template <class B>
static INLINE void multiply_rows(const act_t* a, int lda, int n, int k, const B* panel, float* c, Ahead& ahead) {
    with_constant<VECTOR_ROWS>(n, [&](auto rows) {
        constexpr int N = decltype(rows)::value, READINGS = readings(N), V = PANEL / LANES / READINGS;
        constexpr int LINES = (2 * PANEL * (int)sizeof(B) / READINGS + 63) / 64;
        const act_t* row[N];
        for (int i = 0; i < N; ++i) row[i] = a + (size_t)i * lda;
        for (int j = 0; j < PANEL / LANES; j += V) {
            vf acc[N][V] = {};
            multiply_pairs<N, V, LINES>(row, k / 2, panel + (size_t)j * LANES * COLUMN_STEP<B>, PANEL, acc, ahead);
            ahead.at += (size_t)ahead.step * (k / 2);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i)
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) store(c + i * PANEL + (j + v) * LANES, acc[i][v]);
        }
    });
}

// ---- products -------------------------------------------------------------------------------------------------------

// a [rows][k] times the panel `index` of `matrix`, [panels][k][32] with pairs of k interleaved; use(first row, number of
// rows, c[][32]) takes each block of the result. Rows of `a` up to a multiple of 32 must be readable. next: the panel
// that this thread reads afterwards.
template <class Use>
static INLINE void multiply_panel(const act_t* a, int k, int rows, const panel_t* matrix, int index,
                                  const panel_t* next, Use&& use) {
    const panel_t* panel = matrix + (size_t)index * k * PANEL;
    alignas(64) float c[BLOCK_ROWS * PANEL];
#if KERNEL != KERNEL_AMX
    // The next panel is prefetched evenly over the products with this one (of another matrix's longer one, a part), so
    // that memory and arithmetic work at once. The hardware's prefetcher is too late when a panel is read at the speed
    // of products.
    const int rest = rows % BLOCK_ROWS;
    const int all_readings = rows / BLOCK_ROWS * readings(BLOCK_ROWS) + (rest ? readings(rest) : 0);
    Ahead ahead = {(const char*)next, 2 * PANEL * (int)sizeof(panel_t) / all_readings};
#endif
    for (int r = 0; r < rows; r += BLOCK_ROWS) {
        const int n = rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS;
#if KERNEL == KERNEL_AMX
        const void* then = r + BLOCK_ROWS < rows ? (const void*)panel : next;
        const LeftRows left{a + (size_t)r * k, 2 * (size_t)k, 32, 16 * (size_t)k};
        if (n > 16) multiply_tiles<2, true>(left, k, panel, then, c);
        else multiply_tiles<1, true>(left, k, panel, then, c);
#else
        multiply_rows(a + (size_t)r * k, k, n, k, panel, c, ahead);
#endif
        use(r, n, c);
    }
}

// ---- packing --------------------------------------------------------------------------------------------------------

// Where output feature `row` lies: its panel and its lane. Gated layers put 16 features of the gate and the same 16 of
// the other half into one panel, so that the activation is applied while the product is in registers.
enum Half { WHOLE = 0, GATE = 1, UP = 2 };
struct Place {
    int panel, lane;
};
static INLINE Place place_of(int row, int half) {
    if (half == WHOLE) return {row / PANEL, row % PANEL};
    return {row / 16, row % 16 + (half == UP ? 16 : 0)};
}

struct PackArguments {
    panel_t* data;         // of the matrix
    const void* source;    // [rows][columns], the columns next to each other
    int64_t source_stride; // elements from row to row
    int64_t run_stride;    // elements from the first row of a run to that of the next
    int32_t run_rows;      // rows that follow each other in the source: query groups lie apart
    int32_t source_is_f32; // else bf16
    int32_t rows, columns, padded_columns;
    int32_t first_row; // of the matrix, where the source's first row goes
    int32_t half;
};

// Stores 32 bytes past the caches, for a line whose other half follows at once: its old content need not be read, and
// the new one takes no place in the caches. Other threads see it after `streams_end`.
static INLINE void stream(void* to, vu8 words) {
#ifdef __AVX__
    typedef long long vl4 __attribute__((vector_size(32)));
    if ((uintptr_t)to % 32 == 0) return __builtin_ia32_movntdq256((vl4*)to, (vl4)words);
#endif
    memcpy(to, &words, sizeof words);
}
static INLINE void streams_end() {
#ifdef __AVX__
    __builtin_ia32_sfence();
#endif
}

// Rows that fill a line: 16 lanes, 64 bytes of a panel for each k (bf16: for each pair of k).
constexpr int LINE_ROWS = 16;

// Eight words of a panel (of two bf16 or one float each, as the second argument's type says) from a source row.
static INLINE vu8 words_of(const float* source, const float*) { return load<vu8>(source); }
static INLINE vu8 words_of(const bf16* source, const bf16*) { return load<vu8>(source); }
static INLINE vu8 words_of(const bf16* source, const float*) {
    typedef uint16_t vh8 __attribute__((vector_size(16)));
    return __builtin_convertvector(load<vh8>(source), vu8) << 16;
}
static INLINE vu8 words_of(const float* source, const bf16*) {
    vu8 a = load<vu8>(source), b = load<vu8>(source + 8);
    a = narrowed(a);
    b = narrowed(b);
    return __builtin_shuffle(a, b, vu8{0, 2, 4, 6, 8, 10, 12, 14}) |
           __builtin_shuffle(a, b, vu8{1, 3, 5, 7, 9, 11, 13, 15}) << 16;
}

// Packs up to LINE_ROWS neighbouring rows of the source, which go to neighbouring lanes of one panel.
template <class Source> static void pack_rows(const PackArguments& p, const Source* source, int row, int n) {
    const Place place = place_of(p.first_row + row, p.half);
    panel_t* panel = p.data + (size_t)place.panel * p.padded_columns * PANEL;
    const Source* rows[LINE_ROWS];
    for (int i = 0; i < n; ++i)
        rows[i] = source + (row + i) / p.run_rows * p.run_stride + (row + i) % p.run_rows * p.source_stride;
    auto value = [&](int i, int k) { return widen(rows[i][k]); };
    constexpr int PER_WORD = sizeof(panel_t) == 2 ? 2 : 1;
    int k = 0;
    for (; n == LINE_ROWS && k + 8 * PER_WORD <= p.columns; k += 8 * PER_WORD) { // two squares of eight words
        vu8 in[8], first[8], second[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) in[i] = words_of(rows[i] + k, panel);
        transpose8(in, first);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) in[i] = words_of(rows[8 + i] + k, panel);
        transpose8(in, second);
#pragma GCC unroll 8
        for (int w = 0; w < 8; ++w) {
            panel_t* line = panel + (size_t)(k + w * PER_WORD) * PANEL + place.lane * PER_WORD;
            stream(line, first[w]);
            stream(line + 8 * PER_WORD, second[w]);
        }
    }
    for (; k < p.columns; ++k)
        for (int i = 0; i < n; ++i) set_as(panel + pair_index(k, place.lane + i, PANEL), value(i, k));
}

// Packs the source rows of line `line` of those that the source reaches; the first and the last may be partial.
static void pack_line(const PackArguments& p, int line) {
    const int begin = line * LINE_ROWS - p.first_row % LINE_ROWS;
    const int row = begin > 0 ? begin : 0, end = begin + LINE_ROWS < p.rows ? begin + LINE_ROWS : p.rows;
    if (p.source_is_f32) pack_rows(p, (const float*)p.source, row, end - row);
    else pack_rows(p, (const bf16*)p.source, row, end - row);
}
static int num_lines(const PackArguments& p) { return (p.first_row % LINE_ROWS + p.rows + LINE_ROWS - 1) / LINE_ROWS; }
