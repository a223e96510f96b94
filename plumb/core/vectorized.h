// PLUMB_VECTORIZED before a function: its loops are vectorized, which -O2 of GCC does not do where their length is
// unknown. The meaning of arithmetic stays the same.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#define PLUMB_VECTORIZED __attribute__((optimize("O3")))
#else
#define PLUMB_VECTORIZED
#endif
