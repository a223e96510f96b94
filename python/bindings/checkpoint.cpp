// Checkpoints of training runs; python/plumb/checkpoint.py is what people see of them. JSON crosses as text.
#include "plumb/checkpoint/checkpoint.h"

#include "module.h"
#include "plumb/checkpoint/checkpoint_writer.h"
#include "plumb/core/json_text.h"

namespace plumb::python {
namespace {

py::dict report_dict(const CheckpointReport& r) {
  return py::dict("step"_a = r.step, "folder"_a = r.folder, "problem"_a = r.problem, "waited"_a = r.waited,
                  "copied"_a = r.copied, "written"_a = r.written, "bytes"_a = r.bytes);
}

void save_checkpoint(CheckpointWriter& writer, int64_t step, const NamedTensors& model, const NamedTensors& optimizer,
                     const std::string& state) {
  writer.save(step, {model, optimizer}, parse_json(state));
}

Register checkpoint_part([](py::module_& m) {
  py::class_<CheckpointWriter>(m, "CheckpointWriter")
      .def(py::init([](const std::string& folder, int rank, int world, const std::string& run_id, int keep_last,
                       int64_t keep_every, bool background, double timeout) {
        return std::make_unique<CheckpointWriter>(folder, rank, world, run_id,
                                                  CheckpointOptions{keep_last, keep_every, background, timeout});
      }))
      .def("save", &save_checkpoint, FreeGil())
      .def("wait", &CheckpointWriter::wait, FreeGil())
      .def("problem", &CheckpointWriter::problem)
      .def("take_reports", [](CheckpointWriter& writer) {
        py::list reports;
        for (const CheckpointReport& report : writer.take_reports()) reports.append(report_dict(report));
        return reports;
      });
  py::class_<Checkpoint>(m, "Checkpoint")
      .def_static("open", &Checkpoint::open, FreeGil())
      .def_static(
          "newest",
          [](const std::string& folder) {
            std::vector<std::string> problems;
            auto newest = Checkpoint::newest(folder, &problems);
            return std::make_pair(std::move(newest), std::move(problems));
          },
          FreeGil())
      .def_property_readonly("folder", &Checkpoint::folder)
      .def_property_readonly("step", &Checkpoint::step)
      .def("state", [](const Checkpoint& c) { return c.state().dump(); })
      .def("names", &Checkpoint::names)
      .def("optimizer_names", &Checkpoint::optimizer_names)
      .def("ties", [](const Checkpoint& c) { return c.contents().ties; })
      .def("has", [](const Checkpoint& c, const std::string& name) { return c.find(name) != nullptr; })
      .def("has_optimizer",
           [](const Checkpoint& c, const std::string& name) { return c.find_optimizer(name) != nullptr; })
      .def("read", &Checkpoint::read, FreeGil())
      .def("read_optimizer", &Checkpoint::read_optimizer, FreeGil())
      .def("load", &Checkpoint::load, FreeGil())
      .def("verify", &Checkpoint::verify, FreeGil())
      .def_property_readonly("bytes_read", &Checkpoint::bytes_read);
});

}  // namespace
}  // namespace plumb::python
