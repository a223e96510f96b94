// How to make a result again. For recompute.cpp and recompute_saved.cpp only.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>

#include <memory>
#include <optional>
#include <vector>

namespace torch::autograd {
struct Node;
class SavedVariable;
}  // namespace torch::autograd

namespace plumb {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// A part of a storage, as of one version.
struct Part {
  WeakStorage storage;
  c10::DimVector sizes, strides;
  int64_t offset = 0;
  at::TensorOptions options;
  c10::VariableVersion versions;
  uint32_t version = 0;

  explicit Part(const at::Tensor& t);
  bool unchanged() const { return versions.current_version() == version; }
  // The tensor, with the version counter it had; undefined if the memory is gone.
  at::Tensor lock() const;
};

class Recipe : public std::enable_shared_from_this<Recipe> {
 public:
  // A call of `op` with `args` that has just given `result`.
  // `results`: all that the call gave.
  Recipe(const c10::OperatorHandle& op, std::vector<c10::IValue> args, at::ArrayRef<c10::IValue> results,
         int64_t order);

  struct Source {
    size_t arg;
    int64_t element;  // of a list; -1: the argument itself
    Part part;
    at::Tensor held;      // kept: memory that something else keeps too, a parameter, a number, or a small copy
    bool copied = false;  // a copy: writes to the original do not matter
    std::shared_ptr<Recipe> made_by;  // recomputed
  };

  const c10::OperatorHandle op;
  const int64_t order;
  const Part result;
  const size_t nbytes;
  std::vector<Source> sources;
  enum class Decision { Pending, Keep, Recompute } decision = Decision::Pending;
  int64_t steps = 1;    // calls to make it from what is kept
  int64_t pending = 0;  // uses still to come
  bool counted = false;

  // A tensor over the memory of the result, alive, waiting, or computed.
  at::Tensor memory();
  // One use is over.
  void done();
  at::Tensor compute();
  void forget() { waiting_.reset(); }

 private:
  // By a quicker way than the call, where there is one.
  at::Tensor compute_quickly(const std::vector<c10::IValue>& args) const;

  std::vector<c10::IValue> args_;  // tensors that are sources taken out
  // layer_norm's means and reciprocal deviations, which its node keeps.
  struct Moments {
    at::Tensor mean, rstd;
    Part of_mean, of_rstd;
  };
  std::optional<Moments> moments_;
  std::optional<at::Tensor> waiting_;
};

// A tensor that a node saved.
struct Saved {
  torch::autograd::SavedVariable* variable;
  torch::autograd::Node* node;
  int needed_by;  // the edge whose gradient alone needs it; -1: any may
};

// Appends what `node` saved, if its kind is known.
void collect_saved(torch::autograd::Node& node, std::vector<Saved>& saved);

// Replaces what was saved, a part of the recipe's result.
void save_recipe(const Saved& saved, const at::Tensor& data, std::shared_ptr<Recipe> recipe);

// native_layer_norm's result from its arguments and the two others that it gave, in one pass; undefined where that
// would not be the bits that ATen gives.
at::Tensor normalise_again(const std::vector<c10::IValue>& args, const at::Tensor& mean, const at::Tensor& rstd);

// A strided CPU tensor of its own, no tracer's.
bool has_plain_memory(const at::Tensor& x);

}  // namespace plumb
