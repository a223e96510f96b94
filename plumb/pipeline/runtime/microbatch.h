// Cutting a batch into microbatches and putting their outputs together again.
#pragma once

#include <functional>
#include <vector>

#include "plumb/autograd/stage_backward.h"

namespace plumb {

// How one tensor of a batch is cut: along `dim`, or given whole to every microbatch.
struct TensorChunkSpec {
  int64_t dim = 0;
  bool replicated = false;
  static TensorChunkSpec along(int64_t dim) { return {dim, false}; }
  static TensorChunkSpec whole() { return {0, true}; }
};

// How the microbatches' values of one output become one value.
struct OutputMerge {
  enum class Kind { Concatenate, Sum, Mean, Custom };
  Kind kind = Kind::Concatenate;
  int64_t dim = 0;  // Concatenate; one-number outputs are stacked
  std::function<at::Tensor(const Tensors& by_microbatch)> reduce = nullptr;
  static OutputMerge concatenate(int64_t dim) { return {Kind::Concatenate, dim}; }
  static OutputMerge sum() { return {Kind::Sum}; }
  static OutputMerge mean() { return {Kind::Mean}; }  // weighted by microbatch size
  static OutputMerge custom(std::function<at::Tensor(const Tensors&)> reduce) {
    return {Kind::Custom, 0, std::move(reduce)};
  }
};

struct Microbatches {
  std::vector<Tensors> inputs;  // by microbatch; views of the batch
  std::vector<int64_t> rows;    // size of each
};

// Cuts tensors into `num` microbatches. If the batch does not divide, the first ones get one row more. A tensor whose
// length is a multiple of the shortest (tokens against sequences) is cut at the same places. `specs` may be shorter
// than `tensors`: along 0, and whole for tensors without dimensions. Undefined tensors stay undefined. Throws
// Error(TensorMismatch) that names the tensor if it is too short, has no such dimension or does not match.
Microbatches split_batch(const Tensors& tensors, const std::vector<TensorChunkSpec>& specs, int num);

// Throws Error(InvalidArgument) that names an output whose custom merge has no function.
void check_merges(const std::vector<OutputMerge>& merges);

// Returns the outputs (by microbatch) as one list. `merges` may be shorter than the outputs: concatenate along 0.
// Throws what check_merges() throws, Error(StructureMismatch) for microbatches with other outputs than the first one,
// another number of rows or more merges than outputs, and Error(TensorMismatch) for shapes that do not merge.
Tensors merge_outputs(const std::vector<Tensors>& by_microbatch, const std::vector<OutputMerge>& merges,
                      const std::vector<int64_t>& rows);

// Returns the mean of the microbatches' losses, each by its rows; undefined if one of them is. This function and the
// next throw Error(StructureMismatch) if losses, rows and groups do not fit.
at::Tensor mean_by_rows(const Tensors& losses, const std::vector<int64_t>& rows);
// Returns the sum of losses times rows: of each of `groups` groups mean_by_rows() in the losses' dtype, times its rows;
// of groups in float64, in a binary tree (tree_sum).
at::Tensor sum_by_rows(const Tensors& losses, const std::vector<int64_t>& rows, int groups);

}  // namespace plumb
