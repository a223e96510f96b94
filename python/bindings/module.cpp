#include "module.h"

#include "plumb/core/freed_memory.h"
#include "plumb/core/input_file.h"
#include "plumb/core/output_file.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "plumb's C++ engine";
  m.def("keep_freed_memory", &plumb::keep_freed_memory,
        "Ask the C library to keep up to 64 MiB of freed memory for the next allocations of this process.\n\n"
        "A training step allocates about what the last one freed. glibc hands that memory back to the kernel, which\n"
        "hands it out again page by page: a few hundredths of a small model's step, more with recompute. This is a\n"
        "setting of the whole process, so plumb makes it only in its own command (`plumb train` and the others); a\n"
        "program that trains may call it once. With other C libraries than glibc it does nothing.");
  m.def("release_freed_memory", &plumb::release_freed_memory,
        "Give the kernel what this process has freed and the C library still holds.\n\n"
        "After training steps glibc holds about what a step allocates, and the holes between: `RSS` says more than\n"
        "tensors need. No setting changes. The next step asks for its pages again, one fault each, so call this when\n"
        "training is over or memory is needed elsewhere. With other C libraries than glibc it does nothing.");
  // Bytes, not text: what a file holds need not be UTF-8, and the engine's parsers say where it is wrong.
  m.def("read_file", [](const std::string& path) { return py::bytes(plumb::read_file(path)); }, py::arg("path"));
  m.def(
      "write_file",
      [](const std::string& path, std::string_view contents) { plumb::write_file_atomically(path, contents); },
      py::arg("path"), py::arg("contents"));
  for (const auto& bind : plumb::python::bindings()) bind(m);
}
