// The training data: rows of tensors, or windows of tokens.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plumb/graph/graph_module.h"
#include "plumb/training/options.h"

namespace plumb {

// Targets: none with --loss output; with mse a second tensor, of 0 and 1, may say which of them count.
struct Batch {
  std::vector<at::Tensor> inputs, targets;
};

// Rows that can be read in any order. One thread at a time calls it.
class Samples {
 public:
  virtual ~Samples() = default;
  virtual int64_t rows() const = 0;
  // Reads rows, each from 0 to rows() - 1. Throws Error(BadFile) naming a file that has changed since it was opened.
  virtual Batch read(const std::vector<int64_t>& rows) = 0;
  virtual double bytes_of_row() const = 0;
  // Returns a text of names, sizes and dtypes, which a resumed run must find again.
  virtual std::string identity() const = 0;
};

struct DataFiles {
  std::string data, targets, mask;
  std::string option = "--data", targets_option = "--targets";  // for messages
};

// Raw tokens, and .npy, .safetensors and .pt files of one whole-number tensor of one dimension (is_token_tensor() of
// token_files.h) for a model that takes ids: windows of the input's length beside each other, the last shorter one left
// out, with the same windows one token on as targets or as the model's second input (--loss output). A folder's files,
// sorted by path, follow each other as one text; those whose name, or folder's name, begins with a dot are left out.
// Files are read, not mapped: one that becomes shorter ends a read with an error, and a mapping with a signal. Other
// tensor files: a row a sample. In a file of several tensors, those named "targets" and "mask" are the targets and the
// mask unless another file is given for them. Throws UsageError.
std::unique_ptr<Samples> open_samples(const TrainOptions& options, const DataFiles& files, const GraphModule& module);

// Returns the rows of a step: --batch, or the file's batch times the parts of a step. Throws UsageError if the file's
// batch is fixed and does not fit.
int64_t rows_of_step(const TrainOptions& options, const GraphModule& module);
// Returns how many parts a step's rows are cut into.
int64_t parts_of_step(const TrainOptions& options);

// Throws UsageError if a step's rows cannot be held: that is wrong use, not a machine that swaps.
void check_memory(int64_t batch, double bytes_of_row);

// Returns the first input of a model, a tensor with rows. Throws UsageError.
const TensorMeta& first_input(const GraphModule& module);
bool is_dynamic(const TensorMeta& meta, size_t dim);

}  // namespace plumb
