// Memory between steps and microbatches.
#pragma once

namespace plumb {

// From now on memory that this process frees stays with it for its next allocations, up to 64 MiB.
//
// A graph or stage allocates in its next forward about what its last backward has freed. glibc hands free memory at the
// end of its heap back to the kernel, and the kernel hands it out again page by page, each with a fault and filled with
// zeros: of a small GPT's step that is a few hundredths, a tenth where it rounds, more where results are computed
// again. How much may stay follows the largest block that was mapped on its own and freed, at most 32 MiB; here such a
// block comes and goes, as from any tensor of that size, and none of it is touched. Settings of glibc's own
// (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, mallopt) win. With other C libraries nothing happens. Any thread,
// any number of times.
void keep_freed_memory();

}  // namespace plumb
