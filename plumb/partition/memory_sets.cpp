#include "plumb/partition/memory_sets.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace plumb {
namespace {

void collect(const Arg& arg, std::vector<Value*>& out) {
  if (arg.is_value()) out.push_back(arg.value());
  if (arg.is_list()) {
    for (const Arg& e : arg.list()) collect(e, out);
  }
}

// The tensors of a node that may be one memory: annotated arguments and results; all of them where nothing is
// annotated.
std::vector<Value*> sharing(const Node& node) {
  std::vector<Value*> values;
  if (!node.result_aliases_input()) return values;
  if (node.is_call()) {
    const auto& schema = node.schema();
    size_t next = 0;
    for (size_t r = 0; r < schema.returns().size(); ++r) {
      const int32_t count = node.result_layout()[r];
      for (int32_t i = 0; i < (count < 0 ? 1 : count); ++i, ++next) {
        if (schema.returns()[r].alias_info()) values.push_back(node.result(next));
      }
    }
    if (!values.empty()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        if (schema.arguments()[i].alias_info()) collect(node.arg(i), values);
      }
    }
  }
  if (values.empty()) {
    values = node.results();
    for (Value* in : node.inputs()) values.push_back(in);
  }
  std::erase_if(values, [](const Value* v) { return !v->is_tensor(); });
  return values;
}

class UnionFind {
 public:
  size_t add() {
    parent_.push_back(parent_.size());
    return parent_.size() - 1;
  }
  size_t find(size_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }
  void join(size_t a, size_t b) { parent_[find(b)] = find(a); }

 private:
  std::vector<size_t> parent_;
};

}  // namespace

MemorySets::MemorySets(const Graph& graph, const State& state) {
  UnionFind sets;
  std::unordered_map<const Value*, size_t> id;
  std::unordered_map<const void*, size_t> storages;
  std::vector<Value*> values;
  for (Node* node : graph.nodes()) {
    for (Value* v : node->results()) {
      id.emplace(v, sets.add());
      values.push_back(v);
    }
    if (node->kind() == NodeKind::GetAttr) {
      const Attr* attr = state.find(node->target());
      if (!attr || !attr->tensor.defined() || !attr->tensor.has_storage()) continue;
      const void* storage = attr->tensor.storage().unsafeGetStorageImpl();
      auto [it, fresh] = storages.emplace(storage, id[node->result()]);
      if (!fresh) sets.join(it->second, id[node->result()]);
      continue;
    }
    const auto shared = sharing(*node);
    for (size_t i = 1; i < shared.size(); ++i) sets.join(id[shared[0]], id[shared[i]]);
  }
  std::unordered_map<size_t, size_t> index;  // representative -> written_
  for (Node* node : graph.nodes()) {
    for (Value* v : node->written_inputs()) {
      auto [it, fresh] = index.emplace(sets.find(id[v]), written_.size());
      if (fresh) written_.emplace_back();
      auto& writers = written_[it->second].writers;
      if (writers.empty() || writers.back() != node) writers.push_back(node);
    }
  }
  if (written_.empty()) return;
  for (Value* v : values) {
    auto it = index.find(sets.find(id[v]));
    if (it == index.end()) continue;
    Set& set = written_[it->second];
    set.values.push_back(v);
    set.has_state = set.has_state || v->producer()->kind() == NodeKind::GetAttr;
    set.has_input = set.has_input || v->producer()->kind() == NodeKind::Placeholder;
    set_of_.emplace(v, it->second);
  }
}

const MemorySets::Set* MemorySets::written_set(const Value* value) const {
  auto it = set_of_.find(value);
  return it == set_of_.end() ? nullptr : &written_[it->second];
}

bool rename_after_writes(Graph& graph) {
  std::unordered_map<const Value*, Value*> newest;
  auto resolve = [&](Value* v) {
    for (auto it = newest.find(v); it != newest.end(); it = newest.find(v)) v = it->second;
    return v;
  };
  bool changed = false;
  for (Node* node : graph.nodes()) {
    for (size_t i = 0; !newest.empty() && i < node->num_inputs(); ++i) {
      Value* before = node->input(i);
      Value* now = resolve(before);
      if (now == before) continue;
      node->set_input(i, now);
      newest[before] = now;  // the next user need not walk the chain again
      changed = true;
    }
    if (!node->is_call() || node->num_results() == 0) continue;
    const auto& schema = node->schema();
    for (size_t r = 0; r < schema.returns().size() && node->num_results() == schema.returns().size(); ++r) {
      const auto* result = schema.returns()[r].alias_info();
      if (!result || !result->isWrite() || !node->result(r)->is_tensor()) continue;
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* written = schema.arguments()[i].alias_info();
        if (!written || !written->isWrite() || written->beforeSets() != result->beforeSets()) continue;
        if (Value* v = node->arg(i).value(); v && v->is_tensor()) newest[v] = node->result(r);
      }
    }
  }
  return changed;
}

}  // namespace plumb
