// A layer's mixture of experts, run by a team of threads:
//
//   y[r] = Σ_i weight[r, i] · down_e(activation(gate_e(x[r])) · up_e(x[r])) (+ sigmoid(gate[r]) · shared(x[r]))
//
// over the experts e = chosen[r, i] of each row, the best first; with `of_inputs` the weight is of x[r] instead. Rows are
// gathered by expert, and only the experts that a row goes to are read. A row's bits depend on no other row.
//
// Threads meet after the router, the choice, gate and up (with their activation where a step has many rows), and down. What one of these phases needs of an expert's rows, each
// thread makes by itself: where they are gathered, and the inputs of the products that it computes.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "team/buffer.h"
#include "elementwise/elementwise.h"
#include "moe/mixture_lora.h"
#include "lora/model_lora.h"
#include "gemm/multiply.h"
#include "moe/router.h"
#include "team/shares.h"
#include "elementwise/ungated.h"
#include "units.h"

namespace chorus {

// Experts' matrices of one shape. Described to Python by program/layout.h.
struct ExpertMatrices {
    const void* const* w;  // [experts] packed: see gemm.h, and integers.h
    const Integers* integers;  // [experts]; null: all are of T
    const float* const* bias;  // [experts] of [outputs]; null: none

    template <class T>
    Weights<T> of(int expert, int outputs, int inputs) const {
        return {w[expert], bias ? bias[expert] : nullptr, outputs, inputs, integers ? integers[expert] : Integers{}};
    }
};

struct MixtureDesc {
    int32_t hidden, experts, size, shared_size;  // widths of an expert and of the shared one; 0: no shared expert
    const float* router;  // [choices, routed], packed
    const float* router_bias;  // [choices]; null: none
    RoutingDesc routing;
    Activation activation;
    float alpha, limit;  // see Gating
    ExpertMatrices gate_up, down;
    ExpertMatrices shared_gate_up, shared_down;  // of one expert
    const float* shared_gate;  // [routed]; null: the shared expert's output is added as it is
    int32_t of_inputs;  // 1: weights are of the experts' inputs, not of their outputs; then gate_up has no bias
    Activation shared_activation;  // the shared expert's, with a gate if the others have one
    float shared_alpha, shared_limit;
    int32_t routed;  // width of the router's input; the experts' own: `hidden`
    int32_t identity;  // identity experts, after the others: they give the router's input back
    const float* out_norm;  // [hidden]: an expert's output is multiplied by these, then normalised; null: it is not
    float out_eps;  // of that norm

    int choices() const { return experts + identity; }
    Gating gating(bool shared) const {
        if (shared) return {shared_activation, shared_alpha, shared_limit};
        return {activation, alpha, limit};
    }

    // Columns of gate and up of an expert, which may have no gate.
    int ups(int of_size) const { return of_size << is_gated(activation); }
};

struct MixtureStepDesc {
    int32_t rows;
    const float* x;  // [rows, routed]
    float* y;  // [rows, hidden]: written
    int64_t* chosen;  // [rows, per_token]: written, the best first
    float* weights;  // likewise
    const MixtureLoraDesc* lora;  // null: no adapters
    int32_t lora_element;  // of the adapters: kF32 or kBF16
};

// Where the rows of a step are gathered: expert after expert, an expert's rows in order.
class GatheredRows {
   public:
    // chosen, weights: [rows, per_token], of each row the best expert first; those from `experts` on have no rows
    void gather(const int64_t* chosen, const float* weights, int rows, int per_token, int experts) {
        const int pairs = rows * per_token;
        counts.assign(experts, 0);
        int all = 0;
        for (int i = 0; i < pairs; i++)
            if (chosen[i] < experts) counts[chosen[i]]++, all++;
        place.resize(pairs), row.resize(all), weight.resize(all);
        next_.assign(experts, 0);
        for (int e = 1; e < experts; e++) next_[e] = next_[e - 1] + counts[e - 1];
        for (int i = 0; i < pairs; i++) {
            if (chosen[i] >= experts) {
                place[i] = -1;
                continue;
            }
            const int to = place[i] = next_[chosen[i]]++;
            row[to] = i / per_token;
            weight[to] = weights[i];
        }
    }

    std::vector<int32_t> counts;  // [experts]: rows that go to each
    std::vector<int> place;  // [rows, per_token]: where the row is among those that are gathered; -1: it is not
    std::vector<int> row;  // of each that is gathered
    std::vector<float> weight;  // likewise, of the row's expert

   private:
    std::vector<int> next_;
};

// Rows of a step from which on experts' activations are computed as soon as tiles of gate and up are. Bits are the same.
constexpr int kManyRows = 16;

// Memory of a step's mixtures, for those of all layers.
template <class T>
struct MixtureMemory {
    // Of a thread.
    struct Own {
        GatheredRows gathered;
        std::vector<int> units;  // before each expert's in a phase, and behind the last
        FixedScratch<T> fixed;
        FixedScratch<float> of_router;
        Buffer<Act<T>> x;  // inputs of an expert's products
        Buffer<float> gated;  // a tile of gates and one of ups, side by side
        std::vector<float> row;
        Router router;
    };

    std::vector<Own> own;
    Buffer<float> logits, shared_gates;  // [rows, experts] and [rows]
    Buffer<float> gate_up, outputs;  // [rows · per_token, 2 · size] and [rows · per_token, hidden]
    Buffer<float> shared_gate_up, shared_outputs;  // [rows, 2 · shared_size] and [rows, hidden]
    Buffer<Act<T>> acts, shared_acts;  // [rows · per_token, size] and [rows, shared_size], of steps with many rows

    // Make room for a mixture. threads: the most of a team.
    void reserve(const MixtureDesc& m, int rows, int threads) {
        if ((int)own.size() < threads) own = std::vector<Own>(threads);
        const size_t pairs = (size_t)rows * m.routing.per_token;
        grow(logits, (size_t)rows * m.choices());
        grow(shared_gates, rows);
        grow_rows(gate_up, pairs, m.ups(m.size));
        grow_rows(outputs, pairs, m.hidden);
        grow_rows(shared_gate_up, m.shared_size ? rows : 0, m.ups(m.shared_size));
        grow_rows(shared_outputs, m.shared_size ? rows : 0, m.hidden);
        if (rows < kManyRows) return;
        grow_rows(acts, pairs, m.size);
        grow_rows(shared_acts, m.shared_size ? rows : 0, m.shared_size);
    }
};

template <class T>
class Mixture {
    using X = Act<T>;
    using Own = typename MixtureMemory<T>::Own;

   public:
    // x: [rows, hidden], inputs of the experts' gemms; step.x, [rows, routed], is the router's input. memory: has room for the mixture. layer, targets: of the model; see
    // AnyMixtureLora. lora: the step's adapters; null: none
    Mixture(const MixtureDesc& m, const MixtureStepDesc& step, Rows<const X> x, MixtureMemory<T>& memory,
            AnyMixtureLora* lora, int layer, const MixtureTargets* targets)
        : m_(m),
          step_(step),
          x_(x),
          memory_(memory),
          lora_(lora),
          layer_(layer),
          targets_(targets),
          per_token_(m.routing.per_token),
          shared_rows_(m.shared_size ? step.rows : 0) {}

    // Compute what `add_up` adds up. Called by every thread of the team alike, but not first: see Decoder::walk.
    void run(Team& team, Team::Member& me);

    // Write a row of what `run` has computed: [hidden]. thread: that calls it
    void add_up(int row, int thread, float* out) const;

   private:
    // An expert's output y of a row becomes the norm of out_norm · y, without weights of its own.
    void normalise(float* y) const {
        multiply_each(y, m_.out_norm, m_.hidden, y);
        scale_by(y, m_.hidden, 1.0f / __builtin_sqrtf(sum_of_squares(y, m_.hidden) / m_.hidden + m_.out_eps));
    }

    // Products of experts with their rows, and those of the shared expert.
    struct Gemms {
        const ExpertMatrices &w, &shared_w;
        int inputs, shared_inputs;
        Rows<float> y, shared_y;
    };
    // Something of experts, and of the shared one.
    template <class V>
    struct Both {
        V own, shared;
    };

    // Choose experts, and gather rows by expert.
    void route(Team& team, Team::Member& me, Own& own) {
        const int choices = m_.choices();
        const Rows<float> logits{memory_.logits.data(), choices}, gates{memory_.shared_gates.data(), 1};
        const Gemm<float> router{
            wide(), step_.rows, {m_.router, m_.router_bias, choices, m_.routed, {}}, logits, own.of_router.begin()};
        const int first = lora_ ? 1 : 0, gemms = step_.rows && choices ? router.units() : 0, end = first + gemms;
        each_part(team, me, end + (m_.shared_gate ? step_.rows : 0), [&](int i, bool more) {
            if (i < first) lora_->begin_layer(layer_, targets_);
            else if (i < end) router.run(i - first, more && i + 1 < end);
            else gates[i - end][0] = dot<float>(wide()[i - end], m_.shared_gate, m_.routed);
        });
        if (lora_) {
            const RowSource x = [&](int i, float* out) { std::copy_n(wide()[i], m_.routed, out); };
            shrink(team, me, {kRouter, kSharedGate}, {m_.routed, m_.routed}, {x, x});
            lora_->expand(team, me, {{kRouter, logits}, {kSharedGate, gates}});
        }
        each_part(team, me, choices ? step_.rows : 0, [&](int r, bool) {
            const long at = (long)r * per_token_;
            own.router.choose(m_.routing, logits[r], choices, step_.chosen + at, step_.weights + at);
        });
        own.gathered.gather(step_.chosen, step_.weights, step_.rows, per_token_, m_.experts);
        if (lora_ && lora_->changes_experts())
            team.each(me, 1, [&](int) { lora_->route(own.gathered.counts.data(), m_.experts, own.gathered.row); });
    }

    // Shrinks of two products by themselves.
    void shrink(Team& team, Team::Member& me, Both<MixtureGemm> gemms, Both<int> inputs, Both<RowSource> x) {
        const int own = lora_->shrinks(gemms.own), count = own + lora_->shrinks(gemms.shared);
        if (!count) return;
        each_part(team, me, count, [&](int i, bool more) {
            if (i < own) lora_->shrink(gemms.own, i, more && i + 1 < own, inputs.own, x.own, me.thread);
            else lora_->shrink(gemms.shared, i - own, more, inputs.shared, x.shared, me.thread);
        });
    }

    // A tile of a product: a panel of an expert's columns, of a chunk of its rows.
    //
    //   expert  `experts`: the shared one
    //   first   row, of those that are gathered or, of the shared expert, of the step
    //   begins  the thread's tile before it was of other rows, or of another expert
    //   more    the next one is the same thread's, and beside it
    struct ExpertTile {
        int expert, first, rows, panel;
        bool shared, begins, more;
    };

    // visit(tile), with each tile of products with so many panels of columns, of all experts that rows go to; and
    // rest(i, more) with so many other things behind them.
    template <class Visit, class Rest>
    void each_tile(Team& team, Team::Member& me, Own& own, Both<int> panels, int others, Visit visit, Rest rest) {
        const auto& counts = own.gathered.counts;
        const auto chunks = [](int rows) { return (rows + kRowChunk - 1) / kRowChunk; };
        own.units.clear();
        int units = 0;
        for (const int rows : counts) own.units.push_back(units), units += chunks(rows) * panels.own;
        own.units.push_back(units), units += chunks(shared_rows_) * panels.shared;
        int expert = 0, before = 0, of = -1, of_chunk = -1;  // rows before the expert's; of the last tile
        each_part(team, me, units + others, [&](int i, bool more) {
            if (i >= units) return rest(i - units, more);
            if (i < own.units[expert]) expert = before = 0;  // another thread's
            const int last = m_.experts;  // the shared one
            while (expert < last && i >= own.units[expert + 1]) before += counts[expert++];
            const bool shared = expert == last;
            const int each = shared ? panels.shared : panels.own, unit = i - own.units[expert], chunk = unit / each;
            const int begin = chunk * kRowChunk, rows = (shared ? shared_rows_ : counts[expert]) - begin;
            visit(ExpertTile{expert, (shared ? 0 : before) + begin, std::min(kRowChunk, rows), unit % each, shared,
                             of != expert || of_chunk != chunk, more && unit % each + 1 < each});
            of = expert, of_chunk = chunk;
        });
    }

    // The products of all experts that rows go to, with what adapters add.
    //
    //   outputs   of products
    //   products  for adapters
    //   x         rows of inputs, for adapters
    //   rows_of   rows_of(first, rows, shared): inputs of a tile's rows
    template <class RowsOf>
    void run_gemm(Team& team, Team::Member& me, Own& own, const Gemms& it, Both<int> outputs, Both<MixtureGemm> gemms,
                  Both<RowSource> x, RowsOf rows_of) {
        const int shrinks = lora_ ? lora_->shrinks(gemms.own) : 0;
        const int all = shrinks + (lora_ ? lora_->shrinks(gemms.shared) : 0);
        Rows<const X> inputs{};
        each_tile(
            team, me, own, {panels_of(outputs.own), panels_of(outputs.shared)}, all,
            [&](const ExpertTile& t) {
                if (t.begins) inputs = rows_of(t.first, t.rows, t.shared), own.fixed.begin();
                const Rows<float> y = (t.shared ? it.shared_y : it.y).from(t.first);
                const Weights<T> w = t.shared ? it.shared_w.template of<T>(0, outputs.shared, it.shared_inputs)
                                              : it.w.template of<T>(t.expert, outputs.own, it.inputs);
                Gemm<T>{inputs, t.rows, w, y, &own.fixed}.run(t.panel, t.more);
            },
            [&](int i, bool more) {
                if (i < shrinks)
                    return lora_->shrink(gemms.own, i, more && i + 1 < shrinks, it.inputs, x.own, me.thread);
                lora_->shrink(gemms.shared, i - shrinks, more, it.shared_inputs, x.shared, me.thread);
            });
        if (lora_) lora_->expand(team, me, {{gemms.own, it.y}, {gemms.shared, it.shared_y}});
    }

    // Activations are computed tile by tile, in place of gates and ups: of many rows that adapters add nothing to.
    bool fuses() const {
        const auto whole = [](int size) { return size % kPanel == 0; };
        return step_.rows >= kManyRows && is_gated(m_.activation) && !lora_ && whole(m_.size) && whole(m_.shared_size);
    }

    // Gates, ups and their activations of all experts that rows go to: the gate's tile and up's of the same columns one
    // after the other, so that neither leaves the cache before the two become one of a quarter of the bytes.
    void run_gated(Team& team, Team::Member& me, Own& own) {
        grow(own.gated, (size_t)kRowChunk * 2 * kPanel);
        const Rows<float> out{own.gated.data(), 2 * kPanel};
        Rows<const X> inputs{};
        const auto visit = [&](const ExpertTile& t) {
            if (t.begins) inputs = gathered(own, t.first, t.rows, t.shared), own.fixed.begin();
            const int size = t.shared ? m_.shared_size : m_.size, column = t.panel * kPanel;
            const Weights<T> w = t.shared ? m_.shared_gate_up.template of<T>(0, 2 * size, m_.hidden)
                                          : m_.gate_up.template of<T>(t.expert, 2 * size, m_.hidden);
            const Gemm<T> gemm{inputs, t.rows, w, {}, &own.fixed};
            gemm.run({0, t.rows, column, kPanel}, out);
            gemm.run({0, t.rows, column + size, kPanel}, out.from(0, kPanel));
            for (int r = 0; r < t.rows; r++) {
                if (m_.of_inputs && !t.shared) scale_by(out[r], 2 * kPanel, own.gathered.weight[t.first + r]);
                activate_row(t.shared, out[r], out[r] + kPanel, kPanel, acts(t.shared)[t.first + r] + column);
            }
        };
        each_tile(team, me, own, {panels_of(m_.size), panels_of(m_.shared_size)}, 0, visit, [](int, bool) {});
    }

    // Inputs of some rows' gate and up.
    Rows<const X> gathered(Own& own, int first, int rows, bool shared) const {
        if (shared) return x_.from(first);
        const int* row = own.gathered.row.data() + first;
        if (row[rows - 1] - row[0] == rows - 1) return x_.from(row[0]);  // they follow each other
        grow_rows(own.x, rows, m_.hidden);
        const Rows<X> to = rows_of(own.x, m_.hidden);
        for (int i = 0; i < rows; i++) std::copy_n(x_[row[i]], m_.hidden, to[i]);
        return to;
    }

    // Inputs of some rows' down.
    Rows<const X> activated(Own& own, int first, int rows, bool shared) const {
        if (fuses()) return acts(shared).from(first);
        const int size = shared ? m_.shared_size : m_.size;
        grow_rows(own.x, rows, size);
        const Rows<X> to = rows_of(own.x, size);
        for (int i = 0; i < rows; i++) activate_row(own, first + i, shared, to[i]);
        return to;
    }

    // out = activation(gate) · up, or activation(up) without a gate, of a row that is gathered or, with `shared`, of the step.
    template <class Out>
    void activate_row(Own& own, int i, bool shared, Out* out) const {
        const int size = shared ? m_.shared_size : m_.size;
        const float* gate = shared ? shared_gate_up()[i] : gate_up()[i];
        if (m_.of_inputs && !shared) {
            grow(own.row, m_.ups(size));
            std::copy_n(gate, m_.ups(size), own.row.data());
            scale_by(own.row.data(), m_.ups(size), own.gathered.weight[i]);
            gate = own.row.data();
        }
        activate_row(shared, gate, gate + size, size, out);
    }
    // up: unused without a gate; then `gate` is what the activation reads
    template <class Out>
    void activate_row(bool shared, const float* gate, const float* up, int size, Out* out) const {
        const Gating gating = m_.gating(shared);
        if (is_gated(gating.activation)) activate(gating, gate, up, size, out);
        else activate_alone(gating.activation, nullptr, gate, size, out);
    }

    // The factor of an expert's output.
    Floats weight(float of_expert) const { return floats(m_.of_inputs ? 1.0f : of_expert); }

    static int panels_of(int columns) { return (columns + kPanel - 1) / kPanel; }
    Rows<const float> wide() const { return {step_.x, m_.routed}; }
    Rows<X> acts(bool shared) const {
        return shared ? rows_of(memory_.shared_acts, m_.shared_size) : rows_of(memory_.acts, m_.size);
    }
    Rows<float> gate_up() const { return rows_of(memory_.gate_up, m_.ups(m_.size)); }
    Rows<float> outputs() const { return rows_of(memory_.outputs, m_.hidden); }
    Rows<float> shared_gate_up() const { return rows_of(memory_.shared_gate_up, m_.ups(m_.shared_size)); }
    Rows<float> shared_outputs() const { return rows_of(memory_.shared_outputs, m_.hidden); }

    const MixtureDesc& m_;
    const MixtureStepDesc& step_;
    const Rows<const X> x_;
    MixtureMemory<T>& memory_;
    AnyMixtureLora* const lora_;
    const int layer_;
    const MixtureTargets* const targets_;
    const int per_token_, shared_rows_;
};

template <class T>
void Mixture<T>::run(Team& team, Team::Member& me) {
    Own& own = memory_.own[me.thread];
    route(team, me, own);
    const auto source = [&](bool of_experts) {
        return
            [&, of_experts](int i, float* out) { convert(x_[of_experts ? own.gathered.row[i] : i], m_.hidden, out); };
    };
    if (fuses()) run_gated(team, me, own);
    else
        run_gemm(team, me, own, {m_.gate_up, m_.shared_gate_up, m_.hidden, m_.hidden, gate_up(), shared_gate_up()},
                 {m_.ups(m_.size), m_.ups(m_.shared_size)}, {kExpertGateUp, kSharedGateUp},
                 {source(true), source(false)},
                 [&](int first, int rows, bool shared) { return gathered(own, first, rows, shared); });
    const auto hidden = [&](bool of_experts) {
        return [&, of_experts](int i, float* out) { activate_row(own, i, !of_experts, out); };
    };
    run_gemm(team, me, own, {m_.down, m_.shared_down, m_.size, m_.shared_size, outputs(), shared_outputs()},
             {m_.hidden, m_.hidden}, {kExpertDown, kSharedDown}, {hidden(true), hidden(false)},
             [&](int first, int rows, bool shared) { return activated(own, first, rows, shared); });
}

template <class T>
void Mixture<T>::add_up(int row, int thread, float* out) const {
    const int* place = memory_.own[thread].gathered.place.data() + (long)row * per_token_;
    const float* weights = step_.weights + (long)row * per_token_;
    const float factor = m_.shared_gate ? 1.0f / (1.0f + std::exp(-memory_.shared_gates[row])) : 1.0f;
    const auto source = [&](int i) { return place[i] < 0 ? wide()[row] : outputs()[place[i]]; };
    if (m_.out_norm)
        for (int i = 0; i < per_token_; i++) normalise(outputs()[place[i]]);
    for (int c = 0; c < m_.hidden; c += kLanes) {
        const Head here = head(m_.hidden - c);
        Floats sum = per_token_ ? load16(source(0) + c, here) * weight(weights[0]) : floats(0);
        for (int i = 1; i < per_token_; i++) sum = sum + load16(source(i) + c, here) * weight(weights[i]);
        if (m_.shared_size) sum = sum + load16(shared_outputs()[row] + c, here) * floats(factor);
        store16(out + c, sum, here);
    }
}

// Compute a layer's mixture for the rows of a step.
//
//   m     the layer
//   step  not written; the memory that it points to is
//   lora  the step's adapters; null: none
template <class T>
void mix(Team& team, const MixtureDesc& m, const MixtureStepDesc& step, AnyMixtureLora* lora) {
    thread_local MixtureMemory<T> memory;  // the caller's: all threads of its team use the same
    thread_local Buffer<Act<T>> acts;
    memory.reserve(m, step.rows, team.most());
    grow_rows(acts, step.rows, m.hidden);
    const Rows<Act<T>> x = rows_of(acts, m.hidden);
    Mixture<T> mixture(m, step, x, memory, lora, step.lora ? step.lora->layer : 0,
                       step.lora ? step.lora->targets : nullptr);
    team.run([&](Team::Member& me) {
        team.each(me, step.rows, [&](int r) {  // not by parts: see Decoder::walk
            convert(step.x + (long)r * m.hidden, m.hidden, x[r]);
        });
        mixture.run(team, me);
        each_part(team, me, step.rows, [&](int r, bool) { mixture.add_up(r, me.thread, step.y + (long)r * m.hidden); });
    });
}

CHORUS_UNIT_MIXTURE void Mixture<float>::run(Team&, Team::Member&);
CHORUS_UNIT_MIXTURE void Mixture<float>::add_up(int, int, float*) const;
CHORUS_UNIT_MIXTURE void mix<float>(Team&, const MixtureDesc&, const MixtureStepDesc&, AnyMixtureLora*);
CHORUS_UNIT_MIXTURE void Mixture<bf16>::run(Team&, Team::Member&);
CHORUS_UNIT_MIXTURE void Mixture<bf16>::add_up(int, int, float*) const;
CHORUS_UNIT_MIXTURE void mix<bf16>(Team&, const MixtureDesc&, const MixtureStepDesc&, AnyMixtureLora*);

}  // namespace chorus
