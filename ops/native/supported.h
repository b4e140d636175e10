// What a library says of itself, compiled for any processor: a level's instructions come after it.
#pragma once

#define CHORUS_API __attribute__((visibility("default")))

#define CHORUS_SUPPORTED(condition) \
    extern "C" CHORUS_API int chorus_supported() { return condition; }
