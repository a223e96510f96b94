#include "plumb/graph/plan.h"

#include <ATen/ScalarOps.h>
#include <ATen/TracerMode.h>
#include <ATen/core/List.h>
#include <ATen/core/stack.h>
#include <ATen/ops/aminmax.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "plumb/core/error.h"
#include "plumb/core/mix_bits.h"
#include "plumb/graph/describe.h"
#include "plumb/operators/dispatch_keys.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/tensors/node_seeds.h"

namespace plumb {
namespace {

using c10::IValue;

// How one argument gets onto the stack.
struct Slot {
  enum Kind : uint8_t { Const, Copy, Move, Wrap, List };
  Kind kind = Const;
  uint32_t index = 0;  // Const: of constants; Copy, Move, Wrap: register; List: of lists
};

struct ListSlot {
  c10::TypePtr element;
  std::vector<Slot> elements;
};

struct Instruction {
  c10::OperatorHandle op;
  uint32_t first_slot, num_slots;
  uint32_t first_out, num_outs;    // into outs
  uint32_t first_drop, num_drops;  // into drops: registers to release although no argument moved them
  bool grad;
  uint64_t random = 0;   // what seeds it (node_seeds.h); 0: draws nothing
  bool by_rows = false;  // and it may draw row by row
};

// Registers of one return of the schema.
struct Out {
  int32_t count;  // -1: one value; n: a list of n
  uint32_t reg;   // first register
};

}  // namespace

struct Plan::Impl {
  std::vector<Instruction> instructions;
  std::vector<Slot> slots;
  std::vector<ListSlot> lists;
  std::vector<IValue> constants;
  std::vector<Out> outs;
  std::vector<uint32_t> drops;
  std::vector<uint32_t> inputs;                    // registers of placeholders
  std::vector<std::pair<uint32_t, IValue>> attrs;  // registers of get_attr nodes
  std::vector<Slot> outputs;
  uint32_t num_registers = 0;
  bool rounds = false;  // values to formats: products may keep codes of them
  // For messages only: they must not keep the graph alive.
  struct Label {
    std::string node, where;
    std::string table;  // state name of an embedding's weight, or empty
    int64_t rows = -1;
  };
  std::vector<Label> labels;

  IValue fetch(const Slot& slot, std::vector<IValue>& regs) const {
    switch (slot.kind) {
      case Slot::Const: return constants[slot.index];
      case Slot::Copy: return regs[slot.index];
      case Slot::Move: return std::move(regs[slot.index]);
      case Slot::Wrap: {
        const IValue& v = regs[slot.index];
        if (v.isTensor() || v.isNone()) return v;
        return at::native::wrapped_scalar_tensor(v.toScalar());
      }
      case Slot::List: {
        const ListSlot& list = lists[slot.index];
        c10::impl::GenericList values(list.element);
        values.reserve(list.elements.size());
        for (const Slot& e : list.elements) values.push_back(fetch(e, regs));
        return values;
      }
    }
    return {};
  }

  std::vector<IValue> run(std::vector<IValue> given) const {
    std::vector<IValue> regs(num_registers);
    for (size_t i = 0; i < inputs.size(); ++i) regs[inputs[i]] = std::move(given[i]);
    given.clear();
    for (const auto& [reg, value] : attrs) regs[reg] = value;
    torch::jit::Stack stack;
    stack.reserve(32);
    const bool caller_grad = c10::GradMode::is_enabled();
    bool grad = caller_grad;
    const c10::AutoGradMode restore(caller_grad);
    std::optional<c10::impl::IncludeDispatchKeyGuard> watched;
    if (rounds && caller_grad) watched.emplace(kRecomputeKey);
    const Instruction* now = nullptr;
    try {
      for (const Instruction& in : instructions) {
        now = &in;
        if ((caller_grad && in.grad) != grad) c10::GradMode::set_enabled(grad = !grad);
        const Slot* slot = slots.data() + in.first_slot;
        for (uint32_t i = 0; i < in.num_slots; ++i, ++slot) {
          if (slot->kind == Slot::Move) {
            stack.emplace_back(std::move(regs[slot->index]));
          } else if (slot->kind == Slot::Copy) {
            stack.emplace_back(regs[slot->index]);
          } else {
            stack.emplace_back(fetch(*slot, regs));
          }
        }
        const bool seeded = in.random && nodes_are_seeded();
        const auto draws = seeded ? lock_seeded_draws() : std::unique_lock<std::recursive_mutex>();
        const bool by_rows = in.by_rows && run_by_rows(in.random, in.op, stack);
        if (in.random && !by_rows) seed_node(in.random);
        if (!by_rows) in.op.callBoxed(stack);
        store(in, stack, regs);
        stack.clear();
        for (uint32_t i = 0; i < in.num_drops; ++i) regs[drops[in.first_drop + i]] = IValue();
      }
    } catch (const c10::Error& e) {
      fail(labels[static_cast<size_t>(now - instructions.data())], stack, e);
    } catch (const Error& e) {
      // An operator of plumb's knows neither its node nor its line.
      const bool of_operator = e.kind() == ErrorKind::TensorMismatch || e.kind() == ErrorKind::Unsupported;
      if (!of_operator || !e.where().empty()) throw;
      const Label& label = labels[static_cast<size_t>(now - instructions.data())];
      throw Error(e.kind(), label.node + ": " + e.message(), label.where, e.remedy());
    }
    std::vector<IValue> results;
    results.reserve(outputs.size());
    for (const Slot& slot : outputs) results.push_back(fetch(slot, regs));
    return results;
  }

  // Throws the error of a failed instruction. torch's "index out of range in self" does not name the index, so this
  // searches the arguments, which may be on the stack still.
  [[noreturn]] static void fail(const Label& label, const torch::jit::Stack& stack, const c10::Error& e) {
    if (label.rows < 0 || !dynamic_cast<const c10::IndexError*>(&e))
      throw Error(ErrorKind::ExecutionFailed, label.node + ": " + error_text(e), label.where);
    std::string index = "an index";
    for (const IValue& v : stack) {
      if (!v.isTensor() || !v.toTensor().defined()) continue;
      const at::Tensor& t = v.toTensor();
      if (!t.is_cpu() || t.numel() == 0 || !at::isIntegralType(t.scalar_type(), false)) continue;
      const auto [least, most] = at::aminmax(t);
      const auto low = least.item<int64_t>(), high = most.item<int64_t>();
      if (low < 0 || high >= label.rows) index = "index " + std::to_string(low < 0 ? low : high);
    }
    throw Error(ErrorKind::ExecutionFailed,
                label.node + ": " + index + " is outside of " +
                    (label.table.empty() ? "its table" : "'" + label.table + "'") + ", which has the rows 0 to " +
                    std::to_string(label.rows - 1),
                label.where, "indices of this table: tokens of the model's own tokenizer, for example");
  }

  void store(const Instruction& in, torch::jit::Stack& stack, std::vector<IValue>& regs) const {
    for (uint32_t i = 0; i < in.num_outs; ++i) {
      const Out& out = outs[in.first_out + i];
      if (out.count < 0) {
        regs[out.reg] = std::move(stack[i]);
        continue;
      }
      auto list = stack[i].toListRef();
      if (list.size() != static_cast<size_t>(out.count)) {
        const Label& label = labels[static_cast<size_t>(&in - instructions.data())];
        throw Error(ErrorKind::GuardFailed,
                    label.node + " returned a list of " + std::to_string(list.size()) + ", the graph was made for " +
                        std::to_string(out.count),
                    label.where, "capture the model again on inputs like these");
      }
      for (size_t k = 0; k < list.size(); ++k) regs[out.reg + k] = list[k];
    }
  }
};

// Sums, products and the like, also in place.
static bool is_arithmetic(std::string_view name) {
  if (name.ends_with('_')) name.remove_suffix(1);
  return name == "aten::mul" || name == "aten::add" || name == "aten::sub" || name == "aten::div";
}

static bool takes_tensor(c10::TypePtr type) {
  if (type->kind() == c10::TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
  return type->kind() == c10::TypeKind::TensorType;
}

// Compiles one graph. Registers are given in graph order, so a node's results are neighbors.
class PlanCompiler {
 public:
  PlanCompiler(const Graph& graph, const State& state) : graph_(graph), state_(state) {}

  Plan::Impl compile() {
    uint32_t next = 0;
    registers_.reserve(graph_.size());
    for (const Node* node : graph_.nodes()) {
      for (const Value* v : node->results()) registers_.emplace(v, next++);
    }
    plan_.num_registers = next;
    find_last_uses();
    plan_.instructions.reserve(graph_.size());
    for (const Node* node : graph_.nodes()) {
      switch (node->kind()) {
        case NodeKind::Placeholder: plan_.inputs.push_back(reg(node->result())); break;
        case NodeKind::GetAttr:
          if (node->result()->has_uses())
            plan_.attrs.emplace_back(reg(node->result()), state_.get(node->target()).tensor);
          break;
        case NodeKind::Output:
          for (const Arg& arg : node->args()) plan_.outputs.push_back(slot(*node, arg, nullptr));
          break;
        default: instruction(*node);
      }
    }
    if (!graph_.output_node()) lint(graph_);  // throws
    return std::move(plan_);
  }

 private:
  uint32_t reg(const Value* v) const { return registers_.at(v); }
  Slot constant(IValue v) {
    plan_.constants.push_back(std::move(v));
    return {Slot::Const, static_cast<uint32_t>(plan_.constants.size() - 1)};
  }

  void find_last_uses() {
    for (const Node* node : graph_.nodes()) {
      for (const Value* v : node->inputs()) {
        auto& entry = last_[v];
        entry = entry.first == node ? std::pair{node, entry.second + 1} : std::pair{node, 1u};
      }
    }
  }

  Slot use(const Node& node, const Value* v, bool wrap) {
    auto& [last, reads] = last_[v];
    const bool final_read = last == &node && --reads == 0 && node.kind() != NodeKind::Output;
    if (wrap) {
      if (final_read) plan_.drops.push_back(reg(v));
      return {Slot::Wrap, reg(v)};
    }
    // Attributes may be moved like anything else: a run fetches them afresh.
    return {final_read || (last == &node && reads == 0) ? Slot::Move : Slot::Copy, reg(v)};
  }

  // A Python number next to a tensor is a 0-dim double tensor that TensorIterator casts at every call. For float32
  // arithmetic the cast can be done once: bit for bit the same. Not for half types, whose kernels compute with the
  // double. Python's dispatch modes and its meta kernels take a double alone.
  IValue wrapped_number(const Node& node, const IValue& number) const {
    at::Tensor tensor = at::native::wrapped_scalar_tensor(number.toScalar());
    if (c10::impl::dispatch_mode_enabled() || !is_arithmetic(node.op_name()) || node.num_inputs() != 1) return tensor;
    const auto& meta = node.input(0)->meta();
    if (!meta || meta->dtype != at::kFloat || !(number.isDouble() || number.isInt())) return tensor;
    if (meta->device.is_meta()) return tensor;
    at::Tensor cast = tensor.to(at::kFloat);
    cast.unsafeGetTensorImpl()->set_wrapped_number(true);
    return cast;
  }

  // x.mul(Scalar) makes a tensor of the number at every call: the overload for tensors with the number made once is the
  // same arithmetic, forward and backward.
  static std::optional<c10::OperatorHandle> faster_overload(const Node& node) {
    if (!node.is_call() || !node.target().ends_with(".Scalar") || node.num_inputs() != 1) return std::nullopt;
    const std::string_view name = node.op_name();
    if (!is_arithmetic(name) || name.ends_with('_')) return std::nullopt;
    const auto& meta = node.input(0)->meta();
    if (!meta || meta->dtype != at::kFloat || !node.arg(1).is_constant()) return std::nullopt;
    if (!node.arg(1).constant().isDouble() && !node.arg(1).constant().isInt()) return std::nullopt;
    return find_operator(std::string(name) + ".Tensor");
  }

  Slot slot(const Node& node, const Arg& arg, const c10::TypePtr& type) {
    const bool tensor = type && takes_tensor(type);
    if (arg.is_value()) return use(node, arg.value(), tensor && !arg.value()->is_tensor());
    if (arg.is_constant()) {
      const IValue& v = arg.constant();
      if (tensor && (v.isInt() || v.isDouble() || v.isBool() || v.isComplexDouble()))
        return constant(wrapped_number(node, v));
      if (v.isNone() && type && type->kind() == c10::TypeKind::TensorType) return constant(at::Tensor());
      return constant(v);
    }
    c10::TypePtr list_type = type;
    if (list_type && list_type->kind() == c10::TypeKind::OptionalType)
      list_type = list_type->castRaw<c10::OptionalType>()->getElementType();
    ListSlot list;
    const auto* as_list = list_type ? list_type->castRaw<c10::ListType>() : nullptr;
    c10::TypePtr element = as_list ? as_list->getElementType() : c10::TypePtr(c10::AnyType::get());
    list.element = element->kind() == c10::TypeKind::SymIntType ? c10::TypePtr(c10::IntType::get()) : element;
    for (const Arg& e : arg.list()) list.elements.push_back(slot(node, e, as_list ? element : nullptr));
    plan_.lists.push_back(std::move(list));
    return {Slot::List, static_cast<uint32_t>(plan_.lists.size() - 1)};
  }

  void instruction(const Node& node) {
    Instruction in{node.op(), 0, 0, 0, 0, 0, 0, node.meta().grad_enabled};
    in.first_drop = static_cast<uint32_t>(plan_.drops.size());
    if (auto tensor_overload = faster_overload(node)) in.op = *tensor_overload;
    std::vector<Slot> slots;
    for (size_t i = 0; i < node.args().size(); ++i) {
      slots.push_back(slot(node, node.arg(i), in.op.schema().arguments()[i].type()));
    }
    in.first_slot = static_cast<uint32_t>(plan_.slots.size());
    in.num_slots = static_cast<uint32_t>(slots.size());
    plan_.slots.insert(plan_.slots.end(), slots.begin(), slots.end());
    // An opaque function may draw, too.
    const bool draws = node.is_random() || node.target() == "plumb::python_function";
    if (draws && node.num_results()) in.random = mix_seeds(0, seed_of_name(node.result(0)->name()));
    plan_.rounds = plan_.rounds || node.is_op("plumb::simulate_format") || node.is_op("plumb::track_rounded");
    // Dropout, also that of attention: it draws only if an argument says so. Recurrent layers have no own rows.
    const OperatorFacts* facts = in.random ? &node.facts() : nullptr;
    in.by_rows = facts && !(facts->draws_if.empty() && facts->draws_with.empty()) && !node.writes() &&
                 facts->recurrent == RecurrentLayer::None;
    in.first_out = static_cast<uint32_t>(plan_.outs.size());
    size_t next = 0;
    for (int32_t count : node.result_layout()) {
      const uint32_t first = next < node.num_results() ? reg(node.result(next)) : 0;
      plan_.outs.push_back({count, first});
      next += count < 0 ? 1 : static_cast<size_t>(count);
    }
    in.num_outs = static_cast<uint32_t>(plan_.outs.size()) - in.first_out;
    for (const Value* v : node.results()) {
      if (!v->has_uses()) plan_.drops.push_back(reg(v));
    }
    in.num_drops = static_cast<uint32_t>(plan_.drops.size()) - in.first_drop;
    plan_.instructions.push_back(in);
    plan_.labels.push_back({node.describe(), node.meta().where(), "", -1});
    if (node.op_name().ends_with("::embedding") && node.arg("weight").is_value()) {
      const Value& table = *node.arg("weight").value();
      if (table.producer()->kind() == NodeKind::GetAttr) plan_.labels.back().table = table.producer()->target();
      if (table.meta() && !table.meta()->sizes.empty()) plan_.labels.back().rows = table.meta()->sizes[0];
    }
  }

  const Graph& graph_;
  const State& state_;
  Plan::Impl plan_;
  std::unordered_map<const Value*, uint32_t> registers_;
  std::unordered_map<const Value*, std::pair<const Node*, uint32_t>>
      last_;  // last user, and how often it still reads it
};

Plan::Plan(const Graph& graph, const State& state) {
  // A plan first needed in inference mode serves training too, which cannot save that mode's tensors.
  const c10::InferenceMode outside(false);
  const at::tracer::impl::NoTracerDispatchMode untraced;  // the plan's constants are made in no trace
  impl_ = std::make_unique<Impl>(PlanCompiler(graph, state).compile());
}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;

std::vector<IValue> Plan::run(std::vector<IValue> inputs) const {
  if (inputs.size() != impl_->inputs.size()) {
    throw Error(ErrorKind::StructureMismatch, "the graph takes " + std::to_string(impl_->inputs.size()) +
                                                  " inputs, got " + std::to_string(inputs.size()));
  }
  // Autocast was captured as explicit casts: the caller's must not add others.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return impl_->run(std::move(inputs));
}

}  // namespace plumb
