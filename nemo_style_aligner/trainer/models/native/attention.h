// Causal attention of the spans of a packed row, forward and backward: rotary embedding, products of queries, keys and
// values, softmax. A span (spans.py) is a run of queries that see runs of keys; its last query is the last key.
#pragma once
#include "attention_products.h"

extern "C" struct Attention {
    const void* qkv; // [token][group][query heads of the group, then its key and its value][channel]
    void *out, *grad_out; // [token][head][channel]
    void* grad_qkv;
    float* lse;             // [token][head]: log of the sum of the exponentials of a query's scores
    const float* sinks;     // [head]: scores of nothing beside those of the keys; null: none
    float* products;        // [token][head]: backward, a query's result times its gradient; null: not wanted
    const float *cos, *sin; // [token][rotary]
    // Of each span, in the order of their tokens: first query, queries, first run of keys, runs. Spans that see common
    // keys are neighbours.
    const int32_t (*spans)[4];
    const int32_t (*runs)[2]; // first token, tokens
    int32_t num_spans, groups, per_group, channels, rotary, is_bf16, threads;
    int32_t window; // keys that a query sees at most, its own included
    float scale, softcap; // of the scores; softcap c: they are c tanh(score / c), 0: as they are
};

namespace {

constexpr int BLOCK = 4 * LANES; // query tokens of a head that are computed together
constexpr int AHEAD = 8;         // how many tokens ahead channels are prefetched

struct Span {
    int64_t first; // token
    int queries, keys;
    int hidden; // keys before the first query's own: that query sees them all, and its own
    const int32_t (*runs)[2], (*end_runs)[2];
};

struct Family { // spans that see common keys, which lie together
    std::vector<Span> spans;
    int64_t first, end; // of the keys
    int64_t pairs;      // of queries and keys
    int most_keys;      // of a span
    bool is_apart;      // whether keys of some span do not lie together
};

struct Task { // some query heads of a group, of one family
    const Family* family;
    int group, first_head, end_head; // heads in the group
};

// Transposes words, [tokens][stride] -> [stride][BLOCK], with 0 beyond the tokens to the end of a vector.
inline void transpose(const float* from, int tokens, int stride, float* to) {
    for (int j = 0; j < round_up(tokens, LANES); j += 8)
        for (int i = 0; i < stride; i += 8) {
            vu8 in[8], out[8];
#pragma GCC unroll 8
            for (int l = 0; l < 8; ++l) in[l] = j + l < tokens ? load<vu8>(from + (size_t)(j + l) * stride + i) : vu8{};
            transpose8(in, out);
#pragma GCC unroll 8
            for (int l = 0; l < 8; ++l) store(to + (size_t)(i + l) * BLOCK + j, out[l]);
        }
}

// ---- softmax --------------------------------------------------------------------------------------------------------

// Scores and weights are [key][BLOCK queries], so that a vector has LANES queries of one key: sums over keys need no
// sums across lanes. These are the keys that the vector of queries from `column` on can see, of a block of `count`
// queries at positions from `begin` on.
struct Seen {
    int own;  // position of the first query
    int keys; // up to here some query sees them; each sees those up to its own position
    int last; // up to here weights may be read: 0 from `keys` on
    int old;  // up to here some query does not see them any more: each sees `window`
    int window;
    Seen(int column, int begin, int count, int window)
        : own(begin + column), keys(std::min(own + LANES, begin + count)), last(std::min(keys + TILE, begin + count)),
          old(std::min(keys, own + LANES - window)), window(window) {}
    // Replaces what a query cannot see by `hidden`; x: its vector of the first key.
    void hide(float* x, float hidden) const {
        for (int key = 0; key < old; ++key) {
            float* at = x + (size_t)key * BLOCK;
            store(at, lane_numbers() >= key - own + window ? splat(hidden) : load<vf>(at));
        }
        for (int key = own; key < keys; ++key) {
            float* at = x + (size_t)key * BLOCK;
            store(at, lane_numbers() >= key - own ? load<vf>(at) : splat(hidden));
        }
    }
};

// Replaces scores by what their soft cap makes of them. slopes: the derivatives of these, in the same places; or null.
inline void cap_scores(float* scores, int count, int begin, int window, float cap, float* slopes) {
    for (int column = 0; column < count; column += LANES) {
        const Seen seen(column, begin, count, window);
        for (int key = 0; key < seen.keys; ++key) {
            const size_t at = (size_t)key * BLOCK + column;
            const vf t = vtanh(load<vf>(scores + at) / cap);
            store(scores + at, t * cap);
            if (slopes) store(slopes + at, 1.0f - t * t);
        }
    }
}

// Replaces scores by their exponentials after subtracting each query's largest, in words of neighbouring keys:
// [words(keys)][BLOCK]. sums: of a query's exponentials, and of that of `sink`, a score of nothing, if it is not null;
// lse: the log of what the sum would be otherwise.
template <int P>
void exponentiate(float* scores, int count, int begin, int window, const float* sink, float* sums, float* lse) {
    for (int column = 0; column < count; column += LANES) {
        const Seen seen(column, begin, count, window);
        float* x = scores + column;
        seen.hide(x, -INFINITY);
        vf most = splat(-INFINITY), sum = {};
        for (int key = 0; key < seen.keys; ++key) most = vmax(most, load<vf>(x + (size_t)key * BLOCK));
        if (sink) most = vmax(most, splat(*sink)), sum = vexp(splat(*sink) - most);
        for (int key = 0; key < seen.keys;) {
            vf part = {};
            for (const int stop = std::min(seen.keys, key + RUN); key < stop; key += P) {
                vf e[2] = {};
#pragma GCC unroll 2
                for (int p = 0; p < P; ++p)
                    if (key + p < seen.keys) part += e[p] = vexp(load<vf>(x + (size_t)(key + p) * BLOCK) - most);
                store(x + (size_t)(key / P) * BLOCK, word_of<P>(e[0], e[1]));
            }
            sum += part;
        }
        for (int k = words(seen.keys, P); k < words(seen.last, P); ++k) store(x + (size_t)k * BLOCK, vf{});
        store(sums + column, sum);
        store(lse + column, most + vlog(sum));
    }
}

// From scores and their `lse` to weights p, and from gradients g of weights to those of scores, p (g - sum of p g):
// both are replaced, at the beginning of each row, by factors of type F. across: the latter in words of neighbouring
// keys, [words(keys)][BLOCK]; it may be `grads` for words of one number. caps: factors of the latter, or null.
// sums: of p g, by query.
template <class F>
void differentiate(float* scores, float* grads, float* across, int count, int begin, int window, const float* lse,
                   const float* caps, float* sums) {
    constexpr int P = sizeof(F) == 2 ? 2 : 1;
    for (int column = 0; column < count; column += LANES) {
        const Seen seen(column, begin, count, window);
        float *x = scores + column, *g = grads + column;
        seen.hide(x, -INFINITY);
        seen.hide(g, 0);
        const vf normalizer = load<vf>(lse + column);
        vf sum = {};
        for (int key = 0; key < seen.keys;) {
            vf part = {};
            for (const int stop = std::min(seen.keys, key + RUN); key < stop; ++key) {
                const size_t at = (size_t)key * BLOCK;
                const vf p = vexp(load<vf>(x + at) - normalizer);
                part += p * load<vf>(g + at);
                store(x + at, p);
            }
            sum += part;
        }
        store(sums + column, sum);
        // Rows get shorter, so that what is written here has been read.
        for (int key = 0; key < seen.last; key += P) {
            vf slopes[2] = {};
#pragma GCC unroll 2
            for (int i = 0; i < P; ++i) {
                const size_t at = (size_t)(key + i) * BLOCK;
                if (key + i >= seen.last) break;
                const vf p = key + i < seen.keys ? load<vf>(x + at) : vf{};
                slopes[i] = key + i < seen.keys ? p * (load<vf>(g + at) - sum) : vf{};
                if (caps && key + i < seen.keys) slopes[i] *= load<vf>(caps + column + at);
                store_as((F*)(scores + at) + column, p);
                store_as((F*)(grads + at) + column, slopes[i]);
            }
            store(across + (size_t)(key / P) * BLOCK + column, word_of<P>(slopes[0], slopes[1]));
        }
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------

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

    // Reads a head's channels as factors: multiplied by `factor` and, if `turned`, rotated by the token's position
    // (arXiv:2104.09864): channel i with channel i + rotary / 2, those from `rotary` on not at all.
    template <class F> void fetch(const T* x, int64_t token, bool turned, float factor, F* out) const {
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
        if (a.channels < width) std::fill(out + a.channels, out + width, F(0));
    }
    // `fetch` for every key of a family, or its value: [key][width].
    template <class F> void fetch_all(const Task& task, int part, bool turned, F* out) const {
        const Family& family = *task.family;
        for (int64_t t = family.first; t < family.end; ++t, out += width) {
            const T* x = (const T*)a.qkv + place(t, task.group, part);
            if (t + AHEAD < family.end) expect<0>(x + place(AHEAD, 0, 0));
            fetch(x, t, turned, 1, out);
        }
    }
    // Those of a span, [key][width], from its family's: where they lie, if they lie together, else copied to `to`.
    template <class F> const F* seen(const Task& task, const Span& span, const F* all, F* to) const {
        const auto at = [&](const int32_t(&run)[2]) { return all + (run[0] - task.family->first) * (size_t)width; };
        if (span.end_runs - span.runs == 1) return at(*span.runs);
        F* out = to;
        for (auto run = span.runs; run < span.end_runs; out += (size_t)(*run++)[1] * width)
            std::copy_n(at(*run), (size_t)(*run)[1] * width, out);
        return to;
    }
    // Prefetches the channels of a head that will be read (WRITE 0) or written (1). Tokens lie so far apart that the
    // processor does not do so by itself.
    template <int WRITE> void expect(const T* x) const {
        for (int i = 0; i < a.channels; i += 64 / (int)sizeof(T)) __builtin_prefetch(x + i, WRITE);
    }
    // Goes to the query that is computed BLOCK queries after this one, of the same head or the next. False if there is
    // none in this span.
    bool next_query(const Task& task, const Span& span, int& head, int& place) const {
        place += BLOCK;
        if (place < span.queries) return true;
        ++head;
        place %= BLOCK;
        return head < task.end_head && place < span.queries;
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

    // The first key from which on a block's numbers are computed, whose first query is key `own`: no query of the block
    // sees any before it. Words of two numbers begin at even ones.
    int origin(int own) const { return std::max(0, own - a.window + 1) / 2 * 2; }

    std::vector<Family> families() const {
        std::vector<Family> all;
        for (int i = 0; i < a.num_spans; ++i) {
            const int32_t(&of)[4] = a.spans[i];
            Span span{of[0], of[1], 0, 0, a.runs + of[2], a.runs + of[2] + of[3]};
            const int64_t first = (*span.runs)[0];
            if (all.empty() || first >= all.back().end) all.push_back({{}, first, first, 0, 0, false});
            Family& family = all.back();
            for (auto run = span.runs; run < span.end_runs; ++run) {
                span.keys += (*run)[1];
                family.end = std::max(family.end, (int64_t)(*run)[0] + (*run)[1]);
            }
            span.hidden = span.keys - span.queries;
            family.pairs += (int64_t)span.queries * (span.keys + span.hidden);
            family.most_keys = std::max(family.most_keys, span.keys);
            family.is_apart |= of[3] > 1;
            family.spans.push_back(span);
        }
        return all;
    }

    // Every head of every family, the most work first. A group's heads, which share keys and values, are one task
    // unless threads would lack work.
    std::vector<Task> tasks(const std::vector<Family>& families) const {
        const int together = (int64_t)families.size() * a.groups >= 4 * a.threads ? a.per_group : 1;
        std::vector<Task> all;
        for (const Family& family : families)
            for (int group = 0; group < a.groups; ++group)
                for (int head = 0; head < a.per_group; head += together)
                    all.push_back({&family, group, head, head + together});
        const auto is_more = [](const Task& x, const Task& y) { return x.family->pairs > y.family->pairs; };
        std::stable_sort(all.begin(), all.end(), is_more);
        return all;
    }
};

template <class T> void attention_forward(const Attention& a) {
    constexpr int P = PER_WORD<T>;
    typedef Factor<T> F;
    const Heads<T> h{a};
    const auto families = h.families();
    const auto tasks = h.tasks(families);
    const int width = h.width, stride = width / P; // of a row of channels, in numbers and in words
    parallel(a.threads, (int)tasks.size(), [&](int index) {
        const Task& task = tasks[index];
        const Family& family = *task.family;
        const size_t all = (size_t)(family.end - family.first) * width, rows = (size_t)BLOCK * width;
        const size_t matrix = (size_t)family.most_keys * width, apart = family.is_apart ? matrix : 0;
        Scratch scratch(2 * all + matrix + 2 * apart + (size_t)BLOCK * family.most_keys + 3 * rows + 2 * BLOCK);
        float *all_keys = scratch.take(all), *all_values = scratch.take(all);
        float *keys_memory = scratch.take(apart), *values_memory = scratch.take(apart), *memory = scratch.take(matrix);
        float *query = scratch.take(rows), *across = scratch.take(rows), *out = scratch.take(rows);
        float *sums = scratch.take(BLOCK), *lse = scratch.take(BLOCK);
        float* scores = scratch.take((size_t)BLOCK * family.most_keys);
        h.fetch_all(task, a.per_group, true, (F*)all_keys);
        h.fetch_all(task, a.per_group + 1, false, (F*)all_values);
        for (const Span& span : family.spans) {
            const auto keys = (const float*)h.seen(task, span, (const F*)all_keys, (F*)keys_memory);
            const auto seen = (const float*)h.seen(task, span, (const F*)all_values, (F*)values_memory);
            const float* values = joined<P>(seen, span.keys, width, memory);
            for (int head = task.first_head; head < task.end_head; ++head)
                for (int begin = 0; begin < span.queries; begin += BLOCK) {
                    const int count = std::min(BLOCK, span.queries - begin);
                    const int origin = h.origin(span.hidden + begin);
                    const int own = span.hidden + begin - origin, end = own + count; // keys from there on
                    const int64_t token = span.first + begin;
                    for (int i = 0; i < count; ++i)
                        h.fetch((const T*)a.qkv + h.place(token + i, task.group, head), token + i, true, a.scale,
                                (F*)query + i * width);
                    for (int i = 0; i < BLOCK; ++i) {
                        int next = head, place = begin + i;
                        if (h.next_query(task, span, next, place))
                            h.template expect<0>((const T*)a.qkv + h.place(span.first + place, task.group, next));
                        if (i < count) h.template expect<1>((const T*)a.out + h.place_out(token + i, task, head));
                    }
                    transpose(query, count, stride, across);
                    multiply<ROWS_UP_TO_COLUMNS, P>(keys + (size_t)origin * stride, stride, 1, across, BLOCK, scores,
                                                    BLOCK, end, round_up(count, LANES), words(a.channels, P), own);
                    if (a.softcap) cap_scores(scores, count, own, a.window, a.softcap, nullptr);
                    exponentiate<P>(scores, count, own, a.window, a.sinks ? a.sinks + h.head_of(task, head) : nullptr,
                                    sums, lse);
                    multiply<DEPTH_UP_TO_ROWS, P>(scores, 1, BLOCK, values + (size_t)origin / P * width, width, out,
                                                  width, count, width, words(end, P), own);
                    for (int i = 0; i < count; ++i) {
                        const float factor = 1 / sums[i];
                        T* row = (T*)a.out + h.place_out(token + i, task, head);
                        for (int c = 0; c < a.channels; c += LANES)
                            store_some(row + c, load<vf>(out + i * width + c) * factor, a.channels - c);
                        a.lse[(token + i) * h.heads + h.head_of(task, head)] = lse[i];
                    }
                }
        }
    });
}

// With scores s, weights p = softmax(s), the result p v and its gradient g: the gradient of v is p' g, that of s is
// p * (g v' - the sum over keys of p * g v'), as in arXiv:2205.14135; p is computed again from s and its `lse`.
// a.grad_qkv may be a.qkv: a head's queries are read block by block before their gradients are written, and gradients of
// keys and values are written when all of their group's heads have been computed.
template <class T> void attention_backward(const Attention& a) {
    constexpr int P = PER_WORD<T>;
    typedef Factor<T> F;
    const Heads<T> h{a};
    const auto families = h.families();
    const auto tasks = h.tasks(families);
    const int width = h.width, stride = width / P;
    // Gradients of a family's keys, then of its values, [key][width] each, are summed over spans, then over a group's
    // heads, always in the same order: at once or, where heads are tasks of their own, afterwards.
    const bool is_split = tasks.size() > families.size() * a.groups;
    int64_t keys_of_row = 0;
    for (const Family& family : families) keys_of_row = std::max(keys_of_row, family.end);
    const std::unique_ptr<float[]> of_heads(is_split ? new float[2 * (size_t)keys_of_row * width * h.heads] : nullptr);
    const auto of_head = [&](const Task& task, int head) {
        return of_heads.get() + 2 * ((size_t)h.head_of(task, head) * keys_of_row + task.family->first) * width;
    };
    const auto add = [&](size_t count, float* sum, const float* other) {
        for (size_t i = 0; i < count; i += LANES) store(sum + i, load<vf>(sum + i) + load<vf>(other + i));
    };
    const auto put = [&](const Task& task, const float* sum) {
        for (int part = 0; part < 2; ++part)
            for (int64_t t = task.family->first; t < task.family->end; ++t, sum += width)
                h.put(sum, t, part == 0, 1, (T*)a.grad_qkv + h.place(t, task.group, a.per_group + part));
    };
    parallel(a.threads, (int)tasks.size(), [&](int index) {
        const Task& task = tasks[index];
        const Family& family = *task.family;
        const size_t all = (size_t)(family.end - family.first) * width, rows = (size_t)BLOCK * width;
        const size_t matrix = (size_t)family.most_keys * width, block = (size_t)BLOCK * family.most_keys;
        const size_t apart = family.is_apart ? matrix : 0;
        Scratch scratch(6 * all + matrix + 4 * apart + (a.softcap ? 4 : 3) * block + 7 * rows + 2 * BLOCK);
        float *sum = scratch.take(2 * all), *own = scratch.take(2 * all), *piece = scratch.take(2 * apart);
        float *all_keys = scratch.take(all), *all_values = scratch.take(all);
        float *keys_memory = scratch.take(apart), *values_memory = scratch.take(apart), *memory = scratch.take(matrix);
        float *query = scratch.take(rows), *query_memory = scratch.take(rows), *query_across = scratch.take(rows);
        float *grad = scratch.take(rows), *grad_memory = scratch.take(rows), *grad_across = scratch.take(rows);
        float *result = scratch.take(rows), *lse = scratch.take(BLOCK), *sums = scratch.take(BLOCK);
        float *weights = scratch.take(block), *slopes = scratch.take(block);
        float* slopes_across = P == 1 ? slopes : scratch.take(block);
        float* caps = a.softcap ? scratch.take(block) : nullptr;
        h.fetch_all(task, a.per_group, true, (F*)all_keys);
        h.fetch_all(task, a.per_group + 1, false, (F*)all_values);
        const float *keys = nullptr, *values = nullptr, *keys_joined = nullptr;
        const Span* fetched = nullptr;
        for (int head = task.first_head; head < task.end_head; ++head) {
            float* total = is_split ? of_head(task, head) : head == task.first_head ? sum : own;
            std::fill(total, total + 2 * all, 0.0f);
            for (const Span& span : family.spans) {
                if (fetched != &span) { // a family of one span has the same keys for all heads
                    keys = (const float*)h.seen(task, span, (const F*)all_keys, (F*)keys_memory);
                    values = (const float*)h.seen(task, span, (const F*)all_values, (F*)values_memory);
                    keys_joined = joined<P>(keys, span.keys, width, memory);
                    fetched = &span;
                }
                // Where the span's keys lie together, so do their gradients.
                const bool is_apart = span.end_runs - span.runs > 1;
                const size_t place = ((*span.runs)[0] - family.first) * (size_t)width, size = (size_t)span.keys * width;
                float* grad_keys = is_apart ? piece : total + place;
                float* grad_values = is_apart ? piece + size : total + all + place;
                if (is_apart) std::fill(piece, piece + 2 * size, 0.0f);
                for (int begin = 0; begin < span.queries; begin += BLOCK) {
                    const int count = std::min(BLOCK, span.queries - begin);
                    const int origin = h.origin(span.hidden + begin);
                    const int first = span.hidden + begin - origin, end = first + count; // keys from there on
                    const size_t from = (size_t)origin * stride, from_key = (size_t)origin * width;
                    const int columns = round_up(count, LANES), depth = words(a.channels, P);
                    const int64_t token = span.first + begin;
                    for (int i = 0; i < count; ++i) {
                        h.fetch((const T*)a.qkv + h.place(token + i, task.group, head), token + i, true, a.scale,
                                (F*)query + i * width);
                        h.fetch((const T*)a.grad_out + h.place_out(token + i, task, head), token + i, false, 1,
                                (F*)grad + i * width);
                        lse[i] = a.lse[(token + i) * h.heads + h.head_of(task, head)];
                    }
                    std::fill(lse + count, lse + BLOCK, 0.0f);
                    for (int i = 0; i < BLOCK; ++i) {
                        int next = head, place = begin + i;
                        if (h.next_query(task, span, next, place)) {
                            h.template expect<0>((const T*)a.qkv + h.place(span.first + place, task.group, next));
                            h.template expect<0>((const T*)a.grad_out + h.place_out(span.first + place, task, next));
                        }
                        if (i < count)
                            h.template expect<1>((const T*)a.grad_qkv + h.place(token + i, task.group, head));
                    }
                    transpose(query, count, stride, query_across);
                    transpose(grad, count, stride, grad_across);
                    multiply<ROWS_UP_TO_COLUMNS, P>(keys + from, stride, 1, query_across, BLOCK, weights, BLOCK, end,
                                                    columns, depth, first);
                    multiply<ROWS_UP_TO_COLUMNS, P>(values + from, stride, 1, grad_across, BLOCK, slopes, BLOCK, end,
                                                    columns, depth, first);
                    if (caps) cap_scores(weights, count, first, a.window, a.softcap, caps);
                    differentiate<F>(weights, slopes, slopes_across, count, first, a.window, lse, caps, sums);
                    multiply<DEPTH_FROM_ROWS, P>(weights, BLOCK, 1, joined<P>(grad, count, width, grad_memory), width,
                                                 grad_values + from_key, width, end, width, words(count, P), first);
                    multiply<DEPTH_FROM_ROWS, P>(slopes, BLOCK, 1, joined<P>(query, count, width, query_memory), width,
                                                 grad_keys + from_key, width, end, width, words(count, P), first);
                    multiply<DEPTH_UP_TO_ROWS, P>(slopes_across, 1, BLOCK, keys_joined + from_key / P, width, result,
                                                  width, count, width, words(end, P), first);
                    for (int i = 0; a.products && i < count; ++i)
                        a.products[(token + i) * h.heads + h.head_of(task, head)] = sums[i];
                    for (int i = 0; i < count; ++i)
                        h.put(result + i * width, token + i, true, a.scale,
                              (T*)a.grad_qkv + h.place(token + i, task.group, head));
                }
                if (!is_apart) continue;
                for (auto run = span.runs; run < span.end_runs; ++run) {
                    const size_t to = ((*run)[0] - family.first) * (size_t)width, count = (size_t)(*run)[1] * width;
                    add(count, total + to, grad_keys);
                    add(count, total + all + to, grad_values);
                    grad_keys += count, grad_values += count;
                }
            }
            if (total == own) add(2 * all, sum, own);
        }
        if (!is_split) put(task, sum);
    });
    if (is_split)
        parallel(a.threads, (int)tasks.size(), [&](int index) {
            const Task& task = tasks[index];
            if (task.first_head > 0) return;
            const size_t count = 2 * (size_t)(task.family->end - task.family->first) * width;
            for (int head = 1; head < a.per_group; ++head) add(count, of_head(task, 0), of_head(task, head));
            put(task, of_head(task, 0));
        });
}

} // namespace
