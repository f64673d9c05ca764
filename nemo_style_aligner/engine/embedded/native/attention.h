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

// The keys and values of a group's head in one layer, of one sequence from a page up to some position.
struct Cached {
    const panel_t *keys, *values; // of page 0
    const int32_t* table;         // the sequence's pages, from that one on
    int pages;
    int first; // position: of that page

    const panel_t* key_page(int i) const { return keys + (size_t)table[i] * GROUPS * PAGE_SIZE; }
    const panel_t* value_page(int i) const { return values + (size_t)table[i] * GROUPS * PAGE_SIZE; }
};

// Prefetches the page that is read PAGES_AHEAD pages after page `at`: keys in order, then values, then the keys of what
// is attended to next. Pages lie anywhere, so the hardware cannot predict them.
constexpr int PAGES_AHEAD = 4;
static INLINE void prefetch_ahead(const Cached& cached, const Cached& next, int at) {
    int i = at + PAGES_AHEAD;
    const panel_t* page;
    if (i < cached.pages) page = cached.key_page(i);
    else if ((i -= cached.pages) < cached.pages) page = cached.value_page(i);
    else if ((i -= cached.pages) < next.pages) page = next.key_page(i);
    else return;
    for (size_t j = 0; j < PAGE_SIZE * sizeof(panel_t); j += 64) __builtin_prefetch((const char*)page + j);
}

// Scores [rows][stride] of `rows` queries against the 16 * pages positions of `cached`.
static INLINE void score_pages(const act_t* const* query, int rows, const Cached& cached, const Cached& next,
                               float* scores, int stride) {
    constexpr int V = PAGE / LANES;
    for (int r = 0; r < rows; r += VECTOR_ROWS) {
        with_constant<VECTOR_ROWS>(rows - r < VECTOR_ROWS ? rows - r : VECTOR_ROWS, [&](auto count) {
            constexpr int N = decltype(count)::value;
            const act_t* q[N];
            for (int i = 0; i < N; ++i) q[i] = query[r + i];
            for (int page = 0; page < cached.pages; ++page) {
                if (r == 0) prefetch_ahead(cached, next, page);
                vf acc[N][V] = {};
                multiply_pairs<N, V>(q, CHANNELS / 2, cached.key_page(page), PAGE, acc);
#pragma GCC unroll 16
                for (int i = 0; i < N; ++i)
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v)
                        store(scores + (size_t)(r + i) * stride + page * PAGE + v * LANES, acc[i][v]);
            }
        });
    }
}

// Bends numbers so that none leaves (-cap, cap).
static INLINE vf soft_cap(vf x, float cap) { return vtanh(x / cap) * cap; }

// Overwrites one row of scores with weights, as act_t, and returns the factor that makes these, and that of `sink`, sum
// to 1. Positions before `begin` and from `length` on get 0. sink: a score of nothing, or null.
static INLINE float softmax_row(float* scores, int begin, int length, int padded, const float* sink) {
    constexpr float scale = ATTN_LOGIT_SOFTCAPPING > 0 ? 1.0f : (float)SOFTMAX_SCALE;
    if (ATTN_LOGIT_SOFTCAPPING > 0)
        for (int i = 0; i < padded; i += LANES)
            store(scores + i, soft_cap(load<vf>(scores + i) * (float)SOFTMAX_SCALE, ATTN_LOGIT_SOFTCAPPING));
    for (int i = 0; i < begin; ++i) scores[i] = -INFINITY;
    for (int i = length; i < padded; ++i) scores[i] = -INFINITY;
    vf most = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES) most = vmax(most, load<vf>(scores + i));
    float peak = max_lanes(most);
    if (sink) peak = std::max(peak, *sink / scale);
    act_t* weights = (act_t*)scores; // never ahead of what is read
    vf sum = {};
    for (int i = 0; i < padded; i += LANES) {
        vf e = vexp((load<vf>(scores + i) - peak) * scale);
        sum += e;
        store_as(weights + i, e);
    }
    return 1.0f / (sum_lanes(sum) + (sink ? std::exp(*sink - peak * scale) : 0.0f));
}

// Vectors of channels that `rows` rows accumulate at a time: all if there are registers for them, at least 16 channels.
constexpr int channel_vectors(int rows) {
    for (int v = CHANNELS / LANES; v > 16 / LANES; v /= 2)
        if (v * rows <= ACCUMULATORS && CHANNELS % (v * LANES) == 0) return v;
    return 16 / LANES;
}

// out[row][channel] = factor[row] * sum over positions of weight * value.
static INLINE void weigh_pages(const act_t* const* weights, const float* factor, int rows, const Cached& cached,
                               const Cached& next, act_t* const* out) {
    for (int r = 0; r < rows; r += VECTOR_ROWS) {
        with_constant<VECTOR_ROWS>(rows - r < VECTOR_ROWS ? rows - r : VECTOR_ROWS, [&](auto count) {
            constexpr int N = decltype(count)::value, V = channel_vectors(N), WIDTH = V * LANES;
            for (int channel = 0; channel < CHANNELS; channel += WIDTH) {
                vf acc[N][V] = {};
                for (int page = 0; page < cached.pages; ++page) {
                    const panel_t* value = cached.value_page(page);
                    if (r == 0 && channel == 0) prefetch_ahead(cached, next, cached.pages + page);
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

// Pages of a sequence that has `length` positions.
constexpr int pages_of(int length) { return (length - 1) / PAGE + 1; }
// The first page that a query at `position` sees with a window of so many positions, its own included; 0: all before it.
constexpr int first_page(int position, int window) { return window ? std::max(0, position - window + 1) / PAGE : 0; }

// Attention of all query heads of key head `group`, for `tokens` tokens of one sequence, from `position` on.
//   queries [tokens][HEADS][CHANNELS], out [tokens][out_stride], window: positions that each sees, 0: all before it,
//   cached: from the first token's first page up to the last of the tokens, sinks: scores of nothing [HEADS], or null,
//   next: what this thread attends to afterwards, scratch [QUERY_ROWS][positions rounded up to a page]
static void attend(const act_t* queries, int tokens, int position, int window, const float* sinks, int group,
                   const Cached& cached, const Cached& next, float* scratch, act_t* out, int out_stride) {
    const int stride = cached.pages * PAGE, rows = tokens * PER_GROUP;
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
    score_pages(query, rows, cached, next, scratch, stride);
    for (int i = 0; i < rows; ++i) {
        const int end = position + i / PER_GROUP + 1 - cached.first, begin = window ? std::max(0, end - window) : 0;
        const float* sink = sinks ? sinks + group * PER_GROUP + i % PER_GROUP : nullptr;
        factor[i] = softmax_row(scratch + (size_t)i * stride, begin, end, stride, sink);
    }
    weigh_pages(weights, factor, rows, cached, next, result);
}
