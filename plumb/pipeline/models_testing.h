// Small models, cut into stages, for this room's tests.
#pragma once

#include <torch/torch.h>

#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "tests/test_device.h"

namespace plumb {

struct TestStage : LambdaStage {
  using Run = std::function<Tensors(const Tensors&, const Microbatch&)>;
  using LambdaStage::LambdaStage;
  std::vector<NamedTensor> buffers;
  // For a stage that asks which microbatch it runs.
  Run run_microbatch;
  Tensors run(const Tensors& inputs, const Microbatch& microbatch) override {
    return run_microbatch ? run_microbatch(inputs, microbatch) : LambdaStage::run(inputs, microbatch);
  }
};

struct TestModel {
  PipeTable layout;
  std::function<std::shared_ptr<TestStage>(int stage)> make_stage;
  Loss loss;
  std::function<std::pair<Tensors, Tensors>(int step)> batch;  // inputs, targets
  std::optional<std::uint64_t> seed;
  // The whole model as one function, if the stages were cut from one: its parameters bear the same names.
  std::function<std::shared_ptr<TestStage>()> make_whole;
};

// Returns the launcher's group. Values on the test device go through the backend that there is for it. With the setting
// APART the ranks share no memory, as ranks on different hosts.
inline ProcessGroup test_group(std::chrono::milliseconds timeout) {
  GlooOptions options;
  options.timeout = timeout;
  options.share_memory = std::getenv("PLUMB_TEST_APART") == nullptr;
  if (!test_device().is_cpu()) options.device = c10::Device(test_device().type(), 0);
  return make_group_from_environment(options);
}

inline at::Tensor test_weight(std::uint64_t seed, at::IntArrayRef sizes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return (at::randn(sizes, generator) * 0.4).to(test_device()).requires_grad_(true);
}

inline at::Tensor test_data(std::uint64_t seed, at::IntArrayRef sizes) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(sizes, generator).to(test_device());
}

// Tokens to logits: places, a mask and the last shape are made of the input's sizes.
struct TestTokensImpl : torch::nn::Module {
  TestTokensImpl(int layers, int width) {
    table = register_parameter("table", test_weight(7, {11, width}));
    places = register_parameter("places", test_weight(8, {32, width}));
    for (int i = 0; i < layers; i++) {
      weights.push_back(register_parameter("layer" + std::to_string(i), test_weight(10 * i + 1, {width, width})));
    }
    head = register_parameter("head", test_weight(9, {11, width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = at::embedding(table, x) + at::embedding(places, at::arange(x.size(1), x.options()));
    for (const auto& w : weights) {
      const auto mask = at::ones({x.size(1), x.size(1)}, table.options()).triu(1) * -1e4;
      const auto scores = at::matmul(h, h.transpose(1, 2)) / static_cast<double>(x.size(1)) + mask;
      h = (h + at::gelu(at::linear(at::matmul(scores.softmax(-1), h), w))).reshape({-1, h.size(2)});
      h = h.view({x.size(0), x.size(1), -1});
    }
    return at::linear(h, head).view({x.size(0) * x.size(1), -1});
  }
  at::Tensor table, places, head;
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(TestTokens);

using TestForward = std::function<Tensors(const Tensors&)>;

inline std::shared_ptr<TestStage> test_stage(TestForward forward, std::vector<NamedTensor> parameters) {
  return std::make_shared<TestStage>(std::move(forward), std::move(parameters));
}

inline std::string test_layer(int stage, const char* parameter = "weight") {
  return "layers." + std::to_string(stage) + "." + parameter;
}

constexpr int kTestWidth = 6;

inline at::Tensor test_matrix(int stage) { return test_weight(10 * stage + 1, {kTestWidth, kTestWidth}); }

// Tokens and the ones behind them.
inline std::pair<Tensors, Tensors> test_tokens(int step, at::IntArrayRef sizes) {
  auto tokens = test_data(100 + step, sizes).mul(100).to(at::kLong).remainder(11).abs();
  return {{tokens}, {tokens.roll(1, 1)}};
}

inline void make_skip(TestModel& model, int num_stages) {
  model.layout.stages[0].outputs.resize(3);
  for (int s = 1; s < num_stages; s++) {
    model.layout.stages[s].inputs = {{{s - 1, 0}}, {{0, 1}}, {{0, 2}}};
    if (s == 1) model.layout.stages[s].inputs[0] = {{0, 0}};
  }
  model.make_stage = [](int s) {
    auto w = test_matrix(s);
    auto forward = [=](const Tensors& in) -> Tensors {
      auto h = at::tanh(at::linear(in[0], w));
      if (s == 0) return {h, at::sin(h) * 3, (h > 0).to(at::kLong)};
      return {h + in[1] * in[1] + at::cos(in[1]) * in[2]};  // the skipped value three times
    };
    return test_stage(forward, {{"blocks." + std::to_string(s) + ".weight", w}});
  };
}

inline void make_tied(TestModel& model, int num_stages) {
  model.make_stage = [=](int s) {
    const bool last = s == num_stages - 1;
    auto w = test_matrix(last ? 0 : s);
    auto forward = [=](const Tensors& in) -> Tensors { return {at::tanh(at::linear(in[0], w))}; };
    return test_stage(forward, {{last ? "head.weight" : test_layer(s), w}});
  };
  if (num_stages > 1) model.layout.replicated = {{{0, "layers.0.weight"}, {num_stages - 1, "head.weight"}}};
}

inline void make_norm(TestModel& model) {
  model.make_stage = [](int s) {
    auto w = test_matrix(s), g = test_weight(10 * s + 2, {kTestWidth});
    auto mean = at::zeros({kTestWidth}, test_device()), var = at::ones({kTestWidth}, test_device());
    auto forward = [=](const Tensors& in) -> Tensors {
      return {at::batch_norm(at::linear(in[0], w), g, {}, mean, var, true, 0.1, 1e-5, false)};
    };
    auto stage = test_stage(forward, {{test_layer(s), w}, {test_layer(s, "gain"), g}});
    stage->buffers = {{test_layer(s, "running_mean"), mean}, {test_layer(s, "running_var"), var}};
    return stage;
  };
}

inline void make_tokens(TestModel& model, int num_stages) {
  model.batch = [](int step) { return test_tokens(step, {8, 5}); };
  model.loss = [](const Tensors& out, const Tensors& target) {
    return at::cross_entropy_loss(out[0].reshape({-1, out[0].size(-1)}), target[0].reshape({-1}));
  };
  model.make_stage = [=](int s) {
    auto w = test_matrix(s), table = test_weight(7, {11, kTestWidth}), head = test_weight(8, {11, kTestWidth});
    const bool first = s == 0, last = s == num_stages - 1;
    auto forward = [=](const Tensors& in) -> Tensors {
      auto x = first ? at::embedding(table, in[0]) : in[0].transpose(1, 2);
      x = x + at::gelu(at::linear(x, w));
      return {last ? at::linear(x, head) : x.transpose(1, 2)};  // not contiguous at the boundary
    };
    std::vector<NamedTensor> parameters{{test_layer(s), w}};
    if (first) parameters.push_back({"embedding.weight", table});
    if (last) parameters.push_back({"head.weight", head});
    return test_stage(forward, parameters);
  };
}

inline void make_cut(TestModel& model, int num_stages) {
  model.batch = [](int step) { return test_tokens(step, {11 + 6 * step, 4 + step}); };
  model.loss = [](const Tensors& out, const Tensors& target) {
    return at::cross_entropy_loss(out[0], target[0].reshape({-1}));
  };
  struct Cut {
    TestTokens model{nullptr};
    std::shared_ptr<Pipe> pipe;
    std::shared_ptr<StageSpecializer> specializer;
  };
  auto cut = std::make_shared<Cut>();
  cut->model = TestTokens(num_stages, kTestWidth);
  const auto tokens = at::zeros({2, 4}, at::device(test_device()).dtype(at::kLong));
  SplitOptions options;
  for (int s = 1; s < num_stages; s++) {
    options.points.emplace_back("layer" + std::to_string(s), SplitPoint::Beginning);
  }
  auto graph = capture(cut->model, tokens);
  cut->pipe = pipeline(*graph, options);
  cut->specializer = specialize_on_sizes(*cut->pipe, cut->model, options, tokens);
  model.layout = cut->pipe->table();
  model.make_stage = [=](int s) {
    auto stage = std::make_shared<GraphStage>(cut->pipe->stage(s), cut->pipe->table(), s, cut->specializer);
    auto made = test_stage([=](const Tensors& in) { return stage->forward(in); }, stage->parameters());
    made->run_microbatch = [=](const Tensors& in, const Microbatch& m) { return stage->run(in, m); };
    return made;
  };
  model.make_whole = [=] {
    TestTokens whole(num_stages, kTestWidth);
    std::vector<NamedTensor> parameters;
    for (const auto& p : whole->named_parameters()) parameters.push_back({p.key(), p.value()});
    return test_stage([whole](const Tensors& in) mutable -> Tensors { return {whole->forward(in[0])}; }, parameters);
  };
}

inline void make_in_place(TestModel& model, bool half) {
  model.make_stage = [=](int s) {
    auto w = test_matrix(s);
    auto forward = [=](const Tensors& in) -> Tensors {
      auto x = s == 0 ? in[0] * 1.0 : in[0].mul_(1.5);
      auto y = at::linear(x.to(at::kFloat), w).sin();
      return {half ? y.to(at::kBFloat16) : y};
    };
    return test_stage(forward, {{test_layer(s), w}});
  };
}

inline void make_scribbling(TestModel& model, int num_stages) {
  model.make_stage = [=](int s) {
    auto w = test_matrix(s);
    auto last = std::make_shared<at::Tensor>();
    auto forward = [=](const Tensors& in) -> Tensors {
      if (last->defined()) last->zero_();  // what another stage has been sent
      auto y = at::sin(at::linear(in[0], w));
      if (s + 1 < num_stages) *last = y.detach();
      return {y};
    };
    return test_stage(forward, {{test_layer(s), w}});
  };
}

// "mlp": a chain. "ragged": the same with a batch that does not divide and another size at every step. "skip": an early
// value used by every later stage, more than once, and an integer mask beside it. "tied": the first stage's weight
// again in the last. "cut": a module cut by pipeline() for one size, with another batch, which does not divide, and
// another length at every step. "norm": batch norm in training mode. "tokens": integers into the first stage, an
// embedding, a transposed boundary. "inplace": every stage begins with an in-place operator. "half": bfloat16 between
// the stages. "scribbling": stages write to what they have sent.
inline TestModel test_model(const std::string& name, int num_stages) {
  TestModel model;
  model.layout = PipeTable::chain(num_stages);
  model.loss = [](const Tensors& out, const Tensors& target) { return at::mse_loss(out[0].to(at::kFloat), target[0]); };
  const bool ragged = name == "ragged";
  model.batch = [=](int step) {
    const int rows = ragged ? 11 + 6 * step : 8;
    return std::pair<Tensors, Tensors>{{test_data(100 + step, {rows, kTestWidth})},
                                       {test_data(200 + step, {rows, kTestWidth})}};
  };
  model.make_stage = [](int s) {
    auto w = test_matrix(s), b = test_weight(10 * s + 2, {kTestWidth});
    auto forward = [=](const Tensors& in) -> Tensors { return {at::tanh(at::linear(in[0], w, b))}; };
    return test_stage(forward, {{test_layer(s), w}, {test_layer(s, "bias"), b}});
  };
  if (name == "skip") make_skip(model, num_stages);
  if (name == "tied") make_tied(model, num_stages);
  if (name == "norm") make_norm(model);
  if (name == "tokens") make_tokens(model, num_stages);
  if (name == "cut") make_cut(model, num_stages);
  if (name == "scribbling") make_scribbling(model, num_stages);
  if (name == "inplace" || name == "half") make_in_place(model, name == "half");
  return model;
}

}  // namespace plumb
