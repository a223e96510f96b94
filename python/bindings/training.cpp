// A training from Python: options as texts, batches and hooks as objects.
#include <pybind11/functional.h>

#include <atomic>
#include <csignal>

#include "convert.h"
#include "errors.h"
#include "module.h"
#include "plumb/core/input_file.h"
#include "plumb/core/json_text.h"
#include "plumb/training/trainer.h"

namespace plumb::python {
namespace {

// An object with next() -> (inputs, targets), state() -> JSON and load_state(JSON).
class PythonBatches : public BatchSource {
 public:
  explicit PythonBatches(py::object source) : source_(std::move(source)) {}
  ~PythonBatches() override {
    py::gil_scoped_acquire gil;
    source_ = py::object();
  }

  Batch next() override {
    return call([&] {
      const auto [inputs, targets] = source_.attr("next")().cast<std::pair<Tensors, Tensors>>();
      return Batch{inputs, targets};
    });
  }
  nlohmann::json state() override {
    return parse_json(call([&] { return source_.attr("state")().cast<std::string>(); }));
  }
  void load_state(const nlohmann::json& state) override {
    call([&] { source_.attr("load_state")(state.dump()); });
  }
  std::string identity() const override {
    return call([&] { return source_.attr("identity")().cast<std::string>(); });
  }

 private:
  template <class F>
  static auto call(const F& function) -> decltype(function()) {
    py::gil_scoped_acquire gil;
    try {
      return function();
    } catch (const py::error_already_set& error) {
      throw to_error(error);
    }
  }
  py::object source_;
};

struct PythonTrainer {
  std::atomic<bool> stop = false;
  std::unique_ptr<Trainer> trainer;
};

using Texts = std::map<std::string, std::vector<std::string>>;

TrainOptions options_of(const std::string& config, const Texts& texts) {
  TrainOptions options;
  if (!config.empty()) read_toml(options, read_file(config), config);
  for (const auto& [name, values] : texts) set_field(options, train_field(name), values);
  return options;
}

std::unique_ptr<PythonTrainer> make_trainer(const std::string& config, const Texts& texts,
                                            std::shared_ptr<GraphModule> module, py::object batches,
                                            std::function<void(const std::string&)> event) {
  const TrainOptions options = options_of(config, texts);
  auto made = std::make_unique<PythonTrainer>();
  TrainHooks hooks;
  // An exception of a hook (KeyboardInterrupt among them) ends the training as it is.
  hooks.event = [event = std::move(event)](const nlohmann::json& what) { event(what.dump()); };
  hooks.stop_signal = [&stop = made->stop] { return stop ? SIGINT : 0; };
  TrainParts parts{std::move(module), nullptr};
  if (!batches.is_none()) parts.batches = std::make_unique<PythonBatches>(std::move(batches));
  py::gil_scoped_release release;
  made->trainer = std::make_unique<Trainer>(options, std::move(hooks), std::move(parts));
  return made;
}

std::string kind_of(const TrainField& field) {
  static const char* const kKinds[] = {"str", "list", "int", "float", "float", "bool"};
  return kKinds[field.member.index()];
}

const Register training_part([](py::module_& m) {
  m.def(
      "train_fields",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> all;
        for (const TrainField& field : train_fields()) all.emplace_back(field.name, kind_of(field), field.help);
        return all;
      },
      "Name, kind and help of every option of a training.");
  m.def(
      "train_toml", [](const std::string& config, const Texts& texts) { return to_toml(options_of(config, texts)); },
      py::arg("config"), py::arg("texts"), "Every option as a TOML document.");
  py::class_<PythonTrainer>(m, "Trainer")
      .def(py::init(&make_trainer), py::arg("config"), py::arg("texts"), py::arg("module"), py::arg("batches"),
           py::arg("event"))
      .def("run",
           [](PythonTrainer& t) {
             TrainResult result;
             {
               py::gil_scoped_release release;
               result = t.trainer->run();
             }
             return std::make_tuple(result.steps, result.loss, result.eval_loss, result.stopped_by != 0);
           })
      .def("stop", [](PythonTrainer& t) { t.stop = true; });
});

}  // namespace
}  // namespace plumb::python
