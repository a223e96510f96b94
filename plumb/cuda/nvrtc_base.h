// Replaces <cstdint> for NVRTC, which has no library and lacks a few of g++'s builtins.
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#define __builtin_inf() __builtin_bit_cast(double, 0x7ff0000000000000ul)
#define __builtin_nan(text) __builtin_bit_cast(double, 0x7ff8000000000000ul)
#define __builtin_sqrt(x) sqrt(x)
