// Mamba 1 (arXiv 2312.00752) in two parts, between which a layer has projections; the arithmetic of
// ops/mixers/selective_scan.py.
//
// A step's tokens take the recurrent form, one after the other, so a sequence's bits depend neither on its batch nor on how its
// prompt is cut. A shape's heads of v are blocks of channels, and k_dim is the width of B and C. A draft's inputs are those of the
// convolution, then x, dt and B.
#pragma once
#include "mixers/gated_delta.h"

namespace chorus {

// Of a model's layers, one after the other: memory for a step.
class SelectiveScan {
   public:
    explicit SelectiveScan(const DeltaShape& shape) : s_(shape) {}

    void plan(int threads) { grow_rows(states_, threads, s_.k_dim * kLanes); }

    // The first part: out = silu(conv(x) + bias). mixed: x of each token; other parameters as of GatedDelta::run.
    template <class States>
    void convolve(Team& team, Team::Member& me, const DeltaWeights& w, const States& states, Rows<const float> mixed,
                  Rows<float> out) {
        const int parts = (s_.v_size() + kWidth - 1) / kWidth;
        each_part(team, me, states.rows() * parts, [&](int i, bool) {
            const auto draft = [&](int d) { return states.draft(i / parts, d); };
            const int first = i % parts * kWidth, last = std::min(s_.v_size(), first + kWidth);
            for (int c = first; c < last; c += kLanes)
                convolve(w, states.row(i / parts), states.conv(i / parts), draft, c, head(last - c), mixed, out);
        });
    }

    // The second part: the recurrence, and its gates. mixed: x, dt before softplus, B, C and z of each token.
    template <class T, class States>
    void scan(Team& team, Team::Member& me, const DeltaWeights& w, const States& states, Rows<const float> mixed,
              Rows<T> out) {
        const int heads = s_.v_heads;
        each_part(team, me, states.rows() * heads, [&](int i, bool) {
            const auto draft = [&](int d) { return states.draft(i / heads, d); };
            const StatePart state = states.head(i / heads, i % heads);
            float* const scratch = rows_of(states_, s_.k_dim * kLanes)[me.thread];
            for (int c = 0; c < s_.v_dim; c += kLanes)
                scan(w, states.row(i / heads), state, draft, i % heads * s_.v_dim, c, head(s_.v_dim - c), mixed, out,
                     scratch);
        });
    }

   private:
    static constexpr int kWidth = 256;  // channels of a part: a rank's share of work

    template <class Draft>
    void convolve(const DeltaWeights& w, DeltaRow row, StatePart state, const Draft& draft, int c, Head here,
                  Rows<const float> mixed, Rows<float> out) {
        const int channels = s_.v_size(), before = s_.conv_size - 1;
        if (!state.in) {
            for (int i = 0; i < before; i++) store16(state.out + (long)i * channels + c, floats(0), here);
            state.in = state.out;
        }
        auto input = [&](int t) {  // of the row's token t, below 0: of the state
            if (t < 0) return load16(state.in + (long)(before + t) * channels + c, here);
            return load16((t < row.accepted ? draft(t).in : mixed[row.mixed(t)]) + c, here);
        };
        for (int t = row.accepted; t < row.total(); t++) {
            Floats y =
                convolution(w.conv + c, channels, s_.conv_size, here, [&](int tap) { return input(t - before + tap); });
            if (w.conv_bias) y = y + load16(w.conv_bias + c, here);
            store16(out[row.mixed(t)] + c, silu16(y), here);
        }
        for (int i = 0; i < before; i++)
            store16(state.out + (long)i * channels + c, input(row.kept() - before + i), here);
        for (int d = 0; d < row.drafts; d++) store16(draft(d).out + c, input(row.kept() + d), here);
    }

    // Some channels of a head, token after token. first: the head's first channel; h: memory for their state.
    template <class T, class Draft>
    void scan(const DeltaWeights& w, DeltaRow row, StatePart state, const Draft& draft, int first, int column,
              Head here, Rows<const float> mixed, Rows<T> out, float* h) {
        const int size = s_.v_size(), n = s_.k_dim, width = s_.v_dim, at = first + column;
        for (int k = 0; k < n; k++)
            store16(h + k * kLanes, state.in ? load16(state.in + (long)k * width + column, here) : floats(0));
        const Floats skipped = load16(w.d + at, here);
        for (int t = 0; t < row.total(); t++) {
            const bool known = t < row.accepted;
            const float* own = known ? draft(t).in + size : mixed[row.mixed(t)];
            const float *b = own + 2 * size, *c = b + n;
            const Floats x = load16(own + at, here), raw = load16(own + size + at, here), dt = softplus16(raw);
            const Floats added = dt * x, none = floats(0) - dt;
            Floats y = floats(0);
            for (int k = 0; k < n; k++) {
                const Floats decay = exp16(none * load16(w.rates + (long)k * size + at, here));
                const Floats value = fma(added, floats(b[k]), load16(h + k * kLanes) * decay);
                store16(h + k * kLanes, value);
                if (!known) y = fma(value, floats(c[k]), y);
            }
            if (t >= row.kept()) {
                float* to = draft(t - row.kept()).out + size;
                store16(to + at, x, here);
                store16(to + size + at, raw, here);
                if (!at) std::memcpy(to + 2 * size, b, n * sizeof(float));
            }
            if (t == row.kept() - 1)
                for (int k = 0; k < n; k++) store16(state.out + (long)k * width + column, load16(h + k * kLanes), here);
            if (known) continue;
            const int to = row.mixed(t);
            const Floats gate = silu16(load16(mixed[to] + 2 * size + 2 * n + at, here));
            store16(out[to] + at, fma(x, skipped, y) * gate, here);
        }
    }

    DeltaShape s_;
    Buffer<float> states_;  // of some channels, of each thread
};

}  // namespace chorus
