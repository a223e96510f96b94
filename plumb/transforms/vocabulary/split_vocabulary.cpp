#include "plumb/transforms/vocabulary/split_vocabulary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <optional>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/pass.h"
#include "plumb/transforms/rewrite.h"

namespace plumb {
namespace {

c10::IValue ints(std::vector<int64_t> list) { return {std::move(list)}; }

// A head and its loss as the graph has them.
struct Head {
  Node* loss = nullptr;
  Node* product = nullptr;
  std::vector<Node*> between;  // views from the product to the loss
  Value* input = nullptr;
  Node* weight = nullptr;        // get_attr, (words, width)
  Node* bias = nullptr;          // get_attr, or null
  std::vector<Node*> of_weight;  // a transposition between the weight and the product
  int64_t words = 0;
};

Node* attribute(const Arg& arg) {
  return arg.is_value() && arg.value()->producer()->kind() == NodeKind::GetAttr ? arg.value()->producer() : nullptr;
}

// Finds the head of a loss; returns the reason if there is none to divide.
std::string find_head(Node* loss, Head& head) {
  head.loss = loss;
  Value* logits = loss->arg("self").value();
  if (logits == nullptr || !loss->arg("target").is_value()) return "it is the loss of a number";
  if (!loss->arg("weight").is_none()) return "the loss has weights";
  if (number_of(loss->arg("label_smoothing")) != 0.0) return "the loss smooths its labels";
  if (!loss->arg("reduction").is_constant()) return "its reduction is computed";
  Node* node = logits->producer();
  while (node->is_op("aten::view") || node->is_op("aten::reshape") || node->is_op("aten::_unsafe_view") ||
         node->is_op("aten::flatten")) {
    head.between.push_back(node);
    node = node->input(0)->producer();
  }
  head.product = node;
  const bool linear = node->is_op("aten::linear"), addmm = node->is_op("aten::addmm"), mm = node->is_op("aten::mm");
  if (!linear && !addmm && !mm)
    return "its logits come from " + std::string(node->op_name()) + ", not from a linear layer";
  if (addmm && (number_of(node->arg("beta")) != 1.0 || number_of(node->arg("alpha")) != 1.0))
    return "its product is scaled";
  head.input = node->arg(linear ? 0 : addmm ? 1 : 0).value();
  if (head.input == nullptr) return "its product is that of a number";
  Arg weight = node->arg(linear ? 1 : addmm ? 2 : 1);
  if (!linear) {
    Node* turned = weight.is_value() ? weight.value()->producer() : nullptr;
    if (turned == nullptr || !turned->is_op("aten::t")) return "its weight is no parameter's";
    head.of_weight.push_back(turned);
    weight = turned->arg(0);
  }
  head.weight = attribute(weight);
  if (head.weight == nullptr) return "its weight is no parameter";
  if (linear || addmm) {
    const Arg& bias = node->arg(linear ? 2 : 0);
    head.bias = attribute(bias);
    if (!bias.is_none() && head.bias == nullptr) return "its bias is no parameter";
  }
  const auto alone = [](const Node* made) { return made->result()->uses().size() == 1; };
  for (const Node* view : head.between) {
    if (!alone(view)) return "something else reads the logits";
  }
  if (!alone(node)) return "something else reads the logits";
  if (node->result()->meta() && node->result()->meta()->sizes.empty()) return "its product has no rows";
  const auto& logit_meta = logits->meta();
  const auto& target_meta = loss->arg("target").value()->meta();
  if (!logit_meta || logit_meta->sizes.size() != 2 || !logit_meta->symbols.empty())
    return "the sizes of its logits are not known";
  if (!target_meta || target_meta->is_floating_point()) return "its targets are probabilities";
  if (target_meta->dtype != at::kLong) return "its targets are not int64";
  if (logit_meta->dtype != at::kFloat && logit_meta->dtype != at::kDouble)
    return "its logits are not float32 or float64";
  // The parts compute their products in the place of the loss.
  if (node->meta().grad_enabled != loss->meta().grad_enabled) return "its product is made in another grad mode";
  return "";
}

class Divider {
 public:
  Divider(GraphModule& module, int64_t parts, Report& report)
      : module_(module), parts_(parts), report_(report), writes_(count_writes(module.graph())) {}

  bool run() {
    bool changed = false;
    for (Node* node : module_.graph().nodes()) {
      if (node->is_op("plumb::cross_entropy"))
        report_.add(ReportKind::LeftAlone, node, "plumb::cross_entropy", "",
                    "it is unit-scaled: its gradient has a factor");
      if (!node->is_op("aten::cross_entropy_loss")) continue;
      Head head;
      std::string reason = find_head(node, head);
      if (reason.empty() && writes_.at(head.product) != writes_.at(node))
        reason = "memory is written between the product and the loss";
      if (reason.empty()) reason = check_state(head);
      if (!reason.empty()) {
        report_.add(ReportKind::LeftAlone, node, "aten::cross_entropy_loss", "", reason);
        continue;
      }
      divide(head);
      changed = true;
    }
    return changed;
  }

 private:
  // Parameters that are all the head's own.
  std::string check_state(Head& head) const {
    const auto own = [&](const Node* attr, size_t users) {
      if (attr->result()->uses().size() != users) return false;
      const Attr& here = module_.state().get(attr->target());
      return std::ranges::count_if(module_.state(), [&](const Attr& a) {
               return a.tensor.unsafeGetTensorImpl() == here.tensor.unsafeGetTensorImpl();
             }) == 1;
    };
    const at::Tensor& weight = module_.state().get(head.weight->target()).tensor;
    const int64_t classes = head.loss->arg("self").value()->meta()->sizes[1];
    if (weight.dim() != 2 || weight.size(0) != classes) return "its classes are not the rows of the weight";
    if (head.bias && module_.state().get(head.bias->target()).tensor.sizes() != at::IntArrayRef{classes})
      return "its bias has another size than its classes";
    const bool turned_alone = head.of_weight.empty() || head.of_weight[0]->result()->uses().size() == 1;
    if (!own(head.weight, 1) || !turned_alone) return "its weight has other users (a tied embedding?)";
    if (head.bias != nullptr && !own(head.bias, 1)) return "its bias has other users";
    head.words = classes;
    return head.words < parts_ ? str("it has ", head.words, " words for ", parts_, " parts") : "";
  }

  // Calls an operator in the place of the loss.
  Value* call(const char* op, std::vector<Arg> args, std::vector<int64_t> sizes, at::ScalarType dtype, bool grad) {
    Node* made = module_.graph().call(op, std::move(args));
    made->meta() = head_->loss->meta();
    TensorMeta meta;
    meta.dtype = dtype;
    meta.strides = contiguous_strides(sizes);
    meta.sizes = std::move(sizes);
    meta.device = head_->input->meta() ? head_->input->meta()->device : at::Device(at::kCPU);
    meta.requires_grad = grad;
    made->result()->set_meta(std::move(meta));
    return made->result();
  }

  // Returns the rows of a parameter as a parameter of their own.
  Value* part_of(const Node* attr, int64_t begin, int64_t end) {
    const Attr whole = module_.state().get(attr->target());
    const std::string name = str(whole.name, "[", begin, ":", end, "]");
    at::Tensor rows;
    {
      const at::NoGradGuard no_grad;
      rows = whole.tensor.detach().slice(0, begin, end).clone();
    }
    rows.set_requires_grad(whole.tensor.requires_grad());
    TensorMeta meta = TensorMeta::of(rows);
    module_.state().add({name, whole.kind, rows, whole.persistent});
    return module_.graph().get_attr(name, meta)->result();
  }

  // Returns the part's two numbers a row.
  std::pair<Value*, Value*> make_part(Value* targets, int64_t part) {
    const Head& head = *head_;
    const int64_t begin = head.words * part / parts_, end = head.words * (part + 1) / parts_, words = end - begin;
    Value* weight = part_of(head.weight, begin, end);
    Value* bias = head.bias ? part_of(head.bias, begin, end) : nullptr;
    std::vector<int64_t> sizes =
        head.product->result()->meta() ? head.product->result()->meta()->sizes : std::vector{rows_, words};
    sizes.back() = words;
    const bool flat = sizes.size() == 2;
    Value* logits = call("aten::linear", {head.input, weight, bias ? Arg(bias) : Arg()}, sizes, dtype_, true);
    if (!flat) logits = call("aten::reshape", {logits, ints({-1, words})}, {rows_, words}, dtype_, true);
    Value* sum = call("aten::logsumexp", {logits, ints({1})}, {rows_}, dtype_, true);
    Value* moved = begin == 0 ? targets : call("aten::sub.Tensor", {targets, begin}, {rows_}, at::kLong, false);
    Value* index = call("aten::clamp", {moved, int64_t{0}, words - 1}, {rows_}, at::kLong, false);
    Value* own = call("aten::eq.Tensor", {index, moved}, {rows_}, at::kBool, false);
    Value* column = call("aten::unsqueeze", {index, int64_t{1}}, {rows_, 1}, at::kLong, false);
    Value* found = call("aten::gather", {logits, int64_t{1}, column}, {rows_, 1}, dtype_, true);
    found = call("aten::squeeze.dim", {found, int64_t{1}}, {rows_}, dtype_, true);
    return {sum, call("aten::where.ScalarOther", {own, found, 0.0}, {rows_}, dtype_, true)};
  }

  void divide(Head& head) {
    head_ = &head;
    Graph& graph = module_.graph();
    rows_ = head.loss->arg("self").value()->meta()->sizes[0];
    dtype_ = head.loss->arg("self").value()->meta()->dtype;
    const auto here = graph.inserting_before(head.loss);
    Value* targets = head.loss->arg("target").value();
    Arg::List sums;
    Value* target_logit = nullptr;
    for (int64_t part = 0; part < parts_; ++part) {
      const auto [sum, logit] = make_part(targets, part);
      sums.emplace_back(call("aten::unsqueeze", {sum, int64_t{0}}, {1, rows_}, dtype_, true));
      target_logit = part == 0 ? logit : call("aten::add.Tensor", {target_logit, logit}, {rows_}, dtype_, true);
    }
    Value* all = call("aten::cat", {Arg(sums)}, {parts_, rows_}, dtype_, true);
    all = call("aten::logsumexp", {all, ints({0})}, {rows_}, dtype_, true);
    Value* loss = call("aten::sub.Tensor", {all, target_logit}, {rows_}, dtype_, true);
    // A target that is no word is a loss that is no number; one that is to be ignored is none.
    Value* low = call("aten::ge.Scalar", {targets, int64_t{0}}, {rows_}, at::kBool, false);
    Value* high = call("aten::lt.Scalar", {targets, head.words}, {rows_}, at::kBool, false);
    Value* word = call("aten::logical_and", {low, high}, {rows_}, at::kBool, false);
    loss =
        call("aten::where.ScalarOther", {word, loss, std::numeric_limits<double>::quiet_NaN()}, {rows_}, dtype_, true);
    Value* counts = call("aten::ne.Scalar", {targets, head.loss->arg("ignore_index")}, {rows_}, at::kBool, false);
    loss = call("aten::where.ScalarOther", {counts, loss, 0.0}, {rows_}, dtype_, true);
    const int64_t reduction = head.loss->arg("reduction").constant().toInt();
    if (reduction != at::Reduction::None) loss = call("aten::sum", {loss}, {}, dtype_, true);
    if (reduction == at::Reduction::Mean) {
      Value* count = call("aten::sum", {counts}, {}, at::kLong, false);
      loss = call("aten::div.Tensor", {loss, count}, {}, dtype_, true);
    }
    finish(head, loss);
  }

  void finish(const Head& head, Value* loss) {
    Graph& graph = module_.graph();
    report_.add(ReportKind::Replaced, head.product, std::string(head.product->op_name()), str(parts_, " parts"),
                str("each part has its rows of the ", head.words, " of ", head.weight->target(),
                    "; sums over words are taken part by part"));
    const std::string name = head.loss->result()->name();
    graph.replace_all_uses_with(head.loss->result(), loss);
    graph.erase(head.loss);
    loss->rename(name);
    for (Node* view : head.between) graph.erase(view);
    graph.erase(head.product);
    for (Node* turned : head.of_weight) graph.erase(turned);
    for (Node* attr : {head.weight, head.bias}) {
      if (attr == nullptr) continue;
      const std::string of = attr->target();
      graph.erase(attr);
      module_.state().erase(of);
    }
    module_.sync_module();
  }

  GraphModule& module_;
  const int64_t parts_;
  Report& report_;
  const std::unordered_map<const Node*, size_t> writes_;
  Head* head_ = nullptr;
  int64_t rows_ = 0;
  at::ScalarType dtype_ = at::kFloat;
};

bool split(GraphModule& module, int64_t parts, Report& report) {
  if (parts < 2) {
    throw Error(ErrorKind::InvalidArgument, str("a vocabulary cannot be divided in ", parts, " parts"), "",
                "as many parts as ranks, 2 at least");
  }
  return Divider(module, parts, report).run();
}

const RegisterTransform split_vocabulary_pass{
    "split_vocabulary",
    "Divides a head and its cross entropy by words, so that a pipeline can spread them over its ranks.",
    {{"parts", "2", "how many; as many as ranks"}},
    [](GraphModule& module, const PassOptions& given, Report& report) {
      return split(module, number_option(given, "parts", 2), report);
    },
};

// Rows of a parameter: "head.weight[0:1000]".
struct Rows {
  std::string name;
  int64_t begin = 0, end = 0;
};

std::optional<Rows> part_named(const std::string& text) {
  const size_t open = text.rfind('['), colon = text.rfind(':');
  if (open == std::string::npos || open == 0 || colon == std::string::npos || colon < open || text.back() != ']')
    return {};
  Rows rows{text.substr(0, open)};
  const auto read = [&](size_t from, size_t to, int64_t& number) {
    const auto [end, error] = std::from_chars(text.data() + from, text.data() + to, number);
    return error == std::errc() && end == text.data() + to;
  };
  const bool good = read(open + 1, colon, rows.begin) && read(colon + 1, text.size() - 1, rows.end);
  return good ? std::optional(rows) : std::nullopt;
}

}  // namespace

std::shared_ptr<TransformedModule> split_vocabulary(const std::shared_ptr<GraphModule>& module, int parts) {
  return transformed(derive(not_null(module)), "split_vocabulary",
                     [parts](GraphModule& made, Report& report) { return split(made, parts, report); });
}

std::string divided_parameter(const State& state) {
  const auto part = std::ranges::find_if(state, [](const Attr& attr) { return part_named(attr.name).has_value(); });
  return part == state.end() ? "" : part->name;
}

State join_vocabulary(const State& state) {
  std::map<std::string, std::map<int64_t, std::pair<int64_t, at::Tensor>>> parts;  // by name and first row: end, rows
  for (const Attr& attr : state) {
    if (const auto part = part_named(attr.name)) parts[part->name][part->begin] = {part->end, attr.tensor.detach()};
  }
  State joined;
  for (const Attr& attr : state) {
    const auto rows_of = part_named(attr.name);
    if (!rows_of) {
      joined.add(attr);
      continue;
    }
    const std::string& name = rows_of->name;
    if (joined.contains(name)) continue;
    std::vector<at::Tensor> all;
    int64_t end = 0;
    for (const auto& [begin, part] : parts[name]) {
      if (begin != end)
        throw Error(ErrorKind::InvalidArgument, str(name, ": its rows ", end, " to ", begin, " are missing"), "",
                    "the state of all ranks");
      all.push_back(part.second);
      end = part.first;
    }
    const at::NoGradGuard no_grad;
    joined.add({name, attr.kind, at::cat(all).set_requires_grad(attr.tensor.requires_grad()), attr.persistent});
  }
  return joined;
}

}  // namespace plumb
