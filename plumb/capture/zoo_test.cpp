#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plumb/capture/capture.h"
#include "tests/gpt_graph.h"
#include "tests/test_device.h"
#include "tests/zoo.h"

namespace plumb {
namespace {

using at::Tensor;

std::vector<Tensor> tensors_of(const c10::IValue& v) {
  std::vector<Tensor> found;
  for (const auto& leaf : flatten(v, nullptr)) {
    if (leaf.isTensor()) found.push_back(leaf.toTensor());
  }
  return found;
}

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << what << " " << i;
    if (a[i].defined()) EXPECT_TRUE(at::equal(a[i], b[i])) << what << " " << i;
  }
}

struct Ran {
  std::vector<Tensor> outputs, input_grads, grads, buffers;
};

// Runs the module and a backward of every output with fixed weights. Returns everything that can differ.
Ran run_all(torch::nn::Module& module, const std::function<c10::IValue(const std::vector<Tensor>&)>& call,
            const std::vector<Tensor>& inputs) {
  Ran ran;
  std::vector<Tensor> leaves;
  for (const Tensor& t : inputs) leaves.push_back(t.is_floating_point() ? t.detach().clone().requires_grad_() : t);
  module.zero_grad();
  torch::manual_seed(7);
  ran.outputs = tensors_of(call(leaves));
  Tensor loss;
  torch::manual_seed(8);
  for (const Tensor& y : ran.outputs) {
    if (!y.requires_grad()) continue;
    Tensor term = (y * torch::randn_like(y)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
  for (const Tensor& t : leaves) ran.input_grads.push_back(t.grad());
  for (const auto& p : module.named_parameters())
    ran.grads.push_back(p.value().grad().defined() ? p.value().grad().clone() : Tensor());
  for (const auto& b : module.named_buffers()) ran.buffers.push_back(b.value().clone());
  return ran;
}

// Captured with verify, replayed, held against eager: outputs, all gradients, buffers; and the model is as before.
template <typename Model, typename... Inputs>
std::shared_ptr<GraphModule> check(Model model, const Inputs&... inputs) {
  auto& module = *model;
  move_there(module);
  std::vector<Tensor> before;
  for (const auto& p : module.named_parameters()) before.push_back(p.value().detach().clone());
  for (const auto& b : module.named_buffers()) before.push_back(b.value().clone());
  const std::vector<Tensor> buffers_before(before.end() - static_cast<std::ptrdiff_t>(module.named_buffers().size()),
                                           before.end());
  Tensor rng = at::globalContext().defaultGenerator(at::kCPU).get_state();
  CaptureOptions options;
  options.verify = true;
  auto graph = capture(options, model, there(inputs)...);
  EXPECT_TRUE(at::equal(rng, at::globalContext().defaultGenerator(at::kCPU).get_state()));
  std::vector<Tensor> after;
  for (const auto& p : module.named_parameters()) {
    after.push_back(p.value().detach());
    EXPECT_FALSE(p.value().grad().defined());
  }
  for (const auto& b : module.named_buffers()) after.push_back(b.value());
  expect_same(before, after, "state after capture");
  graph->lint();
  EXPECT_EQ(to_string(parse_graph(to_string(graph->graph()))), to_string(graph->graph()));

  const std::vector<Tensor> in{there(inputs)...};
  auto restore = [&] {
    torch::NoGradGuard guard;
    size_t i = 0;
    for (auto& b : module.named_buffers()) b.value().copy_(buffers_before[i++]);
  };
  Ran eager = run_all(
      module,
      [&](const std::vector<Tensor>& x) {
        return [&]<size_t... I>(std::index_sequence<I...>) {
          return capture_detail::to_ivalue(model->forward(x[I]...));
        }(std::index_sequence_for<Inputs...>{});
      },
      in);
  restore();
  Ran replay = run_all(
      module,
      [&](const std::vector<Tensor>& x) { return graph->forward(std::vector<c10::IValue>(x.begin(), x.end())); }, in);
  restore();
  expect_same(eager.outputs, replay.outputs, "output");
  expect_same(eager.input_grads, replay.input_grads, "input gradient");
  expect_same(eager.grads, replay.grads, "gradient");
  expect_same(eager.buffers, replay.buffers, "buffer");
  return graph;
}

Tensor ids(int64_t b, int64_t t, int64_t vocab) { return torch::randint(vocab, {b, t}, at::kLong); }

TEST(Zoo, GPTUntied) {
  torch::manual_seed(0);
  auto g = check(zoo::GPT(50, 16, 2, 4, 32, false), ids(2, 8, 50));
  EXPECT_TRUE(g->named_parameters().contains("blocks.1.qkv.weight"));
}
TEST(Zoo, GPTTied) {
  torch::manual_seed(0);
  auto g = check(zoo::GPT(50, 16, 2, 4, 32, true), ids(2, 8, 50));
  EXPECT_TRUE(g->state().get("tok.weight").tensor.is_same(g->state().get("head.weight").tensor));
}
TEST(Zoo, TheGPTAsATextIsTheSameModel) {
  torch::manual_seed(0);
  for (const bool tied : {false, true}) {
    testing_models::GptConfig config{.tied = tied};
    example::GPT model(
        example::GPTOptions{config.vocabulary, config.width, config.layers, config.heads, config.length, tied});
    move_there(*model);
    auto text = testing_models::gpt(config);
    const auto parameters = model->named_parameters();
    ASSERT_EQ(text->state().size(), parameters.size());
    for (const auto& item : parameters) {
      at::NoGradGuard no_grad;
      text->state().get(item.key()).tensor.copy_(item.value());
    }
    const auto inputs = testing_models::gpt_inputs(config);
    const at::Tensor loss = text->run(inputs)[0].toTensor();
    const at::Tensor wanted = model->forward(inputs[0].toTensor(), inputs[1].toTensor());
    // torch::nn::Linear multiplies by the transposed weight and adds the bias after that; aten::linear does both.
    EXPECT_TRUE(at::allclose(loss, wanted, 1e-5)) << loss.item<double>() << " " << wanted.item<double>();
    loss.backward();
    wanted.backward();
    for (const auto& item : parameters) {
      const at::Tensor got = text->state().get(item.key()).tensor.grad();
      EXPECT_TRUE(at::allclose(got, item.value().grad(), 1e-4, 1e-7)) << item.key();
    }
  }
}

TEST(Zoo, GPTWithDropout) {
  torch::manual_seed(0);
  check(zoo::GPT(50, 16, 2, 4, 32, false, 0.2), ids(2, 8, 50));
}
TEST(Zoo, TransformerEncoderLayer) {
  torch::manual_seed(0);
  check(zoo::EncoderLayer(0.1), torch::randn({5, 2, 16}));
}
TEST(Zoo, TransformerEncoderLayerEval) {
  torch::manual_seed(0);
  zoo::EncoderLayer m(0.1);
  m->eval();
  check(m, torch::randn({5, 2, 16}));
}
TEST(Zoo, MultiheadAttention) {
  torch::manual_seed(0);
  check(zoo::Attention(), torch::randn({5, 2, 16}), torch::randn({7, 2, 16}));
}
TEST(Zoo, LlamaBlock) {
  torch::manual_seed(0);
  check(zoo::LlamaBlock(16, 4), torch::randn({2, 6, 16}));
}
TEST(Zoo, ViT) {
  torch::manual_seed(0);
  check(zoo::ViT(), torch::randn({2, 3, 16, 16}));
}
TEST(Zoo, ConvNetWithBatchNormTraining) {
  torch::manual_seed(0);
  check(zoo::ConvNet(), torch::randn({2, 3, 12, 12}));
}
TEST(Zoo, ConvNetWithBatchNormEval) {
  torch::manual_seed(0);
  zoo::ConvNet m;
  m->eval();
  check(m, torch::randn({2, 3, 12, 12}));
}
TEST(Zoo, UNet) {
  torch::manual_seed(0);
  check(zoo::UNet(), torch::randn({2, 2, 8, 8}));
}
TEST(Zoo, LSTM) {
  torch::manual_seed(0);
  check(zoo::Recurrent(false), torch::randn({2, 5, 6}));
}
TEST(Zoo, GRU) {
  torch::manual_seed(0);
  check(zoo::Recurrent(true), torch::randn({2, 5, 6}));
}
TEST(Zoo, MixtureOfExpertsWithDictOutput) {
  torch::manual_seed(0);
  check(zoo::MoE(), torch::randn({3, 8}));
}
TEST(Zoo, InPlaceAndViewWrites) {
  torch::manual_seed(0);
  check(zoo::InPlace(), torch::randn({3, 6}));
}
TEST(Zoo, SharedModuleCalledTwice) {
  torch::manual_seed(0);
  check(zoo::Shared(), torch::randn({3, 5}), torch::randn({2, 5}));
}
TEST(Zoo, Autocast) {
  torch::manual_seed(0);
  check(zoo::Autocast(), torch::randn({3, 8}));
}
TEST(Zoo, BFloat16) {
  torch::manual_seed(0);
  zoo::GPT m(50, 16, 1, 4, 32, false);
  m->to(at::kBFloat16);
  check(m, ids(2, 8, 50));
}

}  // namespace
}  // namespace plumb
