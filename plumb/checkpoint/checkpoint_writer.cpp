#include "plumb/checkpoint/checkpoint_writer.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "plumb/checkpoint/safetensors_header.h"
#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/core/output_file.h"
#include "plumb/core/system_remedy.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr const char* kLockFile = ".checkpoints.lock";
constexpr int kDeepestState = 64;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Only these characters, so that it is a part of a folder's name and of nothing else.
bool is_run_id(const std::string& id) {
  return !id.empty() && id.size() <= 64 &&
         id.find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_") == id.npos;
}

// Locks the open file: the lock ends with the process, however that ends. Returns -1 if the file system has no locks.
int lock_run(const std::string& folder) {
  const std::string path = (fs::path(folder) / kLockFile).string();
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0)
    throw Error(ErrorKind::CannotWrite, path + ": cannot be written: " + std::strerror(errno), "",
                system_remedy(errno, "name a folder for checkpoints that can be written and has room"));
  if (::flock(file, LOCK_EX | LOCK_NB) == 0) {
    if (::ftruncate(file, 0) == 0) ::dprintf(file, "%d", ::getpid());
    return file;
  }
  const int reason = errno;
  char holder[16] = {};
  const bool own = ::read(file, holder, sizeof(holder) - 1) > 0 && std::atoi(holder) == ::getpid();
  ::close(file);
  if (reason != EWOULDBLOCK) return -1;
  throw Error(ErrorKind::InvalidState,
              folder + (own ? ": another writer of this process writes its checkpoints there"
                            : ": another run writes its checkpoints there"),
              "", own ? "close that writer, or name another folder" : "end that run, or name another folder");
}

NamedTensors copies(const NamedTensors& tensors) {
  NamedTensors copied;
  copied.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    at::Tensor copy = at::empty(tensor.sizes(), at::dtype(tensor.scalar_type()));
    copy.copy_(tensor.detach());
    copied.emplace_back(name, std::move(copy));
  }
  return copied;
}

// In words where the exception has none.
std::string reason_of(const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e)) return "out of memory";
  return first_line(e.what());
}

// JSON's numbers have no infinity, and its texts are UTF-8: what would come back otherwise is refused.
void check_state(const nlohmann::json& state) {
  try {
    if (parse_json(state.dump(), kDeepestState) == state) return;
  } catch (const Error&) {
  } catch (const nlohmann::json::exception&) {
  }
  throw Error(ErrorKind::InvalidArgument, "the state for a checkpoint does not come back from JSON as it is", "",
              "leave out or spell infinity, NaN and text that is no UTF-8; nest it less than 64 deep");
}

// In one step where the file system can exchange two folders.
void replace_folder(const std::string& from, const std::string& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (!error) return;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  const std::string aside = from + "-old";
  fs::rename(to, aside);
  fs::rename(from, to);
  fs::rename(aside, from);
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string run_folder, int rank, int world, std::string run_id,
                                   CheckpointOptions options)
    : run_folder_(std::move(run_folder)), run_id_(std::move(run_id)), rank_(rank), world_(world), options_(options) {
  const auto refuse = [](const std::string& what, const std::string& remedy) {
    throw Error(ErrorKind::InvalidArgument, "checkpoints: " + what, "", remedy);
  };
  if (world < 1 || rank < 0 || rank >= world)
    refuse(c10::str("there is no rank ", rank, " of ", world), "give ranks from 0 on");
  if (!is_run_id(run_id_)) refuse("'" + run_id_ + "' is no name of a run", "use letters, digits, '-' and '_'");
  if (options.keep_last < 0 || options.keep_every < 0 || !(options.timeout >= 0))
    refuse("keep_last, keep_every and timeout cannot be negative", "0 keeps all, and every, and does not wait");
  std::error_code error;
  fs::create_directories(run_folder_, error);
  if (error)
    throw Error(ErrorKind::CannotWrite, run_folder_ + ": cannot be made: " + error.message(), "",
                "name a folder for checkpoints that can be written");
  if (rank != 0) return;
  lock_ = lock_run(run_folder_);
  remove_unfinished(std::nullopt);
}

CheckpointWriter::~CheckpointWriter() { close(); }

void CheckpointWriter::close() {
  wait();
  if (lock_ >= 0) ::close(lock_);
  lock_ = -1;
  closed_ = true;
}

void CheckpointWriter::save(int64_t step, const CheckpointPart& part, const nlohmann::json& state) {
  if (closed_)
    throw Error(ErrorKind::InvalidState, run_folder_ + ": this writer of checkpoints is closed", "",
                "make another one");
  if (step < 0) throw Error(ErrorKind::InvalidArgument, "a checkpoint of step " + std::to_string(step));
  check_state(state);
  CheckpointPart once = without_copies_of_ties(part);
  check_holdable(run_folder_, once.model);
  check_holdable(run_folder_, once.optimizer);
  const auto start = Clock::now();
  wait();
  CheckpointReport report;
  report.step = step;
  report.waited = seconds_since(start);
  try {
    once.model = copies(once.model);
    once.optimizer = copies(once.optimizer);
  } catch (const std::exception& e) {  // no memory for them: rank 0 gets the reason, the run goes on
    report.problem =
        c10::str(run_folder_, "/", checkpoint_name(step), ": rank ", rank_, " could not copy its part: ", reason_of(e));
    once = {};
  }
  report.copied = seconds_since(start) - report.waited;
  running_ = std::async(
      options_.background ? std::launch::async : std::launch::deferred,
      [this, part = std::move(once), state, report]() mutable { return write(std::move(part), state, report); });
  if (!options_.background) wait();
}

void CheckpointWriter::wait() {
  if (running_.valid()) running_.wait();
  collect();
}

void CheckpointWriter::collect() {
  if (!running_.valid() || running_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
  reports_.push_back(running_.get());
  problem_ = reports_.back().problem;
}

std::optional<std::string> CheckpointWriter::problem() {
  collect();
  return problem_.empty() ? std::nullopt : std::optional(problem_);
}

std::vector<CheckpointReport> CheckpointWriter::take_reports() {
  collect();
  return std::exchange(reports_, {});
}

CheckpointReport CheckpointWriter::write(CheckpointPart part, const nlohmann::json& state,
                                         CheckpointReport report) noexcept {
  const auto start = Clock::now();
  const std::string folder = (fs::path(run_folder_) / (checkpoint_name(report.step) + ".writing-" + run_id_)).string();
  try {
    if (is_given_up(folder)) throw Error(ErrorKind::Communication, folder + ": rank 0 gave it up and says why");
    fs::create_directories(folder);
    if (!report.problem.empty()) throw Error(ErrorKind::ExecutionFailed, std::exchange(report.problem, {}));
    report.bytes = write_rank_files(folder, rank_, part);
    part = {};
    rank_ == 0 ? publish(state, folder, report) : await_publication(folder, report);
  } catch (const std::exception& e) {
    const auto* known = dynamic_cast<const Error*>(&e);
    report.problem =
        known ? known->message() : c10::str(folder, ": rank ", rank_, " could not write its part: ", reason_of(e));
    if (rank_ == 0) {
      give_up_folder(folder);
    } else if (!is_given_up(folder)) {
      write_rank_problem(folder, rank_, report.problem);
    }
  }
  report.written = seconds_since(start);
  return report;
}

void CheckpointWriter::publish(const nlohmann::json& state, const std::string& folder, CheckpointReport& report) const {
  const auto start = Clock::now();
  CheckpointContents contents =
      gather_rank_files(folder, world_, [&] { return !abandoned_ && seconds_since(start) < options_.timeout; });
  contents.step = report.step;
  contents.state = state;
  finish_folder(folder, world_, std::move(contents));
  const std::string last = (fs::path(run_folder_) / checkpoint_name(report.step)).string();
  replace_folder(folder, last);
  sync_folder(run_folder_);
  report.folder = last;
  remove_unfinished(report.step);
  remove_old(report);
}

void CheckpointWriter::await_publication(const std::string& folder, CheckpointReport& report) const {
  const auto start = Clock::now();
  std::error_code error;
  for (auto pause = std::chrono::milliseconds(1); fs::exists(folder, error) && !is_given_up(folder);
       pause = std::min(2 * pause, std::chrono::milliseconds(50))) {
    if (abandoned_ || seconds_since(start) > options_.timeout)
      throw Error(ErrorKind::Communication, folder + ": rank 0 did not finish it in time");
    std::this_thread::sleep_for(pause);
  }
  const fs::path last = fs::path(folder).replace_extension();
  if (is_given_up(folder) || !fs::exists(last / kCheckpointJson, error))
    throw Error(ErrorKind::Communication, folder + ": rank 0 gave it up and says why");
  report.folder = last.string();
}

void CheckpointWriter::remove_unfinished(std::optional<int64_t> up_to_step) const {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(run_folder_, error), end; !error && it != end; it.increment(error)) {
    const auto step = step_of_unfinished(it->path().filename().string());
    if (step && (!up_to_step || *step <= *up_to_step)) found.push_back(it->path());
  }
  for (const fs::path& path : found) fs::remove_all(path, error);
}

void CheckpointWriter::remove_old(CheckpointReport& report) const {
  std::vector<int64_t> steps = checkpoint_steps(run_folder_);
  // Those of later steps are of a run that this one went back from: they count as none.
  std::erase_if(steps, [&](int64_t step) { return step > report.step; });
  if (options_.keep_last == 0) return;
  for (size_t i = 0; i + static_cast<size_t>(options_.keep_last) < steps.size(); ++i) {
    if (options_.keep_every > 0 && steps[i] % options_.keep_every == 0) continue;
    const fs::path old = fs::path(run_folder_) / checkpoint_name(steps[i]);
    // Under another name first: what is removed by half is no checkpoint any more.
    const fs::path aside = old.string() + ".writing-" + run_id_ + "-removed";
    std::error_code error;
    fs::rename(old, aside, error);
    if (!error) fs::remove_all(aside, error);
    if (error) report.problem = old.string() + ": cannot be removed: " + error.message();
  }
}

namespace {

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
    bytes += static_cast<uint64_t>(c10::multiply_integers(tensor.sizes)) * at::elementSize(tensor.dtype);
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
