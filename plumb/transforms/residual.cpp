// The straightforward way keeps the set of ancestors of every value, which is quadratic in time and memory. But only
// one question per add is asked: is operand l an ancestor of operand r? (Order tells which of the two can be.)
//
// 1. A path from l to r visits nodes in graph order, so every node on it lies between l's producer and r's: the span of
// the
//    question. Nothing outside of the span can matter.
// 2. 64 questions are answered in one sweep over the union of their spans: every value carries a word whose bit q says
// "l_q is
//    this value or an ancestor of it"; a node's word is the OR of its inputs' words, and l_q's own bit is set where l_q
//    is produced. Sweeping on from l_q meets every path out of l_q, so bit q of r_q is set exactly if l_q is an
//    ancestor of r_q. A second word, "reached over an attention node", is made the same way; a third in the opposite
//    direction from r_q says which nodes r_q depends on. A node is on branch q if the first and the third word have bit
//    q.
// 3. Cost. Questions are grouped by the power of two of their span's length, ordered by place, and taken 64 at a time.
// In the
//    class of spans of length up to s, the unions of the groups cover at most N + 2 s (Q_s / 64) nodes: the groups'
//    first places do not overlap, and each reaches at most 2 s further. Summed over the log N classes that is N log N +
//    (the sum of all spans) / 16, and the sum of all spans is N times the mean number D of spans over one place.
#include "plumb/transforms/residual.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace plumb {
namespace {

bool looks_at_shape_only(const Node* node) {
  if (!node->is_call()) return false;
  const std::string_view name = node->op_name();
  return name.ends_with("_like") || name.starts_with("aten::new_") || name == "aten::size" || name == "aten::sym_size";
}

// The graph as arrays: vertex v is the v-th value, in graph order.
struct Arrays {
  std::vector<const Node*> nodes;
  std::vector<uint32_t> first_value, first_input;  // per node, with one past the end
  std::vector<uint32_t> inputs;                    // vertices, node by node
  std::vector<uint32_t> producer;                  // per vertex
  std::unordered_map<const Value*, uint32_t> vertex;

  explicit Arrays(const Graph& graph) {
    nodes.reserve(graph.size());
    vertex.reserve(graph.size());
    for (const Node* node : graph.nodes()) {
      first_value.push_back(static_cast<uint32_t>(producer.size()));
      first_input.push_back(static_cast<uint32_t>(inputs.size()));
      if (!looks_at_shape_only(node)) {
        for (size_t i = 0; i < node->num_inputs(); ++i) inputs.push_back(vertex.at(node->input(i)));
      }
      for (size_t i = 0; i < node->num_results(); ++i) {
        vertex.emplace(node->result(i), static_cast<uint32_t>(producer.size()));
        producer.push_back(static_cast<uint32_t>(nodes.size()));
      }
      nodes.push_back(node);
    }
    first_value.push_back(static_cast<uint32_t>(producer.size()));
    first_input.push_back(static_cast<uint32_t>(inputs.size()));
  }
};

struct Question {
  Node* add;
  uint32_t from, to;  // vertices: is `from` an ancestor of `to`?
  bool answer = false, attention = false;
  int index = -1;  // in the result
};

}  // namespace

ResidualAnalysis find_residual_adds(const Graph& graph, const std::vector<Node*>& candidates,
                                    const std::function<std::pair<Value*, Value*>(const Node*)>& operands,
                                    const std::function<bool(const Node*)>& is_attention) {
  ResidualAnalysis result;
  if (candidates.empty()) return result;
  const Arrays arrays(graph);
  const size_t num_nodes = arrays.nodes.size();
  std::vector<uint8_t> attention(num_nodes);
  for (size_t n = 0; n < num_nodes; ++n) attention[n] = is_attention(arrays.nodes[n]);
  std::unordered_map<const Node*, uint32_t> place;
  place.reserve(num_nodes);
  for (size_t n = 0; n < num_nodes; ++n) place.emplace(arrays.nodes[n], static_cast<uint32_t>(n));

  std::vector<Question> questions;
  for (Node* add : candidates) {
    auto [left, right] = operands(add);
    if (!left || !right || left == right) continue;
    uint32_t l = arrays.vertex.at(left), r = arrays.vertex.at(right);
    if (l > r) std::swap(l, r);  // vertices are numbered in graph order
    if (arrays.producer[l] == arrays.producer[r]) continue;
    questions.push_back({add, l, r});
  }
  auto start = [&](const Question& q) { return arrays.producer[q.from]; };
  auto end = [&](const Question& q) { return arrays.producer[q.to]; };

  std::vector<uint32_t> order(questions.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<uint32_t>(i);
  auto span_class = [&](uint32_t i) { return std::bit_width(end(questions[i]) - start(questions[i])); };
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::tuple(span_class(a), start(questions[a]), a) < std::tuple(span_class(b), start(questions[b]), b);
  });

  std::vector<uint64_t> reach(arrays.producer.size()), through(arrays.producer.size()), back(num_nodes);
  std::vector<uint8_t> inside(num_nodes);
  // Users of each skip, in graph order, once. (innermost branch seen so far, as the index of its question)
  std::unordered_map<uint32_t, std::vector<std::pair<uint32_t, int64_t>>> users_of;
  for (const Question& q : questions) {
    auto [it, fresh] = users_of.try_emplace(q.from);
    if (!fresh) continue;
    const Node* producer = arrays.nodes[arrays.producer[q.from]];
    const Value* value = producer->result(q.from - arrays.first_value[arrays.producer[q.from]]);
    for (const Node* user : value->users()) it->second.emplace_back(place.at(user), int64_t(-1));
  }

  for (size_t begin = 0; begin < order.size();) {
    size_t stop = begin;
    uint32_t low = UINT32_MAX, high = 0;
    while (stop < order.size() && stop - begin < 64 && span_class(order[stop]) == span_class(order[begin])) {
      low = std::min(low, start(questions[order[stop]]));
      high = std::max(high, end(questions[order[stop]]));
      ++stop;
    }
    const uint32_t low_vertex = arrays.first_value[low], high_vertex = arrays.first_value[high + 1];
    std::fill(reach.begin() + low_vertex, reach.begin() + high_vertex, 0);
    std::fill(through.begin() + low_vertex, through.begin() + high_vertex, 0);
    for (size_t i = begin; i < stop; ++i) reach[questions[order[i]].from] |= uint64_t(1) << (i - begin);
    for (uint32_t n = low; n <= high; ++n) {
      uint64_t from = 0, over = 0;
      for (uint32_t e = arrays.first_input[n]; e < arrays.first_input[n + 1]; ++e) {
        const uint32_t v = arrays.inputs[e];
        if (v < low_vertex) continue;
        from |= reach[v];
        over |= through[v];
      }
      if (attention[n]) over |= from;
      for (uint32_t v = arrays.first_value[n]; v < arrays.first_value[n + 1]; ++v) {
        reach[v] |= from;
        through[v] = over;
      }
    }
    uint64_t yes = 0;
    for (size_t i = begin; i < stop; ++i) {
      Question& q = questions[order[i]];
      q.answer = reach[q.to] >> (i - begin) & 1;
      q.attention = through[q.to] >> (i - begin) & 1;
      yes |= uint64_t(q.answer) << (i - begin);
    }
    if (yes) {
      // back[n]: questions whose `to` is a result of n or depends on n.
      std::fill(back.begin() + low, back.begin() + high + 1, 0);
      for (size_t i = begin; i < stop; ++i) {
        if (yes >> (i - begin) & 1) back[end(questions[order[i]])] |= uint64_t(1) << (i - begin);
      }
      for (uint32_t n = high + 1; n-- > low;) {
        if (!back[n]) continue;
        // A node is on branch q if it is computed from l_q (and is not l_q's producer, whose word has l_q's own bit).
        uint64_t on = 0;
        for (uint32_t e = arrays.first_input[n]; e < arrays.first_input[n + 1]; ++e) {
          const uint32_t v = arrays.inputs[e];
          if (v < low_vertex) continue;
          back[arrays.producer[v]] |= back[n];
          on |= reach[v];
        }
        inside[n] |= (on & back[n]) != 0;
      }
      for (size_t i = begin; i < stop; ++i) {
        if (!(yes >> (i - begin) & 1)) continue;
        const Question& q = questions[order[i]];
        for (auto& [user, innermost] : users_of[q.from]) {
          if (user > end(q)) break;
          if (!(back[user] >> (i - begin) & 1) || looks_at_shape_only(arrays.nodes[user])) continue;
          // Questions are numbered in graph order: the innermost branch ends first. An add closes its own branch.
          const int64_t id = order[i];
          if (innermost < 0 || id < innermost) innermost = id;
        }
      }
    }
    begin = stop;
  }

  for (Question& q : questions) {
    if (!q.answer) continue;
    q.index = static_cast<int>(result.adds.size());
    auto value = [&](uint32_t v) {
      return arrays.nodes[arrays.producer[v]]->result(v - arrays.first_value[arrays.producer[v]]);
    };
    result.adds.push_back({q.add, value(q.from), value(q.to), q.attention, -1});
  }
  for (const auto& [skip, users] : users_of) {
    const Value* value = arrays.nodes[arrays.producer[skip]]->result(skip - arrays.first_value[arrays.producer[skip]]);
    for (const auto& [user, innermost] : users) {
      if (innermost >= 0) result.branch_of[value][arrays.nodes[user]] = questions[static_cast<size_t>(innermost)].index;
    }
  }
  for (ResidualAdd& add : result.adds) {
    auto at_skip = result.branch_of.find(add.skip);
    if (at_skip == result.branch_of.end()) continue;
    if (auto it = at_skip->second.find(add.add); it != at_skip->second.end()) add.parent = it->second;
  }
  for (size_t n = 0; n < num_nodes; ++n) {
    if (inside[n]) result.inside.insert(arrays.nodes[n]);
  }
  return result;
}

}  // namespace plumb
