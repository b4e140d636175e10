// Ops that work on each token by itself; see program.h.
#pragma once
#include "moe/experts_part.h"
#include "attention/choose.h"
#include "attention/latents.h"
#include "lora/model_lora.h"
#include "program/registers.h"
#include "elementwise/ungated.h"

namespace chorus {

template <class T>
class RowOps {
   public:
    RowOps(Registers<T>& registers, ExpertsPart<T>& experts, LatentsPart<T>& latents, Chooser<T>& chooser)
        : registers_(registers), experts_(experts), latents_(latents), chooser_(chooser) {}

    void join(Ranks* ranks) { ranks_ = ranks; }

    // Run an op on a token of a step. thread: that calls it
    void run(const StepDesc& step, const OpDesc& op, int token, int thread) {
        switch (op.kind) {
            case OpKind::kNorm: return norm(arguments_of<NormOp>(op), token);
            case OpKind::kKeep: return keep(step, arguments_of<KeepOp>(op), token);
            case OpKind::kCopy: return copy(arguments_of<CopyOp>(op), token);
            case OpKind::kScale: return scale(arguments_of<ScaleOp>(op), token);
            case OpKind::kAdd: return add(arguments_of<AddOp>(op), token);
            case OpKind::kAddMedia: return add_media(step, arguments_of<AddMediaOp>(op), token);
            case OpKind::kSum: return sum(arguments_of<SumOp>(op), token);
            case OpKind::kClip: return clip(arguments_of<ClipOp>(op), token);
            case OpKind::kWiden: return widen(arguments_of<WidenOp>(op), token);
            case OpKind::kResize: return resize(arguments_of<ResizeOp>(op), token);
            case OpKind::kSubtract: return subtract(arguments_of<SubtractOp>(op), token);
            case OpKind::kRotate: return rotate(step, arguments_of<RotateOp>(op), token);
            case OpKind::kKeepIndex: return keep_index(step, arguments_of<KeepIndexOp>(op), token);
            case OpKind::kGate: return gate_rows(arguments_of<GateOp>(op), token);
            case OpKind::kLogScaleHeads: return log_scale_heads(step, arguments_of<LogScaleHeadsOp>(op), token);
            case OpKind::kProduct: return product(arguments_of<ProductOp>(op), token);
            case OpKind::kStreams: return streams(arguments_of<StreamsOp>(op), token);
            case OpKind::kConnect: return connect(arguments_of<ConnectOp>(op), token);
            case OpKind::kSparseGates: return sparse_gates(arguments_of<SparseGatesOp>(op), token);
            case OpKind::kLookUp: return look_up(step, arguments_of<LookUpOp>(op), token);
            case OpKind::kMatch: return match(arguments_of<MatchOp>(op), token);
            case OpKind::kActivate: return activate(arguments_of<ActivateOp>(op), token);
            case OpKind::kReduce: return reduce(arguments_of<ReduceOp>(op), token);
            case OpKind::kRoute: return experts_.take(token, registers_.rounded(arguments_of<RouteOp>(op).x)[token]);
            case OpKind::kCombine: return combine(arguments_of<MoeOp>(op), token, thread);
            default: return;
        }
    }

    // act = activation(factor · gate) · up of a token, in place of what no product has fused; y: with gate and up
    void gate(const GateUpOp& op, float* y, int token) {
        auto* act = registers_.rounded(op.act)[token];
        if (op.factor != 1) scale_by(y, op.size, op.factor);
        activate(op.gating(), op.xielu, y, op.size, act);
    }

   private:
    float* row(int r, int token) { return registers_.floats(r)[token]; }

    // write(to), with a token's row of a register, as its elements are
    template <class Write>
    void write(int r, int token, Write write) {
        if (registers_.is_rounded(r)) write(registers_.rounded(r)[token]);
        else write(row(r, token));
    }

    void norm(const NormOp& op, int token) {
        const float* x = row(op.x, token) + op.column;
        write(op.out, token, [&](auto* to) {
            for (int g = 0; g < std::max(1, op.groups); g++)
                run_norm(op.norm, x + g * op.width, op.weight, op.width, op.eps, to + g * op.width);
        });
    }

    void keep(const StepDesc& step, const KeepOp& op, int token) {
        latents_.keep(step, op.latent, token, row(op.x, token) + op.column);
    }

    void copy(const CopyOp& op, int token) {
        const float* x = row(op.x, token) + op.column;
        write(op.out, token, [&](auto* to) {
            to += op.out_column;
            for (int g = 0; g < std::max(1, op.groups); g++, x += op.step, to += op.width) {
                if (!op.spread) convert(x, op.width, to);
                else
                    for (int i = 0; i < op.width; i += kLanes) store16(to + i, floats(*x), head(op.width - i));
            }
        });
    }

    void scale(const ScaleOp& op, int token) {
        const float* x = row(op.x, token) + op.column;
        write(op.out, token, [&](auto* to) {
            if (op.weights) multiply_each(x, op.weights, op.width, to + op.out_column);
            else multiply(x, op.factor, op.width, to + op.out_column);
        });
    }

    void add(const AddOp& op, int token) {
        add_scaled(row(op.y, token), op.width, op.factor, row(op.x, token) + op.column);
    }

    void add_media(const StepDesc& step, const AddMediaOp& op, int token) {
        if (!step.media || step.media[token] < 0) return;
        const float* image = step.media_rows + step.media[token] * step.media_stride;
        add_scaled(image + op.part * (int64_t)op.width, op.width, 1.0f, row(op.x, token));
    }

    void sum(const SumOp& op, int token) {
        const float *x = row(op.x, token), *y = row(op.y, token);
        write(op.out, token, [&](auto* to) { chorus::sum(x, y, op.width, to); });
    }

    void clip(const ClipOp& op, int token) { clip_each(row(op.x, token) + op.column, op.width, op.limit); }

    void widen(const WidenOp& op, int token) { convert(registers_.rounded(op.x)[token], op.width, row(op.out, token)); }

    void resize(const ResizeOp& op, int token) {
        const float* x = row(op.x, token) + op.column;
        const int kept = std::min(op.width, op.to);
        write(op.out, token, [&](auto* to) {
            for (int h = 0; h < op.heads; h++) {
                auto* own = to + op.out_column + h * op.to;
                convert(x + (op.order ? op.order[h] : h) * op.width, kept, own);
                for (int i = kept; i < op.to; i += kLanes) store16(own + i, floats(0), head(op.to - i));
            }
        });
    }

    void subtract(const SubtractOp& op, int token) {
        float* x = row(op.x, token) + op.column;
        for (int h = 0; h < op.heads; h++) {
            float* head = x + h * op.width;  // its row is of this op alone
            add_scaled(head + op.heads * op.width, op.width, -op.factor, head);
            write(op.out, token, [&](auto* to) { rms_norm(head, op.weight, op.width, op.eps, to + h * op.width); });
        }
    }

    void rotate(const StepDesc& step, const RotateOp& op, int token) {
        const int64_t at = step.positions[token] * op.rotary_dim;
        const Rotation rotation{op.cos + at, op.sin + at, op.rotary_dim, op.interleaved != 0};
        const float* x = row(op.x, token) + op.column;
        write(op.out, token, [&](auto* to) {
            for (int h = 0; h < op.heads; h++, x += op.width, to += op.width) {
                convert(x, op.first, to);
                rotation.run(x + op.first, op.width - op.first, to + op.first);
            }
        });
    }

    void keep_index(const StepDesc& step, const KeepIndexOp& op, int token) {
        chooser_.keep(step, op.keys, token, row(op.x, token) + op.column);
    }

    void gate_rows(const GateOp& op, int token) {
        const float *x = row(op.x, token), *gates = row(op.gates, token);
        write(op.out, token, [&](auto* to) {
            for (int i = 0; i < op.width; i += kLanes) {
                const Head here = head(op.width - i);
                const Floats gate = load16(gates + i, here);
                store16(to + i, load16(x + i, here) * (op.softplus ? softplus16(gate) : sigmoid16(gate)), here);
            }
        });
    }

    void log_scale_heads(const StepDesc& step, const LogScaleHeadsOp& op, int token) {
        const float* x = row(op.x, token) + op.column;
        const float logarithm = std::log((float)(step.positions[token] + 1));
        write(op.out, token, [&](auto* to) {
            for (int h = 0; h < op.heads; h++, x += op.width, to += op.width)
                multiply(x, logarithm * op.weight[h] + op.weight[op.heads + h], op.width, to);
        });
    }

    void product(const ProductOp& op, int token) {
        const float* x = row(op.x, token) + op.column;
        float* to = row(op.out, token) + op.out_column;
        for (int o = 0; o < op.outputs; o++) to[o] = dot<float>(x, op.w + (long)o * op.width, op.width);
        for (int i = 0; op.tanh && i < op.outputs; i += kLanes) {
            const Head here = head(op.outputs - i);
            store16(to + i, tanh16(load16(to + i, here)), here);
        }
    }

    void streams(const StreamsOp& op, int token) {
        constexpr int most = 16;  // streams, of which sixteen elements each are in memory that is near
        float by[most][most], given[most];
        const float *mix = op.mix ? row(op.mix, token) : nullptr, *give = op.give ? row(op.give, token) : nullptr;
        for (int i = 0; i < op.outs; i++) {
            for (int j = 0; j < op.count; j++) {
                const bool kept = i == j && (op.mixed == Mixed::kKept || op.mixed == Mixed::kAddedTo);
                const int at = op.mixed == Mixed::kByTransposed ? j * op.outs + i : i * op.count + j;
                by[i][j] = (kept ? 1.0f : 0.0f) + (op.mixed == Mixed::kKept ? 0.0f : mix ? mix[at] : 1.0f / op.count);
            }
            given[i] = give ? give[i] + op.given : op.given;
        }
        const float *s = row(op.s, token), *y = op.y ? row(op.y, token) : nullptr;
        write(op.out, token, [&](auto* to) {
            for (int c = 0; c < op.width; c += kLanes) {
                const Head here = head(op.width - c);
                Floats own[most];
                for (int j = 0; j < op.count; j++) own[j] = load16(s + (long)j * op.width + c, here);
                for (int i = 0; i < op.outs; i++) {
                    Floats sum = y ? load16(y + c, here) * floats(given[i]) : floats(0);
                    if (op.mixed == Mixed::kKept) sum = sum + own[i];
                    else
                        for (int j = 0; j < op.count; j++) sum = fma(own[j], floats(by[i][j]), sum);
                    store16(to + (long)i * op.width + c, sum, here);
                }
            }
        });
    }

    void connect(const ConnectOp& op, int token) {
        const float* m = row(op.m, token);
        const int n = op.count;
        const auto gate = [&](int i, int kind) {
            return 1.0f / (1.0f + std::exp(-(m[i] * op.scale[kind] + op.base[i])));
        };
        for (int i = 0; i < n; i++) row(op.take, token)[i] = gate(i, 0) + op.floor;
        for (int i = 0; op.give && i < n; i++) row(op.give, token)[i] = op.magnitude * gate(n + i, 1) + op.given_floor;
        if (!op.mix) return;
        float* mix = row(op.mix, token);
        for (int i = 0; i < n; i++) {
            float* own = mix + i * n;
            float most = -INFINITY, total = 0;
            for (int j = 0; j < n; j++) {
                const int at = 2 * n + i * n + j;
                own[j] = m[at] * op.scale[2] + op.base[at], most = std::max(most, own[j]);
            }
            for (int j = 0; j < n; j++) total += own[j] = std::exp(own[j] - most);
            for (int j = 0; j < n; j++) own[j] = own[j] / total + op.floor;
        }
        const auto divide = [&](int step, int other) {  // each of n lines by its sum
            for (int i = 0; i < n; i++) {
                float total = op.floor;
                for (int j = 0; j < n; j++) total += mix[i * step + j * other];
                for (int j = 0; j < n; j++) mix[i * step + j * other] /= total;
            }
        };
        divide(1, n);  // columns
        for (int round = 1; round < op.rounds; round++) divide(n, 1), divide(1, n);
    }

    void sparse_gates(const SparseGatesOp& op, int token) {
        const float* x = row(op.x, token);
        Floats all = floats(0), squares = floats(0);
        for (int i = 0; i < op.size; i += kLanes) all = all + load16(x + i, head(op.size - i));
        const float mean = chorus::sum(all) / op.size;
        for (int i = 0; i < op.size; i += kLanes) {
            const Floats v =
                chorus::keep(load16(x + i, head(op.size - i)) - floats(mean), head(op.size - i), floats(0));
            squares = fma(v, v, squares);
        }
        const float deviation = __builtin_sqrtf(chorus::sum(squares) / op.size);
        const Floats cutoff = floats(mean + deviation * op.deviations);
        write(op.out, token, [&](auto* to) {
            for (int i = 0; i < op.size; i += kLanes)
                store16(to + i, max(floats(0), load16(x + i, head(op.size - i)) - cutoff), head(op.size - i));
            convert(x + op.size, op.size, to + op.size);
        });
    }

    void look_up(const StepDesc& step, const LookUpOp& op, int token) {
        int64_t id = step.token_ids[token] - op.first;
        if (op.keeps && id < 0) return;
        if (id >= op.rows) id = op.keeps ? op.rows - 1 : 0;
        float* to = row(op.out, token);
        convert((const T*)op.table + id * op.width, op.width, to);
        scale_by(to, op.width, op.factor);
    }

    void match(const MatchOp& op, int token) {
        const float *x = row(op.x, token), *y = row(op.y, token);
        const float own = sum_of_squares(x, op.width) / op.width, want = sum_of_squares(y, op.width) / op.width;
        const float factor = __builtin_sqrtf(want) / __builtin_sqrtf(std::max(own, op.least));
        multiply(x, factor, op.width, row(op.out, token) + op.out_column);
    }

    void activate(const ActivateOp& op, int token) {
        const float* x = row(op.x, token);
        write(op.out, token, [&](auto* to) { activate(op.gating(), op.xielu, x, op.size, to); });
    }

    // x: gate and up of `size` elements each, or what an activation without a gate reads
    template <class To>
    static void activate(const Gating& it, const float* xielu, const float* x, int size, To* to) {
        if (is_gated(it.activation)) chorus::activate(it, x, x + size, size, to);
        else activate_alone(it.activation, xielu, x, size, to);
    }

    void reduce(const ReduceOp& op, int token) {
        const Rows<float> out = registers_.floats(op.out);
        if (!op.accumulate) std::fill_n(out[token], op.width, 0.0f);
        ranks_->add(out[token], token * out.stride, op.width);
    }

    void combine(const MoeOp& op, int token, int thread) { experts_.add_up(op, token, thread, row(op.out, token)); }

    Registers<T>& registers_;
    ExpertsPart<T>& experts_;
    LatentsPart<T>& latents_;
    Chooser<T>& chooser_;
    Ranks* ranks_ = nullptr;
};

}  // namespace chorus
