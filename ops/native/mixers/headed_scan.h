// Mamba 1 by heads (Zamba, arXiv 2405.16712 §2): the channels of a head have time steps, B and C of their own; the arithmetic of
// ops/mixers/headed_scan.py.
//
// A step's tokens take the recurrent form, one after the other, so a sequence's bits depend neither on its batch nor on how its
// prompt is cut. A shape's heads of v are blocks of channels, of which a head has some, and k_dim is the width of B and C. A
// draft's inputs are those of the convolution.
#pragma once
#include "lora/model_lora.h"
#include "mixers/gated_delta.h"

namespace chorus {

// Of a model's layers, one after the other: memory for a step.
class HeadedScan {
   public:
    explicit HeadedScan(const DeltaShape& shape) : s_(shape) {}

    void plan(int threads) {
        if ((int)own_.size() < threads) own_.resize(threads);
    }

    // mixed: x and z of each token, whose columns alternate; other parameters as of GatedDelta::run.
    template <class T, class States>
    void run(Team& team, Team::Member& me, const DeltaWeights& w, const States& states, Rows<const float> mixed,
             Rows<T> out) {
        each_part(team, me, states.rows() * s_.scan_heads, [&](int i, bool) {
            const int r = i / s_.scan_heads, head = i % s_.scan_heads;
            scan(w, states, r, head, mixed, out, own_[me.thread]);
        });
    }

   private:
    // Of a thread.
    struct Own {
        Buffer<float> inputs, x, low, dt, z, h;
    };

    // A head of a sequence, token after token.
    template <class T, class States>
    void scan(const DeltaWeights& w, const States& states, int r, int head, Rows<const float> mixed, Rows<T> out,
              Own& own) {
        const int channels = s_.v_size(), dim = channels / s_.scan_heads, n = s_.k_dim, block = s_.v_dim;
        const int first = head * dim, before = s_.conv_size - 1, rank = s_.scan_rank, lows = rank + 2 * n;
        const DeltaRow row = states.row(r);
        const StatePart conv = states.conv(r);
        grow_rows(own.inputs, before + row.total(), dim);
        grow(own.x, dim), grow(own.low, lows), grow(own.dt, dim), grow(own.z, dim);
        grow_rows(own.h, n, dim);
        const Rows<float> inputs = rows_of(own.inputs, dim).from(before), h = rows_of(own.h, dim);
        for (int t = -before; t < row.total(); t++) {
            float* to = inputs[t];
            if (t >= row.accepted) split(mixed[row.mixed(t)] + 2 * first, 0, dim, to);
            else if (t >= 0) std::copy_n(states.draft(r, t).in + first, dim, to);
            else if (conv.in) std::copy_n(conv.in + (long)(before + t) * channels + first, dim, to);
            else std::fill_n(to, dim, 0.0f);
        }
        for (int b = 0; b < dim / block; b++) {
            const StatePart state = states.head(r, first / block + b);
            for (int k = 0; k < n; k++) {
                if (state.in) std::copy_n(state.in + (long)k * block, block, h[k] + b * block);
                else std::fill_n(h[k] + b * block, block, 0.0f);
            }
        }
        for (int t = 0; t < row.total(); t++) {
            convolve(w, inputs.from(t - before), first, dim, own.x.data());
            for (int j = 0; j < lows; j++)
                own.low[j] = dot<float>(own.x.data(), w.scan_low + ((long)head * lows + j) * dim, dim);
            for (int c = 0; c < dim; c++)
                own.dt[c] = dot<float>(own.low.data(), w.scan_steps + (long)(first + c) * rank, rank);
            const bool known = t < row.accepted;
            if (!known) split(mixed[row.mixed(t)] + 2 * first, 1, dim, own.z.data());
            for (int c = 0; c < dim; c += kLanes) {
                const Head here = chorus::head(dim - c);
                const Floats x = load16(own.x.data() + c, here);
                const Floats dt = softplus16(load16(own.dt.data() + c, here) + load16(w.dt_bias + first + c, here));
                const Floats added = dt * x, none = floats(0) - dt;
                Floats y = floats(0);
                for (int k = 0; k < n; k++) {
                    const Floats decay = exp16(none * load16(w.rates + (long)k * channels + first + c, here));
                    const Floats value = fma(added, floats(own.low[rank + k]), load16(h[k] + c, here) * decay);
                    store16(h[k] + c, value, here);
                    y = fma(value, floats(own.low[rank + n + k]), y);
                }
                if (known) continue;
                const Floats gate = silu16(load16(own.z.data() + c, here));
                store16(out[row.mixed(t)] + first + c, fma(x, load16(w.d + first + c, here), y) * gate, here);
            }
            if (t != row.kept() - 1) continue;
            for (int b = 0; b < dim / block; b++)
                for (int k = 0; k < n; k++)
                    std::copy_n(h[k] + b * block, block, states.head(r, first / block + b).out + (long)k * block);
        }
        for (int i = 0; i < before; i++)
            std::copy_n(inputs[row.kept() - before + i], dim, conv.out + (long)i * channels + first);
        for (int d = 0; d < row.drafts; d++) std::copy_n(inputs[row.kept() + d], dim, states.draft(r, d).out + first);
    }

    // x = silu(conv(inputs) + bias) of a token. inputs: [conv_size, dim], of the oldest token first.
    void convolve(const DeltaWeights& w, Rows<const float> inputs, int first, int dim, float* x) const {
        for (int c = 0; c < dim; c += kLanes) {
            const Head here = chorus::head(dim - c);
            Floats y = floats(0);
            for (int tap = 0; tap < s_.conv_size; tap++)
                y = fma(load16(w.conv + (long)tap * s_.v_size() + first + c, here), load16(inputs[tap] + c, here), y);
            if (w.conv_bias) y = y + load16(w.conv_bias + first + c, here);
            store16(x + c, silu16(y), here);
        }
    }

    // Every second of 2 · n columns.
    static void split(const float* from, int odd, int n, float* to) {
        for (int i = 0; i < n; i++) to[i] = from[2 * i + odd];
    }

    DeltaShape s_;
    std::vector<Own> own_;
};

}  // namespace chorus
