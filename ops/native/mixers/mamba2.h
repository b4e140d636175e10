// Mamba 2 between a layer's two projections; the arithmetic of ops/mixers/mamba2.py.
//
// As in gated_delta.h, a step's tokens take the recurrent form, one after the other, so a sequence's bits depend neither on its
// batch nor on how its prompt is cut. A shape's heads of v are those of x, and its heads of k the groups, of B and of C.
#pragma once
#include "mixers/gated_delta.h"
#include "ranks/ranks.h"

namespace chorus {

// Of a model's layers, one after the other: memory for a step.
class Mamba2 {
   public:
    explicit Mamba2(const DeltaShape& shape) : s_(shape) {}

    // tokens: of the step. seen: of the step, and accepted drafts. drafts: whether it has any.
    void plan(int tokens, int seen, bool drafts, int threads) {
        grow_rows(convolved_, seen, s_.channels());
        grow_rows(gates_, seen, 2 * s_.v_heads);
        grow_rows(outputs_, tokens, s_.v_size());
        if (drafts) grow_rows(drafted_, threads, s_.k_dim * s_.v_dim);
    }

    // As GatedDelta::run. mixed: z, then x, B and C, then dt of each token. ranks: see Decoder::join.
    template <class T, class States>
    void run(Team& team, Team::Member& me, Ranks* ranks, const DeltaWeights& w, const States& states, int tokens,
             Rows<const float> mixed, Rows<T> out) {
        const int heads = s_.heads(), v_heads = s_.v_heads, groups = s_.k_heads;
        each_part(team, me, states.rows() * heads, [&](int i, bool) {
            const DeltaRow row = states.row(i / heads);
            const auto draft = [&](int d) { return states.draft(i / heads, d); };
            convolve_head(w, row, states.conv(i / heads), draft, i % heads, mixed);
            if (i % heads < v_heads) find_gates(w, row, draft, i % heads, mixed);
        });
        each_part(team, me, states.rows() * v_heads, [&](int i, bool more) {
            const float* next = more ? states.head((i + 1) / v_heads, (i + 1) % v_heads).in : nullptr;
            run_head(w, states.row(i / v_heads), i % v_heads, states.head(i / v_heads, i % v_heads), {next}, me.thread);
        });
        const int width = s_.v_size() / groups;
        if (ranks && s_.group_ranks > 1 && w.norm) return norm_with_ranks(team, me, *ranks, w, tokens, mixed, out);
        each_part(team, me, tokens * groups, [&](int i, bool) {
            const int t = i / groups, at = i % groups * width;
            float* x = outputs()[t] + at;
            const float* z = mixed[t] + at;
            if (!w.norm) return gate(x, z, width, out[t] + at);
            const float squares = s_.gates_norm ? sum_of_squares(x, width) : gate(x, z, width);
            scale(x, z, w.norm + at, width, squares / width, out[t] + at);
        });
    }

   private:
    Rows<float> convolved() { return rows_of(convolved_, s_.channels()); }
    Rows<float> gates() { return rows_of(gates_, 2 * s_.v_heads); }
    Rows<float> outputs() { return rows_of(outputs_, s_.v_size()); }

    // The convolution and silu of the channels of a head of x, or of a group's B or C; the channels' state is updated.
    template <class Draft>
    void convolve_head(const DeltaWeights& w, DeltaRow row, StatePart state, const Draft& draft, int head,
                       Rows<const float> mixed) {
        const bool is_x = head < s_.v_heads;
        const int width = is_x ? s_.v_dim : s_.k_dim, channels = s_.channels(), before = s_.conv_size - 1;
        const int first = is_x ? head * s_.v_dim : s_.v_size() + (head - s_.v_heads) * s_.k_dim;
        if (!state.in) {
            for (int i = 0; i < before; i++) std::fill_n(state.out + (long)i * channels + first, width, 0.0f);
            state.in = state.out;
        }
        auto input = [&](int t) {  // of the row's token t, below 0: of the state
            if (t < 0) return state.in + (long)(before + t) * channels + first;
            return t < row.accepted ? draft(t).in + first : mixed[row.mixed(t)] + s_.v_size() + first;
        };
        for (int t = 0; t < row.total(); t++) {
            float* y = convolved()[row.place(t)] + first;
            for (int c = 0; c < width; c += kLanes) {
                const Head here = chorus::head(width - c);
                Floats all = convolution(w.conv + first + c, channels, s_.conv_size, here,
                                         [&](int tap) { return load16(input(t - before + tap) + c, here); });
                if (w.conv_bias) all = all + load16(w.conv_bias + first + c, here);
                store16(y + c, silu16(all), here);
            }
        }
        for (int i = 0; i < before; i++) {
            const float* from = input(row.kept() - before + i);
            std::memmove(state.out + (long)i * channels + first, from, width * sizeof(float));
        }
        for (int d = 0; d < row.drafts; d++)
            std::memcpy(draft(d).out + first, input(row.kept() + d), width * sizeof(float));
    }

    // Of each token, how much of a head's state is kept, and dt.
    template <class Draft>
    void find_gates(const DeltaWeights& w, DeltaRow row, const Draft& draft, int head, Rows<const float> mixed) {
        const int kept = s_.channels() + head, own = kept + s_.v_size();
        const float rate = std::exp(w.a_log[head]);
        for (int t = 0; t < row.total(); t++) {
            const float from = t < row.accepted ? draft(t).in[kept] : mixed[row.mixed(t)][own];
            const float x = from + w.dt_bias[head];
            const float dt = std::max(s_.dt_min, x > 20 ? x : std::log1p(std::exp(x)));
            float* gates_of = gates()[row.place(t)] + 2 * head;
            gates_of[0] = std::exp(-rate * dt);
            gates_of[1] = dt;
            if (t >= row.kept()) draft(t - row.kept()).out[kept] = from;
        }
    }

    // The recurrence of a head's tokens, on a thread.
    void run_head(const DeltaWeights& w, DeltaRow row, int head, StatePart state, NextState ahead, int thread) {
        float* const drafts = row.drafts ? rows_of(drafted_, s_.k_dim * s_.v_dim)[thread] : nullptr;
        auto run = [&](auto count, StatePart part, float* drafted, int at, Head last, bool streams) {
            scan<count()>(w, row, head, part, drafted, at, last, streams, ahead);
        };
        each_columns(s_.k_dim, s_.v_dim, row, state, drafts, run);
    }

    // Some columns of a head's state, token after token. drafted: where the state of drafts is.
    template <int COUNT>
    void scan(const DeltaWeights& w, DeltaRow row, int head, StatePart state, float* drafted, int column, Head last,
              bool streams, NextState& ahead) {
        const int k_dim = s_.k_dim, v_dim = s_.v_dim, x_at = head * v_dim + column;
        const int b_at = s_.v_size() + head / (s_.v_heads / s_.k_heads) * k_dim, c_at = b_at + s_.k_size();
        Floats added[COUNT], y[COUNT], none[COUNT];
        for (int t = 0; t < row.total(); t++) {
            const float *own = convolved()[row.place(t)], *of_token = gates()[row.place(t)] + 2 * head;
            if (t == row.kept()) state.out = drafted;
            auto here = [&](int j) { return j + 1 < COUNT ? chorus::head(kLanes) : last; };
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; j++) added[j] = load16(own + x_at + j * kLanes, here(j)) * floats(of_token[1]);
            const DeltaToken token{own + c_at, own + b_at, nullptr, of_token[0]};
            if (streams) step_state<COUNT, false, true>(state, token, k_dim, v_dim, last, added, y, none, ahead);
            else step_state<COUNT, false, false>(state, token, k_dim, v_dim, last, added, y, none, ahead);
            state.in = state.out;
            if (t < row.accepted) continue;
            float* to = outputs()[row.mixed(t)] + x_at;
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; j++) {
                const Floats x = load16(own + x_at + j * kLanes, here(j));
                store16(to + j * kLanes, fma(x, floats(w.d[head]), y[j]), here(j));
            }
        }
    }

    // The norm of the one group that a rank has a share of: the ranks add up their squares.
    template <class T>
    void norm_with_ranks(Team& team, Team::Member& me, Ranks& ranks, const DeltaWeights& w, int tokens,
                         Rows<const float> mixed, Rows<T> out) {
        const int width = s_.v_size();
        float* const own = ranks.mine();
        each_part(team, me, tokens, [&](int t, bool) {
            own[t] = s_.gates_norm ? sum_of_squares(outputs()[t], width) : gate(outputs()[t], mixed[t], width);
        });
        team.each(me, 1, [&](int) { ranks.meet(); });
        each_part(team, me, tokens, [&](int t, bool) {
            float squares = 0;
            ranks.add(&squares, t, 1);
            scale(outputs()[t], mixed[t], w.norm, width, squares / ((float)width * s_.group_ranks), out[t]);
        });
    }

    // x · silu(z), in place of x; returns the sum of its squares.
    static float gate(float* x, const float* z, int n) {
        Floats squares = floats(0);
        for (int c = 0; c < n; c += kLanes) {
            const Head here = chorus::head(n - c);
            const Floats v = load16(x + c, here) * silu16(load16(z + c, here));
            squares = fma(v, v, squares);
            store16(x + c, v, here);
        }
        return sum(squares);
    }
    // The same in `out`.
    template <class T>
    static void gate(const float* x, const float* z, int n, T* out) {
        for (int c = 0; c < n; c += kLanes) {
            const Head here = chorus::head(n - c);
            store16(out + c, load16(x + c, here) * silu16(load16(z + c, here)), here);
        }
    }
    // out = x / sqrt(mean + eps) · weight, of a mixer whose gate comes after the norm times silu(z).
    template <class T>
    void scale(float* x, const float* z, const float* weight, int n, float mean, T* out) const {
        if (!s_.gates_norm) return scale_to_norm(x, weight, n, mean, s_.eps, out);
        scale_to_norm(x, weight, n, mean, s_.eps, x);
        gate(x, z, n, out);
    }

    DeltaShape s_;
    Buffer<float> convolved_, gates_, outputs_;
    Buffer<float> drafted_;  // a head's state after a draft, of each thread
};

}  // namespace chorus
