#include "plumb/capture/session.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <array>
#include <typeinfo>
#include <unordered_set>

#include "plumb/capture/stand_in.h"
#include "plumb/core/error.h"
#include "plumb/graph/operator_facts.h"

namespace plumb {

// A mode key above autograd, autocast and the composite operators that nothing else uses: calls are seen as written.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

namespace {

thread_local Session* current_session = nullptr;

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

bool is_custom_function(const at::Tensor& t, std::string& name) {
  if (!t.grad_fn()) return false;
  const auto& node = *t.grad_fn();
  const std::string_view type = typeid(node).name();
  if (type.find("PyNode") == std::string_view::npos && type.find("CppNode") == std::string_view::npos) return false;
  name = node.name();
  return true;
}

bool has_tensor(const c10::IValue& v) {
  if (v.isTensor()) return true;
  if (!v.isList()) return false;
  for (const c10::IValue& e : v.toListRef()) {
    if (e.isTensor()) return true;
  }
  return false;
}

bool is_wrapper(const at::Tensor& t) {
  return t.defined() && (t.key_set().has(c10::DispatchKey::FuncTorchBatched) ||
                         t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper));
}

bool works_on_wrappers(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const c10::IValue& v : torch::jit::last(stack, op.schema().arguments().size())) {
    if (v.isTensor() && is_wrapper(v.toTensor())) return true;
    if (!v.isList() || v.isIntList() || v.isDoubleList()) continue;
    for (const c10::IValue& e : v.toListRef()) {
      if (e.isTensor() && is_wrapper(e.toTensor())) return true;
    }
  }
  return false;
}

}  // namespace

Session* Session::current() { return current_session; }

Session::Session(const CaptureRequest& r) : request(r) {
  for (const Attr& attr : request.state) {
    attributes.push_back(attr);
    attribute_values.push_back(-1);
    if (!attr.tensor.defined()) continue;
    const int index = static_cast<int>(attributes.size()) - 1;
    // A tied tensor keeps the number of its first name.
    auto known = by_impl_.find(attr.tensor.unsafeGetTensorImpl());
    if (known != by_impl_.end()) continue;
    const int value = new_value(attr.tensor, RecordedValue::Attribute);
    values[static_cast<size_t>(value)].attribute = index;
    attribute_values.back() = value;
    bind(attr.tensor, value);
    if (attr.tensor.has_storage()) {
      attributes_by_storage_[attr.tensor.storage().unsafeGetStorageImpl()].push_back(index);
    }
    if (attr.kind == AttrKind::Parameter) grads_.emplace_back(attr.tensor, attr.tensor.grad());
  }
  num_state = attributes.size();
  std::unordered_set<std::string> devices;
  auto save_generator = [&](const at::Device& device) {
    if (device.type() == at::kMeta || !devices.insert(device.str()).second) return;
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    generators_.emplace_back(generator, generator.get_state());
  };
  save_generator(at::Device(at::kCPU));
  for (const Attr& attr : attributes) {
    if (attr.tensor.defined() && attr.tensor.is_cuda()) save_generator(attr.tensor.device());
  }
  for (const auto& v : request.inputs) {
    if (v.isTensor() && v.toTensor().defined() && v.toTensor().is_cuda()) save_generator(v.toTensor().device());
  }
}

Session::~Session() {
  stop();
  // The model as it was: what was written is put back, random state too.
  at::NoGradGuard no_grad;
  for (auto& [index, contents] : saved_) attributes[static_cast<size_t>(index)].tensor.detach().copy_(contents);
  for (auto& [parameter, grad] : grads_) {
    if (!parameter.grad().is_same(grad)) parameter.mutable_grad() = grad;
  }
  for (auto& [generator, state] : generators_) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

std::vector<c10::IValue> Session::feed() {
  std::vector<c10::IValue> fed;
  at::AutoGradMode grad(true);
  for (const c10::IValue& v : request.inputs) {
    if (!v.isTensor() || !v.toTensor().defined()) {
      fed.push_back(v);
      input_values.push_back(-1);
      continue;
    }
    const at::Tensor& given = v.toTensor();
    // Clones keep repeated inputs apart. They require grad, so that a custom autograd function is always noticed, and
    // are no leaves, so that in-place operators may write them.
    // (Where the caller's own is a leaf that requires grad, nobody may write it, and autocast tells leaves apart.)
    at::Tensor copy = given.is_inference() ? given.clone() : given.detach();
    const bool leaf = given.requires_grad() && given.is_leaf();
    if (leaf) copy = copy.clone();
    if (copy.is_floating_point() || copy.is_complex()) copy.requires_grad_(true);
    if (!leaf) copy = copy.clone();
    const int value = new_value(copy, RecordedValue::Input);
    values[static_cast<size_t>(value)].meta.requires_grad = given.requires_grad();
    bind(copy, value);
    input_values.push_back(value);
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
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void Session::stop() {
  if (!active_) return;
  active_ = false;
  current_session = outer_;
  if (!outer_) c10::impl::tls_set_dispatch_key_included(kKey, false);
  at::autocast::clear_cache();
}

void Session::pause() {
  if (stood_in) ask_for_values();
  current_session = nullptr;
  c10::impl::tls_set_dispatch_key_included(kKey, false);
}

void Session::resume() {
  current_session = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

std::optional<Session::AliasKey> Session::alias_key(const at::Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided || t.is_nested()) return std::nullopt;
  return AliasKey{t.storage().unsafeGetStorageImpl(), t.storage_offset(), t.sizes().vec(), t.strides().vec(),
                  t.scalar_type()};
}

int Session::new_value(const at::Tensor& tensor, RecordedValue::Origin origin) {
  RecordedValue value;
  value.origin = origin;
  if (tensor.defined()) {
    value.meta = TensorMeta::of(tensor);
    value.requires_grad = tensor.requires_grad();
    value.grad_fn = tensor.grad_fn().get();
  }
  values.push_back(std::move(value));
  return static_cast<int>(values.size()) - 1;
}

void Session::bind(const at::Tensor& tensor, int value) {
  // Weak references: they keep an address from being used again and leave use_count alone, on which factories depend.
  const auto* impl = tensor.unsafeGetTensorImpl();
  by_impl_.insert_or_assign(
      impl,
      ImplEntry{value, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr())});
  if (auto key = alias_key(tensor)) {
    auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
    values_by_storage_[storage.get()].push_back(value);
    by_memory_.insert_or_assign(std::move(*key),
                                StorageEntry{value, c10::weak_intrusive_ptr<c10::StorageImpl>(storage)});
  }
}

std::string Session::where() const {
  NodeMeta meta;
  if (!module_stack.empty()) meta.modules = std::make_shared<const ModuleStack>(module_stack);
  if (request.locate) meta.source = request.locate();
  return meta.where();
}

void Session::refuse(const std::string& what, const std::string& remedy, ErrorKind kind) const {
  refusal.emplace(kind, what, where(), remedy);
  throw *refusal;
}

void Session::check_tensor(const at::Tensor& t, const std::string& reader) const {
  const auto keys = t.key_set();
  if (keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::FuncTorchGradWrapper)) {
    refuse(reader + " works on a tensor of torch.func (vmap, grad): its operators cannot be seen from outside",
           "apply torch.func to the captured module instead, or write the model without it");
  }
  if (keys.has(c10::DispatchKey::Python)) {
    refuse(reader + " works on a tensor subclass with __torch_dispatch__", "give the model plain tensors");
  }
}

int Session::emit(std::string_view op, std::vector<RecordedArg> args, const at::Tensor& result, bool from_constants) {
  Record record{find_operator(op), std::move(args), {-1}, {}, true, modules_now(), nullptr};
  if (request.locate) record.source = request.locate();
  const int value = new_value(result, RecordedValue::Result);
  values[static_cast<size_t>(value)].from_constants = from_constants;
  bind(result, value);
  record.results.push_back(value);
  records.push_back(std::move(record));
  return value;
}

int Session::add_constant(const at::Tensor& tensor, const std::string& reader) {
  const int value = new_value(tensor, RecordedValue::Attribute);
  const std::string name = "_constant_" + std::to_string(attributes.size() - num_state);
  values[static_cast<size_t>(value)].attribute = static_cast<int>(attributes.size());
  values[static_cast<size_t>(value)].from_constants = true;
  attributes.push_back({name, AttrKind::Constant, tensor, true});
  attribute_values.push_back(value);
  bind(tensor, value);
  if (tensor.has_storage()) {
    attributes_by_storage_[tensor.storage().unsafeGetStorageImpl()].push_back(static_cast<int>(attributes.size()) - 1);
  }
  std::ostringstream text;
  text << "constant " << name << ": a " << tensor.scalar_type() << tensor.sizes()
       << " tensor made outside of the forward, first used by " << reader;
  const std::string at = where();
  note(text.str() + (at.empty() ? "" : " at " + at));
  return value;
}

int Session::look_up(const at::Tensor& t, const std::string& reader) {
  check_tensor(t, reader);
  std::string function;
  const bool custom = is_custom_function(t, function);
  int found = -1;
  bool by_memory = false;
  if (auto it = by_impl_.find(t.unsafeGetTensorImpl()); it != by_impl_.end()) found = it->second.value;
  if (found >= 0 && values[static_cast<size_t>(found)].dead) found = -1;
  if (found < 0) {
    if (auto key = alias_key(t)) {
      if (auto it = by_memory_.find(*key);
          it != by_memory_.end() && !values[static_cast<size_t>(it->second.value)].dead) {
        found = it->second.value;
        by_memory = true;
      }
    }
  }
  if (custom && (found < 0 || values[static_cast<size_t>(found)].grad_fn != t.grad_fn().get())) {
    refuse("the result of the custom autograd function " + function + " reaches " + reader +
               ": its own backward would be lost",
           "call it through Function.apply inside the captured module (kept as one node), or write it with torch "
           "operators");
  }
  if (found >= 0) {
    RecordedValue& known = values[static_cast<size_t>(found)];
    if (known.written && !by_memory) known.requires_grad = t.requires_grad();
    if (known.requires_grad == t.requires_grad()) return found;
    if (known.requires_grad) {
      // Same memory, cut from the graph without a call that could be seen (.data): say it by a detach.
      return emit("aten::detach", {RecordedArg{found}}, t, known.from_constants);
    }
    if ((by_memory || known.origin == RecordedValue::Result) && t.is_leaf()) {
      // A leaf of the forward's own: only an autograd.grad inside of it can ask for its gradient, and that is captured.
      known.requires_grad = true;
      return found;
    }
    if (by_memory || known.origin == RecordedValue::Result) {
      refuse(reader + " uses a tensor that was made to require grad inside the forward (requires_grad_, nn.Parameter)",
             "create parameters in the module's constructor and register them");
    }
    return found;
  }
  if (t.grad_fn()) {
    refuse(reader + " uses a tensor of unknown origin that carries a gradient (" + t.grad_fn()->name() +
               "): it was made before the capture, in another thread, or by code that torch's dispatcher does not see",
           "compute it inside the forward, on the thread that called it (and torch.func.grad by torch.autograd.grad)");
  }
  return add_constant(t, reader);
}

RecordedArg Session::record_arg(const c10::IValue& v, const std::string& reader, bool& from_constants) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) return {c10::IValue()};
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
      const at::Scalar number = t.item();
      return {c10::IValue(number)};
    }
    const int value = look_up(t, reader);
    from_constants = from_constants && values[static_cast<size_t>(value)].from_constants;
    return {value};
  }
  if (v.isList()) {
    if (!has_tensor(v)) return {v.deepcopy()};
    std::vector<RecordedArg> elements;
    for (const c10::IValue& e : v.toListRef()) elements.push_back(record_arg(e, reader, from_constants));
    return {std::move(elements)};
  }
  if (v.isGenerator()) {
    refuse(reader + " is given a random generator of its own", "use torch's default generator (torch.manual_seed)");
  }
  if (v.isStorage()) {
    refuse(reader + " works on raw storage", "use tensors");
  }
  return {v};
}

int Session::constant_copy(const at::Tensor& t) {
  at::Tensor copy;
  {
    at::NoGradGuard no_grad;
    copy = t.detach().clone();
  }
  const int value = new_value(copy, RecordedValue::Attribute);
  values[static_cast<size_t>(value)].attribute = static_cast<int>(attributes.size());
  values[static_cast<size_t>(value)].from_constants = true;
  attributes.push_back({"_constant_" + std::to_string(attributes.size() - num_state), AttrKind::Constant, copy, true});
  attribute_values.push_back(value);
  return value;
}

// torch.tensor([..]), x[[0, 2]] and from_numpy fill memory by raw pointer and then call lift_fresh: what it holds now
// is a constant. The model may write into the result, so each call starts from a clone.
void Session::lift_fresh(torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const at::Tensor t = stack->back().toTensor();
  const int value = constant_copy(t);
  emit("aten::clone", {RecordedArg{value}, RecordedArg{c10::IValue()}}, t, true);
}

std::shared_ptr<const ModuleStack> Session::modules_now() {
  if (module_stack.empty()) return nullptr;
  if (!last_stack_ || *last_stack_ != module_stack) last_stack_ = std::make_shared<const ModuleStack>(module_stack);
  return last_stack_;
}

void Session::before_write(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& schema = op.schema();
  const auto given = torch::jit::last(stack, schema.arguments().size());
  auto save = [&](const at::Tensor& t) {
    if (!t.defined() || !t.has_storage()) return;
    // Writing through a view can make its base require grad.
    if (auto touched = values_by_storage_.find(t.storage().unsafeGetStorageImpl());
        touched != values_by_storage_.end()) {
      for (int v : touched->second) values[static_cast<size_t>(v)].written = true;
      touched->second.clear();
    }
    auto it = attributes_by_storage_.find(t.storage().unsafeGetStorageImpl());
    if (it == attributes_by_storage_.end()) return;
    for (int index : it->second) {
      if (saved_.count(index)) continue;
      at::NoGradGuard no_grad;
      saved_.emplace(index, attributes[static_cast<size_t>(index)].tensor.detach().clone());
    }
  };
  const OperatorFacts& facts = operator_facts(schema.name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool writes = (argument.alias_info() && argument.alias_info()->isWrite()) ||
                        argument.name() == facts.writes[0] || argument.name() == facts.writes[1];
    if (!writes) continue;
    if (given[i].isTensor()) save(given[i].toTensor());
    if (given[i].isTensorList()) {
      for (const at::Tensor& t : given[i].toTensorVector()) save(t);
    }
  }
}

bool Session::autocast(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                       bool& composite) {
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  bool active = false;
  for (auto [device, key] :
       {std::pair{at::kCPU, c10::DispatchKey::AutocastCPU}, std::pair{at::kCUDA, c10::DispatchKey::AutocastCUDA}}) {
    if (!at::autocast::is_autocast_enabled(device) || excluded.has(key)) continue;
    active = true;
    if (keys.has(key) && op.hasKernelForDispatchKey(key) && !op.isKernelFallthroughKernel(key)) {
      // With our key still on: the casts, and the operator on cast inputs, come back here as ordinary calls.
      ++autocast_hits_;
      op.callBoxedForDispatchKey(key, *stack);
      return true;
    }
  }
  // Its kernel itself calls products, which autocast casts where no graph can say so.
  if (active && op.schema().name() == "aten::_trilinear") {
    refuse("bilinear under autocast casts inside of its own kernel",
           "call it outside of the autocast region, or write it as torch.einsum('bi,oij,bj->bo', x, weight, y) + bias");
  }
  // (Python functions open autocast regions of their own.)
  composite = active && op.schema().name() != "plumb::python_function" &&
              op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return false;
}

void Session::bind_results(Record& record, const torch::jit::Stack& stack, bool from_constants) {
  const auto& returns = record.op.schema().returns();
  const auto results = torch::jit::last(stack, returns.size());
  auto bind_one = [&](const at::Tensor& t) {
    const int value = new_value(t, RecordedValue::Result);
    values[static_cast<size_t>(value)].from_constants = from_constants;
    if (record.dynamic && t.defined() && t.dim() > 0) any_dynamic_ = values[static_cast<size_t>(value)].dynamic = true;
    if (t.defined()) bind(t, value);
    record.results.push_back(value);
  };
  for (const c10::IValue& v : results) {
    if (v.isTensor()) {
      record.layout.push_back(-1);
      bind_one(v.toTensor());
    } else if (v.isTensorList()) {
      const auto list = v.toTensorVector();
      record.layout.push_back(static_cast<int32_t>(list.size()));
      for (const at::Tensor& t : list) bind_one(t);
    } else {
      record.layout.push_back(-1);
      record.results.push_back(new_value(at::Tensor(), RecordedValue::Result));
    }
  }
  // How many rows are packed for each step follows from the lengths alone.
  if (record.op.schema().name() == "aten::_pack_padded_sequence") {
    if (const int* lengths = std::get_if<int>(&record.args[1].data)) {
      values[static_cast<size_t>(record.results[1])].from_constants =
          values[static_cast<size_t>(*lengths)].from_constants;
    }
  }
}

bool Session::is_opened(const c10::OperatorHandle& op, const std::string& name) const {
  // Which kernel of attention runs depends on a context that a replay does not have.
  if (name == "aten::scaled_dot_product_attention" || name == "aten::_scaled_dot_product_attention_math")
    if (!at::globalContext().userEnabledFlashSDP()) return true;
  if (!open_composites || name.starts_with("plumb::") || is_value_reader(name)) return false;
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) return false;
  for (const auto& r : op.schema().returns()) {
    if (r.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return false;
}

// Whether a result may have a size that depends on the data. What is written in place keeps its size.
bool Session::has_dynamic(const c10::FunctionSchema& schema, const std::vector<RecordedArg>& args) const {
  for (const RecordedArg& arg : args) {
    if (const int* v = std::get_if<int>(&arg.data); v && values[static_cast<size_t>(*v)].dynamic) return true;
    if (const auto* list = std::get_if<std::vector<RecordedArg>>(&arg.data); list && has_dynamic(schema, *list))
      return true;
    if (schema.is_mutable()) return false;
  }
  return false;
}

void Session::record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Inside vmap or torch.func.grad the operator works on wrappers; what they do to plain tensors comes back here.
  if (works_on_wrappers(op, *stack)) {
    // What a composite does to plain tensors on the way is seen only from here.
    if (open_composites && is_opened(op, operator_name(op)))
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    else
      op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  bool composite = false;
  if (autocast(op, keys, stack, composite)) return;
  const auto& schema = op.schema();
  const std::string name = operator_name(op);
  // A backward pass inside the forward works on what the operators below composite ones have saved.
  if (!open_composites && torch::autograd::get_current_node()) {
    needs_open = true;
    throw NeedsOpenComposites();
  }
  if (is_opened(op, name)) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
    return;
  }
  if (name == "aten::lift_fresh") return lift_fresh(stack);
  if (name == "aten::set_.source_Storage" || name == "aten::set_.source_Storage_storage_offset") {
    refuse(name + ": the model works on raw storage", "use tensors");
  }
  Record record{op,     {}, {}, {}, at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(), modules_now(),
                nullptr};
  if (request.locate) record.source = request.locate();
  const size_t records_before = records.size();
  const size_t values_before = values.size();
  const size_t hits_before = autocast_hits_;
  bool from_constants = true;
  bool skip = false;
  {
    c10::impl::ExcludeDispatchKeyGuard below(kKey);
    const auto args = torch::jit::last(*stack, schema.arguments().size());
    for (const c10::IValue& v : args) record.args.push_back(record_arg(v, name, from_constants));
    if (request.guard_values && !from_constants && (is_value_reader(name) || shape_depends_on_values(op, name, args)))
      decide(record.args, args);
    skip = refuse_or_skip_valueless(op, name, record.args, from_constants, *stack);
    if (name == "aten::resolve_neg" && !records.empty() && operator_name(records.back().op) == "aten::resolve_conj" &&
        !from_constants && args[0].isTensor() && !args[0].toTensor().is_neg() && !args[0].toTensor().is_complex()) {
      refuse("numpy() or tolist() takes values out of a tensor, so the program would depend on the data",
             "keep the computation in torch, or move it out of the module", ErrorKind::DataDependent);
    }
    // Cutting a tensor that nothing hangs on changes nothing.
    if (name == "aten::detach_" && args[0].isTensor() && !args[0].toTensor().requires_grad()) skip = true;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) from_constants = false;
    before_write(op, *stack);
    record.dynamic = !from_constants && shape_depends_on_values(op, name, args);
    if (stood_in && record.dynamic) ask_for_values();
    record.dynamic = record.dynamic || (any_dynamic_ && has_dynamic(schema, record.args));
    // How many tensors it returns is part of the graph.
    if (record.dynamic && args[0].isTensor() && has_dynamic_sizes(args[0].toTensor()) && schema.returns().size() == 1 &&
        schema.returns()[0].type()->kind() == c10::TypeKind::ListType)
      guard_size(args[0].toTensor(), true);
    if (!composite) {
      if (may_stand_in && !from_constants && stand_in(op, name, stack))
        stood_in = true;
      else
        op.callBoxed(*stack);
      if (skip) return;
      bind_results(record, *stack, from_constants);
      records.push_back(std::move(record));
      return;
    }
  }
  // A composite under autocast, with our key on: if an operator inside has a cast, what was seen inside is what
  // happened.
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
  if (skip || autocast_hits_ != hits_before) return;
  // Otherwise it is the one call that the user wrote.
  records.erase(records.begin() + static_cast<std::ptrdiff_t>(records_before), records.end());
  for (size_t i = values_before; i < values.size(); ++i) {
    if (values[i].origin == RecordedValue::Result) values[i].dead = true;
  }
  c10::impl::ExcludeDispatchKeyGuard below(kKey);
  bind_results(record, *stack, from_constants);
  records.push_back(std::move(record));
}

void Session::write_back(int attribute, const at::Tensor& value, const std::string& what) {
  c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const Attr& attr = attributes[static_cast<size_t>(attribute)];
  if (value.sizes() != attr.tensor.sizes() || value.scalar_type() != attr.tensor.scalar_type()) {
    refuse("the " + what + " is re-assigned in the forward with another shape or dtype",
           "keep its shape and dtype, or pass the state in and out of the forward");
  }
  write_backs.emplace_back(attribute, look_up(value, "the " + what));
  note(what + " is re-assigned in the forward: the graph writes it at its end");
}

void Session::write_back_attribute(const std::string& name, const at::Tensor& old, const at::Tensor& now) {
  for (size_t i = num_state; i < attributes.size(); ++i) {
    if (attributes[i].tensor.is_same(old)) return write_back(static_cast<int>(i), now, "attribute '" + name + "'");
  }
}

void capture_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (Session* session = Session::current()) {
    session->record(op, keys, stack);
  } else {
    c10::impl::ExcludeDispatchKeyGuard below(kKey);
    op.callBoxed(*stack);
  }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&capture_fallback>());
}

}  // namespace plumb
