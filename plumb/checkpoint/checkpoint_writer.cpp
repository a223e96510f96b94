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
#include <utility>

#include "plumb/checkpoint/checkpoint_parts.h"
#include "plumb/checkpoint/safetensors_header.h"
#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
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

}  // namespace plumb
