#include "plumb/graph/passes/fuse_patterns.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>
#include <string_view>
#include <unordered_set>

#include "plumb/graph/pass.h"
#include "plumb/graph/passes/layouts.h"

namespace plumb {
namespace {

// Moving an operator later in the graph moves its gradient in the sum of all gradients of its input. The bits stay if
// nobody else uses that input in between, or if there are but two to add.
bool keeps_order_of_sums(const Match& match) {
  std::unordered_set<const Value*> watched;
  for (const auto& [name, arg] : match.bound) {
    if (arg.is_value() && arg.value()->uses().size() > 2) watched.insert(arg.value());
  }
  if (watched.empty()) return true;
  const std::unordered_set<const Node*> inside(match.nodes.begin(), match.nodes.end());
  for (const Node* node = match.nodes.front(); node != match.root; node = node->next()) {
    if (inside.count(node)) continue;
    for (size_t i = 0; i < node->num_inputs(); ++i) {
      if (watched.count(node->input(i))) return false;
    }
  }
  return true;
}

// Returns the node that took the match's place, or null.
Node* apply(Graph& graph, const PatternRule& rule, Node* root) {
  auto match = rule.pattern.match(root, rule.through_casts);
  if (!match || !is_private(*match) || (rule.exact && !keeps_order_of_sums(*match))) return nullptr;
  Node* made = nullptr;
  {
    auto here = graph.inserting_before(root);
    made = rule.build(graph, *match);
  }
  if (!made) return nullptr;
  // Another operator than the one that the name was made of: what is put together keeps its own.
  const std::string name = made->result()->name();
  graph.replace_node(root, made);
  made->result()->rename(name);
  // Erases the root's former inputs that nothing uses any more; a part of another match may still be used.
  for (size_t i = match->nodes.size() - 1; i-- > 0;) {
    if (!is_used(*match->nodes[i])) graph.erase(match->nodes[i]);
  }
  return made;
}

const RegisterPass fuse_patterns_pass({
    "fuse_patterns",
    "Puts high-level operators back where a program wrote them as several (t + addmm: linear).",
    {{"inexact", "false", "also where the last bits change: bias of a matmul, silu, gelu, softmax, norms, attention"}},
    [](GraphModule& module, const PassOptions& options, std::vector<std::string>* report) {
      return fuse_patterns(module.graph(), {flag_option(options, "inexact", false)}, report);
    },
});

}  // namespace

bool fuse_patterns(Graph& graph, const FusePatternsOptions& options, std::vector<std::string>* report) {
  std::unordered_map<std::string_view, std::vector<const PatternRule*>> by_root;
  for (const PatternRule& rule : pattern_rules()) {
    if (rule.exact || options.inexact) by_root[rule.pattern.root_op()].push_back(&rule);
  }
  std::map<std::string, size_t> counts;
  for (Node* node = graph.first(); node; node = node->next()) {
    while (true) {
      auto rules = node->is_call() ? by_root.find(node->op_name()) : by_root.end();
      if (rules == by_root.end()) break;
      Node* made = nullptr;
      for (const PatternRule* rule : rules->second) {
        if ((made = apply(graph, *rule, node))) {
          ++counts[rule->name];
          break;
        }
      }
      if (!made) break;
      node = made;
    }
  }
  if (options.inexact && !counts.empty()) keep_views_working(graph);
  if (report) {
    for (const auto& [name, n] : counts) report->push_back("fused " + name + " " + std::to_string(n) + " times");
  }
  return !counts.empty();
}

namespace {

bool is_state(const Arg& arg) { return arg.is_value() && arg.value()->producer()->kind() == NodeKind::GetAttr; }

const TensorMeta* type_of(const Arg& arg) {
  return arg.is_value() && arg.value()->meta() ? &*arg.value()->meta() : nullptr;
}

// Returns whether the value is, or may be where its type is not known, of a floating type.
bool may_be_floating(const Arg& arg) {
  const TensorMeta* m = type_of(arg);
  return arg.is_value() && (!m || m->is_floating_point());
}

bool has_rank(const Arg& arg, size_t rank) {
  const TensorMeta* m = type_of(arg);
  return m && m->sizes.size() == rank;
}

// A rule for what these lines make of the placeholders, "x w eps:float", as %y.
PatternRule rule(const char* name, bool exact, const std::string& placeholders, const std::string& lines,
                 std::function<Node*(Graph&, const Match&)> build, bool through_casts = false) {
  std::string text = "graph {\n";
  std::istringstream words(placeholders);
  for (std::string word; words >> word;)
    text += "%" + word + " = placeholder \"" + word.substr(0, word.find(':')) + "\"\n";
  return {name, exact, through_casts, Pattern(text + lines + " output(%y)\n}\n"), std::move(build)};
}

// --- linear ---
// Every way to write the transpose of a matrix.
const std::vector<std::string>& transposes() {
  static const std::vector<std::string> all = {"aten::t(%w)",
                                               "aten::numpy_T(%w)",
                                               "aten::mT(%w)",
                                               "aten::transpose.int(%w, 0, 1)",
                                               "aten::transpose.int(%w, 1, 0)",
                                               "aten::transpose.int(%w, -2, -1)",
                                               "aten::transpose.int(%w, -1, -2)",
                                               "aten::permute(%w, [1, 0])"};
  return all;
}

Node* with_bias(Graph& g, const Match& m) { return g.call("aten::linear", {m.at("x"), m.at("w"), m.at("b")}); }

Node* biased(Graph& g, const Match& m) { return has_rank(m.at("b"), 1) ? with_bias(g, m) : nullptr; }

Node* unbiased(Graph& g, const Match& m) {
  // A product of two activations is no linear: only what the state holds is a weight.
  if (!is_state(m.at("w"))) return nullptr;
  if (m.root->target() == "aten::matmul" && !has_rank(m.at("w"), 2)) return nullptr;
  return g.call("aten::linear", {m.at("x"), m.at("w")});
}

bool is_bias_of(const Match& m) {
  const TensorMeta *w = type_of(m.at("w")), *b = type_of(m.at("b"));
  return is_state(m.at("b")) && w && b && w->sizes.size() == 2 && b->sizes.size() == 1 && b->sizes[0] == w->sizes[0] &&
         b->dtype == w->dtype;
}

Node* exactly_biased(Graph& g, const Match& m) {
  const TensorMeta *x = type_of(m.at("x")), *w = type_of(m.at("w"));
  return is_bias_of(m) && x && same_bits_with_bias(*x, *w) ? with_bias(g, m) : nullptr;
}

Node* roughly_biased(Graph& g, const Match& m) { return is_bias_of(m) ? with_bias(g, m) : nullptr; }

void add_linear(std::vector<PatternRule>& rules) {
  for (const std::string& t : transposes()) {
    rules.push_back(rule("linear", true, "x w b", "%t = " + t + " %y = aten::addmm(%b, %x, %t)", biased));
    for (const char* product : {"aten::mm", "aten::matmul"})
      rules.push_back(rule("linear", true, "x w", "%t = " + t + " %y = " + product + "(%x, %t)", unbiased));
  }
  for (const std::string sum : {"aten::add.Tensor", "aten::add_.Tensor"}) {
    const std::string lines = "%l = aten::linear(%x, %w) %y = " + sum + "(%l, %b)";
    rules.push_back(rule("bias", true, "x w b", lines, exactly_biased));
    rules.push_back(rule("bias", false, "x w b", lines, roughly_biased));
  }
}

// --- activations ---
void add_activations(std::vector<PatternRule>& rules) {
  auto unary = [&](const char* name, const std::string& lines, std::function<Node*(Graph&, const Arg&)> make) {
    rules.push_back(rule(name, false, "x", lines, [make](Graph& g, const Match& m) {
      return may_be_floating(m.at("x")) ? make(g, m.at("x")) : nullptr;
    }));
  };
  auto silu = [](Graph& g, const Arg& x) { return g.call("aten::silu", {x}); };
  unary("silu", "%s = aten::sigmoid(%x) %y = aten::mul.Tensor(%x, %s)", silu);
  auto gelu = [](Graph& g, const Arg& x) { return g.call("aten::gelu", {x}); };
  for (const char* scaled : {"aten::div.Tensor(%x, 1.4142135623730951)", "aten::mul.Tensor(%x, 0.7071067811865476)",
                             "aten::mul.Tensor(%x, 0.7071067811865475)"}) {
    const std::string erf = std::string("%d = ") + scaled + " %e = aten::erf(%d) %p = aten::add.Tensor(%e, 1.0) ";
    unary("gelu", erf + "%h = aten::mul.Tensor(%x, 0.5) %y = aten::mul.Tensor(%h, %p)", gelu);
    unary("gelu", erf + "%h = aten::mul.Tensor(%x, %p) %y = aten::mul.Tensor(%h, 0.5)", gelu);
  }
  auto tanh = [](Graph& g, const Arg& x) { return g.call("aten::gelu", {x, "tanh"}); };
  for (const char* cube : {"aten::pow.Tensor_Scalar(%x, 3.0)", "aten::pow.Tensor_Scalar(%x, 3)"}) {
    unary("gelu",
          std::string("%q = ") + cube +
              " %c = aten::mul.Tensor(%q, 0.044715) %a = aten::add.Tensor(%x, %c) %i = aten::mul.Tensor(%a, "
              "0.7978845608028654)"
              " %e = aten::tanh(%i) %p = aten::add.Tensor(%e, 1.0) %h = aten::mul.Tensor(%x, 0.5) %y = "
              "aten::mul.Tensor(%h, %p)",
          tanh);
  }
}

// --- softmax, norms ---
void add_softmax(std::vector<PatternRule>& rules) {
  rules.push_back(rule("softmax", false, "x", R"(
      %m = aten::amax(%x, [-1], True) %d = aten::sub.Tensor(%x, %m) %e = aten::exp(%d)
      %s = aten::sum.dim_IntList(%e, [-1], True) %y = aten::div.Tensor(%e, %s))",
                       [](Graph& g, const Match& m) {
                         return may_be_floating(m.at("x")) ? g.call("aten::softmax.int", {m.at("x"), -1}) : nullptr;
                       }));
}

// Before casts that change nothing where the match is.
Arg before_casts(const Arg& arg) {
  Arg at = arg;
  while (at.is_value() && is_cast_to_same(at.value()->producer())) at = at.value()->producer()->args()[0];
  return at;
}

Node* cast(Graph& g, Value* value, at::ScalarType type, const Node* root) {
  Node* made = g.call("aten::to.dtype", {value, c10::IValue(static_cast<int64_t>(type))});
  made->meta() = root->meta();
  TensorMeta meta = *value->meta();
  meta.dtype = type;
  made->result()->set_meta(std::move(meta));
  return made;
}

// Returns the norm `op` with these arguments after x, all in the wider of the types of x and of the root, and its
// result in the root's.
Node* norm(Graph& g, const Match& m, const char* op, std::vector<Arg> others) {
  Arg x = before_casts(m.at("x"));
  const TensorMeta *type = type_of(x), *root = m.root->result()->meta() ? &*m.root->result()->meta() : type;
  if (!type || !type->is_floating_point()) return nullptr;
  const at::ScalarType wide = at::promote_types(type->dtype, root->dtype);
  others.insert(others.begin(), x);
  for (Arg& arg : others) {
    const TensorMeta* given = type_of(arg = before_casts(arg));
    if (given && given->dtype != wide) arg = cast(g, arg.value(), wide, m.root)->result();
  }
  Node* made = g.call(op, std::move(others));
  if (root->dtype == wide) return made;
  made->meta() = m.root->meta();
  TensorMeta meta = *root;
  meta.dtype = wide;
  made->result()->set_meta(std::move(meta));
  return cast(g, made->result(), root->dtype, m.root);
}

// Returns the sizes of these dimensions of x, if they are its last ones and cannot change.
std::optional<std::vector<int64_t>> last_sizes(const Arg& x, const Arg& dims) {
  const TensorMeta* type = type_of(x);
  if (!type || !dims.is_constant() || !dims.constant().isIntList()) return std::nullopt;
  const auto rank = static_cast<int64_t>(type->sizes.size());
  std::vector<int64_t> sorted = dims.constant().toIntVector(), sizes;
  for (int64_t& dim : sorted) dim += dim < 0 ? rank : 0;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    const int64_t dim = rank - static_cast<int64_t>(sorted.size() - i);
    if (sorted[i] != dim || dim < 0) return std::nullopt;
    const auto d = static_cast<size_t>(dim);
    if (d < type->symbols.size() && !type->symbols[d].empty()) return std::nullopt;
    sizes.push_back(type->sizes[d]);
  }
  return sizes.empty() ? std::nullopt : std::optional(sizes);
}

// Returns whether a placeholder can be the weight or bias of a norm over these sizes: no activation.
bool is_weight_of(const Match& m, const char* name, const std::vector<int64_t>& sizes) {
  const TensorMeta *w = type_of(m.at(name)), *x = type_of(m.at("x"));
  return w && x && w->sizes == sizes && (x->sizes.size() > sizes.size() || is_state(before_casts(m.at(name))));
}

bool is_weight(const Match& m, const char* name) {
  const Arg& shape = m.at("shape");
  return shape.constant().isIntList() && is_weight_of(m, name, shape.constant().toIntVector());
}

// Returns every way to divide a value by the root of %a.
std::vector<std::string> divided_by_root(const std::string& x) {
  const std::string multiplied = " %y = aten::mul.Tensor(" + x + ", %r)",
                    divided = " %y = aten::div.Tensor(" + x + ", %r)";
  return {"%r = aten::rsqrt(%a)" + multiplied,
          "%r = aten::pow.Tensor_Scalar(%a, -0.5)" + multiplied,
          "%s = aten::sqrt(%a) %r = aten::reciprocal(%s)" + multiplied,
          "%s = aten::sqrt(%a) %i = aten::reciprocal(%s) %r = aten::mul.Tensor(%i, 1)" + multiplied,
          "%r = aten::sqrt(%a)" + divided,
          "%r = aten::pow.Tensor_Scalar(%a, 0.5)" + divided};
}

std::vector<std::string> mean_squares(const std::string& x) {
  std::vector<std::string> all;
  for (const std::string& square :
       {"aten::pow.Tensor_Scalar(" + x + ", 2)", "aten::square(" + x + ")", "aten::mul.Tensor(" + x + ", " + x + ")"})
    all.push_back("%q = " + square + " %v = aten::mean.dim(%q, %dims, True)");
  return all;
}

// First without weight and bias; these are taken up afterwards, whatever stands between.
void add_norms(std::vector<PatternRule>& rules) {
  auto add = [&](const char* name, const std::string& placeholders, const std::string& lines, auto build) {
    rules.push_back(rule(name, false, placeholders, lines, build, /*through_casts=*/true));
  };
  const std::string eps = " %a = aten::add.Tensor(%v, %eps) ";
  // Comes before RMS norms: a centered value divided by its root mean square is one, too. The mean subtracted in a
  // variance is often subtracted once more.
  const std::string centered = "%m = aten::mean.dim(%x, %dims, True) %d = aten::sub.Tensor(%x, %m) ";
  std::vector<std::string> variances = {"%v = aten::var.correction(%x, %dims, correction=0, keepdim=True)",
                                        "%v = aten::var.dim(%x, %dims, False, True)"};
  for (const std::string& squares : mean_squares("%z")) variances.push_back("%z = aten::sub.Tensor(%x, %m) " + squares);
  for (const std::string& variance : variances) {
    for (const std::string& divided : divided_by_root("%d")) {
      add("layer_norm", "x dims:other eps:float", centered + variance + eps + divided,
          [](Graph& g, const Match& m) -> Node* {
            const auto sizes = last_sizes(m.at("x"), m.at("dims"));
            if (!sizes || !m.at("eps").is_constant()) return nullptr;
            return norm(g, m, "aten::layer_norm", {c10::IValue(*sizes), std::nullopt, std::nullopt, m.at("eps")});
          });
    }
  }

  auto rms = [](Graph& g, const Match& m) -> Node* {
    const auto sizes = last_sizes(m.at("x"), m.at("dims"));
    if (!sizes || !m.at("eps").is_constant()) return nullptr;
    Arg weight = std::nullopt;
    if (m.bound.contains("w")) {
      if (!is_weight_of(m, "w", *sizes)) return nullptr;
      weight = m.at("w");
    }
    return norm(g, m, "aten::rms_norm", {c10::IValue(*sizes), weight, m.at("eps")});
  };
  for (const std::string& mean : mean_squares("%x")) {
    for (const std::string& divided : divided_by_root("%x"))
      add("rms_norm", "x dims:other eps:float", mean + eps + divided, rms);
    for (const char* weighted : {"%u = aten::mul.Tensor(%w, %r) %y = aten::mul.Tensor(%u, %x)",
                                 "%u = aten::mul.Tensor(%w, %x) %y = aten::mul.Tensor(%r, %u)"})
      add("rms_norm", "x w dims:other eps:float", mean + eps + "%r = aten::rsqrt(%a) " + weighted, rms);
  }
  add("rms_norm", "x w shape:other eps:other",
      "%n = aten::rms_norm(%x, %shape, None, %eps) %y = aten::mul.Tensor(%n, %w)",
      [](Graph& g, const Match& m) -> Node* {
        if (!is_weight(m, "w")) return nullptr;
        return norm(g, m, "aten::rms_norm", {m.at("shape"), m.at("w"), m.at("eps")});
      });

  const std::string layer = "%n = aten::layer_norm(%x, %shape, ";
  add("layer_norm", "x w shape:other eps:float", layer + "None, None, %eps) %y = aten::mul.Tensor(%n, %w)",
      [](Graph& g, const Match& m) -> Node* {
        if (!is_weight(m, "w")) return nullptr;
        return norm(g, m, "aten::layer_norm", {m.at("shape"), m.at("w"), std::nullopt, m.at("eps")});
      });
  add("layer_norm", "x w b shape:other eps:float", layer + "%w, None, %eps) %y = aten::add.Tensor(%n, %b)",
      [](Graph& g, const Match& m) -> Node* {
        if (!is_weight(m, "b")) return nullptr;
        return norm(g, m, "aten::layer_norm", {m.at("shape"), m.at("w"), m.at("b"), m.at("eps")});
      });
}

// --- attention ---
// Returns whether a mask of these sizes has one number for each score of these queries and keys, or is spread over
// them. The operator takes no mask of one dimension, and none that makes the scores more.
bool spreads_over_scores(const std::vector<int64_t>& mask, const std::vector<int64_t>& queries,
                         const std::vector<int64_t>& keys) {
  if (mask.size() < 2 || mask.size() > queries.size()) return false;
  std::vector<int64_t> scores = queries;
  scores.back() = keys[keys.size() - 2];
  return std::equal(mask.rbegin(), mask.rend(), scores.rbegin(),
                    [](int64_t given, int64_t wanted) { return given == 1 || given == wanted; });
}

void add_attention(std::vector<PatternRule>& rules) {
  auto build = [](bool divides, bool masked) {
    return [divides, masked](Graph& g, const Match& m) -> Node* {
      const TensorMeta *q = type_of(m.at("q")), *k = type_of(m.at("k")), *v = type_of(m.at("v"));
      const Arg& scale = m.at("scale");
      if (!q || !k || !v || !scale.is_constant() || q->sizes.size() < 3 || q->sizes.size() != k->sizes.size() ||
          q->sizes.size() != v->sizes.size() || !q->is_floating_point())
        return nullptr;
      for (size_t i = 0; i + 2 < q->sizes.size(); ++i) {
        if (q->sizes[i] != k->sizes[i] || q->sizes[i] != v->sizes[i]) return nullptr;  // broadcast heads
      }
      const auto& number = scale.constant();
      double s = number.isDouble() ? number.toDouble() : static_cast<double>(number.toInt());
      if (divides) s = 1.0 / s;
      Arg mask = std::nullopt;
      if (masked) {
        const TensorMeta* type = type_of(m.at("mask"));
        if (!type || type->dtype != q->dtype || !spreads_over_scores(type->sizes, q->sizes, k->sizes)) return nullptr;
        mask = m.at("mask");
      }
      return g.call("aten::scaled_dot_product_attention", {m.at("q"), m.at("k"), m.at("v"), mask, 0.0, false, s});
    };
  };
  for (bool divides : {false, true}) {
    for (bool masked : {false, true}) {
      std::string text = " %t = aten::transpose.int(%k, -2, -1) %p = aten::matmul(%q, %t) %s = aten::";
      text += divides ? "div.Tensor(%p, %scale)" : "mul.Tensor(%p, %scale)";
      if (masked) text += " %z = aten::add.Tensor(%s, %mask)";
      text += std::string(" %a = aten::softmax.int(") + (masked ? "%z" : "%s") + ", -1) %y = aten::matmul(%a, %v)";
      rules.push_back(rule("attention", false, masked ? "q k v scale:float mask" : "q k v scale:float", text,
                           build(divides, masked)));
    }
  }
}

}  // namespace

const std::vector<PatternRule>& pattern_rules() {
  static const std::vector<PatternRule> rules = [] {
    std::vector<PatternRule> all;
    add_linear(all);
    add_activations(all);
    add_softmax(all);
    add_norms(all);
    add_attention(all);
    return all;
  }();
  return rules;
}

bool same_bits_with_bias(const TensorMeta& x, const TensorMeta& w) {
  if (!x.device.is_cpu() || !x.symbols.empty() || x.dtype != w.dtype || !x.is_floating_point()) return false;
  if (x.sizes.empty() || x.strides.size() != x.sizes.size() || w.sizes.size() != 2) return false;
  if (x.sizes.back() != w.sizes[1]) return false;
  // A step of 2^34 multiplications takes seconds: too long to try.
  if (x.numel() == 0 || static_cast<double>(x.numel()) * static_cast<double>(w.sizes[0]) > 1.7e10) return false;
  static std::mutex mutex;
  static std::map<std::tuple<int, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>, bool> known;
  const auto key = std::tuple(static_cast<int>(x.dtype), x.sizes, x.strides, w.sizes);
  {
    std::lock_guard lock(mutex);
    if (auto it = known.find(key); it != known.end()) return it->second;
  }
  bool same = true;
  try {
    at::AutoGradMode grad(true);
    at::Generator generator = at::detail::createCPUGenerator(20);
    // Few results can agree by luck: compare some thousands.
    const int64_t results = x.numel() / x.sizes.back() * w.sizes[0];
    const int64_t rounds = std::min<int64_t>(64, 4096 / std::max<int64_t>(results, 1) + 1);
    for (int64_t i = 0; i < rounds && same; ++i) {
      auto random = [&](at::Tensor t) { return t.normal_(0, 1, generator).requires_grad_(); };
      at::Tensor a = random(at::empty_strided(x.sizes, x.strides, at::TensorOptions(x.dtype)));
      at::Tensor m = random(at::empty(w.sizes, x.dtype)), b = random(at::empty({w.sizes[0]}, x.dtype));
      at::Tensor one = at::linear(a, m, b), two = at::matmul(a, m.t()).add_(b);
      at::Tensor g = at::empty(one.sizes(), x.dtype).normal_(0, 1, generator);
      auto grads_one = torch::autograd::grad({one}, {a, m, b}, {g}),
           grads_two = torch::autograd::grad({two}, {a, m, b}, {g});
      same = at::equal(one, two);
      for (size_t k = 0; k < 3; ++k) same = same && at::equal(grads_one[k], grads_two[k]);
    }
  } catch (const std::exception&) {
    same = false;  // overlapping strides, no memory: what cannot be tried is not known
  }
  std::lock_guard lock(mutex);
  return known[key] = same;
}

}  // namespace plumb
