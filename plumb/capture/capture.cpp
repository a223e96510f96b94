#include "plumb/capture/capture.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <exception>

#include "plumb/capture/capture_mode.h"
#include "plumb/capture/session.h"
#include "plumb/capture/verify.h"
#include "plumb/core/error.h"
#include "plumb/core/text.h"
#include "plumb/graph/own_buffers.h"
#include "plumb/graph/summary.h"

namespace plumb {
namespace {

struct OneCapture {
  std::shared_ptr<GraphModule> module;
  std::vector<std::string> notes;
  std::vector<at::Tensor> left;  // outside of the outputs
};

void check_number(const TreeSpec& spec, size_t values, const char* what) {
  if (spec.num_leaves() == values) return;
  throw Error(ErrorKind::StructureMismatch, c10::str("the structure of the ", what, " ", spec.to_string(), " has ",
                                                     spec.num_leaves(), " values, ", values, " are there"));
}

// Writes what the model re-assigned back into buffers and attributes, and puts the old tensors back in their places.
void write_back(Session& session) {
  const CaptureRequest& request = session.request;
  if (request.buffers_after) {
    for (const auto& [name, tensor] : request.buffers_after()) {
      for (size_t i = 0; i < session.recorder.num_state && tensor.defined(); ++i) {
        const Attr& attr = session.recorder.attributes[i];
        if (attr.kind == AttrKind::Buffer && attr.name == name && !tensor.is_same(attr.tensor))
          session.write_back(static_cast<int>(i), tensor, "buffer '" + name + "'");
      }
    }
  }
  if (request.attributes_after) {
    for (const auto& [name, old, now] : request.attributes_after()) session.write_back_attribute(name, old, now);
  }
}

// Why a failed attempt may succeed in another mode.
std::optional<RetryReason> reason_to_retry(const Session& session) {
  if (session.attempt.retry) return session.attempt.retry;
  // The failure may be one of the zeros.
  if (session.attempt.skipped) return RetryReason::NeedsValues;
  if (!session.recorder.refusal)
    return session.attempt.mode.tell_libraries ? std::optional(RetryReason::LibraryFails) : std::nullopt;
  if (session.recorder.refused_in_library) return RetryReason::LibraryBranches;
  if (session.recorder.refusal->kind() == ErrorKind::DataDependent) return RetryReason::DataDependent;
  return std::nullopt;
}

OneCapture capture_once(const CaptureRequest& request, const CaptureOptions& options, Attempt& attempt) {
  c10::InferenceMode normal(false);
  Session session(request, attempt);
  // With grad on, so that torch's fused inference paths do not hide the operators.
  at::AutoGradMode grad(true);
  auto inputs = session.feed();
  TreeSpec out_spec;
  std::vector<c10::IValue> outputs;
  const auto take_left = [&] {
    outputs.clear();
    inputs.clear();
    return session.take_left();
  };
  if (request.begin_attempt) request.begin_attempt(attempt.mode.tell_libraries);
  session.start();
  try {
    outputs = request.call(inputs, out_spec);
    // The program may have caught it.
    if (attempt.retry) throw Attempt::GivenUp();
    if (session.recorder.refusal) throw *session.recorder.refusal;
    session.refuse_other_memory();
    session.refuse_gradients();
    session.refuse_seeds();
  } catch (...) {
    session.stop();
    attempt.retry = reason_to_retry(session);
    if (request.buffers_after) request.buffers_after();
    if (request.attributes_after) request.attributes_after();
    take_left();  // what a failed attempt leaves holds computed values, too
    if (session.recorder.refusal) throw *session.recorder.refusal;
    throw;
  }
  session.stop();
  check_number(out_spec, outputs.size(), "outputs");
  write_back(session);
  session.guards.check_buffer_reads();
  refuse_hooks(session.recorder, outputs);
  OneCapture result;
  result.module = build_graph(session, outputs, std::move(out_spec), options);
  result.notes = std::move(session.recorder.notes);
  result.left = take_left();
  return result;
}

AllowedModes allowed_modes(const CaptureRequest& request, const CaptureOptions& options) {
  return {.skip_compute = !options.verify,
          .tell_libraries = static_cast<bool>(request.in_library),
          .guard_values = request.guard_values,
          .guarded_tells_libraries = request.has_libraries};
}

// Begins in `mode` and leaves there the one that the forward took.
OneCapture capture_in_modes(const CaptureRequest& request, const CaptureOptions& options, CaptureMode& mode) {
  std::exception_ptr refused;  // what a graph cannot hold of the library's other way
  while (true) {
    Attempt attempt{mode};
    try {
      return capture_once(request, options, attempt);
    } catch (...) {
      const auto next = attempt.retry ? next_mode(mode, *attempt.retry, allowed_modes(request, options)) : std::nullopt;
      if (!next && refused && attempt.retry == RetryReason::LibraryFails) std::rethrow_exception(refused);
      if (!next) throw;
      if (attempt.retry == RetryReason::LibraryBranches) refused = std::current_exception();
      mode = *next;
    }
  }
}

// A tensor that the forward leaves in a member of the module is state if the next call reads it and leaves another. A
// graph would begin every run with the same one.
void check_next_call(const CaptureRequest& request, const CaptureOptions& options, CaptureMode mode,
                     OneCapture& first) {
  if (first.left.empty()) return;
  const std::string what = "the forward leaves a tensor, " + type_text(TensorMeta::of(first.left.back())) +
                           ", outside of its outputs, in a member of the module, say";
  const auto refuse = [&](const std::string& why, const std::string& where = "") {
    throw Error(ErrorKind::Capture, what + ", and " + why, where,
                "register it as a buffer and write it with copy_(), or pass it in and out of the forward");
  };
  OneCapture second;
  try {
    second = capture_in_modes(request, options, mode);
  } catch (const Error& error) {
    refuse("the next call cannot be captured: " + error.message(), error.where());
  }
  const auto was_left = [&](const Attr& attr) {
    return attr.tensor.defined() && std::ranges::any_of(first.left, [&](const at::Tensor& t) {
             return t.has_storage() && attr.tensor.has_storage() && t.is_alias_of(attr.tensor);
           });
  };
  if (!second.left.empty() && std::ranges::any_of(second.module->state(), was_left))
    refuse("the next call reads it and leaves another: a graph would begin every run with the same one");
  first.notes.push_back(what + ": a run of the graph does not");
}

// A forward may ask for its training mode itself, and take another path in the other one.
void check_other_mode(const CaptureRequest& request, const CaptureOptions& options, CaptureMode mode,
                      GraphModule& module) {
  if (!request.other_mode || depends_on_mode(module.graph(), module.is_training())) return;
  CaptureRequest other = request;
  other.call = [&](const std::vector<c10::IValue>& inputs, TreeSpec& out_spec) {
    request.other_mode();
    return request.call(inputs, out_spec);
  };
  std::optional<std::string> from = "";
  try {
    from = difference_of(module.graph(), capture_in_modes(other, options, mode).module->graph());
  } catch (const std::exception&) {  // it cannot be captured there
  }
  if (from) module.set_mode_read_at("its path in the other mode is another one" + *from);
}

}  // namespace

void push_module(std::string path, std::string type) {
  if (Session* s = Session::current()) s->recorder.module_stack.push_back({std::move(path), std::move(type)});
}

void pop_module() {
  Session* s = Session::current();
  if (s && !s->recorder.module_stack.empty()) s->recorder.module_stack.pop_back();
}

bool is_capturing() { return Session::current() != nullptr; }

void refuse_capture(const std::string& what, const std::string& remedy) {
  if (Session* s = Session::current()) s->recorder.refuse(what, remedy);
  throw Error(ErrorKind::Capture, what, "", remedy);
}

void assign_data(const at::Tensor& tensor, const at::Tensor& value) {
  if (Session* s = Session::current()) return s->assign_data(tensor, value);
  at::Tensor(tensor).set_data(value);
}

bool is_computed(const at::Tensor& tensor) {
  Session* s = Session::current();
  const int value = s ? s->recorder.values.find_object(tensor) : -1;
  if (value < 0) return false;
  const RecordedValue& known = s->recorder.values[value];
  return known.origin != RecordedValue::Attribute && !known.from_constants;
}

bool is_result(const at::Tensor& tensor) {
  Session* s = Session::current();
  const int value = s ? s->recorder.values.find_object(tensor) : -1;
  return value >= 0 && s->recorder.values[value].origin == RecordedValue::Result;
}

bool size_depends_on_values(const at::Tensor& tensor) {
  Session* s = Session::current();
  return s && s->guards.has_dynamic_sizes(tensor);
}

void guard_size_read(const at::Tensor& tensor, bool exact) {
  if (Session* s = Session::current()) s->guards.guard_size(tensor, exact);
}

bool requires_grad_as_given(const at::Tensor& tensor, bool guarded) {
  Session* s = Session::current();
  return s ? s->guards.requires_grad(tensor, guarded) : tensor.requires_grad();
}

at::Tensor guard_values_read(const at::Tensor& tensor) {
  Session* s = Session::current();
  return s ? s->guards.guard_values(tensor) : at::Tensor();
}

namespace {

// In the order of a state_dict: a module's own parameters, its own buffers, its children.
void add_state(const torch::nn::Module& module, const std::string& prefix, State& state) {
  for (const auto& p : module.named_parameters(false)) {
    state.add({prefix + p.key(), AttrKind::Parameter, p.value(), true});
  }
  for (const auto& b : module.named_buffers(false)) state.add({prefix + b.key(), AttrKind::Buffer, b.value(), true});
  for (const auto& child : module.named_children()) add_state(*child.value(), prefix + child.key() + ".", state);
}

}  // namespace

std::function<std::vector<std::pair<std::string, at::Tensor>>()> capture_detail::look_again(torch::nn::Module& module) {
  struct Part {
    torch::nn::Module* module;
    bool training;
    torch::OrderedDict<std::string, at::Tensor> buffers;
  };
  // A module stands before its children, whose modes its train() sets, too.
  std::vector<Part> parts;
  module.apply([&](torch::nn::Module& part) { parts.push_back({&part, part.is_training(), buffers_of(part)}); });
  return [&module, parts] {
    std::vector<std::pair<std::string, at::Tensor>> now;
    for (const auto& b : module.named_buffers()) now.emplace_back(b.key(), b.value());
    for (const Part& part : parts) {
      if (part.module->is_training() != part.training) part.module->train(part.training);
      for (const auto& buffer : part.buffers) {
        if (at::Tensor* held = buffers_of(*part.module).find(buffer.key())) *held = buffer.value();
      }
    }
    return now;
  };
}

torch::nn::Module& capture_detail::not_null(torch::nn::Module* module) {
  if (module) return *module;
  throw Error(ErrorKind::InvalidArgument, "the model is a null pointer or an empty holder", "",
              "make the module first");
}

namespace {

// Keeps the types of lists and dicts, also of empty ones.
c10::IValue with_leaves_of(const c10::IValue& nested, const c10::IValue*& next) {
  if (nested.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& e : nested.toTupleRef().elements()) elements.push_back(with_leaves_of(e, next));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (nested.isList()) {
    auto list = nested.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, with_leaves_of(list.get(i), next));
    return list;
  }
  if (nested.isGenericDict()) {
    auto dict = nested.toGenericDict().copy();
    for (const auto& entry : dict) entry.setValue(with_leaves_of(entry.value(), next));
    return dict;
  }
  return *next++;
}

}  // namespace

std::vector<c10::IValue> capture_detail::with_leaves(const std::vector<c10::IValue>& arguments,
                                                     const std::vector<c10::IValue>& flat) {
  std::vector<c10::IValue> filled;
  const c10::IValue* next = flat.data();
  for (const c10::IValue& argument : arguments) filled.push_back(with_leaves_of(argument, next));
  return filled;
}

State state_of(const torch::nn::Module& module) {
  State state;
  add_state(module, "", state);
  return state;
}

std::shared_ptr<GraphModule> capture(const CaptureRequest& request, const CaptureOptions& options) {
  if (!request.call)
    throw Error(ErrorKind::InvalidArgument, "CaptureRequest::call is empty", "", "give a function that runs the model");
  check_number(request.in_spec, request.inputs.size(), "inputs");
  if (options.input_names.size() > request.inputs.size()) {
    throw Error(ErrorKind::StructureMismatch, c10::str("CaptureOptions::input_names has ", options.input_names.size(),
                                                       " names for ", request.inputs.size(), " inputs"));
  }
  for (const std::string& name : options.input_names) {
    if (is_utf8(name)) continue;
    throw Error(ErrorKind::InvalidArgument, "'" + name + "' is no name of an input", "", "give it a name in UTF-8");
  }
  CaptureMode mode = first_mode(allowed_modes(request, options), request.control_values.has_value());
  OneCapture first = capture_in_modes(request, options, mode);
  check_next_call(request, options, mode, first);
  check_other_mode(request, options, mode, *first.module);
  if (options.verify) {
    verify_capture(request, *first.module,
                   [&](const CaptureRequest& other) { return capture_in_modes(other, options, mode).module; });
  }
  if (options.notes) options.notes->insert(options.notes->end(), first.notes.begin(), first.notes.end());
  return first.module;
}

CaptureMode first_mode(const AllowedModes& allowed, bool guard_values) {
  return {.skip_compute = allowed.skip_compute,
          .tell_libraries = guard_values && allowed.guarded_tells_libraries,
          .guard_values = guard_values};
}

std::optional<CaptureMode> next_mode(const CaptureMode& mode, RetryReason reason, const AllowedModes& allowed) {
  CaptureMode next = mode;
  switch (reason) {
    case RetryReason::NeedsComposites: next.open_composites = true; break;
    case RetryReason::NeedsValues: next.skip_compute = false; break;
    case RetryReason::LibraryFails:
      if (!allowed.guard_values) return std::nullopt;
      if (!mode.guard_values) next = first_mode(allowed, true);
      next.tell_libraries = false;
      break;
    case RetryReason::LibraryBranches:
      if (allowed.tell_libraries && !mode.tell_libraries && !mode.guard_values) {
        next = first_mode(allowed, false);
        next.tell_libraries = true;
        break;
      }
      [[fallthrough]];
    case RetryReason::DataDependent:
      if (allowed.guard_values && !mode.guard_values) next = first_mode(allowed, true);
      break;
  }
  if (next == mode) return std::nullopt;
  return next;
}

}  // namespace plumb
