#include "plumb/training/generate.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cmath>

#include "plumb/training/data/samples.h"
#include "plumb/training/step/evaluate.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

int64_t draw(at::Tensor logits, const GenerateOptions& options, at::Generator& generator) {
  if (!at::isfinite(logits).all().item<bool>()) {
    throw Error(ErrorKind::Numerics, "the model's logits are no numbers", "", "plumb track to see where they arise");
  }
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  logits = logits.to(at::kDouble) / options.temperature;
  if (options.top_k > 0 && options.top_k < logits.size(0)) {
    const at::Tensor least = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < least, -INFINITY);
  }
  // In double, on one draw: the same on every machine but for ties of rounding.
  const at::Tensor sums = at::cumsum(at::softmax(logits, 0), 0);
  const double at = at::rand({}, generator, at::kDouble).item<double>() * sums[-1].item<double>();
  return at::searchsorted(sums, at, /*out_int32=*/false, /*right=*/true).clamp_max(sums.size(0) - 1).item<int64_t>();
}

}  // namespace

std::vector<int64_t> generate(GraphModule& module, std::vector<int64_t> prompt, const GenerateOptions& options,
                              const std::function<void(int64_t token)>& drawn) {
  const TensorMeta ids = first_input(module);
  if (module.graph().placeholders().size() != 1 || ids.sizes.size() != 2 || ids.dtype != at::kLong ||
      ids.sizes[1] < 1) {
    throw UsageError("FILE: sampling needs a model of one input, the ids, i64[batch, length]", "a token model's file");
  }
  if (options.tokens < 0 || !(options.temperature >= 0 && options.temperature <= 1e6) || options.top_k < 0) {
    throw UsageError(c10::str("sampling of ", options.tokens, " tokens at the temperature ", options.temperature,
                              " from the likeliest ", options.top_k),
                     "numbers from 0 on, a temperature of 1e6 at most");
  }
  if (prompt.empty()) prompt.push_back(0);
  const auto runs = evaluation_graph(module);
  const int64_t length = ids.sizes[1];
  at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(options.seed));
  at::NoGradGuard no_grad;
  std::vector<int64_t> text = std::move(prompt), made;
  for (int64_t i = 0; i < options.tokens; ++i) {
    const auto there = std::min<int64_t>(length, static_cast<int64_t>(text.size()));
    at::Tensor input = at::zeros({ids.sizes[0], length}, at::kLong);
    input[0].narrow(0, 0, there).copy_(at::tensor(std::vector<int64_t>(text.end() - there, text.end()), at::kLong));
    const std::vector<c10::IValue> outputs = runs->run({input});
    const at::Tensor logits = outputs.at(0).isTensor() ? outputs[0].toTensor() : at::Tensor();
    if (!logits.defined() || logits.dim() != 3 || logits.size(1) != length) {
      throw UsageError("FILE: sampling needs logits, [batch, length, classes], as the first output",
                       "a token model's file");
    }
    text.push_back(draw(logits[0][there - 1], options, generator));
    made.push_back(text.back());
    if (drawn) drawn(text.back());
  }
  return made;
}

}  // namespace plumb
