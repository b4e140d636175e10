// What ops read and write: rows of a step's tokens, in memory that all layers share.
#pragma once
#include <vector>
#include "team/buffer.h"
#include "program/descriptors.h"
#include "ranks/ranks.h"

namespace chorus {

template <class T>
class Registers {
    using X = Act<T>;

   public:
    explicit Registers(const ModelDesc& model)
        : desc_(model.registers, model.registers + model.num_registers),
          floats_(desc_.size()),
          indices_(desc_.size()),
          rounded_(desc_.size()) {}

    // ranks: with the memory of shared registers
    void join(Ranks* ranks) { ranks_ = ranks; }

    // Make room for a step. gates: it keeps gates and what they multiply
    void plan(size_t tokens, bool gates) {
        for (int r = 0; r < (int)desc_.size(); r++) switch (desc_[r].memory) {
                case Memory::kFloat: grow_rows(floats_[r], tokens, width(r)); break;
                case Memory::kRounded: grow_rows(rounded_[r], tokens, width(r)); break;
                case Memory::kShared: break;
                case Memory::kIndices: grow(indices_[r], tokens * width(r)); break;
                case Memory::kGates:
                    if (gates) grow_rows(floats_[r], tokens, width(r));
            }
    }

    int width(int r) const { return desc_[r].width; }
    bool is_rounded(int r) const { return desc_[r].memory == Memory::kRounded; }

    // Rows [tokens, width] of a register whose elements are float32; of the type that products read.
    Rows<float> floats(int r) {
        const Rows<float> own = rows_of(floats_[r], width(r));
        return desc_[r].memory == Memory::kShared ? Rows<float>{ranks_->mine(), own.stride} : own;
    }
    Rows<int32_t> indices(int r) { return {indices_[r].data(), width(r)}; }
    Rows<X> rounded(int r) { return rows_of(rounded_[r], width(r)); }

   private:
    const std::vector<RegisterDesc> desc_;
    std::vector<Buffer<float>> floats_;
    std::vector<Buffer<int32_t>> indices_;
    std::vector<Buffer<X>> rounded_;
    Ranks* ranks_ = nullptr;
};

}  // namespace chorus
