#include "plumb/core/freed_memory.h"

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

// MKL's, where the process has it (torch on x86): gives back the buffers that it keeps for this thread's next products.
extern "C" void mkl_serv_thread_free_buffers() __attribute__((weak));

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
  if (mkl_serv_thread_free_buffers) mkl_serv_thread_free_buffers();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace plumb
