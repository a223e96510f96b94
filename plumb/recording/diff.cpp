#include "plumb/recording/diff.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <ranges>
#include <set>
#include <tuple>

#include "plumb/core/prefixed.h"
#include "plumb/core/text.h"
#include "plumb/numerics/hash.h"

namespace plumb {
namespace {

// Values are known by their names, whatever operator makes them: a transformed model has another.
std::string key_of(const HistoryTensor& tensor) {
  return tensor.name + "\n" + (tensor.is_computed() ? "" : tensor.operation);
}

// The hashes of a tensor, or of its gradient, in a step: by microbatch, each with the tensor of the rank that has it.
struct Hash {
  const HistoryHash* hash = nullptr;
  const HistoryTensor* tensor = nullptr;
};
using Parts = std::map<std::pair<int64_t, int64_t>, std::vector<Hash>>;

struct Line {
  size_t tensor = 0;
  bool backward = false;
  auto operator<=>(const Line&) const = default;
};

// The stages that have a tensor, by its key.
std::map<std::string, std::set<int64_t>> stages_of(const std::vector<HistoryTensor>& tensors) {
  std::map<std::string, std::set<int64_t>> stages;
  for (const HistoryTensor& tensor : tensors) stages[key_of(tensor)].insert(tensor.stage);
  return stages;
}

// The tensors of two runs in one list, in the order of the first. Modules that are stages by themselves have tensors of
// equal names: these are apart where both runs have them in the same stages.
class Lines {
 public:
  Lines(DiffReport& report, const std::vector<HistoryTensor>& a, const std::vector<HistoryTensor>& b)
      : report_(report) {
    const auto in_a = stages_of(a), in_b = stages_of(b);
    for (const auto& [key, stages] : in_a) {
      const auto other = in_b.find(key);
      if (stages.size() > 1 && other != in_b.end() && stages == other->second) apart_.insert(key);
    }
  }
  // Returns the places of a run's tensors in the list.
  std::vector<size_t> add(const std::vector<HistoryTensor>& tensors) {
    std::vector<size_t> places;
    const size_t first = report_.tensors.size();
    for (const HistoryTensor& tensor : tensors) {
      std::string key = key_of(tensor);
      if (apart_.contains(key)) key += "\n" + std::to_string(tensor.stage);
      const auto [at, is_new] = known_.try_emplace(std::move(key), report_.tensors.size());
      places.push_back(at->second);
      if (is_new) report_.tensors.push_back({tensor});
    }
    // Histories of ranks are sorted by stage: an input may stand behind its user.
    for (size_t t = first; t < report_.tensors.size(); ++t)
      for (uint32_t& input : report_.tensors[t].tensor.inputs) input = static_cast<uint32_t>(places[input]);
    return places;
  }

 private:
  DiffReport& report_;
  std::map<std::string, size_t> known_;
  std::set<std::string> apart_;
};

std::map<Line, Parts> lines_of(const History& history, const HistoryHashes& step, const std::vector<size_t>& places) {
  std::map<Line, Parts> lines;
  for (const HistoryHash& hash : step.hashes) {
    Parts& parts = lines[{places[hash.tensor], hash.backward}];
    parts[{hash.first, hash.rows}].push_back({&hash, &history.tensors[hash.tensor]});
  }
  return lines;
}

// Returns what equal tensors have in common. Zeros at the end of one add nothing to its hash.
std::pair<uint64_t, int64_t> contents_of(const Hash& each) { return {each.hash->hash, each.hash->words}; }

// Returns the values that tensors of ranks had one after the other: a buffer that forwards write has one a microbatch.
std::vector<std::vector<Hash>> turns_of(const std::vector<Hash>& hashes) {
  std::vector<std::vector<Hash>> turns;
  std::map<const HistoryTensor*, size_t> count;
  for (const Hash& each : hashes) {
    const size_t turn = count[each.tensor]++;
    turns.resize(std::max(turns.size(), turn + 1));
    turns[turn].push_back(each);
  }
  return turns;
}

// Returns the tensor of the rank whose hash another rank, or the other run, does not have; null if all are one.
const Hash* odd_one(const std::vector<Hash>& a, const std::vector<Hash>& b) {
  std::map<std::pair<uint64_t, int64_t>, size_t> count;
  for (const auto* run : {&a, &b})
    for (const Hash& each : *run) ++count[contents_of(each)];
  if (count.size() == 1) return nullptr;
  const Hash* odd = nullptr;
  for (const auto* run : {&a, &b})
    for (const Hash& each : *run)
      if (odd == nullptr || count[contents_of(each)] <= count[contents_of(*odd)]) odd = &each;
  return odd;
}

// Returns the first tensor that another run has otherwise in the same place; null if there is none. Ranks of one run
// may differ from each other: rows that are not known are other rows on each replica.
const Hash* changed_one(const std::vector<Hash>& a, const std::vector<Hash>& b) {
  for (size_t i = 0; i < b.size(); ++i)
    if (contents_of(a[i]) != contents_of(b[i])) return &b[i];
  return nullptr;
}

bool same_places(const std::vector<Hash>& a, const std::vector<Hash>& b) {
  const auto place = [](const Hash& each) { return std::pair(each.tensor->stage, each.tensor->rank); };
  return std::ranges::equal(a, b, {}, place, place);
}

std::set<int64_t> stages_with(const Parts& parts) {
  std::set<int64_t> stages;
  for (const auto& [rows, hashes] : parts)
    for (const Hash& each : hashes) stages.insert(each.tensor->stage);
  return stages;
}

// The whole batch's hash from those of its parts; nothing if ranks differ.
struct Whole {
  int64_t words = 0;
  uint64_t hash = 0;
  HistoryHash part = {};  // the first
  bool constant = true;   // every part has the same
};
Whole whole_of(const Parts& parts) {
  const HistoryHash& first = *parts.begin()->second.front().hash;
  Whole whole{.part = first};
  for (const auto& [rows, hashes] : parts) {
    const HistoryHash& part = *hashes.front().hash;
    whole.constant = whole.constant && part.hash == first.hash && part.words == first.words;
    whole.hash += hash_after(part.hash, whole.words);
    whole.words += part.words;
  }
  return whole;
}

class StepDiff {
 public:
  StepDiff(DiffReport& report, int64_t step) : report_(report), step_(step) {}

  void compare(const Line& line, const Parts& a, const Parts& b) {
    const HistoryTensor& tensor = report_.tensors[line.tensor].tensor;
    Difference place{line.tensor, kind_of(tensor, line.backward), step_};
    // A gradient of what several stages use is one part a stage, which another cut has not.
    if (line.backward) {
      const auto in_a = stages_with(a), in_b = stages_with(b);
      if (in_a != in_b && std::max(in_a.size(), in_b.size()) > 1) {
        ++report_.not_comparable;
        return;
      }
    }
    // A run may not know its rows: as many microbatches are then taken for the same ones.
    const auto unknown = [](const Parts& parts) {
      return std::ranges::all_of(parts | std::views::keys, [](const auto& rows) { return rows.second == 0; });
    };
    const bool same_rows = std::ranges::equal(a | std::views::keys, b | std::views::keys);
    if (same_rows || (a.size() == b.size() && (unknown(a) || unknown(b)))) {
      int64_t microbatch = 0;
      for (auto one = a.begin(), other = b.begin(); one != a.end(); ++one, ++other) {
        const auto& rows = one->first.second > 0 ? one->first : other->first;
        place.first_row = rows.first, place.rows = rows.second;
        place.microbatch = a.size() > 1 ? microbatch++ : -1;
        const auto ones = turns_of(one->second), others = turns_of(other->second);
        // Between two microbatches a replica's buffers have what its own microbatches wrote.
        const bool apart = tensor.operation == "buffer" && ones[0].size() != others[0].size();
        for (size_t turn = 0; turn < (apart ? 1 : std::max(ones.size(), others.size())); ++turn)
          compare(place, turn, turn < ones.size() ? ones[turn] : std::vector<Hash>(),
                  turn < others.size() ? others[turn] : std::vector<Hash>());
      }
      return;
    }
    report_.basis = DiffBasis::OtherRows;
    const Whole whole_a = whole_of(a), whole_b = whole_of(b);
    const bool same_words = whole_a.words == whole_b.words;
    // A tensor without rows, of positions say, is the same in every microbatch.
    const bool constant = whole_a.constant && whole_b.constant && whole_a.part.words == whole_b.part.words;
    const bool summed = tensor.operation == "parameter" && line.backward;  // over rows, in another order
    if (summed || !(same_words || constant)) {
      ++report_.not_comparable;
      return;
    }
    const bool same = same_words ? whole_a.hash == whole_b.hash : whole_a.part.hash == whole_b.part.hash;
    found_.push_back({place, !same});
  }

  // Returns what was found. Sums over other microbatches, what is computed from them, and what other microbatches wrote
  // into buffers, are no part of it.
  std::vector<Compared> take() {
    const auto depends = [](const Compared& each) {
      return each.place.kind > DiffKind::Gradient || each.turn > std::max<int64_t>(each.place.microbatch, 0);
    };
    if (report_.basis == DiffBasis::OtherRows)
      report_.not_comparable += static_cast<int64_t>(std::erase_if(found_, depends));
    return std::move(found_);
  }

 private:
  // Empty: this run has no such value. What replicas wrote themselves is compared replica by replica.
  void compare(Difference place, size_t turn, const std::vector<Hash>& a, const std::vector<Hash>& b) {
    const Hash* odd = a.empty() || b.empty()                                    ? &(a.empty() ? b : a).front()
                      : same_places(a, b) || (turn > 0 && a.size() == b.size()) ? changed_one(a, b)
                                                                                : odd_one(a, b);
    if (odd != nullptr) place.rank = odd->tensor->rank, place.stage = odd->tensor->stage;
    found_.push_back({place, odd != nullptr, std::max<int64_t>(place.microbatch, 0) + static_cast<int64_t>(turn)});
  }

  DiffReport& report_;
  const int64_t step_;
  std::vector<Compared> found_;
};

// Returns a tensor's row; that of the stage and rank, if one has it.
const HistoryRow* find_row(const History& history, const std::vector<HistoryTensor>& tensors, const Difference& place,
                           const std::string& key) {
  const bool backward = place.kind == DiffKind::Gradient;
  const HistoryRow* found = nullptr;
  for (const HistoryStep& each : history.steps) {
    if (each.step != *place.step) continue;
    for (const HistoryRow& row : each.rows) {
      const HistoryTensor& tensor = tensors[row.tensor];
      if (row.backward != backward || key_of(tensor) != key) continue;
      if (tensor.stage == place.stage && tensor.rank == place.rank) return &row;
      if (found == nullptr) found = &row;
    }
  }
  return found;
}

// "std 0.5 against 0.25", of the first different tensor, where metrics stand beside its hashes.
std::string statistics_of(const History& a, const History& b, const std::vector<HistoryTensor>& tensors_b,
                          const DiffReport& report) {
  const Difference& first = *report.first;
  const std::string key = key_of(report.tensors[first.tensor].tensor);
  const HistoryRow* rows[] = {find_row(a, a.tensors, first, key), find_row(b, tensors_b, first, key)};
  std::string text;
  if (rows[0] == nullptr || rows[1] == nullptr) return text;
  for (const char* name : {"mean_abs", "std", "abs_max", "nan_count"}) {
    const Statistic statistic = Statistic::parse(name);
    const double x = rows[0]->value(statistic), y = rows[1]->value(statistic);
    if (std::isnan(x) || x == y) continue;
    text +=
        (text.empty() ? "" : ", ") + std::string(name) + " " + short_number(x, 9) + " against " + short_number(y, 9);
    const double relative = std::abs(y - x) / std::abs(x);
    if (std::isfinite(relative)) text += " (relative " + short_number(relative, 2) + ")";
  }
  return text;
}

std::vector<std::string> missing_names(const DiffReport& report, const std::map<Line, Parts>& from,
                                       const std::map<Line, Parts>& in) {
  std::vector<std::string> names;
  for (const auto& [line, parts] : from) {
    const std::string& name = report.tensors[line.tensor].tensor.name;
    if (!in.contains(line) && (names.empty() || names.back() != name)) names.push_back(name);
  }
  return names;
}

// Returns for each input of a stage what it was elsewhere: the tensor of its name. If no other stage computes one of
// that name, the input is made of what the stage before has without users.
std::vector<std::vector<size_t>> values_sent(const std::vector<DiffTensor>& tensors, const std::vector<bool>& used) {
  std::vector<std::vector<size_t>> sent(tensors.size());
  std::map<std::string, size_t> made;
  std::map<int64_t, std::vector<size_t>> ends;  // computed values without users, by stage
  for (size_t t = 0; t < tensors.size(); ++t) {
    const HistoryTensor& tensor = tensors[t].tensor;
    const bool computed = tensor.is_computed();
    if (computed && !used[t]) ends[tensor.stage].push_back(t);
    if (!computed && tensor.operation != "input") continue;
    const auto [at, is_new] = made.try_emplace(tensor.name, t);
    if (computed) continue;
    if (tensor.stage > 0 && tensors[at->second].tensor.operation == "input") sent[t] = ends[tensor.stage - 1];
    if (!is_new) sent[t].push_back(at->second);
  }
  return sent;
}

}  // namespace

DiffKind kind_of(const HistoryTensor& tensor, bool backward) {
  if (tensor.operation == "gradient") return DiffKind::GradientSum;
  if (tensor.operation == "state") return DiffKind::AfterStep;
  if (tensor.operation == "optimizer") return DiffKind::OptimizerState;
  return backward ? DiffKind::Gradient : DiffKind::Value;
}

// Tensors of a graph by index: those that the first difference can have changed.
struct Reached {
  std::vector<bool> value, gradient;
};

// The first difference reaches values by their inputs, gradients by those of their users and by values beside them.
Reached reached_by_first(const DiffReport& report) {
  const size_t count = report.tensors.size();
  Reached reached{std::vector<bool>(count), std::vector<bool>(count)};
  auto& [value, gradient] = reached;
  std::vector<bool> used(count);
  (report.first->kind == DiffKind::Gradient ? gradient : value)[report.first->tensor] = true;
  for (const DiffTensor& each : report.tensors)
    for (const uint32_t input : each.tensor.inputs) used[input] = true;
  const std::vector<std::vector<size_t>> sent = values_sent(report.tensors, used);
  for (size_t t = 0; t < count; ++t) {
    const auto reach = [&](size_t from) { value[t] = value[t] || value[from]; };
    std::ranges::for_each(report.tensors[t].tensor.inputs, reach);
    std::ranges::for_each(sent[t], reach);
  }
  // The loss, which is in no graph, depends on every value without users.
  bool loss = false;
  for (size_t t = 0; t < count; ++t) loss = loss || (!used[t] && value[t]);
  for (size_t t = count; t-- > 0;) {
    const HistoryTensor& tensor = report.tensors[t].tensor;
    if (loss && !used[t]) gradient[t] = true;
    // The gradient of what another stage got is that of what was sent.
    for (const size_t from : sent[t]) gradient[from] = gradient[from] || gradient[t];
    for (const uint32_t input : tensor.inputs) {
      bool beside = value[t];
      for (const uint32_t other : tensor.inputs) beside = beside || (other != input && value[other]);
      gradient[input] = gradient[input] || gradient[t] || beside;
    }
  }
  return reached;
}

void conclude(DiffReport& report, std::vector<Compared> compared) {
  // Gradients go from the last tensor to the first. A microbatch may hang on what earlier ones wrote into buffers.
  const auto order = [](const Compared& c) {
    const auto tensor = static_cast<int64_t>(c.place.tensor);
    return std::tuple(c.place.kind, c.turn, c.place.kind == DiffKind::Gradient ? -tensor : tensor);
  };
  std::ranges::stable_sort(compared, {}, order);
  using State = DiffTensor::State;
  const auto state_of = [&](const Difference& place) -> State& {
    DiffTensor& tensor = report.tensors[place.tensor];
    return place.kind == DiffKind::Gradient ? tensor.gradient : tensor.value;
  };
  for (const Compared& each : compared) {
    ++report.compared;
    State& state = state_of(each.place);
    if (!each.differs) {
      if (state == State::NotCompared) state = State::Equal;
      continue;
    }
    ++report.differing;
    if (!report.first) {
      report.first = each.place;
      state = State::First;
    } else if (state != State::First) {
      state = State::Differs;
    }
  }
  if (!report.first) return;
  const bool in_graph = report.first->kind <= DiffKind::Gradient;
  const auto [value, gradient] = reached_by_first(report);
  for (const Compared& each : compared) {
    const Difference& place = each.place;
    if (!each.differs) continue;
    const bool is_first = place.tensor == report.first->tensor && place.kind == report.first->kind;
    const bool later = place.kind > DiffKind::Gradient;
    const bool reached = later ? in_graph || place.kind > report.first->kind
                               : (place.kind == DiffKind::Gradient ? gradient : value)[place.tensor];
    if (!is_first && reached) {
      ++report.following;
      if (State& state = state_of(place); state == State::Differs) state = State::Follows;
    }
  }
}

DiffReport diff(const History& a, const History& b, const DiffNames& names) {
  DiffReport report{names.a, names.b};
  std::vector<HistoryTensor> tensors_b = b.tensors;
  const std::vector<std::string> names_b = names_among(b.tensors, a.tensors);
  for (size_t i = 0; i < names_b.size(); ++i) tensors_b[i].name = names_b[i];
  Lines lines(report, a.tensors, tensors_b);
  const auto in_a = lines.add(a.tensors), in_b = lines.add(tensors_b);
  std::map<int64_t, const HistoryHashes*> steps_of_b;
  for (const HistoryHashes& step : b.hashes) steps_of_b.emplace(step.step, &step);
  int64_t steps = 0;
  for (const HistoryHashes& step : a.hashes) {
    const auto other = steps_of_b.find(step.step);
    if (other == steps_of_b.end()) continue;
    ++steps;
    if (report.first) continue;
    const auto of_a = lines_of(a, step, in_a), of_b = lines_of(b, *other->second, in_b);
    StepDiff one(report, step.step);
    for (const auto& [line, parts] : of_a) {
      if (const auto at = of_b.find(line); at != of_b.end()) one.compare(line, parts, at->second);
    }
    std::vector<Compared> found = one.take();
    const bool any = std::ranges::any_of(found, &Compared::differs);
    if (!any && !found.empty()) {
      report.compared += static_cast<int64_t>(found.size());
      report.equal_to = step.step;
    }
    // Without a difference the step that lacks the most counts: a rank's history may end before the others'.
    auto only_a = missing_names(report, of_a, of_b), only_b = missing_names(report, of_b, of_a);
    if (any || only_a.size() > report.only_a.size()) report.only_a = std::move(only_a);
    if (any || only_b.size() > report.only_b.size()) report.only_b = std::move(only_b);
    if (any) {
      report.compared = 0;
      conclude(report, std::move(found));
    }
  }
  report.torn_a = a.torn_bytes, report.torn_b = b.torn_bytes;
  if (steps == 0) {
    throw Error(ErrorKind::InvalidArgument, names.a + " and " + names.b + " have hashes of no step in common",
                report.torn(), "record both with plumb train --hashes FILE, or rules with statistics = [\"hash\"]");
  }
  report.steps_only_a = static_cast<int64_t>(a.hashes.size()) - steps;
  report.steps_only_b = static_cast<int64_t>(b.hashes.size()) - steps;
  if (report.first) report.first->statistics = statistics_of(a, b, tensors_b, report);
  return report;
}

DiffReport diff(const DiffTensors& a, const DiffTensors& b, const DiffNames& names) {
  DiffReport report{names.a, names.b};
  const std::map<std::string, at::Tensor> of_a(a.begin(), a.end()), of_b(b.begin(), b.end());
  std::vector<Compared> compared;
  for (const DiffTensors* run : {&a, &b}) {
    std::set<std::string> own;
    for (const auto& [name, tensor] : *run) {
      if (own.insert(name).second) continue;
      throw Error(ErrorKind::InvalidArgument, "two tensors are called '" + name + "'", "",
                  "give each tensor a name of its own");
    }
  }
  for (const auto& [name, tensor] : a) {
    const auto other = of_b.find(name);
    if (other == of_b.end()) {
      report.only_a.push_back(name);
      continue;
    }
    const TensorDistance distance = prefixed(name + ": ", [&] { return distance_between(tensor, other->second); });
    Difference place{.tensor = report.tensors.size(), .distance = distance};
    compared.push_back({place, distance.differing > 0 || !distance.types.empty()});
    report.tensors.push_back({{name, parent_of(name), "state", c10::str(tensor.dtype()), tensor.sizes().vec()}});
    report.tensors.back().distance = distance;
  }
  for (const auto& [name, tensor] : b)
    if (!of_a.contains(name)) report.only_b.push_back(name);
  conclude(report, std::move(compared));
  return report;
}

}  // namespace plumb
