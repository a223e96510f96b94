// Compares kernels with the CPU's before they work: a kernel with other bits, one that does not start, and one whose
// compilation fails are turned off on their device, with one warning. ATen's operators do their work from then on.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

namespace plumb::cuda {

// Returns whether the kernel of `text`, which is loaded, may work on the device. The first call for a device and a text
// runs `check`, which calls the kernel on hard values and returns "" or the first difference; later calls, and later
// processes with the same device, driver and text, take its verdict. Within `check` every kernel may work.
bool is_right(c10::Device device, const std::string& text, const std::function<std::string()>& check);

// Turns the kernel of `text` off on a device and warns, once.
void turn_off(c10::Device device, const std::string& text, const std::string& why);
bool is_off(c10::Device device, const std::string& text);

// "quantise" of a kernel's text: what it calls, with its template's arguments.
std::string name_of(const std::string& text);

// The verdict on a kernel on a device. wrong: "" if its results are right.
struct KernelVerdict {
  std::string device, kernel, wrong;
};
// Verdicts of this process, in the order in which they came.
std::vector<KernelVerdict> kernel_verdicts();
// Forgets them. For tests.
void forget_verdicts();

// Values that rounding gets wrong first, on `device`: every exponent with ties and their neighbors, both zeros,
// subnormals, infinities, NaN; 1-d, an odd number of them. `aligned`: on a multiple of 16 bytes, or on none.
at::Tensor hard_values(at::ScalarType dtype, c10::Device device, bool aligned);
// Values from -4 to 4 for arithmetic, one of them 0 and one NaN; as above.
at::Tensor plain_values(at::ScalarType dtype, c10::Device device, bool aligned, uint64_t seed);

// Returns "" if two tensors have the same bits (any NaN equals any other), or values within `bound` of each other,
// relative and absolute; else the first difference: "value 17 is 4 instead of 3.5".
std::string difference(const at::Tensor& found, const at::Tensor& wanted, double bound = 0);

}  // namespace plumb::cuda
