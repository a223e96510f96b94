#include "plumb/checkpoint/checkpoint_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/core/output_file.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kGivenUp = "-failed";

std::string with_digits(const char* format, int a, int b = 0) {
  char text[64];
  std::snprintf(text, sizeof text, format, a, b);
  return text;
}
std::string rank_list(int rank) { return with_digits("rank-%05d.json", rank); }
std::string rank_file(const std::string& kind, int rank) { return kind + with_digits(".rank-%05d.safetensors", rank); }

std::map<std::string, CheckpointTensor> write_tensors(const std::string& folder, const std::string& file,
                                                      const NamedTensors& tensors,
                                                      const std::map<std::string, std::string>& ties,
                                                      bool unit_scaled = false) {
  std::map<std::string, CheckpointTensor> written;
  if (tensors.empty()) return written;
  // Names the tied tensors that are left out, as safetensors' own save_model does.
  std::map<std::string, std::string> metadata = ties;
  metadata["format"] = "pt";
  if (unit_scaled) metadata[kUnitScaledKey] = "plumb.transforms.fold makes them plain";
  const auto sums = write_safetensors((fs::path(folder) / file).string(), tensors, metadata);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    written[name] = {file, tensor.scalar_type(), tensor.sizes().vec(), sums[i]};
  }
  return written;
}

void add_part(std::map<std::string, CheckpointTensor>& all, std::map<std::string, CheckpointTensor> part, int rank) {
  for (auto& [name, tensor] : part) {
    const auto [there, is_new] = all.emplace(name, tensor);
    const CheckpointTensor& other = there->second;
    if (!is_new && (other.checksum != tensor.checksum ||
                    std::tie(other.dtype, other.sizes) != std::tie(tensor.dtype, tensor.sizes))) {
      throw Error(ErrorKind::InvalidState,
                  c10::str("'", name, "' of rank ", rank, " is not that of an earlier rank, bit for bit"), "",
                  "give each name by one rank, or keep the ranks' copies equal");
    }
  }
}

// Returns the list of one rank, or nothing if it is not there yet.
std::optional<JsonDoc> read_rank_list(const std::string& folder, int rank) {
  const fs::path path = fs::path(folder) / rank_list(rank);
  std::error_code error;
  if (!fs::exists(path, error)) return std::nullopt;
  if (fs::file_size(path, error) == 0)
    throw Error(ErrorKind::Communication,
                c10::str("rank ", rank, " could not write its part, nor the reason: the disk may be full"));
  JsonDoc doc(path.string(), read_file(path), 16);
  if (const Json* problem = doc.find(doc.root(), "problem"))
    throw Error(ErrorKind::Communication, c10::str("rank ", rank, ": ", doc.string(*problem)));
  return doc;
}

[[noreturn]] void say_missing(const std::string& folder, int world) {
  std::string missing;
  std::error_code error;
  for (int rank = 0; rank < world; ++rank) {
    if (!fs::exists(fs::path(folder) / rank_list(rank), error))
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  throw Error(ErrorKind::Communication, folder + ": rank " + missing + " did not write its part in time", "",
              "see what became of that rank; all ranks must see the same folder");
}

// Makes no folder: rank 0 may have taken it away.
CheckpointFile write_text(const fs::path& path, const std::string& text) {
  OutputFile file(path.string());
  file.write(text.data(), text.size());
  file.commit();
  Checksum sum;
  sum.add(text.data(), text.size());
  return {text.size(), sum};
}

// Renames the files of ranks that have tensors and writes the index.
void finish_kind(const fs::path& folder, const std::string& kind, const std::string& index, int world,
                 std::map<std::string, CheckpointTensor>& tensors, std::map<std::string, CheckpointFile>& files) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank) {
    if (fs::exists(folder / rank_file(kind, rank))) ranks.push_back(rank);
  }
  std::map<std::string, std::string> last_names;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const std::string now = rank_file(kind, ranks[i]);
    const std::string last =
        kind + with_digits("-%05d-of-%05d.safetensors", static_cast<int>(i) + 1, static_cast<int>(ranks.size()));
    fs::rename(folder / now, folder / last);
    files[last] = {fs::file_size(folder / last), std::nullopt};
    last_names[now] = last;
  }
  if (ranks.empty()) return;
  nlohmann::json map = nlohmann::json::object();
  uint64_t bytes = 0;
  for (auto& [name, tensor] : tensors) {
    tensor.file = last_names.at(tensor.file);
    map[name] = tensor.file;
    uint64_t numel = 1;
    for (const int64_t size : tensor.sizes) numel *= static_cast<uint64_t>(size);
    bytes += numel * at::elementSize(tensor.dtype);
  }
  const nlohmann::json document = {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}};
  files[index] = write_text(folder / index, document.dump(2) + "\n");
}

}  // namespace

CheckpointPart without_copies_of_ties(const CheckpointPart& part) {
  CheckpointPart once{{}, part.optimizer, part.ties, part.unit_scaled};
  using View = std::tuple<const void*, int64_t, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>;
  std::map<View, std::string> seen;
  for (const auto& [name, tensor] : part.model) {
    if (tensor.defined() && tensor.layout() == at::kStrided && tensor.nbytes() > 0) {
      const View view{tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset(), tensor.sizes().vec(),
                      tensor.strides().vec(), tensor.scalar_type()};
      const auto [there, is_new] = seen.emplace(view, name);
      if (!is_new) {
        once.ties.emplace(name, there->second);
        continue;
      }
    }
    once.model.emplace_back(name, tensor);
  }
  return once;
}

uint64_t write_rank_files(const std::string& folder, int rank, const CheckpointPart& part) {
  const auto model = write_tensors(folder, rank_file("model", rank), part.model, part.ties, part.unit_scaled);
  const auto optimizer = write_tensors(folder, rank_file("optimizer", rank), part.optimizer, {});
  const nlohmann::json list = {
      {"model", tensors_to_json(model)}, {"optimizer", tensors_to_json(optimizer)}, {"ties", part.ties}};
  write_text(fs::path(folder) / rank_list(rank), list.dump());
  uint64_t bytes = 0;
  for (const auto* tensors : {&part.model, &part.optimizer}) {
    for (const auto& [name, tensor] : *tensors) bytes += tensor.nbytes();
  }
  return bytes;
}

void write_rank_problem(const std::string& folder, int rank, const std::string& problem) noexcept {
  try {
    const nlohmann::json list = {{"problem", problem}};
    const std::string text = list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    write_text(fs::path(folder) / rank_list(rank), text);
  } catch (const std::exception&) {
    // A full disk has no room for the reason, but for an empty file: without one rank 0 would wait until its limit.
    const int made =
        ::open((fs::path(folder) / rank_list(rank)).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (made >= 0) ::close(made);
  }
}

CheckpointContents gather_rank_files(const std::string& folder, int world, const std::function<bool()>& go_on) {
  CheckpointContents contents;
  for (int rank = 0; rank < world; ++rank) {
    auto pause = std::chrono::milliseconds(1);
    std::optional<JsonDoc> list;
    while (!(list = read_rank_list(folder, rank))) {
      if (!go_on()) say_missing(folder, world);
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::milliseconds(50));
    }
    add_part(contents.model, tensors_from_json(*list, list->at(list->root(), "model")), rank);
    add_part(contents.optimizer, tensors_from_json(*list, list->at(list->root(), "optimizer")), rank);
    contents.ties.merge(texts_from_json(*list, list->at(list->root(), "ties")));
  }
  // A name that one rank ties may be another's own tensor.
  for (auto tie = contents.ties.begin(); tie != contents.ties.end();) {
    tie = contents.model.count(tie->first) ? contents.ties.erase(tie) : std::next(tie);
  }
  for (const auto& [name, first] : contents.ties) {
    if (!contents.model.count(first))
      throw Error(ErrorKind::InvalidState, "'" + name + "' is tied to '" + first + "', which no rank gave");
  }
  return contents;
}

void finish_folder(const std::string& folder, int world, CheckpointContents contents) {
  std::map<std::string, CheckpointFile> files;
  finish_kind(folder, "model", kModelIndex, world, contents.model, files);
  finish_kind(folder, "optimizer", kOptimizerIndex, world, contents.optimizer, files);
  write_text(fs::path(folder) / kCheckpointJson, checkpoint_to_text(contents, files));
  for (int rank = 0; rank < world; ++rank) fs::remove(fs::path(folder) / rank_list(rank));
  sync_folder(folder);
}

void give_up_folder(const std::string& folder) noexcept {
  std::error_code ignored;
  const std::string failed = folder + kGivenUp;
  fs::create_directory(failed, ignored);
  // A full disk has no room for a file with the reason, but for another name.
  fs::rename(folder, failed, ignored);
  for (fs::directory_iterator it(failed, ignored), end; !ignored && it != end; it.increment(ignored))
    fs::remove(it->path(), ignored);
}

bool is_given_up(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(folder + kGivenUp, ignored);
}

void sync_folder(const std::string& folder) {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Some file systems cannot sync a folder, and say EINVAL.
  const int reason = descriptor < 0 ? errno : ::fsync(descriptor) == 0 || errno == EINVAL ? 0 : errno;
  if (descriptor >= 0) ::close(descriptor);
  if (reason) throw Error(ErrorKind::CannotWrite, folder + ": cannot be made to last: " + std::strerror(reason));
}

}  // namespace plumb
