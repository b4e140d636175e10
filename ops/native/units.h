// Units of a level: parts that are compiled each by itself, beside each other, as one compiler for all takes a gigabyte and its
// time. `setup.py` defines CHORUS_UNIT, and a unit's own macro as `template`: what it marks is compiled there, and called by
// the others. What is marked is called for much work at a time, and is not to be inlined. Without CHORUS_UNIT all is one.
#pragma once

#ifdef CHORUS_UNIT
#define CHORUS_ELSEWHERE extern template
#else
#define CHORUS_ELSEWHERE template
#define CHORUS_UNIT_LIBRARY template
#endif

#ifdef CHORUS_UNIT_LIBRARY
#define CHORUS_LIBRARY  // its functions are compiled here
#endif

// What takes longest to compile comes first.
#ifndef CHORUS_UNIT_PRODUCTS
#define CHORUS_UNIT_PRODUCTS CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_DECODER_FLOAT
#define CHORUS_UNIT_DECODER_FLOAT CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_DECODER_BF16
#define CHORUS_UNIT_DECODER_BF16 CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_ATTENTION_FLOAT
#define CHORUS_UNIT_ATTENTION_FLOAT CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_ATTENTION_BF16
#define CHORUS_UNIT_ATTENTION_BF16 CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_LIBRARY
#define CHORUS_UNIT_LIBRARY CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_MIXTURE
#define CHORUS_UNIT_MIXTURE CHORUS_ELSEWHERE
#endif
#ifndef CHORUS_UNIT_MIXERS
#define CHORUS_UNIT_MIXERS CHORUS_ELSEWHERE
#endif
