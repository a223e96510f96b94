// Memory between steps and microbatches.
#pragma once

namespace plumb {

// Asks the C library to keep memory that this process frees for its next allocations, up to 64 MiB. A setting of the
// whole process, so nothing in plumb asks for it but the command `plumb`; a program that trains may.
//
// A graph or stage allocates in its next forward about what its last backward has freed. glibc returns free memory at
// the end of its heap to the kernel, which hands it out again page by page, each with a fault and filled with zeros.
// That is a few hundredths of a small GPT's step, a tenth where it rounds, more where results are recomputed. glibc
// keeps twice the size of the largest block that was mapped on its own and freed, at most 32 MiB; this call maps and
// frees such a block without touching it, as a tensor of that size would. Settings of glibc's own
// (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, mallopt) win. With other C libraries nothing happens. Any thread,
// any number of times.
void keep_freed_memory();

// Returns all memory to the kernel that this process has freed and the C library still holds. Does the same with MKL's
// buffers for the calling thread's next matrix products, where torch has MKL (22 MiB for a small GPT on an Intel CPU
// with AVX-512). Changes no setting. The pages that the next step needs come back with a fault each: for the end of
// training, or before memory is needed elsewhere. With other C libraries than glibc only MKL's buffers are freed. Any
// thread, any number of times.
void release_freed_memory();

}  // namespace plumb
