#include "plumb/partition/flops.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "plumb/core/str.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

class Counter {
 public:
  Counter(const Node& node, const ValueMetas& metas)
      : node_(node), metas_(metas), facts_(operator_facts(node.target())) {}

  double count() const {
    double all = 0;
    for (const Value* v : node_.results()) all += numel(v);
    if (node_.is_op("aten::embedding")) return 0;
    if (facts_.recurrent != RecurrentLayer::None) return recurrent();
    const double out = node_.num_results() ? numel(node_.result()) : 0;
    switch (facts_.contraction.kind) {
      case ContractionKind::None: return all;
      case ContractionKind::Product: return 2 * out * size(operand(0), facts_.contraction.operands[0].dim);
      case ContractionKind::BatchProduct: return 2 * numel(operand(0)) * size(operand(1), -1);
      case ContractionKind::Bilinear: return 2 * out * size(operand(1), -1) * (size(operand(0), -1) + 1);
      case ContractionKind::Einsum: return einsum(all);
      case ContractionKind::Attention: {
        const double keys = size(operand(1), -2);
        return 2 * numel(operand(0)) * keys + 2 * out * keys;
      }
      case ContractionKind::Convolution:
      case ContractionKind::TransposedConvolution: return convolution(out);
    }
    return all;
  }

 private:
  const TensorMeta* meta(const Value* v) const {
    auto it = v ? metas_.find(v) : metas_.end();
    return it == metas_.end() ? nullptr : &it->second;
  }
  double numel(const Value* v) const { return meta(v) ? static_cast<double>(meta(v)->numel()) : 0; }
  // dim counts from the end; 1 where there is no such dimension.
  double size(const Value* v, int64_t dim) const {
    const TensorMeta* m = meta(v);
    if (!m || static_cast<int64_t>(m->sizes.size()) < -dim) return 1;
    return static_cast<double>(m->sizes[m->sizes.size() - static_cast<size_t>(-dim)]);
  }
  const Value* argument(std::string_view name) const {
    const Arg* arg = node_.try_arg(name);
    return arg && arg->is_value() ? arg->value() : nullptr;
  }
  const Value* operand(size_t i) const { return argument(facts_.contraction.operands[i].argument); }

  // Each output element sums over a filter; if transposed, each input element is spread over one.
  double convolution(double out) const {
    const Value* weight = operand(1);
    const double filter = numel(weight) / std::max(1.0, weight && meta(weight) && !meta(weight)->sizes.empty()
                                                            ? static_cast<double>(meta(weight)->sizes[0])
                                                            : 1.0);
    const Arg* by_argument = node_.try_arg("transposed");
    const bool transposed = by_argument ? by_argument->is_constant() && by_argument->constant().toBool()
                                        : facts_.contraction.kind == ContractionKind::TransposedConvolution;
    return 2 * (transposed ? numel(operand(0)) : out) * filter;
  }

  // Every row of the input goes through the weights of all layers once.
  double recurrent() const {
    const Value* input = argument(node_.try_arg("data") ? "data" : "input");
    const double rows = numel(input) / std::max(1.0, size(input, -1));
    double weights = numel(argument("w_ih")) + numel(argument("w_hh"));
    if (const Arg* params = node_.try_arg("params"); params && params->is_list()) {
      for (const Arg& p : params->list()) {
        if (p.is_value() && meta(p.value()) && meta(p.value())->sizes.size() == 2) weights += numel(p.value());
      }
    }
    return 2 * rows * weights;
  }

  // Labels with their sizes, of one operand of an einsum. Dimensions under "..." are labels counted from the end.
  using Labels = std::map<std::string, double>;
  Labels labels(std::string_view term, const Value* v) const {
    std::vector<std::string> names;
    size_t dots = std::string_view::npos;
    for (size_t i = 0; i < term.size(); ++i) {
      if (std::isalpha(static_cast<unsigned char>(term[i]))) names.emplace_back(1, term[i]);
      if (term.substr(i).starts_with("...")) dots = names.size();
    }
    const TensorMeta* m = meta(v);
    Labels found;
    if (!m || m->sizes.size() < names.size()) return found;
    const size_t hidden = m->sizes.size() - names.size();
    if (dots != std::string_view::npos) {
      for (size_t k = 0; k < hidden; ++k)
        names.insert(names.begin() + static_cast<int64_t>(dots + k), str(".", hidden - k));
    }
    for (size_t d = 0; d < names.size() && d < m->sizes.size(); ++d)
      found[names[d]] = std::max(found[names[d]], static_cast<double>(m->sizes[d]));
    return found;
  }

  // Operands are contracted from left to right, as torch does without a path: a step multiplies over all labels of its
  // two operands, and keeps those that the result or a later operand has.
  double einsum(double out) const {
    const Arg* equation = node_.try_arg("equation");
    const Arg* tensors = node_.try_arg("tensors");
    if (!equation || !equation->is_constant() || !tensors || !tensors->is_list() || tensors->list().size() < 2)
      return out;
    const std::string& text = equation->constant().toStringRef();
    const size_t arrow = text.find("->");
    std::vector<Labels> operands;
    size_t start = 0;
    for (const Arg& tensor : tensors->list()) {
      const size_t end = std::min({text.find(',', start), arrow, text.size()});
      operands.push_back(
          labels(std::string_view(text).substr(start, end - start), tensor.is_value() ? tensor.value() : nullptr));
      start = std::min(end + 1, text.size());
    }
    std::map<std::string, int> uses;
    for (const Labels& one : operands) {
      for (const auto& [name, size] : one) ++uses[name];
    }
    auto in_result = [&](const std::string& name) {
      if (arrow == std::string::npos) return uses[name] == 1 || name[0] == '.';
      return text.find(name[0] == '.' ? "..." : name, arrow) != std::string::npos;
    };
    double flops = 0;
    Labels left = operands[0];
    for (size_t i = 1; i < operands.size(); ++i) {
      Labels both = left;
      for (const auto& [name, size] : operands[i]) both[name] = std::max(both[name], size);
      double product = 2;
      for (const auto& [name, size] : both) product *= size;
      flops += product;
      std::erase_if(both, [&](const auto& label) {
        const bool later = std::any_of(operands.begin() + static_cast<int64_t>(i) + 1, operands.end(),
                                       [&](const Labels& one) { return one.count(label.first) > 0; });
        return !later && !in_result(label.first);
      });
      left = std::move(both);
    }
    return flops;
  }

  const Node& node_;
  const ValueMetas& metas_;
  const OperatorFacts& facts_;
};

}  // namespace

double flops_of(const Node& node, const ValueMetas& metas) { return Counter(node, metas).count(); }

}  // namespace plumb
