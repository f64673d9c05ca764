// Log-probs' parts and gradients from rows of logits, row by row, so that each row is read from memory once.
#pragma once
#include "rows.h"

namespace {

constexpr int SUMMED_VECTORS = 64; // in each partial sum of a row, so that the rounding error of long sums stays small

// Calls f(vector of numbers times `scale`, their place in the row, their number) for all of a row. Lanes beyond its end
// are -inf.
template <class T, class F> INLINE void each_vector(const T* row, int width, float scale, F&& f) {
    const int whole = width / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) f(load_wide(row + i) * scale, i, LANES);
    if (whole == width) return;
    vf last = splat(-INFINITY);
    for (int i = whole; i < width; ++i) last[i - whole] = widen(row[i]) * scale;
    f(last, whole, width - whole);
}

// For each row x = scale * logits: the log of the sum of exponentials, x at the target (0 if the target is negative: it
// is not in this row) and, if `entropy` is not null, the entropy of softmax(x).
template <class T>
void measure_logits(const T* logits, const int64_t* targets, float scale, float* normalizer, float* at_target,
                    float* entropy, int rows, int width, int threads) {
    parallel(threads, rows, [&](int row) {
        const T* x = logits + (size_t)row * width;
        vf peaks = splat(-INFINITY);
        each_vector(x, width, scale, [&](vf v, int, int) { peaks = vmax(v, peaks); }); // skips NaN, which the sum has
        const float peak = max_lanes(peaks);
        vf sums = {}, sum = {}, weighted_sums = {}, weighted_sum = {};
        each_vector(x, width, scale, [&](vf v, int i, int) {
            const vf shifted = v - peak, e = vexp(shifted);
            sum += e;
            // -inf contributes 0 to the entropy, but 0 * -inf would be NaN.
            if (entropy) weighted_sum += shifted > -87.0f ? e * shifted : vf{};
            if (i / LANES % SUMMED_VECTORS == SUMMED_VECTORS - 1) {
                sums += sum;
                weighted_sums += weighted_sum;
                sum = weighted_sum = vf{};
            }
        });
        const float total = sum_lanes(sums + sum);
        normalizer[row] = peak + std::log(total);
        at_target[row] = targets[row] < 0 ? 0.0f : widen(x[targets[row]]) * scale;
        if (entropy) entropy[row] = std::log(total) - sum_lanes(weighted_sums + weighted_sum) / total;
    });
}

// The gradient with respect to x of `measure_logits`, from those of the target's log-prob and, if `grad_entropy` is not
// null, of the entropy. `normalizer` and `entropy` are of whole rows, of which these rows may be slices. `out` may be
// the logits' memory.
template <class T>
void logits_gradient(const T* logits, const int64_t* targets, float scale, const float* normalizer, const float* entropy,
                     const float* grad, const float* grad_entropy, T* out, int rows, int width, int threads) {
    parallel(threads, rows, [&](int row) {
        const T* x = logits + (size_t)row * width;
        T* to = out + (size_t)row * width;
        const int64_t target = targets[row];
        const float lse = normalizer[row], at_target = target < 0 ? 0.0f : widen(x[target]) * scale; // `out` may be x
        const auto slope = [&](auto logprob, auto probability) {
            auto factor = probability * -grad[row];
            if (grad_entropy) factor -= probability * grad_entropy[row] * (logprob + entropy[row]);
            return factor;
        };
        each_vector(x, width, scale, [&](vf v, int i, int n) {
            const vf logprob = v - lse;
            store_some(to + i, slope(logprob > -87.0f ? logprob : splat(-87.0f), vexp(logprob)), n); // -inf * 0 is NaN
        });
        if (target >= 0) set_as(to + target, grad[row] + slope(at_target - lse, std::exp(at_target - lse)));
    });
}

} // namespace
