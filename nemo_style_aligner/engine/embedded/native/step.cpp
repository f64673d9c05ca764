// One forward pass of a decoder-only transformer over any mix of decoding tokens and prompt chunks.
//
// Compiled once per model shape; the shape comes as macros from `native/library.py`:
//   LAYERS HIDDEN HEADS GROUPS HEAD_DIM ROTARY FFN VOCAB_ROWS   this rank's sizes (ROTARY: channels that are rotated)
//   the fields of `architecture.LayerFeatures`, and of the model's ends, in capitals; 0 for None
//   EXPERTS EXPERTS_PER_TOKEN EXPERT_FFN SHARED_FFN ROUTER_SCALING  0 in a model without experts
//   ROUTER_SIGMOID ROUTER_NORMALIZED: the scores' function, and whether weights are of the chosen alone
//   GATE_SLOPE GATE_LIMIT  of a clamped SwiGLU
//   EPSILON  RANKS: how many ranks hold the model together
//   STORAGE_F32 (else bf16)  KERNEL  LANES  EMULATE
#include "attention.h"
#include "sample.h"

enum { RMSNORM, RMSNORM1P, LAYERNORM, LAYERNORM1P };
enum { BEFORE, AFTER, BOTH };
enum { SILU, GELU, GELU_TANH, SQUARED_RELU };
constexpr bool IS_LAYER_NORM = NORMALIZATION == LAYERNORM || NORMALIZATION == LAYERNORM1P;
constexpr float NORM_OFFSET = NORMALIZATION == RMSNORM1P || NORMALIZATION == LAYERNORM1P ? 1 : 0; // to stored weights
constexpr bool OUT_NORMS = LAYER_NORMS != BEFORE; // what attention and MLP add to the residual stream is normed
constexpr bool SUM_RANKS = RANKS > 1; // summands that the ranks must add up are left in `partial`
constexpr bool SUMS_APART = SUM_RANKS || OUT_NORMS;  // ... or that are normed before they are added
constexpr int QKV = (HEADS + 2 * GROUPS) * HEAD_DIM;
constexpr int HIDDEN_K = round_up(HIDDEN, 32), HEADS_K = round_up(HEADS * HEAD_DIM, 32), FFN_K = round_up(FFN, 32);
constexpr int FFN_PANELS = GATED ? (FFN + 15) / 16 : (FFN + PANEL - 1) / PANEL;
constexpr int panels(int features) { return (features + PANEL - 1) / PANEL; }
// Of one expert: a gated MLP.
constexpr int EXPERT_FFN_K = round_up(EXPERT_FFN, 32), EXPERT_PANELS = std::max(1, (EXPERT_FFN + 15) / 16);
constexpr size_t EXPERT_FC1 = (size_t)EXPERT_PANELS * HIDDEN_K * PANEL;
constexpr size_t EXPERT_FC2 = (size_t)panels(HIDDEN) * EXPERT_FFN_K * PANEL;
constexpr int ROUTING = round_up(EXPERTS, PANEL); // a row of the router's logits
using route_t = std::conditional_t<(EXPERTS > 256), uint16_t, uint8_t>; // an expert's number, as Python has it

// Mirrored by `native/structures.py`. Biases have one float per lane of their matrix's panels.
struct Layer {
    const panel_t *qkv, *output, *fc1, *fc2; // [panels][k][32], see panels.h
    const float *qkv_bias, *output_bias, *fc1_bias, *fc2_bias; // null: none
    const float *input_norm, *input_norm_bias, *mlp_norm, *mlp_norm_bias; // null: none
    const float *attention_out_norm, *attention_out_norm_bias, *mlp_out_norm, *mlp_out_norm_bias;
    const float *query_norm, *key_norm;
    const float *cosines, *sines; // [positions][ROTARY / 2]; null: the layer does not rotate
    panel_t *keys, *values; // [page][GROUPS][PAGE_SIZE]
    const float* sinks; // [HEADS]; null: none
    const panel_t *router, *expert_fc1, *expert_fc2; // [EXPERTS] of the latter; null: an MLP. With them, fc1 and fc2 are
                                                     // the shared expert's
    const float *router_bias, *expert_fc1_bias, *expert_fc2_bias, *choice_bias; // the last: [EXPERTS]; null: none
    int32_t window; // positions that a query sees, its own included; 0: all before it
};
struct Model {
    const Layer* layers;
    const float *final_norm, *final_norm_bias;
    const panel_t* head;
    const panel_t* embedding;     // [VOCAB_ROWS][HIDDEN]; null: the rows are taken out of the head's panels
    // Activations of t, the most tokens of a pass, and o, the most outputs; both rounded up to 32.
    float *hidden, *qkv, *partial, *logits;     // [t][HIDDEN], [t][QKV], [t][HIDDEN], [o][round_up(VOCAB_ROWS, 32)]
    act_t *normed, *queries, *attended, *inner; // [t][HIDDEN_K], [t][HEADS][CHANNELS], [t][HEADS_K], [t][FFN_K]
    float* routing;                   // [t][ROUTING]
    act_t *gathered, *expert_inner;   // [t * EXPERTS_PER_TOKEN + 32][HIDDEN_K], [...][EXPERT_FFN_K]
    int32_t max_length, vocab_start;
};
struct Pass {
    const int32_t *token_ids, *positions, *slots, *segments, *output_rows, *block_table;
    route_t* routes; // [t][LAYERS][EXPERTS_PER_TOKEN], of layers with experts; null: not wanted
    int32_t num_tokens, num_segments, num_outputs, pages_per_sequence;
};

struct AttentionItem {
    int32_t first, tokens;
};

// Which experts compute which rows, and with what weight: places 0 to n - 1, those of one expert one after the other.
struct Routes {
    std::vector<int32_t> chosen; // [row][EXPERTS_PER_TOKEN]: experts
    std::vector<float> weights;  // the same: what their outputs are multiplied by
    std::vector<int32_t> places; // the same: where they are computed
    std::vector<int32_t> rows;   // by place
    std::vector<float> factors;  // by place
    std::vector<int32_t> hit;    // experts that have any row, ascending
    int32_t begin[EXPERTS + 2];  // by expert, its first place

    void resize(int num_rows) {
        const size_t n = (size_t)num_rows * EXPERTS_PER_TOKEN;
        if (chosen.size() >= n) return;
        for (auto* each : {&chosen, &places, &rows}) each->resize(n);
        weights.resize(n);
        factors.resize(n);
    }
    // Orders what is chosen for `num_rows` rows by expert, and by row within each.
    void sort(int num_rows) {
        const int n = num_rows * EXPERTS_PER_TOKEN;
        memset(begin, 0, sizeof begin);
        for (int i = 0; i < n; ++i) ++begin[chosen[i] + 2];
        hit.clear();
        for (int e = 0; e < EXPERTS; ++e) {
            if (begin[e + 2]) hit.push_back(e);
            begin[e + 2] += begin[e + 1];
        }
        for (int i = 0; i < n; ++i) { // begin[e + 1] moves from the expert's first place to the next expert's
            const int place = begin[chosen[i] + 1]++;
            places[i] = place;
            rows[place] = i / std::max(1, EXPERTS_PER_TOKEN);
            factors[place] = weights[i];
        }
    }
};

struct Context {
    Context(const Model& model, int threads) : model(model), team(threads), scores(threads) {
        for (auto& s : scores) s.resize((size_t)QUERY_ROWS * round_up(model.max_length, PAGE));
    }
    Model model;
    Team team;
    std::vector<std::vector<float>> scores;   // by thread
    std::vector<AttentionItem> items;
    Routes routes;
    Counter counters[LAYERS * (EXPERTS ? 14 : 8) + 4];
};

// ---- parts of a layer -----------------------------------------------------------------------------------------------

// Without a weight, a copy. `out` may be `x`.
template <class T> static void norm_row(const float* x, const float* weight, const float* bias, T* out) {
    if (!weight) return store_row(out, x, HIDDEN);
    constexpr int WHOLE_VECTORS = HIDDEN / LANES * LANES;
    float mean = 0;
    if (IS_LAYER_NORM) {
        vf sums = {};
        for (int i = 0; i < WHOLE_VECTORS; i += LANES) sums += load<vf>(x + i);
        mean = sum_lanes(sums);
        for (int i = WHOLE_VECTORS; i < HIDDEN; ++i) mean += x[i];
        mean /= HIDDEN;
    }
    vf lanes = {};
    for (int i = 0; i < WHOLE_VECTORS; i += LANES) {
        vf d = load<vf>(x + i) - mean;
        lanes += d * d;
    }
    float squares = sum_lanes(lanes);
    for (int i = WHOLE_VECTORS; i < HIDDEN; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(squares / HIDDEN + (float)EPSILON);
    for (int i = 0; i < WHOLE_VECTORS; i += LANES) {
        vf w = load<vf>(weight + i) + NORM_OFFSET;
        vf y = (load<vf>(x + i) - mean) * factor * w;
        store_as(out + i, IS_LAYER_NORM ? y + load<vf>(bias + i) : y);
    }
    for (int i = WHOLE_VECTORS; i < HIDDEN; ++i) {
        const float y = (x[i] - mean) * factor * (weight[i] + NORM_OFFSET);
        set_as(out + i, IS_LAYER_NORM ? y + bias[i] : y);
    }
}

static INLINE float activate(float x) {
    if (ACTIVATION == GELU) return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
    const float positive = x < 0 ? 0 : x; // NaN stays NaN
    return positive * positive;
}
static INLINE vf activate(vf x) {
    if (ACTIVATION == SILU) return x / (1.0f + vexp(-x));
    if (ACTIVATION == GELU_TANH) return x / (1.0f + vexp(-1.59576912f * x * (1.0f + 0.044715f * x * x))); // tanh by exp
    vf y;
    for (int lane = 0; lane < LANES; ++lane) y[lane] = activate(x[lane]);
    return y;
}

// Of a gate and what it lets through.
static INLINE vf gated(vf gate, vf up) {
    if (!CLAMPED_SWIGLU) return activate(gate) * up;
    constexpr float SLOPE = GATE_SLOPE, LIMIT = GATE_LIMIT;
    gate = gate > LIMIT ? splat(LIMIT) : gate; // NaN stays NaN
    up = up > LIMIT ? splat(LIMIT) : up;
    up = up < -LIMIT ? splat(-LIMIT) : up;
    return gate / (1.0f + vexp(-SLOPE * gate)) * (up + 1.0f);
}

// out = (row + weight * bias) * multiplier, or out += that, for `width` numbers of a panel's row: PANEL, or fewer in the
// last panel.
template <bool ADD>
static INLINE void write_row(float* out, const float* row, const float* bias, int width, float multiplier = 1.0f,
                             float weight = 1.0f) {
    int j = 0;
    for (; j + LANES <= width; j += LANES) {
        vf y = load<vf>(row + j);
        if (bias) y += load<vf>(bias + j) * weight;
        y *= multiplier;
        store(out + j, ADD ? load<vf>(out + j) + y : y);
    }
    for (; j < width; ++j) {
        const float y = (row[j] + (bias ? bias[j] * weight : 0.0f)) * multiplier;
        out[j] = ADD ? out[j] + y : y;
    }
}
static INLINE const float* panel_bias(const float* bias, int panel) { return bias ? bias + panel * PANEL : nullptr; }

// Stores `n` numbers as column `at` of a page of keys.
static INLINE void store_column(panel_t* keys, const float* x, int n, int at) {
    panel_t narrow[HEAD_DIM];
    store_row(narrow, x, n);
    int i = 0;
    if (sizeof(panel_t) == 2) // pairs of channels are neighbours
        for (; i + 2 <= n; i += 2) memcpy(keys + pair_index(i, at, PAGE), narrow + i, 2 * sizeof(panel_t));
    for (; i < n; ++i) keys[pair_index(i, at, PAGE)] = narrow[i];
}

// 1 / rms of N numbers.
template <int N> static INLINE float scale_of(const float* x) {
    float squares = 0;
    for (int i = 0; i < N; ++i) squares += x[i] * x[i];
    return 1.0f / std::sqrt(squares / N + (float)EPSILON);
}

// Norms q and k where the model does, rotates them, and stores k and v in the row's page.
static void file_row(const Model& m, const Layer& layer, const Pass& pass, int row) {
    const int position = pass.positions[row];
    const int page = pass.block_table[(size_t)pass.slots[row] * pass.pages_per_sequence + position / PAGE];
    const int at = position % PAGE;
    const size_t angles = (size_t)position * (ROTARY / 2);
    const float* source = m.qkv + (size_t)row * QKV;
#if QK_NORM_OVER_HEADS
    const float query_scale = scale_of<HEADS * HEAD_DIM>(source);
    const float key_scale = scale_of<GROUPS * HEAD_DIM>(source + HEADS * HEAD_DIM);
#endif
    for (int head = 0; head < HEADS + GROUPS; ++head, source += HEAD_DIM) {
        float x[HEAD_DIM], y[HEAD_DIM];
        memcpy(x, source, sizeof x);
#if QK_LAYERNORM
        const float* weight = head < HEADS ? layer.query_norm : layer.key_norm;
#if QK_NORM_OVER_HEADS
        const float factor = head < HEADS ? query_scale : key_scale;
        weight += (head < HEADS ? head : head - HEADS) * HEAD_DIM;
#else
        const float factor = scale_of<HEAD_DIM>(x);
#endif
        for (int i = 0; i < HEAD_DIM; ++i) x[i] *= factor * (weight[i] + NORM_OFFSET);
#endif
        memcpy(y, x, sizeof x);
        if (layer.cosines) {
            const float *cosines = layer.cosines + angles, *sines = layer.sines + angles;
            for (int i = 0; i < ROTARY / 2; ++i) {
                y[i] = x[i] * cosines[i] - x[i + ROTARY / 2] * sines[i];
                y[i + ROTARY / 2] = x[i + ROTARY / 2] * cosines[i] + x[i] * sines[i];
            }
        }
        if (head < HEADS) {
            store_row(m.queries + ((size_t)row * HEADS + head) * CHANNELS, y, HEAD_DIM);
        } else {
            store_column(layer.keys + ((size_t)page * GROUPS + head - HEADS) * PAGE_SIZE, y, HEAD_DIM, at);
        }
    }
    for (int group = 0; group < GROUPS; ++group, source += HEAD_DIM) {
        panel_t narrow[HEAD_DIM], *values = layer.values + ((size_t)page * GROUPS + group) * PAGE_SIZE;
        store_row(narrow, source, HEAD_DIM);
        for (int i = 0; i < HEAD_DIM; ++i) values[pair_index(at, i, CHANNELS)] = narrow[i];
    }
}

static void embed_row(const Model& m, int token, float* out) {
    const int row = token - m.vocab_start;
    if (row < 0 || row >= VOCAB_ROWS) { // another rank's
        memset(out, 0, HIDDEN * sizeof(float));
    } else if (m.embedding) {
        for (int i = 0; i < HIDDEN; ++i) out[i] = widen(m.embedding[(size_t)row * HIDDEN + i]) * (float)EMBEDDING_MULTIPLIER;
    } else {
        const panel_t* panel = m.head + (size_t)(row / PANEL) * HIDDEN_K * PANEL;
        for (int i = 0; i < HIDDEN; ++i)
            out[i] = widen(panel[pair_index(i, row % PANEL, PANEL)]) * (float)EMBEDDING_MULTIPLIER;
    }
}

// ---- the pass -------------------------------------------------------------------------------------------------------

// One thread's share of a pass; every thread of the team runs one.
class Worker {
  public:
    Worker(Context& context, const Pass& pass, int thread)
        : c(context), m(context.model), pass(pass), thread(thread),
          scores(context.scores[thread].data()) {}

    // Stages: 0 embedding, 1 + 2l attention of layer l, 2 + 2l its MLP, 1 + 2 LAYERS the output layer.
    void run(int first, int end) {
        const Tiles tiles;
        for (int stage = first; stage < end; ++stage) {
            if (stage == 0) embed();
            else if (stage == 1 + 2 * LAYERS) output();
            else if (stage % 2) attention((stage - 1) / 2);
            else mlp(stage / 2 - 1);
        }
    }

  private:
    void embed() {
        each(pass.num_tokens, rows_chunk(), [&](int row) {
            float* hidden = m.hidden + (size_t)row * HIDDEN;
            if (SUM_RANKS) {
                memset(hidden, 0, HIDDEN * sizeof(float));
                embed_row(m, pass.token_ids[row], m.partial + (size_t)row * HIDDEN);
            } else {
                embed_row(m, pass.token_ids[row], hidden);
            }
        });
    }

    void attention(int l) {
        const Layer& layer = m.layers[l];
        if (l == 0) norm_rows(layer.input_norm, layer.input_norm_bias, SUM_RANKS); // of embeddings
        else norm_rows(layer.input_norm, layer.input_norm_bias, SUMS_APART, m.layers[l - 1].mlp_out_norm, m.layers[l - 1].mlp_out_norm_bias);
        const panel_t* output = first_panel(layer.output, HEADS_K);
        product(m.normed, HIDDEN_K, layer.qkv, panels(QKV), output, [&](int panel, int first, int n, const float* block) {
            const int width = std::min(PANEL, QKV - panel * PANEL);
            for (int i = 0; i < n; ++i)
                write_row<false>(m.qkv + (size_t)(first + i) * QKV + panel * PANEL, block + i * PANEL,
                                 panel_bias(layer.qkv_bias, panel), width);
        });
        each(pass.num_tokens, rows_chunk(), [&](int row) { file_row(m, layer, pass, row); });
        const int num_items = (int)c.items.size() * GROUPS;
        c.counters[phase++].each_knowing_next(num_items, thread, c.team.size, [&](int i, int following) {
            const AttentionItem& item = c.items[i / GROUPS];
            attend(m.queries + (size_t)item.first * HEADS * CHANNELS, item.tokens, pass.positions[item.first],
                   layer.window, layer.sinks, i % GROUPS, cached(layer, i),
                   following < num_items ? cached(layer, following) : Cached{}, scores,
                   m.attended + (size_t)item.first * HEADS_K, HEADS_K);
        });
        c.team.barrier();
        const panel_t* next = first_panel(layer.fc1 ? layer.fc1 : layer.router, HIDDEN_K);
        residual_product(m.attended, HEADS_K, layer.output, layer.output_bias, next);
    }

    void mlp(int l) {
        const Layer& layer = m.layers[l];
        norm_rows(layer.mlp_norm, layer.mlp_norm_bias, SUMS_APART, layer.attention_out_norm, layer.attention_out_norm_bias);
        const panel_t* next = first_panel(l + 1 < LAYERS ? m.layers[l + 1].qkv : m.head, HIDDEN_K);
        if (EXPERTS && layer.router) experts(l, next);
        else dense<FFN>(layer, next);
    }

    // An MLP of an inner SIZE.
    template <int SIZE> void dense(const Layer& layer, const panel_t* next) {
        constexpr int INNER_K = round_up(SIZE, 32), COUNT = GATED ? (SIZE + 15) / 16 : panels(SIZE);
        product(m.normed, HIDDEN_K, layer.fc1, COUNT, first_panel(layer.fc2, INNER_K), [&](int panel, int first, int n, float* block) {
            constexpr int WIDTH = GATED ? 16 : PANEL;
            for (int i = 0; i < n; ++i) {
                float* x = block + i * PANEL;
                if (layer.fc1_bias) write_row<true>(x, layer.fc1_bias + panel * PANEL, nullptr, PANEL);
                act_t* out = m.inner + (size_t)(first + i) * INNER_K + panel * WIDTH;
                for (int j = 0; j < WIDTH; j += LANES)
                    store_as(out + j, GATED ? gated(load<vf>(x + j), load<vf>(x + 16 + j)) : activate(load<vf>(x + j)));
            }
        });
        residual_product(m.inner, INNER_K, layer.fc2, layer.fc2_bias, next);
    }

    // Each expert that any row has is read once, for all rows that have it. What they add to a row is summed in their order.
    void experts(int l, const panel_t* next) {
        const Layer& layer = m.layers[l];
        if (SHARED_FFN) dense<std::max(1, SHARED_FFN)>(layer, first_panel(layer.router, HIDDEN_K));
        product(m.normed, HIDDEN_K, layer.router, panels(EXPERTS), layer.expert_fc1, [&](int panel, int first, int n, const float* block) {
            for (int i = 0; i < n; ++i)
                write_row<false>(m.routing + (size_t)(first + i) * ROUTING + panel * PANEL, block + i * PANEL,
                                 panel_bias(layer.router_bias, panel), PANEL);
        });
        each(pass.num_tokens, rows_chunk(), [&](int row) {
            choose(layer, row);
            if (pass.routes)
                for (int k = 0; k < EXPERTS_PER_TOKEN; ++k)
                    pass.routes[((size_t)row * LAYERS + l) * EXPERTS_PER_TOKEN + k] = (route_t)c.routes.chosen[(size_t)row * EXPERTS_PER_TOKEN + k];
            if (SUMS_APART && !SHARED_FFN) memset(m.partial + (size_t)row * HIDDEN, 0, HIDDEN * sizeof(float));
        });
        Routes& routes = c.routes;
        if (thread == 0) routes.sort(pass.num_tokens);
        c.team.barrier();
        each(pass.num_tokens, rows_chunk(), [&](int row) {
            for (int i = row * EXPERTS_PER_TOKEN; i < (row + 1) * EXPERTS_PER_TOKEN; ++i)
                memcpy(m.gathered + (size_t)routes.places[i] * HIDDEN_K, m.normed + (size_t)row * HIDDEN_K, HIDDEN_K * sizeof(act_t));
        });
        const int hit = (int)routes.hit.size(), count = hit * EXPERT_PANELS;
        const panel_t* fc2 = layer.expert_fc2 + (size_t)routes.hit[0] * EXPERT_FC2;
        const auto fc1 = [&](int i) {
            return layer.expert_fc1 + (size_t)routes.hit[i / EXPERT_PANELS] * EXPERT_FC1 + (size_t)(i % EXPERT_PANELS) * HIDDEN_K * PANEL;
        };
        c.counters[phase++].each_knowing_next(count, thread, c.team.size, [&](int i, int following) {
            const int expert = routes.hit[i / EXPERT_PANELS], panel = i % EXPERT_PANELS, begin = routes.begin[expert];
            const panel_t* ahead = following < count ? fc1(following) : first_panel(fc2, EXPERT_FFN_K);
            multiply_panel(m.gathered + (size_t)begin * HIDDEN_K, HIDDEN_K, routes.begin[expert + 1] - begin,
                           layer.expert_fc1 + (size_t)expert * EXPERT_FC1, panel, ahead, [&](int first, int n, float* block) {
                const float* bias = panel_bias(layer.expert_fc1_bias, expert * EXPERT_PANELS + panel);
                for (int r = 0; r < n; ++r) {
                    float* x = block + r * PANEL;
                    if (bias) write_row<true>(x, bias, nullptr, PANEL);
                    act_t* out = m.expert_inner + (size_t)(begin + first + r) * EXPERT_FFN_K + panel * 16;
                    for (int j = 0; j < 16; j += LANES)
                        store_as(out + j, gated(load<vf>(x + j), load<vf>(x + 16 + j)) * routes.factors[begin + first + r]);
                }
            });
        });
        c.team.barrier();
        constexpr int OUT_PANELS = panels(HIDDEN);
        c.counters[phase++].each_knowing_next(OUT_PANELS, thread, c.team.size, [&](int panel, int following) {
            const int width = std::min(PANEL, HIDDEN - panel * PANEL);
            float* out = (SUMS_APART ? m.partial : m.hidden) + panel * PANEL;
            for (int h = 0; h < hit; ++h) {
                const int begin = routes.begin[routes.hit[h]];
                const panel_t* matrix = layer.expert_fc2 + (size_t)routes.hit[h] * EXPERT_FC2;
                const float* bias = panel_bias(layer.expert_fc2_bias, routes.hit[h] * OUT_PANELS + panel);
                const panel_t* ahead = h + 1 < hit ? layer.expert_fc2 + (size_t)routes.hit[h + 1] * EXPERT_FC2 + (size_t)panel * EXPERT_FFN_K * PANEL
                                     : following < OUT_PANELS ? fc2 + (size_t)following * EXPERT_FFN_K * PANEL : next;
                multiply_panel(m.expert_inner + (size_t)begin * EXPERT_FFN_K, EXPERT_FFN_K, routes.begin[routes.hit[h] + 1] - begin,
                               matrix, panel, ahead, [&](int first, int n, const float* block) {
                    for (int r = 0; r < n; ++r)
                        write_row<true>(out + (size_t)routes.rows[begin + first + r] * HIDDEN, block + r * PANEL, bias, width,
                                        OUT_NORMS ? 1.0f : (float)RESIDUAL_MULTIPLIER, routes.factors[begin + first + r]);
                });
            }
        });
        c.team.barrier();
    }

    // The experts of a row and their weights; of equal scores the first. NaN is chosen last and stays in the weights.
    void choose(const Layer& layer, int row) {
        const float* logits = m.routing + (size_t)row * ROUTING;
        float scores[EXPERTS + 1], keys[EXPERTS + 1], sum = 0, most = -INFINITY;
        for (int e = 0; e < EXPERTS; ++e) {
            scores[e] = ROUTER_SIGMOID ? 1.0f / (1.0f + std::exp(-logits[e])) : logits[e];
            keys[e] = scores[e] + (layer.choice_bias ? layer.choice_bias[e] : 0.0f);
            most = std::max(most, logits[e]);
        }
        int32_t* chosen = c.routes.chosen.data() + (size_t)row * EXPERTS_PER_TOKEN;
        float* weights = c.routes.weights.data() + (size_t)row * EXPERTS_PER_TOKEN;
        bool taken[EXPERTS + 1] = {};
        for (int k = 0; k < EXPERTS_PER_TOKEN; ++k) {
            int best = -1;
            for (int e = 0; e < EXPERTS; ++e)
                if (!taken[e] && (best < 0 || keys[e] > keys[best] || keys[best] != keys[best])) best = e;
            taken[best] = true;
            chosen[k] = best;
            weights[k] = ROUTER_SIGMOID ? scores[best] : std::exp(scores[best] - most);
            sum += weights[k];
        }
        if (!ROUTER_SIGMOID && !ROUTER_NORMALIZED) {
            sum = 0;
            for (int e = 0; e < EXPERTS; ++e) sum += std::exp(scores[e] - most);
        }
        const float factor = (float)ROUTER_SCALING / (ROUTER_SIGMOID ? EXPERTS_PER_TOKEN > 1 ? sum + 1e-20f : 1.0f : sum);
        for (int k = 0; k < EXPERTS_PER_TOKEN; ++k) weights[k] *= factor;
    }

    void output() {
        constexpr int STRIDE = round_up(VOCAB_ROWS, PANEL);
        const Layer& last = m.layers[LAYERS - 1];
        if (SUMS_APART)
            each(pass.num_tokens, rows_chunk(), [&](int row) { add_partial(row, last.mlp_out_norm, last.mlp_out_norm_bias); });
        each(pass.num_outputs, 1, [&](int i) {
            norm_row(m.hidden + (size_t)pass.output_rows[i] * HIDDEN, m.final_norm, m.final_norm_bias,
                     m.normed + (size_t)i * HIDDEN_K);
        });
        rows = pass.num_outputs;
        const panel_t* next = first_panel(m.layers[0].qkv, HIDDEN_K); // of the next pass
        product(m.normed, HIDDEN_K, m.head, panels(VOCAB_ROWS), next, [&](int panel, int first, int n, float* block) {
            for (int i = 0; i < n; ++i) {
                float* logits = m.logits + (size_t)(first + i) * STRIDE + panel * PANEL;
                float* row = block + i * PANEL;
                if (LOGITS_SCALING != 1)
                    for (int j = 0; j < PANEL; j += LANES) store(row + j, load<vf>(row + j) / (float)LOGITS_SCALING);
                if (FINAL_LOGIT_SOFTCAPPING > 0)
                    for (int j = 0; j < PANEL; j += LANES)
                        store(row + j, soft_cap(load<vf>(row + j), FINAL_LOGIT_SOFTCAPPING));
                for (int j = 0; j < PANEL; j += 8) stream(logits + j, load<vu8>(row + j));
            }
        });
    }

    // A row-parallel product: added to the residual stream or, if ranks must add theirs up or it is normed first, written
    // to `partial`.
    void residual_product(const act_t* a, int k, const panel_t* matrix, const float* bias, const panel_t* next) {
        product(a, k, matrix, panels(HIDDEN), next, [&](int panel, int first, int n, const float* block) {
            const int width = std::min(PANEL, HIDDEN - panel * PANEL);
            float* out = (SUMS_APART ? m.partial : m.hidden) + panel * PANEL;
            for (int i = first + n; i < std::min(first + 2 * n, rows); ++i) // the next block's rows
                for (int j = 0; j < PANEL; j += 16) __builtin_prefetch(out + (size_t)i * HIDDEN + j, 1);
            for (int i = 0; i < n; ++i)
                write_row<!SUMS_APART>(out + (size_t)(first + i) * HIDDEN, block + i * PANEL, panel_bias(bias, panel),
                                       width, OUT_NORMS ? 1.0f : (float)RESIDUAL_MULTIPLIER);
        });
    }

    // Norms the residual stream, to which `partial` is added first if `adds`.
    void norm_rows(const float* weight, const float* bias, bool adds, const float* out_norm = nullptr,
                   const float* out_norm_bias = nullptr) {
        each(pass.num_tokens, rows_chunk(), [&](int row) {
            if (adds) add_partial(row, out_norm, out_norm_bias);
            norm_row(m.hidden + (size_t)row * HIDDEN, weight, bias, m.normed + (size_t)row * HIDDEN_K);
        });
    }

    void add_partial(int row, const float* norm, const float* bias) {
        float *hidden = m.hidden + (size_t)row * HIDDEN, *added = m.partial + (size_t)row * HIDDEN;
        if (norm) norm_row(added, norm, bias, added);
        const float multiplier = norm ? (float)RESIDUAL_MULTIPLIER : 1.0f;
        for (int i = 0; i < HIDDEN; ++i) hidden[i] += added[i] * multiplier;
    }

    // use(panel, first row, number of rows, block) for the blocks of a product; it may `stream`.
    // next: where this thread reads weights afterwards.
    template <class Use>
    void product(const act_t* a, int k, const panel_t* matrix, int count, const panel_t* next, Use&& use) {
        if (rows == 0) return;
        c.counters[phase++].each_knowing_next(count, thread, c.team.size, [&](int panel, int following) {
            const panel_t* ahead = following < count ? matrix + (size_t)following * k * PANEL : next;
            multiply_panel(a, k, rows, matrix, panel, ahead,
                           [&](int first, int n, float* block) { use(panel, first, n, block); });
        });
        streams_end();
        c.team.barrier();
    }
    // The panel that this thread begins with when it comes to a matrix.
    const panel_t* first_panel(const panel_t* matrix, int k) const { return matrix + (size_t)thread * k * PANEL; }

    // What item i / GROUPS attends to in group i % GROUPS.
    Cached cached(const Layer& layer, int i) const {
        const AttentionItem& item = c.items[i / GROUPS];
        const int offset = i % GROUPS * PAGE_SIZE, position = pass.positions[item.first];
        const int first = first_page(position, layer.window);
        return {layer.keys + offset, layer.values + offset,
                pass.block_table + (size_t)pass.slots[item.first] * pass.pages_per_sequence + first,
                pages_of(position + item.tokens) - first, first * PAGE};
    }

    int rows_chunk() const { return std::max(1, pass.num_tokens / (c.team.size * 4)); }

    // f(i) for i < n, shared with the other threads; returns when all of them are done.
    template <class F> void each(int n, int chunk, F&& f) {
        c.counters[phase++].each(n, chunk, f);
        c.team.barrier();
    }

    Context& c;
    const Model& m;
    const Pass& pass;
    const int thread;
    float* const scores;
    int phase = 0;
    int rows = pass.num_tokens; // of the products
};

// ---- what Python calls ----------------------------------------------------------------------------------------------

extern "C" {

// Null where memory is short.
void* step_create(const Model* model, int threads) {
    try {
        return new Context(*model, threads);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void step_destroy(void* context) { delete (Context*)context; }

void step_run(void* context, const Pass* pass, int first_stage, int end_stage) {
    Context& c = *(Context*)context;
    c.items.clear();
    for (int s = 0; s < pass->num_segments; ++s) {
        const int begin = pass->segments[2 * s], end = begin + pass->segments[2 * s + 1];
        for (int token = begin; token < end; token += QUERY_TOKENS)
            c.items.push_back({token, std::min(QUERY_TOKENS, end - token)});
    }
    for (auto& counter : c.counters) counter.reset();
    if (EXPERTS) c.routes.resize(pass->num_tokens);
    c.team.run([&](int thread) { Worker(c, *pass, thread).run(first_stage, end_stage); });
}

void step_pack(void* context, const PackArguments* tensors, int num_tensors) {
    Context& c = *(Context*)context;
    Counter& counter = c.counters[0];
    counter.reset();
    int lines = 0;
    for (int i = 0; i < num_tensors; ++i) lines += num_lines(tensors[i]);
    c.team.run([&](int) {
        const PackArguments* tensor = tensors;
        int first = 0; // number of `tensor`'s first line among all lines; a thread's lines come in order
        counter.each(lines, PANEL / LINE_ROWS, [&](int line) { // a panel at a time
            while (line - first >= num_lines(*tensor)) first += num_lines(*tensor++);
            pack_line(*tensor, line - first);
        });
        streams_end();
    });
}

void step_sample(void* context, const SampleArguments* arguments) {
    Context& c = *(Context*)context;
    c.counters[0].reset();
    c.team.run([&](int) { c.counters[0].each(arguments->rows, 1, [&](int row) { sample_row(*arguments, row); }); });
}
}
