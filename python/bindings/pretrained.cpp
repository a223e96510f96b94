// Folders of transformers: which tensors they have, their weights into modules, modules into folders.
#include "plumb/checkpoint/pretrained.h"
#include "module.h"
#include "plumb/core/input_file.h"

namespace plumb::python {
namespace {

using Modules = std::vector<std::shared_ptr<GraphModule>>;

StateParts parts_of(const Modules& modules) {
  StateParts parts;
  for (const auto& module : modules) parts.push_back(&module->state());
  return parts;
}

// [(name, dtype, sizes)] of all files together; no tensor is read.
std::vector<std::tuple<std::string, at::ScalarType, std::vector<int64_t>>> stored_tensors(const std::string& path) {
  const TensorFolder folder(path);
  std::vector<std::tuple<std::string, at::ScalarType, std::vector<int64_t>>> all;
  for (const std::string& name : folder.names())
    all.emplace_back(name, folder.meta(name).dtype, folder.meta(name).sizes);
  return all;
}

bool same_stored(const std::string& path, const std::string& one, const std::string& other) {
  const TensorFolder folder(path);
  at::Tensor a = folder.read(one), b = folder.read(other);
  if (a.scalar_type() != b.scalar_type()) a = a.to(at::kDouble), b = b.to(at::kDouble);
  return at::equal(a, b);
}

Register pretrained_part([](py::module_& m) {
  m.def("stored_tensors", &stored_tensors, py::arg("path"));
  m.def("same_stored", &same_stored, FreeGil(), "Returns whether two tensors of a folder have the same values.",
        py::arg("path"), py::arg("one"), py::arg("other"));
  m.def("check_pretrained", [](const std::string& record) { Pretrained::parse(record); }, py::arg("record"));
  m.def(
      "load_weights",
      [](GraphModule& module, const std::string& record, const std::string& path) {
        const TensorFolder folder(path);
        load_weights(module, Pretrained::parse(record), folder);
        return folder.bytes_read();
      },
      FreeGil(), "Returns how many bytes of tensors were read.", py::arg("module"), py::arg("record"), py::arg("path"));
  m.def(
      "write_weights",
      [](const std::string& out, const Modules& modules, size_t part, const std::string& record,
         const std::string& source) { write_weights(out, parts_of(modules), part, Pretrained::parse(record), source); },
      FreeGil(), py::arg("out"), py::arg("modules"), py::arg("part"), py::arg("record"), py::arg("source"));
  m.def(
      "finish_weights_folder",
      [](const std::string& out, const Modules& modules, const std::string& record, const std::string& source) {
        finish_weights_folder(out, parts_of(modules), Pretrained::parse(record), source);
      },
      FreeGil(), py::arg("path"), py::arg("parts"), py::arg("record"), py::arg("source"));
  m.def("check_new_folder", &check_new_folder, py::arg("path"));
  m.def("refuse_unit_scaled", [](const std::string& path) { refuse_unit_scaled(TensorFolder(path)); }, py::arg("path"));
  m.def("kept_files", [] { return std::vector<std::string>(kKeptFiles.begin(), kKeptFiles.end()); });
  m.def(
      "read_file_of_folder",
      [](const std::string& folder, const std::string& name, uint64_t most) {
        return py::bytes(read_file_of_folder(folder, name, most));
      },
      py::arg("folder"), py::arg("name"), py::arg("most"));
  m.attr("UNIT_SCALED_MARK") = kUnitScaledMark;
});

}  // namespace
}  // namespace plumb::python
