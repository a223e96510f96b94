#include "plumb/partition/memory_sets.h"

#include "plumb/graph/aliases.h"

namespace plumb {

MemorySets::MemorySets(const Graph& graph, const State& state) {
  const Aliases aliases(graph, &state, Aliases::Inputs::Distinct);
  std::unordered_map<Aliases::Memory, size_t> index;  // written memory -> its index in written_
  for (Node* node : graph.nodes()) {
    for (const Value* v : node->written_inputs()) {
      auto [it, fresh] = index.emplace(aliases.memory(v), written_.size());
      if (fresh) written_.emplace_back();
      auto& writers = written_[it->second].writers;
      if (writers.empty() || writers.back() != node) writers.push_back(node);
    }
  }
  if (written_.empty()) return;
  for (const Node* node : graph.nodes()) {
    for (Value* v : node->results()) {
      auto it = index.find(aliases.memory(v));
      if (it == index.end()) continue;
      Set& set = written_[it->second];
      set.values.push_back(v);
      set.has_state |= node->kind() == NodeKind::GetAttr;
      set.has_input |= node->kind() == NodeKind::Placeholder;
      set_of_.emplace(v, it->second);
    }
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
