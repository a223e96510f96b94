// Checkpoints of training runs; python/plumb/checkpoint.py is what people see of them. JSON crosses as text.
#include "plumb/checkpoint/checkpoint.h"

#include "module.h"
#include "plumb/analysis/svg.h"
#include "plumb/checkpoint/checkpoint_writer.h"
#include "plumb/core/json_text.h"

namespace plumb::python {
namespace {

py::dict report_dict(const CheckpointReport& r) {
  return py::dict("step"_a = r.step, "folder"_a = r.folder, "problem"_a = r.problem, "waited"_a = r.waited,
                  "copied"_a = r.copied, "written"_a = r.written, "bytes"_a = r.bytes);
}

void save_checkpoint(CheckpointWriter& writer, int64_t step, const NamedTensors& model, const NamedTensors& optimizer,
                     const std::string& state, bool unit_scaled) {
  writer.save(step, {model, optimizer, {}, unit_scaled}, parse_json(state));
}

Register checkpoint_part([](py::module_& m) {
  py::class_<CheckpointWriter>(m, "CheckpointWriter")
      .def(py::init([](const std::string& folder, int rank, int world, const std::string& run_id, int keep_last,
                       int64_t keep_every, bool background, double timeout) {
             return std::make_unique<CheckpointWriter>(folder, rank, world, run_id,
                                                       CheckpointOptions{keep_last, keep_every, background, timeout});
           }),
           py::arg("folder"), py::arg("rank"), py::arg("world"), py::arg("run_id"), py::arg("keep_last"),
           py::arg("keep_every"), py::arg("background"), py::arg("timeout"))
      .def("save", &save_checkpoint, FreeGil(), py::arg("step"), py::arg("model"), py::arg("optimizer"),
           py::arg("state"), py::arg("unit_scaled"))
      .def("wait", &CheckpointWriter::wait, FreeGil())
      .def("close", &CheckpointWriter::close, FreeGil())
      .def("problem", &CheckpointWriter::problem)
      .def("take_reports", [](CheckpointWriter& writer) {
        py::list reports;
        for (const CheckpointReport& report : writer.take_reports()) reports.append(report_dict(report));
        return reports;
      });
  py::class_<Checkpoint>(
      m, "Checkpoint",
      "A checkpoint's folder: names, tensors and state of a step. Tensors are read when they are asked "
      "for. ``step``, ``folder``, ``names()`` of the model's tensors, ``optimizer_names()``, ``ties()``, "
      "``has(name)``, ``read(name)``, ``load(pairs)`` into tensors that are there, ``verify()`` of all "
      "checksums.")
      .def("__repr__",
           [](const Checkpoint& c) {
             return c10::str("<Checkpoint of step ", c.step(), ": ", c.names().size(), " tensors, ",
                             c.optimizer_names().size(), " of the optimizer, in ", c.folder(), ">");
           })
      .def("_repr_html_",
           [](const Checkpoint& c) {
             return c10::str("<b>Checkpoint of step ", c.step(), "</b>: ", c.names().size(), " tensors, ",
                             c.optimizer_names().size(), " of the optimizer, in <code>", svg::escaped(c.folder()),
                             "</code>");
           })
      .def_static("open", &Checkpoint::open, FreeGil(), py::arg("folder"))
      .def_static(
          "newest",
          [](const std::string& folder) {
            std::vector<std::string> problems;
            auto newest = Checkpoint::newest(folder, &problems);
            return std::make_pair(std::move(newest), std::move(problems));
          },
          FreeGil(), py::arg("folder"))
      .def_property_readonly("folder", &Checkpoint::folder)
      .def_property_readonly("step", &Checkpoint::step)
      .def("state", [](const Checkpoint& c) { return c.state().dump(); })
      .def("names", &Checkpoint::names)
      .def("optimizer_names", &Checkpoint::optimizer_names)
      .def("ties", [](const Checkpoint& c) { return c.contents().ties; })
      .def(
          "has", [](const Checkpoint& c, const std::string& name) { return c.find(name) != nullptr; }, py::arg("name"))
      .def(
          "has_optimizer",
          [](const Checkpoint& c, const std::string& name) { return c.find_optimizer(name) != nullptr; },
          py::arg("name"))
      .def("read", &Checkpoint::read, FreeGil(), py::arg("name"))
      .def("read_optimizer", &Checkpoint::read_optimizer, FreeGil(), py::arg("name"))
      .def("read_all", &Checkpoint::read_all, FreeGil())
      .def("load", &Checkpoint::load, FreeGil(), py::arg("tensors"))
      .def("verify", &Checkpoint::verify, FreeGil())
      .def_property_readonly("bytes_read", &Checkpoint::bytes_read);
});

}  // namespace
}  // namespace plumb::python
