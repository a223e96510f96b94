#include "plumb/transforms/scale/added_bias.h"

#include <algorithm>
#include <cmath>

#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

bool is_bias(const Value* value, const State& state) {
  const Attr* parameter = source_parameter(value, state);
  return parameter && parameter->tensor.dim() > 0 &&
         std::ranges::count(parameter->tensor.sizes(), 1) + 1 >= parameter->tensor.dim();
}

}  // namespace

bool scale_added_bias(GraphModule& module, Node* add, Report& report) {
  const State& state = module.state();
  for (const size_t operand : {0, 1}) {
    Value *bias = add->input(operand), *other = add->input(1 - operand);
    if (!is_bias(bias, state) || is_bias(other, state)) continue;
    const auto elements = [&](const Value* value) {
      return static_cast<double>(c10::multiply_integers(sizes_of(value, state)));
    };
    const double expanded = elements(other) / elements(bias);
    if (!(expanded > 1)) continue;
    report.add(ReportKind::LeftAlone, add, add->target(), "", "it adds a bias");
    Node* scaled =
        insert_call(module.graph(), add, "plumb::scale_bwd", {bias, 1 / std::sqrt(expanded)}, bias->producer(), bias);
    add->set_input(operand, scaled->result());
    return true;
  }
  return false;
}

}  // namespace plumb
