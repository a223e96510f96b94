// A checkpoint of a training run: a folder `step-00000120` in the run's folder, complete whenever it has that name.
//
//   model-00001-of-00002.safetensors, model.safetensors.index.json          the model, as `transformers` lays it out
//   optimizer-00001-of-00002.safetensors, optimizer.safetensors.index.json  "exp_avg/NAME" of every parameter's NAME
//   checkpoint.json    step, the trainer's own JSON, ties, and dtype, shape and crc64 of every tensor
//
// Names are the model's. How many processes wrote it shows in the number of files alone. A tensor that has several
// names is stored under the first; the others are ties. Written by CheckpointWriter (checkpoint_writer.h).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "plumb/checkpoint/safetensors.h"

namespace plumb {

struct CheckpointTensor {
  std::string file;  // in the checkpoint's folder
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  Checksum checksum;  // checksum of the tensor's bytes
};

struct CheckpointContents {
  int64_t step = 0;
  nlohmann::json state;
  std::map<std::string, CheckpointTensor> model, optimizer;
  std::map<std::string, std::string> ties;  // another name of a tensor: the name that it is stored under
};

// An open checkpoint, for one thread at a time. Throws Error(BadFile) that names the file, the tensor and what is
// wrong, Error(UnknownName) for a name that is not there.
class Checkpoint {
 public:
  // Checks checkpoint.json and the sizes of all files. Every tensor is compared with its checksum when it is read.
  static Checkpoint open(const std::string& folder);
  // Finds the newest one in a run's folder whose every byte is as it was written: reads them all. Returns nullopt if
  // there is none. `problems` gets a sentence for every newer one: which, and what is wrong with it. `refuse` returns
  // why one that can be opened is not to be used, or "".
  static std::optional<Checkpoint> newest(const std::string& run_folder, std::vector<std::string>* problems = nullptr,
                                          const std::function<std::string(const Checkpoint&)>& refuse = {});

  const std::string& folder() const { return folder_; }
  int64_t step() const { return contents_->step; }
  const nlohmann::json& state() const { return contents_->state; }
  const CheckpointContents& contents() const { return *contents_; }

  std::vector<std::string> names() const;            // names of the model's tensors, sorted; ties too
  std::vector<std::string> optimizer_names() const;  // as stored, sorted: "exp_avg/NAME"
  // Returns null if there is none. A tie stands for the name it is tied to, also in "exp_avg/TIE".
  const CheckpointTensor* find(const std::string& name) const;
  const CheckpointTensor* find_optimizer(const std::string& name) const;

  at::Tensor read(const std::string& name) const;
  at::Tensor read_optimizer(const std::string& name) const;
  // Returns every tensor, the model's first, then the optimizer's under their stored names.
  NamedTensors read_all() const;
  // Reads into existing tensors, one at a time. Throws Error(UnknownName) that lists the missing names, and
  // Error(TensorMismatch) for another shape or dtype or a tensor without memory, before any is changed.
  void load(const NamedTensors& into) const;
  // Reads everything, in pieces, and throws if a byte has changed.
  void verify() const;
  uint64_t bytes_read() const { return bytes_read_; }  // tensor bytes read by read(), read_optimizer() and load()

 private:
  Checkpoint(std::string folder, CheckpointContents contents);
  const SafetensorsFile& file_of(const std::string& name, const CheckpointTensor& tensor) const;
  at::Tensor read_checked(const std::string& name, const CheckpointTensor& tensor) const;

  std::string folder_;
  std::shared_ptr<const CheckpointContents> contents_;
  mutable std::map<std::string, std::shared_ptr<SafetensorsFile>> open_;
  mutable uint64_t bytes_read_ = 0;
};

}  // namespace plumb
