// The library for aarch64: all its processors have NEON.
#ifdef __aarch64__
#include "supported.h"
CHORUS_SUPPORTED(true)

#include "simd/simd_neon.h"
#include "library.h"
#endif
