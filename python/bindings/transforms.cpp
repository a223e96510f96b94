// The transforms, in place on an engine, with their reports.
#include "module.h"
#include "plumb/graph/node_kind.h"
#include "plumb/graph/pass.h"
#include "plumb/scaling/fp8_recipes.h"
#include "plumb/scaling/optim.h"
#include "plumb/transforms/fold/fold.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/formats/use_fp8.h"
#include "plumb/transforms/scale/unit_scale.h"
#include "plumb/transforms/track/scale_causes.h"
#include "plumb/transforms/track/track_scales.h"
#include "plumb/transforms/vocabulary/split_vocabulary.h"
#include "report.h"

namespace plumb::python {
namespace {

using Replacements = std::vector<std::pair<std::string, std::string>>;
// tau_attention, tau_mlp, depth_rule, residual_mult, residual_attn_ratio
using Residuals = std::tuple<double, double, bool, double, double>;

UnitScaleOptions scale_options(const Replacements& replace, const Residuals& residuals) {
  UnitScaleOptions options;
  for (const auto& [from, to] : replace) options.replace.push_back({from, to, {}});
  bool depth_rule = false;
  std::tie(options.tau_attention, options.tau_mlp, depth_rule, options.residual_mult, options.residual_attn_ratio) =
      residuals;
  if (depth_rule) options.tau_rule = TauRule::Depth;
  return options;
}

// Runs a pass and returns the report that it has filled.
template <typename F>
py::dict reported(const char* pass, GraphModule& engine, const F& run) {
  Report report(pass);
  run_checked(pass, [&] { return run(&report); }, engine);
  return to_python(report);
}

std::pair<std::shared_ptr<GraphModule>, py::dict> with_report(const std::shared_ptr<TransformedModule>& made) {
  return {made, to_python(made->reports.back())};
}

// Tags as Python has them: (type, depth or None, fan-in or None).
using Tag = std::tuple<std::string, std::optional<int64_t>, std::optional<int64_t>>;
Tag to_python(const ParameterData& data) {
  return {std::string(to_string(data.type)), data.scaling_depth, data.fan_in};
}
ParameterData to_engine(const Tag& tag) {
  return {mup_type_from(std::get<0>(tag)), std::get<1>(tag), std::get<2>(tag)};
}

// The report, and the tag of every parameter by its name.
py::tuple scale(GraphModule& engine, const Replacements& replace, const Residuals& residuals, ParameterScaling* live,
                std::map<std::string, bool> keep) {
  UnitScaleOptions options = scale_options(replace, residuals);
  options.live = live;
  options.scale_parameters = live != nullptr;
  options.keep = std::move(keep);
  MupTable mup;
  const py::dict report =
      reported("unit_scale", engine, [&](Report* r) { return unit_scale(engine, options, r, &mup); });
  engine.sync_module();
  std::vector<std::pair<std::string, Tag>> tags;
  for (const auto& [name, data] : mup) tags.emplace_back(name, to_python(data));
  return py::make_tuple(report, tags);
}

// `recipe`: the text of a file, or "": fwd and bwd.
py::dict simulate(GraphModule& engine, const std::string& fwd, const std::string& bwd,
                  const std::vector<std::string>& operators, const std::vector<std::string>& exclude,
                  const std::string& recipe) {
  if (!recipe.empty())
    return reported("simulate_format", engine,
                    [&](Report* r) { return apply_recipe(engine, parse_recipe(recipe), r); });
  const SimulateFormatOptions options{.fwd = fwd, .bwd = bwd, .operators = operators, .exclude = exclude};
  return reported("simulate_format", engine, [&](Report* r) { return simulate_format(engine, options, r); });
}

py::dict fp8(GraphModule& engine, const std::string& fwd, const std::string& bwd, const std::string& kernel,
             const std::string& recipe, int64_t history, const std::vector<std::string>& operators,
             const std::vector<std::string>& exclude, const std::string& formats) {
  const UseFp8Options options{fwd, bwd, kernel, operators, exclude, recipe, history};
  return reported("use_fp8", engine, [&](Report* r) {
    return formats.empty() ? use_fp8(engine, options, r) : use_fp8(engine, parse_recipe(formats), options, r);
  });
}

// The fields of plumb.transforms.Metrics.Data, the last one {exponent: count} or None.
py::tuple data_of(const Metrics::Data& d) {
  std::optional<std::map<int, int64_t>> histogram;
  if (d.histogram) {
    histogram.emplace();
    for (int i = 0; i < 256; ++i) {
      if (const auto count = d.histogram->counts[static_cast<size_t>(i)]) histogram->emplace(i - 127, count);
    }
  }
  return py::make_tuple(d.mean_abs, d.abs_mean, d.std, d.abs_max, d.abs_min, d.numel, histogram);
}

py::list scales(const GraphModule& engine, const std::shared_ptr<ScaleTracker>& tracker) {
  auto module = derive(engine);
  module->tracker = tracker;
  const ScalesGraph graph = scales_graph(*module);
  py::list nodes;
  for (const ScaleNode& node : graph.nodes) {
    std::vector<std::string> inputs;
    for (size_t i : node.inputs) inputs.push_back(graph.nodes[i].name);
    auto data = [](const Metrics::Data* d) { return d ? py::object(data_of(*d)) : py::none(); };
    const Metrics* m = node.metrics ? &*node.metrics : nullptr;
    nodes.append(py::dict("name"_a = node.name, "kind"_a = to_string(node.kind), "target"_a = node.target,
                          "inputs"_a = inputs, "module"_a = node.module, "source"_a = node.source,
                          "requires_grad"_a = node.requires_grad, "fwd"_a = data(m ? &m->fwd : nullptr),
                          "bwd"_a = data(m && m->bwd ? &*m->bwd : nullptr)));
  }
  return nodes;
}

// `said`: (value, reason) of what unit_scale reported of operators.
py::list causes(const GraphModule& engine, const std::shared_ptr<ScaleTracker>& tracker,
                const std::vector<std::pair<std::string, std::string>>& said, double low, double high) {
  auto module = derive(engine);
  module->tracker = tracker;
  Report report("unit_scale");
  for (const auto& [node, reason] : said) report.add({.kind = ReportKind::LeftAlone, .node = node, .reason = reason});
  auto names = [](const std::vector<std::string>& of) {
    py::list list;
    for (const std::string& name : of) list.append(readable(name));
    return list;
  };
  py::list result;
  for (const ScaleCause& c : scale_causes(scales_graph(*module), {report}, low, high)) {
    result.append(py::dict("gradients"_a = c.gradients, "small"_a = c.small, "target"_a = c.target,
                           "reason"_a = readable(c.reason), "factor"_a = c.factor, "least"_a = c.least,
                           "most"_a = c.most, "nodes"_a = names(c.nodes), "tensors"_a = names(c.tensors),
                           "text"_a = readable(to_text({c}))));
  }
  return result;
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
      .def(
          "propose",
          [](ParameterScaling& s, const std::vector<Proposal>& given) {
            std::vector<ParameterScaling::Proposal> proposals;
            for (const auto& [names, parameter, kind] : given) {
              proposals.push_back({names, parameter, {}});
              if (kind) proposals.back().kind = *kind == "bias" ? ScaledKind::Bias : ScaledKind::Weight;
            }
            return s.propose(proposals);
          },
          py::arg("parameters"))
      .def("mark_changed", &ParameterScaling::mark_changed, py::arg("name"))
      .def("rename", &ParameterScaling::rename, py::arg("before"), py::arg("now"))
      .def("give_back", &ParameterScaling::give_back, py::arg("names"), py::arg("tensor"))
      .def("freeze", &ParameterScaling::freeze, py::arg("by"))
      .def("look_at", &ParameterScaling::look_at, py::arg("name"), py::arg("tensor"), py::arg("buffer"))
      .def("__deepcopy__", [](const ParameterScaling& s, const py::dict&) { return s.for_copy(); })
      .def(py::pickle([](const ParameterScaling& s) { return py::make_tuple(s.scaled(), s.confirmed(), s.changed()); },
                      [](const py::tuple& t) {
                        return ParameterScaling::restore(t[0].cast<std::vector<ParameterScaling::Saved>>(),
                                                         t[1].cast<std::vector<std::string>>(),
                                                         t[2].cast<std::map<std::string, bool>>());
                      }));
}

Register transforms_part([](py::module_& m) {
  m.def(
      "join_vocabulary",
      [](const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
        State state;
        for (const auto& [name, tensor] : tensors) state.add({name, AttrKind::Parameter, tensor});
        std::vector<std::pair<std::string, at::Tensor>> joined;
        for (const Attr& attr : join_vocabulary(state)) joined.emplace_back(attr.name, attr.tensor);
        return joined;
      },
      py::arg("tensors"));
  bind_parameter_scaling(m);
  m.def("unit_scale", &scale, py::arg("module"), py::arg("replace"), py::arg("residuals"), py::arg("scaling"),
        py::arg("keep"));
  m.def(
      "unit_scale_preserving",
      [](const std::shared_ptr<GraphModule>& engine, const Replacements& replace, const Residuals& residuals) {
        return with_report(unit_scale_preserving(engine, scale_options(replace, residuals)));
      },
      py::arg("module"), py::arg("replace"), py::arg("residuals"));
  m.def(
      "fold", [](const std::shared_ptr<GraphModule>& engine) { return with_report(fold(engine)); }, py::arg("module"));
  m.def(
      "tag", [](const at::Tensor& parameter, const Tag& data) { tag(parameter, to_engine(data)); },
      py::arg("parameter"), py::arg("tag"));
  m.def(
      "tag_of",
      [](const at::Tensor& parameter) {
        const auto data = parameter_data(parameter);
        return data ? std::optional(to_python(*data)) : std::nullopt;
      },
      py::arg("parameter"));
  m.def(
      "lr_scale",
      [](const Tag& data, const std::vector<int64_t>& sizes, const std::optional<std::string>& readout_constraint) {
        return optim::lr_scale_func_sgd(readout_constraint)(to_engine(data), sizes);
      },
      py::arg("tag"), py::arg("sizes"), py::arg("readout_constraint"));
  m.def("simulate_format", &simulate, py::arg("module"), py::arg("fwd_format"), py::arg("bwd_format"),
        py::arg("operators"), py::arg("exclude"), py::arg("recipe") = "");
  m.def("use_fp8", &fp8, py::arg("module"), py::arg("fwd_format"), py::arg("bwd_format"), py::arg("kernel"),
        py::arg("recipe"), py::arg("history"), py::arg("operators"), py::arg("exclude"), py::arg("formats") = "");
  m.def(
      "read_recipe",
      [](const std::string& recipe) {
        return (recipe.find('\n') == std::string::npos ? read_recipe(recipe) : parse_recipe(recipe)).to_toml();
      },
      py::arg("recipe"), "A recipe's file text, of a name, a file or such a text.");
  m.def(
      "check_fp8",
      [](const std::string& fwd, const std::string& bwd, const std::string& kernel, const std::string& recipe,
         int64_t history) { check(UseFp8Options{fwd, bwd, kernel, {}, {}, recipe, history}); },
      py::arg("fwd_format"), py::arg("bwd_format"), py::arg("kernel"), py::arg("recipe"), py::arg("history"));
  m.def("delayed_fp8_state", &delayed_state, py::arg("history"), py::arg("device"));
  py::class_<ScaleTracker, std::shared_ptr<ScaleTracker>>(m, "ScaleTracker")
      .def(py::init([](bool histogram) { return ScaleTracker::create({.histogram = histogram}); }),
           py::arg("histogram") = false);
  m.def(
      "track_scales",
      [](GraphModule& engine, ScaleTracker& tracker) {
        return reported("track_scales", engine, [&](Report* r) { return track_scales(engine, tracker, r); });
      },
      py::arg("module"), py::arg("tracker"));
  m.def("scales_graph", &scales, py::arg("module"), py::arg("tracker"));
  m.def("scale_causes", &causes, py::arg("module"), py::arg("tracker"), py::arg("said"), py::arg("low"),
        py::arg("high"));
  m.def("prune", &prune, py::arg("how"), py::arg("nodes"), py::arg("rtol") = 0.0);
  m.def("measure", [](const at::Tensor& x) { return data_of(Metrics::Data::of(measure(x))); }, py::arg("tensor"));
});

}  // namespace
}  // namespace plumb::python
