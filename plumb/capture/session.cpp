#include "plumb/capture/session.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/functorch/DynamicLayer.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <algorithm>

#include "plumb/capture/fake_result.h"
#include "plumb/operators/dispatch_keys.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {

namespace {

thread_local Session* current_session = nullptr;

bool is_wrapper(const at::Tensor& t) {
  return t.defined() && (t.key_set().has(c10::DispatchKey::FuncTorchBatched) ||
                         t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper));
}

// Inside torch.func.grad and jvp the result is a wrapper, whatever the operator takes. A rule of vmap calls operators
// on plain tensors, and each call comes back once more below the last layer: recorded twice, it would write twice.
bool inside_layers() { return !at::functorch::getDynamicLayerStack().empty(); }

bool works_on_wrappers(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const c10::IValue& v : torch::jit::last(stack, op.schema().arguments().size())) {
    if (any_tensor(v, is_wrapper)) return true;
  }
  return false;
}

bool writes(const c10::FunctionSchema& schema, size_t i) {
  const auto& argument = schema.arguments()[i];
  const OperatorFacts& facts = operator_facts(schema.name());
  return (argument.alias_info() && argument.alias_info()->isWrite()) || argument.name() == facts.writes[0] ||
         argument.name() == facts.writes[1];
}

// clone() lays out anew what has gaps, and a model may ask for strides.
at::Tensor clone_as_laid_out(const at::Tensor& t) {
  const bool gaps = t.layout() == at::kStrided && !t.is_nested() && !t.is_non_overlapping_and_dense() &&
                    at::has_internal_overlap(t) != at::MemOverlap::Yes;
  return gaps ? at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t) : t.clone();
}

// Returns whether the arguments of _reshape_alias (self, size, stride) are those of a view: a file may hold that.
bool is_view(const torch::jit::Stack& stack) {
  const auto args = torch::jit::last(stack, 3);
  const at::Tensor& self = args[0].toTensor();
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), args[1].toDimVector());
  return stride && *stride == args[2].toDimVector();
}

void redispatch_below(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kCaptureKey), stack);
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (!a.has_storage() || !b.has_storage()) return false;
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.layout() == b.layout();
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.is_alias_of(b);
}

// Returns a copy with the strides of `x`: a dimension that shows one row many times (expand) does so in the copy.
at::Tensor copy_with_strides(const at::Tensor& x) {
  at::Tensor once = x;
  for (int64_t d = 0; x.layout() == at::kStrided && !x.is_nested() && d < x.dim(); ++d) {
    if (x.stride(d) == 0 && x.size(d) > 1) once = once.narrow(d, 0, 1);
  }
  const at::Tensor copy = clone_as_laid_out(once);
  return once.is_same(x) ? copy : copy.expand_as(x);
}

}  // namespace

Session* Session::current() { return current_session; }

Session::Session(const CaptureRequest& r, Attempt& a)
    : request(r),
      attempt(a),
      module_state_(r.state, r.inputs),
      recorder(r, module_state_),
      guards(recorder, module_state_, a) {
  module_state_.expect_no_backward();
}

Session::~Session() { stop(); }

std::vector<c10::IValue> Session::feed() {
  std::vector<c10::IValue> fed;
  at::AutoGradMode grad(true);
  for (const c10::IValue& v : request.inputs) {
    if (!v.isTensor() || !v.toTensor().defined()) {
      if (!(v.isTensor() || v.isNone() || v.isScalar() || v.isString())) {
        recorder.refuse(c10::str("input ", fed.size(), " is a ", v.tagKind(), ", which a graph cannot check in a run"),
                        "give tensors, numbers and texts, one by one: flatten() has those of lists, tuples and dicts");
      }
      fed.push_back(v);
      recorder.input_values.push_back(-1);
      continue;
    }
    const at::Tensor& given = v.toTensor();
    // Clones keep repeated inputs apart. They require grad, so that a custom autograd function is always noticed, and
    // are no leaves, so that in-place operators may write them.
    // (Where the caller's own is a leaf that requires grad, nobody may write it, and autocast tells leaves apart.)
    at::Tensor copy = given.is_inference() ? given.clone() : given.detach();
    const bool leaf = given.requires_grad() && given.is_leaf();
    if (leaf) copy = copy_with_strides(copy);
    if (copy.is_floating_point() || copy.is_complex()) copy.requires_grad_(true);
    if (!leaf) copy = copy_with_strides(copy);
    recorder.add_input(copy, given);
    fed.emplace_back(copy);
  }
  return fed;
}

void Session::start() {
  // Weights cast by an autocast region that is already open would look like tensors of unknown origin.
  at::autocast::clear_cache();
  outer_ = current_session;
  current_session = this;
  active_ = true;
  c10::impl::tls_set_dispatch_key_included(kCaptureKey, true);
}

void Session::stop() {
  if (!active_) return;
  active_ = false;
  current_session = outer_;
  if (!outer_) c10::impl::tls_set_dispatch_key_included(kCaptureKey, false);
  at::autocast::clear_cache();
}

void Session::pause() {
  attempt.need_values();
  module_state_.note_backward();
  current_session = nullptr;
  c10::impl::tls_set_dispatch_key_included(kCaptureKey, false);
}

void Session::resume() {
  current_session = this;
  c10::impl::tls_set_dispatch_key_included(kCaptureKey, true);
}

// torch.tensor([..]), x[[0, 2]] and from_numpy fill memory by raw pointer and then call lift_fresh: its contents now
// are a constant. The model may write into the result, so each call starts from a clone.
void Session::record_lift_fresh(torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
  const at::Tensor t = stack->back().toTensor();
  const int value = recorder.constant_copy(t);
  recorder.emit("aten::clone", {RecordedArg{value}, RecordedArg{c10::IValue()}}, t, true);
}

// torch.func.jvp keeps pairs of values and tangents in wrappers; here, below them, nothing reads what makes a pair.
void Session::record_dual(torch::jit::Stack* stack) {
  if (!inside_torch_func_) {
    recorder.refuse(
        "forward-mode differentiation (make_dual) computes tangents inside of operators, where they are not seen",
        "use torch.func.jvp: its operators are seen");
  }
  torch::jit::drop(*stack, 2);  // leaves the value
  const auto alias = find_operator("aten::alias");
  record(alias, stack->back().toTensor().key_set(), stack);
}

// A graph that runs inside of this capture asks of what was fed here as requiring a gradient.
void Session::record_asked(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::Tensor& x = (*stack)[stack->size() - 3].toTensor();
  const bool answer = guards.requires_grad(x, true);
  c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
  if (!answer) x = x.detach();
  op.callBoxed(*stack);
}

void Session::before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto given = torch::jit::last(stack, schema.arguments().size());
  auto keep = [&](const at::Tensor& t) {
    if (!t.defined() || !t.has_storage()) return;
    recorder.values.mark_written(t);
    recorder.stale.before_write(t);
    recorder.seen.before_write(t);
    module_state_.before_write(t);
  };
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (!writes(schema, i)) continue;
    if (given[i].isTensor()) keep(given[i].toTensor());
    if (given[i].isTensorList()) {
      for (const at::Tensor& t : given[i].toTensorVector()) keep(t);
    }
  }
}

// Runs a function that no schema describes: it may write what it is given.
void Session::run_opaque(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::vector<std::pair<at::Tensor, int64_t>> given;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!argument.isTensorList()) continue;
    for (const at::Tensor& t : argument.toTensorVector()) {
      if (!t.defined() || !t.has_storage() || t.is_meta()) continue;
      module_state_.before_write(t);
      given.emplace_back(t, t.is_inference() ? 0 : t._version());
    }
  }
  op.callBoxed(*stack);
  for (const auto& [t, version] : given) {
    // A write through `.data` leaves the version alone.
    if (module_state_.was_not_written(t) && (t.is_inference() || t._version() == version)) continue;
    recorder.values.mark_written(t);
    recorder.stale.before_write(t);
  }
}

// Returns true if autocast has a kernel for the operator, which has then run: its casts and the operator on cast inputs
// were recorded as ordinary calls. `composite`: the operators that this one is made of may have such kernels.
bool Session::autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                       bool& composite) {
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  bool active = false;
  for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (!at::autocast::is_autocast_enabled(device)) continue;
    const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
    if (excluded.has(key)) continue;
    active = true;
    if (keys.has(key) && op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key)) {
      ++autocast_hits_;
      op.callBoxedForDispatchKey(key, *stack);  // with our key still on
      return true;
    }
  }
  // Its kernel itself calls products, which autocast casts where no graph can say so.
  if (active && op.schema().name() == "aten::_trilinear") {
    recorder.refuse(
        "bilinear under autocast casts inside of its own kernel",
        "call it outside of the autocast region, or write it as torch.einsum('bi,oij,bj->bo', x, weight, y) + bias");
  }
  // Python functions open autocast regions of their own. Operators that return a value to the program stay whole.
  composite = active && op.schema().name() != "plumb::python_function" && !is_value_reader(operator_name(op)) &&
              op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return false;
}

// Returns whether the operators that this one is made of are recorded in its place.
bool Session::is_opened(const c10::OperatorHandle& op, const std::string& name) const {
  // Which kernel of attention runs depends on a context that a replay does not have.
  if (name == "aten::scaled_dot_product_attention" || name == "aten::_scaled_dot_product_attention_math")
    if (!at::globalContext().userEnabledFlashSDP()) return true;
  if (!attempt.mode.open_composites || name.starts_with("plumb::") || is_value_reader(name)) return false;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  for (const auto& r : op.schema().returns()) {
    if (r.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

struct Session::Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  torch::jit::Stack* stack;
  std::string name;
  Record record;
  bool composite = false;      // autocast may act on the operators that it is made of
  bool from_constants = true;  // it takes constants alone
  bool unrecorded = false;     // it runs and leaves no record
};

void Session::record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (torch::autograd::get_current_node()) module_state_.note_backward();
  // Inside vmap or torch.func.grad the operator works on wrappers; its calls on plain tensors come back here.
  if (works_on_wrappers(op, *stack) || inside_layers()) {
    const auto leave = c10::make_scope_exit([this, outer = inside_torch_func_] { inside_torch_func_ = outer; });
    inside_torch_func_ = true;
    // Those that a composite makes on the way are seen only from here.
    if (attempt.mode.open_composites && is_opened(op, operator_name(op)))
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    else
      redispatch_below(op, keys, stack);
    return;
  }
  bool composite = false;
  if (autocast(op, keys, stack, composite)) return;
  std::string name = operator_name(op);
  // Marks for the profiler (record_function) hold an object and compute nothing.
  if (name.starts_with("profiler::")) return redispatch_below(op, keys, stack);
  if (name == "aten::_make_dual") return record_dual(stack);
  if (name == "plumb::guard_requires_grad") return record_asked(op, stack);
  // A backward pass inside the forward works on tensors that the operators below composite ones have saved.
  if (!attempt.mode.open_composites && torch::autograd::get_current_node())
    attempt.give_up(RetryReason::NeedsComposites);
  if (is_opened(op, name)) return redispatch_below(op, keys, stack);
  // A composite operator that is one call if nothing in it is cast: it reads the value itself, as without autocast.
  if (tried_ && tried_->hits == autocast_hits_ && is_value_reader(name)) {
    tried_->reader = name;
    c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
    return op.callBoxed(*stack);
  }
  if (name == "aten::lift_fresh") return record_lift_fresh(stack);
  if (name == "aten::_reshape_alias" && is_view(*stack)) {
    torch::jit::drop(*stack, 1);
    return record(find_operator("aten::view"), keys, stack);
  }
  if (name == "aten::set_.source_Storage" || name == "aten::set_.source_Storage_storage_offset")
    recorder.refuse(name + ": the model works on raw storage", "use tensors");
  // It returns while the other processes are at work; what waits for them is no operator.
  if (name.starts_with("c10d::"))
    recorder.refuse(
        name + " talks to other processes, and a graph would not wait for them",
        "call the function of torch.distributed.nn.functional, which a graph calls as it is, or talk to them "
        "outside of the forward");
  Call call{op, keys, stack, std::move(name), recorder.begin(op), composite};
  call.record.grad_enabled = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  record_call(call);
}

void Session::refuse_numpy(const Call& call, at::ArrayRef<c10::IValue> args) {
  const bool converts = call.name == "aten::resolve_neg" && !recorder.records.empty() &&
                        operator_name(recorder.records.back().op) == "aten::resolve_conj";
  if (!converts || call.from_constants || !args[0].isTensor()) return;
  if (args[0].toTensor().is_neg() || args[0].toTensor().is_complex()) return;
  recorder.refuse("numpy() or tolist() takes values out of a tensor, so the program would depend on the data",
                  "keep the computation in torch, move it out of the module, or transform the module itself "
                  "(plumb.transforms), which keeps a graph for each answer",
                  ErrorKind::DataDependent);
}

void Session::record_call(Call& call) {
  const auto mark = recorder.mark();
  const size_t hits = autocast_hits_;
  {
    c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
    const auto args = torch::jit::last(*call.stack, call.op.schema().arguments().size());
    Record& record = call.record;
    for (size_t i = 0; i < args.size(); ++i) {
      const bool written = record.grad_enabled && args[i].isTensor() && writes(call.op.schema(), i);
      record.args.push_back(recorder.argument(args[i], call.name, call.from_constants));
      if (written) recorder.cut_off_data(args[i].toTensor(), record.args.back());
    }
    if (!call.from_constants) guards.note_control_values(call.op, call.name, record.args, args);
    call.unrecorded = guards.answered_at_capture(call.op, call.name, record.args, call.from_constants, *call.stack);
    refuse_numpy(call, args);
    // Cutting a tensor that nothing hangs on changes nothing.
    if (call.name == "aten::detach_" && args[0].isTensor() && !args[0].toTensor().requires_grad())
      call.unrecorded = true;
    if (call.op.hasTag(at::Tag::nondeterministic_seeded)) call.from_constants = false;
    before_write(call.op, *call.stack);
    const OperatorFacts& facts = operator_facts(call.name);
    if (facts.opaque || facts.name.empty()) {  // nobody sees what runs in it, or what it writes
      module_state_.note_backward();
      for (const c10::IValue& argument : args) {
        any_tensor(argument, [&](const at::Tensor& t) {
          recorder.seen.before_write(t);
          return false;
        });
      }
    }
    record.dynamic = guards.results_have_dynamic_sizes(call.op, call.name, record.args, args, call.from_constants);
    if (!call.composite) {
      if (attempt.mode.skip_compute && !call.from_constants && fake_result(call.op, call.name, call.stack)) {
        attempt.skipped = true;
      } else if (facts.opaque) {
        run_opaque(call.op, call.stack);
      } else {
        call.op.callBoxed(*call.stack);
        if (request.unit_weights && !call.from_constants) limit_product(call.op, facts, call.stack);
      }
      if (!call.unrecorded) recorder.finish(std::move(record), *call.stack, call.from_constants);
      return;
    }
  }
  // With our key on: if an operator inside has a cast, the calls inside are the recording.
  Tried tried{hits, {}};
  {
    const auto leave = c10::make_scope_exit([this, outer = tried_] { tried_ = outer; });
    tried_ = &tried;
    redispatch_below(call.op, call.keys, call.stack);
  }
  if (autocast_hits_ != hits && !tried.reader.empty()) {
    recorder.refuse(call.name + " casts under autocast and, by " + tried.reader + ", takes a value out of a tensor",
                    "call it outside of the autocast region", ErrorKind::DataDependent);
  }
  if (call.unrecorded || autocast_hits_ != hits) return;
  // Otherwise it is the one call that the user wrote.
  recorder.drop_since(mark);
  c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
  recorder.finish(std::move(call.record), *call.stack, call.from_constants);
}

// The backward of what was computed so far would find other values in the tensor.
bool Session::was_read_for_gradients(const at::Tensor& tensor) const {
  const int now = recorder.values.find_object(tensor);
  for (const Record& record : recorder.records) {
    const std::string& name = record.op.schema().name();
    if (!record.grad_enabled || name == "aten::detach" || name == "plumb::data") continue;
    const bool differentiable =
        std::ranges::any_of(record.results, [&](int value) { return recorder.values[value].requires_grad; });
    bool reads = false;
    for (const RecordedArg& arg : record.args) for_each_value(arg, [&](int value) { reads = reads || value == now; });
    if (differentiable && reads) return true;
  }
  return false;
}

// An assignment to `.data`, which no operator shows, exchanges the memory of a tensor under autograd's eyes.
void Session::assign_data(const at::Tensor& tensor, const at::Tensor& value) {
  {
    c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
    if (tensor.is_same(value) || (share_memory(tensor, value) && same_layout(tensor, value) &&
                                  tensor.storage_offset() == value.storage_offset()))
      return;
    const int target = recorder.look_up(tensor, "an assignment to .data");
    recorder.look_up(value, "an assignment to .data");
    const auto attribute = std::ranges::find_if(
        recorder.attributes, [&](const Attr& attr) { return attr.tensor.defined() && attr.tensor.is_same(tensor); });
    const std::string assigned = "the forward assigns to .data of ";
    if (attribute == recorder.attributes.end()) {
      recorder.refuse(assigned + "a tensor that is no parameter, buffer or attribute of the model",
                      "compute a new tensor, or write with copy_()");
    }
    const std::string name = "'" + attribute->name + "'";
    if (!same_layout(tensor, value)) {
      recorder.refuse(assigned + name + " a tensor of another shape, dtype, device or layout",
                      "keep these, as copy_() does");
    }
    const auto shared =
        std::ranges::find_if(recorder.attributes, [&](const Attr& attr) { return share_memory(attr.tensor, value); });
    const bool of_input =
        std::ranges::any_of(recorder.fed, [&](const at::Tensor& x) { return share_memory(x, value); });
    if (shared != recorder.attributes.end() || of_input) {
      recorder.refuse(assigned + name + " the memory of " + (of_input ? "an input" : "'" + shared->name + "'") +
                          ", which both would share from then on",
                      "copy the values: .data.copy_(...), or assign a clone()");
    }
    if (was_read_for_gradients(tensor)) {
      recorder.refuse(assigned + name + " after it was used for results that need a gradient",
                      "assign before the tensor is used, or use it under torch.no_grad()");
    }
    module_state_.before_write(tensor);
    recorder.stale.add(tensor);
    at::Tensor(tensor).set_data(value.detach().clone(at::MemoryFormat::Preserve));
    recorder.values.bind(tensor, target);
    recorder.note_here(name + ".data is assigned in the forward: the graph copies the values into its memory");
  }
  tensor.variable_data().copy_(value);  // seen like a call of the program
  recorder.stale.add_twins(tensor, value);
}

void Session::write_back(int attribute, const at::Tensor& value, const std::string& what) {
  c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
  const Attr& attr = recorder.attributes[static_cast<size_t>(attribute)];
  if (value.sizes() != attr.tensor.sizes() || value.scalar_type() != attr.tensor.scalar_type()) {
    recorder.refuse(
        "the " + what + " is re-assigned in the forward with another shape or dtype",
        "if the first call gives it its shape, run the model once before; else keep its shape and dtype, or "
        "pass the state in and out of the forward");
  }
  recorder.write_backs.emplace_back(attribute, recorder.look_up(value, "the " + what));
  recorder.note(what + " is re-assigned in the forward: the graph writes it");
}

void Session::write_back_attribute(const std::string& name, const at::Tensor& old, const at::Tensor& now) {
  for (size_t i = recorder.num_state; i < recorder.attributes.size(); ++i) {
    if (recorder.attributes[i].tensor.is_same(old))
      return write_back(static_cast<int>(i), now, "attribute '" + name + "'");
  }
}

namespace {

void capture_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (Session* session = Session::current()) {
    session->record(op, keys, stack);
  } else {
    c10::impl::ExcludeDispatchKeyGuard below(kCaptureKey);
    op.callBoxed(*stack);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PLUMB_CAPTURE_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&capture_fallback>());
}

}  // namespace plumb
