#include <cstring>
#include <limits>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/recording/history.h"
#include "plumb/recording/history_format.h"

namespace plumb {

uint32_t history_format::checksum(const Head& head, std::string_view payload) {
  uint32_t crc = crc32(&head.kind, sizeof head.kind);
  crc = crc32(&head.length, sizeof head.length, crc);
  return crc32(payload.data(), payload.size(), crc);
}

namespace {

namespace format = history_format;
using nlohmann::json;

double number_of(const json& value) {
  if (value.is_number()) return value.get<double>();
  const std::string text = value.get<std::string>();
  const double infinity = std::numeric_limits<double>::infinity();
  return text == "inf" ? infinity : text == "-inf" ? -infinity : std::nan("");
}

template <class T>
T take(std::string_view& bytes) {
  T out;
  std::memcpy(&out, bytes.data(), sizeof out);
  bytes.remove_prefix(sizeof out);
  return out;
}

class Parser {
 public:
  Parser(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  History parse() {
    if (bytes_.size() < format::kMagic.size()) {
      // Even the first bytes of a file may be torn.
      if (format::kMagic.starts_with(bytes_) || zeros(bytes_)) return drop(0);
      fail(0, "is no history of plumb");
    }
    if (bytes_.substr(0, 8) != format::kMagic.substr(0, 8)) fail(0, "is no history of plumb");
    if (bytes_.substr(0, 16) != format::kMagic) fail(8, "is of another version of the format");
    size_t at = format::kMagic.size();
    while (at < bytes_.size()) {
      const std::string_view rest = bytes_.substr(at);
      if (rest.size() < sizeof(format::Head)) return drop(at);
      std::string_view head_bytes = rest;
      const auto head = take<format::Head>(head_bytes);
      if (head.length > head_bytes.size()) return drop(at);
      const std::string_view payload = head_bytes.substr(0, head.length);
      if (format::checksum(head, payload) != head.crc) {
        // Only what was written last can be torn: the tail that a lost power leaves may read as zeros.
        if (payload.size() == head_bytes.size() || zeros(rest)) return drop(at);
        fail(at, "is damaged: a record's checksum does not match");
      }
      try {
        record(head.kind, payload);
      } catch (const json::exception& e) {
        fail(at, std::string("holds a record that cannot be read: ") + e.what());
      } catch (const Error& e) {
        fail(at, "holds a record that cannot be read: " + e.message());
      }
      at += sizeof head + payload.size();
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(size_t at, const std::string& what) const {
    throw Error(ErrorKind::BadFile, name_ + " " + what, "byte " + std::to_string(at),
                "give a file that a Recorder wrote");
  }

  [[noreturn]] static void bad(const std::string& what) { throw Error(ErrorKind::BadFile, what); }

  static bool zeros(std::string_view bytes) { return bytes.find_first_not_of('\0') == std::string_view::npos; }

  History drop(size_t at) {
    out_.torn_bytes = bytes_.size() - at;
    return std::move(out_);
  }

  uint32_t tensor_index(uint64_t index) const {
    if (index >= out_.tensors.size()) bad("no tensor has number " + std::to_string(index));
    return static_cast<uint32_t>(index);
  }

  // Records of unknown kinds were written by a newer plumb and are skipped.
  void record(uint32_t kind, std::string_view payload) {
    switch (kind) {
      case format::kRules: {
        const json doc = parse_json(payload);
        out_.rules.push_back(doc.at("rules").get<std::string>());
        out_.ranks = doc.value("ranks", int64_t{0});
        break;
      }
      case format::kTensors:
        for (const json& each : parse_json(payload)) {
          out_.tensors.push_back({each.at("name"), each.at("module"), each.at("operator"), each.at("dtype"),
                                  each.at("sizes").get<std::vector<int64_t>>(), each.value("stage", int64_t{-1}), -1,
                                  each.value("source", "")});
          const size_t own = out_.tensors.size() - 1;
          for (const json& input : each.value("inputs", json::array())) {
            out_.tensors[own].inputs.push_back(tensor_index(input.get<uint64_t>()));
            if (out_.tensors[own].inputs.back() == own) bad("a tensor is computed from itself");
          }
        }
        break;
      case format::kStep: step(payload); break;
      case format::kHashes: hashes(payload); break;
      case format::kScalars: {
        const json doc = parse_json(payload);
        HistoryScalars scalars{doc.at("step").get<int64_t>(), {}};
        for (const auto& [key, value] : doc.at("values").items()) scalars.values.emplace_back(key, number_of(value));
        out_.scalars.push_back(std::move(scalars));
        break;
      }
      case format::kEvent: {
        const json doc = parse_json(payload);
        HistoryEvent event{doc.at("step").get<int64_t>(),
                           doc.at("rule").get<int64_t>(),
                           doc.at("condition").get<std::string>(),
                           doc.at("count").get<int64_t>(),
                           {}};
        for (const json& each : doc.at("first")) {
          event.first.push_back({tensor_index(each.at("tensor").get<uint64_t>()), each.at("backward").get<bool>(),
                                 number_of(each.at("value"))});
        }
        out_.events.push_back(std::move(event));
        break;
      }
      default: break;
    }
  }

  void step(std::string_view payload) {
    if (payload.size() < sizeof(format::StepHead)) bad("a step is too short");
    const auto head = take<format::StepHead>(payload);
    if (head.rows > payload.size() / sizeof(format::Row)) bad("a step ends before its rows");
    HistoryStep step{head.step, {}};
    step.rows.reserve(head.rows);
    std::string_view rows = payload.substr(0, head.rows * sizeof(format::Row)), bins = payload.substr(rows.size());
    while (!rows.empty()) {
      const auto r = take<format::Row>(rows);
      HistoryRow row{tensor_index(r.tensor), r.backward != 0, r.by_condition != 0, r.present, {}};
      for (size_t i = 0; i < 5; ++i) row.data.*format::kReals[i] = r.reals[i];
      for (size_t i = 0; i < 4; ++i) row.data.*format::kCounts[i] = r.counts[i];
      if (r.bins > bins.size() / sizeof(uint64_t)) bad("a step ends before its histograms");
      if (r.present >> static_cast<unsigned>(StatisticKind::Histogram) & 1) {
        auto histogram = std::make_shared<ExponentHistogram>();
        for (uint32_t i = 0; i < r.bins; ++i) {
          const auto bin = take<uint64_t>(bins);
          histogram->counts[bin >> format::kBinShift] =
              static_cast<int64_t>(bin & ((uint64_t{1} << format::kBinShift) - 1));
        }
        row.data.histogram = std::move(histogram);
      } else {
        bins.remove_prefix(r.bins * sizeof(uint64_t));
      }
      step.rows.push_back(std::move(row));
    }
    out_.steps.push_back(std::move(step));
  }

  void hashes(std::string_view payload) {
    if (payload.size() < sizeof(format::StepHead)) bad("a step's hashes are too short");
    const auto head = take<format::StepHead>(payload);
    if (head.rows != payload.size() / sizeof(format::HashRow) || payload.size() % sizeof(format::HashRow) != 0)
      bad("a step's hashes end before their number");
    HistoryHashes step{head.step, {}};
    step.hashes.reserve(head.rows);
    while (!payload.empty()) {
      const auto r = take<format::HashRow>(payload);
      step.hashes.push_back({tensor_index(r.tensor), r.backward != 0, r.first, r.rows, r.words, r.hash});
    }
    out_.hashes.push_back(std::move(step));
  }

  std::string_view bytes_;
  const std::string& name_;
  History out_;
};

}  // namespace

std::string_view history_format::until_step(std::string_view bytes, int64_t last) {
  size_t at = kMagic.size();
  while (at + sizeof(Head) <= bytes.size()) {
    std::string_view rest = bytes.substr(at);
    const auto head = take<Head>(rest);
    if (head.length > rest.size()) break;
    const std::string_view payload = rest.substr(0, head.length);
    int64_t step = 0;
    if (head.kind == kStep || head.kind == kHashes) std::memcpy(&step, payload.data(), sizeof step);
    if (head.kind == kScalars || head.kind == kEvent) step = parse_json(payload).at("step").get<int64_t>();
    if (step > last) break;
    at += sizeof head + payload.size();
  }
  return bytes.substr(0, at);
}

int64_t History::last_step() const {
  int64_t last = 0;
  if (!steps.empty()) last = std::max(last, steps.back().step);
  if (!hashes.empty()) last = std::max(last, hashes.back().step);
  if (!scalars.empty()) last = std::max(last, scalars.back().step);
  if (!events.empty()) last = std::max(last, events.back().step);
  return last;
}

History parse_history(std::string_view bytes, const std::string& name) { return Parser(bytes, name).parse(); }

}  // namespace plumb
