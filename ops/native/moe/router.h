// Choice of experts by a router's logits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace chorus {

// How logits become scores: softmax over all experts; over the chosen ones, which are those with the highest logits; sigmoid;
// sigmoid of the chosen ones, likewise; of one expert after another the softmax over those near it that are left.
enum Scoring : int32_t { kSoftmax, kSoftmaxOfChosen, kSigmoid, kSigmoidOfChosen, kSparseMixer };

// Which experts a row goes to, and their weights; mirrors `Routing` of ops/moe/routing.py.
struct RoutingDesc {
    const float* correction;  // [experts], added to the scores that choose, not to the weights; null: none
    const float* factors;  // [experts], of the weights of each; null: none
    int32_t per_token;
    Scoring scoring;
    int32_t renormalised;  // 1: weights are divided by their sum
    int32_t groups, kept_groups;  // equal groups of neighbouring experts, and how many of them a row may choose from
    int32_t group_best;  // 1 or 2: how many best scores of a group are added up
    float epsilon, factor;  // added to that sum; of the weights
    float jitter;  // of kSparseMixer
    float masked_score = -std::numeric_limits<float>::infinity();  // of experts whose group a token may not choose from
    float logits_factor = 1;  // of all logits
};

// Chooses experts for one row after another.
//
// Of equal scores the same come first as of torch.topk on a CPU, as it sorts in the same way. The exponential function is
// the C library's, so that every ISA level chooses the same.
class Router {
   public:
    // Choose a row's experts.
    //
    //   r        how
    //   logits   [experts]
    //   experts  of the model
    //   chosen   [per_token]: written, the best first
    //   weights  [per_token]: written
    void choose(const RoutingDesc& r, const float* logits, int experts, int64_t* chosen, float* weights) {
        weigh(r, logits, experts, chosen, weights);
        for (int i = 0; r.factors && i < r.per_token; i++) weights[i] *= r.factors[chosen[i]];
    }

   private:
    // As `choose`, without factors of experts.
    void weigh(const RoutingDesc& r, const float* logits, int experts, int64_t* chosen, float* weights) {
        scores_.assign(logits, logits + experts);
        for (float& score : scores_) score *= r.logits_factor;
        if (r.scoring == kSparseMixer) return choose_one_by_one(r, logits, experts, chosen, weights);
        if (r.scoring == kSoftmax) softmax(scores_.data(), experts);
        if (r.scoring == kSigmoid)
            for (float& score : scores_) score = 1.0f / (1.0f + std::exp(-score));
        ranked_.resize(experts);
        for (int e = 0; e < experts; e++) ranked_[e] = {r.correction ? scores_[e] + r.correction[e] : scores_[e], e};
        if (r.groups > 1) keep_groups(r, experts);
        sort_best(ranked_, r.per_token);
        for (int i = 0; i < r.per_token; i++) chosen[i] = ranked_[i].second, weights[i] = scores_[chosen[i]];
        if (r.scoring == kSoftmaxOfChosen) softmax(weights, r.per_token);
        if (r.scoring == kSigmoidOfChosen)
            for (int i = 0; i < r.per_token; i++) weights[i] = 1.0f / (1.0f + std::exp(-weights[i]));
        float divisor = 1;
        if (r.renormalised) {
            divisor = weights[0];
            for (int i = 1; i < r.per_token; i++) divisor += weights[i];
            divisor += r.epsilon;
        }
        for (int i = 0; i < r.per_token; i++) weights[i] = weights[i] / divisor * r.factor;
    }

    // `scores_` has the logits, and of those that were chosen -inf.
    void choose_one_by_one(const RoutingDesc& r, const float* logits, int experts, int64_t* chosen, float* weights) {
        for (int i = 0; i < r.per_token; i++) {
            int best = 0;
            for (int e = 1; e < experts; e++)
                if (!std::isnan(scores_[best]) && !(scores_[e] <= scores_[best])) best = e;
            const float most = scores_[best];
            float total = 0;
            for (int e = 0; e < experts; e++) {
                const bool far = (most - logits[e]) / std::max(std::abs(logits[e]), most) > 2 * r.jitter;
                if (!far) total += std::exp(scores_[e] - most);
            }
            chosen[i] = best, weights[i] = 1 / total;
            scores_[best] = -std::numeric_limits<float>::infinity();
        }
    }

    using Ranked = std::pair<float, int>;  // a score, and whose it is

    static void softmax(float* x, int n) {
        float most = x[0], total = 0;
        for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
        for (int i = 0; i < n; i++) total += x[i] = std::exp(x[i] - most);
        for (int i = 0; i < n; i++) x[i] /= total;
    }

    // Bring the best `count` to the front, in order.
    static void sort_best(std::vector<Ranked>& all, int count) {
        const auto above = [](const Ranked& a, const Ranked& b) {
            return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
        };
        const auto end = all.begin() + count;
        if ((size_t)count * 64 <= all.size()) return std::partial_sort(all.begin(), end, all.end(), above);
        std::nth_element(all.begin(), end - 1, all.end(), above);
        std::sort(all.begin(), end - 1, above);
    }

    // Rank experts outside the best groups by `masked_score`: last, unless it is finite. A group's score is the sum of its one or two best.
    void keep_groups(const RoutingDesc& r, int experts) {
        const int size = experts / r.groups;
        of_groups_.clear();
        for (int g = 0; g < r.groups; g++) {
            one_group_.assign(ranked_.begin() + g * size, ranked_.begin() + (g + 1) * size);
            sort_best(one_group_, r.group_best);
            of_groups_.push_back({one_group_[0].first + (r.group_best == 2 ? one_group_[1].first : 0), g});
        }
        sort_best(of_groups_, r.kept_groups);
        kept_.assign(r.groups, false);
        for (int i = 0; i < r.kept_groups; i++) kept_[of_groups_[i].second] = true;
        for (int e = 0; e < experts; e++)
            if (!kept_[e / size]) ranked_[e].first = r.masked_score;
    }

    std::vector<float> scores_;
    std::vector<Ranked> ranked_, one_group_, of_groups_;
    std::vector<bool> kept_;
};

}  // namespace chorus
