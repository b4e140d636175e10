// Memory for a step's activations, on huge pages where it is large: a tile's rows are kilobytes apart, and small pages
// would take a translation for each.
#pragma once
#include <sys/mman.h>
#include <cstdlib>
#include <vector>
#include "gemm/operands.h"

namespace chorus {

template <class V>
struct HugePages {
    using value_type = V;
    static constexpr size_t kSmall = 64, kHuge = 2 << 20;

    HugePages() = default;
    template <class W>
    HugePages(const HugePages<W>&) {}

    V* allocate(size_t count) {
        const bool huge = count * sizeof(V) >= kHuge;
        const size_t page = huge ? kHuge : kSmall, bytes = (count * sizeof(V) + page - 1) / page * page;
        void* memory = std::aligned_alloc(page, bytes);
        if (!memory) std::abort();
        if (huge) madvise(memory, bytes, MADV_HUGEPAGE);
        return (V*)memory;
    }
    void deallocate(V* memory, size_t) { std::free(memory); }

    template <class W> bool operator==(const HugePages<W>&) const { return true; }
    template <class W> bool operator!=(const HugePages<W>&) const { return false; }
};

template <class V>
using Buffer = std::vector<V, HugePages<V>>;

// Elements from row to row: an odd number of cache lines, so that rows don't fall into the same few sets.
template <class E>
inline long spread(int n) {
    constexpr int line = 64 / (int)sizeof(E);
    return ((n + line - 1) / line | 1) * (long)line;
}

template <class V>
inline void grow(V& v, size_t n) {
    if (v.size() < n) v.resize(n);
}

// Rows of `width` elements, `spread` apart, in memory that has room for them: `grow_rows` makes it.
template <class V>
inline Rows<V> rows_of(Buffer<V>& v, int width) {
    return {v.data(), spread<V>(width)};
}
template <class V>
inline void grow_rows(Buffer<V>& v, size_t rows, int width) {
    grow(v, rows * spread<V>(width));
}

}  // namespace chorus
