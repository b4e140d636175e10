// Gated DeltaNet between a layer's two projections; the arithmetic of ops/mixers/gated_delta.py.
//
// A step's tokens take the recurrent form, one after the other, whether they decode or are a prompt's: the chunked form of
// a GPU has as many multiply-adds in float32 (some 65,000 a token and head of 128 × 128), and here a state's columns stay in
// cache for as many tokens as there are. So a sequence's bits depend neither on its batch nor on how its prompt is cut.
//
// A sequence's last tokens may be drafts. A step stores the state before its drafts, and their inputs next to it. The next step
// first updates the state with the inputs of the accepted drafts. So a draft costs a row of inputs, not a state of its own.
#pragma once
#include <chrono>
#include <cmath>
#include <cstring>
#include "team/buffer.h"
#include "elementwise/elementwise.h"
#include "team/shares.h"
#include "units.h"

namespace chorus {

// A recurrent mixer.
enum class Mixer : int32_t { kDelta, kShortConv, kMamba2, kRgLru, kMamba1, kHeadedScan };

// Shapes of a model's recurrent mixers. A short convolution has one head of v, of all its channels, and no state in heads;
// for Mamba 2 see mamba2.h, for RG-LRU rg_lru.h, for Mamba 1 selective_scan.h, by heads headed_scan.h.
struct DeltaShape {
    Mixer mixer;
    int32_t k_heads, v_heads, k_dim, v_dim, conv_size;
    float eps;  // of the norm
    float beta;  // factor of how much of a new value enters a state
    float dt_min;  // of Mamba 2: the least time step
    int32_t gates_norm;  // of Mamba 2: 1: the gate multiplies what was normalised, not what will be
    int32_t group_ranks;  // of Mamba 2: TP ranks that share each group's heads
    int32_t by_channel;  // 1: each channel of a key has a decay, and gates are sigmoids (Kimi Delta Attention)
    int32_t scan_heads, scan_rank;  // of Mamba 1 by heads: its heads, and the width of what time steps are made of
    float bound;  // the least logarithm of such a decay, which is that much times a sigmoid; 0: there is none

    int k_size() const { return k_heads * k_dim; }
    int v_size() const { return v_heads * v_dim; }
    int channels() const { return 2 * k_size() + v_size(); }
    int decays() const { return by_channel ? k_size() : v_heads; }
    int in_size() const { return channels() + v_size() + v_heads + decays(); }
    // Of a draft's inputs: those of the convolution, then b of each head and a of each decay, or dt of each head.
    int draft_size() const {
        if (mixer == Mixer::kMamba1) return 3 * v_size() + k_dim;
        return channels() + (mixer == Mixer::kDelta ? v_heads + decays() : mixer == Mixer::kMamba2 ? v_heads : 0);
    }
    int heads() const { return 2 * k_heads + v_heads; }  // of q, k and v
};

// What a layer has besides its projections.
struct DeltaWeights {
    const float* conv;  // [conv_size, channels]: factors of a token's inputs, of the oldest first; null: no such layer
    const float *dt_bias, *a_log;  // [v_heads]; dt_bias of decays of channels [v_heads · k_dim]
    const float* norm;  // [v_dim]; of Mamba 2 [v_heads · v_dim]; null: it has none
    const float* conv_bias;  // [channels], of the convolution; null: it has none
    const float* d;  // [v_heads], of Mamba 2; [v_size] of Mamba 1
    // Of RG-LRU: weights of the gates of inputs, then of decays [2, v_heads, v_dim, v_dim], their biases [2, v_heads · v_dim], and
    // the largest rates of decay [v_heads · v_dim]; of Mamba 1 the rates [k_dim, v_heads · v_dim].
    const float *gates, *gate_bias, *rates;
    // Of Mamba 1 by heads: what B, C and low time steps are made by [heads, rank + 2 · k_dim, channels of a head], and what makes
    // time steps of these [channels, rank].
    const float *scan_low, *scan_steps;
};

// What a step's tokens give a layer: columns of one product, or of several.
struct DeltaInputs {
    Rows<const float> channels;  // of q, k and v, before the convolution
    Rows<const float> z;  // [tokens, v_size]: gates of the output
    Rows<const float> b, a;  // [tokens, v_heads] of new values; [tokens, decays]
};

// A part of a state: where it is before a step, and where it goes. The two don't overlap, or are the same.
struct StatePart {
    const float* in;  // null: zeros
    float* out;
};

// A sequence's tokens in a step.
struct DeltaRow {
    int first, tokens;  // of the step's tokens
    int accepted;  // drafts of the step before, whose inputs come first
    int drafts;  // the last of its tokens
    int before;  // accepted drafts of the sequences before it

    int total() const { return accepted + tokens; }
    int kept() const { return total() - drafts; }  // of these, those that the state after the step has seen
    int mixed(int t) const { return first + t - accepted; }  // the step's token t of `total`, from `accepted` on
    int place(int t) const { return first + before + t; }  // of token t among those of all sequences
};

// Some channels of a causal depthwise convolution.
//
//   taps   [conv_size, channels]: from the first of these channels on
//   input  input(i): what is multiplied with taps[i]
template <class Input>
CHORUS_INLINE Floats convolution(const float* taps, int channels, int conv_size, Head here, Input input) {
    Floats all = input(0) * load16(taps, here);
    for (int tap = 1; tap < conv_size; tap++) all = fma(input(tap), load16(taps + (long)tap * channels, here), all);
    return all;
}

// Vectors of a state's columns that are worked on together. A prompt's tokens pass over them one after the other, so that
// they, two sums of each and a factor of each stay in registers. A token alone takes whole rows, which memory gives faster.
constexpr int kStateVectors = kStreamVectors >= 16 ? 8 : 2, kWholeRow = 8;

// What a thread reads next: fetched line by line, in order, while it computes.
struct NextState {
    const float* at;  // null: nothing

    template <int LINES>
    CHORUS_INLINE void fetch() {
        if (!at) return;
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) prefetch(at + i * kLanes);
        at += LINES * kLanes;
    }
};

// Sums of a state's columns times k: sums[c] = Σ_i state[i][c] · k[i].
//
//   state   [k_dim, v_dim], from the first of COUNT · 16 columns on; the last vector's may be fewer
//   k       [k_dim]
//   last    columns of the last vector
//   ahead   half of as much as is read here is fetched
template <int COUNT>
inline void state_sums(const float* state, const float* k, int k_dim, int v_dim, Head last, Floats* sums,
                       NextState& ahead) {
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) sums[j] = floats(0);
    for (int i = 0; i < k_dim; i++) {
        const float* row = state + (long)i * v_dim;
        const Floats key = floats(k[i]);
        ahead.fetch<COUNT / 2>();
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; j++) {
            const Floats s = j + 1 < COUNT ? load16(row + j * kLanes) : load16(row + j * kLanes, last);
            sums[j] = fma(s, key, sums[j]);
        }
    }
}

// What a head takes of a token.
struct DeltaToken {
    const float *q, *k;  // [k_dim]
    const float* next_k;  // of the token behind it; null: there is none
    float decay;
    const float* decays = nullptr;  // [k_dim], in place of it: of each row of the state
};

// state.out = decay · state.in + k ⊗ delta; out = qᵀ · state.out, and sums as the next token's `state_sums`.
//
//   MORE     there is a next token
//   STREAMS  the state is written past the caches: its rows are whole cache lines, and nothing reads it soon
//   EACH     each row has a decay
//   delta    of the columns
//   ahead    the other half is fetched
template <int COUNT, bool MORE, bool STREAMS, bool EACH = false>
inline void step_state(StatePart state, const DeltaToken& token, int k_dim, int v_dim, Head last, const Floats* delta,
                       Floats* out, Floats* sums, NextState& ahead) {
    Floats factor = floats(token.decay);
#pragma GCC unroll 8
    for (int j = 0; j < COUNT; j++) out[j] = sums[j] = floats(0);
    for (int i = 0; i < k_dim; i++) {
        if constexpr (EACH) factor = floats(token.decays[i]);
        const float* row = state.in + (long)i * v_dim;
        float* to = state.out + (long)i * v_dim;
        ahead.fetch<COUNT - COUNT / 2>();
        const Floats query = floats(token.q[i]), key = floats(token.k[i]);
        const Floats next_key = MORE ? floats(token.next_k[i]) : key;
#pragma GCC unroll 8
        for (int j = 0; j < COUNT; j++) {
            const bool whole = STREAMS || j + 1 < COUNT;
            Floats s = whole ? load16(row + j * kLanes) : load16(row + j * kLanes, last);
            s = fma(key, delta[j], s * factor);
            if constexpr (STREAMS) stream(to + j * kLanes, s);
            else if (whole) store16(to + j * kLanes, s);
            else store16(to + j * kLanes, s, last);
            out[j] = fma(s, query, out[j]);
            if constexpr (MORE) sums[j] = fma(s, next_key, sums[j]);
        }
    }
}

// Walks the columns of a head's state, a few vectors at a time. For each group of columns it calls
// run(number of vectors, state, drafted, first column, lanes of the last vector, whether to write past the caches).
//
//   drafted  where the state of drafts is; null: there are none
template <class Run>
inline void each_columns(int k_dim, int v_dim, const DeltaRow& row, StatePart state, float* drafted, Run run) {
    if (!state.in) {
        std::fill_n(state.out, (long)k_dim * v_dim, 0.0f);
        state.in = state.out;
    }
    // Not for prompts: each token reads the state that the token before it has written.
    const bool streams =
        row.total() == 1 && state.in != state.out && v_dim % kLanes == 0 && (uintptr_t)state.out % 64 == 0;
    auto part = [&](auto count, int at) {
        const int c = at * kLanes;
        const Head last = head(std::min(kLanes, v_dim - c - (count() - 1) * kLanes));
        run(count, StatePart{state.in + c, state.out + c}, drafted ? drafted + c : nullptr, c, last, streams);
    };
    const int vectors = (v_dim + kLanes - 1) / kLanes;
    if (row.total() == 1) in_parts<kWholeRow>(vectors, part);
    else in_parts<kStateVectors>(vectors, part);
    if (streams) end_streams();
}

// Of a model's layers, one after the other: memory for a step.
class GatedDelta {
   public:
    explicit GatedDelta(const DeltaShape& shape) : s_(shape) {}

    const DeltaShape& shape() const { return s_; }

    // tokens: of the step, and accepted drafts. drafts: whether it has any.
    void plan(int tokens, bool drafts, int threads) {
        grow_rows(convolved_, tokens, s_.channels());
        grow_rows(gates_, tokens, gates_size());
        if (drafts) grow_rows(drafted_, threads, s_.k_dim * s_.v_dim);
    }

    // Compute a layer.
    //
    //   me      the thread; all threads of the team run the same layer
    //   w       the layer's weights
    //   states  of `rows()` sequences: row(i), conv(i): [conv_size - 1, channels], the convolution's last inputs, oldest
    //           first; head(i, h): [k_dim, v_dim]; draft(i, d): [draft_size], the inputs of draft d
    //   in      of the step's tokens
    //   out     [tokens, v_size]
    template <class T, class States>
    void run(Team& team, Team::Member& me, const DeltaWeights& w, const States& states, const DeltaInputs& in,
             Rows<T> out) {
        const int heads = s_.heads(), v_heads = s_.v_heads;
        each_part(team, me, states.rows() * heads, [&](int i, bool) {
            const DeltaRow row = states.row(i / heads);
            const int head = i % heads, v_head = head - 2 * s_.k_heads;
            const auto draft = [&](int d) { return states.draft(i / heads, d); };
            convolve_head(w, row, states.conv(i / heads), draft, head, in.channels);
            if (v_head >= 0) find_gates(w, row, draft, v_head, in);
            else if (s_.by_channel && head >= s_.k_heads) find_decays(w, row, draft, head - s_.k_heads, in.a);
        });
        each_part(team, me, states.rows() * v_heads, [&](int i, bool more) {
            const float* next = more ? states.head((i + 1) / v_heads, (i + 1) % v_heads).in : nullptr;
            run_head(w, states.row(i / v_heads), i % v_heads, states.head(i / v_heads, i % v_heads), {next}, me.thread,
                     in.z, out);
        });
    }

    // The inputs of tokens with one matrix of them: channels, z, b and a side by side.
    DeltaInputs inputs(Rows<const float> mixed) const {
        const int z = s_.channels(), b = z + s_.v_size();
        return {mixed, mixed.from(0, z), mixed.from(0, b), mixed.from(0, b + s_.v_heads)};
    }

   private:
    Rows<float> convolved() { return rows_of(convolved_, s_.channels()); }
    // Of each head its decay and how much of a new value enters; then, where channels have decays, of each head these, and
    // its key times these.
    Rows<float> gates() { return rows_of(gates_, gates_size()); }
    int gates_size() const { return 2 * s_.v_heads + (s_.by_channel ? 2 * s_.k_size() : 0); }
    int decays_at(int v_head) const { return 2 * s_.v_heads + 2 * v_head * s_.k_dim; }

    // The convolution and silu of a head's channels, and the norm of a head of q or k; the channels' state is updated.
    template <class Draft>
    void convolve_head(const DeltaWeights& w, DeltaRow row, StatePart state, const Draft& draft, int head,
                       Rows<const float> mixed) {
        const bool is_v = head >= 2 * s_.k_heads, is_q = head < s_.k_heads;
        const int width = is_v ? s_.v_dim : s_.k_dim, channels = s_.channels(), before = s_.conv_size - 1;
        const int first = is_v ? 2 * s_.k_size() + (head - 2 * s_.k_heads) * s_.v_dim : head * s_.k_dim;
        if (!state.in) {
            for (int i = 0; i < before; i++) std::fill_n(state.out + (long)i * channels + first, width, 0.0f);
            state.in = state.out;
        }
        auto input = [&](int t) {  // of the row's token t, below 0: of the state
            if (t < 0) return state.in + (long)(before + t) * channels + first;
            return t < row.accepted ? draft(t).in + first : mixed[row.mixed(t)] + first;
        };
        for (int t = is_q ? row.accepted : 0; t < row.total(); t++) {
            float* y = convolved()[row.place(t)] + first;
            Floats squares = floats(0);
            for (int c = 0; c < width; c += kLanes) {
                const Head here = head_of(width - c);
                const Floats v = silu16(convolution(w.conv + first + c, channels, s_.conv_size, here, [&](int tap) {
                    return load16(input(t - before + tap) + c, here);
                }));
                squares = fma(v, v, squares);
                store16(y + c, v, here);
            }
            if (is_v) continue;
            const float length = __builtin_sqrtf(sum(squares) + 1e-6f);
            scale_by(y, width, (is_q ? 1.0f / __builtin_sqrtf((float)s_.k_dim) : 1.0f) / length);
        }
        for (int i = 0; i < before; i++) {
            const float* from = input(row.kept() - before + i);
            std::memmove(state.out + (long)i * channels + first, from, width * sizeof(float));
        }
        for (int d = 0; d < row.drafts; d++)
            std::memcpy(draft(d).out + first, input(row.kept() + d), width * sizeof(float));
    }

    static Head head_of(int n) { return chorus::head(n); }

    // Of each token, how much of a head's state is kept, and how much of a new value enters it.
    template <class Draft>
    void find_gates(const DeltaWeights& w, DeltaRow row, const Draft& draft, int v_head, const DeltaInputs& in) {
        const int kept_b = s_.channels() + v_head, kept_a = kept_b + s_.v_heads;
        const float rate = std::exp(w.a_log[v_head]);
        for (int t = 0; t < row.total(); t++) {
            const bool known = t < row.accepted;
            const float b = known ? draft(t).in[kept_b] : in.b[row.mixed(t)][v_head];
            float* gates_of = gates()[row.place(t)] + 2 * v_head;
            float* to = t < row.kept() ? nullptr : draft(t - row.kept()).out;
            gates_of[1] = s_.beta / (1 + std::exp(-b));
            if (to) to[kept_b] = b;
            if (s_.by_channel) continue;
            const float a = known ? draft(t).in[kept_a] : in.a[row.mixed(t)][v_head];
            const float x = a + w.dt_bias[v_head], softplus = x > 20 ? x : std::log1p(std::exp(x));
            gates_of[0] = std::exp(-rate * softplus);
            if (to) to[kept_a] = a;
        }
    }

    // The decays of a head's channels, of each token, and its key times these, once the key is convolved.
    template <class Draft>
    void find_decays(const DeltaWeights& w, DeltaRow row, const Draft& draft, int v_head, Rows<const float> a) {
        const int k_dim = s_.k_dim, first = v_head * k_dim, kept = s_.channels() + s_.v_heads + first;
        const float rate = std::exp(w.a_log[v_head]);
        for (int t = 0; t < row.total(); t++) {
            const float* from = t < row.accepted ? draft(t).in + kept : a[row.mixed(t)] + first;
            const float* key = convolved()[row.place(t)] + s_.k_size() + first;
            float *decays = gates()[row.place(t)] + decays_at(v_head), *decayed = decays + k_dim;
            for (int c = 0; c < k_dim; c += kLanes) {
                const Head here = head_of(k_dim - c);
                const Floats x = load16(from + c, here) + load16(w.dt_bias + first + c, here);
                const Floats decay = exp16(s_.bound == 0 ? floats(-rate) * softplus16(x)
                                                         : floats(s_.bound) * sigmoid16(floats(rate) * x));
                store16(decays + c, decay, here);
                store16(decayed + c, decay * load16(key + c, here), here);
            }
            if (t >= row.kept()) std::memcpy(draft(t - row.kept()).out + kept, from, k_dim * sizeof(float));
        }
    }

    // The delta rule and the gated norm of a head's tokens, on a thread.
    template <class T>
    void run_head(const DeltaWeights& w, DeltaRow row, int v_head, StatePart state, NextState ahead, int thread,
                  Rows<const float> z, Rows<T> out) {
        const int v_dim = s_.v_dim, column = v_head * v_dim;
        float* const drafts = row.drafts ? rows_of(drafted_, s_.k_dim * v_dim)[thread] : nullptr;
        auto run = [&](auto count, StatePart part, float* drafted, int at, Head last, bool streams) {
            if (s_.by_channel) scan<count(), true>(row, v_head, part, drafted, at, last, streams, ahead);
            else scan<count(), false>(row, v_head, part, drafted, at, last, streams, ahead);
        };
        each_columns(s_.k_dim, v_dim, row, state, drafts, run);
        for (int t = row.accepted; t < row.total(); t++) {
            const float* y = convolved()[row.place(t)] + 2 * s_.k_size() + column;
            const int at = row.mixed(t);
            gated_norm(y, z[at] + column, w.norm, v_dim, out[at] + column);
        }
    }

    // Some columns of a head's state, token after token; v's columns become the output's.
    //
    //   EACH     each channel of a key has a decay
    //   drafted  where the state of drafts is
    template <int COUNT, bool EACH>
    void scan(DeltaRow row, int v_head, StatePart state, float* drafted, int column, Head last, bool streams,
              NextState& ahead) {
        const int k_dim = s_.k_dim, v_dim = s_.v_dim;
        const int q_at = v_head / (s_.v_heads / s_.k_heads) * k_dim, k_at = q_at + s_.k_size();
        const int v_at = 2 * s_.k_size() + v_head * v_dim + column;
        Floats sums[COUNT], delta[COUNT], y[COUNT];
        // What a token's sums are of: its key, or its key times its decays.
        const auto summed = [&](int t) -> const float* {
            return EACH ? gates()[row.place(t)] + decays_at(v_head) + k_dim : convolved()[row.place(t)] + k_at;
        };
        state_sums<COUNT>(state.in, summed(0), k_dim, v_dim, last, sums, ahead);
        for (int t = 0; t < row.total(); t++) {
            float* own = convolved()[row.place(t)];
            const float* of_token = gates()[row.place(t)] + 2 * v_head;
            const float decay = EACH ? 1.0f : of_token[0], beta = of_token[1];
            if (t == row.kept()) state.out = drafted;
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; j++) {
                const Head here = j + 1 < COUNT ? head_of(kLanes) : last;
                delta[j] = fnma(floats(decay), sums[j], load16(own + v_at + j * kLanes, here)) * floats(beta);
            }
            const float* next_k = t + 1 < row.total() ? summed(t + 1) : nullptr;
            const DeltaToken token{own + q_at, own + k_at, next_k, decay,
                                   EACH ? gates()[row.place(t)] + decays_at(v_head) : nullptr};
            NextState none{nullptr};
            if (next_k) step_state<COUNT, true, false, EACH>(state, token, k_dim, v_dim, last, delta, y, sums, none);
            else if (streams)
                step_state<COUNT, false, true, EACH>(state, token, k_dim, v_dim, last, delta, y, sums, ahead);
            else step_state<COUNT, false, false, EACH>(state, token, k_dim, v_dim, last, delta, y, sums, ahead);
            state.in = state.out;
#pragma GCC unroll 8
            for (int j = 0; j < COUNT; j++)
                store16(own + v_at + j * kLanes, y[j], j + 1 < COUNT ? head_of(kLanes) : last);
        }
    }

    // out = norm(x) · silu(z), or · sigmoid(z) where channels have decays
    template <class T>
    void gated_norm(const float* x, const float* z, const float* weight, int n, T* out) const {
        Floats squares = floats(0);
        for (int c = 0; c < n; c += kLanes) {
            const Floats v = load16(x + c, head_of(n - c));
            squares = fma(v, v, squares);
        }
        const Floats factor = floats(1.0f / __builtin_sqrtf(sum(squares) / n + s_.eps));
        for (int c = 0; c < n; c += kLanes) {
            const Head here = head_of(n - c);
            const Floats y = load16(x + c, here) * factor * load16(weight + c, here);
            const Floats gate = load16(z + c, here);
            store16(out + c, y * (s_.by_channel ? sigmoid16(gate) : silu16(gate)), here);
        }
    }

    DeltaShape s_;
    Buffer<float> convolved_, gates_;
    Buffer<float> drafted_;  // a head's state after a draft, of each thread
};

// A step of one layer, as a call of its own.
struct DeltaDesc {
    DeltaShape shape;
    DeltaWeights weights;
    int32_t rows;
    const int32_t* qo_indptr;  // [rows + 1]
    const int32_t* begins;  // [rows]: 1: its state is zero
    const int32_t* accepted;  // [rows + 1]: drafts of the step before that sequences before row i have accepted
    const int32_t* drafts;  // [rows]: the last tokens of each
    int32_t most_drafts;
    const float *conv_in, *recurrent_in;  // [rows, conv_size - 1, channels]; [rows, v_heads, k_dim, v_dim]
    const float* drafts_in;  // [rows, most_drafts, draft_size]
    float *conv_out, *recurrent_out;  // the same; may be the same memory
    float* drafts_out;  // the same; other memory
    const float* mixed;  // [tokens, in_size]
    float* out;  // [tokens, v_size]
};

// Its states, one right after the other.
struct PlainStates {
    const DeltaDesc& d;

    int rows() const { return d.rows; }
    DeltaRow row(int i) const {
        return {d.qo_indptr[i], d.qo_indptr[i + 1] - d.qo_indptr[i], d.accepted[i + 1] - d.accepted[i], d.drafts[i],
                d.accepted[i]};
    }
    StatePart draft(int i, int draft) const {
        const long at = ((long)i * d.most_drafts + draft) * d.shape.draft_size();
        return {d.drafts_in + at, d.drafts_out + at};
    }
    StatePart conv(int i) const {
        const long at = (long)i * (d.shape.conv_size - 1) * d.shape.channels();
        return {d.begins[i] ? nullptr : d.conv_in + at, d.conv_out + at};
    }
    StatePart head(int i, int h) const {
        const long at = ((long)i * d.shape.v_heads + h) * d.shape.k_dim * d.shape.v_dim;
        return {d.begins[i] ? nullptr : d.recurrent_in + at, d.recurrent_out + at};
    }
};

// Run a layer several times, with outputs of T, and return the seconds of one.
template <class T>
double run_delta(Team& team, int threads, const DeltaDesc& desc, int times) {
    GatedDelta delta(desc.shape);
    delta.plan(desc.qo_indptr[desc.rows] + desc.accepted[desc.rows], desc.most_drafts > 0, threads);
    const Rows<const float> mixed{desc.mixed, desc.shape.in_size()};
    const Rows<T> out{desc.out, desc.shape.v_size()};
    team.run([](Team::Member&) {});  // they are awake
    const auto began = std::chrono::steady_clock::now();
    for (int i = 0; i < times; i++)
        team.run([&](Team::Member& me) {
            team.each(me, 0, [](int) {});  // not by parts: see Decoder::walk
            delta.run(team, me, desc.weights, PlainStates{desc}, delta.inputs(mixed), out);
        });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / times;
}

CHORUS_UNIT_MIXERS double run_delta<float>(Team&, int, const DeltaDesc&, int);

}  // namespace chorus
