// The tensors stored in an archive: weights and constants, with their aliases.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plumb/exported/json_doc.h"
#include "plumb/exported/zip_file.h"

namespace plumb::pt2 {

// Entries of the archive that torch.export hands through as extra files: ExportedProgram::pretrained; tags of
// parameters, for u-muP's learning rates (plumb/tensors/parameter_tag.h), {"fc.weight": {"type": "weight", "depth": 4,
// "fan_in": 64}}, the last two where a tag has them; one that is there or not, with no content; and the mode that a
// graph was made in, if its forward reads the mode, {"training": true, "read_at": "model.py:12"}.
inline constexpr const char* kPretrained = "extra/plumb_pretrained.json";
inline constexpr const char* kTags = "extra/plumb_parameter_tags.json";
inline constexpr const char* kUnitScaledLayers = "extra/plumb_unit_scaled_layers";
inline constexpr const char* kMode = "extra/plumb_training_mode.json";

struct StoredTensor {
  at::Tensor tensor;
  bool is_parameter = false;
};

struct StoredTensors {
  std::map<std::string, StoredTensor> by_name;
  std::vector<std::string> order;                            // names in the file's order: the program's state_dict's
  const StoredTensor* find(const std::string& name) const {  // null if there is none
    const auto it = by_name.find(name);
    return it == by_name.end() ? nullptr : &it->second;
  }
};

// Reads `config` ("data/weights/model_weights_config.json") and the tensors it lists, which lie in `folder`
// ("data/weights/"), onto `device` (nothing: where they were). Two names of one tensor get one tensor; tensors that
// share a storage share it again. Every size, stride and offset is checked against the bytes that are there.
StoredTensors read_stored(const ZipFile& zip, const std::string& config, const std::string& folder,
                          std::optional<at::Device> device);

struct ToStore {
  std::string name;
  at::Tensor tensor;
  bool is_parameter = false;
};
// Passes every storage to `write_record` once ("data/weights/weight_0", bytes) and returns the config's JSON, in the
// order given. `prefix` is "weight_" or "tensor_".
OrderedJson write_stored(const std::vector<ToStore>& tensors, const std::string& folder, const std::string& prefix,
                         const std::function<void(const std::string&, const void*, size_t)>& write_record);

// Checks that a strided view lies inside `bytes` bytes of storage, without overflow.
bool lies_inside(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset,
                 int64_t item_size, uint64_t bytes);
// Returns a tensor over the storage of `bytes` (a byte tensor). The caller has checked lies_inside.
at::Tensor view_of_bytes(const at::Tensor& bytes, at::ScalarType dtype, int64_t offset,
                         const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides);

}  // namespace plumb::pt2
