// Keeping the set of ancestors of every value would be quadratic in time and memory. But only one question per add is
// asked: is operand l an ancestor of operand r? (Graph order tells which of the two can be.)
//
// 1. A path from l to r visits nodes in graph order, so every node on it lies between l's producer and r's: the span of
//    the question. Nothing outside of the span can matter.
// 2. 64 questions are decided in one sweep over the union of their spans. Every value carries a word; bit q says "l_q
//    is this value or an ancestor of it". A node's word is the OR of its inputs' words, and l_q's own bit is set where
//    l_q is produced. Bit q of r_q is set exactly if l_q is an ancestor of r_q. A second word, "reached over an
//    attention node", is made alike, but passes no residual add by its branch; a third, in the opposite direction from
//    r_q, says which nodes r_q depends on. A node is on branch q if the first and the third word have bit q.
// 3. Cost. Questions are grouped by the power of two of their span's length, ordered by place, and taken 64 at a time.
//    In the class of spans of length up to s, the unions of the groups cover at most N + 2 s (Q_s / 64) nodes: the
//    groups' first places do not overlap, and each reaches at most 2 s further. Summed over the log N classes that is
//    N log N + (the sum of all spans) / 16, and the sum of all spans is N times the mean number D of spans over one
//    place.
#include "plumb/transforms/scale/residual.h"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "plumb/graph/aliases.h"

namespace plumb {
namespace {

// The graph as arrays: vertex v is the v-th value, in graph order.
struct Arrays {
  std::vector<const Node*> nodes;
  std::vector<uint32_t> first_value, first_input;  // per node, with one past the end
  std::vector<uint32_t> inputs;                    // vertices, node by node
  std::vector<uint32_t> producer;                  // per vertex
  std::unordered_map<const Value*, uint32_t> vertex;
  std::unordered_map<const Node*, uint32_t> place;

  explicit Arrays(const Graph& graph) {
    nodes.reserve(graph.size());
    vertex.reserve(graph.size());
    place.reserve(graph.size());
    for (const Node* node : graph.nodes()) {
      first_value.push_back(static_cast<uint32_t>(producer.size()));
      first_input.push_back(static_cast<uint32_t>(inputs.size()));
      if (!looks_at_shape_only(*node)) {
        for (size_t i = 0; i < node->num_inputs(); ++i) inputs.push_back(vertex.at(node->input(i)));
      }
      for (size_t i = 0; i < node->num_results(); ++i) {
        vertex.emplace(node->result(i), static_cast<uint32_t>(producer.size()));
        producer.push_back(static_cast<uint32_t>(nodes.size()));
      }
      place.emplace(node, static_cast<uint32_t>(nodes.size()));
      nodes.push_back(node);
    }
    first_value.push_back(static_cast<uint32_t>(producer.size()));
    first_input.push_back(static_cast<uint32_t>(inputs.size()));
  }

  Value* value(uint32_t v) const { return nodes[producer[v]]->result(v - first_value[producer[v]]); }
};

struct Question {
  Node* add;
  uint32_t from, to;  // vertices: is `from` an ancestor of `to`?
  bool answer = false, attention = false;
  int index = -1;  // in the result
};

// Questions of one sweep: order[begin, stop), whose spans lie in the nodes [low, high].
struct Group {
  size_t begin, stop;
  uint32_t low, high;
};

class ResidualFinder {
 public:
  ResidualFinder(const Graph& graph, const std::function<bool(const Node*)>& is_attention)
      : arrays_(graph),
        attention_(arrays_.nodes.size()),
        reach_(arrays_.producer.size()),
        through_(arrays_.producer.size()),
        back_(arrays_.nodes.size()),
        inside_(arrays_.nodes.size()),
        branch_end_(arrays_.nodes.size(), UINT32_MAX) {
    for (size_t n = 0; n < attention_.size(); ++n) attention_[n] = is_attention(arrays_.nodes[n]);
  }

  ResidualAnalysis find(const std::vector<Node*>& candidates) {
    ask(candidates);
    for_each_group([&](const Group& group) {
      sweep_forward(group);
      if (const uint64_t yes = take_answers(group)) {
        sweep_back(group, yes);
        note_users(group, yes);
      }
    });
    if (std::ranges::find(attention_, 1) == attention_.end()) return result();
    // Again, now that the residual adds are known: attention on the branch of one is not on a branch around it.
    for (const Question& q : questions_) {
      if (q.answer) branch_end_[arrays_.place.at(q.add)] = q.to;
    }
    for_each_group([&](const Group& group) {
      sweep_forward(group);
      take_attention(group);
    });
    return result();
  }

 private:
  void for_each_group(const std::function<void(const Group&)>& visit) const {
    for (size_t begin = 0; begin < order_.size();) {
      const Group group = next_group(begin);
      visit(group);
      begin = group.stop;
    }
  }
  uint32_t start(const Question& q) const { return arrays_.producer[q.from]; }
  uint32_t end(const Question& q) const { return arrays_.producer[q.to]; }
  int span_class(uint32_t i) const { return std::bit_width(end(questions_[i]) - start(questions_[i])); }
  Question& question(const Group& group, size_t bit) { return questions_[order_[group.begin + bit]]; }

  void ask(const std::vector<Node*>& candidates);
  Group next_group(size_t begin) const;
  void sweep_forward(const Group& group);
  uint64_t take_answers(const Group& group);
  void take_attention(const Group& group);
  void sweep_back(const Group& group, uint64_t yes);
  void note_users(const Group& group, uint64_t yes);
  ResidualAnalysis result();

  const Arrays arrays_;
  std::vector<uint8_t> attention_;         // per node
  std::vector<Question> questions_;        // in graph order
  std::vector<uint32_t> order_;            // indices of questions, by class of span, then by start
  std::vector<uint64_t> reach_, through_;  // per vertex: from l_q; from l_q over an attention node
  std::vector<uint64_t> back_;             // per node: its result is r_q, or r_q depends on it
  std::vector<uint8_t> inside_;            // per node: on some branch
  std::vector<uint32_t> branch_end_;       // per node: the operand of a residual add that is computed from the other
  // Users of each skip, in graph order, each once, with the question of the innermost branch seen so far.
  std::unordered_map<uint32_t, std::vector<std::pair<uint32_t, int64_t>>> users_of_;
};

void ResidualFinder::ask(const std::vector<Node*>& candidates) {
  for (Node* add : candidates) {
    const Value *left = add->input(0), *right = add->input(1);
    if (left == right) continue;
    uint32_t l = arrays_.vertex.at(left), r = arrays_.vertex.at(right);
    if (l > r) std::swap(l, r);  // vertices are numbered in graph order
    if (arrays_.producer[l] == arrays_.producer[r]) continue;
    questions_.push_back({add, l, r});
  }
  order_.resize(questions_.size());
  for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<uint32_t>(i);
  std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
    return std::tuple(span_class(a), start(questions_[a]), a) < std::tuple(span_class(b), start(questions_[b]), b);
  });
  for (const Question& q : questions_) {
    auto [it, fresh] = users_of_.try_emplace(q.from);
    if (!fresh) continue;
    for (const Node* user : arrays_.value(q.from)->users()) {
      it->second.emplace_back(arrays_.place.at(user), int64_t(-1));
    }
  }
}

Group ResidualFinder::next_group(size_t begin) const {
  Group group{begin, begin, UINT32_MAX, 0};
  while (group.stop < order_.size() && group.stop - begin < 64 &&
         span_class(order_[group.stop]) == span_class(order_[begin])) {
    const Question& q = questions_[order_[group.stop++]];
    group.low = std::min(group.low, start(q));
    group.high = std::max(group.high, end(q));
  }
  return group;
}

void ResidualFinder::sweep_forward(const Group& group) {
  const uint32_t low_vertex = arrays_.first_value[group.low], high_vertex = arrays_.first_value[group.high + 1];
  std::fill(reach_.begin() + low_vertex, reach_.begin() + high_vertex, 0);
  std::fill(through_.begin() + low_vertex, through_.begin() + high_vertex, 0);
  for (size_t bit = 0; bit < group.stop - group.begin; ++bit) {
    reach_[question(group, bit).from] |= uint64_t(1) << bit;
  }
  for (uint32_t n = group.low; n <= group.high; ++n) {
    uint64_t from = 0, over = 0;
    for (uint32_t e = arrays_.first_input[n]; e < arrays_.first_input[n + 1]; ++e) {
      const uint32_t v = arrays_.inputs[e];
      if (v < low_vertex) continue;
      from |= reach_[v];
      if (v != branch_end_[n]) over |= through_[v];
    }
    if (attention_[n]) over |= from;
    for (uint32_t v = arrays_.first_value[n]; v < arrays_.first_value[n + 1]; ++v) {
      reach_[v] |= from;
      through_[v] = over;
    }
  }
}

// Returns a word: bit q is set if question q of the group holds.
uint64_t ResidualFinder::take_answers(const Group& group) {
  uint64_t yes = 0;
  for (size_t bit = 0; bit < group.stop - group.begin; ++bit) {
    Question& q = question(group, bit);
    q.answer = reach_[q.to] >> bit & 1;
    yes |= uint64_t(q.answer) << bit;
  }
  return yes;
}

void ResidualFinder::take_attention(const Group& group) {
  for (size_t bit = 0; bit < group.stop - group.begin; ++bit) {
    Question& q = question(group, bit);
    q.attention = through_[q.to] >> bit & 1;
  }
}

void ResidualFinder::sweep_back(const Group& group, uint64_t yes) {
  std::fill(back_.begin() + group.low, back_.begin() + group.high + 1, 0);
  for (size_t bit = 0; bit < group.stop - group.begin; ++bit) {
    if (yes >> bit & 1) back_[end(question(group, bit))] |= uint64_t(1) << bit;
  }
  const uint32_t low_vertex = arrays_.first_value[group.low];
  for (uint32_t n = group.high + 1; n-- > group.low;) {
    if (!back_[n]) continue;
    // A node is on branch q if it is computed from l_q (and is not l_q's producer, whose word has l_q's own bit).
    uint64_t on = 0;
    for (uint32_t e = arrays_.first_input[n]; e < arrays_.first_input[n + 1]; ++e) {
      const uint32_t v = arrays_.inputs[e];
      if (v < low_vertex) continue;
      back_[arrays_.producer[v]] |= back_[n];
      on |= reach_[v];
    }
    inside_[n] |= (on & back_[n]) != 0;
  }
}

void ResidualFinder::note_users(const Group& group, uint64_t yes) {
  for (size_t bit = 0; bit < group.stop - group.begin; ++bit) {
    if (!(yes >> bit & 1)) continue;
    const Question& q = question(group, bit);
    for (auto& [user, innermost] : users_of_[q.from]) {
      if (user > end(q)) break;
      if (!(back_[user] >> bit & 1) || looks_at_shape_only(*arrays_.nodes[user])) continue;
      // Questions are numbered in graph order: the innermost branch ends first. An add closes its own branch.
      const int64_t id = order_[group.begin + bit];
      if (innermost < 0 || id < innermost) innermost = id;
    }
  }
}

ResidualAnalysis ResidualFinder::result() {
  ResidualAnalysis result;
  for (Question& q : questions_) {
    if (!q.answer) continue;
    q.index = static_cast<int>(result.adds.size());
    result.adds.push_back({q.add, arrays_.value(q.from), arrays_.value(q.to), q.attention, -1});
  }
  for (const auto& [skip, users] : users_of_) {
    for (const auto& [user, innermost] : users) {
      if (innermost < 0) continue;
      result.branch_of[arrays_.value(skip)][arrays_.nodes[user]] = questions_[static_cast<size_t>(innermost)].index;
    }
  }
  for (ResidualAdd& add : result.adds) {
    auto at_skip = result.branch_of.find(add.skip);
    if (at_skip == result.branch_of.end()) continue;
    if (auto it = at_skip->second.find(add.add); it != at_skip->second.end()) add.parent = it->second;
  }
  for (size_t n = 0; n < inside_.size(); ++n) {
    if (inside_[n]) result.inside.insert(arrays_.nodes[n]);
  }
  return result;
}

}  // namespace

ResidualAnalysis find_residual_adds(const Graph& graph, const std::vector<Node*>& candidates,
                                    const std::function<bool(const Node*)>& is_attention) {
  if (candidates.empty()) return {};
  return ResidualFinder(graph, is_attention).find(candidates);
}

std::vector<double> depth_taus(const std::vector<bool>& attention, double residual_mult, double residual_attn_ratio) {
  // Variances that all branches of a kind add, for an input of variance 1 (appendix G.2.2, equations 30 and 31).
  const double mlp = residual_mult * residual_mult * 2 / (1 + residual_attn_ratio * residual_attn_ratio);
  const double attn = mlp * residual_attn_ratio * residual_attn_ratio;
  const auto n_attn = static_cast<double>(std::count(attention.begin(), attention.end(), true));
  const double n_mlp = static_cast<double>(attention.size()) - n_attn;
  double so_far = 1;
  std::vector<double> taus;
  for (bool a : attention) {
    const double here = a ? attn / n_attn : mlp / n_mlp;
    taus.push_back(std::sqrt(here / so_far));
    so_far += here;
  }
  return taus;
}

}  // namespace plumb
