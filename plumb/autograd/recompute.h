// Computes cheap results again in the backward pass instead of keeping them.
//
// A matrix product or convolution often saves the output of a cheap operator for its backward (gelu, silu, layer_norm,
// a product, a cast, a copy) whose own inputs are saved anyway. While a CheapRecompute lives, such operators are
// remembered as they are called on this thread. The results that autograd saved of them are replaced by a recipe to
// make them again. Values and gradients stay bit for bit the same:
//
// - only operators that are deterministic functions of their arguments take part, none that draws, writes or looks
//   anything up outside of them;
// - a result that was written since, and one whose inputs nobody keeps, is kept as before; so is a small one, and one
//   that a user's hooks or a checkpoint hold;
// - memory that still lives when the backward comes is used as it is;
// - an input that was written in place since raises Error(InvalidArgument), as autograd does; writes that version
//   counters do not show (`.data`, raw memory) are the caller's risk, as with autograd, but for `check` below;
// - as for any backward, threads must be as many as in the forward.
//
// A result that several nodes saved is made once for all of them, and not at all if a node's gradients do not need it
// (a product's input, in the input half of a stage's backward).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace plumb {

enum class Recompute { None, Cheap };

// "none" or "cheap". Raises Error(InvalidArgument) for another word.
Recompute parse_recompute(const std::string& text);
std::string to_string(Recompute recompute);

// What was not kept.
struct RecomputeReport {
  struct Entry {
    int64_t tensors = 0, bytes = 0;
  };
  std::map<std::string, Entry> by_operator;  // "aten::gelu"
  int64_t differing = 0;                     // results that came out otherwise when they were checked; they are kept
  Entry total() const;
  // "cheap: 8 MiB of 12 results (aten::gelu 8 MiB, ...)", one line.
  std::string text() const;
};

class CheapRecompute {
 public:
  // From here to the end of its life, on this thread. They nest; the inner one works. `check`: every result is computed
  // again at once and compared bit for bit, and kept where it differs, for example because its memory was written by
  // `.data`. For the first run of a model.
  explicit CheapRecompute(bool check = false);
  ~CheapRecompute();
  CheapRecompute(const CheapRecompute&) = delete;
  CheapRecompute& operator=(const CheapRecompute&) = delete;

  // Looks at what was saved under these outputs since the last remembered operator. To be called at the end of a
  // forward, before what it saved counts.
  void finish(const std::vector<at::Tensor>& outputs);
  const RecomputeReport& report() const;

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// Lets go of results that were made again and wait for another node that saved them: it will make them once more. For
// the time between the halves of a backward.
void drop_recomputed();

}  // namespace plumb
