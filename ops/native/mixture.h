// A layer's mixture of experts as a call of its own:
//
//   y[r] = Σ_i weight[r, i] · down_e(activation(gate_e(x[r])) · up_e(x[r])) (+ sigmoid(gate[r]) · shared(x[r]))
//
// over the experts e = chosen[r, i] of each row, the best first. Rows are gathered by expert, and only the experts that a row
// goes to are read. A row's bits depend on no other row.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "buffer.h"
#include "elementwise.h"
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
    int32_t hidden, experts, size, shared_size;  // size: of an expert's gate; shared_size 0: there is no shared expert
    const float* router;  // [experts, hidden], packed
    const float* router_bias;  // [experts]; null: none
    RoutingDesc routing;
    Activation activation;
    float alpha, limit;  // of kClampedSwiglu
    ExpertMatrices gate_up, down;
    ExpertMatrices shared_gate_up, shared_down;  // of one expert
    const float* shared_gate;  // [hidden]; null: the shared expert's output is added as it is
};

// Parts of a step. Between two of them, adapters may be added to what the earlier one wrote.
enum MixturePart : int32_t {
    kRoutePart,  // logits and shared_gates
    kGateUpPart,  // experts are chosen: chosen, weights, place and counts; gate_up and shared_gate_up
    kDownPart,  // gate_up and shared_gate_up become hidden rows, from their beginnings on; outputs and shared_outputs
    kCombinePart,  // y
};

struct MixtureStepDesc {
    int32_t rows, first, last;  // parts `first` … last-1 are computed
    const float* x;  // [rows, hidden]
    float* logits;  // [rows, experts]
    int64_t* chosen;  // [rows, per_token]
    float* weights;  // likewise
    int32_t* place;  // likewise: where the row is among those that are gathered by expert
    int32_t* counts;  // [experts]: rows that go to each
    float *gate_up, *outputs;  // [rows · per_token, 2 · size] and [rows · per_token, hidden], gathered by expert
    float *shared_gate_up, *shared_outputs;  // [rows, 2 · shared_size] and [rows, hidden]
    float* shared_gates;  // [rows]
    float* y;  // [rows, hidden]
};

// Memory of a thread that makes such calls.
template <class T>
struct MixtureMemory {
    Buffer<Act<T>> x, shared_x;  // inputs of the products of the part that is computed
    ProductList<T> products;
    ProductList<float> router;
};

template <class T>
class Mixture {
    using X = Act<T>;

   public:
    Mixture(const MixtureDesc& m, const MixtureStepDesc& step, MixtureMemory<T>& memory)
        : m_(m), step_(step), memory_(memory), pairs_(step.rows * m.routing.per_token) {
        const int widest = std::max(m.hidden, m.size), shared_widest = std::max(m.hidden, m.shared_size);
        grow_rows(memory.x, pairs_, widest);
        if (m.shared_size) grow_rows(memory.shared_x, step.rows, shared_widest);
    }

    // Compute a part; called by every thread of the team alike.
    void run(Team& team, Team::Member& me, int part) {
        if (part == kRoutePart) route(team, me);
        else if (part == kGateUpPart) run_gate_up(team, me);
        else if (part == kDownPart) run_down(team, me);
        else team.each(me, step_.rows, [&](int r) { combine(r); });
    }

   private:
    void route(Team& team, Team::Member& me) {
        const float* bias = m_.router_bias;
        const Rows<const float> x{step_.x, m_.hidden};
        team.each(me, 1, [&](int) {
            memory_.router.clear();
            memory_.router.add(x, step_.rows, {m_.router, bias, m_.experts, m_.hidden, {}},
                               {step_.logits, m_.experts});
        });
        memory_.router.run(team, me);
        if (m_.shared_gate)
            each_part(team, me, step_.rows,
                      [&](int r, bool) { step_.shared_gates[r] = dot<float>(x[r], m_.shared_gate, m_.hidden); });
    }

    void run_gate_up(Team& team, Team::Member& me) {
        const int per_token = m_.routing.per_token;
        thread_local Router router;
        team.each(me, step_.rows, [&](int r) {
            router.choose(m_.routing, step_.logits + (long)r * m_.experts, m_.experts,
                          step_.chosen + (long)r * per_token, step_.weights + (long)r * per_token);
        });
        team.each(me, 1, [&](int) {
            gather();
            list_products(m_.gate_up, m_.shared_gate_up, m_.hidden, 2 * m_.size, 2 * m_.shared_size, step_.gate_up,
                          step_.shared_gate_up);
        });
        const Rows<X> gathered = rows_of(memory_.x, m_.hidden), shared = rows_of(memory_.shared_x, m_.hidden);
        each_part(team, me, step_.rows, [&](int r, bool) {
            const float* x = step_.x + (long)r * m_.hidden;
            for (int i = 0; i < per_token; i++) convert(x, m_.hidden, gathered[step_.place[(long)r * per_token + i]]);
            if (m_.shared_size) convert(x, m_.hidden, shared[r]);
        });
        memory_.products.run(team, me);
    }

    void run_down(Team& team, Team::Member& me) {
        team.each(me, 1, [&](int) {
            list_products(m_.down, m_.shared_down, 0, m_.hidden, m_.hidden, step_.outputs, step_.shared_outputs);
        });
        const int shared_rows = m_.shared_size ? step_.rows : 0;
        each_part(team, me, pairs_ + shared_rows, [&](int i, bool) {
            if (i < pairs_) activate_row(step_.gate_up, m_.size, i, memory_.x);
            else activate_row(step_.shared_gate_up, m_.shared_size, i - pairs_, memory_.shared_x);
        });
        memory_.products.run(team, me);
    }

    // Find each row's places: expert after expert, an expert's rows in order.
    void gather() {
        std::fill_n(step_.counts, m_.experts, 0);
        for (int i = 0; i < pairs_; i++) step_.counts[step_.chosen[i]]++;
        std::vector<int> next(m_.experts);
        for (int e = 1; e < m_.experts; e++) next[e] = next[e - 1] + step_.counts[e - 1];
        for (int i = 0; i < pairs_; i++) step_.place[i] = next[step_.chosen[i]]++;
    }

    // inputs: of the products, 0: the width of experts. outputs, shared_outputs: their number; y, shared_y: where they go.
    void list_products(const ExpertMatrices& matrices, const ExpertMatrices& shared, int inputs, int outputs,
                       int shared_outputs, float* y, float* shared_y) {
        const int own = inputs ? inputs : m_.size, shared_own = inputs ? inputs : m_.shared_size;
        memory_.products.clear();
        for (int e = 0, first = 0; e < m_.experts; first += step_.counts[e++])
            memory_.products.add(rows_of(memory_.x, own).from(first), step_.counts[e],
                                 matrices.of<T>(e, outputs, own), {y + (long)first * outputs, outputs});
        if (m_.shared_size)
            memory_.products.add(rows_of(memory_.shared_x, shared_own), step_.rows,
                                 shared.of<T>(0, shared_outputs, shared_own), {shared_y, shared_outputs});
    }

    // activation(gate) · up of a row, in place of the gate, and in `out`.
    void activate_row(float* gate_up, int size, int row, Buffer<X>& out) {
        float *gate = gate_up + 2l * row * size, *up = gate + size;
        if (m_.activation == kClampedSwiglu) clamped_swiglu(gate, up, size, m_.alpha, m_.limit, gate);
        else activate(m_.activation, gate, up, size, gate);
        convert(gate, size, rows_of(out, size)[row]);
    }

    void combine(int row) {
        const int per_token = m_.routing.per_token, hidden = m_.hidden;
        const int32_t* place = step_.place + (long)row * per_token;
        const float* weights = step_.weights + (long)row * per_token;
        const float* shared = step_.shared_outputs + (long)row * hidden;
        const Rows<const float> outputs{step_.outputs, hidden};
        const float factor = m_.shared_gate ? 1.0f / (1.0f + std::exp(-step_.shared_gates[row])) : 1.0f;
        for (int c = 0; c < hidden; c += kLanes) {
            const Head here = head(hidden - c);
            Floats sum = load16(outputs[place[0]] + c, here) * floats(weights[0]);
            for (int i = 1; i < per_token; i++)
                sum = sum + load16(outputs[place[i]] + c, here) * floats(weights[i]);
            if (m_.shared_size) sum = sum + load16(shared + c, here) * floats(factor);
            store16(step_.y + (long)row * hidden + c, sum, here);
        }
    }

    const MixtureDesc& m_;
    const MixtureStepDesc& step_;
    MixtureMemory<T>& memory_;
    const int pairs_;
};

// Compute some parts of a step of a layer's mixture.
//
//   m     the layer
//   step  read and written: the buffers of the parts that are computed, and of those before them
template <class T>
void mix(Team& team, const MixtureDesc& m, const MixtureStepDesc& step) {
    thread_local MixtureMemory<T> memory;  // the caller's: all threads of its team use the same
    Mixture<T> mixture(m, step, memory);
    team.run([&](Team::Member& me) {
        for (int part = step.first; part < step.last; part++) mixture.run(team, me, part);
    });
}

}  // namespace chorus
