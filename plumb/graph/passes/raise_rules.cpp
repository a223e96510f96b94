#include "plumb/graph/passes/raise_rules.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <mutex>
#include <sstream>

namespace plumb {
namespace {

bool is_state(const Arg& arg) { return arg.is_value() && arg.value()->producer()->kind() == NodeKind::GetAttr; }

const TensorMeta* type_of(const Arg& arg) {
  return arg.is_value() && arg.value()->meta() ? &*arg.value()->meta() : nullptr;
}

bool has_rank(const Arg& arg, size_t rank) {
  const TensorMeta* m = type_of(arg);
  return m && m->sizes.size() == rank;
}

// The size of the last dimension, if it cannot change.
std::optional<int64_t> last_size(const Arg& arg) {
  const TensorMeta* m = type_of(arg);
  if (!m || m->sizes.empty() || (!m->symbols.empty() && !m->symbols.back().empty())) return std::nullopt;
  return m->sizes.back();
}

// A rule for what these lines make of the placeholders, "x w eps:float", as %y.
RaiseRule rule(const char* name, bool exact, const std::string& placeholders, const std::string& lines,
               std::function<Node*(Graph&, const Match&)> build) {
  std::string text = "graph {\n";
  std::istringstream words(placeholders);
  for (std::string word; words >> word;)
    text += "%" + word + " = placeholder \"" + word.substr(0, word.find(':')) + "\"\n";
  return {name, exact, Pattern(text + lines + " output(%y)\n}\n"), std::move(build)};
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

void add_linear(std::vector<RaiseRule>& rules) {
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
void add_activations(std::vector<RaiseRule>& rules) {
  auto unary = [&](const char* name, const std::string& lines, std::function<Node*(Graph&, const Arg&)> make) {
    rules.push_back(rule(name, false, "x", lines, [make](Graph& g, const Match& m) {
      return m.at("x").is_value() ? make(g, m.at("x")) : nullptr;
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
void add_norms(std::vector<RaiseRule>& rules) {
  rules.push_back(rule("softmax", false, "x", R"(
      %m = aten::amax(%x, [-1], True) %d = aten::sub.Tensor(%x, %m) %e = aten::exp(%d)
      %s = aten::sum.dim_IntList(%e, [-1], True) %y = aten::div.Tensor(%e, %s))",
                       [](Graph& g, const Match& m) { return g.call("aten::softmax.int", {m.at("x"), -1}); }));
  auto shape = [](const Arg& x) -> std::optional<Arg> {
    auto n = last_size(x);
    if (!n) return std::nullopt;
    return Arg(c10::IValue(std::vector<int64_t>{*n}));
  };
  auto rms = [shape](Graph& g, const Match& m) -> Node* {
    auto n = shape(m.at("x"));
    if (!n || !has_rank(m.at("w"), 1)) return nullptr;
    return g.call("aten::rms_norm", {m.at("x"), *n, m.at("w"), m.at("eps")});
  };
  // Llama's casts to float32 and back are nodes that do nothing on float32.
  const std::string body = R"( %q = aten::pow.Tensor_Scalar(%f, 2) %v = aten::mean.dim(%q, [-1], True)
      %a = aten::add.Tensor(%v, %eps) %r = aten::rsqrt(%a) %n = aten::mul.Tensor(%f, %r) )";
  auto all_f32 = [rms](Graph& g, const Match& m) -> Node* {
    const TensorMeta *x = type_of(m.at("x")), *w = type_of(m.at("w"));
    return x && w && x->dtype == at::kFloat && w->dtype == at::kFloat ? rms(g, m) : nullptr;
  };
  std::string plain = body + "%y = aten::mul.Tensor(%w, %n)";
  for (size_t at; (at = plain.find("%f")) != std::string::npos;) plain.replace(at, 2, "%x");
  rules.push_back(rule("rms_norm", false, "x w eps:float", plain, rms));
  for (const char* last :
       {"%y = aten::mul.Tensor(%w, %n)", "%o = aten::to.dtype(%n, torch.float32) %y = aten::mul.Tensor(%w, %o)"}) {
    rules.push_back(
        rule("rms_norm", false, "x w eps:float", "%f = aten::to.dtype(%x, torch.float32)" + body + last, all_f32));
  }
  for (const char* scaled :
       {"%s = aten::sqrt(%a) %n = aten::div.Tensor(%d, %s)", "%s = aten::rsqrt(%a) %n = aten::mul.Tensor(%d, %s)"}) {
    rules.push_back(rule("layer_norm", false, "x w b eps:float",
                         std::string(R"(
      %m = aten::mean.dim(%x, [-1], True) %d = aten::sub.Tensor(%x, %m)
      %q = aten::pow.Tensor_Scalar(%d, 2) %v = aten::mean.dim(%q, [-1], True) %a = aten::add.Tensor(%v, %eps) )") +
                             scaled + " %g = aten::mul.Tensor(%n, %w) %y = aten::add.Tensor(%g, %b)",
                         [shape](Graph& g, const Match& m) -> Node* {
                           auto n = shape(m.at("x"));
                           const Arg& eps = m.at("eps");
                           if (!n || !has_rank(m.at("w"), 1) || !has_rank(m.at("b"), 1) || !eps.is_constant())
                             return nullptr;
                           return g.call("aten::layer_norm", {m.at("x"), *n, m.at("w"), m.at("b"), eps});
                         }));
  }
}

// --- attention ---
void add_attention(std::vector<RaiseRule>& rules) {
  auto build = [](bool divides, bool masked) {
    return [divides, masked](Graph& g, const Match& m) -> Node* {
      const TensorMeta *q = type_of(m.at("q")), *k = type_of(m.at("k")), *v = type_of(m.at("v"));
      const Arg& scale = m.at("scale");
      if (!q || !k || !v || !scale.is_constant() || q->sizes.size() < 3 || q->sizes.size() != k->sizes.size() ||
          q->sizes.size() != v->sizes.size())
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
        if (!type || type->dtype != q->dtype || type->sizes.size() > q->sizes.size()) return nullptr;
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

const std::vector<RaiseRule>& raise_rules() {
  static const std::vector<RaiseRule> rules = [] {
    std::vector<RaiseRule> all;
    add_linear(all);
    add_activations(all);
    add_norms(all);
    add_attention(all);
    return all;
  }();
  return rules;
}

bool same_bits_with_bias(const TensorMeta& x, const TensorMeta& w) {
  if (!x.device.is_cpu() || !x.symbols.empty() || x.dtype != w.dtype || !x.is_floating_point()) return false;
  if (x.sizes.empty() || x.strides.size() != x.sizes.size() || w.sizes.size() != 2) return false;
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
