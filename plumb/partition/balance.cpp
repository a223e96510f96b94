#include "plumb/partition/balance.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/core/table.h"
#include "plumb/partition/assign.h"

namespace plumb {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr size_t kMostPlaces = 1024;  // among which a balance chooses, unless more stages are wanted

// The graph as a row of operators with what a cut between two of them costs.
struct Row {
  std::vector<const Node*> ops;
  std::vector<double> forward, backward;  // prefix sums, ops.size() + 1
  std::vector<int64_t> activations;       // prefix sums
  std::vector<int64_t> crossing;          // bytes over the place before op k
  std::vector<int> messages;              // values over it
  std::vector<bool> closed;               // no cut here: written memory
  std::vector<bool> gaps;                 // a value over it has gaps, which a message closes, or is no file's input
  struct ParameterUse {
    size_t op, previous;  // ops; previous + 1 == 0: first use
    int64_t bytes;
  };
  std::vector<ParameterUse> parameters;  // by op
};

// Returns whether the elements fill the memory, in any order of dimensions. Expanded dimensions count once.
bool is_dense(const TensorMeta& meta) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t d = 0; d < meta.strides.size(); ++d) {
    if (meta.sizes[d] != 1 && meta.strides[d] != 0) dims.emplace_back(meta.strides[d], meta.sizes[d]);
  }
  std::ranges::sort(dims);
  int64_t filled = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != filled || __builtin_mul_overflow(filled, size, &filled)) return false;
  }
  return true;
}

// Returns whether a .pt2 file of the stage that takes the value could not be written: truth values and floats.
bool no_file_input(const Value& value) { return !value.is_tensor() && value.type() != ValueType::Int; }

Row make_row(const GraphModule& module, const Graph& graph, const GraphCost& cost) {
  const MemorySets memory(graph, module.state());
  const auto copied = detail::nodes_to_copy(graph, module.state(), memory);
  Row row;
  for (const Node* op : detail::nodes_to_assign(graph, copied)) row.ops.push_back(op);
  std::unordered_map<const Node*, size_t> index, position;
  for (const Node* node : graph.nodes()) index.emplace(node, index.size());
  std::vector<const NodeCost*> costs;
  for (const Node* op : row.ops) {
    position.emplace(op, position.size());
    costs.push_back(&cost.nodes[index.at(op)]);
  }
  const size_t n = row.ops.size();
  row.forward.assign(n + 1, 0);
  row.backward.assign(n + 1, 0);
  row.activations.assign(n + 1, 0);
  std::vector<int64_t> bytes(n + 2, 0), closed(n + 2, 0), gaps(n + 2, 0);
  std::vector<int> messages(n + 2, 0);
  std::unordered_map<const void*, size_t> last_use;
  for (size_t k = 0; k < n; ++k) {
    row.forward[k + 1] = row.forward[k] + costs[k]->forward;
    row.backward[k + 1] = row.backward[k] + costs[k]->backward;
    row.activations[k + 1] = row.activations[k] + costs[k]->output_bytes;
    for (const Value* v : row.ops[k]->results()) {
      size_t last = k;
      for (const Use& use : v->uses()) {
        auto it = position.find(use.user);
        last = std::max(last, it == position.end() ? n - 1 : it->second);  // the output counts to the last stage
      }
      if (last == k) continue;
      // Over every place k + 1 .. last.
      const int64_t size =
          v->meta() ? v->meta()->numel() * static_cast<int64_t>(c10::elementSize(v->meta()->dtype))
                    : costs[k]->output_bytes / static_cast<int64_t>(std::max<size_t>(row.ops[k]->num_results(), 1));
      bytes[k + 1] += size, bytes[last + 1] -= size;
      messages[k + 1] += 1, messages[last + 1] -= 1;
      if (v->meta() ? !is_dense(*v->meta()) : no_file_input(*v)) gaps[k + 1] += 1, gaps[last + 1] -= 1;
    }
    for (const Value* v : row.ops[k]->inputs()) {
      if (v->producer()->kind() != NodeKind::GetAttr) continue;
      const Attr* attr = module.state().find(v->producer()->target());
      if (!attr || !attr->tensor.defined() || attr->kind != AttrKind::Parameter) continue;
      auto [it, fresh] = last_use.emplace(attr->tensor.unsafeGetTensorImpl(), static_cast<size_t>(-1));
      if (it->second == k) continue;
      row.parameters.push_back({k, it->second, static_cast<int64_t>(attr->tensor.nbytes())});
      it->second = k;
    }
  }
  for (const auto& set : memory.written()) {
    // An in-place operator right at a boundary is fine; what else shares the memory stays with its writer.
    const bool alone = !set.has_state && !set.has_input && set.values.size() <= 2;
    const auto [first, last] = detail::closed_range(set, position, n, alone);
    if (first < last) closed[first + 1] += 1, closed[last + 1] -= 1;
  }
  int64_t b = 0, c = 0, g = 0;
  int m = 0;
  for (size_t k = 0; k <= n; ++k) {
    row.crossing.push_back(b += bytes[k]);
    row.messages.push_back(m += messages[k]);
    row.closed.push_back((c += closed[k]) > 0);
    row.gaps.push_back((g += gaps[k]) > 0);
  }
  return row;
}

// Places for cuts: ends first and last, in between those open ones that are cheap to cross, evenly by cost. A value
// with gaps arrives without, and operators may then take other ways with other last bits: cut there only if the other
// places are too few, for `wanted` cuts or for a balance (less than a quarter).
std::vector<size_t> choose_places(const Row& row, size_t wanted, size_t limit) {
  const size_t n = row.ops.size();
  std::vector<size_t> open, dense;
  for (size_t k = 1; k < n; ++k) {
    if (row.closed[k]) continue;
    open.push_back(k);
    if (!row.gaps[k]) dense.push_back(k);
  }
  if (dense.size() >= wanted && 4 * dense.size() >= open.size()) open = std::move(dense);
  if (open.size() > limit) {
    const double total = row.forward[n] + row.backward[n];
    std::vector<size_t> best(limit, 0);
    for (size_t k : open) {
      const double share =
          total > 0 ? (row.forward[k] + row.backward[k]) / total : static_cast<double>(k) / static_cast<double>(n);
      size_t& b = best[std::min(limit - 1, static_cast<size_t>(share * static_cast<double>(limit)))];
      if (b == 0 || row.crossing[k] < row.crossing[b]) b = k;
    }
    open.clear();
    for (size_t b : best) {
      if (b) open.push_back(b);
    }
  }
  open.insert(open.begin(), 0);
  open.push_back(n);
  return open;
}

std::string megabytes(int64_t bytes) { return c10::str(std::round(static_cast<double>(bytes) / 1e5) / 10) + " MB"; }

std::string milliseconds(double s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", s * 1e3);
  return text;
}

[[noreturn]] void wrong(const std::string& what, const std::string& remedy = "") {
  throw Error(ErrorKind::Partition, what, "", remedy);
}

void check_options(const GraphModule& module, const GraphCost& cost, const BalanceOptions& options) {
  if (options.stages < 1) wrong(str("a pipeline has at least one stage, not ", options.stages));
  if (cost.nodes.size() != module.graph().size()) {
    wrong(str("the costs are of a graph with ", cost.nodes.size(), " nodes, this one has ", module.graph().size()),
          "measure this graph");
  }
  const size_t limits = options.memory_limits.size();
  if (limits > 1 && limits != static_cast<size_t>(options.stages)) {
    wrong(str(limits, " memory limits for ", options.stages, " stages"), "give one a stage, or one for all");
  }
  if (options.bytes_per_second <= 0) wrong("the rate of sending must be positive");
}

// Finds the cut with the least slowest stage: dynamic programming over the places for cuts.
class Balancer {
 public:
  Balancer(const Row& row, const BalanceOptions& options)
      : row_(row),
        options_(options),
        places_(choose_places(row, static_cast<size_t>(options.stages) - 1,
                              std::max<size_t>(kMostPlaces, static_cast<size_t>(options.stages) + 1))) {}

  // Indices of places, from the graph's begin to its end; empty if no cut keeps the memory limits.
  std::vector<size_t> find_cuts() const;
  // Returns the stages between these places.
  Balance describe(const std::vector<size_t>& cuts) const;
  size_t num_places() const { return places_.size(); }

 private:
  // Everything is said of a stage from place i to place j.
  double message_seconds(size_t place) const {
    const size_t k = places_[place];
    if (k == 0 || k == row_.ops.size()) return 0;
    // Values forward, their gradients back.
    return 2 * (row_.messages[k] * options_.seconds_per_message +
                static_cast<double>(row_.crossing[k]) / options_.bytes_per_second);
  }
  double forward(size_t i, size_t j) const { return row_.forward[places_[j]] - row_.forward[places_[i]]; }
  double backward(size_t i, size_t j) const { return row_.backward[places_[j]] - row_.backward[places_[i]]; }
  double communication(size_t i, size_t j) const { return message_seconds(i) + message_seconds(j); }
  int64_t activations(size_t i, size_t j) const { return row_.activations[places_[j]] - row_.activations[places_[i]]; }
  std::vector<int64_t> parameters_from(size_t i) const;
  int64_t memory(int stage, size_t i, size_t j, int64_t parameter_bytes) const {
    return static_cast<int64_t>(static_cast<double>(parameter_bytes) * options_.bytes_per_parameter_byte) +
           (options_.stages - stage) * activations(i, j);
  }
  int64_t limit(int stage) const {
    const auto& limits = options_.memory_limits;
    if (limits.empty()) return std::numeric_limits<int64_t>::max();
    return limits[limits.size() == 1 ? 0 : static_cast<size_t>(stage)];
  }

  const Row& row_;
  const BalanceOptions& options_;
  const std::vector<size_t> places_;  // operators that a cut may be before
};

// Bytes of the parameters used from place i to each later place.
std::vector<int64_t> Balancer::parameters_from(size_t i) const {
  std::vector<int64_t> sums(places_.size(), 0);
  auto use = std::lower_bound(row_.parameters.begin(), row_.parameters.end(), places_[i],
                              [](const auto& u, size_t k) { return u.op < k; });
  int64_t sum = 0;
  for (size_t j = i + 1; j < places_.size(); ++j) {
    for (; use != row_.parameters.end() && use->op < places_[j]; ++use) {
      if (use->previous == static_cast<size_t>(-1) || use->previous < places_[i]) sum += use->bytes;
    }
    sums[j] = sum;
  }
  return sums;
}

std::vector<size_t> Balancer::find_cuts() const {
  const int stages = options_.stages;
  const size_t P = places_.size();
  // best[s][j]: the slowest of the stages 0..s that end at place j. Ties go to the smaller sum, that is, less to send.
  struct Best {
    double slowest = kNever, sum = kNever;
    size_t from = 0;
  };
  std::vector<std::vector<Best>> best(stages, std::vector<Best>(P));
  for (size_t i = 0; i + 1 < P; ++i) {
    // Places before i are complete when i is the start: best[s - 1][i] depends on earlier starts only.
    const auto parameters = parameters_from(i);
    for (int s = 0; s < stages; ++s) {
      if ((s == 0) != (i == 0)) continue;
      const Best before = s == 0 ? Best{0, 0, 0} : best[s - 1][i];
      if (before.slowest == kNever) continue;
      for (size_t j = i + 1; j < P; ++j) {
        if (memory(s, i, j, parameters[j]) > limit(s)) break;  // grows with j
        const double t = forward(i, j) + backward(i, j) + communication(i, j);
        const Best now{std::max(before.slowest, t), before.sum + t, i};
        Best& b = best[s][j];
        if (now.slowest < b.slowest || (now.slowest == b.slowest && now.sum < b.sum)) b = now;
      }
    }
  }
  if (best[stages - 1][P - 1].slowest == kNever) return {};
  std::vector<size_t> cuts{P - 1};
  for (int s = stages - 1; s >= 0; --s) cuts.push_back(best[s][cuts.back()].from);
  std::ranges::reverse(cuts);
  return cuts;
}

Balance Balancer::describe(const std::vector<size_t>& cuts) const {
  Balance result;
  for (int s = 0; s < options_.stages; ++s) {
    const size_t i = cuts[s], j = cuts[s + 1];
    BalancedStage b;
    b.first_op = places_[i];
    b.num_ops = places_[j] - places_[i];
    const Node* first = b.num_ops ? row_.ops[b.first_op] : nullptr;
    b.first_node = first ? (first->num_results() ? first->result()->name() : first->target()) : "";
    b.forward = forward(i, j);
    b.backward = backward(i, j);
    b.communication = communication(i, j);
    b.parameter_bytes = parameters_from(i)[j];
    b.activation_bytes = activations(i, j);
    b.memory = memory(s, i, j, b.parameter_bytes);
    b.bytes_in = s == 0 ? 0 : row_.crossing[places_[i]];
    b.bytes_out = s + 1 == options_.stages ? 0 : row_.crossing[places_[j]];
    result.stages.push_back(std::move(b));
    if (s > 0) result.options.cut_before.push_back(places_[i]);
  }
  return result;
}

}  // namespace

double Balance::slowest() const {
  double most = 0;
  for (const BalancedStage& s : stages) most = std::max(most, s.seconds());
  return most;
}

double Balance::total() const {
  double sum = 0;
  for (const BalancedStage& s : stages) sum += s.seconds();
  return sum;
}

std::string Balance::report() const {
  Table table{{"stage", "operators", "forward ms", "backward ms", "send ms", "share", "in", "out", "memory", "from"},
              {}};
  for (const BalancedStage& b : stages) {
    table.rows.push_back({std::to_string(table.rows.size()), std::to_string(b.num_ops), milliseconds(b.forward),
                          milliseconds(b.backward), milliseconds(b.communication),
                          percent(total() > 0 ? b.seconds() / total() : 0), megabytes(b.bytes_in),
                          megabytes(b.bytes_out), megabytes(b.memory), "%" + b.first_node});
  }
  const double even = total() / static_cast<double>(std::max<size_t>(stages.size(), 1));
  return str(to_text(table), "slowest stage ", milliseconds(slowest()), " ms; an even cut would have ",
             milliseconds(even), " ms\n");
}

std::vector<size_t> cut_places(const GraphModule& module, const GraphCost& cost, size_t wanted, size_t most) {
  check_options(module, cost, {});
  Graph graph = module.graph().clone();
  rename_after_writes(graph);
  std::vector<size_t> places = choose_places(make_row(module, graph, cost), wanted, std::max<size_t>(most, 1));
  places.erase(places.begin());
  places.pop_back();
  return places;
}

Balance balance(const GraphModule& module, const GraphCost& cost, const BalanceOptions& options) {
  check_options(module, cost, options);
  Graph graph = module.graph().clone();  // as pipeline() sees it: uses after a write are uses of the writer's result
  rename_after_writes(graph);
  const Row row = make_row(module, graph, cost);
  const Balancer balancer(row, options);
  const int stages = options.stages;
  if (const size_t places = balancer.num_places(); places < static_cast<size_t>(stages) + 1) {
    wrong(
        str("the graph has ", places < 2 ? 0 : places - 2, " places for a cut, ", stages, " stages need ", stages - 1),
        "ask for fewer stages");
  }
  const std::vector<size_t> cuts = balancer.find_cuts();
  if (cuts.empty()) {
    BalanceOptions free = options;
    free.memory_limits.clear();
    const Balance without = balance(module, cost, free);
    const std::string needs = join(without.stages, [](const BalancedStage& s) { return megabytes(s.memory); });
    wrong(str("no cut into ", stages, " stages keeps the memory limits; the fastest cut needs ", needs),
          "raise the limits, or use more stages or smaller microbatches");
  }
  return balancer.describe(cuts);
}

}  // namespace plumb
