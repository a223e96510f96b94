// Number formats as plain numbers: plumb.formats is made of these. And which CUDA kernels operators ask for.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "module.h"
#include "plumb/cuda/noted.h"
#include "plumb/numerics/format.h"

namespace plumb::python {
namespace {

py::dict facts(const FPFormat& f) {
  py::dict d;
  d["exponent_bits"] = f.exponent_bits;
  d["mantissa_bits"] = f.mantissa_bits;
  d["rounding"] = std::string(to_string(f.rounding));
  d["srbits"] = f.srbits;
  d["bits"] = f.bits();
  d["block_size"] = f.block_size;
  d["max_absolute_value"] = f.max_absolute_value();
  d["min_absolute_normal"] = f.min_absolute_normal();
  d["min_absolute_subnormal"] = f.min_absolute_subnormal();
  d["name"] = f.name();
  d["text"] = f.to_string();
  return d;
}

Register formats_part([](py::module_& m) {
  m.def("parse_format", [](const std::string& text) { return facts(FPFormat::parse(text)); });
  m.def("plain_format", [](int exponent_bits, int mantissa_bits, const std::string& rounding, int srbits) {
    return facts(FPFormat(exponent_bits, mantissa_bits, rounding, srbits));
  });
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
