#include "plumb/recording/recorder.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/core/text.h"
#include "plumb/graph/names.h"
#include "plumb/numerics/hash.h"
#include "plumb/transforms/rewrite.h"
#include "plumb/transforms/track/track_scales.h"

namespace plumb {

// A tracked value: its slot, its number in the history, the rules that mean it.
struct Recorder::Place {
  int64_t slot = 0;
  uint32_t tensor = 0;
  bool state = false;  // a parameter or buffer
  std::vector<uint32_t> rules;
};

struct Recorder::Part {
  std::shared_ptr<ScaleTracker> tracker;
  std::vector<Place> places;
};

// A step's measurements of a tensor or its gradient.
struct Recorder::Seen {
  const Place* place = nullptr;
  bool backward = false;
  Metrics::Data data;
  std::shared_ptr<const MetricsSum> sum;
};

namespace {

using Direction = ScaleTracker::Direction;

HistoryTensor describe(const Value* value, const State& state) {
  const Node* node = value->producer();
  HistoryTensor out;
  out.module = node->meta().module_path();
  if (node->kind() == NodeKind::GetAttr) {
    const Attr* attr = state.find(node->target());
    out.name = node->target();
    out.module = parent_of(out.name);
    out.operation = attr && attr->kind == AttrKind::Parameter ? "parameter" : "buffer";
    if (attr && attr->tensor.defined()) out.sizes = attr->tensor.sizes().vec();
  } else {
    out.name = out.module.empty() ? value->name() : out.module + "." + value->name();
    out.operation = node->kind() == NodeKind::Placeholder ? "input" : node->target();
  }
  if (value->meta() && out.sizes.empty()) out.sizes = value->meta()->sizes;
  if (const auto dtype = dtype_of(value, state)) out.dtype = torch_name(*dtype);
  return out;
}

bool fits(const std::vector<std::string>& patterns, std::string_view text) {
  return std::ranges::any_of(patterns, [&](const auto& p) { return matches_pattern(p, text); });
}

bool fits(const RecordRule& rule, const HistoryTensor& t) {
  if (!fits(rule.names, t.name)) return false;
  return fits(rule.operators, t.operation) || fits(rule.operators, t.operation.substr(0, t.operation.find('.')));
}

// A program may fill in rules itself; those of a file are checked when they are read.
RecordRules checked(RecordRules rules) {
  for (size_t i = 0; i < rules.rules.size(); ++i) {
    const RecordRule& rule = rules.rules[i];
    if (rule.names.empty() || rule.operators.empty()) {
      throw Error(ErrorKind::InvalidArgument,
                  str("rule ", i + 1, " has no pattern of ", rule.names.empty() ? "names" : "operators"), rule.where,
                  "give it one; \"*\" fits all");
    }
    if (rule.every >= 1 && rule.limit >= 1) continue;
    throw Error(ErrorKind::InvalidArgument,
                str("rule ", i + 1, " has every = ", rule.every, " and limit = ", rule.limit, ", numbers of steps"),
                rule.where, "give both at least 1");
  }
  return rules;
}

constexpr int64_t kMostSteps = int64_t{1} << 62;

RecorderOptions checked(RecorderOptions options) {
  if (options.after.value_or(0) >= 0 && options.after.value_or(0) <= kMostSteps) return options;
  throw Error(ErrorKind::InvalidArgument, str("RecorderOptions::after is ", *options.after), "",
              "the number of a step, from 0 to 2^62");
}

// Some of the names or operators there are, for one who looks for the right one.
std::string some(const std::vector<HistoryTensor>& tensors, std::string HistoryTensor::*what) {
  std::vector<std::string> found;
  for (const HistoryTensor& t : tensors) {
    if (std::ranges::find(found, t.*what) == found.end()) found.push_back(t.*what);
    if (found.size() == 8) break;
  }
  return join(found);
}

}  // namespace

Recorder::Recorder(RecordRules rules, const std::filesystem::path& path, RecorderOptions options)
    : rules_(checked(std::move(rules))),
      part_(checked(options).part),
      writer_(path, options.append, options.after),
      fitted_(rules_.rules.size()),
      recorded_(rules_.rules.size()),
      due_(rules_.rules.size()),
      step_(std::min(options.after.value_or(writer_.last_step()), kMostSteps) + 1) {
  // A condition that held in the step before still asks for the next one, and counts in its rule's limit.
  const History& before = writer_.before();
  const bool same_rules = std::ranges::all_of(before.rules, [&](const auto& text) { return text == rules_.text; });
  for (const HistoryEvent& event : same_rules ? before.events : std::vector<HistoryEvent>()) {
    const auto r = static_cast<size_t>(event.rule);
    if (r >= rules_.rules.size()) continue;
    ++recorded_[r];
    all_ = all_ || (event.step == step_ - 1 && rules_.rules[r].then_all);
  }
  writer_.rules(rules_.text, options.ranks);
}

Recorder::Recorder(GraphModule& module, RecordRules rules, const std::filesystem::path& path, RecorderOptions options)
    : Recorder(std::move(rules), path, options) {
  attach(module);
}

Recorder::~Recorder() = default;

std::vector<TrackedTensor> tracked_tensors(const GraphModule& module, const ScaleTracker& tracker) {
  std::vector<TrackedTensor> found;
  std::unordered_map<const Value*, const Value*> tracked;  // result of a track node -> the value it tracks
  std::unordered_map<const Value*, std::set<size_t>> nearest;
  for (const Node* node : module.graph().nodes()) {
    std::set<size_t> inputs;
    for (const Value* value : node->inputs()) inputs.insert(nearest[value].begin(), nearest[value].end());
    for (const Value* value : node->results()) nearest[value] = inputs;
    if (!node->is_op("plumb::track")) continue;
    const Value* value = node->input(0);
    if (auto it = tracked.find(value); it != tracked.end()) value = it->second;
    tracked.emplace(node->result(), value);
    if (node->arg("tracker") != Arg(tracker.id())) continue;
    TrackedTensor one{node->arg("slot").constant().toInt(), describe(value, module.state()), {}, false};
    one.state = value->producer()->kind() == NodeKind::GetAttr;
    one.inputs.assign(nearest[value].begin(), nearest[value].end());
    if (const auto& at = value->producer()->meta().source) one.tensor.source = c10::str(at->file, ":", at->line);
    nearest[value] = nearest[node->result()] = {found.size()};
    found.push_back(std::move(one));
  }
  return found;
}

void Recorder::attach(GraphModule& module, int64_t stage) {
  Part part{ScaleTracker::create(), {}};
  std::vector<HistoryTensor> here;
  track_scales(module, *part.tracker);
  const bool hashes = std::ranges::any_of(rules_.rules, &RecordRule::hash);
  std::vector<std::optional<uint32_t>> numbers;  // in the history
  for (TrackedTensor& found : tracked_tensors(module, *part.tracker)) {
    HistoryTensor& tensor = found.tensor;
    tensor.stage = stage;
    if (!hashes) tensor.source.clear();
    Place place{found.slot, 0, found.state, {}};
    for (size_t r = 0; r < rules_.rules.size(); ++r) {
      if (fits(rules_.rules[r], tensor)) place.rules.push_back(static_cast<uint32_t>(r)), fitted_[r] = true;
    }
    for (const size_t input : found.inputs) {
      if (hashes && numbers[input]) tensor.inputs.push_back(*numbers[input]);
    }
    numbers.emplace_back();
    part.tracker->want(place.slot, {false, false, false});
    if (!place.rules.empty()) {
      numbers.back() = place.tensor = writer_.tensor(tensor);
      part.places.push_back(std::move(place));
    }
    here.push_back(std::move(tensor));
  }
  for (size_t r = 0; r < rules_.rules.size(); ++r) {
    if (fitted_[r] || part_) continue;
    const RecordRule& rule = rules_.rules[r];
    const bool any_name = std::ranges::any_of(here, [&](const HistoryTensor& t) { return fits(rule.names, t.name); });
    throw Error(ErrorKind::UnknownName,
                rule.where + ": " + (any_name ? "operator" : "name") + " = \"" +
                    (any_name ? rule.operators : rule.names).front() + "\" fits no tensor of the module",
                "",
                any_name ? "operators such as " + some(here, &HistoryTensor::operation)
                         : "names such as " + some(here, &HistoryTensor::name));
  }
  parts_.push_back(std::move(part));
  prepared_.clear();
  prepare();
}

bool Recorder::due(size_t r) const {
  const RecordRule& rule = rules_.rules[r];
  if (rule.when && recorded_[r] >= rule.limit) return false;
  return all_ || (step_ - 1) % rule.every == 0;
}

void Recorder::prepare() {
  measuring_ = false;
  for (size_t r = 0; r < due_.size(); ++r) {
    due_[r] = due(r);
    measuring_ = measuring_ || due_[r];
  }
  for (Part& part : parts_) part.tracker->set_enabled(enabled_ && measuring_);
  if (!measuring_ || prepared_ == due_) return;
  for (Part& part : parts_) {
    for (const Place& place : part.places) {
      ScaleTracker::Wanted wanted{.forward = false, .backward = false, .metrics = false};
      for (uint32_t r : place.rules) {
        if (!due_[r]) continue;
        const RecordRule& rule = rules_.rules[r];
        wanted.forward |= rule.forward, wanted.backward |= rule.backward, wanted.histogram |= rule.histogram();
        wanted.hash |= rule.hash(), wanted.metrics |= rule.when || (rule.statistics & kAllStatistics) != 0;
      }
      wanted.forward_together = !place.state, wanted.backward_together = true;
      part.tracker->want(place.slot, wanted);
    }
  }
  prepared_ = due_;
}

// Returns the tensors seen. A model for several shapes is several graphs; a tensor of one may be a tensor of another.
std::vector<Recorder::Seen> Recorder::seen() const {
  std::vector<Seen> out;
  std::unordered_map<uint64_t, size_t> known;  // a tensor and its direction
  for (const Part& part : parts_) {
    for (const Place& place : part.places) {
      for (const Direction direction : {Direction::Forward, Direction::Backward}) {
        auto data = part.tracker->measured(place.slot, direction);
        if (!data) continue;
        const bool backward = direction == Direction::Backward;
        Seen one{&place, backward, std::move(*data), part.tracker->sum(place.slot, direction)};
        const auto [at, is_new] = known.try_emplace(uint64_t{place.tensor} << 1 | backward, out.size());
        if (is_new) {
          out.push_back(std::move(one));
          continue;
        }
        Seen& all = out[at->second];
        if (all.sum && one.sum) {
          auto both = std::make_shared<MetricsSum>(MetricsOptions{.histogram = all.data.histogram != nullptr});
          both->add(*all.sum), both->add(*one.sum);
          one.data = Metrics::Data::of(both->metrics());
          one.sum = std::move(both);
        }
        all = std::move(one);
      }
    }
  }
  return out;
}

void Recorder::find_rows(HistoryStep& step, std::vector<HistoryEvent>& events) {
  std::unordered_map<uint32_t, HistoryEvent> held;
  for (Seen& each : seen()) {
    HistoryRow row{each.place->tensor, each.backward, true, 0, std::move(each.data)};
    std::optional<TensorMetrics> full;
    for (uint32_t r : each.place->rules) {
      const RecordRule& rule = rules_.rules[r];
      if (!due_[r] || !(each.backward ? rule.backward : rule.forward)) continue;
      if (rule.when) {
        if (!full) full = row.data.full();
        const double value = rule.when->statistic.of(*full);
        if (!rule.when->holds(value)) continue;
        HistoryEvent& event = held.try_emplace(r, HistoryEvent{step.step, r, rule.when->to_string()}).first->second;
        if (++event.count <= 16) event.first.push_back({row.tensor, row.backward, value});
      } else {
        row.by_condition = false;
      }
      row.present |= rule.statistics & kAllStatistics;
    }
    if (row.present != 0) step.rows.push_back(std::move(row));
  }
  for (auto& [r, event] : held) events.push_back(std::move(event));
  std::ranges::sort(events, {}, &HistoryEvent::rule);
}

// A parameter has one value in all microbatches of a step: more only if it changed between them, whichever graphs ran.
void Recorder::find_hashes(std::vector<HistoryHash>& hashes) const {
  std::map<uint32_t, std::vector<ScaleTracker::Hashed>> states;
  for (const Part& part : parts_) {
    for (const Place& place : part.places) {
      for (const Direction direction : {Direction::Forward, Direction::Backward}) {
        const bool backward = direction == Direction::Backward;
        const bool wanted = std::ranges::any_of(place.rules, [&](uint32_t r) {
          const RecordRule& rule = rules_.rules[r];
          return due_[r] && rule.hash() && (backward ? rule.backward : rule.forward);
        });
        if (!wanted) continue;
        for (const auto& each : part.tracker->hashes(place.slot, direction)) {
          if (place.state && !backward)
            states[place.tensor].push_back(each);
          else
            hashes.push_back({place.tensor, backward, each.rows.first, each.rows.count, each.words, each.hash});
        }
      }
    }
  }
  for (auto& [tensor, values] : states) {
    std::ranges::stable_sort(values, {}, [](const auto& each) { return each.rows.first; });
    std::optional<uint64_t> last;
    for (const auto& each : values) {
      if (last != each.hash) hashes.push_back({tensor, false, 0, 0, each.words, each.hash});
      last = each.hash;
    }
  }
}

void Recorder::add_hash(HistoryTensor tensor, const at::Tensor& values) {
  const uint64_t hash = hash_of(values);
  if (tensor.sizes.empty()) tensor.sizes = values.sizes().vec();
  if (tensor.dtype.empty()) tensor.dtype = torch_name(values.scalar_type());
  added_.push_back({writer_.tensor(tensor), false, 0, 0, hashed_words(values), hash});
}

void Recorder::set_step(int64_t step) {
  if (step <= writer_.last_step()) {
    throw Error(ErrorKind::InvalidArgument,
                str("a recorder is set to step ", step, ", and the next of its history is ", writer_.last_step() + 1,
                    " or later"),
                "", "set a later step, or open the history with RecorderOptions::after, which cuts off later ones");
  }
  if (step > kMostSteps)
    throw Error(ErrorKind::InvalidArgument, str("a recorder is set to step ", step), "", "2^62 at most");
  step_ = step;
  prepare();
}

size_t Recorder::step(const Scalars& scalars) {
  HistoryStep step{step_, {}};
  HistoryHashes hashes{step_, {}};
  std::vector<HistoryEvent> events;
  if (measuring_) {
    find_hashes(hashes.hashes);
    find_rows(step, events);
    for (Part& part : parts_) part.tracker->clear();
  }
  hashes.hashes.insert(hashes.hashes.end(), added_.begin(), added_.end());
  added_.clear();
  ++step_;
  all_ = false;
  for (const HistoryEvent& event : events) {
    const auto r = static_cast<size_t>(event.rule);
    ++recorded_[r];
    all_ = all_ || rules_.rules[r].then_all;
  }
  prepare();
  // Last, as it may fail: the recorder then goes on with the next step.
  if (!scalars.empty()) writer_.scalars({step.step, scalars});
  if (!step.rows.empty()) writer_.step(step);
  if (!hashes.hashes.empty()) writer_.hashes(hashes);
  for (const HistoryEvent& event : events) writer_.event(event);
  const size_t rows = step.rows.size();
  if (rows > 0) written_ = std::move(step);
  return rows;
}

History Recorder::written() const {
  History out;
  out.tensors = writer_.tensors();
  if (!written_.rows.empty()) out.steps.push_back(written_);
  return out;
}

void Recorder::set_enabled(bool enabled) {
  enabled_ = enabled;
  for (Part& part : parts_) part.tracker->set_enabled(enabled_ && measuring_);
}

}  // namespace plumb
