// Recomputes cheap results in the backward pass instead of keeping them.
//
// A matrix product or convolution often saves the output of a cheap operator for its backward (gelu, silu, layer_norm,
// a product, a cast, a copy) whose own inputs are saved anyway. While a CheapRecompute lives, it notes such operators
// as they are called on this thread. An operator that may save such a result gets another tensor in its place, on
// a storage of its own: an owner of it after the call has saved it. The storage is emptied, and hooks around the node
// that saved it fill it by a recipe for the time the node runs. Values and gradients stay bit for bit the same:
//
// - Only operators take part that are deterministic functions of their arguments: none that draws random numbers,
//   writes, or looks anything up elsewhere.
// - A result is kept if it was written since, if nobody keeps its inputs, if it is small, or if a hook of the user or a
//   checkpoint holds it.
// - Memory that still lives when the backward comes is used as it is.
// - An input that was written in place since throws Error(InvalidState), as autograd does. Writes that version
//   counters do not show (`.data`, raw memory) are the caller's risk, as with autograd, but for `check` below.
// - The number of threads must be that of the forward, as for any backward.
//
// `grad_fn._saved_*` of such a tensor throws an error before the backward: there is nothing to see.
//
// A result that several nodes saved is computed once for all of them. It is not computed where a node's gradients do
// not need it (a product's input, in the input half of a stage's backward).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace torch::autograd {
struct Node;
}

namespace plumb {

enum class Recompute { None, Cheap };

// Parses "none" or "cheap". Throws Error(InvalidArgument) for another word.
Recompute parse_recompute(const std::string& text);
std::string to_string(Recompute recompute);

// The results that were not kept.
struct RecomputeReport {
  struct Entry {
    int64_t tensors = 0, bytes = 0;
  };
  std::map<std::string, Entry> by_operator;  // "aten::gelu"
  int64_t differing = 0;                     // results that differed when they were checked; they are kept
  Entry total() const;
  // "cheap: 8 MiB of 12 results (aten::gelu 8 MiB, ...)", one line.
  std::string text() const;
};

class CheapRecompute {
 public:
  // Works on this thread until its end. They nest; the inner one works. `check`: every result is recomputed at once and
  // compared bit for bit, and kept if it differs, for example because its memory was written through `.data`. For the
  // first run of a model.
  explicit CheapRecompute(bool check = false);
  ~CheapRecompute();
  CheapRecompute(const CheapRecompute&) = delete;
  CheapRecompute& operator=(const CheapRecompute&) = delete;

  // Decides about the results that nodes saved since the last noted operator. Call it at the end of a forward, before
  // its memory is measured.
  void finish();
  const RecomputeReport& report() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// Frees recomputed results that wait for this node, which saved them; it computes them once more. For the time between
// the halves of a backward.
void drop_recomputed(torch::autograd::Node& node);

// Returns whether the node has no hooks except those that restore its saved tensors, which may run in each half.
bool has_no_hooks_but_recipes(torch::autograd::Node& node);
// Drops the recipes of a node that has released its saved tensors.
void drop_recipes(torch::autograd::Node& node);

}  // namespace plumb
