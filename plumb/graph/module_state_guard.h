// A module as it was before a run that is not to be seen afterwards: what the run writes is put back.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <unordered_map>
#include <vector>

#include "plumb/graph/graph.h"
#include "plumb/graph/state.h"

namespace plumb {

class ModuleStateGuard {
 public:
  // Keeps gradients of the state's parameters, and the random state of the CPU and of the devices that tensors are on.
  ModuleStateGuard(const State& state, const std::vector<c10::IValue>& inputs);
  // Puts back gradients, random state, and the memory and contents that before_write() and find_moved() kept.
  ~ModuleStateGuard();
  ModuleStateGuard(const ModuleStateGuard&) = delete;

  // Tensor number `index` is one whose contents are put back. The state's tensors are watched under their place in it;
  // a tied tensor under the first.
  void watch(int index, const at::Tensor& tensor);
  // Called before this tensor's memory is written: keeps the contents of watched tensors in the same storage.
  void before_write(const at::Tensor& tensor);
  // Takes a before_write() back if the tensor was not written after all. Returns whether its contents are those of
  // then.
  bool was_not_written(const at::Tensor& tensor);
  // Calls before_write() for all buffers and for what the graph writes besides, where nobody watches what the run
  // writes.
  void keep_written(const Graph& graph, const State& state);
  // Puts contents, and random state, back before the end. The run may go on.
  void put_contents_back();
  void put_generators_back();
  // For runs that say by note_backward() that they run, or may run, a backward. Until then gradients of parameters of
  // the CPU are those of other threads: they are neither changed nor put back. (A device's backward has a thread of its
  // own.)
  void expect_no_backward() { backward_ = false; }
  void note_backward() { backward_ = true; }
  // Returns the generators whose state is kept, the CPU's first.
  std::vector<at::Generator> generators() const;
  // Returns the first tensor, by number, that has other memory than at first and was not written, or -1. Such tensors
  // get theirs back.
  int find_moved();
  // Returns the first parameter whose gradient is another than at first, or was written; undefined if there is none.
  at::Tensor find_changed_gradient() const;
  // Returns whether a generator has another seed than at first.
  bool was_seeded() const;
  // Returns whether before_write() met the storage of tensor number `index`.
  bool was_written(int index) const { return contents_.count(index) != 0; }

 private:
  bool may_write_gradient(const at::Tensor& parameter) const { return backward_ || !parameter.is_cpu(); }
  void keep_generator(const at::Device& device);

  struct Watched {
    int index;
    at::Tensor tensor;
    at::Tensor as_it_was;  // another tensor on the memory that it had at first; undefined for subclasses
  };
  struct Kept {
    at::Tensor tensor, as_it_was;
    at::Tensor contents;  // undefined if they were not written
  };
  std::unordered_map<const void*, std::vector<Watched>> by_storage_;
  std::map<int, Kept> contents_;  // by index
  struct Gradient {
    at::Tensor parameter, grad;  // `grad` as it was at first
    int64_t version;             // version of `grad` at first; 0 where a tensor has none
  };
  struct Drawn {
    at::Generator generator;
    at::Tensor state;  // at first
    uint64_t seed;     // at first
  };
  std::vector<Gradient> grads_;
  bool backward_ = true;
  std::vector<Drawn> generators_;
};

}  // namespace plumb
