#pragma once

#include <algorithm>
#include <thread>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace plumb {

// Returns the number of processors that this process may run on, at least 1. Only OpenMP knows it where it has bound
// the calling thread to one of them; std::thread counts the machine's.
inline int num_cores() {
#ifdef _OPENMP
  return std::max(1, omp_get_num_procs());
#else
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

}  // namespace plumb
