// The texts of this room's kernels and of the headers that they include, as strings of the library (room.cmake).
#pragma once

#include <vector>

namespace plumb::cuda {

struct Header {
  const char* name;  // as #include has it
  const char* text;
};
const std::vector<Header>& kernel_headers();

// A kernel to compile: `text` includes headers of the above and defines one extern "C" function called `entry`.
constexpr const char* kEntry = "entry";

}  // namespace plumb::cuda
