#include "plumb/checkpoint/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <filesystem>
#include <set>
#include <sstream>
#include <unordered_map>

#include "plumb/checkpoint/checkpoint_json.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUseAnother = "use the checkpoint before it (Checkpoint::newest finds it), or another copy";

std::string shape_and_dtype(at::ScalarType dtype, at::IntArrayRef sizes) {
  std::ostringstream text;
  text << at::toString(dtype) << sizes;
  return text.str();
}

std::string stored_name(const CheckpointContents& contents, const std::string& name) {
  const auto tie = contents.ties.find(name);
  return tie == contents.ties.end() ? name : tie->second;
}

// Returns the name that a tensor of the optimizer is stored under: "exp_avg/TIE" becomes that of the name TIE is tied
// to.
std::string stored_optimizer_name(const CheckpointContents& contents, const std::string& name) {
  const size_t slash = name.find('/');
  if (contents.optimizer.count(name) || slash == name.npos) return name;
  return name.substr(0, slash + 1) + stored_name(contents, name.substr(slash + 1));
}

const CheckpointTensor* find_in(const std::map<std::string, CheckpointTensor>& tensors, const std::string& stored) {
  const auto found = tensors.find(stored);
  return found == tensors.end() ? nullptr : &found->second;
}

}  // namespace

Checkpoint::Checkpoint(std::string folder, CheckpointContents contents)
    : folder_(std::move(folder)), contents_(std::make_shared<CheckpointContents>(std::move(contents))) {}

Checkpoint Checkpoint::open(const std::string& folder) {
  const std::string path = (fs::path(folder) / kCheckpointJson).string();
  return Checkpoint(folder, checkpoint_from_text(path, folder, read_file(path)));
}

std::optional<Checkpoint> Checkpoint::newest(const std::string& run_folder, std::vector<std::string>* problems,
                                             const std::function<std::string(const Checkpoint&)>& refuse) {
  const std::vector<int64_t> steps = checkpoint_steps(run_folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    std::string why;
    try {
      Checkpoint checkpoint = open((fs::path(run_folder) / checkpoint_name(*step)).string());
      if (checkpoint.step() != *step) why = c10::str("it is of step ", checkpoint.step());
      if (why.empty() && refuse) why = refuse(checkpoint);
      if (why.empty()) {
        checkpoint.verify();
        return checkpoint;
      }
    } catch (const Error& e) {
      why = e.message();
    }
    if (problems) problems->push_back(checkpoint_name(*step) + " is not used: " + why);
  }
  return std::nullopt;
}

std::vector<std::string> Checkpoint::names() const {
  std::set<std::string> names;
  for (const auto& [name, tensor] : contents_->model) names.insert(name);
  for (const auto& [name, first] : contents_->ties) names.insert(name);
  return {names.begin(), names.end()};
}

std::vector<std::string> Checkpoint::optimizer_names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : contents_->optimizer) names.push_back(name);
  return names;
}

const CheckpointTensor* Checkpoint::find(const std::string& name) const {
  return find_in(contents_->model, stored_name(*contents_, name));
}

const CheckpointTensor* Checkpoint::find_optimizer(const std::string& name) const {
  return find_in(contents_->optimizer, stored_optimizer_name(*contents_, name));
}

const SafetensorsFile& Checkpoint::file_of(const std::string& name, const CheckpointTensor& tensor) const {
  auto& file = open_[tensor.file];
  if (!file) file = std::make_shared<SafetensorsFile>((fs::path(folder_) / tensor.file).string());
  const SafetensorsEntry* entry = file->find(name);
  if (!entry || entry->dtype != tensor.dtype || entry->sizes != tensor.sizes)
    throw Error(ErrorKind::BadFile,
                file->path() + ": tensor '" + name + "' is not as " + kCheckpointJson + " beside it says", "",
                kUseAnother);
  return *file;
}

at::Tensor Checkpoint::read_checked(const std::string& name, const CheckpointTensor& tensor) const {
  const SafetensorsFile& file = file_of(name, tensor);
  Checksum sum{tensor.checksum.bits};
  at::Tensor read = file.read(name, &sum);
  if (sum != tensor.checksum)
    throw Error(ErrorKind::BadFile, file.path() + ": tensor '" + name + "' is not as it was written", "", kUseAnother);
  bytes_read_ += read.nbytes();
  return read;
}

at::Tensor Checkpoint::read(const std::string& name) const {
  const CheckpointTensor* tensor = find(name);
  if (!tensor) throw Error(ErrorKind::UnknownName, folder_ + ": holds no tensor '" + name + "'");
  return read_checked(stored_name(*contents_, name), *tensor);
}

at::Tensor Checkpoint::read_optimizer(const std::string& name) const {
  const CheckpointTensor* tensor = find_optimizer(name);
  if (!tensor) throw Error(ErrorKind::UnknownName, folder_ + ": holds no state of an optimizer '" + name + "'");
  return read_checked(stored_optimizer_name(*contents_, name), *tensor);
}

NamedTensors Checkpoint::read_all() const {
  NamedTensors all;
  for (const std::string& name : names()) all.emplace_back(name, read(name));
  for (const std::string& name : optimizer_names()) all.emplace_back(name, read_optimizer(name));
  return all;
}

void Checkpoint::load(const NamedTensors& into) const {
  std::string missing;
  size_t count = 0;
  std::unordered_map<const void*, std::string> names;  // by memory
  for (const auto& [name, tensor] : into) {
    const CheckpointTensor* stored = find(name);
    if (!stored && ++count <= 10) missing += (missing.empty() ? "" : ", ") + name;
    if (!stored) continue;
    if (!tensor.defined() || tensor.is_meta())
      throw Error(ErrorKind::TensorMismatch, folder_ + ": '" + name + "' has no memory to load values into", "",
                  "give the model's tensor on a device that has memory: at::empty_like(tensor, at::kCPU)");
    if (stored->dtype != tensor.scalar_type() || at::IntArrayRef(stored->sizes) != tensor.sizes())
      throw Error(ErrorKind::TensorMismatch,
                  folder_ + ": '" + name + "' is " + shape_and_dtype(stored->dtype, stored->sizes) +
                      ", the model has " + shape_and_dtype(tensor.scalar_type(), tensor.sizes()),
                  "", "load it into the model that it was saved from");
    if (!tensor.has_storage() || tensor.storage().data() == nullptr) continue;  // no elements
    const std::string& first = names.try_emplace(tensor.const_data_ptr(), name).first->second;
    const CheckpointTensor& other = *find(first);
    if (other.sizes == stored->sizes && other.checksum != stored->checksum)
      throw Error(
          ErrorKind::TensorMismatch,
          folder_ + ": '" + first + "' and '" + name + "' have different values, and are one tensor in the model", "",
          "load it into the model that it was saved from");
  }
  if (count > 0)
    throw Error(ErrorKind::UnknownName,
                c10::str(folder_, ": ", count, " tensors are missing: ", missing, count > 10 ? ", ..." : ""), "",
                "load it into the model that it was saved from");
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : into) tensor.copy_(read(name));
}

void Checkpoint::verify() const {
  for (const auto* tensors : {&contents_->model, &contents_->optimizer}) {
    for (const auto& [name, tensor] : *tensors) {
      const SafetensorsFile& file = file_of(name, tensor);
      Checksum sum{tensor.checksum.bits};
      file.add_to(name, sum);
      if (sum != tensor.checksum)
        throw Error(ErrorKind::BadFile, file.path() + ": tensor '" + name + "' is not as it was written", "",
                    kUseAnother);
    }
  }
}

}  // namespace plumb
