#include "plumb/transforms/formats/recurrent_steps.h"

#include <string_view>

#include "plumb/operators/operator_facts.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/scale/recurrent.h"

namespace plumb {
namespace {

// Sizes of an argument, empty when unknown or variable.
std::vector<int64_t> known_sizes(const Arg& arg, const State& state) {
  if (!arg.is_value()) return {};
  const Value* value = arg.value();
  if (value->meta()) return value->meta()->symbols.empty() ? value->meta()->sizes : std::vector<int64_t>{};
  while (value->producer()->is_op("plumb::scale_fwd") || value->producer()->is_op("plumb::scale_bwd"))
    value = value->producer()->input(0);
  return value->producer()->kind() == NodeKind::GetAttr ? sizes_of(value, state) : std::vector<int64_t>{};
}

// Steps times weights. A file can name any number of steps, and each of them becomes nodes.
constexpr int64_t kMostSteps = 1000000;

struct Parameters {
  Arg w_ih, w_hh, b_ih, b_hh, w_hr;
};

class Steps {
 public:
  Steps(GraphModule& module, Node* node)
      : graph_(module.graph()), state_(module.state()), node_(node), layer_(node->facts().recurrent) {}

  std::vector<Node*> run() {
    {
      auto here = graph_.inserting_before(node_);
      if (is_recurrent_cell(node_))
        cell();
      else
        layers();
    }
    graph_.erase(node_);
    return std::move(linears_);
  }

 private:
  struct State2 {
    Value* h;
    Value* c;  // cell state of an LSTM; null for others
  };

  Value* call(std::string_view op, std::vector<Arg> arguments) {
    Node* made = graph_.call(op, std::move(arguments));
    made->meta() = node_->meta();
    return made->result();
  }
  Value* linear(Value* x, const Arg& weight, const Arg& bias) {
    Value* y = call("aten::linear", {x, weight, bias});
    linears_.push_back(y->producer());
    return y;
  }
  Value* add(Value* a, Value* b) { return call("aten::add.Tensor", {a, b}); }
  Value* mul(Value* a, Value* b) { return call("aten::mul.Tensor", {a, b}); }
  Value* sigmoid(Value* x) { return call("aten::sigmoid", {x}); }
  Value* tanh(Value* x) { return call("aten::tanh", {x}); }
  Value* gate(Value* gates, int64_t i) { return call("aten::narrow", {gates, -1, i * hidden_, hidden_}); }
  Value* select(Value* x, int64_t i) { return call("aten::select.int", {x, 0, i}); }
  Value* stack(const std::vector<Value*>& values) {
    return call("aten::stack", {Arg::List(values.begin(), values.end()), 0});
  }

  // from_input: the input's linear layer.
  State2 step(Value* from_input, State2 before, const Parameters& p) {
    Value* from_state = linear(before.h, p.w_hh, p.b_hh);
    if (layer_ == RecurrentLayer::Gru) {
      Value* reset = sigmoid(add(gate(from_state, 0), gate(from_input, 0)));
      Value* update = sigmoid(add(gate(from_state, 1), gate(from_input, 1)));
      Value* fresh = tanh(add(gate(from_input, 2), mul(gate(from_state, 2), reset)));
      return {add(mul(call("aten::sub.Tensor", {before.h, fresh}), update), fresh), nullptr};
    }
    Value* gates = add(from_state, from_input);
    if (layer_ != RecurrentLayer::Lstm)
      return {call(layer_ == RecurrentLayer::Tanh ? "aten::tanh" : "aten::relu", {gates}), nullptr};
    Value* in = sigmoid(gate(gates, 0));
    Value* forget = sigmoid(gate(gates, 1));
    Value* fresh = tanh(gate(gates, 2));
    Value* out = sigmoid(gate(gates, 3));
    Value* c = add(mul(forget, before.c), mul(in, fresh));
    Value* h = mul(out, tanh(c));
    if (!p.w_hr.is_none()) h = linear(h, p.w_hr, Arg());
    return {h, c};
  }

  void set_hidden(const Arg& w_hh) {
    const int64_t rows = known_sizes(w_hh, state_)[0];
    hidden_ = rows / (layer_ == RecurrentLayer::Lstm ? 4 : layer_ == RecurrentLayer::Gru ? 3 : 1);
  }

  void take_over(size_t result, Value* made) {
    if (result >= node_->num_results() || !node_->result(result)->has_uses()) return;
    const std::string name = node_->result(result)->name();
    made->set_meta(node_->result(result)->meta());
    graph_.replace_all_uses_with(node_->result(result), made);
    node_->result(result)->rename(graph_.unique_name(name + "_fused"));
    made->rename(name);
  }

  void cell() {
    const Parameters p{node_->arg("w_ih"), node_->arg("w_hh"), node_->arg("b_ih"), node_->arg("b_hh"), Arg()};
    set_hidden(p.w_hh);
    const Arg& hx = node_->arg("hx");
    State2 before{};
    if (hx.is_list())
      before = {hx.list()[0].value(), hx.list()[1].value()};
    else
      before.h = hx.value();
    const State2 after = step(linear(node_->arg("input").value(), p.w_ih, p.b_ih), before, p);
    take_over(0, after.h);
    if (after.c) take_over(1, after.c);
  }

  void layers() {
    const Arg::List params = node_->arg("params").list();
    const bool biases = is_set(node_, "has_biases"), batch_first = is_set(node_, "batch_first");
    const bool train = is_set(node_, "train");
    const int64_t directions = is_set(node_, "bidirectional") ? 2 : 1;
    const int64_t layers = node_->arg("num_layers").constant().toInt();
    const double dropout = node_->arg("dropout").constant().toDouble();
    const size_t each = params.size() / static_cast<size_t>(layers * directions);
    const bool projected = each == (biases ? 5 : 3);
    const Arg& hx = node_->arg("hx");
    const auto sizes = known_sizes(node_->arg("input"), state_);
    const int64_t steps = sizes[batch_first ? 1 : 0];
    set_hidden(params[1]);

    Value* x = node_->arg("input").value();
    if (batch_first) x = call("aten::transpose.int", {x, 0, 1});
    std::vector<Value*> last_h, last_c;
    for (int64_t layer = 0; layer < layers; ++layer) {
      std::vector<Value*> outputs;
      for (int64_t direction = 0; direction < directions; ++direction) {
        const int64_t at = layer * directions + direction;
        const Arg* own = &params[static_cast<size_t>(at) * each];
        const Parameters p{own[0], own[1], biases ? own[2] : Arg(), biases ? own[3] : Arg(),
                           projected ? own[each - 1] : Arg()};
        State2 now{};
        if (hx.is_list())
          now = {select(hx.list()[0].value(), at), select(hx.list()[1].value(), at)};
        else
          now.h = select(hx.value(), at);
        Value* from_inputs = linear(x, p.w_ih, p.b_ih);
        std::vector<Value*> hs(static_cast<size_t>(steps));
        for (int64_t i = 0; i < steps; ++i) {
          const int64_t t = direction == 0 ? i : steps - 1 - i;
          now = step(select(from_inputs, t), now, p);
          hs[static_cast<size_t>(t)] = now.h;
        }
        outputs.push_back(stack(hs));
        last_h.push_back(now.h);
        if (now.c) last_c.push_back(now.c);
      }
      x = directions == 1 ? outputs[0] : call("aten::cat", {Arg::List(outputs.begin(), outputs.end()), -1});
      if (dropout != 0 && train && layer + 1 < layers) x = call("aten::dropout", {x, dropout, true});
    }
    if (batch_first) x = call("aten::transpose.int", {x, 0, 1});
    take_over(0, x);
    if (node_->result(1)->has_uses()) take_over(1, stack(last_h));
    if (layer_ == RecurrentLayer::Lstm && node_->result(2)->has_uses()) take_over(2, stack(last_c));
  }

  Graph& graph_;
  const State& state_;
  Node* node_;
  const RecurrentLayer layer_;
  int64_t hidden_ = 0;
  std::vector<Node*> linears_;
};

}  // namespace

std::optional<std::string> steps_obstacle(const Node* node, const State& state) {
  if (node->target().ends_with(".data")) return "a packed sequence: its steps differ in size";
  if (auto why = operand_obstacle(node)) return why;
  const bool cell = is_recurrent_cell(node);
  const Arg& weight = cell ? node->arg("w_hh") : node->arg("params").list()[1];
  if (known_sizes(weight, state).size() != 2) return "the sizes of its weights are not known";
  if (cell) return std::nullopt;
  const auto sizes = known_sizes(node->arg("input"), state);
  if (sizes.size() != 3) return "its number of steps is not known";
  const auto weights = static_cast<int64_t>(node->arg("params").list().size());
  if (sizes[is_set(node, "batch_first") ? 1 : 0] > kMostSteps / weights)
    return "its steps are more than a graph should hold";
  return std::nullopt;
}

std::vector<Node*> take_apart(GraphModule& module, Node* node) { return Steps(module, node).run(); }

std::vector<Node*> random_recurrent_layers(GraphModule& module) {
  std::vector<Node*> layers;
  for (Node* node : module.graph().nodes()) {
    if (!is_recurrent(node) || is_recurrent_cell(node) || steps_obstacle(node, module.state())) continue;
    if (node->arg("train").constant().toBool() && node->arg("dropout").constant().toDouble() > 0)
      layers.push_back(node);
  }
  return layers;
}

}  // namespace plumb
