// A graph with its state: a module that runs. Capture makes it, transforms change it, `.pt2` files and pipelines use
// it.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/plan.h"
#include "plumb/graph/state.h"
#include "plumb/graph/tree_spec.h"

namespace plumb {

// A torch::nn::Module: parameters(), named_parameters(), train(), to() work, names as in the original model
// ("layers.0.fc.weight": nested modules are made for the dots).
class GraphModule : public torch::nn::Module {
 public:
  GraphModule() = default;
  GraphModule(Graph graph, State state, TreeSpec in_spec, TreeSpec out_spec);

  const Graph& graph() const { return graph_; }
  Graph& graph() { return graph_; }
  const State& state() const { return state_; }
  // After editing the state call sync_module() so that parameters() shows it.
  State& state() { return state_; }
  const TreeSpec& in_spec() const { return in_spec_; }  // structure of (args tuple, kwargs dict)
  const TreeSpec& out_spec() const { return out_spec_; }

  // Flat inputs in placeholder order -> flat outputs. Checks number, dtype, shape and device of tensors against the
  // graph's signature and names the input that differs. Threads may call it together, from the first call on, and
  // beside set_state(); not beside edits of the graph or of state().
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs);
  // Structured: positional arguments (and keyword ones by name) as in the original call.
  c10::IValue forward(std::vector<c10::IValue> args, std::vector<std::pair<std::string, c10::IValue>> kwargs = {});
  // Tensors in, one tensor out. Throws Error(StructureMismatch) if the outputs are more, or nested.
  template <typename... Tensors>
  at::Tensor operator()(const Tensors&... inputs) {
    return the_tensor(forward({c10::IValue(inputs)...}));
  }

  // Returns the compiled plan, compiled again after a change of graph or state. The caller keeps it alive.
  std::shared_ptr<const Plan> plan();

  // Puts other tensors in the place of those of these names. Throws Error(UnknownName) for one that the state lacks.
  void set_state(const std::vector<std::pair<std::string, at::Tensor>>& tensors);

  // Sets the mode; eval() calls it, too. Throws Error(InvalidState) if the other mode would change what an operator
  // computes (mode.h), or if the captured forward had read the mode: a graph is made for one mode, is_training().
  void train(bool on = true) override;
  // Sets the mode that the graph was made in. The constructor infers it from the operators.
  void set_made_in_training(bool training) { Module::train(training); }
  // "file:line" where the captured forward reads its training mode, so that the graph holds one mode's path; of C++
  // code a text that says how the paths differ. Empty if it does not read it, or if both modes have one path.
  const std::string& mode_read_at() const { return mode_read_at_; }
  void set_mode_read_at(std::string line);  // throws Error(InvalidArgument) beyond 8,192 bytes
  // Takes over the mode that `other` was made in, and where its forward reads it.
  void copy_mode(const GraphModule& other);

  // Registers every parameter and buffer of the state as torch::nn::Module members.
  void sync_module();
  // Returns a deep copy of graph and state (aliases kept).
  std::shared_ptr<GraphModule> deep_copy() const;
  // Returns deep_copy(), with the tensors on that device if there is one.
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
  // lint(graph) and: every get_attr has an entry of the state, placeholders and output fit the specs.
  void lint() const;

 private:
  Graph graph_;
  State state_;
  TreeSpec in_spec_, out_spec_;
  std::string mode_read_at_;
  void register_members();
  at::Tensor the_tensor(const c10::IValue& output) const;
  std::unique_ptr<std::mutex> lock_ =
      std::make_unique<std::mutex>();  // lock for plan_, and for the state while plans are made of it
  std::shared_ptr<const Plan> plan_;
  uint64_t plan_version_ = 0;
  bool plan_under_mode_ = false;  // whether plan_ is for runs under a dispatch mode of Python's
};

// For a graph of unknown origin: false if all operators that know a mode are in evaluation. Dropout inside attention
// has a probability alone and says nothing.
bool made_in_training(const Graph& graph);

// Returns whether an operator (dropout, batch norm) computes something else in the mode that the graph was not made in.
// Attention without dropout does only if the graph was made in evaluation.
bool depends_on_mode(const Graph& graph, bool made_in_training);

}  // namespace plumb
