#include "plumb/training/step/loss.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "plumb/partition/split.h"
#include "plumb/pipeline/runtime/microbatch.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

at::Tensor cross_entropy(const Tensors& outputs, const Tensors& targets, int64_t ignored) {
  const at::Tensor& logits = outputs.at(0);
  if (logits.dim() < 2) {
    throw Error(ErrorKind::TensorMismatch,
                "--loss cross_entropy: the first output is " + type_text(logits) + ", no logits", "",
                "a model that returns [rows, ..., classes], or another --loss");
  }
  const at::Tensor wanted = targets.at(0).reshape({-1});
  // The mean over no target is 0 / 0.
  const bool any = wanted.ne(ignored).any().item<bool>();
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), wanted, {},
                                any ? at::Reduction::Mean : at::Reduction::Sum, ignored);
}

at::Tensor mse(const Tensors& outputs, const Tensors& targets) {
  if (outputs.at(0).sizes() != targets.at(0).sizes()) {
    throw Error(
        ErrorKind::TensorMismatch,
        "--loss mse: the first output is " + type_text(outputs[0]) + ", the targets are " + type_text(targets[0]), "",
        "targets of the output's shape");
  }
  if (targets.size() == 1) return at::mse_loss(outputs[0], targets[0]);
  const at::Tensor errors = at::mse_loss(outputs[0], targets[0], at::Reduction::None) * targets[1];
  return errors.sum() / targets[1].sum().clamp_min(1);
}

int64_t count_of(const TrainOptions& o, const Tensors& inputs, const Tensors& targets) {
  if (targets.empty()) return inputs.at(0).size(0);
  if (targets.size() == 2) return at::count_nonzero(targets[1]).item<int64_t>();
  if (o.loss == "mse") return targets[0].numel();
  return targets[0].ne(o.ignore_index).sum().item<int64_t>();
}

// Returns the output that is the loss: the one named so, or the only floating-point number.
int loss_output(const GraphModule& module) {
  if (const auto named = find_loss_by_name(module.out_spec())) return static_cast<int>(*named);
  const auto args = module.graph().output_node()->args();
  std::vector<int> numbers;
  for (size_t i = 0; i < args.size(); ++i) {
    const auto* meta = args[i].is_value() && args[i].value()->meta() ? &*args[i].value()->meta() : nullptr;
    if (meta != nullptr && meta->sizes.empty() && meta->is_floating_point()) numbers.push_back(static_cast<int>(i));
  }
  if (numbers.size() == 1) return numbers[0];
  if (numbers.size() > 1)
    throw UsageError(c10::str("the model returns ", numbers.size(), " numbers that could be its loss"),
                     "a model that returns a dict with 'loss', or one number");
  throw UsageError("the model returns no number that could be its loss",
                   "--loss cross_entropy or mse, or a model that returns its loss");
}

}  // namespace

Loss make_loss(const TrainOptions& o, const GraphModule& module) {
  if (o.loss == "output") {
    return [loss = example_loss(o.loss, module)](const Tensors& outputs, const Tensors&) { return loss(outputs); };
  }
  return [is_mse = o.loss == "mse", ignored = o.ignore_index](const Tensors& outputs, const Tensors& targets) {
    Tensors there;  // where the model's outputs are
    for (const at::Tensor& t : targets)
      there.push_back(t.defined() && !outputs.empty() && outputs[0].defined() ? t.to(outputs[0].device()) : t);
    return is_mse ? mse(outputs, there) : cross_entropy(outputs, there, ignored);
  };
}

std::function<at::Tensor(const Tensors&)> example_loss(const std::string& loss, const GraphModule& module) {
  const auto args = module.graph().output_node()->args();
  const auto* first =
      !args.empty() && args[0].is_value() && args[0].value()->meta() ? &*args[0].value()->meta() : nullptr;
  const bool logits = first != nullptr && first->is_floating_point() && first->sizes.size() > 1;
  std::string which = loss;
  if (which.empty()) which = find_loss_by_name(module.out_spec()) || !logits ? "output" : "cross_entropy";
  if (which != "none" && which != "output" && which != "mse" && which != "cross_entropy")
    throw UsageError("there is no loss named '" + which + "'", "cross_entropy, mse, output or none");
  if (which == "none") return {};
  if (which == "output") {
    if (loss.empty() && (first == nullptr || !first->is_floating_point())) return {};
    const int output = loss_output(module);
    return [output](const Tensors& outputs) { return outputs.at(static_cast<size_t>(output)); };
  }
  if (!logits && which == "cross_entropy")
    throw UsageError("cross_entropy: the first output is no logits", "output, mse or none");
  return [which](const Tensors& outputs) {
    const at::Tensor& out = outputs.at(0);
    if (which == "mse") return mse(outputs, {at::zeros_like(out)});
    return cross_entropy(outputs, {at::zeros(out.sizes().slice(0, out.dim() - 1), out.options().dtype(at::kLong))},
                         -100);
  };
}

int64_t Parts::total() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

int64_t Parts::tokens() const {
  int64_t sum = 0;
  for (const Tensors& part : inputs) {
    if (part.at(0).dim() > 1 && at::isIntegralType(part[0].scalar_type(), false)) sum += part[0].numel();
  }
  return sum;
}

namespace {

// A program's own batches may be anything.
void check_batch(const TrainOptions& o, const Batch& batch) {
  std::string wrong;
  for (const auto* list : {&batch.inputs, &batch.targets})
    if (!std::ranges::all_of(*list, &at::Tensor::defined)) wrong = "an undefined tensor";
  if (batch.inputs.empty()) wrong = "no inputs";
  if (wrong.empty() && batch.inputs[0].dim() == 0) wrong = type_text(batch.inputs[0]) + " as its first input";
  if (!wrong.empty())
    throw Error(ErrorKind::StructureMismatch, "a batch has " + wrong, "", "tensors with a row a sample");
  const size_t found = batch.targets.size();
  const auto [most, takes, remedy] =
      o.loss == "output" ? std::tuple(size_t{0}, "none", "give the model all tensors of a batch as its inputs")
      : o.loss == "mse"
          ? std::tuple(size_t{2}, "one, or one and a mask", "(inputs, targets) or (inputs, (targets, mask))")
          : std::tuple(size_t{1}, "one", "(inputs, targets); --ignore-index is the target that does not count");
  if (found > most || (found == 0 && most > 0)) {
    throw Error(ErrorKind::StructureMismatch,
                c10::str("a batch has ", found, " tensors of targets, --loss ", o.loss, " takes ", takes), "",
                c10::str(remedy, found == 0 ? "; --loss output where the model returns its loss" : ""));
  }
  if (found < 2) return;
  const at::Tensor &targets = batch.targets[0], &mask = batch.targets[1];
  if (mask.sizes() != targets.sizes() || mask.ne(0).logical_and(mask.ne(1)).any().item<bool>()) {
    throw Error(ErrorKind::TensorMismatch,
                "a batch's mask is " + type_text(mask) + ", its targets are " + type_text(targets), "",
                "0 and 1, or false and true, of the targets' shape");
  }
}

}  // namespace

Parts cut_batch(const TrainOptions& o, const Batch& batch, int64_t parts) {
  check_batch(o, batch);
  Parts cut;
  const auto num = static_cast<int>(parts);
  cut.inputs = split_batch(batch.inputs, {}, num).inputs;
  cut.targets = batch.targets.empty() ? std::vector<Tensors>(parts) : split_batch(batch.targets, {}, num).inputs;
  cut.first_rows = {0};
  for (size_t i = 0; i < cut.inputs.size(); ++i) {
    cut.counts.push_back(count_of(o, cut.inputs[i], cut.targets[i]));
    cut.first_rows.push_back(cut.first_rows.back() + cut.inputs[i].at(0).size(0));
  }
  return cut;
}

}  // namespace plumb
