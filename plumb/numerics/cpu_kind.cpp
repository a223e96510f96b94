#include "plumb/numerics/cpu_kind.h"

#include <ATen/Version.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string_view>

namespace plumb {
namespace {

constexpr std::array kInstructions = {"sse4_1",      "avx",         "avx2",     "fma",      "avx512f",  "avx512_vnni",
                                      "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd",
                                      "bf16",        "i8mm",        "sve",      "sve2",     "svebf16"};
constexpr std::array kSettings = {"ATEN_CPU_CAPABILITY", "MKL_CBWR",           "MKL_ENABLE_INSTRUCTIONS",
                                  "MKL_DEBUG_CPU_TYPE",  "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"};

CpuKind read_cpu_kind() {
  CpuKind found;
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string name = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    std::istringstream words(line.substr(colon + 1));
    std::string word;
    if (name == "vendor_id" || name == "CPU implementer") {
      if (found.vendor.empty()) words >> found.vendor;
    } else if ((name == "flags" || name == "Features") && found.instructions.empty()) {
      while (words >> word)
        if (std::ranges::find(kInstructions, std::string_view(word)) != kInstructions.end())
          found.instructions.push_back(word);
    }
  }
  std::ranges::sort(found.instructions);
  found.aten = at::get_cpu_capability();
  for (const char* name : kSettings)
    if (const char* value = std::getenv(name)) found.settings.push_back(std::string(name) + "=" + value);
  found.torch = TORCH_VERSION;
  return found;
}

}  // namespace

const CpuKind& cpu_kind() {
  static const CpuKind found = read_cpu_kind();
  return found;
}

std::string to_string(const CpuKind& m) {
  std::string text = m.vendor.empty() ? "unknown CPU" : m.vendor;
  for (const std::string& name : m.instructions) text += " " + name;
  text += ", ATen " + m.aten;
  for (const std::string& setting : m.settings) text += ", " + setting;
  return text + ", torch " + m.torch;
}

}  // namespace plumb
