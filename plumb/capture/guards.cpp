#include "plumb/capture/guards.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "plumb/operators/dispatch_keys.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

std::string_view base_name(std::string_view name) { return name.substr(0, name.find('.')); }

// Returns whether sizes of the results follow from the values of tensors.
bool shape_depends_on_values(const c10::OperatorHandle& op, const std::string& name, at::ArrayRef<c10::IValue> args) {
  switch (operator_facts(name).data_sizes) {
    case DataSizes::ByTag: return op.hasTag(at::Tag::dynamic_output_shape);
    case DataSizes::Always: return true;
    case DataSizes::OfCondition: return args.size() == 1;
    case DataSizes::OfMasks: break;
  }
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return false;
  for (const c10::IValue& index : args[1].toListRef()) {
    if (index.isTensor() && index.toTensor().defined() &&
        (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte))
      return true;
  }
  return false;
}

bool returns_tensors(const c10::FunctionSchema& schema) {
  for (const auto& r : schema.returns()) {
    if (r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->str().find("Tensor") != std::string::npos)
      return true;
  }
  return false;
}

}  // namespace

bool is_value_reader(std::string_view name) { return operator_facts(name).reads_value; }

Guards::Guards(CallRecorder& recorder, const ModuleStateGuard& module_state, Attempt& attempt)
    : recorder_(recorder), module_state_(module_state), attempt_(attempt) {}

bool Guards::answered_at_capture(const c10::OperatorHandle& op, const std::string& name,
                                 const std::vector<RecordedArg>& args, bool from_constants,
                                 const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (schema.returns().empty() || returns_tensors(schema)) return false;
  if (!is_value_reader(name)) return true;  // about shapes and dtypes: part of the signature
  const auto given = torch::jit::last(stack, schema.arguments().size());
  // On the meta device there is no value to take, not even of a constant.
  const bool has_values = std::none_of(given.begin(), given.end(),
                                       [](const c10::IValue& v) { return v.isTensor() && v.toTensor().is_meta(); });
  if (from_constants && has_values) {
    recorder_.note_here(name + " read a value that depends on constants alone; it is part of the graph");
    return true;
  }
  const std::string_view base = base_name(name);
  if (base == "aten::equal" && has_values) {
    guard_equal(args, stack);
    return true;
  }
  const at::Tensor asked = given[0].isTensor() ? given[0].toTensor() : at::Tensor();
  const bool truth = base == "aten::is_nonzero";
  const bool one = asked.defined() && asked.numel() == 1 && (truth || base == "aten::item");
  if (one && truth && (is_known(args[0]) || guard_check(args[0], asked))) return true;
  if (one && guard_buffer(args[0], asked)) return true;
  refuse_random(name, args[0]);
  if (one && guard_value_read(args[0], asked, truth)) return true;
  recorder_.refuse(name + " takes a value out of a tensor, so the program would depend on the data",
                   "use torch.where or masks instead of branching on tensor values, move the decision out of the "
                   "module, or transform "
                   "the module itself (plumb.transforms), which keeps a graph for each answer",
                   ErrorKind::DataDependent);
}

void Guards::refuse_random(const std::string& name, const RecordedArg& arg) {
  const Record* draw = recorder_.producer(arg);
  if (!draw) return;
  const Record* from = draw->args.empty() ? nullptr : recorder_.producer(draw->args[0]);
  if (draw->op.hasTag(at::Tag::nondeterministic_seeded) ||
      (from && from->op.hasTag(at::Tag::nondeterministic_seeded))) {
    recorder_.refuse(name + " takes a random number out of a tensor, so every run would be another program",
                     "set the probability behind it (layerdrop, ...) to zero, capture in evaluation mode, or multiply "
                     "by a random mask instead of branching");
  }
}

// Recognizes comparisons of torch.rand, which is in [0, 1), with a limit at or beyond 0 or 1: the outcome is constant.
// Layers compare like that to drop themselves with probability zero.
bool Guards::is_known(const RecordedArg& condition) const {
  const Record* compare = recorder_.producer(condition);
  if (!compare || compare->args.size() < 2) return false;
  const std::string name = operator_name(compare->op);
  const std::string_view base = base_name(name);
  if (base != "aten::lt" && base != "aten::ge") return false;
  const Record* draw = recorder_.producer(compare->args[0]);
  if (!draw || recorder_.values[draw->results[0]].written) return false;
  if (base_name(draw->op.schema().name()) != "aten::rand") return false;
  const auto* limit = std::get_if<c10::IValue>(&compare->args[1].data);
  if (!limit || !limit->isScalar() || limit->isComplexDouble()) return false;
  const double number = limit->toScalar().toDouble();
  return number <= 0 || number >= 1;
}

void Guards::guard(std::string_view op, std::vector<RecordedArg> args, std::vector<c10::IValue> constants,
                   const std::string& about) {
  for (c10::IValue& constant : constants) args.push_back({std::move(constant)});
  recorder_.emit(op, std::move(args));
  recorder_.note_here(about);
}

// Guards an assertion, or a branch that does nothing but fail.
bool Guards::guard_check(const RecordedArg& condition, const at::Tensor& tensor) {
  if (!recorder_.request.is_check || tensor.is_meta()) return false;
  attempt_.need_values();
  const bool answer = at::is_nonzero(tensor);
  if (!recorder_.request.is_check()) return false;
  guard("plumb::guard_check", {condition}, {answer, recorder_.where()},
        std::string("a check of a value was ") + (answer ? "true" : "false") +
            " at capture: the graph checks that it still is");
  return true;
}

// A buffer that the model does not write is as good as a constant while it keeps its value.
bool Guards::guard_buffer(const RecordedArg& arg, const at::Tensor& tensor) {
  const int* value = std::get_if<int>(&arg.data);
  if (!value || tensor.is_meta()) return false;
  const RecordedValue& known = recorder_.values[*value];
  if (known.origin != RecordedValue::Attribute || module_state_.was_written(known.attribute)) return false;
  const Attr& attr = recorder_.attributes[static_cast<size_t>(known.attribute)];
  if (attr.kind != AttrKind::Buffer) return false;
  const std::string name = attr.name;
  buffer_reads_.emplace_back(
      known.attribute,
      Error(ErrorKind::DataDependent,
            "the value of buffer '" + name + "' is taken into the program, and the forward writes the buffer",
            recorder_.where(),
            "if the layer initializes itself on its first batch, run the model once before; else compute with the "
            "buffer as "
            "a tensor (torch.where, index_copy, scatter)"));
  guard("plumb::guard_value", {arg, RecordedArg{recorder_.constant_copy(tensor)}}, {recorder_.where()},
        "the value of buffer '" + name + "' is part of the graph, which checks that it stays the same");
  return true;
}

bool Guards::guard_value_read(const RecordedArg& arg, const at::Tensor& tensor, bool truth) {
  if (!attempt_.mode.guard_values || !std::holds_alternative<int>(arg.data) || tensor.is_meta()) return false;
  attempt_.need_values();
  guard("plumb::guard_value_read", {arg, RecordedArg{recorder_.constant_copy(tensor)}}, {truth, recorder_.where()},
        "a value is taken out of a tensor: the graph checks that it stays the same");
  return true;
}

at::Tensor Guards::guard_values(const at::Tensor& tensor) {
  constexpr int64_t kMost = 4096;
  if (!attempt_.mode.guard_values || tensor.numel() > kMost || tensor.is_meta()) return {};
  c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
  const int value = recorder_.look_up(tensor, "tolist");
  if (recorder_.values[value].from_constants) return {};
  note_control_value(RecordedArg{value}, tensor);
  if (!guard_value_read(RecordedArg{value}, tensor, false)) return {};
  return tensor.detach().clone();
}

void Guards::note_control_values(const c10::OperatorHandle& op, const std::string& name,
                                 const std::vector<RecordedArg>& args, at::ArrayRef<c10::IValue> given) {
  if (!attempt_.mode.guard_values || !(is_value_reader(name) || shape_depends_on_values(op, name, given))) return;
  for (size_t i = 0; i < args.size(); ++i) {
    if (given[i].isTensor()) {
      note_control_value(args[i], given[i].toTensor());
    } else if (const auto* list = std::get_if<std::vector<RecordedArg>>(&args[i].data); list && given[i].isList()) {
      const auto elements = given[i].toListRef();
      for (size_t k = 0; k < list->size(); ++k) {
        if (elements[k].isTensor()) note_control_value((*list)[k], elements[k].toTensor());
      }
    }
  }
}

// A tensor that a path of the program hangs on: its place in the log of a run, and the values of another such run.
void Guards::note_control_value(const RecordedArg& arg, const at::Tensor& tensor) {
  const int* value = std::get_if<int>(&arg.data);
  if (!value || !tensor.defined() || tensor.is_meta() || tensor.is_sparse()) return;
  const RecordedValue& known = recorder_.values[*value];
  if (known.origin != RecordedValue::Result || known.from_constants) return;
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && tensor.numel() != 1) return;
  attempt_.need_values();
  const auto& wanted = recorder_.request.control_values;
  if (wanted && control_values_ < wanted->size()) {
    const at::Tensor& other = (*wanted)[control_values_];
    if (other.sizes() == tensor.sizes() && other.scalar_type() == tensor.scalar_type() &&
        tensor.is_non_overlapping_and_dense())
      tensor.variable_data().copy_(other);
  }
  ++control_values_;
  recorder_.emit("plumb::control_value", {arg});
}

void Guards::check_buffer_reads() const {
  for (const auto& [attribute, error] : buffer_reads_) {
    bool written = module_state_.was_written(attribute);
    for (const auto& [target, value] : recorder_.write_backs) written = written || target == attribute;
    if (written) throw error;
  }
}

// Guards torch.equal: torch::nn::MultiheadAttention compares query and key to choose between two equivalent paths. For
// the same tensor, or for different shapes, the outcome is known; otherwise a node checks it in every run.
void Guards::guard_equal(const std::vector<RecordedArg>& args, const torch::jit::Stack& stack) {
  const auto given = torch::jit::last(stack, 2);
  const at::Tensor a = given[0].toTensor(), b = given[1].toTensor();
  const int* x = std::get_if<int>(&args[0].data);
  const int* y = std::get_if<int>(&args[1].data);
  if (x && y && *x == *y) return;
  if (a.sizes() != b.sizes()) return;
  attempt_.need_values();
  const bool expected = at::equal(a, b);
  guard("plumb::guard_equal", {args[0], args[1]}, {expected},
        std::string("aten::equal returned ") + (expected ? "true" : "false") +
            " at capture: the graph checks that it still does");
}

// Returns whether sizes of its tensors may be dynamic. An operator that writes in place keeps the size of what it
// writes: only its first argument counts.
bool Guards::takes_dynamic(const c10::FunctionSchema& schema, const std::vector<RecordedArg>& args) const {
  bool dynamic = false;
  for (size_t i = 0; i < (schema.is_mutable() ? 1 : args.size()); ++i)
    for_each_value(args[i], [&](int v) { dynamic = dynamic || recorder_.values[v].dynamic; });
  return dynamic;
}

bool Guards::results_have_dynamic_sizes(const c10::OperatorHandle& op, const std::string& name,
                                        const std::vector<RecordedArg>& args, at::ArrayRef<c10::IValue> given,
                                        bool from_constants) {
  const auto& schema = op.schema();
  // `out[mask] = rows` views its rows in their present size without asking for it where Python would show.
  if (name == "aten::view" && has_dynamic_sizes(given[0].toTensor()) && given[1].isIntList()) {
    const auto sizes = given[1].toIntVector();
    if (std::find(sizes.begin(), sizes.end(), -1) == sizes.end()) guard_size(given[0].toTensor(), true);
  }
  bool dynamic = !from_constants && shape_depends_on_values(op, name, given);
  if (dynamic) attempt_.need_values();
  dynamic = dynamic || (recorder_.any_dynamic && takes_dynamic(schema, args));
  const bool returns_list =
      schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
  if (dynamic && returns_list && given[0].isTensor() && has_dynamic_sizes(given[0].toTensor()))
    guard_size(given[0].toTensor(), true);
  return dynamic;
}

bool Guards::requires_grad(const at::Tensor& tensor, bool guarded) {
  const int asked = recorder_.values.find_object(tensor);
  if (asked < 0 || !tensor.requires_grad()) return tensor.requires_grad();
  std::unordered_map<int, const Record*> producers;
  for (const Record& record : recorder_.records) {
    for (const int result : record.results) producers[result] = &record;
  }
  std::vector<int> left{asked}, inputs;
  std::unordered_set<int> seen;
  while (!left.empty()) {
    const int value = left.back();
    left.pop_back();
    const RecordedValue& known = recorder_.values[value];
    if (!seen.insert(value).second || !(known.requires_grad || known.written)) continue;
    if (known.origin == RecordedValue::Input) inputs.push_back(value);
    if (known.origin == RecordedValue::Attribute &&
        recorder_.attributes[static_cast<size_t>(known.attribute)].tensor.requires_grad())
      return true;
    if (const auto made = producers.find(value); made != producers.end()) {
      for (const RecordedArg& arg : made->second->args) for_each_value(arg, [&](int v) { left.push_back(v); });
    }
  }
  if (inputs.empty()) return true;
  const auto given = [&](int input) { return recorder_.values[input].meta.requires_grad; };
  const auto one = std::find_if(inputs.begin(), inputs.end(), given);
  const bool answer = one != inputs.end();
  if (!guarded) return answer;
  for (const int input : answer ? std::vector<int>{*one} : inputs)
    guard(
        "plumb::guard_requires_grad", {RecordedArg{input}}, {answer, recorder_.where()},
        std::string("the forward asks whether a tensor requires a gradient, which hangs on an input that was given ") +
            (answer ? "with one: the graph checks that it is" : "without: the graph checks that it is"));
  return answer;
}

bool Guards::has_dynamic_sizes(const at::Tensor& tensor) const {
  if (!recorder_.any_dynamic || !tensor.defined()) return false;
  const int value = recorder_.values.find_object(tensor);
  return value >= 0 && recorder_.values[value].dynamic && !recorder_.values[value].size_guarded;
}

void Guards::guard_size(const at::Tensor& tensor, bool exact) {
  const int value = recorder_.values.find_object(tensor);
  if (value < 0) return;
  if (exact) recorder_.values[value].size_guarded = true;
  std::ostringstream sizes;
  sizes << tensor.sizes();
  guard("plumb::guard_size", {RecordedArg{value}}, {tensor.sizes().vec(), exact, recorder_.where()},
        "the forward reads a size that depends on the data, " + sizes.str() + ": the graph checks that " +
            (exact ? "it stays the same" : "it stays as empty or not"));
}

}  // namespace plumb
