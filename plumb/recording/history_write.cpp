#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/system_remedy.h"
#include "plumb/recording/history.h"
#include "plumb/recording/history_format.h"

namespace plumb {
namespace {

namespace format = history_format;
using nlohmann::json;

json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

template <class T>
void put(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string text_of(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

json json_of(const HistoryTensor& t) {
  json out = {
      {"name", t.name}, {"module", t.module}, {"operator", t.operation}, {"dtype", t.dtype}, {"sizes", t.sizes}};
  if (t.stage >= 0) out["stage"] = t.stage;
  if (!t.source.empty()) out["source"] = t.source;
  if (!t.inputs.empty()) out["inputs"] = t.inputs;
  return out;
}

// Nothing at all, or what a recorder leaves that never came to a step.
bool holds_nothing(const std::filesystem::path& path) {
  try {
    if (std::filesystem::file_size(path) == 0) return true;
    const History old = read_history(path);
    return old.steps.empty() && old.hashes.empty() && old.scalars.empty() && old.events.empty() && old.torn_bytes == 0;
  } catch (const std::exception&) {
    return false;
  }
}

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what, int reason) {
  throw Error(ErrorKind::CannotWrite, "cannot write the history \"" + path.string() + "\": " + what, "",
              system_remedy(reason, "name a file in a folder that can be written and has room"));
}

}  // namespace

HistoryWriter::HistoryWriter(const std::filesystem::path& path, bool append, std::optional<int64_t> after)
    : path_(path) {
  std::error_code error;
  if (const auto all = format::path_of_all_ranks(path); all && !append && std::filesystem::exists(*all, error)) {
    throw Error(ErrorKind::CannotWrite,
                "the history \"" + path.string() + "\" would not be read: there is a file \"" + all->string() + "\"",
                "", "name another file, or move that one away");
  }
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) refuse(path, std::strerror(errno), errno);
  try {
    if (!std::filesystem::is_regular_file(path, error)) refuse(path, "it is no regular file", 0);
    if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
      throw Error(ErrorKind::CannotWrite, "another recorder has the history \"" + path.string() + "\" open", "",
                  "close() that one first, or name another file");
    }
    if (!append) {
      if (!holds_nothing(path)) {
        throw Error(ErrorKind::CannotWrite, "the history \"" + path.string() + "\" is there already", "",
                    "name another file, move that one away, or let a Recorder append to it");
      }
      if (ftruncate(file_, 0) != 0) fail(std::strerror(errno));
    } else {
      const std::string bytes = read_file(path, format::kMostBytes);
      History old = parse_history(bytes, path.string());
      end_ = bytes.size() - old.torn_bytes;
      if (after && old.last_step() > *after) {
        const std::string_view kept = format::until_step(std::string_view(bytes).substr(0, end_), *after);
        old = parse_history(kept, path.string());
        end_ = kept.size();
      }
      if (end_ < bytes.size() && ftruncate(file_, static_cast<off_t>(end_)) != 0) fail(std::strerror(errno));
      tensors_ = old.tensors;
      written_ = tensors_.size();
      for (size_t i = 0; i < tensors_.size(); ++i) {
        places_.emplace(text_of(json_of(tensors_[i])), static_cast<uint32_t>(i));
      }
      last_step_ = old.last_step();
      before_.rules = std::move(old.rules), before_.events = std::move(old.events);
    }
    if (end_ == 0) {
      if (pwrite(file_, format::kMagic.data(), format::kMagic.size(), 0) !=
          static_cast<ssize_t>(format::kMagic.size())) {
        fail(std::strerror(errno));
      }
      end_ = format::kMagic.size();
    }
  } catch (...) {
    close(file_);
    throw;
  }
}

HistoryWriter::~HistoryWriter() {
  // A recorder that is refused (its rules fit nothing, say) leaves no file behind.
  if (std::error_code error; std::uncaught_exceptions() > 0 && written_ == 0 && holds_nothing(path_))
    std::filesystem::remove(path_, error);
  close(file_);
}

void HistoryWriter::fail(const std::string& reason) const { refuse(path_, reason, 0); }

void HistoryWriter::record(uint32_t kind, std::string_view payload) {
  format::Head head{kind, 0, payload.size()};
  head.crc = format::checksum(head, payload);
  std::string bytes;
  bytes.reserve(sizeof head + payload.size());
  put(bytes, head);
  bytes += payload;
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = pwrite(file_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(end_ + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int reason = n < 0 ? errno : ENOSPC;
      // Half a record is worth nothing; should this fail too, readers drop it.
      if (ftruncate(file_, static_cast<off_t>(end_)) != 0) errno = 0;
      fail(std::strerror(reason));
    }
    done += static_cast<size_t>(n);
  }
  end_ += bytes.size();
}

void HistoryWriter::rules(const std::string& text, int64_t ranks) {
  json document = {{"rules", text}};
  if (ranks > 0) document["ranks"] = ranks;
  record(format::kRules, text_of(document));
}

namespace {

// A record that names a tensor which is not there makes the file unreadable.
void require_tensor(uint32_t tensor, size_t there, const std::filesystem::path& path) {
  if (tensor < there) return;
  throw Error(ErrorKind::InvalidArgument,
              "the history \"" + path.string() + "\" has no tensor number " + std::to_string(tensor) + ", it has " +
                  std::to_string(there),
              "", "a number that HistoryWriter::tensor() has returned");
}

}  // namespace

uint32_t HistoryWriter::tensor(const HistoryTensor& tensor) {
  for (const uint32_t input : tensor.inputs) require_tensor(input, tensors_.size(), path_);
  const auto [place, is_new] = places_.try_emplace(text_of(json_of(tensor)), static_cast<uint32_t>(tensors_.size()));
  if (is_new) tensors_.push_back(tensor);
  return place->second;
}

void HistoryWriter::flush_tensors() {
  if (written_ == tensors_.size()) return;
  json list = json::array();
  for (size_t i = written_; i < tensors_.size(); ++i) list.push_back(json_of(tensors_[i]));
  record(format::kTensors, text_of(list));
  written_ = tensors_.size();
}

void HistoryWriter::step(const HistoryStep& step) {
  for (const HistoryRow& row : step.rows) require_tensor(row.tensor, tensors_.size(), path_);
  flush_tensors();
  std::string payload, bins;
  put(payload, format::StepHead{step.step, step.rows.size()});
  for (const HistoryRow& row : step.rows) {
    const Metrics::Data& d = row.data;
    auto has = [&](size_t kind) { return (row.present >> kind & 1) != 0; };
    format::Row r;
    r.tensor = row.tensor;
    r.backward = row.backward, r.by_condition = row.by_condition;
    r.present = row.present;
    for (size_t i = 0; i < 5; ++i) r.reals[i] = has(i) ? d.*format::kReals[i] : std::nan("");
    for (size_t i = 0; i < 4; ++i) r.counts[i] = has(5 + i) ? d.*format::kCounts[i] : 0;
    if (has(static_cast<size_t>(StatisticKind::Histogram)) && d.histogram) {
      for (size_t bin = 0; bin < d.histogram->counts.size(); ++bin) {
        const int64_t n = d.histogram->counts[bin];
        if (n == 0) continue;
        put(bins, uint64_t{bin} << format::kBinShift | static_cast<uint64_t>(n));
        ++r.bins;
      }
    }
    put(payload, r);
  }
  record(format::kStep, payload + bins);
  last_step_ = std::max(last_step_, step.step);
}

void HistoryWriter::hashes(const HistoryHashes& step) {
  for (const HistoryHash& hash : step.hashes) require_tensor(hash.tensor, tensors_.size(), path_);
  flush_tensors();
  std::string payload;
  put(payload, format::StepHead{step.step, step.hashes.size()});
  for (const HistoryHash& h : step.hashes)
    put(payload, format::HashRow{h.tensor, h.backward, {}, h.first, h.rows, h.words, h.hash});
  record(format::kHashes, payload);
  last_step_ = std::max(last_step_, step.step);
}

void HistoryWriter::scalars(const HistoryScalars& scalars) {
  json values = json::object();
  for (const auto& [name, value] : scalars.values) values[name] = number(value);
  record(format::kScalars, text_of({{"step", scalars.step}, {"values", std::move(values)}}));
  last_step_ = std::max(last_step_, scalars.step);
}

void HistoryWriter::event(const HistoryEvent& event) {
  for (const auto& c : event.first) require_tensor(c.tensor, tensors_.size(), path_);
  flush_tensors();
  json first = json::array();
  for (const auto& c : event.first) {
    first.push_back({{"tensor", c.tensor}, {"backward", c.backward}, {"value", number(c.value)}});
  }
  record(format::kEvent, text_of({{"step", event.step},
                                  {"rule", event.rule},
                                  {"condition", event.condition},
                                  {"count", event.count},
                                  {"first", std::move(first)}}));
  last_step_ = std::max(last_step_, event.step);
}

}  // namespace plumb
