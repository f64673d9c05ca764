// Attention over paged keys and values.
//
// In each layer a page holds 16 positions of every key head. A head's keys are a right-hand matrix of k = channel,
// column = position; its values one of k = position, column = channel (see pair_index). So scores and weighted sums are
// the same products as those with weights.
#pragma once
#include "panels.h"

constexpr int PAGE = 16;
constexpr int CHANNELS = round_up(HEAD_DIM, 16); // of a head in memory; those above HEAD_DIM stay zero
constexpr int PER_GROUP = HEADS / GROUPS;        // query heads that share a key head
constexpr int PAGE_SIZE = PAGE * CHANNELS;       // elements
// Query tokens of one sequence that are computed together, so that keys and values are read once for all of them.
constexpr int QUERY_TOKENS = PER_GROUP >= 24 ? 1 : 24 / PER_GROUP;
constexpr int QUERY_ROWS = QUERY_TOKENS * PER_GROUP;

// Prefetches the next page while one is computed with: pages lie anywhere, so the hardware cannot predict it.
static INLINE void prefetch_page(const panel_t* page) {
    for (size_t i = 0; i < PAGE_SIZE * sizeof(panel_t); i += 64) __builtin_prefetch((const char*)page + i);
}

// Scores [rows][stride] of `rows` queries against positions 0 .. 16 * pages - 1.
static INLINE void score_pages(const act_t* const* query, int rows, const panel_t* keys, const int32_t* table,
                               int pages, float* scores, int stride) {
    constexpr int V = PAGE / LANES;
    for (int r = 0; r < rows; r += VECTOR_ROWS) {
        with_constant<VECTOR_ROWS>(rows - r < VECTOR_ROWS ? rows - r : VECTOR_ROWS, [&](auto count) {
            constexpr int N = decltype(count)::value;
            const act_t* q[N];
            for (int i = 0; i < N; ++i) q[i] = query[r + i];
            for (int page = 0; page < pages; ++page) {
                if (page + 1 < pages) prefetch_page(keys + (size_t)table[page + 1] * GROUPS * PAGE_SIZE);
                vf acc[N][V] = {};
                multiply_pairs<N, V>(q, CHANNELS / 2, keys + (size_t)table[page] * GROUPS * PAGE_SIZE, PAGE, acc);
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v)
                        store(scores + (size_t)(r + i) * stride + page * PAGE + v * LANES, acc[i][v]);
            }
        });
    }
}

// Overwrites one row of scores with weights, as act_t, and returns the factor that makes these sum to 1. Positions from
// `length` on get 0.
static INLINE float softmax_row(float* scores, int length, int padded) {
    const float scale = 1.0f / std::sqrt((float)HEAD_DIM);
    for (int i = length; i < padded; ++i) scores[i] = -INFINITY;
    vf most = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES) most = vmax(most, load<vf>(scores + i));
    const float peak = max_lanes(most);
    act_t* weights = (act_t*)scores; // never ahead of what is read
    vf sum = {};
    for (int i = 0; i < padded; i += LANES) {
        vf e = vexp((load<vf>(scores + i) - peak) * scale);
        sum += e;
        store_as(weights + i, e);
    }
    return 1.0f / sum_lanes(sum);
}

// Vectors of channels that `rows` rows accumulate at a time: all if there are registers for them, at least 16 channels.
constexpr int channel_vectors(int rows) {
    for (int v = CHANNELS / LANES; v > 16 / LANES; v /= 2)
        if (v * rows <= ACCUMULATORS && CHANNELS % (v * LANES) == 0) return v;
    return 16 / LANES;
}

// out[row][channel] = factor[row] * sum over positions of weight * value.
static INLINE void weigh_pages(const act_t* const* weights, const float* factor, int rows, const panel_t* values,
                               const int32_t* table, int pages, act_t* const* out) {
    for (int r = 0; r < rows; r += VECTOR_ROWS) {
        with_constant<VECTOR_ROWS>(rows - r < VECTOR_ROWS ? rows - r : VECTOR_ROWS, [&](auto count) {
            constexpr int N = decltype(count)::value, V = channel_vectors(N), WIDTH = V * LANES;
            for (int channel = 0; channel < CHANNELS; channel += WIDTH) {
                vf acc[N][V] = {};
                for (int page = 0; page < pages; ++page) {
                    const panel_t* value = values + (size_t)table[page] * GROUPS * PAGE_SIZE;
                    if (channel == 0 && page + 1 < pages)
                        prefetch_page(values + (size_t)table[page + 1] * GROUPS * PAGE_SIZE);
                    const act_t* w[N];
                    for (int i = 0; i < N; ++i) w[i] = weights[r + i] + page * PAGE;
                    multiply_pairs<N, V>(w, PAGE / 2, value + channel * COLUMN_STEP<panel_t>, CHANNELS, acc);
                }
                const int valid = HEAD_DIM - channel < WIDTH ? HEAD_DIM - channel : WIDTH;
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i) {
                    alignas(64) act_t result[WIDTH];
#pragma GCC unroll 16
                    for (int v = 0; v < V; ++v) store_as(result + v * LANES, acc[i][v] * factor[r + i]);
                    memcpy(out[r + i] + channel, result, valid * sizeof(act_t));
                }
            }
        });
    }
}

// Attention of all query heads of key head `group`, for `tokens` tokens of one sequence, from `position` on.
//   queries [tokens][HEADS][CHANNELS], out [tokens][out_stride], pages of this layer [page][GROUPS][PAGE_SIZE],
//   scratch [QUERY_ROWS][positions rounded up to a page]
static void attend(const act_t* queries, int tokens, int position, int group, const panel_t* keys,
                   const panel_t* values, const int32_t* table, float* scratch, act_t* out, int out_stride) {
    const int pages = (position + tokens - 1) / PAGE + 1, stride = pages * PAGE, rows = tokens * PER_GROUP;
    const act_t* query[QUERY_ROWS];
    const act_t* weights[QUERY_ROWS];
    act_t* result[QUERY_ROWS];
    float factor[QUERY_ROWS];
    for (int i = 0; i < rows; ++i) {
        const int token = i / PER_GROUP, head = group * PER_GROUP + i % PER_GROUP;
        query[i] = queries + ((size_t)token * HEADS + head) * CHANNELS;
        result[i] = out + (size_t)token * out_stride + head * HEAD_DIM;
        weights[i] = (const act_t*)(scratch + (size_t)i * stride);
    }
    score_pages(query, rows, keys + group * PAGE_SIZE, table, pages, scratch, stride);
    for (int i = 0; i < rows; ++i)
        factor[i] = softmax_row(scratch + (size_t)i * stride, position + i / PER_GROUP + 1, stride);
    weigh_pages(weights, factor, rows, values + group * PAGE_SIZE, table, pages, result);
}
