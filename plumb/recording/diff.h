// The first tensor in which two runs differ: of two histories with hashes, two sets of tensors, or two modules on the
// same inputs. "First" is in the order of the graph, not of time, microbatch by microbatch: values from inputs to
// outputs, gradients back, then their sums, the parameters after the step and the optimizer's state.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plumb/core/table.h"
#include "plumb/recording/history.h"

namespace plumb {

// The reason why two runs can be expected to be equal, and in what.
enum class DiffBasis {
  SameRows,   // the same rows in every microbatch: every bit, whatever the stages, schedule, replicas; not the threads
  OtherRows,  // other microbatches: values and gradients by row, unless kernels see how many rows there are
  Distance,   // another arithmetic: nothing; how far apart they are is what counts
};

// The distance of two tensors. Those of other sizes differ, and have none.
struct TensorDistance {
  int64_t elements = 0, differing = 0;
  double ulps = 0;      // the most, in units of the last place; NaN unless both have one floating-point type
  double relative = 0;  // norm of the difference over that of the first; NaN where an element of one alone is finite
  bool other_sizes = false;
  std::string types = {};  // both, if they differ
  std::string to_string() const;
};
// Throws Error(InvalidArgument) for tensors without values.
TensorDistance distance_between(const at::Tensor& a, const at::Tensor& b);

struct DiffTensor {
  enum class State : uint8_t { NotCompared, Equal, First, Follows, Differs };
  HistoryTensor tensor;  // as the first run has it; its inputs are numbers in DiffReport::tensors
  State value = State::NotCompared, gradient = State::NotCompared;
  std::optional<TensorDistance> distance;  // distance between both runs' values
};

enum class DiffKind : uint8_t { Value, Gradient, GradientSum, AfterStep, OptimizerState };
// Returns what a history's tensor is, or its gradient.
DiffKind kind_of(const HistoryTensor& tensor, bool backward);

struct Difference {
  size_t tensor = 0;  // index into DiffReport::tensors
  DiffKind kind = DiffKind::Value;
  std::optional<int64_t> step;
  int64_t first_row = 0, rows = 0;         // first row and row count of its microbatch; rows 0: not known
  int64_t microbatch = -1;                 // -1: there is one, or none
  int64_t rank = -1, stage = -1;           // where the value differs; -1: not known
  std::optional<std::string> output = {};  // "loss", "states.1": of modules whose outputs there have other names
  std::string other_name = {};             // the second module's
  std::optional<TensorDistance> distance;
  std::string statistics;  // recorded beside the hashes, where they differ
};

struct DiffReport {
  std::string a, b;
  DiffBasis basis = DiffBasis::SameRows;
  std::optional<Difference> first;
  std::optional<int64_t> equal_to;  // the last compared step in which nothing differs
  int64_t compared = 0, differing = 0, following = 0, not_comparable = 0;
  std::vector<std::string> only_a, only_b;  // names that the other run does not have
  std::vector<std::string> other_outputs;   // keys or places that one module lacks, or has another constant in
  std::vector<std::string> lost_gradients;  // parameters that both modules have and of which one has no gradient
  std::vector<DiffTensor> tensors;
  int64_t steps_only_a = 0, steps_only_b = 0;  // steps with hashes that the other run does not have
  uint64_t torn_a = 0, torn_b = 0;             // History::torn_bytes

  // Returns whether something was compared and nothing differs. A state dict that lacks a name of the other is unequal,
  // and a module that lacks an output or a parameter's gradient.
  bool equal() const {
    const bool names_differ = by_name() && !(only_a.empty() && only_b.empty());
    return compared > 0 && !first && !names_differ && other_outputs.empty() && lost_gradients.empty();
  }
  bool by_name() const;  // state dicts and checkpoints
  // Returns "Equal to step 411. In step 412 first: the gradient of ...; 40 later ones follow from it."
  std::string conclusion() const;
  std::string statement() const;  // the basis in words, and what of the files could not be read
  std::string torn() const;       // "the last record of a.history (312 bytes)", "" if both are whole
  Table table(size_t most = 40) const;
  std::string to_text() const;
  nlohmann::json to_json() const;

 private:
  std::string basis_text() const;
};

struct DiffNames {
  std::string a = "a", b = "b";
};

// Compares the steps that both have hashes of, up to the first that differs. Throws Error(InvalidArgument) if there is
// none.
DiffReport diff(const History& a, const History& b, const DiffNames& names = {});
// Compares by name, in the first one's order: checkpoints, state dicts. Throws Error(InvalidArgument) for a name that
// one of them has twice, and what distance_between() throws.
using DiffTensors = std::vector<std::pair<std::string, at::Tensor>>;
DiffReport diff(const DiffTensors& a, const DiffTensors& b, const DiffNames& names = {});

// Says which machine was wrong, from both runs' step done again and recorded whole.
std::string conclude_replays(const History& a, const History& b, const History& a_again, const History& b_again,
                             const DiffNames& names = {});

// The rest is for module_diff.cpp.
// Returns the names by which a run's tensors are compared with those of `first`: those of `first` for the results of an
// operator in a module if both runs have as many, else their own. The first of several such results that is computed
// from the same tensors is taken, else that of the same name, else the first one. torch.export calls results otherwise
// than a capture does (sum_1, where that has sum), and casts of autocast come in another order.
std::vector<std::string> names_among(const std::vector<HistoryTensor>& tensors,
                                     const std::vector<HistoryTensor>& first);
// The finding about one tensor in one microbatch.
struct Compared {
  Difference place;
  bool differs = false;
  int64_t turn = 0;  // its microbatch; of a state: how many other values it had in the step before
};
// Puts them into order, and finds the first and what follows from it.
void conclude(DiffReport& report, std::vector<Compared> compared);

}  // namespace plumb
