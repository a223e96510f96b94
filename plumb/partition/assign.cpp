#include "plumb/partition/assign.h"

#include <algorithm>
#include <ranges>
#include <set>

#include "plumb/core/error.h"
#include "plumb/core/join.h"
#include "plumb/core/str.h"
#include "plumb/graph/aliases.h"
#include "plumb/partition/pipe_split.h"

namespace plumb::detail {
namespace {

// Nodes that may be made again in every stage: at most this many for one value, or it is sent instead.
constexpr int kCopyLimit = 24;

bool under(std::string_view name, std::string_view path) {
  return name == path || (name.size() > path.size() && name.starts_with(path) && name[path.size()] == '.');
}

bool in_module(const Node& node, std::string_view path) {
  const auto& modules = node.meta().modules;
  return modules && std::ranges::any_of(*modules, [&](const ModuleFrame& frame) { return under(frame.path, path); });
}

// Positions (cut before ops[k]) where the calls of a module begin or end. Nodes without a stack belong to neither side.
std::vector<size_t> cuts_by_stack(const std::vector<Node*>& ops, const std::string& path, SplitPoint point) {
  std::vector<size_t> cuts;
  bool inside = false;
  size_t after = 0;
  for (size_t k = 0; k < ops.size(); ++k) {
    if (!ops[k]->meta().modules || ops[k]->meta().modules->empty()) continue;
    const bool now = in_module(*ops[k], path);
    if (now && !inside && point == SplitPoint::Beginning) cuts.push_back(k);
    if (!now && inside && point == SplitPoint::End) cuts.push_back(after);
    if (now) after = k + 1;
    inside = now;
  }
  if (inside && point == SplitPoint::End) cuts.push_back(after);
  return cuts;
}

// Returns the cuts by parameters: at the first or last node that uses one under the path, also through a view.
std::vector<size_t> cuts_by_parameters(const std::vector<Node*>& ops, const std::string& path, SplitPoint point) {
  std::unordered_set<const Value*> views;
  std::optional<size_t> first, last;
  for (size_t k = 0; k < ops.size(); ++k) {
    bool uses = false;
    for (const Value* v : ops[k]->inputs()) {
      const Node* producer = v->producer();
      uses = uses || views.count(v) || (producer->kind() == NodeKind::GetAttr && under(producer->target(), path));
    }
    if (!uses) continue;
    if (!first) first = k;
    last = k;
    if (ops[k]->result_aliases_input() && ops[k]->num_inputs() == 1) {
      for (const Value* v : ops[k]->results()) views.insert(v);
    }
  }
  if (!first) return {};
  return {point == SplitPoint::Beginning ? *first : *last + 1};
}

[[noreturn]] void unknown_module(const std::vector<Node*>& ops, const State& state, const std::string& path) {
  std::set<std::string> known;
  for (const Node* op : ops) {
    if (!op->meta().module_path().empty()) known.insert(op->meta().module_path());
  }
  for (const Attr& attr : state) {
    const size_t dot = attr.name.rfind('.');
    if (dot != std::string::npos) known.insert(attr.name.substr(0, dot));
  }
  const std::string some = join(known | std::views::take(12));
  throw Error(ErrorKind::UnknownName, "no operator of the graph belongs to a module '" + path + "'", "",
              some.empty() ? "mark the place with plumb::pipe_split() instead"
                           : "modules of the graph: " + some + (known.size() > 12 ? ", ..." : ""));
}

std::vector<size_t> find_cuts(const Graph& graph, const State& state, const std::vector<Node*>& ops,
                              const SplitOptions& options) {
  std::vector<size_t> cuts = options.cut_before;
  for (const size_t cut : cuts) {
    if (cut <= ops.size()) continue;
    throw Error(ErrorKind::InvalidArgument,
                str("SplitOptions::cut_before has ", cut, ", the graph has ", ops.size(), " operators to cut before"));
  }
  size_t position = 0;
  for (const Node* node : graph.nodes()) {
    if (is_pipe_split(*node)) {
      if (options.cut_before.empty()) cuts.push_back(position);
    } else if (position < ops.size() && node == ops[position]) {
      ++position;
    }
  }
  for (const auto& [path, point] : options.points) {
    auto found = cuts_by_stack(ops, path, point);
    if (found.empty()) found = cuts_by_parameters(ops, path, point);
    if (found.empty()) unknown_module(ops, state, path);
    cuts.insert(cuts.end(), found.begin(), found.end());
  }
  return cuts;
}

// A view of a parameter that only it uses, needed in one later stage: taken there, so that no weight is sent.
void sink_parameter_views(Assignment& a) {
  for (size_t k = a.ops.size(); k-- > 0;) {
    const Node* op = a.ops[k];
    if (!op->result_aliases_input() || op->writes() || op->num_inputs() != 1 || op->num_results() != 1) continue;
    const Value* source = op->input(0);
    const bool of_parameter = source->producer()->kind() == NodeKind::GetAttr ||
                              (source->producer()->is_call() && source->producer()->result_aliases_input() &&
                               source->producer()->num_inputs() == 1 &&
                               source->producer()->input(0)->producer()->kind() == NodeKind::GetAttr);
    if (!of_parameter || source->uses().size() != 1 || !op->result()->has_uses()) continue;
    int first = a.num_stages, last = -1;
    for (const Use& use : op->result()->uses()) {
      auto it = a.stage.find(use.user);
      const int s = it == a.stage.end() ? -1 : it->second;
      first = std::min(first, s);
      last = std::max(last, s);
    }
    if (first == last && first > a.stage[op]) a.stage[op] = first;
  }
}

// Gives every op its stage from cut positions; drops empty stages.
void apply_cuts(Assignment& a, const std::vector<Node*>& ops, std::vector<size_t> cuts, const Graph& graph) {
  std::erase_if(cuts, [&](size_t k) { return k == 0 || k >= ops.size(); });
  std::ranges::sort(cuts);
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  a.num_stages = static_cast<int>(cuts.size()) + 1;
  a.stage.clear();
  size_t next = 0;
  for (size_t k = 0; k < ops.size(); ++k) {
    while (next < cuts.size() && cuts[next] <= k) ++next;
    a.stage[ops[k]] = static_cast<int>(next);
  }
  a.stage[graph.output_node()] = a.num_stages - 1;
  a.ops = ops;
  sink_parameter_views(a);
}

void sort_by_stage(Assignment& a) {
  std::ranges::stable_sort(a.ops, [&](const Node* x, const Node* y) { return a.stage[x] < a.stage[y]; });
}

[[noreturn]] void refuse(const Conflict& c) {
  throw Error(
      ErrorKind::Partition,
      "the cut separates " + c.writer->describe() + ", which writes memory, from " + c.other->describe() + ": " + c.why,
      c.writer->meta().where(),
      "move the cut so that both are in one stage, or use the operator that does not write in place");
}

void assign_by_cuts(Assignment& a, const Graph& graph, const State& state, const MemorySets& memory,
                    const std::vector<Node*>& ops, const SplitOptions& options) {
  std::vector<size_t> cuts = find_cuts(graph, state, ops, options);
  std::unordered_map<const Node*, size_t> position;
  for (size_t k = 0; k < ops.size(); ++k) position.emplace(ops[k], k);
  apply_cuts(a, ops, cuts, graph);
  const int wanted = a.num_stages;
  // Every round frees one written set for good: as many rounds as sets at most.
  for (size_t round = 0;; ++round) {
    const auto conflict = find_conflict(graph, memory, a);
    if (!conflict) break;
    if (options.at_conflict == AtConflict::Refuse || round > memory.written().size()) refuse(*conflict);
    const auto [first, last] = closed_range(*conflict->set, position, ops.size());
    for (size_t& cut : cuts) {
      if (cut <= first || cut > last) continue;
      // The nearer side, unless a stage would vanish there and not on the other.
      const bool before = cut - first <= last + 1 - cut;
      const size_t near = before ? first : last + 1, far = before ? last + 1 : first;
      const auto vanishes = [&](size_t place) {
        return place == 0 || place >= ops.size() || std::ranges::find(cuts, place) != cuts.end();
      };
      cut = vanishes(near) && !vanishes(far) ? far : near;
      a.notes.push_back("a cut was moved to before " +
                        (cut < ops.size() ? ops[cut]->describe() : graph.output_node()->describe()) +
                        ", because it separated " + conflict->writer->describe() + ", which writes memory, from " +
                        conflict->other->describe());
    }
    apply_cuts(a, ops, cuts, graph);
    if (a.num_stages < wanted) refuse(*conflict);
  }
}

void assign_by_policy(Assignment& a, const Graph& graph, const MemorySets& memory, const std::vector<Node*>& ops,
                      const SplitOptions& options) {
  if (!options.points.empty() || !options.cut_before.empty()) {
    throw Error(ErrorKind::InvalidArgument, "split points and a split policy were given", "", "give one of them");
  }
  std::map<int, int> dense;
  for (Node* op : ops) {
    const int s = options.policy(*op);
    if (s < 0) {
      throw Error(ErrorKind::Partition, str("the split policy puts ", op->describe(), " into stage ", s),
                  op->meta().where(), "stages count from 0");
    }
    a.stage[op] = s;
    dense.emplace(s, 0);
  }
  int next = 0;
  for (auto& [asked, given] : dense) given = next++;
  a.num_stages = std::max(next, 1);
  const Node* last_random = nullptr;
  for (Node* op : ops) {
    int& s = a.stage[op];
    s = dense[s];
    for (const Value* v : op->inputs()) {
      auto it = a.stage.find(v->producer());
      if (it != a.stage.end() && it->second > s) {
        throw Error(ErrorKind::Partition,
                    str("the split policy puts ", op->describe(), " into stage ", s, ", before stage ", it->second,
                        " of ", v->producer()->describe(), ", which it uses"),
                    op->meta().where(), "give a node the stage of its inputs or a later one");
      }
    }
    if (!op->is_random()) continue;
    if (last_random && a.stage[last_random] > s) {
      throw Error(ErrorKind::Partition,
                  "the split policy puts " + op->describe() + " before " + last_random->describe() +
                      ", but both draw random numbers, in the other order",
                  op->meta().where(), "keep random operators in the order of the graph");
    }
    last_random = op;
  }
  a.stage[graph.output_node()] = a.num_stages - 1;
  a.ops = ops;
  // Nodes around one written memory keep their order.
  for (const auto& set : memory.written()) {
    std::vector<const Node*> touching;
    for (const Value* v : set.values) {
      if (a.stage.count(v->producer())) touching.push_back(v->producer());
      for (const Use& use : v->uses()) {
        if (a.stage.count(use.user)) touching.push_back(use.user);
      }
    }
    std::ranges::sort(touching, [](const Node* x, const Node* y) { return x != y && x->is_before(y); });
    for (size_t i = 1; i < touching.size(); ++i) {
      if (a.stage[touching[i - 1]] > a.stage[touching[i]])
        refuse({&set, touching[i - 1], touching[i], "their order would change"});
    }
  }
  sink_parameter_views(a);
  if (auto conflict = find_conflict(graph, memory, a)) refuse(*conflict);
}

}  // namespace

std::pair<size_t, size_t> closed_range(const MemorySets::Set& set,
                                       const std::unordered_map<const Node*, size_t>& position, size_t end,
                                       bool writers_only) {
  size_t first = end, last = 0;
  auto touch = [&](const Node* node, bool low, bool high) {
    auto it = position.find(node);
    if (it == position.end()) return;
    if (low) first = std::min(first, it->second);
    if (high) last = std::max(last, it->second);
  };
  for (const Node* writer : set.writers) touch(writer, true, true);
  if (writers_only) return {first, last};
  for (const Value* v : set.values) {
    touch(v->producer(), !set.has_input || set.has_state, true);
    for (const Use& use : v->uses()) touch(use.user, set.has_state, set.has_input || set.has_state);
  }
  return {first, last};
}

std::vector<Node*> nodes_to_assign(const Graph& graph, const std::unordered_set<const Node*>& copied) {
  std::vector<Node*> ops;
  for (Node* node : graph.nodes()) {
    if (node->is_call() && !is_pipe_split(*node) && !copied.count(node)) ops.push_back(node);
  }
  return ops;
}

std::unordered_set<const Node*> nodes_to_copy(const Graph& graph, const State& state, const MemorySets& memory) {
  std::unordered_map<const Node*, int> cost;  // nodes below and with it, counted with repetition
  std::unordered_set<const Node*> copied;
  for (const Node* node : graph.nodes()) {
    if (!node->is_call() || is_pipe_split(*node) || node->has_side_effects()) continue;
    int total = 1;
    for (const Value* v : node->inputs()) {
      const Node* producer = v->producer();
      if (producer->kind() == NodeKind::GetAttr) {
        const Attr* attr = state.find(producer->target());
        const bool fixed =
            attr && attr->kind != AttrKind::Parameter && attr->tensor.defined() && !attr->tensor.requires_grad();
        total = fixed && !memory.written_set(v) ? total : kCopyLimit + 1;
      } else {
        auto it = cost.find(producer);
        total = it == cost.end() ? kCopyLimit + 1 : total + it->second;
      }
      if (total > kCopyLimit) break;
    }
    for (const Value* v : node->results()) total = memory.written_set(v) ? kCopyLimit + 1 : total;
    if (total > kCopyLimit) continue;
    cost.emplace(node, total);
    copied.insert(node);
  }
  return copied;
}

std::optional<Conflict> find_conflict(const Graph& graph, const MemorySets& memory, const Assignment& a) {
  auto stage = [&](const Node* node) {
    auto it = a.stage.find(node);
    return it == a.stage.end() ? ValueSource::kModelInput : it->second;
  };
  for (const MemorySets::Set& set : memory.written()) {
    std::map<int, const Node*> writers;  // stage -> a writer there
    for (const Node* w : set.writers) writers.emplace(stage(w), w);
    if (set.has_state) {
      const auto& [home, writer] = *writers.begin();
      if (writers.size() > 1)
        return Conflict{&set, writer, std::next(writers.begin())->second,
                        "the state they both write can live in one stage only"};
      for (const Value* v : set.values) {
        if (v->producer()->kind() != NodeKind::GetAttr) continue;
        for (const Use& use : v->uses()) {
          // Returning the buffer itself is no use of it by a stage.
          if (use.user->kind() == NodeKind::Output && a.num_stages - 1 == home) continue;
          if (stage(use.user) != home)
            return Conflict{&set, writer, use.user, "'" + v->producer()->target() + "' can live in one stage only"};
        }
      }
    }
    std::map<int, const Value*> entries;  // stage -> the value by which it gets at this memory
    for (const Value* v : set.values) {
      if (v->producer()->kind() == NodeKind::GetAttr) continue;
      const int from = stage(v->producer());
      for (const Use& use : v->uses()) {
        const int to = stage(use.user);
        if (to == from) continue;
        auto between = writers.upper_bound(from);
        if (between != writers.end() && between->first < to) {
          return Conflict{&set, between->second, use.user,
                          "it would see %" + v->name() + " as it was before the write"};
        }
        auto [it, fresh] = entries.emplace(to, v);
        if (!fresh && it->second != v && writers.count(to)) {
          return Conflict{&set, writers[to], use.user,
                          "%" + v->name() + " and %" + it->second->name() + " share memory and would arrive apart"};
        }
      }
    }
  }
  return std::nullopt;
}

Assignment assign_stages(const Graph& graph, const State& state, const MemorySets& memory,
                         const SplitOptions& options) {
  Assignment a;
  a.copied = nodes_to_copy(graph, state, memory);
  const std::vector<Node*> ops = nodes_to_assign(graph, a.copied);
  if (options.policy) {
    assign_by_policy(a, graph, memory, ops, options);
  } else {
    assign_by_cuts(a, graph, state, memory, ops, options);
  }
  sort_by_stage(a);
  return a;
}

}  // namespace plumb::detail

namespace plumb {

MemorySets::MemorySets(const Graph& graph, const State& state) {
  const Aliases aliases(graph, &state, Aliases::Inputs::Distinct);
  std::unordered_map<Aliases::Memory, size_t> index;  // written memory -> its index in written_
  for (Node* node : graph.nodes()) {
    for (const Value* v : node->written_inputs()) {
      auto [it, fresh] = index.emplace(aliases.memory(v), written_.size());
      if (fresh) written_.emplace_back();
      auto& writers = written_[it->second].writers;
      if (writers.empty() || writers.back() != node) writers.push_back(node);
    }
  }
  if (written_.empty()) return;
  for (const Node* node : graph.nodes()) {
    for (Value* v : node->results()) {
      auto it = index.find(aliases.memory(v));
      if (it == index.end()) continue;
      Set& set = written_[it->second];
      set.values.push_back(v);
      set.has_state |= node->kind() == NodeKind::GetAttr;
      set.has_input |= node->kind() == NodeKind::Placeholder;
      set_of_.emplace(v, it->second);
    }
  }
}

const MemorySets::Set* MemorySets::written_set(const Value* value) const {
  auto it = set_of_.find(value);
  return it == set_of_.end() ? nullptr : &written_[it->second];
}

bool rename_after_writes(Graph& graph) {
  std::unordered_map<const Value*, Value*> newest;
  auto resolve = [&](Value* v) {
    for (auto it = newest.find(v); it != newest.end(); it = newest.find(v)) v = it->second;
    return v;
  };
  bool changed = false;
  for (Node* node : graph.nodes()) {
    for (size_t i = 0; !newest.empty() && i < node->num_inputs(); ++i) {
      Value* before = node->input(i);
      Value* now = resolve(before);
      if (now == before) continue;
      node->set_input(i, now);
      newest[before] = now;  // the next user need not walk the chain again
      changed = true;
    }
    for (Value* result : node->results()) {
      if (const Value* written = written_as(result)) newest[written] = result;
    }
  }
  return changed;
}

}  // namespace plumb
