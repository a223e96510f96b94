// Questions that the program asks about values and sizes that depend on the data: refused, answered, or guarded by a
// node that checks in every run that the answer is still the same.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <sstream>

#include "plumb/capture/session.h"
#include "plumb/core/error.h"
#include "plumb/graph/operator_facts.h"

namespace plumb {
namespace {

std::string_view base_name(std::string_view name) { return name.substr(0, name.find('.')); }

template <typename T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

void guard_equal(const at::Tensor& a, const at::Tensor& b, bool expected) {
  if (a.is_meta() || b.is_meta() || at::equal(a, b) == expected) return;
  throw Error(ErrorKind::GuardFailed,
              std::string("the model took the path for ") + (expected ? "equal" : "different") +
                  " tensors when it was captured; these are " + (expected ? "different" : "equal"),
              "", "capture the model again on inputs like these");
}

void guard_check(const at::Tensor& condition, bool expected, std::string_view where) {
  if (condition.is_meta() || at::is_nonzero(condition) == expected) return;
  throw Error(ErrorKind::GuardFailed,
              std::string("a check that the model makes in its forward fails: the condition was ") +
                  (expected ? "true" : "false") + " when it was captured and is " + (expected ? "false" : "true") +
                  " now, where the model itself raises an error",
              std::string(where), "look at the line of the check: the inputs or parameters are not what it asks for");
}

void guard_value(const at::Tensor& buffer, const at::Tensor& expected, std::string_view where) {
  if (buffer.is_meta() || at::equal(buffer, expected)) return;
  throw Error(ErrorKind::GuardFailed,
              "a buffer whose value the model took into the program (item, float, int) has another value than when it "
              "was captured",
              std::string(where), "capture the model again, or compute with the buffer as a tensor");
}

bool same_answer(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a, b) ||
         (a.is_floating_point() && a.isnan().logical_and(b.isnan()).logical_or(a == b).all().item<bool>());
}

// truth: whether it counts as true was all that was asked.
void guard_answer(const at::Tensor& x, const at::Tensor& expected, bool truth, std::string_view where) {
  if (x.is_meta()) return;
  if (truth ? at::is_nonzero(x) == at::is_nonzero(expected) : same_answer(x, expected)) return;
  std::string was = "values out of a tensor into the program when it was captured; they are others now";
  if (truth) {
    const bool then = at::is_nonzero(expected);
    was = std::string("the path for a ") + (then ? "true" : "false") + " condition when it was captured; it is " +
          (then ? "false" : "true") + " now";
  } else if (x.numel() == 1 && !x.is_complex()) {
    was = "the value " + text(expected.item()) + " out of a tensor into the program when it was captured; it is " +
          text(x.item()) + " now";
  }
  throw Error(ErrorKind::GuardFailed, "the model took " + was, std::string(where),
              "capture the model again on data like these, or use torch.where or masks instead of branching on values");
}

thread_local DecisionLog* decision_log = nullptr;

void decision(const at::Tensor& x) {
  if (decision_log && !x.is_meta()) decision_log->tensors.push_back(x.detach().clone());
}

void guard_size(const at::Tensor& x, at::IntArrayRef sizes, bool exact, std::string_view where) {
  if (x.is_meta() || (exact ? x.sizes() == sizes : (x.numel() == 0) == (c10::multiply_integers(sizes) == 0))) return;
  if (exact) {
    throw Error(ErrorKind::GuardFailed,
                "the model read a size that depends on the data: " + text(sizes) + " when it was captured, " +
                    text(x.sizes()) + " now",
                std::string(where),
                "capture the model again on data like these, or use masks instead of boolean indexing and nonzero");
  }
  const bool was_empty = c10::multiply_integers(sizes) == 0;
  throw Error(ErrorKind::GuardFailed,
              std::string("the model took the path for a tensor ") + (was_empty ? "without" : "with") +
                  " elements when it was captured; now it has " + (was_empty ? "some" : "none"),
              std::string(where),
              "capture the model again on data like these, or leave the branch out: operators take empty tensors");
}

// On meta tensors, and so under a tracer (torch.compile), they do nothing: they check when the traced program runs.
void implement(torch::Library& m) {
  m.impl("guard_equal", guard_equal);
  m.impl("guard_check", guard_check);
  m.impl("guard_value", guard_value);
  m.impl("guard_answer", guard_answer);
  m.impl("guard_size", guard_size);
  m.impl("decision", decision);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("guard_equal(Tensor a, Tensor b, bool expected) -> ()", tags);
  m.def("guard_check(Tensor condition, bool expected, str where) -> ()", tags);
  m.def("guard_value(Tensor buffer, Tensor expected, str where) -> ()", tags);
  m.def("guard_answer(Tensor x, Tensor expected, bool truth, str where) -> ()", tags);
  m.def("guard_size(Tensor x, int[] sizes, bool exact, str where) -> ()", tags);
  m.def("decision(Tensor x) -> ()", tags);
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(plumb, Meta, m) { implement(m); }

DecisionLog::DecisionLog() : outer_(decision_log) { decision_log = this; }
DecisionLog::~DecisionLog() { decision_log = outer_; }

bool is_value_reader(std::string_view name) { return operator_facts(name).reads_value; }

void Session::ask_for_values() {
  needs_values = true;
  throw NeedsValues();
}

// Answers true if the call is not to be recorded.
bool Session::refuse_or_skip_valueless(const c10::OperatorHandle& op, const std::string& name,
                                       const std::vector<RecordedArg>& args, bool from_constants,
                                       const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  if (schema.returns().empty()) return false;
  for (const auto& r : schema.returns()) {
    if (r.type()->isSubtypeOf(*c10::TensorType::get()) || r.type()->str().find("Tensor") != std::string::npos)
      return false;
  }
  if (!is_value_reader(name)) return true;  // about shapes and dtypes: part of the signature
  if (from_constants) {
    const std::string at = where();
    note(name + " read a value that depends on constants alone; it is part of the graph" +
         (at.empty() ? "" : ", at " + at));
    return true;
  }
  const std::string_view base = base_name(name);
  if (base == "aten::equal") {
    guard_equal(args, stack);
    return true;
  }
  const auto given = torch::jit::last(stack, schema.arguments().size());
  const at::Tensor asked = given[0].isTensor() ? given[0].toTensor() : at::Tensor();
  if (asked.defined() && asked.numel() == 1) {
    if (base == "aten::is_nonzero" && (is_known(args[0]) || guard_check(args[0], asked))) return true;
    if ((base == "aten::is_nonzero" || base == "aten::item") && guard_buffer(args[0], asked)) return true;
  }
  const bool one = asked.defined() && asked.numel() == 1 && (base == "aten::is_nonzero" || base == "aten::item");
  if (const Record* draw = producer(args[0])) {
    const Record* from = draw->args.empty() ? nullptr : producer(draw->args[0]);
    if (draw->op.hasTag(at::Tag::nondeterministic_seeded) ||
        (from && from->op.hasTag(at::Tag::nondeterministic_seeded))) {
      refuse(name + " takes a random number out of a tensor, so every run would be another program",
             "set the probability behind it (layerdrop, ...) to zero, capture in evaluation mode, or multiply by a "
             "random mask instead of branching");
    }
  }
  if (one && guard_answer(args[0], asked, base == "aten::is_nonzero")) return true;
  refuse(name + " takes a value out of a tensor, so the program would depend on the data",
         "use torch.where or masks instead of branching on tensor values, or move the decision out of the module",
         ErrorKind::DataDependent);
}

const Record* Session::producer(const RecordedArg& arg) const {
  const int* value = std::get_if<int>(&arg.data);
  if (!value) return nullptr;
  for (size_t i = records.size(); i-- > 0;) {
    for (int r : records[i].results) {
      if (r == *value) return &records[i];
    }
  }
  return nullptr;
}

// torch.rand is in [0, 1): held against 0 or 1 it always gives the same answer. So layers ask whether to leave
// themselves out with probability zero.
bool Session::is_known(const RecordedArg& condition) const {
  const Record* compare = producer(condition);
  if (!compare || compare->args.size() < 2) return false;
  const std::string name = operator_name(compare->op);
  const std::string_view base = base_name(name);
  const bool below = base == "aten::lt", above = base == "aten::ge";
  if (!below && !above) return false;
  const Record* draw = producer(compare->args[0]);
  if (!draw || values[static_cast<size_t>(draw->results[0])].written) return false;
  if (base_name(draw->op.schema().name()) != "aten::rand") return false;
  const auto* limit = std::get_if<c10::IValue>(&compare->args[1].data);
  if (!limit || !limit->isScalar() || limit->isComplexDouble()) return false;
  const double number = limit->toScalar().toDouble();
  return number <= 0 || number >= 1;
}

void Session::guard(std::string_view op, std::vector<RecordedArg> args, const std::string& about) {
  Record record{find_operator(op), std::move(args), {}, {}, true, modules_now(), nullptr};
  if (request.locate) record.source = request.locate();
  records.push_back(std::move(record));
  const std::string at = where();
  note(about + (at.empty() ? "" : ", at " + at));
}

// An assertion, or a branch that only raises an error.
bool Session::guard_check(const RecordedArg& condition, const at::Tensor& tensor) {
  if (!request.is_check) return false;
  if (tensor.is_meta()) return false;
  if (stood_in) ask_for_values();
  const bool answer = at::is_nonzero(tensor);
  if (!request.is_check()) return false;
  guard("plumb::guard_check", {condition, RecordedArg{c10::IValue(answer)}, RecordedArg{c10::IValue(where())}},
        std::string("a check of a value answered ") + (answer ? "true" : "false") +
            " at capture: the graph checks that it still does");
  return true;
}

// A buffer that the model does not write is as good as a constant while it keeps its value.
bool Session::guard_buffer(const RecordedArg& arg, const at::Tensor& tensor) {
  const int* value = std::get_if<int>(&arg.data);
  if (!value || tensor.is_meta()) return false;
  const RecordedValue& known = values[static_cast<size_t>(*value)];
  if (known.origin != RecordedValue::Attribute || saved_.count(known.attribute)) return false;
  const Attr& attr = attributes[static_cast<size_t>(known.attribute)];
  if (attr.kind != AttrKind::Buffer) return false;
  buffer_reads_.emplace_back(
      known.attribute,
      Error(ErrorKind::Capture,
            "the value of buffer '" + attr.name + "' is taken into the program, and the forward writes the buffer",
            where(), "compute with the buffer as a tensor (torch.where, index_copy, scatter)"));
  guard("plumb::guard_value", {arg, RecordedArg{constant_copy(tensor)}, RecordedArg{c10::IValue(where())}},
        "the value of buffer '" + attr.name + "' is part of the graph, which checks that it stays the same");
  return true;
}

bool Session::guard_answer(const RecordedArg& arg, const at::Tensor& tensor, bool truth) {
  if (!request.guard_values || !std::holds_alternative<int>(arg.data) || tensor.is_meta()) return false;
  if (stood_in) ask_for_values();
  guard("plumb::guard_answer",
        {arg, RecordedArg{constant_copy(tensor)}, RecordedArg{c10::IValue(truth)}, RecordedArg{c10::IValue(where())}},
        "a value is taken out of a tensor: the graph checks that it stays the same");
  return true;
}

at::Tensor Session::guard_values(const at::Tensor& tensor) {
  constexpr int64_t kMost = 4096;
  if (!request.guard_values || tensor.numel() > kMost || tensor.is_meta()) return {};
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::TESTING_ONLY_GenericMode);
  const int value = look_up(tensor, "tolist");
  if (values[static_cast<size_t>(value)].from_constants) return {};
  decide(RecordedArg{value}, tensor);
  if (!guard_answer(RecordedArg{value}, tensor, false)) return {};
  return tensor.detach().clone();
}

// A tensor that a path of the program hangs on: its place in the log of a run, and the values of another such run.
void Session::decide(const RecordedArg& arg, const at::Tensor& tensor) {
  const int* value = std::get_if<int>(&arg.data);
  if (!value || !tensor.defined() || tensor.is_meta() || tensor.is_sparse()) return;
  const RecordedValue& known = values[static_cast<size_t>(*value)];
  if (known.origin != RecordedValue::Result || known.from_constants) return;
  if (!at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && tensor.numel() != 1) return;
  if (stood_in) ask_for_values();
  if (decisions_ < request.decisions.size()) {
    const at::Tensor& given = request.decisions[decisions_];
    if (given.sizes() == tensor.sizes() && given.scalar_type() == tensor.scalar_type() &&
        tensor.is_non_overlapping_and_dense())
      tensor.variable_data().copy_(given);
  }
  ++decisions_;
  Record record{find_operator("plumb::decision"), {arg}, {}, {}, true, modules_now(), nullptr};
  if (request.locate) record.source = request.locate();
  records.push_back(std::move(record));
}

void Session::decide(const std::vector<RecordedArg>& args, at::ArrayRef<c10::IValue> given) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (given[i].isTensor()) {
      decide(args[i], given[i].toTensor());
    } else if (const auto* list = std::get_if<std::vector<RecordedArg>>(&args[i].data); list && given[i].isList()) {
      const auto elements = given[i].toListRef();
      for (size_t k = 0; k < list->size(); ++k) {
        if (elements[k].isTensor()) decide((*list)[k], elements[k].toTensor());
      }
    }
  }
}

void Session::check_buffer_reads() const {
  for (const auto& [attribute, error] : buffer_reads_) {
    bool written = saved_.count(attribute) != 0;
    for (const auto& [target, value] : write_backs) written = written || target == attribute;
    if (written) throw error;
  }
}

// torch::nn::MultiheadAttention asks whether query and key are equal to choose between two ways to the same numbers.
// For one and the same tensor, or for other shapes, the answer is known; otherwise a node checks it in every run.
void Session::guard_equal(const std::vector<RecordedArg>& args, const torch::jit::Stack& stack) {
  const auto given = torch::jit::last(stack, 2);
  const at::Tensor a = given[0].toTensor(), b = given[1].toTensor();
  const int* x = std::get_if<int>(&args[0].data);
  const int* y = std::get_if<int>(&args[1].data);
  if (x && y && *x == *y) return;
  if (a.sizes() != b.sizes()) return;
  if (stood_in) ask_for_values();
  const bool expected = at::equal(a, b);
  guard("plumb::guard_equal", {args[0], args[1], RecordedArg{c10::IValue(expected)}},
        std::string("aten::equal answered ") + (expected ? "true" : "false") +
            " at capture: the graph checks that it still does");
}

bool Session::has_dynamic_sizes(const at::Tensor& tensor) const {
  if (!any_dynamic_ || !tensor.defined()) return false;
  auto it = by_impl_.find(tensor.unsafeGetTensorImpl());
  if (it == by_impl_.end()) return false;
  const RecordedValue& value = values[static_cast<size_t>(it->second.value)];
  return value.dynamic && !value.dead && !value.size_guarded;
}

void Session::guard_size(const at::Tensor& tensor, bool exact) {
  auto it = by_impl_.find(tensor.unsafeGetTensorImpl());
  if (it == by_impl_.end()) return;
  if (exact) values[static_cast<size_t>(it->second.value)].size_guarded = true;
  guard("plumb::guard_size",
        {RecordedArg{it->second.value}, RecordedArg{c10::IValue(tensor.sizes().vec())}, RecordedArg{c10::IValue(exact)},
         RecordedArg{c10::IValue(where())}},
        std::string("the forward reads a size that depends on the data, ") + text(tensor.sizes()) +
            ": the graph checks that " + (exact ? "it stays the same" : "it stays as empty or not"));
}

}  // namespace plumb
