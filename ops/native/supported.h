// What a library says of itself, compiled for any processor: a level's instructions come after it.
#pragma once
#include "units.h"

#define CHORUS_API __attribute__((visibility("default")))

#ifdef CHORUS_LIBRARY
#define CHORUS_SUPPORTED(condition) \
    extern "C" CHORUS_API int chorus_supported() { return condition; }
#else
#define CHORUS_SUPPORTED(condition)
#endif
