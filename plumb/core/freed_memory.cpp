#include "plumb/core/freed_memory.h"

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace plumb {

void keep_freed_memory() {
#ifdef __GLIBC__
  static const bool done = [] {
    // Just under glibc's limit (DEFAULT_MMAP_THRESHOLD_MAX), header and page included. Without `volatile` compilers
    // leave both calls out.
    void* volatile block = std::malloc((std::size_t(4) << 20) * sizeof(long) - (std::size_t(64) << 10));
    std::free(block);
    return true;
  }();
  static_cast<void>(done);
#endif
}

void release_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace plumb
