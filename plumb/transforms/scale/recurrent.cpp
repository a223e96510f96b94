#include "plumb/transforms/scale/recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "plumb/operators/operator_facts.h"
#include "plumb/scaling/rules_recurrent.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

bool is_packed(const Node* node) { return node->target().ends_with(".data"); }

size_t parameters_per_cell(const Node* node) { return is_recurrent_cell(node) || !is_set(node, "has_biases") ? 2 : 4; }

class Scaler {
 public:
  Scaler(GraphModule& module, Node* node) : graph_(module.graph()), state_(module.state()), node_(node) {}

  double run(int64_t steps_of_cells) {
    const auto input = sizes_of(node_->arg(is_packed(node_) ? "data" : "input").value(), state_);
    double rows = 1;
    for (size_t i = 0; i + 1 < input.size(); ++i) rows *= static_cast<double>(input[i]);
    const int64_t steps = is_recurrent_cell(node_) ? steps_of_cells : sequence_length(input);
    if (is_recurrent_cell(node_)) rows *= static_cast<double>(steps);
    rule_ = rules::recurrent(node_->facts().recurrent, steps);
    rows_ = std::max(rows, 1.0);
    auto here = graph_.inserting_before(node_);
    const double at_input = is_recurrent_cell(node_) ? scale_cell() : scale_stack();
    scale_states();
    scale_outputs();
    return at_input;
  }

 private:
  int64_t sequence_length(const std::vector<int64_t>& input) const {
    if (is_packed(node_)) return sizes_of(node_->arg("batch_sizes").value(), state_)[0];
    return input.size() == 3 && is_set(node_, "batch_first") ? input[1] : input[0];
  }

  // Returns the value and its gradient times the factor.
  Value* scale_value(Value* value, double factor) {
    return with_meta(graph_.call("plumb::rescale", {value, factor, factor}), value);
  }
  Value* call(std::string_view op, Value* value, double factor) {
    return with_meta(graph_.call(op, {value, factor}), value);
  }
  Value* with_meta(Node* made, const Value* value) {
    made->meta() = node_->meta();
    made->result()->set_meta(value->meta());
    return made->result();
  }

  // The parameter times `forward`, its gradient times `backward`.
  void scale_parameter(Arg& arg, double forward, double backward) {
    if (!arg.is_value()) return;
    Value* value = call("plumb::scale_bwd", arg.value(), backward);
    arg = forward == 1 ? value : call("plumb::scale_fwd", value, forward);
  }

  // Scales one cell's parameters. at_state: root of the mean square of the gradients at its states. input_scale: scale
  // of its input. Returns the sum of the squares of the gradients that go to one input value.
  double scale_cell_parameters(std::span<Arg> parameters, double at_state, double input_scale) {
    const auto in = sizes_of(parameters[0].value(), state_), hidden = sizes_of(parameters[1].value(), state_);
    const double input_factor = std::sqrt((1 - rule_.state_share) / static_cast<double>(in[1])) / input_scale;
    const double hidden_factor = std::sqrt(rule_.state_share / static_cast<double>(hidden[1])) / rule_.hidden;
    const double summed = std::sqrt(rows_) * at_state;
    scale_parameter(parameters[0], input_factor, 1 / (summed * rule_.grad_input_gates * input_scale));
    scale_parameter(parameters[1], hidden_factor, 1 / (summed * rule_.grad_hidden_gates * rule_.hidden));
    if (parameters.size() > 2)
      scale_parameter(parameters[2], 1, 1 / (summed * rule_.bias_ratio * rule_.grad_input_gates));
    if (parameters.size() > 3)
      scale_parameter(parameters[3], 1, 1 / (summed * rule_.bias_ratio * rule_.grad_hidden_gates));
    const double gates = at_state * rule_.grad_input_gates * input_factor;
    return gates * gates * static_cast<double>(in[0]);
  }

  double scale_stack() {
    Arg::List parameters = node_->arg("params").list();
    const size_t each = parameters_per_cell(node_);
    const size_t directions = is_set(node_, "bidirectional") ? 2 : 1;
    const size_t layers = parameters.size() / (each * directions);
    const Arg& p = node_->arg("dropout");
    const double dropout = is_set(node_, "train") && p.constant().isDouble() ? p.constant().toDouble() : 0;
    double at_output = 1 / rule_.hidden;  // a unit gradient at the output, which is the state over its scale
    for (size_t layer = layers; layer-- > 0;) {
      // Dropout between layers keeps the mean and raises the mean square.
      const double input_scale = layer == 0 ? 1 : rule_.hidden / std::sqrt(1 - std::min(dropout, 0.99));
      double below = 0;
      for (size_t d = 0; d < directions; ++d) {
        const std::span<Arg> one(&parameters[(layer * directions + d) * each], each);
        below += scale_cell_parameters(one, at_output, input_scale);
      }
      at_output = std::sqrt(below / (layer == 0 ? 1 : 1 - std::min(dropout, 0.99)));
    }
    node_->set_arg("params", std::move(parameters));
    return at_output;
  }

  double scale_cell() {
    std::vector<Arg> parameters = {node_->arg("w_ih"), node_->arg("w_hh"), node_->arg("b_ih"), node_->arg("b_hh")};
    // The state comes in at scale rule.hidden like in a stack: scale_states() sees to it.
    const double below = scale_cell_parameters(parameters, 1 / rule_.hidden, 1);
    const char* names[] = {"w_ih", "w_hh", "b_ih", "b_hh"};
    for (size_t i = 0; i < 4; ++i) node_->set_arg(names[i], parameters[i]);
    return std::sqrt(below);
  }

  static bool is_zero(const Value* value) {
    const Node* maker = value->producer();
    return maker->is_op("aten::zeros") || maker->is_op("aten::zeros_like") || maker->is_op("aten::new_zeros");
  }

  void scale_states() {
    auto scaled = [&](const Arg& arg, double factor) -> Arg {
      if (!arg.is_value() || is_zero(arg.value())) return arg;
      return scale_value(arg.value(), factor);
    };
    const Arg& given = node_->arg("hx");
    if (!given.is_list()) return node_->set_arg("hx", scaled(given, rule_.hidden));
    Arg::List states = given.list();
    for (size_t i = 0; i < states.size(); ++i) states[i] = scaled(states[i], i == 0 ? rule_.hidden : rule_.cell);
    node_->set_arg("hx", std::move(states));
  }

  void scale_outputs() {
    auto here = graph_.inserting_after(node_);
    for (size_t i = node_->num_results(); i-- > 0;) {
      Value* result = node_->result(i);
      if (!result->has_uses()) continue;
      // lstm returns output, h and c; lstm_cell h and c; the others no c.
      const bool is_memory = node_->facts().recurrent == RecurrentLayer::Lstm && i + 1 == node_->num_results();
      Value* made = scale_value(result, 1 / (is_memory ? rule_.cell : rule_.hidden));
      graph_.replace_all_uses_with(result, made, made->producer());
    }
  }

  Graph& graph_;
  const State& state_;
  Node* node_;
  rules::Recurrent rule_;
  double rows_ = 1;
};

}  // namespace

bool is_recurrent_cell(const Node* node) { return node->facts().recurrent_cell; }

bool is_set(const Node* node, std::string_view argument) {
  const Arg& arg = node->arg(argument);
  return arg.is_constant() && arg.constant().isBool() && arg.constant().toBool();
}

bool is_recurrent(const Node* node) { return node->facts().recurrent != RecurrentLayer::None; }

RecurrentRole recurrent_role(const Node* node, const Value* value) {
  auto is = [value](const Arg& arg) { return arg.is_value() && arg.value() == value; };
  if (is_recurrent_cell(node)) {
    if (is(node->arg("w_ih")) || is(node->arg("w_hh"))) return RecurrentRole::Weight;
    return is(node->arg("b_ih")) || is(node->arg("b_hh")) ? RecurrentRole::Bias : RecurrentRole::Other;
  }
  const Arg& params = node->arg("params");
  for (size_t i = 0; params.is_list() && i < params.list().size(); ++i) {
    if (is(params.list()[i])) return i % parameters_per_cell(node) < 2 ? RecurrentRole::Weight : RecurrentRole::Bias;
  }
  return RecurrentRole::Other;
}

std::optional<std::string> operand_obstacle(const Node* node) {
  const auto are_values = [](const Arg& arg) {
    return arg.is_list() && std::ranges::all_of(arg.list(), [](const Arg& one) { return one.is_value(); });
  };
  const Arg& hx = node->arg("hx");
  const bool has_memory = node->facts().recurrent == RecurrentLayer::Lstm;
  if (has_memory ? !are_values(hx) || hx.list().size() != 2 : !hx.is_value())
    return "its states are no tensors of the graph";
  const bool cell = is_recurrent_cell(node);
  for (const char* name : {"input", "data", "batch_sizes", "w_ih", "w_hh"}) {
    const Arg* arg = node->try_arg(name);
    if (arg && !arg->is_value()) return "an operand is a constant";
  }
  if (cell) return std::nullopt;
  if (!are_values(node->arg("params"))) return "an operand is a constant";
  for (const char* name : {"num_layers", "dropout", "has_biases", "bidirectional", "batch_first", "train"}) {
    const Arg* arg = node->try_arg(name);
    if (arg && !arg->is_constant()) return std::string("its argument ") + name + " is computed";
  }
  const size_t given = node->arg("params").list().size(), each = parameters_per_cell(node);
  const int64_t layers = node->arg("num_layers").constant().toInt();
  const bool possible = layers > 0 && static_cast<size_t>(layers) <= given;
  const size_t cells = possible ? static_cast<size_t>(layers) * (is_set(node, "bidirectional") ? 2 : 1) : 0;
  if (given == 0 || (given != cells * each && given != cells * (each + 1)))
    return "its weights are not those of its layers";
  return std::nullopt;
}

std::optional<std::string> recurrent_obstacle(const Node* node, const State& state) {
  if (auto why = operand_obstacle(node)) return why;
  const bool cell = is_recurrent_cell(node);
  const Arg::List weights =
      cell ? Arg::List{node->arg("w_ih"), node->arg("w_hh")} : Arg::List(node->arg("params").list());
  const size_t each = parameters_per_cell(node), directions = !cell && is_set(node, "bidirectional") ? 2 : 1;
  const int64_t layers = cell ? 1 : node->arg("num_layers").constant().toInt();
  if (weights.size() != each * directions * static_cast<size_t>(layers))
    return "its states are projected, which no rule covers";
  for (size_t i = 0; i < weights.size(); ++i) {
    const Node* maker = weights[i].value()->producer();
    if (maker->is_op("plumb::scale_fwd") || maker->is_op("plumb::scale_bwd")) return "its weights have factors already";
    const size_t dims = sizes_of(weights[i].value(), state).size();
    if (dims == 0 || (i % each < 2 && dims != 2)) return "the sizes of its weights are not known";
  }
  if (is_packed(node) && sizes_of(node->arg("batch_sizes").value(), state).empty())
    return "its number of steps is not known";
  if (sizes_of(node->arg(is_packed(node) ? "data" : "input").value(), state).empty())
    return "its number of steps is not known";
  return std::nullopt;
}

double scale_recurrent(GraphModule& module, Node* node, int64_t steps) { return Scaler(module, node).run(steps); }

}  // namespace plumb
