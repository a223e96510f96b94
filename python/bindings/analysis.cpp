// The recorder and its histories.
#include <pybind11/numpy.h>

#include "module.h"
#include "plumb/recording/event_file.h"
#include "plumb/recording/recorder.h"
#include "plumb/tensors/run_rows.h"

namespace plumb::python {
namespace {

// A column of all rows of all steps.
template <class T, class Get>
py::array_t<T> column(const History& history, const Get& get) {
  size_t count = 0;
  for (const HistoryStep& step : history.steps) count += step.rows.size();
  py::array_t<T> out(static_cast<py::ssize_t>(count));
  T* to = out.mutable_data();
  for (const HistoryStep& step : history.steps) {
    for (const HistoryRow& row : step.rows) *to++ = static_cast<T>(get(step, row));
  }
  return out;
}

py::array_t<double> statistic(const History& history, const std::string& name) {
  const Statistic wanted = Statistic::parse(name);
  return column<double>(history, [&](const HistoryStep&, const HistoryRow& row) { return row.value(wanted); });
}

py::dict columns(const History& h) {
  using Row = const HistoryRow&;
  using Step = const HistoryStep&;
  py::dict out;
  out["step"] = column<int64_t>(h, [](Step s, Row) { return s.step; });
  out["tensor"] = column<int64_t>(h, [](Step, Row r) { return r.tensor; });
  out["backward"] = column<bool>(h, [](Step, Row r) { return r.backward; });
  out["by_condition"] = column<bool>(h, [](Step, Row r) { return r.by_condition; });
  for (const char* name :
       {"mean_abs", "abs_mean", "std", "abs_max", "abs_min", "numel", "nan_count", "inf_count", "zero_count"})
    out[name] = statistic(h, name);
  return out;
}

// [rows, 256]; rows without one are -1 throughout.
py::array_t<int64_t> histograms(const History& history) {
  size_t count = 0;
  for (const HistoryStep& step : history.steps) count += step.rows.size();
  py::array_t<int64_t> out({static_cast<py::ssize_t>(count), py::ssize_t{256}});
  int64_t* to = out.mutable_data();
  for (const HistoryStep& step : history.steps) {
    for (const HistoryRow& row : step.rows) {
      if (row.data.histogram) {
        std::copy(row.data.histogram->counts.begin(), row.data.histogram->counts.end(), to);
      } else {
        std::fill(to, to + 256, -1);
      }
      to += 256;
    }
  }
  return out;
}

py::list events(const History& history) {
  py::list out;
  for (const HistoryEvent& e : history.events) {
    py::list first;
    for (const auto& c : e.first) {
      first.append(py::dict("tensor"_a = history.tensors[c.tensor].name,
                            "direction"_a = c.backward ? "backward" : "forward", "value"_a = c.value));
    }
    out.append(py::dict("step"_a = e.step, "rule"_a = e.rule, "condition"_a = e.condition, "count"_a = e.count,
                        "first"_a = first));
  }
  return out;
}

// Closed by name: forwards and graphs that still know it neither keep its file open nor are measured.
struct PythonRecorder {
  explicit PythonRecorder(std::unique_ptr<Recorder> recorder) : open(std::move(recorder)) {}
  Recorder& get() {
    if (!open) throw Error(ErrorKind::InvalidState, "the recorder is closed", "", "make another with append=True");
    return *open;
  }
  std::unique_ptr<Recorder> open;
};

Register analysis_part([](py::module_& m) {
  py::class_<RecordRules>(m, "RecordRules")
      .def_static(
          "load", [](const std::string& path) { return RecordRules::load(path); }, py::arg("path"))
      .def_static("everything", &RecordRules::everything, py::arg("every"))
      .def_readonly("text", &RecordRules::text);
  py::class_<PythonRecorder>(m, "Recorder")
      .def(py::init([](const RecordRules& rules, const std::string& path, bool append, bool part) {
             const RecorderOptions options{.append = append, .part = part};
             return std::make_unique<PythonRecorder>(std::make_unique<Recorder>(rules, path, options));
           }),
           py::arg("rules"), py::arg("path"), py::arg("append"), py::arg("part"))
      .def(
          "attach",
          [](PythonRecorder& r, GraphModule& module, int64_t stage) {
            if (r.open) r.open->attach(module, stage);
          },
          py::arg("module"), py::arg("stage"))
      .def(
          "step", [](PythonRecorder& r, const Recorder::Scalars& scalars) { return r.get().step(scalars); },
          py::arg("scalars"))
      .def(
          "add_hash",
          [](PythonRecorder& r, const std::string& name, const std::string& kind, const at::Tensor& values,
             int64_t stage) { r.get().add_hash({.name = name, .operation = kind, .stage = stage}, values); },
          py::arg("name"), py::arg("kind"), py::arg("values"), py::arg("stage"))
      .def("written", [](PythonRecorder& r) { return r.get().written(); })
      .def("current_step", [](PythonRecorder& r) { return r.get().current_step(); })
      .def(
          "set_enabled",
          [](PythonRecorder& r, bool enabled) {
            if (r.open) r.open->set_enabled(enabled);
          },
          py::arg("enabled"))
      .def("enabled", [](PythonRecorder& r) { return r.open && r.open->enabled(); })
      .def("close", [](PythonRecorder& r) { r.open.reset(); });
  m.def("run_microbatch", [](int64_t number, const py::function& forward) -> py::object {
    if (running_rows()) return forward();  // a pipeline knows more
    const RunningRows running({number, 0});
    return forward();
  });
  py::class_<EventFile>(m, "EventFile")
      .def(py::init<const std::string&>(), py::arg("folder"))
      .def(
          "add",
          [](EventFile& file, int64_t step, const std::vector<std::pair<std::string, double>>& scalars,
             const std::map<std::string, std::pair<std::vector<double>, std::vector<double>>>& histograms) {
            std::vector<EventFile::Histogram> all;
            for (const auto& [tag, bins] : histograms) all.push_back({tag, bins.second, bins.first});
            file.add(step, scalars, all);
          },
          py::arg("step"), py::arg("scalars"), py::arg("histograms"),
          "A step's numbers, and counts and edges of histograms, by their tags.");
  py::class_<History>(m, "History")
      .def_readonly("rules", &History::rules)
      .def_readonly("torn_bytes", &History::torn_bytes)
      .def("tensors",
           [](const History& history) {
             py::list out;
             auto known = [](int64_t n) { return n < 0 ? std::nullopt : std::optional(n); };
             for (const HistoryTensor& t : history.tensors) {
               out.append(py::dict("name"_a = t.name, "module"_a = t.module, "operator"_a = t.operation,
                                   "dtype"_a = t.dtype, "sizes"_a = py::tuple(py::cast(t.sizes)),
                                   "stage"_a = known(t.stage), "rank"_a = known(t.rank)));
             }
             return out;
           })
      .def("scalars",
           [](const History& history) {
             std::vector<std::tuple<int64_t, std::string, double>> out;
             for (const HistoryScalars& s : history.scalars) {
               for (const auto& [name, value] : s.values) out.emplace_back(s.step, name, value);
             }
             return out;
           })
      .def("hashes",
           [](const History& history) {
             std::vector<std::tuple<int64_t, uint32_t, bool, uint64_t, int64_t>> out;
             for (const HistoryHashes& step : history.hashes)
               for (const HistoryHash& h : step.hashes)
                 out.emplace_back(step.step, h.tensor, h.backward, h.hash, h.first);
             return out;
           })
      .def("columns", &columns)
      .def("histograms", &histograms)
      .def("statistic", &statistic, py::arg("name"))
      .def("events", &events);
  m.def("read_history", [](const std::string& path) { return read_history(path); }, py::arg("path"));
});

}  // namespace
}  // namespace plumb::python
