// The choice of what queries attend to, by an indexer's scores: of tokens, or of pools of them, one choice for all heads
// (DeepSeek-V3.2, §2.1), or of blocks of tokens, one for each head of keys and values (MiniMax-M3).
//
// A token's scores and its choice depend on no other token of the step. Of equal scores the first ones are chosen, as in
// ops/attention/indexer.py and ops/attention/key_blocks.py. Threads meet after the scores of some tokens, and after their choice.
#pragma once
#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>
#include "attention/latent_attention.h"
#include "program/registers.h"
#include "units.h"

namespace chorus {

template <class T>
class Chooser {
    using X = Act<T>;

   public:
    // team: outlives the object, as registers do
    Chooser(const ModelDesc& model, Team& team, Registers<T>& registers)
        : m_(model), team_(team), registers_(registers), scratch_(team.most()) {
        for (int i = 0; i < model.num_ops; i++)
            if (model.ops[i].kind == OpKind::kChoose)
                kinds_ = std::max(kinds_, kinds_of(arguments_of<ChooseOp>(model.ops[i])));
    }

    // Make room for a step.
    void plan(const StepDesc& step) {
        if (!kinds_) return;
        row_of_.clear();
        for (int row = 0; row < step.rows; row++) row_of_.resize(step.qo_indptr[row + 1], row);
        longest_ = *std::max_element(step.kv_lens, step.kv_lens + step.rows);
        stride_ = (longest_ + kLatentKeys - 1) / kLatentKeys * kLatentKeys;
        block_ = (int)std::clamp<long>(kMostScores / (kinds_ * stride_), 1, step.tokens);
        grow(scores_, (size_t)block_ * kinds_ * stride_);
    }

    // Write a token's key to its page.
    void keep(const StepDesc& step, const IndexKeys& keys, int token, const float* x) {
        T* page = (T*)m_.arena + step.page[keys.page_group * step.page_stride + token] * m_.page_elems;
        for (int i = 0; i < keys.pieces(); i++)
            convert(x + i * keys.piece, keys.width(i), page + keys.at(m_.block_tokens, (int)step.offset[token], i));
    }

    // Choose for each token that sees more than it may attend to. Called by every thread of the team alike.
    void run(Team::Member& me, const StepDesc& step, const ChooseOp& op);

   private:
    static constexpr long kMostScores = 1 << 22;  // that are kept at once
    static constexpr int kPart = 1024;  // keys of a unit

    struct Scratch {
        Buffer<X> panel;  // of some keys
        Buffer<float> products, pooled;
        Buffer<T> keys;  // that are made of what pages have
        std::vector<const T*> places;
        std::vector<uint32_t> ranks;
        std::vector<int32_t> order;
    };

    static int kinds_of(const ChooseOp& op) { return op.block ? op.heads : 1; }
    Rows<float> scores_of(int i) { return {scores_.data() + (long)i * kinds_ * stride_, stride_}; }
    // Tokens of its row that a token sees.
    int visible(const StepDesc& step, int token) const {
        const int row = row_of_[token];
        return step.kv_lens[row] - (step.qo_indptr[row + 1] - 1 - token);
    }
    const T* page_of(const StepDesc& step, const IndexKeys& keys, int token, int place) const {
        const int64_t* pages = step.page_table + row_of_[token] * step.table_stride + keys.page_group;
        return (const T*)m_.arena + pages[(int64_t)(place / m_.block_tokens) * m_.page_groups] * m_.page_elems;
    }

    // Scores of keys first … end-1 of a token: of all heads together, or of each.
    void score(const StepDesc& step, const ChooseOp& op, int token, int first, int end, Rows<float> scores,
               int thread) {
        Scratch& own = scratch_[thread];
        const int dim = op.pool ? op.keys.dim / 2 : op.keys.dim, words = dim / Kind<T>::pair;
        const Rows<const X> q{registers_.rounded(op.q)[token], dim};
        const float* weights = op.block ? nullptr : registers_.floats(op.weights)[token];
        grow(own.panel, (size_t)kPanel * dim);
        grow_rows(own.products, op.heads, kPanel);
        own.places.resize(kPanel);
        const Rows<float> products = rows_of(own.products, kPanel);
        for (int s = first; s < end; s += kPanel) {
            const int count = std::min(kPanel, end - s);
            locate(step, op, token, s, count, dim, own);
            std::fill(own.places.begin() + count, own.places.end(), own.places[count - 1]);
            pack_keys(own.places.data(), words, (float*)own.panel.data());
            multiply_panel<X>(q, op.heads, {own.panel.data(), dim}, {products, kPanel, false, nullptr});
            if (op.block) {
                for (int h = 0; h < op.heads; h++) std::copy_n(products[h], count, scores[h] + s);
                continue;
            }
            for (int c = 0; c < kPanel; c += kLanes) {
                Floats sum = floats(0);
                for (int h = 0; h < op.heads; h++)
                    sum = fma(floats(weights[h] * op.factor),
                              max(floats(0), load16(products[h] + c) * floats(op.scale)), sum);
                if (c < count) store16(scores[0] + s + c, sum, head(count - c));
            }
        }
    }

    // Find where keys first … first+count-1 of a token's row lie, or make them of what pages have.
    void locate(const StepDesc& step, const ChooseOp& op, int token, int first, int count, int dim, Scratch& own) {
        const IndexKeys& keys = op.keys;
        const auto piece = [&](int place, int i) {
            return page_of(step, keys, token, place) + keys.at(m_.block_tokens, place % m_.block_tokens, i);
        };
        if (!op.pool && keys.pieces() == 1) {
            for (int s = 0; s < count; s++) own.places[s] = piece(first + s, 0);
            return;
        }
        const long stride = spread<T>(dim);
        grow(own.keys, kPanel * stride);
        for (int s = 0; s < count; s++) {
            T* to = own.keys.data() + s * stride;
            own.places[s] = to;
            if (op.pool) {
                pool([&](int at) { return piece((first + s) * op.pool + at, 0); }, op, dim, own.pooled, to);
                continue;
            }
            for (int i = 0; i < keys.pieces(); i++)
                std::copy_n(piece(first + s, i), keys.width(i), to + i * keys.piece);
        }
    }

    // The key of a pool: the sum of its tokens' keys, each element weighted by a softmax over their gates and biases.
    //
    //   kept  kept(at): a token's key, and its gate
    template <class Kept>
    static void pool(Kept kept, const ChooseOp& op, int dim, Buffer<float>& memory, T* out) {
        const long stride = spread<float>(dim);
        grow(memory, stride);
        for (int c = 0; c < dim; c += kLanes) {
            const Head here = head(dim - c);
            const auto gate = [&](int at) {
                return load16(kept(at) + dim + c, here) + load16(op.biases + (long)at * dim + c, here);
            };
            Floats most = gate(0), total = floats(0), sum = floats(0);
            for (int at = 1; at < op.pool; at++) most = max(most, gate(at));
            for (int at = 0; at < op.pool; at++) {
                const Floats weight = exp16(gate(at) - most);
                total = total + weight;
                sum = fma(weight, load16(kept(at) + c, here), sum);
            }
            store16(memory.data() + c, sum / total, here);
        }
        convert(memory.data(), dim, out);
    }

    // A number that rises with a score; NaN has the highest one, as where tensors are sorted.
    static uint32_t rank_of(float score) {
        if (score != score) return UINT32_MAX;
        const float sum = score + 0.0f;  // of -0 as of 0
        uint32_t bits;
        memcpy(&bits, &sum, 4);
        return bits >> 31 ? ~bits : bits | 1u << 31;
    }

    // The `count` first of the highest ranks, rising.
    static const int32_t* best(Scratch& own, int count) {
        const auto& ranks = own.ranks;
        own.order.resize(ranks.size());
        std::iota(own.order.begin(), own.order.end(), 0);
        const auto above = [&](int a, int b) { return ranks[a] > ranks[b] || (ranks[a] == ranks[b] && a < b); };
        const auto end = own.order.begin() + std::min((size_t)count, own.order.size());
        if (end != own.order.end()) std::nth_element(own.order.begin(), end, own.order.end(), above);
        std::sort(own.order.begin(), end);
        return own.order.data();
    }

    void choose(const StepDesc& step, const ChooseOp& op, int token, Rows<float> scores, int thread) {
        Scratch& own = scratch_[thread];
        int32_t* out = registers_.indices(op.out)[token];
        const int seen = visible(step, token);
        if (op.block) {
            const int top = op.top_k / op.block, last = (seen - 1) / op.block;
            for (int h = 0; h < op.heads; h++) {
                own.ranks.assign(last + 1, 0);
                for (int s = 0; s < seen; s++) {
                    uint32_t& rank = own.ranks[s / op.block];
                    rank = std::max(rank, rank_of(scores[h][s]));
                }
                for (int b = std::max(0, last + 1 - op.local); b <= last; b++)
                    own.ranks[b] = rank_of(std::numeric_limits<float>::infinity());
                std::copy_n(best(own, top), top, out + h * top);
            }
            return;
        }
        const int size = std::max(1, op.pool), whole = seen / size, top = op.top_k / size;
        own.ranks.resize(whole);
        for (int s = 0; s < whole; s++) own.ranks[s] = rank_of(scores[0][s]);
        const int32_t* chosen = best(own, top);
        int count = 0;
        for (int i = 0; i < top; i++)
            for (int at = 0; at < size; at++) out[count++] = chosen[i] * size + at;
        for (int s = whole * size; s < seen; s++) out[count++] = s;
        std::fill(out + count, out + op.top_k, -1);
    }

    const ModelDesc m_;
    Team& team_;
    Registers<T>& registers_;
    std::vector<Scratch> scratch_;
    std::vector<int> row_of_;  // of each token of the step
    Buffer<float> scores_;  // of some tokens: [kinds_, stride_] each
    long stride_ = 0;
    int kinds_ = 0, longest_ = 0, block_ = 1;
};

template <class T>
void Chooser<T>::run(Team::Member& me, const StepDesc& step, const ChooseOp& op) {
    if (longest_ <= op.top_k) return;
    const int most = longest_ / std::max(1, op.pool), parts = (most + kPart - 1) / kPart;
    for (int begin = 0; begin < step.tokens; begin += block_) {
        const int tokens = std::min(block_, step.tokens - begin);
        team_.each(me, tokens * parts, [&](int i) {
            const int token = begin + i / parts, first = i % parts * kPart;
            const int count = visible(step, token) / std::max(1, op.pool);
            if (visible(step, token) > op.top_k && first < count)
                score(step, op, token, first, std::min(count, first + kPart), scores_of(i / parts), me.thread);
        });
        each_part(team_, me, tokens, [&](int i, bool) {
            if (visible(step, begin + i) > op.top_k) choose(step, op, begin + i, scores_of(i), me.thread);
        });
    }
}

CHORUS_UNIT_ATTENTION_FLOAT void Chooser<float>::run(Team::Member&, const StepDesc&, const ChooseOp&);
CHORUS_UNIT_ATTENTION_BF16 void Chooser<bf16>::run(Team::Member&, const StepDesc&, const ChooseOp&);

}  // namespace chorus
