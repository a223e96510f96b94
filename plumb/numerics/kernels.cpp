#include "plumb/numerics/kernels.h"

#include <cstdlib>
#include <cstring>

namespace plumb::kernel {

// The levels above the baseline exist on x86-64 only; elsewhere their files compile to the same code as the baseline.
extern const KernelTable baseline_kernels, avx2_kernels, avx512_kernels;

namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

const KernelTable& choose() {
  const KernelTable* tables[3];
  int n = runnable_kernels(tables);
  if (const char* wanted = std::getenv("PLUMB_CPU"))
    for (int i = 0; i < n; ++i)
      if (std::strcmp(wanted, tables[i]->level) == 0) return *tables[i];
  return *tables[n - 1];
}

}  // namespace

int runnable_kernels(const KernelTable* (&tables)[3]) {
  int n = 0;
  tables[n++] = &baseline_kernels;
  if (has_avx2()) tables[n++] = &avx2_kernels;
  if (has_avx512()) tables[n++] = &avx512_kernels;
  return n;
}

const KernelTable& kernels() {
  static const KernelTable& best = choose();
  return best;
}

}  // namespace plumb::kernel
