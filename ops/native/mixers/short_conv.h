// A gated short convolution between a layer's two projections; the arithmetic of ops/mixers/short_conv.py.
//
//   out = c · (conv(b · x) + bias)
//
// A sequence's bits depend neither on its batch nor on how its prompt is cut. A draft's inputs are b · x.
#pragma once
#include "mixers/gated_delta.h"

namespace chorus {

class ShortConv {
   public:
    explicit ShortConv(const DeltaShape& shape) : s_(shape) {}

    // As GatedDelta::run. mixed: b, c and x of each token.
    template <class T, class States>
    void run(Team& team, Team::Member& me, const DeltaWeights& w, const States& states, Rows<const float> mixed,
             Rows<T> out) {
        const int parts = (s_.channels() + kWidth - 1) / kWidth;
        each_part(team, me, states.rows() * parts, [&](int i, bool) {
            const auto draft = [&](int d) { return states.draft(i / parts, d); };
            const int first = i % parts * kWidth, last = std::min(s_.channels(), first + kWidth);
            for (int c = first; c < last; c += kLanes)
                run_channels(w, states.row(i / parts), states.conv(i / parts), draft, c, head(last - c), mixed, out);
        });
    }

   private:
    static constexpr int kWidth = 256;  // channels of a part: a rank's share of work

    template <class T, class Draft>
    void run_channels(const DeltaWeights& w, DeltaRow row, StatePart state, const Draft& draft, int c, Head here,
                      Rows<const float> mixed, Rows<T> out) {
        const int channels = s_.channels(), before = s_.conv_size - 1;
        if (!state.in) {
            for (int i = 0; i < before; i++) store16(state.out + (long)i * channels + c, floats(0), here);
            state.in = state.out;
        }
        auto input = [&](int t) {  // of the row's token t, below 0: of the state
            if (t < 0) return load16(state.in + (long)(before + t) * channels + c, here);
            if (t < row.accepted) return load16(draft(t).in + c, here);
            const float* own = mixed[row.mixed(t)] + c;
            return load16(own, here) * load16(own + 2 * channels, here);
        };
        for (int t = row.accepted; t < row.total(); t++) {
            Floats y =
                convolution(w.conv + c, channels, s_.conv_size, here, [&](int tap) { return input(t - before + tap); });
            if (w.conv_bias) y = y + load16(w.conv_bias + c, here);
            const int at = row.mixed(t);
            store16(out[at] + c, y * load16(mixed[at] + channels + c, here), here);
        }
        for (int i = 0; i < before; i++)
            store16(state.out + (long)i * channels + c, input(row.kept() - before + i), here);
        for (int d = 0; d < row.drafts; d++) store16(draft(d).out + c, input(row.kept() + d), here);
    }

    DeltaShape s_;
};

}  // namespace chorus
