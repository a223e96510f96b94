// The bits of torch's own products depend on the kind of CPU: libraries choose kernels by it, and the environment can
// ask for others (docs/determinism.md). plumb's own kernels have the same bits everywhere.
#pragma once

#include <string>
#include <vector>

namespace plumb {

struct CpuKind {
  std::string vendor;                     // "AuthenticAMD", "GenuineIntel"; on ARM the implementer, "0x41"
  std::vector<std::string> instructions;  // those that choose kernels: "avx2", "avx512f", "amx_tile", "sve", sorted
  std::string aten;                       // torch's choice, "AVX512", which ATEN_CPU_CAPABILITY lowers
  std::vector<std::string> settings;      // "MKL_CBWR=AVX2": variables of the environment that choose kernels
  std::string torch;                      // "2.13.0+cpu"
};

// Returns the kind that this process computes on.
const CpuKind& cpu_kind();

// Returns all of it in a line. Two processes with one text, one number of threads and one torch have the same bits.
std::string to_string(const CpuKind& kind);

}  // namespace plumb
