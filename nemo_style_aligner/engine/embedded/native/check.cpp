// Does the compiled step compute what it should on this processor? Run once, as a program of its own, before a kernel
// with special instructions is used: a processor, hypervisor or compiler that gets them wrong must not go unnoticed.
// Exit status: 0 if it does, 1 if numbers are wrong, 2 if the operating system refuses the instructions.
#include "step.cpp"
#include <cstdio>
#include <random>

static std::mt19937 generator(1);
static float number() { return std::normal_distribution<float>()(generator); }
static double worse(double a, double b) { return b <= a ? a : std::isnan(b) ? INFINITY : b; } // NaN is the worst

// Relative error of `rows` activations times a matrix of `features` output features, against sums in double.
static double product_error(int rows, int features, int half) {
    const int k = HIDDEN_K, count = half == WHOLE ? panels(features) : (features + 15) / 16;
    std::vector<panel_t> data((size_t)count * k * PANEL);
    std::vector<float> source((size_t)features * HIDDEN);
    for (float& x : source) x = widen(narrow(number()));
    PackArguments pack{data.data(), source.data(), HIDDEN, 0, features, 1, features, HIDDEN, k, 0, half};
    for (int line = 0; line < num_lines(pack); ++line) pack_line(pack, line);
    streams_end();
    std::vector<act_t> a((size_t)round_up(rows, 32) * k);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < HIDDEN; ++j) set_as(&a[(size_t)i * k + j], number());
    double error = 0, size = 0;
    for (int index = 0; index < count; ++index)
        multiply_panel(a.data(), k, rows, data.data(), index, data.data(), [&](int first, int n, const float* block) {
            for (int i = 0; i < n; ++i)
                for (int feature = 0; feature < features; ++feature) {
                    const Place place = place_of(feature, half);
                    if (place.panel != index) continue;
                    double sum = 0;
                    for (int j = 0; j < HIDDEN; ++j)
                        sum += (double)widen(a[(size_t)(first + i) * k + j]) * source[(size_t)feature * HIDDEN + j];
                    error += std::abs(block[i * PANEL + place.lane] - sum);
                    size += std::abs(sum);
                }
        });
    return error / size;
}

// Relative error of the attention of `tokens` tokens that follow `position` earlier ones, against sums in double.
// window: positions that each sees, 0: all before it; sink: a score of nothing, or null.
static double attention_error(int position, int tokens, int window, const float* sink) {
    const int length = position + tokens, pages = pages_of(length);
    std::vector<panel_t> keys((size_t)pages * GROUPS * PAGE_SIZE), values(keys.size());
    std::vector<act_t> queries((size_t)tokens * HEADS * CHANNELS), out((size_t)tokens * HEADS_K);
    std::vector<int32_t> table(pages);
    for (int p = 0; p < pages; ++p) table[p] = pages - 1 - p;
    auto key = [&](int t, int i) -> panel_t& {
        return keys[(size_t)table[t / PAGE] * GROUPS * PAGE_SIZE + pair_index(i, t % PAGE, PAGE)];
    };
    auto value = [&](int t, int i) -> panel_t& {
        return values[(size_t)table[t / PAGE] * GROUPS * PAGE_SIZE + pair_index(t % PAGE, i, CHANNELS)];
    };
    for (int t = 0; t < length; ++t)
        for (int i = 0; i < HEAD_DIM; ++i) set_as(&key(t, i), number()), set_as(&value(t, i), number());
    for (int t = 0; t < tokens; ++t)
        for (int i = 0; i < HEAD_DIM; ++i) set_as(&queries[(size_t)t * HEADS * CHANNELS + i], number());
    std::vector<float> scratch((size_t)QUERY_ROWS * pages * PAGE);
    for (int t = 0; t < tokens; t += QUERY_TOKENS) {
        const int n = std::min(QUERY_TOKENS, tokens - t);
        const int first = first_page(position + t, window);
        const Cached cached{keys.data(), values.data(), table.data() + first, pages_of(position + t + n) - first,
                            first * PAGE};
        const std::vector<float> sinks(HEADS, sink ? *sink : 0);
        attend(&queries[(size_t)t * HEADS * CHANNELS], n, position + t, window, sink ? sinks.data() : nullptr, 0, cached,
               cached, scratch.data(), &out[(size_t)t * HEADS_K], HEADS_K);
    }
    double error = 0, size = 0;
    for (int t = 0; t < tokens; ++t) { // the first head
        std::vector<double> weights(position + t + 1);
        double total = sink ? std::exp((double)*sink) : 0;
        for (size_t s = window ? std::max(0, (int)weights.size() - window) : 0; s < weights.size(); ++s) {
            double dot = 0;
            for (int i = 0; i < HEAD_DIM; ++i)
                dot += (double)widen(queries[(size_t)t * HEADS * CHANNELS + i]) * widen(key((int)s, i));
            total += weights[s] = std::exp(dot / std::sqrt((double)HEAD_DIM));
        }
        for (int i = 0; i < HEAD_DIM; ++i) {
            double sum = 0;
            for (size_t s = 0; s < weights.size(); ++s) sum += weights[s] / total * widen(value((int)s, i));
            error += std::abs(widen(out[(size_t)t * HEADS_K + i]) - sum);
            size += std::abs(sum);
        }
    }
    return error / size;
}

// Largest error of the activation over small and extreme values; infinity unless NaN stays NaN.
static double activation_error() {
    std::vector<float> values{-1e30f, -300.0f, -90.0f, -88.8f, -88.4f, -87.2f, 88.8f, 300.0f};
    for (float x = -87; x < 87; x += 0.37f) values.push_back(x);
    double error = std::isnan(activate(splat(NAN))[0]) ? 0 : INFINITY;
    for (float x : values) {
        const double relu = std::max(0.0f, x);
        const double expected = ACTIVATION == SILU   ? x / (1 + std::exp(-(double)x))
                                : ACTIVATION == GELU ? 0.5 * x * std::erfc(-x * 0.7071067811865476)
                                : ACTIVATION == GELU_TANH ? x / (1 + std::exp(-1.5957691216057308 * x * (1 + 0.044715 * x * x)))
                                                  : relu * relu;
        error = worse(error, std::abs(activate(splat(x))[LANES - 1] - expected) / std::max(1.0, std::abs(expected)));
    }
    return error;
}

int main() {
    if (prepare()) return 2;
    const Tiles tiles;
    const double limit = KERNEL == KERNEL_FMA ? 1e-5 : 0.01;
    double worst = activation_error();
    for (int rows : {1, 5, 16, 17, 37, 64}) {
        worst = worse(worst, product_error(rows, 69, WHOLE));
        worst = worse(worst, product_error(rows, 40, UP));
    }
    const float sink = 2;
    for (int position : {0, 3, 61}) {
        worst = worse(worst, attention_error(position, position == 3 ? 1 : 30, 0, nullptr));
        worst = worse(worst, attention_error(position, position == 3 ? 1 : 30, 21, &sink));
    }
    printf("largest relative error %.2g (limit %.2g)\n", worst, limit);
    return worst < limit ? 0 : 1;
}
