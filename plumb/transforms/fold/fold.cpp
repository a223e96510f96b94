#include "plumb/transforms/fold/fold.h"

#include <ATen/ATen.h>

#include <cmath>

#include "plumb/core/error.h"
#include "plumb/core/table.h"
#include "plumb/graph/pass.h"
#include "plumb/tensors/parameter_tag.h"
#include "plumb/transforms/fold/fold_equations.h"
#include "plumb/transforms/formats/use_fp8.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

std::string number_text(double x) { return short_number(x, 6); }

class Folder {
 public:
  // `to_plain` false: the other way. The operators stay, and state and eps become those with which they compute the
  // plain graph's function.
  Folder(GraphModule& module, Report& report, bool to_plain)
      : module_(module), graph_(module.graph()), report_(report), to_plain_(to_plain), equations_(module, report) {}

  bool run() {
    multiply_operands();
    adjust_epsilons();
    if (to_plain_) replace_operators();
    divide_state();
    return changed_;
  }

 private:
  void multiply_operands() {
    for (const auto& [node, place, log] : equations_.remains()) {
      const double by = factor_of(equations_.value(log));
      Value* operand = node->input(place);
      for (const Value* written : node->written_inputs()) {
        if (written != operand) continue;
        throw Error(ErrorKind::Unsupported,
                    node->describe() + " writes into %" + operand->name() + ", whose factor would have to change there",
                    node->meta().where(), "run the pass functionalise first");
      }
      node->set_input(place, insert_call(graph_, node, "aten::mul.Tensor", {operand, by}, node, operand)->result());
      ReportEntry& entry = report_.add(ReportKind::Remains, node, "%" + operand->name() + " times " + number_text(by),
                                       "", "no parameter before it is free to take the factor");
      if (entry.node.empty()) entry.node = "output";
      changed_ = true;
    }
  }

  void adjust_epsilons() {
    for (const auto& [node, operand, epsilon] : equations_.epsilons()) {
      const double by = factor_of(-epsilon.power * equations_.value(equations_.factor(operand)));
      if (by == 1) continue;
      node->set_arg(epsilon.argument, epsilon.value * by);
      report_.add(ReportKind::Replaced, node, "eps " + number_text(epsilon.value),
                  "eps " + number_text(epsilon.value * by), "what it stands beside has another factor");
      changed_ = true;
    }
  }

  static bool only_observes(const Node* node) {
    const std::string_view name = node->op_name();
    return node->num_results() == 1 && (name == "plumb::quantise" || name == "plumb::simulate_format" ||
                                        name == "plumb::track" || name == "plumb::track_rounded");
  }

  void replace_operators() {
    for (const auto& [node, holds_for] : equations_.unit_scaled()) {
      if (is_factor_alone(node)) {
        for (Value* result : node->results()) graph_.replace_all_uses_with(result, node->input(0));
        graph_.erase(node);
        continue;
      }
      Node* made;
      {
        auto here = graph_.inserting_before(node);
        made = build_plain(graph_, node);
      }
      report_.add(ReportKind::Replaced, node, node->target(), made->target(),
                  holds_for.empty() ? "" : "its factor holds for " + holds_for + " alone");
      graph_.replace_node(node, made);
    }
    changed_ = changed_ || !equations_.unit_scaled().empty();
    for (Node* node : graph_.nodes()) {
      if (!node->is_call() || !only_observes(node)) continue;
      report_.add(ReportKind::Replaced, node, node->target(), "", "it only rounds or measures");
      graph_.replace_all_uses_with(node->result(), node->args()[0].value());
      graph_.erase(node);
      changed_ = true;
    }
  }

  void divide_state() {
    at::NoGradGuard no_grad;
    bool divided = false;
    std::vector<Attr> attrs = module_.state().attrs();
    for (const Attr& attr : attrs) {
      if (!attr.tensor.defined()) continue;
      const FoldEquations::Parameter& parameter = equations_.parameter(attr.tensor);
      if (attr.name != parameter.names[0]) continue;
      if (!parameter.used) {
        if (attr.kind == AttrKind::Parameter)
          add(ReportKind::LeftAlone, parameter, "", "no operator of this graph uses it");
        continue;
      }
      const double by = std::exp(equations_.value(parameter.factor));
      if (by == 1) continue;
      const at::Tensor plain = attr.tensor.detach();
      const at::Tensor values =
          (to_plain_ ? plain.div(by) : plain.mul(by)).set_requires_grad(attr.tensor.requires_grad());
      if (!to_plain_) copy_tag(attr.tensor, values);
      for (const std::string& name : parameter.names) module_.state().set(name, values, attr.kind);
      add(ReportKind::Folded, parameter, (to_plain_ ? "divided by " : "multiplied by ") + number_text(by), "");
      divided = true;
    }
    if (divided) module_.sync_module();
    changed_ = changed_ || divided;
  }

  void add(ReportKind kind, const FoldEquations::Parameter& parameter, std::string from, const std::string& reason) {
    report_.add({.kind = kind,
                 .node = parameter.names[0],
                 .from = std::move(from),
                 .reason = reason + other_names(parameter.names)});
  }

  // Returns a scaled graph's tensor over the plain one's, or the inverse.
  double factor_of(double log) const { return std::exp(to_plain_ ? log : -log); }

  GraphModule& module_;
  Graph& graph_;
  Report& report_;
  const bool to_plain_;
  bool changed_ = false;
  FoldEquations equations_;
};

// Plain weights train at plain rates.
void untag_all(const GraphModule& module) {
  for (const Attr& attr : module.state()) untag(attr.tensor);
}

const RegisterTransform fold_pass{
    "fold",
    "Replaces unit-scaled operators by torch's, whose parameters take the factors over.",
    {},
    [](GraphModule& module, const PassOptions&, Report& report) {
      const bool changed = fold(module, &report);
      if (changed) untag_all(module);
      return changed;
    },
};

}  // namespace

bool fold(GraphModule& module, Report* report) {
  Report own("fold");
  const bool was_fp8 = drop_fp8(module);
  return Folder(module, report ? *report : own, true).run() || was_fp8;
}

std::shared_ptr<TransformedModule> fold(const std::shared_ptr<GraphModule>& module) {
  const GraphModule& given = not_null(module);
  auto result = std::make_shared<TransformedModule>(given.graph().clone(), given.state().deep_copy(), given.in_spec(),
                                                    given.out_spec());
  result->copy_mode(given);
  transformed(result, "fold", [](GraphModule& made, Report& report) { return fold(made, &report); });
  untag_all(*result);
  return result;
}

std::shared_ptr<TransformedModule> unit_scale_preserving(const std::shared_ptr<GraphModule>& module,
                                                         UnitScaleOptions options) {
  options.scale_parameters = false;
  auto result = unit_scale(module, options);
  result->state() = result->state().deep_copy();
  result->sync_module();
  Report& report = result->reports.back();
  run_checked("unit_scale", [&] { return Folder(*result, report, false).run(); }, *result);
  for (const auto& [name, data] : result->mup) {
    if (const Attr* attr = result->state().find(name)) tag(attr->tensor, data);
  }
  return result;
}

}  // namespace plumb
