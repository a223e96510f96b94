// Checkpoints (torch.utils.checkpoint) in a stage whose backward is halved. For stage_backward and the bindings.
//
// Such a checkpoint computes again when the first of the tensors it left out is asked for, and forgets what nobody took
// when that run of the engine ends. The two halves are two runs. So in the first one, as soon as a node needs a
// checkpoint's tensors, those that the weight half will need are taken too, and kept by their nodes until it has run.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "plumb/autograd/backward_graph.h"

namespace torch::autograd {
class SavedVariable;
}

namespace plumb {

// An autograd node of this library that shows its saved tensors.
class SavesTensors {
 public:
  virtual ~SavesTensors() = default;
  virtual void visit_saved(const std::function<void(torch::autograd::SavedVariable&)>& visit) = 0;
};

struct CheckpointedVariable {
  torch::autograd::SavedVariable* variable;
  torch::autograd::Node* node;  // that saved it
  const void* checkpoint;       // equal for all that one computation gives
};

// Finds the variables that these nodes saved through checkpoints. Checkpoints are Python's, so the bindings set this
// function; without it there are none.
using FindCheckpointed = std::vector<CheckpointedVariable> (*)(const std::vector<torch::autograd::Node*>& nodes);
void set_find_checkpointed(FindCheckpointed find);

// Made before divide(): a node whose saved tensors cannot be kept does all its work in the input half.
class KeptFromCheckpoints {
 public:
  explicit KeptFromCheckpoints(BackwardGraph& graph);
  // Takes its hooks off the nodes.
  ~KeptFromCheckpoints();
  KeptFromCheckpoints(const KeptFromCheckpoints&) = delete;
  KeptFromCheckpoints& operator=(const KeptFromCheckpoints&) = delete;

  // Called after divide() and before the input half runs.
  void watch(const BackwardGraph& graph);

 private:
  struct Checkpoint;
  struct Hook;
  std::vector<CheckpointedVariable> found_;
  std::vector<std::unique_ptr<Checkpoint>> checkpoints_;
  std::vector<NodePtr> watched_;  // the graph may be gone before this is
};

}  // namespace plumb
