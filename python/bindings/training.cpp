// A training from Python: options as texts, batches and hooks as objects.
#include <pybind11/functional.h>

#include <atomic>
#include <cmath>
#include <csignal>

#include "errors.h"
#include "module.h"
#include "plumb/core/json_text.h"
#include "plumb/training/doctor.h"
#include "plumb/training/trainer.h"

namespace plumb::python {
namespace {

// An object with next() -> (inputs, targets), state() -> JSON and load_state(JSON). Targets are further inputs of a
// model that returns its loss.
class PythonBatches : public BatchSource {
 public:
  PythonBatches(py::object source, bool returns_loss) : source_(held(std::move(source))), returns_loss_(returns_loss) {}

  Batch next() override {
    return with_gil([&] {
      auto [inputs, targets] = source_->attr("next")().cast<std::pair<Tensors, Tensors>>();
      if (!returns_loss_) return Batch{inputs, targets};
      inputs.insert(inputs.end(), targets.begin(), targets.end());
      return Batch{inputs, {}};
    });
  }
  nlohmann::json state() override { return parse_json(text("state")); }
  void load_state(const nlohmann::json& state) override {
    with_gil([&] { source_->attr("load_state")(state.dump()); });
  }
  std::string identity() const override { return text("identity"); }

 private:
  std::string text(const char* method) const {
    return with_gil([&] { return source_->attr(method)().cast<std::string>(); });
  }
  std::shared_ptr<py::object> source_;
  bool returns_loss_;
};

// None for a number that is not finite, as JSON has it.
py::object json_to_python(const nlohmann::json& value) {
  if (value.is_number_integer()) return py::int_(value.get<int64_t>());
  if (value.is_number_float() && std::isfinite(value.get<double>())) return py::float_(value.get<double>());
  if (value.is_string()) return readable(value.get_ref<const std::string&>());
  if (value.is_array()) {
    py::list list;
    for (const auto& each : value) list.append(json_to_python(each));
    return list;
  }
  if (!value.is_object()) return py::none();
  py::dict dict;
  for (const auto& [key, each] : value.items()) dict[py::str(key)] = json_to_python(each);
  return dict;
}

struct PythonTrainer {
  std::atomic<bool> stop = false;
  std::unique_ptr<Trainer> trainer;
};

std::unique_ptr<PythonTrainer> make_trainer(const std::string& config, const FieldTexts& texts,
                                            std::shared_ptr<GraphModule> module, const ExportedProgram* program,
                                            bool unit_scaled_layers, py::object batches,
                                            std::function<void(std::string_view, py::object)> event) {
  const TrainOptions options = read_options(config, texts);
  auto made = std::make_unique<PythonTrainer>();
  TrainHooks hooks;
  // An exception of a hook (KeyboardInterrupt among them) ends the training as it is.
  hooks.event = [event = std::move(event)](const TrainEvent& what) {
    py::gil_scoped_acquire gil;
    event(kind_of(what), json_to_python(to_json(what)));
  };
  hooks.stop_signal = [&stop = made->stop] { return stop ? SIGINT : 0; };
  TrainParts parts{std::move(module), nullptr};
  if (program) parts.record = *program;
  parts.record.unit_scaled_layers = unit_scaled_layers;
  if (!batches.is_none()) parts.batches = std::make_unique<PythonBatches>(std::move(batches), options.loss == "output");
  py::gil_scoped_release release;
  made->trainer = std::make_unique<Trainer>(options, std::move(hooks), std::move(parts));
  return made;
}

const Register training_part([](py::module_& m) {
  m.def(
      "train_toml",
      [](const std::string& config, const FieldTexts& texts) { return to_toml(read_options(config, texts)); },
      py::arg("config"), py::arg("texts"), "Every option as a TOML document.");
  m.def(
      "doctor",
      [] {
        const std::vector<Finding> findings = doctor();
        std::vector<std::tuple<std::string, std::string, std::string>> all;
        for (const Finding& f : findings) all.emplace_back(f.topic, f.found, f.remedy);
        return std::make_pair(all, to_text(findings));
      },
      FreeGil(), "Report on this machine: CPU, torch, devices, kernels.");
  m.def(
      "train_saves_weights",
      [](const std::string& config, const FieldTexts& texts) { return read_options(config, texts).saves_weights(); },
      py::arg("config"), py::arg("texts"), "Whether a file will have the trained weights.");
  py::class_<PythonTrainer>(m, "Trainer")
      .def(py::init(&make_trainer), py::arg("config"), py::arg("texts"), py::arg("module"), py::arg("program"),
           py::arg("unit_scaled_layers"), py::arg("batches"), py::arg("event"))
      .def(
          "run",
          [](PythonTrainer& t) {
            const TrainResult result = t.trainer->run();
            return std::make_tuple(result.steps, result.loss, result.eval_loss, result.stopped_by != 0);
          },
          FreeGil())
      .def("stop", [](PythonTrainer& t) { t.stop = true; });
});

}  // namespace
}  // namespace plumb::python
