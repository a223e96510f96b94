#include "plumb/capture/call_recorder.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <sstream>
#include <string_view>
#include <typeinfo>

#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

// Returns the node that made the tensor. t.grad_fn() would make it anew for a view whose memory was written since,
// which torch refuses for one that was made without gradients.
torch::autograd::Node* node_of(const at::Tensor& t) { return torch::autograd::impl::grad_fn_unsafe(t); }

bool is_custom_function(const at::Tensor& t, std::string& name) {
  if (!node_of(t)) return false;
  const auto& node = *node_of(t);
  const std::string_view type = typeid(node).name();
  if (type.find("PyNode") == std::string_view::npos && type.find("CppNode") == std::string_view::npos) return false;
  name = node.name();
  return true;
}

// Returns whether the tensor shows memory that somebody else owns, as torch::from_blob() without a deleter makes it.
bool borrows_memory(const at::Tensor& t) {
  return t.has_storage() && t.storage().data() && !t.storage().data_ptr().get_context();
}

}  // namespace

CallRecorder::CallRecorder(const CaptureRequest& r, ModuleStateGuard& module_state)
    : request(r), module_state_(module_state) {
  for (const Attr& attr : request.state) {
    attributes.push_back(attr);
    attribute_values.push_back(-1);
    seen.leave_out(attr.tensor);
    // A tied tensor keeps the number of its first name.
    if (!attr.tensor.defined() || values.find_object(attr.tensor) >= 0) continue;
    const int value = values.add(attr.tensor, RecordedValue::Attribute);
    values[value].attribute = static_cast<int>(attributes.size()) - 1;
    attribute_values.back() = value;
    values.bind(attr.tensor, value);
  }
  num_state = attributes.size();
}

std::shared_ptr<const ModuleStack> CallRecorder::modules_now() {
  if (module_stack.empty()) return nullptr;
  if (!last_stack_ || *last_stack_ != module_stack) last_stack_ = std::make_shared<const ModuleStack>(module_stack);
  return last_stack_;
}

std::string CallRecorder::where() const {
  NodeMeta meta;
  if (!module_stack.empty()) meta.modules = std::make_shared<const ModuleStack>(module_stack);
  if (request.locate) meta.source = request.locate();
  return meta.where();
}

void CallRecorder::note_here(const std::string& text) {
  const std::string at = where();
  note(text + (at.empty() ? "" : ", at " + at));
}

void CallRecorder::refuse(const std::string& what, const std::string& remedy, ErrorKind kind) {
  refusal.emplace(kind, what, where(), remedy);
  const auto source = request.locate ? request.locate() : nullptr;
  refused_in_library = source && request.in_library && request.in_library(*source);
  throw *refusal;
}

void CallRecorder::refuse_nested(const at::Tensor& t, const std::string& reader) {
  if (!t.defined() || !t.is_nested()) return;
  refuse(reader + " works on a nested tensor, whose rows have no common size",
         "pad the rows to one length (torch.nn.utils.rnn.pad_sequence) and mask what was added");
}

void CallRecorder::check_tensor(const at::Tensor& t, const std::string& reader) {
  const auto keys = t.key_set();
  if (keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::FuncTorchGradWrapper)) {
    refuse(reader + " works on a tensor of torch.func (vmap, grad): its operators cannot be seen from outside",
           "where torch.func is around the call: capture before, and call a transformed module once without it; else "
           "write the model without it");
  }
  if (keys.has(c10::DispatchKey::Python)) {
    refuse(reader + " works on a tensor subclass with __torch_dispatch__", "give the model plain tensors");
  }
  refuse_nested(t, reader);
}

int CallRecorder::look_up(const at::Tensor& t, const std::string& reader) {
  check_tensor(t, reader);
  if (stale.contains(t)) {
    refuse(reader + " uses memory that an assignment to .data took from its tensor, or that both share since",
           "clone() what is used later, or write with .data.copy_()");
  }
  if (seen.has_changed(t)) {
    refuse(reader + " reads memory that was written outside of torch's sight, by an accessor, a raw pointer or numpy",
           "write it with torch operators, or fill it before the forward and keep it in a buffer");
  }
  const ValueTable::Found found = values.find(t);
  std::string function;
  if (is_custom_function(t, function) && (found.value < 0 || values[found.value].grad_fn != node_of(t))) {
    refuse(
        "the result of the custom autograd function " + function + " reaches " + reader +
            ": its own backward would be lost",
        "call it inside the captured module, through Function.apply in Python, plumb::apply<Function>() in C++ (kept "
        "as one node), or write it with torch operators");
  }
  if (found.value >= 0) return known_as(found, t, reader);
  if (const auto* node = node_of(t)) {
    refuse(
        reader + " uses a tensor of unknown origin that carries a gradient (" + node->name() +
            "): it was made before the capture, in another thread, or by code that torch's dispatcher does not see",
        "compute it inside the forward, on the thread that called it (torch.func.grad by torch.autograd.grad). Where a "
        "hook of the model itself computes it, as pruning and weight_norm do, take torch.nn.Sequential(model)");
  }
  return add_constant(t, reader);
}

// A known tensor may have another gradient state than its value had when it was bound.
int CallRecorder::known_as(ValueTable::Found found, const at::Tensor& t, const std::string& reader) {
  RecordedValue& known = values[found.value];
  if (known.written && !found.by_memory) known.requires_grad = t.requires_grad();
  if (known.requires_grad == t.requires_grad()) return found.value;
  if (known.requires_grad) {
    // The same memory, cut from autograd's graph without a call that capture can see (.data).
    return emit("plumb::data", {RecordedArg{found.value}}, t, known.from_constants);
  }
  if (!found.by_memory && known.origin != RecordedValue::Result) return found.value;
  if (t.is_leaf()) {
    // A leaf of the forward's own: only an autograd.grad inside of it can ask for its gradient, and that is captured.
    known.requires_grad = true;
    return found.value;
  }
  refuse(reader + " uses a tensor that was made to require grad inside the forward (requires_grad_, nn.Parameter)",
         "create parameters in the module's constructor and register them");
}

void CallRecorder::cut_off_data(const at::Tensor& t, RecordedArg& arg) {
  if (!t.defined() || !values.find(t).by_memory) return;
  const bool from_constants = values[std::get<int>(arg.data)].from_constants;
  arg = RecordedArg{emit("plumb::data", {arg}, t, from_constants)};
}

int CallRecorder::add_constant(const at::Tensor& tensor, const std::string& reader) {
  const bool borrowed = borrows_memory(tensor);
  int value = borrowed ? constant_copy(tensor) : add_attribute(tensor);
  std::ostringstream text;
  text << "constant " << attributes.back().name << ": a " << tensor.scalar_type() << tensor.sizes();
  if (borrowed) {
    // The forward may have made it (torch::from_blob of a vector), and its memory may be gone in the next run.
    value = emit("aten::clone", {RecordedArg{value}, RecordedArg{c10::IValue()}}, tensor, true);
    text << " copy of memory that no tensor owns, first used by " << reader;
  } else {
    values.bind(tensor, value);
    module_state_.watch(values[value].attribute, tensor);
    text << " tensor made outside of the forward, first used by " << reader;
  }
  const std::string at = where();
  note(text.str() + (at.empty() ? "" : " at " + at));
  return value;
}

int CallRecorder::constant_copy(const at::Tensor& t) { return add_attribute(t.detach().clone()); }

int CallRecorder::add_attribute(const at::Tensor& constant) {
  seen.leave_out(constant);
  const int value = values.add(constant, RecordedValue::Attribute);
  values[value].attribute = static_cast<int>(attributes.size());
  values[value].from_constants = true;
  const std::string name = "_constant_" + std::to_string(attributes.size() - num_state);
  attributes.push_back({name, AttrKind::Constant, constant, true});
  attribute_values.push_back(value);
  return value;
}

void CallRecorder::add_input(const at::Tensor& fed, const at::Tensor& given) {
  refuse_nested(fed, "an input");
  const int value = values.add(fed, RecordedValue::Input);
  values[value].meta.requires_grad = given.requires_grad();
  values.bind(fed, value);
  input_values.push_back(value);
  this->fed.push_back(fed);
  seen.leave_out(fed);
}

RecordedArg CallRecorder::argument(const c10::IValue& v, const std::string& reader, bool& from_constants) {
  if (v.isTensor()) {
    const at::Tensor& t = v.toTensor();
    if (!t.defined()) return {c10::IValue()};
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
      const at::Scalar number = t.item();
      return {c10::IValue(number)};
    }
    const int value = look_up(t, reader);
    from_constants = from_constants && values[value].from_constants;
    return {value};
  }
  if (v.isList()) {
    if (!any_tensor(v, [](const at::Tensor&) { return true; })) return {v.deepcopy()};
    std::vector<RecordedArg> elements;
    for (const c10::IValue& e : v.toListRef()) elements.push_back(argument(e, reader, from_constants));
    return {std::move(elements)};
  }
  if (v.isGenerator()) {
    refuse(reader + " is given a random generator of its own", "use torch's default generator (torch.manual_seed)");
  }
  if (v.isStorage()) refuse(reader + " works on raw storage", "use tensors");
  return {v};
}

const Record* CallRecorder::producer(const RecordedArg& arg) const {
  const int* value = std::get_if<int>(&arg.data);
  if (!value) return nullptr;
  for (size_t i = records.size(); i-- > 0;) {
    for (int r : records[i].results) {
      if (r == *value) return &records[i];
    }
  }
  return nullptr;
}

Record CallRecorder::begin(const c10::OperatorHandle& op) {
  Record record{op, {}, {}, {}, true, modules_now(), nullptr};
  if (request.locate) record.source = request.locate();
  return record;
}

void CallRecorder::bind_result(Record& record, const at::Tensor& t, bool from_constants) {
  refuse_nested(t, operator_name(record.op));
  const int value = values.add(t, RecordedValue::Result);
  values[value].from_constants = from_constants;
  if (record.dynamic && t.defined() && t.dim() > 0) any_dynamic = values[value].dynamic = true;
  if (t.defined()) values.bind(t, value);
  // Memory that no operator has written has a check of its own (refuse_unwritten_reads).
  if (!operator_facts(record.op.schema().name()).uninitialised) seen.see(t);
  record.results.push_back(value);
}

void CallRecorder::finish(Record record, const torch::jit::Stack& stack, bool from_constants) {
  for (const c10::IValue& v : torch::jit::last(stack, record.op.schema().returns().size())) {
    if (v.isTensor()) {
      record.layout.push_back(-1);
      bind_result(record, v.toTensor(), from_constants);
    } else if (v.isTensorList()) {
      const auto list = v.toTensorVector();
      record.layout.push_back(static_cast<int32_t>(list.size()));
      for (const at::Tensor& t : list) bind_result(record, t, from_constants);
    } else {
      record.layout.push_back(-1);
      record.results.push_back(values.add(at::Tensor(), RecordedValue::Result));
    }
  }
  // How many rows are packed for each step follows from the lengths alone.
  if (record.op.schema().name() == "aten::_pack_padded_sequence") {
    if (const int* lengths = std::get_if<int>(&record.args[1].data))
      values[record.results[1]].from_constants = values[*lengths].from_constants;
  }
  records.push_back(std::move(record));
}

int CallRecorder::emit(std::string_view op, std::vector<RecordedArg> args, const at::Tensor& result,
                       bool from_constants) {
  Record record = begin(find_operator(op));
  record.args = std::move(args);
  record.layout = {-1};
  bind_result(record, result, from_constants);
  const int value = record.results[0];
  records.push_back(std::move(record));
  return value;
}

void CallRecorder::emit(std::string_view op, std::vector<RecordedArg> args) {
  Record record = begin(find_operator(op));
  record.args = std::move(args);
  records.push_back(std::move(record));
}

void CallRecorder::drop_since(const Mark& mark) {
  records.erase(records.begin() + static_cast<std::ptrdiff_t>(mark.records), records.end());
  values.drop_results(mark.values);
}

std::optional<ValueTable::Memory> ValueTable::memory_of(const at::Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided || t.is_nested()) return std::nullopt;
  return Memory{t.storage().unsafeGetStorageImpl(), t.storage_offset(), t.sizes().vec(), t.strides().vec(),
                t.scalar_type()};
}

int ValueTable::add(const at::Tensor& tensor, RecordedValue::Origin origin) {
  RecordedValue value;
  value.origin = origin;
  if (tensor.defined()) {
    value.meta = TensorMeta::of(tensor);
    value.requires_grad = tensor.requires_grad();
    value.grad_fn = node_of(tensor);
  }
  values_.push_back(std::move(value));
  return static_cast<int>(values_.size()) - 1;
}

void ValueTable::bind(const at::Tensor& tensor, int value) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (auto known = by_object_.find(impl); known != by_object_.end() && known->second.value != value)
    (*this)[value].object_before = known->second.value;
  by_object_.insert_or_assign(
      impl,
      ObjectEntry{value, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr())});
  if (auto memory = memory_of(tensor)) {
    auto storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
    by_storage_[storage.get()].push_back(value);
    if (auto known = by_memory_.find(*memory); known != by_memory_.end() && known->second.value != value)
      (*this)[value].memory_before = known->second.value;
    by_memory_.insert_or_assign(std::move(*memory),
                                MemoryEntry{value, c10::weak_intrusive_ptr<c10::StorageImpl>(storage)});
  }
}

int ValueTable::find_object(const at::Tensor& tensor) const {
  auto it = by_object_.find(tensor.unsafeGetTensorImpl());
  return it == by_object_.end() ? -1 : living(it->second.value, &RecordedValue::object_before);
}

int ValueTable::living(int value, int RecordedValue::*before) const {
  while (value >= 0 && (*this)[value].dead) value = (*this)[value].*before;
  return value;
}

ValueTable::Found ValueTable::find(const at::Tensor& tensor) const {
  if (const int value = find_object(tensor); value >= 0) return {value, false};
  if (auto memory = memory_of(tensor)) {
    auto it = by_memory_.find(*memory);
    const int value = it == by_memory_.end() ? -1 : living(it->second.value, &RecordedValue::memory_before);
    if (value >= 0) return {value, true};
  }
  return {};
}

void ValueTable::mark_written(const at::Tensor& tensor) {
  auto touched = by_storage_.find(tensor.storage().unsafeGetStorageImpl());
  if (touched == by_storage_.end()) return;
  for (int value : touched->second) (*this)[value].written = true;
  touched->second.clear();
}

void ValueTable::drop_results(size_t first) {
  for (size_t i = first; i < values_.size(); ++i) {
    if (values_[i].origin == RecordedValue::Result) values_[i].dead = true;
  }
}

namespace {

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

Weak memory_of(const at::Tensor& tensor) { return tensor.storage().getWeakStorageImpl(); }

}  // namespace

void StaleMemory::add(const at::Tensor& tensor) {
  stale_.emplace(tensor.storage().unsafeGetStorageImpl(), memory_of(tensor));
}

void StaleMemory::add_twins(const at::Tensor& a, const at::Tensor& b) {
  twins_[a.storage().unsafeGetStorageImpl()].push_back(memory_of(b));
  twins_[b.storage().unsafeGetStorageImpl()].push_back(memory_of(a));
}

void StaleMemory::before_write(const at::Tensor& tensor) {
  const auto it = twins_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == twins_.end()) return;
  for (const Weak& twin : it->second) stale_.emplace(twin._unsafe_get_target(), twin);
}

bool StaleMemory::contains(const at::Tensor& tensor) const {
  return !stale_.empty() && tensor.has_storage() && stale_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
}

namespace {

constexpr size_t kSmall = 1 << 16;  // bytes of memory that is looked at as often as it is read

// Returns a hash of the whole memory that the tensor is a part of.
size_t hash_of_memory(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  return std::hash<std::string_view>()({static_cast<const char*>(storage.data()), storage.nbytes()});
}

}  // namespace

void SeenMemory::leave_out(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) left_out_.insert(tensor.storage().unsafeGetStorageImpl());
}

void SeenMemory::see(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.requires_grad() || !tensor.has_storage() || !tensor.is_cpu()) return;
  const auto* memory = tensor.storage().unsafeGetStorageImpl();
  if (tensor.layout() != at::kStrided || !tensor.storage().data() || left_out_.contains(memory)) return;
  auto [it, fresh] = seen_.try_emplace(memory, Seen{memory_of(tensor)});
  if (fresh) it->second.hash = hash_of_memory(tensor);
}

void SeenMemory::before_write(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return;
  const auto it = seen_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == seen_.end()) return;
  if (tensor.storage().nbytes() > kSmall)
    it->second.hash.reset();
  else
    seen_.erase(it);
}

bool SeenMemory::has_changed(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const auto it = seen_.find(tensor.storage().unsafeGetStorageImpl());
  if (it == seen_.end() || !it->second.hash) return false;
  if (it->second.hash != hash_of_memory(tensor)) return true;
  if (tensor.storage().nbytes() > kSmall) it->second.hash.reset();
  return false;
}

}  // namespace plumb
