// The `safetensors` format: a JSON header of names, dtypes, shapes and offsets, then the tensors' bytes.
// Format: https://github.com/huggingface/safetensors ("Format").
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plumb/core/checksum.h"
#include "plumb/core/input_file.h"

namespace plumb {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  uint64_t offset = 0, bytes = 0;  // in the file
};

// Returns the format's name of a dtype ("F32", "BF16", "F8_E4M3"); "" for a dtype that the format does not have.
std::string_view safetensors_dtype(at::ScalarType dtype);

// An open file. The header is checked when it is opened: its length, its grammar, names that come twice, dtypes, shapes
// against bytes, offsets inside of the file without holes or overlaps. Memory is at most a few times the header's
// length, which is at most 100 MB. Throws Error(BadFile) that names the file, the tensor and what is wrong; functions
// that take a name throw Error(UnknownName) for one that is not in the file. Threads may read at the same time.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in the order of their bytes
  const SafetensorsEntry* find(std::string_view name) const;                 // null if there is none
  const SafetensorsEntry& get(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Returns a contiguous CPU tensor that owns its memory. `checksum` gets its bytes in the file.
  at::Tensor read(std::string_view name, Checksum* checksum = nullptr) const;
  // Gives the tensor's bytes to the checksum, read in pieces.
  void add_to(std::string_view name, Checksum& checksum) const;

 private:
  std::string path_;
  InputFile file_;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string_view, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Writes the file through core/output_file.h. Returns the crc64 of every tensor's bytes, in the order given. Takes
// tensors of any device and strides; makes at most one copy at a time. Each starts at a multiple of its element size.
// Throws Error(InvalidArgument) for a name that comes twice, is "__metadata__" or no UTF-8, Error(Unsupported) for a
// tensor that the format cannot hold, Error(CannotWrite).
std::vector<Checksum> write_safetensors(const std::string& path, const NamedTensors& tensors,
                                        const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

// Key in the metadata of a file with unit-scaled weights: a plain model cannot take them. Other libraries ignore it.
inline constexpr const char* kUnitScaledKey = "plumb.unit_scaled";
// A tensor that Python's unit-scaled modules put into their state dicts: the end of its name. Torch names it where a
// plain model is given such a state dict.
inline constexpr const char* kUnitScaledMark = "these_weights_are_unit_scaled__plumb_transforms_fold_makes_them_plain";

// Tensors of a folder: of `STEM.safetensors`, else of the files that `STEM.safetensors.index.json` names (the order of
// `transformers`, which writes both), or of the only file that ends in `.safetensors`. Or `path` is such a file itself.
// Files are opened when they are first needed. Names of files in an index are plain names in the folder. One thread at
// a time. Throws Error(BadFile), and Error(UnknownName) for a name that is not there.
class TensorFolder {
 public:
  explicit TensorFolder(const std::string& path, const std::string& stem = "model");

  const std::string& path() const { return folder_; }
  std::vector<std::string> names() const;  // sorted
  bool contains(const std::string& name) const { return files_.count(name) > 0; }
  const SafetensorsEntry& meta(const std::string& name) const;  // reads no tensor
  at::Tensor read(const std::string& name) const;
  bool is_unit_scaled() const;  // as its first file says, or a tensor that is the mark
  // Returns the bytes of tensor data that read() has returned so far, headers excluded.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  const SafetensorsFile& file_of(const std::string& name) const;
  std::string folder_;
  std::map<std::string, std::string> files_;  // by tensor
  mutable std::map<std::string, std::unique_ptr<SafetensorsFile>> open_;
  mutable std::atomic<uint64_t> bytes_read_ = 0;
};

}  // namespace plumb
