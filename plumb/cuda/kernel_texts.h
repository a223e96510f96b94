// The kernels that there are: each is a template's instance, so that one compilation takes milliseconds. Their texts,
// and those of the headers that they include, as strings of the library (room.cmake).
#pragma once

#include <string>
#include <vector>

#include "plumb/numerics/kernels.h"

namespace plumb::cuda {

struct PassKernel {
  kernel::Carrier carrier = kernel::kFloat32;
  int pack = 1;  // neighbors moved together
  kernel::RoundingSpec rounding{};
  bool writes = true;
  const kernel::CodeSpec* codes = nullptr;
  bool before = false, after = false, histogram = false;
};

std::string text_of(const PassKernel& kernel);
std::string finish_text();
std::string keep_text(kernel::Carrier carrier, int pack);
std::string hash_text(kernel::Carrier carrier);
std::string decode_text(kernel::Carrier carrier, int pack);
std::string largest_text(kernel::Carrier carrier, int pack);
std::string blocks_text(kernel::Carrier carrier, const kernel::BlockSpec& block, int64_t length,
                        const kernel::RoundingSpec& rounding);

// "Half", as element.h has it.
const char* type_name(kernel::Carrier carrier);

// Returns a placeholder for the codes of kernels that write none.
kernel::CodeSpec no_codes();

struct Header {
  const char* name;  // as #include has it
  const char* text;
};
const std::vector<Header>& kernel_headers();

// A kernel to compile: `text` includes headers of the above and defines one extern "C" function called `entry`.
constexpr const char* kEntry = "entry";

}  // namespace plumb::cuda
