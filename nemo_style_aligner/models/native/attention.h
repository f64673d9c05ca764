// Causal attention within each sequence of a packed row, forward and backward: rotary embedding, products of queries,
// keys and values, softmax.
#pragma once
#include "rows.h"

namespace {

// ---- products -------------------------------------------------------------------------------------------------------

constexpr int TILE = LANES == 16 ? 12 : 6; // rows: at two vectors each, the sums leave registers for operands

// Causal attention needs a query's row of scores only up to the query's own key. `multiply` leaves out the rest: which
// numbers these are depends on which dimensions are queries, with positions from `first` on, and which are keys.
enum Wanted {
    COLUMNS_UP_TO_ROWS, // c: scores [query][key]. What is left out is not written
    DEPTH_UP_TO_ROWS,   // a: weights [query][key], which are 0 beyond the query, or not read
    DEPTH_FROM_ROWS,    // a: weights transposed, [key][query]
};

// Factors come in words of 32 bits: a float or, if the numbers in memory (T) are bf16 and the processor has dot
// products of them, two bf16 that are neighbours in depth.
template <class T> constexpr int PER_WORD = sizeof(T) == 2 && KERNEL != KERNEL_FMA ? 2 : 1;
constexpr int words(int numbers, int per_word) { return (numbers + per_word - 1) / per_word; }

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
    constexpr bool ADD = WANTED == DEPTH_FROM_ROWS;
    for (int n = 0; n < columns; n += 2 * LANES) {
        with_constant<2>(columns - n >= 2 * LANES ? 2 : 1, [&](auto vectors) {
            constexpr int V = decltype(vectors)::value;
            for (int m = 0; m < rows; m += TILE) {
                if (WANTED == COLUMNS_UP_TO_ROWS && n >= first + m + TILE) continue;
                const int begin = WANTED == DEPTH_FROM_ROWS ? std::max(0, m - first) / P : 0;
                const int end = WANTED == DEPTH_UP_TO_ROWS ? std::min(depth, words(first + m + TILE, P)) : depth;
                with_constant<TILE>(rows - m < TILE ? rows - m : TILE, [&](auto count) {
                    constexpr int N = decltype(count)::value;
                    vf acc[N][V];
                    float* out = c + m * ldc + n;
#pragma GCC unroll 16
                    for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
                        for (int v = 0; v < V; ++v) acc[i][v] = ADD ? load<vf>(out + i * ldc + v * LANES) : vf{};
                    const float *left = a + m * am + begin * ak, *right = b + begin * ldb + n;
                    for (int k = begin; k < end; ++k, left += ak, right += ldb) {
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
                        for (int v = 0; v < V; ++v) store(out + i * ldc + v * LANES, acc[i][v]);
                });
            }
        });
    }
}

// Converts the first `width` floats (a multiple of LANES) of each row to words in place, at the row's beginning.
template <int P> void as_words(float* rows, int count, int width, int stride) {
    if constexpr (P == 2)
        for (int t = 0; t < count; ++t, rows += stride)
            for (int i = 0; i < width; i += LANES) store_as((bf16*)rows + i, load<vf>(rows + i));
}

// Transposes words, [tokens][stride] -> [width / P][padded], with 0 beyond the tokens. `width` and `padded` are
// multiples of LANES.
template <int P> void transpose(const float* from, int tokens, int stride, int width, float* to, int padded) {
    for (int j = 0; j < padded; j += 8)
        for (int i = 0; i < width / P; i += 8) {
            vu8 in[8], out[8];
#pragma GCC unroll 8
            for (int l = 0; l < 8; ++l) in[l] = j + l < tokens ? load<vu8>(from + (size_t)(j + l) * stride + i) : vu8{};
            transpose8(in, out);
#pragma GCC unroll 8
            for (int l = 0; l < 8; ++l) store(to + (size_t)(i + l) * padded + j, out[l]);
        }
}

// Joins floats that are neighbours in a column to words, [words(count)][stride]; an odd last row is joined with zeros.
// Returns `to`, where they are written, or `rows` itself for words of one number.
template <int P> const float* joined(const float* rows, int count, int width, int stride, float* to) {
#if KERNEL != KERNEL_FMA
    if constexpr (P == 2) {
        for (int t = 0; t < count; t += 2)
            for (int i = 0; i < width; i += LANES) {
                const float* row = rows + (size_t)t * stride + i;
                const vf second = t + 1 < count ? load<vf>(row + stride) : vf{};
                store(to + (size_t)(t / 2) * stride + i, pairs_of(load<vf>(row), second));
            }
        return to;
    }
#endif
    return rows;
}

} // namespace

extern "C" struct Attention {
    const void* qkv; // [token][group][query heads of the group, then its key and its value][channel]
    void *out, *grad_out; // [token][head][channel]
    void* grad_qkv;
    float* lse;             // [token][head]: log of the sum of the exponentials of a query's scores
    const float *cos, *sin; // [token][rotary]
    const int32_t* lengths; // of the sequences, in the order of their tokens
    int32_t num_sequences, groups, per_group, channels, rotary, is_bf16, threads;
    float scale;
};

namespace {

constexpr int BLOCK = 4 * TILE; // query tokens of a head that are computed together
constexpr int AHEAD = 8;        // how many tokens ahead channels are prefetched

struct Task { // some query heads of a group, of one sequence
    int64_t first; // token
    int length, group, first_head, end_head; // heads in the group
};

// Replaces the scores of keys after the query at `place` by `hidden`, to the end of the vector that has the query's
// own key. Returns the number of columns up to there.
INLINE int hide_later(float* row, int place, float hidden) {
    const int seen = round_up(place + 1, LANES);
    float* last = row + seen - LANES;
    store(last, lane_numbers() > place - (seen - LANES) ? splat(hidden) : load<vf>(last));
    return seen;
}

template <class T> INLINE void clear(T* row, int begin, int end) {
    if (begin < end) std::fill(row + begin, row + end, T(0));
}

// Where tokens' heads are in memory, and how to read and write them. T: type of the numbers in memory.
template <class T> struct Heads {
    const Attention& a;
    const int heads = a.groups * a.per_group;
    const int width = round_up(a.channels, LANES); // of a row of channels in scratch memory; added ones are 0

    // Index of a group's `part`: 0.. its query heads, per_group its key, per_group + 1 its value.
    size_t place(int64_t token, int group, int part) const {
        return ((token * a.groups + group) * (a.per_group + 2) + part) * a.channels;
    }
    int head_of(const Task& task, int head) const { return task.group * a.per_group + head; } // among all
    size_t place_out(int64_t token, const Task& task, int head) const {
        return (token * heads + head_of(task, head)) * a.channels;
    }

    // Reads a head's channels: widened, multiplied by `factor` and, if `turned`, rotated by the token's position
    // (arXiv:2104.09864): channel i with channel i + rotary / 2, those from `rotary` on not at all.
    void fetch(const T* x, int64_t token, bool turned, float factor, float* out) const {
        const int half = turned ? a.rotary / 2 : 0;
        const float *cos = a.cos + token * a.rotary, *sin = a.sin + token * a.rotary;
        for (int i = 0; i < half; i += LANES) {
            const int n = half - i;
            const vf one = load_some(x + i, n), other = load_some(x + i + half, n);
            store_some(out + i, (one * load_some(cos + i, n) - other * load_some(sin + i, n)) * factor, n);
            store_some(out + i + half, (other * load_some(cos + i + half, n) + one * load_some(sin + i + half, n)) * factor, n);
        }
        for (int i = 2 * half; i < a.channels; i += LANES)
            store_some(out + i, load_some(x + i, a.channels - i) * factor, a.channels - i);
        std::fill(out + a.channels, out + width, 0.0f);
    }
    // `fetch` for every token of a sequence: [length][width].
    void fetch_all(const Task& task, int part, bool turned, float* out) const {
        for (int t = 0; t < task.length; ++t) {
            const T* x = (const T*)a.qkv + place(task.first + t, task.group, part);
            if (t + AHEAD < task.length) expect<0>(x + place(AHEAD, 0, 0));
            fetch(x, task.first + t, turned, 1, out + (size_t)t * width);
        }
    }
    // Prefetches the channels of a head that will be read (WRITE 0) or written (1). Tokens lie so far apart that the
    // processor does not do so by itself.
    template <int WRITE> void expect(const T* x) const {
        for (int i = 0; i < a.channels; i += 64 / (int)sizeof(T)) __builtin_prefetch(x + i, WRITE);
    }
    // Goes to the query that is computed BLOCK queries after this one, of the same head or the next. False if there is
    // none.
    bool next_query(const Task& task, int& head, int& place) const {
        place += BLOCK;
        if (place < task.length) return true;
        ++head;
        place %= BLOCK;
        return head < task.end_head && place < task.length;
    }
    // The gradient of `fetch`: from x, that of what it returned, to out, that of what it read.
    void put(const float* x, int64_t token, bool turned, float factor, T* out) const {
        const int half = turned ? a.rotary / 2 : 0;
        const float *cos = a.cos + token * a.rotary, *sin = a.sin + token * a.rotary;
        for (int i = 0; i < half; i += LANES) {
            const int n = half - i;
            const vf one = load_some(x + i, n), other = load_some(x + i + half, n);
            store_some(out + i, (one * load_some(cos + i, n) + other * load_some(sin + i + half, n)) * factor, n);
            store_some(out + i + half, (other * load_some(cos + i + half, n) - one * load_some(sin + i, n)) * factor, n);
        }
        for (int i = 2 * half; i < a.channels; i += LANES)
            store_some(out + i, load<vf>(x + i) * factor, a.channels - i);
    }

    // Every head of every sequence, the longest sequences first. A group's heads, which share keys and values, are
    // one task unless threads would lack work.
    std::vector<Task> tasks() const {
        const int together = (int64_t)a.num_sequences * a.groups >= 4 * a.threads ? a.per_group : 1;
        std::vector<Task> all;
        int64_t first = 0;
        for (int i = 0; i < a.num_sequences; first += a.lengths[i++])
            for (int group = 0; group < a.groups; ++group)
                for (int head = 0; head < a.per_group; head += together)
                    all.push_back({first, a.lengths[i], group, head, head + together});
        std::stable_sort(all.begin(), all.end(), [](const Task& x, const Task& y) { return x.length > y.length; });
        return all;
    }
};

template <class T> void attention_forward(const Attention& a) {
    constexpr int P = PER_WORD<T>;
    typedef std::conditional_t<P == 2, bf16, float> Factor; // of values: attention weights
    const Heads<T> h{a};
    const auto tasks = h.tasks();
    const int width = h.width;
    parallel(a.threads, (int)tasks.size(), [&](int index) {
        const Task& task = tasks[index];
        const int padded = round_up(task.length, LANES);
        const size_t matrix = (size_t)padded * width;
        Scratch scratch(3 * matrix + (size_t)BLOCK * padded + (size_t)2 * BLOCK * width);
        float *rows = scratch.take(matrix), *keys = scratch.take(matrix), *memory = scratch.take(matrix);
        float* scores = scratch.take((size_t)BLOCK * padded);
        float *query = scratch.take((size_t)BLOCK * width), *out = scratch.take((size_t)BLOCK * width);
        h.fetch_all(task, a.per_group, true, rows);
        as_words<P>(rows, task.length, width, width);
        transpose<P>(rows, task.length, width, width, keys, padded);
        h.fetch_all(task, a.per_group + 1, false, rows);
        const float* values = joined<P>(rows, task.length, width, width, memory);
        for (int head = task.first_head; head < task.end_head; ++head)
            for (int begin = 0; begin < task.length; begin += BLOCK) {
                const int count = std::min(BLOCK, task.length - begin), end = begin + count;
                const int64_t token = task.first + begin;
                for (int i = 0; i < count; ++i)
                    h.fetch((const T*)a.qkv + h.place(token + i, task.group, head), token + i, true, a.scale,
                            query + i * width);
                for (int i = 0; i < BLOCK; ++i) {
                    int next = head, place = begin + i;
                    if (h.next_query(task, next, place))
                        h.template expect<0>((const T*)a.qkv + h.place(task.first + place, task.group, next));
                    if (i < count) h.template expect<1>((const T*)a.out + h.place_out(token + i, task, head));
                }
                as_words<P>(query, count, width, width);
                multiply<COLUMNS_UP_TO_ROWS, P>(query, width, 1, keys, padded, scores, padded, count,
                                                round_up(end, LANES), words(a.channels, P), begin);
                float factor[BLOCK];
                for (int i = 0; i < count; ++i) {
                    float* row = scores + (size_t)i * padded;
                    Factor* weights = (Factor*)row; // written in place, never ahead of what is read
                    const int seen = hide_later(row, begin + i, -INFINITY);
                    vf most = splat(-INFINITY), sum = {};
                    for (int j = 0; j < seen; j += LANES) most = vmax(most, load<vf>(row + j));
                    const float peak = max_lanes(most);
                    for (int j = 0; j < seen; j += LANES) {
                        const vf e = vexp(load<vf>(row + j) - peak);
                        sum += e;
                        store_as(weights + j, e);
                    }
                    clear(weights, seen, P * words(end, P));
                    factor[i] = 1 / sum_lanes(sum);
                    a.lse[(token + i) * h.heads + h.head_of(task, head)] = peak - std::log(factor[i]);
                }
                multiply<DEPTH_UP_TO_ROWS, P>(scores, padded, 1, values, width, out, width, count, width, words(end, P),
                                              begin);
                for (int i = 0; i < count; ++i) {
                    T* row = (T*)a.out + h.place_out(token + i, task, head);
                    for (int c = 0; c < a.channels; c += LANES)
                        store_some(row + c, load<vf>(out + i * width + c) * factor[i], a.channels - c);
                }
            }
    });
}

// With scores s, weights p = softmax(s), the result p v and its gradient g: the gradient of v is p' g, that of s is
// p * (g v' - the sum over keys of p * g v'), as in arXiv:2205.14135; p is computed again from s and its `lse`.
template <class T> void attention_backward(const Attention& a) {
    constexpr int P = PER_WORD<T>;
    const Heads<T> h{a};
    const auto tasks = h.tasks();
    const int width = h.width;
    int64_t tokens = 0;
    for (int i = 0; i < a.num_sequences; ++i) tokens += a.lengths[i];
    // Gradients of keys, then of values, [query head][token][width] each: summed over a group's heads afterwards,
    // always in the same order.
    const size_t plane = (size_t)tokens * width;
    const std::unique_ptr<float[]> sums(new float[2 * plane * h.heads]);
    parallel(a.threads, (int)tasks.size(), [&](int index) {
        const Task& task = tasks[index];
        const int padded = round_up(task.length, LANES);
        const size_t matrix = (size_t)padded * width, block = (size_t)BLOCK * padded, rows = (size_t)BLOCK * width;
        Scratch scratch(4 * matrix + 3 * block + 5 * rows);
        float *fetched = scratch.take(matrix), *memory = scratch.take(matrix);
        float *keys_across = scratch.take(matrix), *values_across = scratch.take(matrix);
        float *weights = scratch.take(block), *slopes = scratch.take(block), *across = scratch.take(block);
        float *query = scratch.take(rows), *grad = scratch.take(rows), *result = scratch.take(rows);
        float *query_memory = scratch.take(rows), *grad_memory = scratch.take(rows);
        h.fetch_all(task, a.per_group + 1, false, fetched);
        as_words<P>(fetched, task.length, width, width);
        transpose<P>(fetched, task.length, width, width, values_across, padded);
        h.fetch_all(task, a.per_group, true, fetched);
        const float* keys = joined<P>(fetched, task.length, width, width, memory);
        as_words<P>(fetched, task.length, width, width);
        transpose<P>(fetched, task.length, width, width, keys_across, padded);
        for (int head = task.first_head; head < task.end_head; ++head) {
            float* grad_keys = sums.get() + h.head_of(task, head) * plane + task.first * width;
            float* grad_values = grad_keys + plane * h.heads;
            std::fill(grad_keys, grad_keys + (size_t)task.length * width, 0.0f);
            std::fill(grad_values, grad_values + (size_t)task.length * width, 0.0f);
            for (int begin = 0; begin < task.length; begin += BLOCK) {
                const int count = std::min(BLOCK, task.length - begin), end = begin + count;
                const int columns = round_up(end, LANES), depth = words(a.channels, P);
                const int64_t token = task.first + begin;
                for (int i = 0; i < count; ++i) {
                    h.fetch((const T*)a.qkv + h.place(token + i, task.group, head), token + i, true, a.scale,
                            query + i * width);
                    h.fetch((const T*)a.grad_out + h.place_out(token + i, task, head), token + i, false, 1,
                            grad + i * width);
                }
                for (int i = 0; i < BLOCK; ++i) {
                    int next = head, place = begin + i;
                    if (h.next_query(task, next, place)) {
                        h.template expect<0>((const T*)a.qkv + h.place(task.first + place, task.group, next));
                        h.template expect<0>((const T*)a.grad_out + h.place_out(task.first + place, task, next));
                    }
                    if (i < count) h.template expect<1>((const T*)a.grad_qkv + h.place(token + i, task.group, head));
                }
                const float* queries = joined<P>(query, count, width, width, query_memory);
                const float* grads = joined<P>(grad, count, width, width, grad_memory);
                as_words<P>(query, count, width, width);
                as_words<P>(grad, count, width, width);
                multiply<COLUMNS_UP_TO_ROWS, P>(query, width, 1, keys_across, padded, weights, padded, count, columns,
                                                depth, begin);
                multiply<COLUMNS_UP_TO_ROWS, P>(grad, width, 1, values_across, padded, slopes, padded, count, columns,
                                                depth, begin);
                for (int i = 0; i < count; ++i) {
                    float *weight = weights + (size_t)i * padded, *slope = slopes + (size_t)i * padded;
                    const float lse = a.lse[(token + i) * h.heads + h.head_of(task, head)];
                    const int seen = hide_later(weight, begin + i, -INFINITY);
                    hide_later(slope, begin + i, 0);
                    vf sum = {};
                    for (int j = 0; j < seen; j += LANES) {
                        const vf p = vexp(load<vf>(weight + j) - lse);
                        sum += p * load<vf>(slope + j);
                        store(weight + j, p);
                    }
                    const float mean = sum_lanes(sum);
                    for (int j = 0; j < seen; j += LANES)
                        store(slope + j, load<vf>(weight + j) * (load<vf>(slope + j) - mean));
                    clear(weight, seen, columns);
                    clear(slope, seen, columns);
                }
                multiply<DEPTH_FROM_ROWS, P>(joined<P>(weights, count, columns, padded, across), 1, padded, grads,
                                             width, grad_values, width, end, width, words(count, P), begin);
                multiply<DEPTH_FROM_ROWS, P>(joined<P>(slopes, count, columns, padded, across), 1, padded, queries,
                                             width, grad_keys, width, end, width, words(count, P), begin);
                as_words<P>(slopes, count, columns, padded);
                multiply<DEPTH_UP_TO_ROWS, P>(slopes, padded, 1, keys, width, result, width, count, width, words(end, P),
                                              begin);
                for (int i = 0; i < count; ++i)
                    h.put(result + i * width, token + i, true, a.scale,
                          (T*)a.grad_qkv + h.place(token + i, task.group, head));
            }
        }
    });
    in_pieces(a.threads, (int)tokens, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
            for (int group = 0; group < a.groups; ++group) {
                float* key = sums.get() + group * a.per_group * plane + t * width;
                float* value = key + plane * h.heads;
                for (int head = 1; head < a.per_group; ++head)
                    for (int c = 0; c < width; c += LANES) {
                        store(key + c, load<vf>(key + c) + load<vf>(key + head * plane + c));
                        store(value + c, load<vf>(value + c) + load<vf>(value + head * plane + c));
                    }
                h.put(key, t, true, 1, (T*)a.grad_qkv + h.place(t, group, a.per_group));
                h.put(value, t, false, 1, (T*)a.grad_qkv + h.place(t, group, a.per_group + 1));
            }
    });
}

} // namespace
