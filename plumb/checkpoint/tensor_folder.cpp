#include <algorithm>
#include <filesystem>

#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTensorFileEnding = ".safetensors";
constexpr uint64_t kMostIndex = uint64_t{1} << 26;  // bytes

// Reads from the index which file holds which tensor. Names of files lead nowhere else.
std::map<std::string, std::string> read_weight_map(const std::string& path) {
  const JsonDoc doc(path, read_file(path, kMostIndex), 64);
  std::map<std::string, std::string> files;
  const Json& map = doc.object(doc.at(doc.root(), "weight_map"));
  for (auto it = map.begin(); it != map.end(); ++it) {
    const auto* file = it->get_ptr<const std::string*>();
    if (!file || !is_plain_file_name(*file, kTensorFileEnding)) {
      throw Error(ErrorKind::BadFile,
                  path + ": tensor '" + it.key() + "' is in " + (file ? "'" + *file + "'" : "something") +
                      ", which is no name of a file here",
                  "", "files of an index end in .safetensors and lie beside it");
    }
    files.emplace(it.key(), *file);
  }
  return files;
}

std::string only_tensor_file(const std::string& folder, const std::string& stem) {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == kTensorFileEnding) found.push_back(it->path().filename().string());
  }
  const std::string remedy =
      "name a folder with " + stem + ".safetensors, or with its shards and " + stem + ".safetensors.index.json";
  if (error) throw Error(ErrorKind::BadFile, folder + ": cannot be read: " + error.message(), "", remedy);
  if (found.size() != 1) {
    throw Error(ErrorKind::BadFile,
                folder + ": holds " + (found.empty() ? "no" : std::to_string(found.size())) +
                    " .safetensors files and no index of them",
                "", remedy);
  }
  return found[0];
}

}  // namespace

TensorFolder::TensorFolder(const std::string& path, const std::string& stem) : folder_(path) {
  std::error_code error;
  std::string single;
  if (fs::is_regular_file(path, error)) {
    folder_ = fs::path(path).parent_path().string();
    single = fs::path(path).filename().string();
  } else if (fs::exists(fs::path(path) / (stem + kTensorFileEnding), error)) {
    single = stem + kTensorFileEnding;
  } else if (const fs::path index = fs::path(path) / (stem + ".safetensors.index.json"); fs::exists(index, error)) {
    files_ = read_weight_map(index.string());
    return;
  } else {
    single = only_tensor_file(path, stem);
  }
  auto file = std::make_unique<SafetensorsFile>((fs::path(folder_) / single).string());
  for (const SafetensorsEntry& entry : file->entries()) files_.emplace(entry.name, single);
  open_.emplace(single, std::move(file));
}

std::vector<std::string> TensorFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) names.push_back(name);
  return names;
}

const SafetensorsFile& TensorFolder::file_of(const std::string& name) const {
  const auto found = files_.find(name);
  if (found == files_.end()) throw Error(ErrorKind::UnknownName, folder_ + ": holds no tensor '" + name + "'");
  auto& file = open_[found->second];
  if (!file) file = std::make_unique<SafetensorsFile>((fs::path(folder_) / found->second).string());
  if (!file->find(name)) {
    throw Error(ErrorKind::BadFile,
                file->path() + ": holds no tensor '" + name + "', though the folder's index says so", "",
                "get the folder again; its index and files do not belong together");
  }
  return *file;
}

const SafetensorsEntry& TensorFolder::meta(const std::string& name) const { return file_of(name).get(name); }

bool TensorFolder::is_unit_scaled() const {
  const auto is_mark = [](const auto& entry) { return entry.first.ends_with(kUnitScaledMark); };
  return std::ranges::any_of(files_, is_mark) ||
         (!files_.empty() && file_of(files_.begin()->first).metadata().count(kUnitScaledKey) > 0);
}

at::Tensor TensorFolder::read(const std::string& name) const {
  const SafetensorsFile& file = file_of(name);
  bytes_read_ += file.get(name).bytes;
  return file.read(name);
}

}  // namespace plumb
