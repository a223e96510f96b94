// How to make a result again, and how nodes come by it. For the files of recompute.h only.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace torch::autograd {
struct Node;
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
  // Returns the tensor, with the version counter it had; undefined if the memory is gone.
  at::Tensor lock() const;
};

class Recipe {
 public:
  // A call of `op` with `args` that has just given `result`. `results`: all that the call gave.
  Recipe(const c10::OperatorHandle& op, std::vector<c10::IValue> args, at::ArrayRef<c10::IValue> results,
         int64_t order);

  // Makes the values of a format from their codes, instead of calling the operator. Not counted as computed again.
  void make_by(std::function<at::Tensor()> make) {
    make_ = std::move(make);
    counted = true;
  }
  bool is_of_codes() const { return make_ != nullptr; }

  struct Source {
    size_t arg;
    int64_t element;  // index in a list argument; -1: the argument itself
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

  // Returns the memory that nodes save in place of the result's own. The first holds the result for as long as it is
  // filled, so that the caller's tensor and what autograd saved part where the recipe is decided.
  c10::Storage lend(const c10::Storage& own);
  // Marks this memory as lent already, see part_from_node().
  void lent(const c10::Storage& storage) {
    lent_ = storage.getWeakStorageImpl();
    filled_ = true;
  }
  void fill(const c10::Storage& storage);
  void empty();
  bool filled() const { return filled_; }

  // Returns a tensor over the memory of the result, alive, waiting, or computed.
  at::Tensor memory();
  // One use is over.
  void done();
  at::Tensor compute();
  // Releases the memory that waits for its next use, of this result and of the sources it is computed from. The next
  // use computes it again.
  void forget();

 private:
  // Computes by a quicker way than the call, if there is one.
  at::Tensor compute_quickly(const std::vector<c10::IValue>& args) const;

  std::vector<c10::IValue> args_;  // tensors that are sources taken out
  // layer_norm's means and reciprocal deviations, which its node keeps.
  struct Moments {
    at::Tensor mean, rstd;
    Part of_mean, of_rstd;
  };
  std::optional<Moments> moments_;
  std::function<at::Tensor()> make_;
  std::optional<at::Tensor> waiting_;
  std::optional<WeakStorage> lent_;
  bool filled_ = false;
};

// Returns the recipe of memory that a quantizer filled on this thread, null if its codes are gone (simulate_format.h).
std::shared_ptr<Recipe> recipe_of_codes(const c10::StorageImpl* storage);
bool knows_codes();
// Leaves the recipe, and its codes, to the nodes that keep it.
void let_go_of_codes(const std::shared_ptr<Recipe>& recipe);

// For a result that its own node saved: returns the storage that the node keeps, which counts as lent from now on. The
// result gets a new storage.
c10::Storage part_from_node(const at::Tensor& result);

// One use of a recipe by a node that saved its result.
struct RecipeUse {
  std::shared_ptr<Recipe> recipe;
  int needed_by;      // the edge whose gradient alone needs it; -1: any may
  bool over = false;  // it was counted
  bool here = false;  // the node that runs now has filled the memory
};
// Puts hooks around `node` that fill the memory of its saved results for the time it runs.
void fill_around(torch::autograd::Node& node, std::vector<RecipeUse> uses);

// Returns native_layer_norm's result from its arguments and its two other results, in one pass; undefined if those
// would not be ATen's bits.
at::Tensor normalize_again(const std::vector<c10::IValue>& args, const at::Tensor& mean, const at::Tensor& rstd);

// True if an emptied storage can be filled again. torch 2.11 cannot take its message back: there every result is kept.
template <class Storage>
inline constexpr bool kCanFill = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };

// Returns whether x is strided, no tracer's, and on the CPU or a device whose storages point to its memory.
bool has_plain_memory(const at::Tensor& x);

}  // namespace plumb
