#include "plumb/autograd/backward_checkpoints.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <map>
#include <set>
#include <utility>

#include "plumb/autograd/node_names.h"

namespace plumb {
namespace {

using torch::autograd::SavedVariable;

std::atomic<FindCheckpointed> find_checkpointed{nullptr};

}  // namespace

void set_find_checkpointed(FindCheckpointed find) { find_checkpointed = find; }

// The variables of one checkpoint that the weight half needs.
struct KeptFromCheckpoints::Checkpoint {
  std::vector<CheckpointedVariable> variables;
  bool kept = false;

  void keep() {
    if (std::exchange(kept, true)) return;
    for (auto& v : variables) {
      const at::Tensor value = v.variable->unpack(v.node->getptr());
      *v.variable = SavedVariable(value.defined() ? value.detach() : value, /*is_output=*/false);
    }
  }
};

struct KeptFromCheckpoints::Hook : torch::autograd::FunctionPreHook {
  explicit Hook(Checkpoint& checkpoint) : checkpoint(checkpoint) {}
  variable_list operator()(const variable_list& grads) override {
    checkpoint.keep();
    return grads;
  }
  Checkpoint& checkpoint;
};

KeptFromCheckpoints::KeptFromCheckpoints(BackwardGraph& graph) {
  const FindCheckpointed find = find_checkpointed;
  if (find == nullptr) return;
  std::vector<torch::autograd::Node*> nodes;
  nodes.reserve(graph.entries.size());
  for (const auto& e : graph.entries) {
    if (!e.target) nodes.push_back(e.node);
  }
  found_ = find(nodes);
  if (found_.empty()) return;
  // A recomputed variable of a checkpoint belongs to one run of the engine.
  for (const auto& v : found_) graph.entries[graph.index.at(v.node)].by_itself = false;
  // A tensor that a C++ function saved is its own.
  for (auto& e : graph.entries) {
    if (!e.target && e.twice && node_names::is_cpp_function(*e.node)) e.twice = false;
  }
}

void KeptFromCheckpoints::watch(const BackwardGraph& graph) {
  std::map<const void*, Checkpoint*> needed;
  for (const auto& v : found_) {
    if (!graph.find(v.node)->runs_in_weight_half()) continue;
    auto& checkpoint = needed[v.checkpoint];
    if (checkpoint == nullptr) {
      checkpoints_.push_back(std::make_unique<Checkpoint>());
      checkpoint = checkpoints_.back().get();
    }
    checkpoint->variables.push_back(v);
  }
  std::set<torch::autograd::Node*> seen;
  for (const auto& v : found_) {
    const auto it = needed.find(v.checkpoint);
    if (it == needed.end() || !graph.find(v.node)->in_input_half || !seen.insert(v.node).second) continue;
    v.node->add_pre_hook(std::make_unique<Hook>(*it->second));
    watched_.push_back(v.node->getptr());
  }
}

KeptFromCheckpoints::~KeptFromCheckpoints() {
  for (const NodePtr& node : watched_) {
    std::erase_if(node->pre_hooks(), [](const auto& hook) { return dynamic_cast<const Hook*>(hook.get()) != nullptr; });
  }
}

}  // namespace plumb
