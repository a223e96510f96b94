// The transforms, in place on an engine, with their reports as JSON.
#include "convert.h"
#include "module.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/simulate_format.h"
#include "plumb/transforms/track_scales.h"
#include "plumb/transforms/unit_scale.h"

namespace plumb::python {
namespace {

// The report as JSON, and for every parameter what an optimiser must know: (name, type, depth or None).
py::tuple scale(GraphModule& engine, const std::vector<std::pair<std::string, std::string>>& replace,
                double tau_attention, double tau_mlp, bool depth_rule, double residual_mult, double residual_attn_ratio,
                ParameterScaling& live, std::set<std::string> keep) {
  UnitScaleOptions options;
  for (const auto& [from, to] : replace) options.replace.push_back({from, to, {}});
  options.tau_attention = tau_attention;
  options.tau_mlp = tau_mlp;
  options.tau_rule = depth_rule ? TauRule::Depth : TauRule::Fixed;
  options.residual_mult = residual_mult;
  options.residual_attn_ratio = residual_attn_ratio;
  options.live = &live;
  options.keep = std::move(keep);
  Report report("unit_scale");
  MupTable mup;
  run_checked("unit_scale", [&] { return unit_scale(engine, options, &report, &mup); }, engine);
  engine.sync_module();
  py::list tags;
  for (const auto& [name, data] : mup)
    tags.append(py::make_tuple(name, std::string(to_string(data.type)), data.scaling_depth));
  return py::make_tuple(report.to_json(), tags);
}

std::string simulate(GraphModule& engine, const std::string& fwd, const std::string& bwd,
                     const std::vector<std::string>& operators, const std::vector<std::string>& exclude) {
  SimulateFormatOptions options;
  options.fwd = fwd;
  options.bwd = bwd;
  options.operators = operators;
  options.exclude = exclude;
  Report report("simulate_format");
  run_checked("simulate_format", [&] { return simulate_format(engine, options, &report); }, engine);
  return report.to_json();
}

std::string scales(const GraphModule& engine, const std::shared_ptr<ScaleTracker>& tracker) {
  auto module = derive(engine);
  module->tracker = tracker;
  return scales_graph(*module).to_json();
}

void bind_parameter_scaling(py::module_& m) {
  // Proposals are (names, parameter, "weight", "bias" or None).
  using Proposal = std::tuple<std::vector<std::string>, at::Tensor, std::optional<std::string>>;
  py::class_<ParameterScaling>(m, "ParameterScaling")
      .def(py::init<>())
      .def("propose",
           [](ParameterScaling& s, const std::vector<Proposal>& given) {
             std::vector<ParameterScaling::Proposal> proposals;
             for (const auto& [names, parameter, kind] : given) {
               proposals.push_back({names, parameter, {}});
               if (kind) proposals.back().kind = *kind == "bias" ? ScaledKind::Bias : ScaledKind::Weight;
             }
             return s.propose(proposals);
           })
      .def("__deepcopy__", [](const ParameterScaling& s, const py::dict&) { return s.for_copy(); })
      .def(py::pickle([](const ParameterScaling& s) { return py::make_tuple(s.scaled(), s.confirmed()); },
                      [](const py::tuple& t) {
                        return ParameterScaling::restore(t[0].cast<std::vector<ParameterScaling::Saved>>(),
                                                         t[1].cast<std::vector<std::string>>());
                      }));
}

Register transforms_part([](py::module_& m) {
  bind_parameter_scaling(m);
  m.def("unit_scale", &scale);
  m.def("simulate_format", &simulate);
  py::class_<ScaleTracker, std::shared_ptr<ScaleTracker>>(m, "ScaleTracker")
      .def(py::init([](bool histogram) { return ScaleTracker::create({.histogram = histogram}); }),
           py::arg("histogram") = false)
      .def("clear", &ScaleTracker::clear)
      .def("set_enabled", &ScaleTracker::set_enabled);
  m.def("track_scales", [](GraphModule& engine, ScaleTracker& tracker) {
    Report report("track_scales");
    run_checked("track_scales", [&] { return track_scales(engine, tracker, &report); }, engine);
    return report.to_json();
  });
  m.def("scales_graph", &scales);
});

}  // namespace
}  // namespace plumb::python
