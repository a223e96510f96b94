// A recorder's measurements on disk: an append-only file of checked records. The format is docs/history.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plumb/recording/statistic.h"
#include "plumb/transforms/track/tracker.h"

namespace plumb {

struct HistoryTensor {
  std::string name;       // a parameter's full name, an input's name, or the value's name under its module's path
  std::string module;     // path, "" for the root
  std::string operation;  // "aten::linear"; "parameter", "buffer", "input"
  std::string dtype;      // "float32"
  std::vector<int64_t> sizes;
  int64_t stage = -1;  // pipeline stage; -1: unknown
  int64_t rank = -1;   // rank that wrote the file; -1: the file stands alone
  // Recorded with hashes: the user's line, "model.py:12", and the tensors of this history it is computed from.
  std::string source = {};
  std::vector<uint32_t> inputs = {};

  // "stage 1, rank 0", "rank 0"; "" where neither is known.
  std::string part() const;
  bool is_computed() const { return operation.find("::") != std::string::npos; }  // by an operator

  bool operator==(const HistoryTensor&) const = default;
};

// One tensor, or its gradient, in one step. A statistic that was not asked for has no bit in `present`
// (Statistic::bits): readers ask has() and value(), since `data` may hold anything there.
struct HistoryRow {
  uint32_t tensor = 0;  // index into History::tensors
  bool backward = false;
  bool by_condition = false;  // no rule without a condition asked for it
  uint16_t present = 0;
  Metrics::Data data;

  // Returns whether everything that the statistic is computed from was measured.
  bool has(const Statistic& statistic) const {
    return (statistic.bits() & ~present) == 0 && (data.histogram || !statistic.needs_histogram());
  }
  // Returns NaN if it was not measured.
  double value(const Statistic& statistic) const {
    if (!has(statistic)) return std::numeric_limits<double>::quiet_NaN();
    Metrics::Data needed = data;
    if (!statistic.needs_histogram()) needed.histogram = nullptr;
    return statistic.of(needed.full());
  }
};

struct HistoryStep {
  int64_t step = 0;
  std::vector<HistoryRow> rows;
};

// The hash (plumb/numerics/hash.h) of a tensor, or of its gradient, in a microbatch.
struct HistoryHash {
  uint32_t tensor = 0;
  bool backward = false;
  int64_t first = 0;  // the microbatch's first row in the batch of all replicas; its number where `rows` is 0
  int64_t rows = 0;   // row count of the microbatch; 0: not known
  int64_t words = 0;  // hashed
  uint64_t hash = 0;
  bool operator==(const HistoryHash&) const = default;
};

struct HistoryHashes {
  int64_t step = 0;
  std::vector<HistoryHash> hashes;
};

struct HistoryScalars {
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> values;  // "loss"
};

// A rule's condition held.
struct HistoryEvent {
  int64_t step = 0;
  int64_t rule = 0;
  std::string condition;  // "nan_count > 0"
  int64_t count = 0;      // tensors and gradients for which it held
  struct Case {
    uint32_t tensor = 0;
    bool backward = false;
    double value = 0;
  };
  std::vector<Case> first;  // in graph order, sixteen at most
};

struct History {
  std::vector<HistoryTensor> tensors;
  std::vector<HistoryStep> steps;     // as written: ascending
  std::vector<HistoryHashes> hashes;  // as written: ascending
  std::vector<HistoryScalars> scalars;
  std::vector<HistoryEvent> events;
  std::vector<std::string> rules;  // rule texts of every run that wrote to the file
  uint64_t torn_bytes = 0;         // size of an incomplete last record, which is dropped
  int64_t ranks = 0;               // RecorderOptions::ranks of the last run that wrote to the file

  // Returns the last step of anything in it; 0 if there is none.
  int64_t last_step() const;
};

// Reads a file, or if there is no PATH itself the files of one run's ranks, PATH.rank0, PATH.rank1, ..., as one history
// (merge_histories). Throws Error(BadFile) that names the file and the byte for what is no history or is damaged before
// its last record, and for a set of files in which a rank is missing.
History read_history(const std::filesystem::path& path);
// Reads a history from memory; `name` is for messages.
History parse_history(std::string_view bytes, const std::string& name = "history");

// Merges the histories of a run's ranks; ranks[r] is that of rank r. Tensors get their rank, and are sorted by stage,
// where known, and rank. A step has the rows of every rank that wrote it. Scalars of step() that differ between ranks
// are stored as "NAME (rank N)". Conditions that held in the same step are one event with the counts summed.
History merge_histories(std::vector<History> ranks);

// Appends each record in one write, so that a process that dies loses nothing. One writer a file. Throws, the file as
// it was, Error(CannotWrite) and, for a tensor's number that tensor() has not returned, Error(InvalidArgument).
class HistoryWriter {
 public:
  // Makes a new file. With `append`, reads an existing one, cuts off a torn last record, and goes on. Throws
  // Error(CannotWrite) for a file that holds anything already, or a rank's beside a file of all ranks' name, which
  // read_history() would read in its place (both without `append`). So it does for one that cannot be written, or that
  // another writer has open, and Error(BadFile) for one to be appended to that is no history. `after`: later steps of
  // an existing file are cut off, for they are computed again.
  HistoryWriter(const std::filesystem::path& path, bool append, std::optional<int64_t> after = {});
  ~HistoryWriter();
  HistoryWriter(const HistoryWriter&) = delete;

  // The tensors that the file held when it was opened.
  const std::vector<HistoryTensor>& tensors() const { return tensors_; }
  int64_t last_step() const { return last_step_; }
  // The rules and events that the file held when it was opened, and nothing else of it.
  const History& before() const { return before_; }

  void rules(const std::string& text, int64_t ranks = 0);
  // Returns the index of this tensor, that of an equal one if there is one. Written before the next step.
  uint32_t tensor(const HistoryTensor& tensor);
  void step(const HistoryStep& step);
  void hashes(const HistoryHashes& hashes);
  void scalars(const HistoryScalars& scalars);
  void event(const HistoryEvent& event);

 private:
  void record(uint32_t kind, std::string_view payload);
  void flush_tensors();
  [[noreturn]] void fail(const std::string& reason) const;

  std::filesystem::path path_;
  int file_ = -1;
  uint64_t end_ = 0;
  int64_t last_step_ = 0;
  History before_;
  std::vector<HistoryTensor> tensors_;
  std::unordered_map<std::string, uint32_t> places_;
  size_t written_ = 0;  // number of tensors_ that are in the file
};

}  // namespace plumb
