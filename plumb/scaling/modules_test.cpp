#include "plumb/scaling/modules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/scaling/optim.h"
#include "tests/test_device.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;

double std_of(const at::Tensor& t) { return t.detach().std().item<double>(); }

struct Modules : ::testing::Test {
  void SetUp() override { torch::manual_seed(1472); }
};

TEST_F(Modules, ATagGoesWithTheTensorAndNotWithItsMemory) {
  auto p = make_parameter(torch::zeros({3}), MupType::Norm, 4);
  EXPECT_TRUE(p.requires_grad());
  auto handle = p;
  EXPECT_EQ(parameter_data(handle), (ParameterData{MupType::Norm, 4}));
  EXPECT_EQ(parameter_data(p.detach()), std::nullopt);
  EXPECT_EQ(parameter_data(torch::zeros({3})), std::nullopt);
}

TEST_F(Modules, TagsOfTensorsThatAreGoneAreNeverSeenAgain) {
  for (int i = 0; i < 1000; ++i) {
    auto fresh = torch::zeros({1});
    ASSERT_EQ(parameter_data(fresh), std::nullopt);
    tag(fresh, {MupType::Bias, std::nullopt});
  }
}

TEST_F(Modules, LearningRatesFollowTypeFanInAndDepth) {
  const std::vector<int64_t> sizes{4, 16};
  using optim::lr_scale_func_adam;
  EXPECT_DOUBLE_EQ(lr_scale_func_adam({MupType::Weight, std::nullopt}, sizes), 0.25);
  EXPECT_DOUBLE_EQ(lr_scale_func_adam({MupType::Weight, 9}, sizes), 0.25 / 3);
  EXPECT_DOUBLE_EQ(lr_scale_func_adam({MupType::Output, std::nullopt}, sizes), 1);
  const std::vector<int64_t> kernel{8, 4, 2, 2}, shift{16};
  EXPECT_DOUBLE_EQ(lr_scale_func_adam({MupType::Weight, std::nullopt}, kernel), 0.25);
  auto constrained = optim::lr_scale_func_sgd("to_output_scale");
  EXPECT_DOUBLE_EQ(constrained({MupType::Weight, std::nullopt}, sizes), 4);
  EXPECT_DOUBLE_EQ(constrained({MupType::Bias, std::nullopt}, shift), 16);
  EXPECT_DOUBLE_EQ(constrained({MupType::Output, 4}, sizes), 0.5);
  EXPECT_THROW(optim::lr_scale_func_sgd("gmean"), Error);
}

TEST_F(Modules, LearningRatesHavePythonsBits) {
  const std::vector<int64_t> sizes{8, 24}, empty{8, 0};
  EXPECT_EQ(optim::lr_scale_func_adam({MupType::Weight, std::nullopt}, sizes), 0x1.a20bd700c2c3ep-3);  // 24**-0.5
  EXPECT_EQ(optim::lr_scale_func_adam({MupType::Weight, 3}, sizes), 0x1.e2b7dddfefa66p-4);  // 3**-0.5 * 24**-0.5
  EXPECT_EQ(optim::lr_scale_func_adam({MupType::Weight, std::nullopt}, empty), 1);
}

TEST_F(Modules, IndependentWeightDecayDoesNotDependOnTheRate) {
  auto p = make_parameter(torch::zeros({4, 16}), MupType::Weight);
  auto groups = optim::scaled_parameters(optim::with_names({p}), optim::lr_scale_func_adam,
                                         torch::optim::AdamWOptions(0.1).weight_decay(0.001));
  ASSERT_EQ(groups.size(), 1);
  const auto& own = static_cast<const torch::optim::AdamWOptions&>(groups[0].options());
  EXPECT_DOUBLE_EQ(own.lr(), 0.025);
  EXPECT_DOUBLE_EQ(own.lr() * own.weight_decay(), 0.001);
}

TEST_F(Modules, UntaggedParametersAreRefusedByNameUnlessAllowed) {
  torch::nn::Linear plain(3, 4);
  optim::NamedParameters named;
  for (const auto& item : plain->named_parameters()) named.emplace_back(item.key(), item.value());
  try {
    optim::Adam refused(named, torch::optim::AdamOptions(0.1));
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("Parameter weight, shape [4, 3]"));
  }
  optim::ScaledOptions allow;
  allow.allow_non_unit_scaling_params = true;
  EXPECT_EQ(optim::Adam(named, torch::optim::AdamOptions(0.1), allow).param_groups().size(), 2);
}

TEST_F(Modules, AComplexParameterIsRefusedByAdamAndSteppedBySgd) {
  const optim::NamedParameters named = {{"filter", at::zeros({2}, at::kComplexFloat)}};
  const optim::ScaledOptions allow{.allow_non_unit_scaling_params = true};
  try {
    optim::AdamW refused(named, torch::optim::AdamWOptions(0.1), allow);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("Parameter filter is complex"));
  }
  EXPECT_EQ(optim::SGD(named, torch::optim::SGDOptions(0.1), std::nullopt, allow).param_groups().size(), 1);
}

TEST_F(Modules, SizesThatNoLayerHasAreNamed) {
  const auto refused = [](const auto& make) -> std::string {
    try {
      make();
    } catch (const Error& e) {
      return e.kind() == ErrorKind::InvalidArgument ? e.message() : e.what();
    }
    return "no error";
  };
  nn::Conv1dOptions conv(4, 4, 0);
  nn::EmbeddingOptions table(3, 4);
  table.padding_idx = 3;
  nn::TransformerStackOptions stack(2, 16, 2, true);
  stack.residual_scaling = nullptr;
  EXPECT_EQ(refused([] { nn::Linear(-1, 4); }), "Linear: in_features is -1.");
  EXPECT_EQ(refused([] { nn::LinearReadout(4, -1); }), "LinearReadout: out_features is -1.");
  EXPECT_EQ(refused([&] { nn::Conv1d{conv}; }), "Conv1d: kernel_size is 0.");
  EXPECT_EQ(refused([] { nn::LayerNorm{nn::LayerNormOptions({-2})}; }), "LayerNorm: normalized_shape is -2.");
  EXPECT_EQ(refused([] { nn::Embedding(-3, 4); }), "Embedding: num_embeddings is -3.");
  EXPECT_EQ(refused([&] { nn::Embedding{table}; }), "Embedding: padding_idx 3 is none of the table's 3 rows.");
  EXPECT_EQ(refused([] { nn::MLP(16, INT64_MAX); }), "MLP: expansion_factor is 9223372036854775807.");
  EXPECT_EQ(refused([] { nn::MHSA{nn::MHSAOptions(-4, 2, true)}; }), "MHSA: hidden_size is -4.");
  EXPECT_EQ(refused([&] { nn::TransformerStack{stack}; }), "TransformerStack: residual_scaling is empty.");
  EXPECT_EQ(refused([] { nn::TransformerStack{nn::TransformerStackOptions(-1, 16, 2, true)}; }),
            "TransformerStack: layers is -1.");
  EXPECT_EQ(refused([] { nn::TransformerDecoder{nn::TransformerDecoderOptions(16, 10, -1, 2)}; }),
            "TransformerStack: layers is -1.");
  EXPECT_EQ(nn::TransformerStack(nn::TransformerStackOptions(0, 16, 2, true))->layers.size(), 0u);
}

TEST_F(Modules, AnOptimizerHasATiedParameterOnce) {
  nn::Linear layer(3, 4);
  const optim::NamedParameters names = {{"wte", layer->weight}, {"head", layer->weight}};
  const optim::SGD optimizer(names, torch::optim::SGDOptions(0.5));
  ASSERT_EQ(optimizer.param_groups().size(), 1u);
}

TEST_F(Modules, EveryOptimizerLowersALoss) {
  auto x = torch::randn({10, 16}), y = torch::randn({10, 25});
  auto lowers = [&](auto make) {
    nn::Linear model(16, 25);
    auto optimizer = make(model->parameters());
    auto before = functional::mse_loss(model(x), y);
    before.backward();
    optimizer.step();
    return functional::mse_loss(model(x), y).template item<double>() < before.template item<double>();
  };
  EXPECT_TRUE(lowers([](auto p) { return optim::SGD(p, torch::optim::SGDOptions(0.01)); }));
  EXPECT_TRUE(lowers([](auto p) { return optim::Adam(p, torch::optim::AdamOptions(0.01)); }));
  EXPECT_TRUE(lowers([](auto p) { return optim::AdamW(p, torch::optim::AdamWOptions(0.01)); }));
}

TEST_F(Modules, OptimizersOnADeviceHaveTheCpusBits) {
  const auto trained = [](auto make, bool on_device) {
    torch::manual_seed(5);
    nn::Linear model(16, 25);
    at::Tensor x = torch::randn({10, 16}), y = torch::randn({10, 25});
    if (on_device) {
      move_there(*model);
      x = there(x), y = there(y);
    }
    auto optimizer = make(model->parameters());
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      functional::mse_loss(model(x), y).backward();
      optimizer.step();
    }
    std::vector<at::Tensor> result;
    for (const auto& p : model->parameters()) {
      EXPECT_EQ(p.device().type(), on_device ? test_device().type() : at::kCPU);
      result.push_back(p.detach().cpu());
    }
    return result;
  };
  const auto same = [&](auto make) {
    const auto found = trained(make, true), expected = trained(make, false);
    bool same = !found.empty();
    for (size_t i = 0; i < found.size(); ++i)
      same &= test_device().is_cuda() ? at::allclose(found[i], expected[i]) : at::equal(found[i], expected[i]);
    return same;
  };
  EXPECT_TRUE(same([](auto p) { return optim::SGD(p, torch::optim::SGDOptions(0.01).momentum(0.9).nesterov(true)); }));
  EXPECT_TRUE(same([](auto p) { return optim::Adam(p, torch::optim::AdamOptions(0.01).amsgrad(true)); }));
  EXPECT_TRUE(same([](auto p) { return optim::AdamW(p, torch::optim::AdamWOptions(0.01).weight_decay(0.1)); }));
}

TEST_F(Modules, StacksTellTheirDepthOnce) {
  nn::DepthSequential stack(nn::Linear(8, 8), nn::GELU(), nn::Linear(8, 8));
  for (const auto& p : stack->parameters()) EXPECT_EQ(parameter_data(p)->scaling_depth, 3);
  EXPECT_EQ(stack->forward(torch::randn({2, 8})).sizes(), at::IntArrayRef({2, 8}));
  EXPECT_THROW(nn::DepthModuleList list(stack), Error);
  EXPECT_THROW(nn::DepthSequential(torch::nn::Linear(8, 8)), Error);
}

TEST_F(Modules, AClonedModuleIsTaggedAndItsDepthCanBeCopied) {
  nn::TransformerDecoder model(nn::TransformerDecoderOptions(16, 32, 2, 2));
  auto copy = std::dynamic_pointer_cast<nn::TransformerDecoderImpl>(model->clone());
  nn::copy_tags(*model, *copy);
  auto ids = torch::randint(32, {2, 5});
  EXPECT_TRUE(torch::equal(model->forward(ids), copy->forward(ids)));
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(parameter_data(copy->named_parameters()[item.key()]), parameter_data(item.value())) << item.key();
  }
}

TEST_F(Modules, ATransformerStackHasNumberedLayersThatKnowTheirDepth) {
  nn::TransformerStack stack(nn::TransformerStackOptions(3, 16, 2, /*is_causal=*/true));
  EXPECT_TRUE(stack->named_parameters().contains("2.mhsa.linear_qkv.weight"));
  for (const auto& p : stack->parameters()) EXPECT_EQ(parameter_data(p)->scaling_depth, 3);
  auto x = torch::randn({64, 8, 16});
  const at::Tensor y = stack->forward(x);
  EXPECT_NEAR(std_of(y), 1, 0.1);
  auto copy = std::dynamic_pointer_cast<nn::TransformerStackImpl>(stack->clone());
  EXPECT_TRUE(torch::equal(copy->forward(x), y));
  EXPECT_NE(copy->parameters()[0].data_ptr(), stack->parameters()[0].data_ptr());
}

TEST_F(Modules, LayersKeepUnitScale) {
  auto x = torch::randn({64, 32, 64}).requires_grad_();
  auto check = [&](const at::Tensor& y, double tolerance) { EXPECT_NEAR(std_of(y), 1, tolerance); };
  check(nn::Linear(64, 128)->forward(x), 0.1);
  check(nn::GELU()->forward(x), 0.1);
  check(nn::SiLU()->forward(x), 0.1);
  check(nn::Dropout(0.3)->forward(x), 0.1);
  check(nn::RMSNorm(std::vector<int64_t>{64})->forward(x), 0.1);
  check(nn::LayerNorm(std::vector<int64_t>{64})->forward(x), 0.1);
  check(nn::MLP(64)->forward(x), 0.2);
  check(nn::TransformerLayer(nn::TransformerLayerOptions(64, 8, 0.1, 1.0, false))->forward(x), 0.1);
  EXPECT_NEAR(std_of(nn::LinearReadout(64, 128)->forward(x)), 1 / 8., 0.02);
}

TEST_F(Modules, EvaluationDropsNothing) {
  nn::TransformerLayerOptions options(16, 2, 0.5, 0.5, true);
  options.dropout_p = 0.5;
  nn::TransformerLayer layer(options);
  layer->eval();
  auto x = torch::randn({2, 4, 16});
  EXPECT_TRUE(torch::equal(layer(x), layer(x)));
}

TEST_F(Modules, ADecodersGradientsHaveUnitScaleWithinAFactor) {
  nn::TransformerDecoder model(nn::TransformerDecoderOptions(64, 512, 2, 4));
  auto loss = model->loss(torch::randint(512, {64, 32}));
  EXPECT_NEAR(loss.item<double>(), std::log(512.), 1);
  loss.backward();
  for (const auto& item : model->named_parameters()) {
    EXPECT_GT(std_of(item.value().grad()), 0.2) << item.key();
    EXPECT_LT(std_of(item.value().grad()), 5) << item.key();
  }
}

}  // namespace
}  // namespace plumb
