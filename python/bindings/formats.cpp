// Number formats as plain numbers: plumb.formats is made of these. And which CUDA kernels operators ask for.
#include <pybind11/functional.h>

#include "module.h"
#include "plumb/cuda/launch.h"
#include "plumb/numerics/format.h"

namespace plumb::python {
namespace {

py::dict facts(const FPFormat& f) {
  return py::dict("exponent_bits"_a = f.exponent_bits, "mantissa_bits"_a = f.mantissa_bits,
                  "rounding"_a = std::string(to_string(f.rounding)), "srbits"_a = f.srbits, "bits"_a = f.bits(),
                  "block_size"_a = f.block_size, "max_absolute_value"_a = f.max_absolute_value(),
                  "min_absolute_normal"_a = f.min_absolute_normal(),
                  "min_absolute_subnormal"_a = f.min_absolute_subnormal(), "name"_a = f.name(),
                  "saturate"_a = f.saturate, "text"_a = f.to_string());
}

Register formats_part([](py::module_& m) {
  m.def("parse_format", [](const std::string& text) { return facts(FPFormat::parse(text)); }, py::arg("text"));
  m.def(
      "plain_format",
      [](int exponent_bits, int mantissa_bits, const std::string& rounding, int srbits) {
        return facts(FPFormat(exponent_bits, mantissa_bits, rounding, srbits));
      },
      py::arg("exponent_bits"), py::arg("mantissa_bits"), py::arg("rounding"), py::arg("srbits"));
  m.def("standard_format_names", &standard_format_names);
  m.def(
      "noted_cuda_kernels",
      [](const std::string& device, const std::function<void()>& call) {
        return cuda::noted_kernels(c10::Device(device).type(), call);
      },
      py::arg("device"), py::arg("call"));
});

}  // namespace
}  // namespace plumb::python
