// The calls of one forward as they are recorded, before a graph is made of them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <memory>
#include <variant>
#include <vector>

#include "plumb/graph/graph.h"

namespace plumb {

// An argument while recording: values are numbers, because records can still be thrown away.
struct RecordedArg {
  std::variant<int, c10::IValue, std::vector<RecordedArg>> data;
};

// Calls `visit` with the number of every value in it, in order.
template <class Visit>
void for_each_value(const RecordedArg& arg, const Visit& visit) {
  if (const int* value = std::get_if<int>(&arg.data)) visit(*value);
  if (const auto* list = std::get_if<std::vector<RecordedArg>>(&arg.data)) {
    for (const RecordedArg& element : *list) for_each_value(element, visit);
  }
}

// Returns whether `is` holds for a tensor of a value, itself or an element of a list.
template <class Is>
bool any_tensor(const c10::IValue& v, const Is& is) {
  if (v.isTensor()) return is(v.toTensor());
  if (!v.isList() || v.isIntList() || v.isDoubleList()) return false;
  const auto elements = v.toListRef();
  return std::any_of(elements.begin(), elements.end(), [&](const c10::IValue& e) { return any_tensor(e, is); });
}

struct Record {
  c10::OperatorHandle op;
  std::vector<RecordedArg> args;
  std::vector<int32_t> layout;  // as Node::result_layout()
  std::vector<int> results;     // value numbers, flattened
  bool grad_enabled;
  std::shared_ptr<const ModuleStack> modules;
  std::shared_ptr<const SourceLocation> source;
  bool dynamic = false;  // sizes of its results may depend on the data
};

// The facts known of a value number.
struct RecordedValue {
  enum Origin : uint8_t { Input, Attribute, Result } origin = Result;
  TensorMeta meta;
  bool requires_grad = false;
  bool from_constants = false;  // made of constants alone: the same at every call
  bool dead = false;            // its record was thrown away
  bool written = false;         // its memory was written since: requires_grad may have changed
  bool dynamic = false;         // its sizes may depend on the data
  bool size_guarded = false;    // a node checks them
  const void* grad_fn = nullptr;
  int attribute = -1;  // index into CallRecorder::attributes
  // The values that its tensor object and its memory were before, -1 for none: once this one is dead, they are again.
  int object_before = -1, memory_before = -1;
};

}  // namespace plumb
