// Real-gated linear recurrent units (RG-LRU, arXiv 2402.19427) between a layer's two projections; the arithmetic of
// ops/mixers/rg_lru.py.
//
//   x = conv(x) + bias
//   a = exp(-rate · σ(x W_r + b_r))            W of each head
//   h = a · h + sqrt(1 - a²) · σ(x W_i + b_i) · x    of a sequence's first token without the root
//   out = h · gelu(y)
//
// A sequence's bits depend neither on its batch nor on how its prompt is cut. A draft's inputs are x. A shape's heads of v are
// the units' heads, without heads of k.
#pragma once
#include "mixers/gated_delta.h"

namespace chorus {

// Of a model's layers, one after the other: memory for a step.
class RgLru {
   public:
    explicit RgLru(const DeltaShape& shape) : s_(shape) {}

    // tokens: of the step, and accepted drafts.
    void plan(int tokens) { grow_rows(convolved_, tokens, s_.v_size()); }

    // As GatedDelta::run. mixed: y, then x of each token.
    template <class T, class States>
    void run(Team& team, Team::Member& me, const DeltaWeights& w, const States& states, Rows<const float> mixed,
             Rows<T> out) {
        const int heads = s_.v_heads;
        each_part(team, me, states.rows() * heads, [&](int i, bool) {
            const auto draft = [&](int d) { return states.draft(i / heads, d); };
            convolve_head(w, states.row(i / heads), states.conv(i / heads), draft, i % heads, mixed);
        });
        each_part(team, me, states.rows() * heads, [&](int i, bool) {
            const StatePart state = states.head(i / heads, i % heads);
            for (int c = 0; c < s_.v_dim; c += kLanes)
                scan(w, states.row(i / heads), i % heads, state, c, head(s_.v_dim - c), mixed, out);
        });
    }

   private:
    Rows<float> convolved() { return rows_of(convolved_, s_.v_size()); }

    // The convolution of a head's channels; their state is updated.
    template <class Draft>
    void convolve_head(const DeltaWeights& w, DeltaRow row, StatePart state, const Draft& draft, int head,
                       Rows<const float> mixed) {
        const int width = s_.v_dim, channels = s_.v_size(), before = s_.conv_size - 1, first = head * width;
        if (!state.in) {
            for (int i = 0; i < before; i++) std::fill_n(state.out + (long)i * channels + first, width, 0.0f);
            state.in = state.out;
        }
        auto input = [&](int t) {  // of the row's token t, below 0: of the state
            if (t < 0) return state.in + (long)(before + t) * channels + first;
            return t < row.accepted ? draft(t).in + first : mixed[row.mixed(t)] + channels + first;
        };
        for (int t = 0; t < row.total(); t++) {
            float* to = convolved()[row.place(t)] + first;
            for (int c = 0; c < width; c += kLanes) {
                const Head here = chorus::head(width - c);
                const Floats all = convolution(w.conv + first + c, channels, s_.conv_size, here,
                                               [&](int tap) { return load16(input(t - before + tap) + c, here); });
                store16(to + c, all + load16(w.conv_bias + first + c, here), here);
            }
        }
        for (int i = 0; i < before; i++) {
            const float* from = input(row.kept() - before + i);
            std::memmove(state.out + (long)i * channels + first, from, width * sizeof(float));
        }
        for (int d = 0; d < row.drafts; d++)
            std::memcpy(draft(d).out + first, input(row.kept() + d), width * sizeof(float));
    }

    // The recurrence of some units of a head, token after token.
    template <class T>
    void scan(const DeltaWeights& w, DeltaRow row, int head, StatePart state, int column, Head here,
              Rows<const float> mixed, Rows<T> out) {
        const int width = s_.v_dim, size = s_.v_size(), at = head * width + column;
        const float* const enters = w.gates + (long)head * width * width + column;
        const float* const decays = enters + (long)size * width;
        const Floats rate = load16(w.rates + at, here);
        const bool whole = width - column >= kLanes;
        const auto weights = [&](const float* p) { return whole ? load16(p) : load16(p, here); };
        Floats h = state.in ? load16(state.in + column, here) : floats(0), kept = h;
        for (int t = 0; t < row.total(); t++) {
            const float* x = convolved()[row.place(t)] + head * width;
            Floats in = load16(w.gate_bias + at, here), decay = load16(w.gate_bias + size + at, here);
            for (int i = 0; i < width; i++) {
                const Floats value = floats(x[i]);
                in = fma(value, weights(enters + (long)i * width), in);
                decay = fma(value, weights(decays + (long)i * width), decay);
            }
            const Floats log_decay = floats(0) - rate * sigmoid16(decay);
            const bool is_first = !state.in && t == 0;
            const Floats root = is_first ? floats(1.0f) : root16(floats(1.0f) - exp16(log_decay + log_decay));
            h = fma(exp16(log_decay), h, load16(x + column, here) * sigmoid16(in) * root);
            if (t < row.kept()) kept = h;
            if (t < row.accepted) continue;
            const int to = row.mixed(t);
            store16(out[to] + at, h * gelu16(load16(mixed[to] + at, here)), here);
        }
        store16(state.out + column, kept, here);
    }

    static Floats root16(Floats x) {
        float values[kLanes];
        store16(values, max(x, floats(0)));
        for (float& value : values) value = __builtin_sqrtf(value);
        return load16(values);
    }

    DeltaShape s_;
    Buffer<float> convolved_;
};

}  // namespace chorus
