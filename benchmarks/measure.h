// Measuring functions, compiled into each benchmark.
#pragma once

#include <cstdint>

// This thread's processor time in seconds, the kernel's work for it (page faults) included: other processes' turns do
// not count.
double thread_seconds();

// Also called from Python, hence C.
extern "C" {

// From here on what the CPU allocator hands out and takes back on this thread is counted (a CPU backward runs on its
// caller's).
void count_allocations();

// Bytes that were allocated since count_allocations() and live now; the highest point is from here on.
int64_t live_allocations();

// Bytes at the highest point since count_allocations() or live_allocations(). Ends the count.
int64_t peak_of_allocations();
}
