// The zoo through files: captured, saved, loaded, run; outputs, gradients and buffers against the model itself.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "plumb/capture/capture.h"
#include "plumb/capture/custom_function.h"
#include "plumb/exported/exported.h"
#include "tests/message_of.h"
#include "tests/test_device.h"
#include "tests/zoo.h"

namespace plumb {
namespace {

using at::Tensor;
using Call = std::function<c10::IValue(const std::vector<Tensor>&)>;

// Outputs, gradients of inputs, gradients by name, buffers by name.
std::map<std::string, Tensor> everything(torch::nn::Module& module, const Call& call,
                                         const std::vector<Tensor>& inputs) {
  std::map<std::string, Tensor> seen;
  std::vector<Tensor> leaves;
  for (const Tensor& t : inputs) leaves.push_back(t.is_floating_point() ? t.detach().clone().requires_grad_() : t);
  module.zero_grad();
  torch::manual_seed(7);
  const auto outputs = flatten(call(leaves), nullptr);
  torch::manual_seed(8);
  Tensor loss;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor& y = outputs[i].toTensor();
    seen["output " + std::to_string(i)] = y.detach().clone();
    if (!y.requires_grad()) continue;
    const Tensor term = (y * torch::randn_like(y)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  loss.backward();
  for (size_t i = 0; i < leaves.size(); ++i) seen["gradient of input " + std::to_string(i)] = leaves[i].grad();
  for (const auto& p : module.named_parameters()) {
    if (p.value().grad().defined()) seen["gradient of " + p.key()] = p.value().grad().clone();
  }
  for (const auto& b : module.named_buffers()) seen["buffer " + b.key()] = b.value().clone();
  return seen;
}

// From the same state: the model as it is, and its graph after a file.
template <typename Model, typename... Inputs>
void there_and_back(Model model, const Inputs&... inputs) {
  at::set_num_threads(1);
  move_there(*model);
  const std::vector<Tensor> in{there(inputs)...};
  auto graph = capture(model, there(inputs)...);
  const auto file = std::filesystem::temp_directory_path() / ("plumb_zoo_" + std::to_string(getpid()) + ".pt2");
  save_pt2(*graph, file.string());
  const ExportedProgram program = load_pt2(file.string());
  std::filesystem::remove(file);
  const auto eager = everything(
      *model,
      [&](const std::vector<Tensor>& x) {
        return [&]<size_t... I>(std::index_sequence<I...>) {
          return capture_detail::to_ivalue(model->forward(x[I]...));
        }(std::index_sequence_for<Inputs...>{});
      },
      in);
  const auto back = everything(
      *program.module,
      [&](const std::vector<Tensor>& x) {
        return program.module->forward(std::vector<c10::IValue>(x.begin(), x.end()));
      },
      in);
  for (const auto& [what, want] : eager) {
    ASSERT_TRUE(back.contains(what)) << what << " is missing";
    const Tensor& got = back.at(what);
    ASSERT_EQ(got.defined(), want.defined()) << what;
    if (want.defined()) {
      EXPECT_TRUE(at::equal(got, want)) << what;
    }
  }
}

template <typename Model>
Model evaluating(Model model) {
  model->eval();
  return model;
}

Tensor ids() { return torch::randint(50, {2, 8}, at::kLong); }

class ZooFiles : public ::testing::Test {
 protected:
  void SetUp() override { torch::manual_seed(0); }
};

TEST_F(ZooFiles, GPTUntied) { there_and_back(zoo::GPT(50, 16, 2, 4, 32, false), ids()); }
TEST_F(ZooFiles, GPTTied) { there_and_back(zoo::GPT(50, 16, 2, 4, 32, true), ids()); }
TEST_F(ZooFiles, GPTWithDropout) { there_and_back(zoo::GPT(50, 16, 2, 4, 32, false, 0.2), ids()); }
TEST_F(ZooFiles, TransformerEncoderLayer) { there_and_back(zoo::EncoderLayer(0.1), torch::randn({5, 2, 16})); }
TEST_F(ZooFiles, TransformerEncoderLayerEval) {
  there_and_back(evaluating(zoo::EncoderLayer(0.1)), torch::randn({5, 2, 16}));
}
TEST_F(ZooFiles, MultiheadAttention) {
  there_and_back(zoo::Attention(), torch::randn({5, 2, 16}), torch::randn({7, 2, 16}));
}
TEST_F(ZooFiles, LlamaBlock) { there_and_back(zoo::LlamaBlock(16, 4), torch::randn({2, 6, 16})); }
TEST_F(ZooFiles, ViT) { there_and_back(zoo::ViT(), torch::randn({2, 3, 16, 16})); }
TEST_F(ZooFiles, ConvNetWithBatchNormTraining) { there_and_back(zoo::ConvNet(), torch::randn({2, 3, 12, 12})); }
TEST_F(ZooFiles, ConvNetWithBatchNormEval) { there_and_back(evaluating(zoo::ConvNet()), torch::randn({2, 3, 12, 12})); }
TEST_F(ZooFiles, UNet) { there_and_back(zoo::UNet(), torch::randn({2, 2, 8, 8})); }
TEST_F(ZooFiles, LSTM) { there_and_back(zoo::Recurrent(false), torch::randn({2, 5, 6})); }
TEST_F(ZooFiles, GRU) { there_and_back(zoo::Recurrent(true), torch::randn({2, 5, 6})); }
TEST_F(ZooFiles, MixtureOfExpertsWithDictOutput) { there_and_back(zoo::MoE(), torch::randn({3, 8})); }
TEST_F(ZooFiles, InPlaceAndViewWrites) { there_and_back(zoo::InPlace(), torch::randn({3, 6})); }
TEST_F(ZooFiles, SharedModuleCalledTwice) { there_and_back(zoo::Shared(), torch::randn({3, 5}), torch::randn({2, 5})); }
TEST_F(ZooFiles, Autocast) { there_and_back(zoo::Autocast(), torch::randn({3, 8})); }
TEST_F(ZooFiles, ANumberThatAModelWasCapturedWithIsHeldAgainstThatOfEveryRun) {
  zoo::Shared model;
  move_there(*model);
  const auto times = [&](const Tensor& x, double factor) { return model->fc(x) * factor; };
  const Tensor x = there(torch::randn({3, 5}));
  const std::string file = ::testing::TempDir() + "plumb_number_" + std::to_string(getpid()) + ".pt2";
  save_pt2(*capture_call(*model, times, {}, x, 2.5), file);
  auto loaded = load_pt2(file).module;
  std::filesystem::remove(file);
  EXPECT_TRUE(at::equal(loaded->run({x, 2.5})[0].toTensor(), times(x, 2.5)));
  EXPECT_THROW(loaded->run({x, 3.5}), Error);
}
TEST_F(ZooFiles, BFloat16) {
  zoo::GPT model(50, 16, 1, 4, 32, false);
  model->to(at::kBFloat16);
  there_and_back(model, ids());
}

TEST_F(ZooFiles, HoldNoCustomFunctionOfThisProcess) {
  torch::nn::Module none;
  const int64_t id = register_opaque([](const std::vector<Tensor>& in) { return std::vector{in[0] * 2}; }, "mine");
  const auto graph = capture_call(none, [&](Tensor x) { return call_opaque(id, {x})[0]; }, {}, torch::ones({2}));
  EXPECT_NE(message_of([&] { save_pt2(*graph, "/dev/null"); }).find("a custom autograd function of this process"),
            std::string::npos);
}

}  // namespace
}  // namespace plumb
