// Histories of files: one, or those of a run's ranks as one.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/recording/history.h"
#include "plumb/recording/history_format.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostCases = 16;  // largest number of cases that a merged event keeps

History history_of(const fs::path& path) {
  return parse_history(read_file(path, history_format::kMostBytes), path.string());
}

fs::path file_of_rank(const fs::path& path, size_t rank) {
  return fs::path(path).concat(".rank" + std::to_string(rank));
}

// Returns N of a file's name START.rankN.
std::optional<size_t> rank_of(std::string_view name, std::string_view start) {
  if (!name.starts_with(start)) return std::nullopt;
  const std::string digits(name.substr(start.size()));
  if (digits.empty() || digits.size() > 6 || digits.find_first_not_of("0123456789") != std::string::npos) return {};
  if (digits.size() > 1 && digits[0] == '0') return std::nullopt;
  return std::stoul(digits);
}

// Returns the number of files: one more than the highest rank. 0: none.
size_t ranks_of(const fs::path& path) {
  const std::string start = path.filename().string() + ".rank";
  size_t count = 0;
  std::error_code error;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (const auto rank = rank_of(at->path().filename().string(), start)) count = std::max(count, *rank + 1);
  }
  return count;
}

// Old number of a tensor -> its number in the whole.
using Numbers = std::vector<std::vector<uint32_t>>;

Numbers join_tensors(std::vector<History>& ranks, History& out) {
  std::vector<std::pair<size_t, size_t>> order;  // rank, number
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (size_t t = 0; t < ranks[r].tensors.size(); ++t) order.emplace_back(r, t);
  }
  auto stage = [&](const auto& place) { return ranks[place.first].tensors[place.second].stage; };
  std::ranges::stable_sort(order, {}, stage);
  Numbers numbers(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) numbers[r].resize(ranks[r].tensors.size());
  for (const auto& [r, t] : order) {
    numbers[r][t] = static_cast<uint32_t>(out.tensors.size());
    out.tensors.push_back(std::move(ranks[r].tensors[t]));
    out.tensors.back().rank = static_cast<int64_t>(r);
  }
  size_t place = 0;
  for (const auto& [r, t] : order) {
    for (uint32_t& input : out.tensors[place++].inputs) input = numbers[r][input];
  }
  return numbers;
}

// Joins the records of each step: HistoryStep and its rows, or HistoryHashes and its hashes.
template <class Step, class Row>
void join_steps(std::vector<History>& ranks, const Numbers& numbers, std::vector<Step> History::*steps,
                std::vector<Row> Step::*rows, History& out) {
  std::map<int64_t, Step> whole;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (Step& step : ranks[r].*steps) {
      Step& all = whole.try_emplace(step.step, Step{step.step, {}}).first->second;
      for (Row& row : step.*rows) {
        row.tensor = numbers[r][row.tensor];
        (all.*rows).push_back(std::move(row));
      }
    }
  }
  for (auto& [number, step] : whole) {
    std::ranges::stable_sort(step.*rows, {}, [](const Row& row) { return std::pair(row.tensor, row.backward); });
    (out.*steps).push_back(std::move(step));
  }
}

void join_scalars(const std::vector<History>& ranks, History& out) {
  std::map<std::string, std::map<int64_t, std::map<size_t, double>>> told;  // by name, step and rank
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (const HistoryScalars& each : ranks[r].scalars) {
      for (const auto& [name, value] : each.values) told[name][each.step][r] = value;
    }
  }
  auto agree = [](const auto& step) {
    const double first = step.second.begin()->second;
    return std::ranges::all_of(step.second, [&](const auto& of_rank) {
      return of_rank.second == first || (std::isnan(of_rank.second) && std::isnan(first));
    });
  };
  std::map<int64_t, HistoryScalars> steps;
  for (const auto& [name, course] : told) {
    const bool one = std::ranges::all_of(course, agree);
    for (const auto& [step, of_rank] : course) {
      auto& values = steps.try_emplace(step, HistoryScalars{step, {}}).first->second.values;
      for (const auto& [rank, value] : of_rank) {
        values.emplace_back(one ? name : c10::str(name, " (rank ", rank, ")"), value);
        if (one) break;
      }
    }
  }
  for (auto& [number, scalars] : steps) out.scalars.push_back(std::move(scalars));
}

void join_events(std::vector<History>& ranks, const Numbers& numbers, History& out) {
  std::map<std::tuple<int64_t, int64_t, std::string>, HistoryEvent> events;
  for (size_t r = 0; r < ranks.size(); ++r) {
    for (HistoryEvent& event : ranks[r].events) {
      for (auto& c : event.first) c.tensor = numbers[r][c.tensor];
      const auto [known, is_new] = events.try_emplace({event.step, event.rule, event.condition}, event);
      if (is_new) continue;
      HistoryEvent& whole = known->second;
      whole.count += event.count;
      for (auto& c : event.first) {
        if (whole.first.size() < kMostCases) whole.first.push_back(c);
      }
    }
  }
  for (auto& [place, event] : events) out.events.push_back(std::move(event));
}

}  // namespace

std::optional<fs::path> history_format::path_of_all_ranks(const fs::path& path) {
  const std::string name = path.filename().string();
  const size_t end = name.rfind(".rank");
  if (end == name.npos || end == 0 || !rank_of(name, name.substr(0, end) + ".rank")) return std::nullopt;
  return fs::path(path).replace_filename(name.substr(0, end));
}

std::string HistoryTensor::part() const {
  std::string out;
  if (stage >= 0) out = "stage " + std::to_string(stage);
  if (rank >= 0) out += (out.empty() ? "rank " : ", rank ") + std::to_string(rank);
  return out;
}

History merge_histories(std::vector<History> ranks) {
  History out;
  const Numbers numbers = join_tensors(ranks, out);
  join_steps(ranks, numbers, &History::steps, &HistoryStep::rows, out);
  join_steps(ranks, numbers, &History::hashes, &HistoryHashes::hashes, out);
  join_scalars(ranks, out);
  join_events(ranks, numbers, out);
  std::set<std::vector<std::string>> seen;
  for (const History& each : ranks) {
    out.torn_bytes += each.torn_bytes;
    if (seen.insert(each.rules).second) out.rules.insert(out.rules.end(), each.rules.begin(), each.rules.end());
  }
  return out;
}

History read_history(const fs::path& path) {
  std::error_code error;
  size_t count = fs::exists(path, error) ? 0 : ranks_of(path);
  if (count == 0) return history_of(path);
  std::vector<History> ranks;
  for (size_t r = 0; r < count; ++r) {
    const fs::path file = file_of_rank(path, r);
    if (!fs::exists(file, error)) {
      throw Error(ErrorKind::BadFile,
                  c10::str("the history \"", path.string(), "\" is that of rank 0 to rank ", count - 1,
                           ", and has no file of rank ", r),
                  "", "put \"" + file.string() + "\" beside the others, or read one of them alone");
    }
    ranks.push_back(history_of(file));
    count = static_cast<size_t>(std::max(static_cast<int64_t>(count), ranks.back().ranks));
  }
  return merge_histories(std::move(ranks));
}

}  // namespace plumb
