// A layer's mixture of experts as a call of its own:
//
//   y[r] = Σ_i weight[r, i] · down_e(activation(gate_e(x[r])) · up_e(x[r])) (+ sigmoid(gate[r]) · shared(x[r]))
//
// over the experts e = chosen[r, i] of each row, the best first; with `of_inputs` the weight is of x[r] instead. Rows are gathered by expert, and only the experts that a row
// goes to are read. A row's bits depend on no other row.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "buffer.h"
#include "elementwise.h"
#include "mixture_lora.h"
#include "model_lora.h"
#include "multiply.h"
#include "router.h"
#include "shares.h"

namespace chorus {

// Experts' matrices of one shape. Mirrors ExpertMatricesDescriptor of ops/native_descriptors.py, and so on.
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
    const float* router;  // [experts, hidden], packed
    const float* router_bias;  // [experts]; null: none
    RoutingDesc routing;
    Activation activation;
    float alpha, limit;  // of kClampedSwiglu
    ExpertMatrices gate_up, down;
    ExpertMatrices shared_gate_up, shared_down;  // of one expert
    const float* shared_gate;  // [hidden]; null: the shared expert's output is added as it is
    int32_t of_inputs;  // 1: weights are of the experts' inputs, not of their outputs; then gate_up has no bias
};

struct MixtureStepDesc {
    int32_t rows;
    const float* x;  // [rows, hidden]
    float* y;  // [rows, hidden]: written
    int64_t* chosen;  // [rows, per_token]: written, the best first
    float* weights;  // likewise
    float *gate_up, *outputs;  // [rows · per_token, 2 · size] and [rows · per_token, hidden]: memory
    float *shared_gate_up, *shared_outputs;  // [rows, 2 · shared_size] and [rows, hidden]: memory
    const MixtureLoraDesc* lora;  // null: no adapters
    int32_t lora_element;  // of the adapters: kF32 or kBF16
};

// Memory of a thread that makes such calls.
template <class T>
struct MixtureMemory {
    Buffer<Act<T>> x, shared_x;  // inputs of products
    ProductList<T> products;
    ProductList<float> router;
    std::vector<float> logits, shared_gates;  // [rows, experts] and [rows]
    std::vector<int32_t> counts;  // [experts]: rows that go to each
    std::vector<int> place;  // [rows, per_token]: where the row is among those that are gathered by expert
    std::vector<int> row;  // of each that is gathered
    std::vector<float> weight;  // likewise, of the row's expert
};

template <class T>
class Mixture {
    using X = Act<T>;

   public:
    // lora: the step's adapters; null: none
    Mixture(const MixtureDesc& m, const MixtureStepDesc& step, MixtureMemory<T>& memory, AnyMixtureLora* lora)
        : m_(m),
          step_(step),
          memory_(memory),
          lora_(lora),
          per_token_(m.routing.per_token),
          pairs_(step.rows * per_token_) {
        grow_rows(memory.x, pairs_, std::max(m.hidden, m.size));
        if (m.shared_size) grow_rows(memory.shared_x, step.rows, std::max(m.hidden, m.shared_size));
        grow(memory.logits, (size_t)step.rows * m.experts);
        grow(memory.shared_gates, step.rows);
        memory.counts.resize(m.experts);
        memory.place.resize(pairs_);
        memory.row.resize(pairs_);
        memory.weight.resize(pairs_);
    }

    // Called by every thread of the team alike.
    void run(Team& team, Team::Member& me) {
        route(team, me);
        run_gate_up(team, me);
        run_down(team, me);
        each_part(team, me, step_.rows, [&](int r, bool) { combine(r); });
    }

   private:
    // Choose experts, and gather rows by expert.
    void route(Team& team, Team::Member& me) {
        const Rows<float> logits{memory_.logits.data(), m_.experts}, gates{memory_.shared_gates.data(), 1};
        team.each(me, 1, [&](int) {  // not by parts: see Decoder::walk
            memory_.router.clear();
            memory_.router.add(x(), step_.rows, {m_.router, m_.router_bias, m_.experts, m_.hidden, {}}, logits);
        });
        memory_.router.run(team, me);
        add(team, me, kRouter, x(), m_.hidden, logits);
        if (m_.shared_gate) {
            each_part(team, me, step_.rows,
                      [&](int r, bool) { gates[r][0] = dot<float>(x()[r], m_.shared_gate, m_.hidden); });
            add(team, me, kSharedGate, x(), m_.hidden, gates);
        }
        thread_local Router router;
        each_part(team, me, step_.rows, [&](int r, bool) {
            const long first = (long)r * per_token_;
            router.choose(m_.routing, logits[r], m_.experts, step_.chosen + first, step_.weights + first);
        });
        team.each(me, 1, [&](int) {
            gather();
            if (lora_) lora_->route(memory_.counts.data(), m_.experts, memory_.row);
        });
    }

    void run_gate_up(Team& team, Team::Member& me) {
        const Rows<X> gathered = rows_of(memory_.x, m_.hidden), shared = rows_of(memory_.shared_x, m_.hidden);
        team.each(me, 1, [&](int) {
            list_products(m_.gate_up, m_.shared_gate_up, gathered, shared, {m_.hidden, m_.hidden}, gate_up(),
                          shared_gate_up());
        });
        each_part(team, me, step_.rows, [&](int r, bool) {
            for (int i = 0; i < per_token_; i++)
                convert(x()[r], m_.hidden, gathered[memory_.place[(long)r * per_token_ + i]]);
            if (m_.shared_size) convert(x()[r], m_.hidden, shared[r]);
        });
        memory_.products.run(team, me);
        add(team, me, kExpertGateUp, x(), m_.hidden, gate_up());
        if (m_.shared_size) add(team, me, kSharedGateUp, x(), m_.hidden, shared_gate_up());
    }

    void run_down(Team& team, Team::Member& me) {
        const Rows<X> hidden = rows_of(memory_.x, m_.size), shared = rows_of(memory_.shared_x, m_.shared_size);
        team.each(me, 1, [&](int) {
            list_products(m_.down, m_.shared_down, hidden, shared, {m_.size, m_.shared_size}, outputs(),
                          shared_outputs());
        });
        each_part(team, me, pairs_ + (m_.shared_size ? step_.rows : 0), [&](int i, bool) {
            if (i < pairs_) {
                if (m_.of_inputs) multiply(gate_up()[i], 2 * m_.size, memory_.weight[i]);
                activate_row(gate_up()[i], m_.size, hidden[i]);
            } else activate_row(shared_gate_up()[i - pairs_], m_.shared_size, shared[i - pairs_]);
        });
        memory_.products.run(team, me);
        add(team, me, kExpertDown, gate_up(), m_.size, outputs(), true);
        if (m_.shared_size) add(team, me, kSharedDown, shared_gate_up(), m_.shared_size, shared_outputs());
    }

    // What adapters add to a product; see AnyMixtureLora.
    void add(Team& team, Team::Member& me, MixtureProduct product, Rows<const float> x, int inputs, Rows<float> y,
             bool gathered = false) {
        if (lora_) lora_->add(team, me, product, x, inputs, y, gathered);
    }

    // Find each row's places: expert after expert, an expert's rows in order.
    void gather() {
        auto& counts = memory_.counts;
        std::fill(counts.begin(), counts.end(), 0);
        for (int i = 0; i < pairs_; i++) counts[step_.chosen[i]]++;
        std::vector<int> next(m_.experts);
        for (int e = 1; e < m_.experts; e++) next[e] = next[e - 1] + counts[e - 1];
        for (int i = 0; i < pairs_; i++) {
            const int place = memory_.place[i] = next[step_.chosen[i]]++;
            memory_.row[place] = i / per_token_;
            memory_.weight[place] = step_.weights[i];
        }
    }

    // Inputs of experts' products, and of the shared expert's.
    struct Inputs {
        int own, shared;
    };

    void list_products(const ExpertMatrices& matrices, const ExpertMatrices& of_shared, Rows<const X> x,
                       Rows<const X> shared_x, Inputs inputs, Rows<float> y, Rows<float> shared_y) {
        memory_.products.clear();
        for (int e = 0, first = 0; e < m_.experts; first += memory_.counts[e++])
            memory_.products.add(x.from(first), memory_.counts[e], matrices.of<T>(e, (int)y.stride, inputs.own),
                                 y.from(first));
        if (m_.shared_size)
            memory_.products.add(shared_x, step_.rows, of_shared.of<T>(0, (int)shared_y.stride, inputs.shared),
                                 shared_y);
    }

    // activation(gate) · up of a row, in place of the gate, and in `out`.
    void activate_row(float* gate, int size, X* out) const {
        const float* up = gate + size;
        if (m_.activation == kClampedSwiglu) clamped_swiglu(gate, up, size, m_.alpha, m_.limit, gate);
        else activate(m_.activation, gate, up, size, gate);
        convert(gate, size, out);
    }

    // The factor of an expert's output.
    Floats weight(float of_expert) const { return floats(m_.of_inputs ? 1.0f : of_expert); }

    static void multiply(float* row, int size, float factor) {
        for (int i = 0; i < size; i++) row[i] *= factor;
    }

    void combine(int row) const {
        const int* place = memory_.place.data() + (long)row * per_token_;
        const float* weights = step_.weights + (long)row * per_token_;
        const float factor = m_.shared_gate ? 1.0f / (1.0f + std::exp(-memory_.shared_gates[row])) : 1.0f;
        for (int c = 0; c < m_.hidden; c += kLanes) {
            const Head here = head(m_.hidden - c);
            Floats sum = load16(outputs()[place[0]] + c, here) * weight(weights[0]);
            for (int i = 1; i < per_token_; i++) sum = sum + load16(outputs()[place[i]] + c, here) * weight(weights[i]);
            if (m_.shared_size) sum = sum + load16(shared_outputs()[row] + c, here) * floats(factor);
            store16(step_.y + (long)row * m_.hidden + c, sum, here);
        }
    }

    Rows<const float> x() const { return {step_.x, m_.hidden}; }
    Rows<float> gate_up() const { return {step_.gate_up, 2 * m_.size}; }
    Rows<float> outputs() const { return {step_.outputs, m_.hidden}; }
    Rows<float> shared_gate_up() const { return {step_.shared_gate_up, 2 * m_.shared_size}; }
    Rows<float> shared_outputs() const { return {step_.shared_outputs, m_.hidden}; }

    const MixtureDesc& m_;
    const MixtureStepDesc& step_;
    MixtureMemory<T>& memory_;
    AnyMixtureLora* const lora_;
    const int per_token_, pairs_;
};

// Compute a layer's mixture for the rows of a step.
//
//   m     the layer
//   step  not written; the memory that it points to is
//   lora  the step's adapters; null: none
template <class T>
void mix(Team& team, const MixtureDesc& m, const MixtureStepDesc& step, AnyMixtureLora* lora) {
    thread_local MixtureMemory<T> memory;  // the caller's: all threads of its team use the same
    Mixture<T> mixture(m, step, memory, lora);
    team.run([&](Team::Member& me) { mixture.run(team, me); });
}

}  // namespace chorus
