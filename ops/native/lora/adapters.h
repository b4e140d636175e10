// Adapters as they lie in pages of the arena, and units of work on them.
#pragma once
#include <algorithm>
#include <vector>
#include "team/buffer.h"
#include "gemm/gemm.h"

namespace chorus {

constexpr int kRankChunk = 16, kTokenChunk = 128, kColumnChunk = 2048;
constexpr int kAhead = 8;  // rank-rows of A that are worked on together, and fetched meanwhile
constexpr int kAddedRows = 16;  // the same of Bᵀ
constexpr int kLongSegment = 12;  // tokens from which a segment's expand is worth doing tile by tile

// A part of an adapter in pages of the arena: one slab for each rank-row of a layer, with that row of every module's A and Bᵀ.
// Described to Python by program/layout.h.
struct Adapter {
    const int64_t* pages;  // of the arena, in order
    const int64_t* first_elem;  // [layers of the model]: where the layer's first slab begins, -1 where it has none
    int32_t rank;
    float scale;
    int64_t slab_elems;
    const int32_t *a_offset, *b_offset;  // [modules]: elements from a slab's beginning; -1 where a module has none
    const int64_t* vectors;  // [layers, modules]: see vectors.h; then there are no slabs; null: there are no vectors
    int32_t modules;  // of the model
    const int64_t* tokens;  // [rank], rising: of whole rows of the embeddings or the head; null for other parts

    bool in_layer(int layer) const { return first_elem[layer] >= 0; }
    bool has(int module) const { return b_offset[module] >= 0; }
};

// Rank-rows `first` … first+count-1 of a module's A or Bᵀ in a layer: `columns` elements of each, from `offset` of its slab on.
struct RankRows {
    const Adapter* adapter;  // null: no rows
    int layer, first, count, offset, columns;
};

// Memory of T in pages of `page_elems` elements, in which adapters lie.
template <class T>
struct Arena {
    T* data;
    int64_t page_elems;

    // Find where rows begin. A row that goes on in another page is put together elsewhere.
    //
    //   rows    the rows
    //   out     [rows.count]: their addresses
    //   spare   [rows.count, stride]: where rows are put together; null: they are not
    //   stride  elements, at least rows.columns
    void locate(const RankRows& rows, const T** out, T* spare, long stride) const {
        const Adapter& a = *rows.adapter;
        const int64_t elem = a.first_elem[rows.layer] + rows.first * a.slab_elems + rows.offset;
        int64_t index = elem / page_elems, at = elem % page_elems;
        for (int i = 0; i < rows.count; i++) {
            out[i] = data + a.pages[index] * page_elems + at;
            if (spare && at + rows.columns > page_elems) out[i] = join(a, index, at, rows.columns, spare + i * stride);
            for (at += a.slab_elems; at >= page_elems; at -= page_elems) index++;
        }
    }

   private:
    const T* join(const Adapter& a, int64_t index, int64_t at, int width, T* out) const {
        for (int done = 0; done < width; index++, at = 0) {
            const int count = (int)std::min<int64_t>(width - done, page_elems - at);
            memcpy(out + done, data + a.pages[index] * page_elems + at, count * sizeof(T));
            done += count;
        }
        return out;
    }
};

// Memory of a thread for shrinks and expands of adapters up to a rank.
template <class T>
struct LoraScratch {
    std::vector<const T*> rows;  // [rank + kAddedRows]
    std::vector<Act<T>> panel;  // [rank + 1, kPanel]
    std::vector<T> spare;  // rows of A or of Bᵀ that are put together from pages

    // rank: the largest. inputs: the most of a module.
    void reserve(int rank, int inputs) {
        grow(rows, rank + kAddedRows);
        grow(panel, (size_t)(rank + 1) * kPanel);
        grow(spare, std::max((size_t)kRankChunk * inputs, (size_t)rank * kColumnChunk));
    }
};

// A unit of work: of a segment's tokens, a module's rank-rows (shrink) or columns of outputs (expand) first … first+count-1.
struct LoraUnit {
    int segment, module, first, count, token, tokens;  // module: index in its group
};

// The step's segments: tokens begin[s] … end[s]-1 use *adapters[s]. Several may have the same tokens; if of one level,
// they have no module of a layer in common, so that their units never meet. Described to Python by program/layout.h.
struct Segments {
    int32_t count;
    const int32_t *begin, *end;  // [count]
    const Adapter* const* adapters;  // [count]
    const int32_t* level;  // [count]; null: all are 0
    int32_t vectors, undoes;  // 1: some segments are of vectors; of those, some undo them

    int level_of(int s) const { return level ? level[s] : 0; }
    int tokens_of(int s) const { return end[s] - begin[s]; }
    // True if a segment's expand is done tile by tile, with the base product, in a step of many tokens. Vectors are undone
    // between the two.
    bool is_fused(int s) const { return tokens_of(s) >= kLongSegment && !level_of(s) && !undoes && adapters[s]->rank; }
};

// A module of a group with outputs packed side by side: its id, its first column in y, its width.
struct Target {
    int module, column, width;

    struct Columns {
        int first, last;  // of the module's own, without the last
        bool any() const { return first < last; }
    };
    // The module's part of columns from … from+count-1 of y.
    Columns within(int from, int count) const {
        return {std::max(from, column) - column, std::min(from + count, column + width) - column};
    }
};

inline RankRows a_rows(const Adapter& adapter, int layer, int module, const LoraUnit& unit, int inputs) {
    return {&adapter, layer, unit.first, unit.count, adapter.a_offset[module], inputs};
}
inline RankRows b_rows(const Adapter& adapter, int layer, int module, const LoraUnit& unit) {
    return {&adapter, layer, 0, adapter.rank, adapter.b_offset[module] + unit.first, unit.count};
}

// Append the shrinks of some tokens. Units are the same for all layers; a segment without rows in a layer skips its units
// there. Modules follow each other for the same rank-rows, as their rows of A do in a slab.
//
//   segments    of the step
//   group       modules
//   begin, end  the tokens, without the last
//   units       appended to
inline void shrink_units(const Segments& segments, const std::vector<Target>& group, int begin, int end,
                         std::vector<LoraUnit>& units) {
    for (int s = 0; s < segments.count; s++) {
        const Adapter& adapter = *segments.adapters[s];
        const int last = std::min(end, segments.end[s]);
        // kTokenChunk tokens stay in the cache for all modules.
        for (int t = std::max(begin, segments.begin[s]); t < last; t += kTokenChunk)
            for (int r = 0; r < adapter.rank; r += kRankChunk)
                for (int g = 0; g < (int)group.size(); g++)
                    if (adapter.a_offset[group[g].module] >= 0)
                        units.push_back(
                            {s, g, r, std::min(kRankChunk, adapter.rank - r), t, std::min(kTokenChunk, last - t)});
    }
}

// Make the expands of one level: the next level must not begin before they have ended.
//
//   segments  of the step
//   level     of the segments
//   group     modules
//   threads   that share them
//   units     written
inline void expand_units(const Segments& segments, int level, const std::vector<Target>& group, int threads,
                         std::vector<LoraUnit>& units) {
    units.clear();
    const int parts = segments.count >= 4 * threads ? 1 : threads;  // of a module, so that every thread has some
    for (int s = 0; s < segments.count; s++)
        for (int g = 0; g < (int)group.size(); g++) {
            if (segments.level_of(s) != level || !segments.adapters[s]->has(group[g].module)) continue;
            const int width = group[g].width, part = (width + parts * kPanel - 1) / (parts * kPanel) * kPanel;
            const int chunk = std::min(kColumnChunk, part);
            for (int c = 0; c < width; c += chunk)
                units.push_back({s, g, c, std::min(chunk, width - c), segments.begin[s], segments.tokens_of(s)});
        }
}

// Find where the first rows of `next` begin, to fetch them meanwhile: each is in memory of its own, too short for the processor
// to follow in time. Where there are fewer than `most`, the row before once more.
//
//   arena    with the rows
//   next     rows that the thread reads next
//   most     rows that are wanted
//   rows     [most], after at least one other: their addresses
//   returns  the elements that are read of each
template <class T>
inline int upcoming_rows(const Arena<T>& arena, RankRows next, int most, const T** rows) {
    next.count = next.adapter ? std::min(most, next.count) : 0;
    if (next.count) arena.locate(next, rows, nullptr, 0);
    for (int i = next.count; i < most; i++) rows[i] = rows[i - 1];
    return next.columns;
}

}  // namespace chorus
