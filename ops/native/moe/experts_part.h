// The feed-forward part of a decoder's layers with experts: see mixture.h.
#pragma once
#include <vector>
#include "program/descriptors.h"
#include "moe/mixture.h"

namespace chorus {

template <class T>
class ExpertsPart {
    using X = Act<T>;

   public:
    // team: outlives the object
    ExpertsPart(const ModelDesc& model, Team& team) : team_(team), hidden_(model.hidden) {
        for (int i = 0; i < model.num_ops; i++)
            if (model.ops[i].kind == OpKind::kMoe) mixtures_.push_back(arguments_of<MoeOp>(model.ops[i]).experts);
    }

    // Make room for a step, and describe its adapters.
    void plan(const StepDesc& step) {
        if (mixtures_.empty()) return;
        size_t most = 0;
        for (const MixtureDesc* m : mixtures_) {
            memory_.reserve(*m, step.tokens, team_.most());
            most = std::max(most, (size_t)m->routing.per_token);
        }
        grow(x_, (size_t)step.tokens * hidden_);
        grow(chosen_, step.tokens * most);
        grow(weights_, step.tokens * most);
        step_ = {step.tokens, x_.data(), nullptr, chosen_.data(), weights_.data(), step.mixture, 0};
        if (step.mixture) lora_.begin(*step.mixture, step.tokens, team_.most());
    }

    // Take a row of the part's input, before `run`: the router's product is of float32.
    void take(int row, const X* x) { convert(x, hidden_, x_.data() + (long)row * hidden_); }

    // Compute what `add_up` adds up. Called by every thread of the team alike.
    //
    //   x  [tokens, hidden]
    void run(Team::Member& me, const MoeOp& op, Rows<const X> x) { of(op, x).run(team_, me); }

    // Write a row of the part's output, [hidden], or this rank's part of it. thread: that calls it
    void add_up(const MoeOp& op, int row, int thread, float* out) { of(op, {}).add_up(row, thread, out); }

   private:
    Mixture<T> of(const MoeOp& op, Rows<const X> x) {
        return {*op.experts, step_, x, memory_, step_.lora ? &lora_ : nullptr, op.layer, op.targets};
    }

    Team& team_;
    const int hidden_;
    std::vector<const MixtureDesc*> mixtures_;
    MixtureMemory<T> memory_;
    MixtureLora<T> lora_;
    MixtureStepDesc step_{};
    Buffer<float> x_, weights_;
    Buffer<int64_t> chosen_;
};

}  // namespace chorus
