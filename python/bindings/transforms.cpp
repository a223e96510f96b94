// The transforms, in place on an engine, with their reports as JSON.
#include "convert.h"
#include "module.h"
#include "plumb/graph/pass.h"
#include "plumb/scaling/fp8_delayed.h"
#include "plumb/transforms/fold.h"
#include "plumb/transforms/simulate_format.h"
#include "plumb/transforms/track_scales.h"
#include "plumb/transforms/unit_scale.h"
#include "plumb/transforms/use_fp8.h"

namespace plumb::python {
namespace {

UnitScaleOptions scale_options(const std::vector<std::pair<std::string, std::string>>& replace, double tau_attention,
                               double tau_mlp, bool depth_rule, double residual_mult, double residual_attn_ratio) {
  UnitScaleOptions options;
  for (const auto& [from, to] : replace) options.replace.push_back({from, to, {}});
  options.tau_attention = tau_attention;
  options.tau_mlp = tau_mlp;
  options.tau_rule = depth_rule ? TauRule::Depth : TauRule::Fixed;
  options.residual_mult = residual_mult;
  options.residual_attn_ratio = residual_attn_ratio;
  return options;
}

// The report as JSON, and for every parameter what an optimiser must know: (name, type, depth or None).
py::tuple scale(GraphModule& engine, const std::vector<std::pair<std::string, std::string>>& replace,
                double tau_attention, double tau_mlp, bool depth_rule, double residual_mult, double residual_attn_ratio,
                ParameterScaling* live, std::map<std::string, bool> keep) {
  UnitScaleOptions options =
      scale_options(replace, tau_attention, tau_mlp, depth_rule, residual_mult, residual_attn_ratio);
  options.live = live;
  options.scale_parameters = live != nullptr;
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

std::string fp8(GraphModule& engine, const std::string& fwd, const std::string& bwd, const std::string& kernel,
                const std::vector<std::string>& operators, const std::vector<std::string>& exclude,
                const std::string& recipe, int64_t history) {
  Report report("use_fp8");
  const UseFp8Options options{fwd, bwd, kernel, operators, exclude, recipe, history};
  run_checked("use_fp8", [&] { return use_fp8(engine, options, &report); }, engine);
  return report.to_json();
}

// The fields of plumb.transforms.Metrics.Data, the last one {exponent: count} or None.
py::tuple data_of(const Metrics::Data& d) {
  py::object histogram = py::none();
  if (d.histogram) {
    py::dict counts;
    for (int i = 0; i < 256; ++i) {
      if (const auto count = d.histogram->counts[static_cast<size_t>(i)]) counts[py::int_(i - 127)] = count;
    }
    histogram = counts;
  }
  return py::make_tuple(d.mean_abs, d.abs_mean, d.std, d.abs_max, d.abs_min, d.numel, histogram);
}

py::list scales(const GraphModule& engine, const std::shared_ptr<ScaleTracker>& tracker) {
  auto module = derive(engine);
  module->tracker = tracker;
  const ScalesGraph graph = scales_graph(*module);
  py::list nodes;
  for (const ScaleNode& node : graph.nodes) {
    py::list inputs;
    for (size_t i : node.inputs) inputs.append(graph.nodes[i].name);
    py::dict d;
    d["name"] = node.name;
    d["kind"] = to_string(node.kind);
    d["target"] = node.target;
    d["inputs"] = inputs;
    d["module"] = node.module;
    d["source"] = node.source;
    d["requires_grad"] = node.requires_grad;
    d["fwd"] = node.metrics ? py::object(data_of(node.metrics->fwd)) : py::none();
    d["bwd"] = node.metrics && node.metrics->bwd ? py::object(data_of(*node.metrics->bwd)) : py::none();
    nodes.append(d);
  }
  return nodes;
}

// The nodes that stay: which one, and its inputs as (place among its inputs before, node).
using PrunedNodes = std::vector<std::pair<size_t, std::vector<std::pair<size_t, size_t>>>>;

// `nodes`: of a torch.fx graph, each (inputs, is a floating-point tensor, is the output, is selected, mean absolute
// value of the tensor and of its gradient).
PrunedNodes prune(const std::string& how, const py::list& nodes, double rtol) {
  ScalesGraph graph;
  std::vector<bool> selected;
  for (py::handle h : nodes) {
    const auto [inputs, is_float, is_output, chosen, fwd, bwd] =
        h.cast<std::tuple<std::vector<size_t>, bool, bool, bool, std::optional<double>, std::optional<double>>>();
    ScaleNode node;
    node.name = std::to_string(graph.nodes.size());
    node.kind = is_output ? NodeKind::Output : NodeKind::CallFunction;
    node.inputs = inputs;
    node.is_float_tensor = is_float;
    if (fwd) {
      node.metrics.emplace().fwd.mean_abs = *fwd;
      if (bwd) node.metrics->bwd.emplace().mean_abs = *bwd;
    }
    selected.push_back(chosen);
    graph.nodes.push_back(std::move(node));
  }
  const ScalesGraph pruned =
      how == "same_scale" ? prune_same_scale_tensors(graph, rtol)
      : how == "non_float"
          ? prune_non_float_tensors(graph)
          : prune_selected_nodes(graph, [&](const ScaleNode& n) { return selected[std::stoul(n.name)]; });
  PrunedNodes result;
  for (const ScaleNode& node : pruned.nodes) {
    auto& inputs = result.emplace_back(std::stoul(node.name), PrunedNodes::value_type::second_type()).second;
    for (size_t k = 0; k < node.inputs.size(); ++k)
      inputs.emplace_back(node.places[k], std::stoul(pruned.nodes[node.inputs[k]].name));
  }
  return result;
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
      .def("mark_changed", &ParameterScaling::mark_changed)
      .def("look_at", &ParameterScaling::look_at)
      .def("__deepcopy__", [](const ParameterScaling& s, const py::dict&) { return s.for_copy(); })
      .def(py::pickle([](const ParameterScaling& s) { return py::make_tuple(s.scaled(), s.confirmed(), s.changed()); },
                      [](const py::tuple& t) {
                        using Changed = std::map<std::string, bool>;
                        return ParameterScaling::restore(t[0].cast<std::vector<ParameterScaling::Saved>>(),
                                                         t[1].cast<std::vector<std::string>>(),
                                                         t.size() > 2 ? t[2].cast<Changed>() : Changed());
                      }));
}

Register transforms_part([](py::module_& m) {
  bind_parameter_scaling(m);
  m.def("unit_scale", &scale);
  m.def("unit_scale_preserving",
        [](const std::shared_ptr<GraphModule>& engine, const std::vector<std::pair<std::string, std::string>>& replace,
           double tau_attention, double tau_mlp, bool depth_rule, double residual_mult, double residual_attn_ratio) {
          const auto scaled = unit_scale_preserving(
              engine, scale_options(replace, tau_attention, tau_mlp, depth_rule, residual_mult, residual_attn_ratio));
          return py::make_tuple(std::static_pointer_cast<GraphModule>(scaled), scaled->reports.back().to_json());
        });
  m.def("fold", [](const std::shared_ptr<GraphModule>& engine) {
    auto folded = fold(engine);
    return py::make_tuple(std::static_pointer_cast<GraphModule>(folded), folded->reports.back().to_json());
  });
  m.def("tag", [](const at::Tensor& parameter, const std::string& type, std::optional<int64_t> depth) {
    tag(parameter, {mup_type_from(type), depth});
  });
  m.def("tag_of", [](const at::Tensor& parameter) -> py::object {
    const auto data = parameter_data(parameter);
    if (!data) return py::none();
    return py::make_tuple(std::string(to_string(data->type)), data->scaling_depth);
  });
  m.def("simulate_format", &simulate);
  m.def("use_fp8", &fp8);
  m.def("check_fp8",
        [](const std::string& fwd, const std::string& bwd, const std::string& kernel, const std::string& recipe,
           int64_t history) { check(UseFp8Options{fwd, bwd, kernel, {}, {}, recipe, history}); });
  m.def("delayed_fp8_state", &delayed_state);
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
  m.def("prune", &prune, py::arg("how"), py::arg("nodes"), py::arg("rtol") = 0.0);
  m.def(
      "measure",
      [](const at::Tensor& x, bool histogram) { return data_of(Metrics::Data::of(measure(x, {histogram}))); },
      py::arg("x"), py::arg("histogram") = false);
});

}  // namespace
}  // namespace plumb::python
