// The recurrent mixers of a model's layers: one of the kinds below, in all layers that have no attention.
#pragma once
#include "mixers/gated_delta.h"
#include "mixers/headed_scan.h"
#include "mixers/mamba2.h"
#include "mixers/paged_states.h"
#include "mixers/rg_lru.h"
#include "mixers/selective_scan.h"
#include "mixers/short_conv.h"
#include "program/registers.h"
#include "units.h"

namespace chorus {

template <class T>
class Mixers {
   public:
    // team: outlives the object, as registers do
    Mixers(const ModelDesc& model, Team& team, Registers<T>& registers)
        : m_(model),
          team_(team),
          registers_(registers),
          delta_(model.delta),
          short_conv_(model.delta),
          mamba_(model.delta),
          rg_lru_(model.delta),
          selective_scan_(model.delta),
          headed_scan_(model.delta) {}

    void join(Ranks* ranks) { ranks_ = ranks; }

    // Make room for a step.
    void plan(const StepDesc& step) {
        const int seen = step.tokens + step.state_accepted[step.rows];
        const bool drafts = m_.most_drafts > 0;
        if (m_.delta.mixer == Mixer::kDelta) delta_.plan(seen, drafts, team_.size());
        if (m_.delta.mixer == Mixer::kMamba2) mamba_.plan(step.tokens, seen, drafts, team_.size());
        if (m_.delta.mixer == Mixer::kRgLru) rg_lru_.plan(seen);
        if (m_.delta.mixer == Mixer::kMamba1) selective_scan_.plan(team_.size());
        if (m_.delta.mixer == Mixer::kHeadedScan) headed_scan_.plan(team_.size());
    }

    // Run a layer's mixer. Called by every thread of the team alike.
    void run(Team::Member& me, const StepDesc& step, const MixOp& op);

   private:
    const ModelDesc m_;
    Team& team_;
    Registers<T>& registers_;
    Ranks* ranks_ = nullptr;
    GatedDelta delta_;
    ShortConv short_conv_;
    Mamba2 mamba_;
    RgLru rg_lru_;
    SelectiveScan selective_scan_;
    HeadedScan headed_scan_;
};

template <class T>
void Mixers<T>::run(Team::Member& me, const StepDesc& step, const MixOp& op) {
    const PagedStates states{m_, step, op.state_layer};
    const Rows<float> x = registers_.floats(op.x);
    if (op.is_first) return selective_scan_.convolve(team_, me, op.weights, states, x, registers_.floats(op.out));
    const Rows<Act<T>> out = registers_.rounded(op.out);
    switch (m_.delta.mixer) {
        case Mixer::kDelta: return delta_.run(team_, me, op.weights, states, delta_.inputs(x), out);
        case Mixer::kShortConv: return short_conv_.run(team_, me, op.weights, states, x, out);
        case Mixer::kMamba2: return mamba_.run(team_, me, ranks_, op.weights, states, step.tokens, x, out);
        case Mixer::kRgLru: return rg_lru_.run(team_, me, op.weights, states, x, out);
        case Mixer::kHeadedScan: return headed_scan_.run(team_, me, op.weights, states, x, out);
        case Mixer::kMamba1: return selective_scan_.scan(team_, me, op.weights, states, x, out);
    }
}

CHORUS_UNIT_MIXERS void Mixers<float>::run(Team::Member&, const StepDesc&, const MixOp&);
CHORUS_UNIT_MIXERS void Mixers<bf16>::run(Team::Member&, const StepDesc&, const MixOp&);

}  // namespace chorus
