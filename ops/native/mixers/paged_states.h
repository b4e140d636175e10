// The states of a step's sequences in pages of the arena, as memory/pages/states.py lays them out.
#pragma once
#include "program/descriptors.h"
#include "mixers/gated_delta.h"

namespace chorus {

// Of one layer; see GatedDelta::run. A state is read from some pages and written to others, so that a step that runs again
// begins with the same state.
struct PagedStates {
    const ModelDesc& model;
    const StepDesc& step;
    int layer;  // counted among those with a state

    int rows() const { return step.rows; }
    DeltaRow row(int i) const {
        const int32_t* accepted = step.state_accepted + i;
        return {step.qo_indptr[i], step.qo_indptr[i + 1] - step.qo_indptr[i], accepted[1] - accepted[0],
                step.state_drafts[i], accepted[0]};
    }
    StatePart conv(int i) const {
        const DeltaShape& s = model.delta;
        const int per_page = model.convs_per_page;
        return part(i, layer / per_page, (int64_t)(layer % per_page) * (s.conv_size - 1) * s.channels());
    }
    StatePart head(int i, int h) const {
        const DeltaShape& s = model.delta;
        const int at = layer * s.v_heads + h, per_page = model.heads_per_page;
        return part(i, model.conv_pages + at / per_page, (int64_t)(at % per_page) * s.k_dim * s.v_dim);
    }
    StatePart draft(int i, int draft) const {
        const int at = layer * model.most_drafts + draft, per_page = model.drafts_per_page;
        return part(i, model.draft_page + at / per_page, (int64_t)(at % per_page) * model.delta.draft_size());
    }

   private:
    // page: among those of a state; at: first element in it
    StatePart part(int i, int page, int64_t at) const {
        float* arena = (float*)model.arena;
        const int64_t floats = model.page_bytes / (int64_t)sizeof(float), here = i * step.state_stride + page;
        return {step.state_fresh[i] ? nullptr : arena + step.state_read[here] * floats + at,
                arena + step.state_written[here] * floats + at};
    }
};

}  // namespace chorus
