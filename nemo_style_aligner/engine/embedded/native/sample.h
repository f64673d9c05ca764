// Choosing tokens from logits without filters but masks, row by row: the same as `engine/sampling.py` does.
#pragma once
#include "vectors.h"
#include <algorithm>
#include <vector>

struct SampleArguments {
    float* logits; // [rows][stride]
    const int64_t *keys, *positions;
    const uint8_t* suppress; // [rows]: stop tokens are held back; null: nowhere
    const int64_t* stop_ids;
    const uint8_t* allowed; // [rows][allowed_stride]: a bit for each id below `limit`, the lowest first; null: all
    int64_t* tokens;
    float* logprobs;
    int64_t stride, allowed_stride;
    int32_t rows, vocab, limit, num_stop_ids; // ids at and above `limit` are never chosen but count in log-probs
    int32_t greedy;
    float temperature;
};

// Output number `position` of a splitmix64 generator whose state starts at `key`, as a number in [0, 1).
static double uniform(int64_t key, int64_t position) {
    uint64_t x = (uint64_t)key + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return (double)(x >> 11) * 0x1p-53;
}

// Sum of exp((x[i] - peak) / temperature) over n values.
static float sum_exponentials(const float* x, int n, float peak, float inverse_temperature) {
    vf sum = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += vexp((load<vf>(x + i) - peak) * inverse_temperature);
    if (i < n) {
        vf rest = splat(-INFINITY);
        for (int j = 0; i + j < n; ++j) rest[j] = x[i + j];
        sum += vexp((rest - peak) * inverse_temperature);
    }
    return sum_lanes(sum);
}

static void sample_row(const SampleArguments& s, int row) {
    constexpr int BLOCK = 128; // values summed in float; the sums are added in double
    float* x = s.logits + (size_t)row * s.stride;
    const float inverse = s.greedy ? 1.0f : 1.0f / s.temperature;

    vf poison = {}; // becomes NaN if a value is not finite
    int i = 0;
    for (; i + LANES <= s.vocab; i += LANES) poison += load<vf>(x + i) * 0.0f;
    float poisoned = sum_lanes(poison);
    for (; i < s.vocab; ++i) poisoned += x[i] * 0.0f;
    if (!(poisoned == 0.0f)) {
        s.tokens[row] = 0;
        s.logprobs[row] = NAN;
        return;
    }

    // A row with a mask is sampled from a copy; its log-prob is that of all logits, as below for those without.
    const float* all = x;
    float whole_peak = -INFINITY, whole_sum = 0;
    static thread_local std::vector<float> masked;
    if (s.allowed) {
        vf lanes = splat(-INFINITY);
        int j = 0;
        for (; j + LANES <= s.vocab; j += LANES) lanes = vmax(lanes, load<vf>(x + j));
        whole_peak = max_lanes(lanes);
        for (; j < s.vocab; ++j) whole_peak = std::max(whole_peak, x[j]);
        double total = 0;
        for (int b = 0; b < s.vocab; b += BLOCK)
            total += sum_exponentials(x + b, std::min(BLOCK, s.vocab - b), whole_peak, inverse);
        whole_sum = (float)std::log(total);
        const uint8_t* bits = s.allowed + (size_t)row * s.allowed_stride;
        masked.assign(x, x + s.vocab);
        for (int first = 0; first < s.limit; first += 8)
            for (int j = first; bits[first / 8] != 0xFF && j < std::min(first + 8, s.limit); ++j)
                if (!(bits[first / 8] >> (j - first) & 1)) masked[j] = -INFINITY;
        x = masked.data();
    }

    // Stop tokens held back are no candidates, though they count in the log-probs.
    float excluded_peak = -INFINITY, held[64];
    const int num_held = s.suppress && s.suppress[row] ? s.num_stop_ids : 0;
    for (int h = 0; h < num_held; ++h) {
        held[h] = x[s.stop_ids[h]];
        if (s.stop_ids[h] < s.limit) x[s.stop_ids[h]] = -INFINITY;
        excluded_peak = std::max(excluded_peak, held[h]);
    }
    float peak = -INFINITY;
    int best = 0;
    for (int b = 0; b < s.limit; b += BLOCK) {
        const int n = std::min(BLOCK, s.limit - b);
        vf lanes = splat(-INFINITY);
        int j = 0;
        for (; j + LANES <= n; j += LANES) lanes = vmax(lanes, load<vf>(x + b + j));
        float most = max_lanes(lanes);
        for (; j < n; ++j) most = x[b + j] > most ? x[b + j] : most;
        if (most > peak) {
            peak = most;
            best = b;
        }
    }
    while (x[best] != peak) ++best;

    double total = 0;
    float block_sums[(VOCAB_ROWS * RANKS + BLOCK - 1) / BLOCK];
    const int blocks = (s.limit + BLOCK - 1) / BLOCK;
    for (int b = 0; b < blocks; ++b) {
        block_sums[b] = sum_exponentials(x + b * BLOCK, std::min(BLOCK, s.limit - b * BLOCK), peak, inverse);
        total += block_sums[b];
    }
    int token = best;
    if (!s.greedy) {
        const double target = std::min(uniform(s.keys[row], s.positions[row]), 1.0 - 0x1p-50) * total;
        double below = 0;
        int b = 0;
        while (b + 1 < blocks && below + block_sums[b] <= target) below += block_sums[b++];
        double edge = below;
        token = -1;
        for (int j = b * BLOCK; j < std::min((b + 1) * BLOCK, s.limit); ++j) {
            const float weight = sum_exponentials(x + j, 1, peak, inverse);
            if (weight > 0) token = j; // rounding never leads to an id without weight
            edge += weight;
            if (edge > target && weight > 0) break;
        }
        if (token < 0) token = best;
    }

    if (s.allowed) {
        s.tokens[row] = token;
        s.logprobs[row] = (all[token] - whole_peak) * inverse - whole_sum;
        return;
    }
    // Normaliser over the whole vocabulary.
    for (int j = s.limit; j < s.vocab; ++j) excluded_peak = std::max(excluded_peak, x[j]);
    const float top = std::max(peak, excluded_peak);
    double sum = total * std::exp((double)(peak - top) * inverse);
    for (int h = 0; h < num_held; ++h)
        if (s.stop_ids[h] < s.limit) sum += std::exp((double)(held[h] - top) * inverse);
    for (int j = s.limit; j < s.vocab; ++j) sum += std::exp((double)(x[j] - top) * inverse);
    s.tokens[row] = token;
    s.logprobs[row] = (float)((double)(x[token] - top) * inverse - std::log(sum));
    for (int h = 0; h < num_held; ++h) x[s.stop_ids[h]] = held[h];
}
