// Sixteen lanes of 16 bits, alike at all x86 levels.
#pragma once
#pragma GCC diagnostic push  // the compiler's own header uses uninitialised registers on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include "simd/lanes.h"

namespace chorus {

using Halves = __m256i;

// Of each 128 bits of both by turns: lanes of 16, 32 or 64 bits of the lower half, or of the upper half.
inline Halves zip_low16(Halves a, Halves b) { return _mm256_unpacklo_epi16(a, b); }
inline Halves zip_high16(Halves a, Halves b) { return _mm256_unpackhi_epi16(a, b); }
inline Halves zip_low32(Halves a, Halves b) { return _mm256_unpacklo_epi32(a, b); }
inline Halves zip_high32(Halves a, Halves b) { return _mm256_unpackhi_epi32(a, b); }
inline Halves zip_low64(Halves a, Halves b) { return _mm256_unpacklo_epi64(a, b); }
inline Halves zip_high64(Halves a, Halves b) { return _mm256_unpackhi_epi64(a, b); }
// The first 128 bits of both, or the second.
inline Halves join_first(Halves a, Halves b) { return _mm256_permute2x128_si256(a, b, 0x20); }
inline Halves join_second(Halves a, Halves b) { return _mm256_permute2x128_si256(a, b, 0x31); }

}  // namespace chorus
