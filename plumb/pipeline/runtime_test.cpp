#include "plumb/pipeline/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/pipeline/processes_test.h"
#include "plumb/pipeline/test_models.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using testing_processes::number_setting;
using testing_processes::report;
using testing_processes::run_role;
using testing_processes::setting;

using Values = std::map<std::string, std::string>;

std::string hex(const at::Tensor& t) {
  if (!t.defined()) return "none";
  auto c = t.detach().contiguous();
  std::string out;
  char two[3];
  for (size_t i = 0; i < c.nbytes(); i++) {
    std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(c.const_data_ptr())[i]);
    out += two;
  }
  return out;
}

void sgd(const std::vector<NamedTensor>& parameters) {
  at::NoGradGuard no_grad;
  for (const auto& p : parameters) {
    if (!p.tensor.grad().defined()) continue;
    at::Tensor value = p.tensor;
    value.sub_(p.tensor.grad(), 0.1);
    p.tensor.mutable_grad() = at::Tensor();
  }
}

std::string key(int stage, const std::string& name, int step) {
  return "stage" + std::to_string(stage) + "." + name + "@" + std::to_string(step);
}

// Steps with an optimiser in between; every loss, output, gradient and buffer as text.
Values train_pipeline(const TestModel& model, const Schedule& schedule, const ProcessGroup& group, int steps) {
  PipelineOptions options;
  options.loss = model.loss;
  options.seed = model.seed;
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s : schedule.placement.stages_of(group.rank())) stages[s] = model.make_stage(s);
  Pipeline pipeline(model.layout, schedule, stages, group, options);
  Values values;
  for (int step = 0; step < steps; step++) {
    auto [inputs, targets] = model.batch(step);
    auto result = pipeline.step(inputs, targets);
    for (size_t m = 0; m < result.losses.size(); m++) {
      values["loss" + std::to_string(m) + "@" + std::to_string(step)] = hex(result.losses[m]);
    }
    for (size_t k = 0; k < result.outputs.size(); k++) {
      values["output" + std::to_string(k) + "@" + std::to_string(step)] = hex(result.outputs[k]);
    }
    for (auto& [s, stage] : stages) {
      for (const auto& p : stage->parameters()) values[key(s, p.name, step)] = hex(p.tensor.grad());
      for (const auto& b : static_cast<TestStage&>(*stage).buffers) values[key(s, b.name, step)] = hex(b.tensor);
      sgd(stage->parameters());
    }
  }
  return values;
}

// The same by plain autograd over the whole model, microbatch after microbatch.
Values train_eager(const TestModel& model, int microbatches, int steps) {
  std::vector<std::shared_ptr<TestStage>> stages;
  for (int s = 0; s < model.layout.num_stages(); s++) stages.push_back(model.make_stage(s));
  Values values;
  for (int step = 0; step < steps; step++) {
    auto [inputs, targets] = model.batch(step);
    auto in = split_batch(inputs, {}, microbatches), tgt = split_batch(targets, {}, microbatches);
    double rows = 0;
    for (auto n : in.rows) rows += static_cast<double>(n);
    std::vector<Tensors> all_outputs;
    for (int m = 0; m < microbatches; m++) {
      std::vector<Tensors> outputs;
      for (int s = 0; s < model.layout.num_stages(); s++) {
        Tensors args;
        for (const auto& source : model.layout.stages[s].inputs) {
          args.push_back(source.stage < 0 ? in.inputs[m][source.index] : outputs[source.stage][source.index]);
        }
        outputs.push_back(stages[s]->forward(args));
      }
      auto loss = model.loss(outputs.back(), tgt.inputs[m]);
      values["loss" + std::to_string(m) + "@" + std::to_string(step)] = hex(loss);
      const double weight = static_cast<double>(in.rows[m]) * microbatches / rows;
      loss.backward(weight == 1 ? at::Tensor() : at::full_like(loss, weight));
      all_outputs.push_back({});
      for (auto& o : outputs.back()) all_outputs.back().push_back(o.detach());
    }
    auto merged = merge_outputs(all_outputs, {}, in.rows);
    for (size_t k = 0; k < merged.size(); k++) {
      values["output" + std::to_string(k) + "@" + std::to_string(step)] = hex(merged[k]);
    }
    for (int s = 0; s < model.layout.num_stages(); s++) {
      for (const auto& p : stages[s]->parameters()) {
        at::NoGradGuard no_grad;
        if (p.tensor.grad().defined() && microbatches > 1) p.tensor.mutable_grad().div_(microbatches);
        values[key(s, p.name, step)] = hex(p.tensor.grad());
      }
      for (const auto& b : stages[s]->buffers) values[key(s, b.name, step)] = hex(b.tensor);
      sgd(stages[s]->parameters());
    }
  }
  return values;
}

Schedule schedule_for(const std::string& name, int ranks, int microbatches, int stages_per_rank) {
  return make_schedule(name, ranks, microbatches, stages_per_rank);
}

testing_processes::Role train_role("train", [] {
  auto group = make_group_from_environment({std::chrono::seconds(30)});
  const int per_rank = number_setting("PER_RANK", 1);
  auto model = test_model(setting("MODEL"), group.size() * per_rank);
  auto schedule = schedule_for(setting("SCHEDULE"), group.size(), number_setting("MICROBATCHES", 4), per_rank);
  for (const auto& [k, v] : train_pipeline(model, schedule, group, 3)) report(k, v);
  return 0;
});

void expect_equal_values(const Values& found, const Values& expected, const std::string& what) {
  for (const auto& [key, value] : expected) {
    auto it = found.find(key);
    if (it == found.end()) {
      ADD_FAILURE() << what << ": nothing reported " << key;
    } else {
      EXPECT_EQ(it->second.substr(0, 40), value.substr(0, 40)) << what << ": start of " << key;
      EXPECT_TRUE(it->second == value) << what << ": " << key;
    }
  }
}

void expect_processes_equal(const std::string& model, const std::string& schedule, int ranks, int microbatches,
                            int per_rank, const Values& expected) {
  const std::string what = model + ", " + schedule + " over " + std::to_string(ranks) + " ranks";
  auto run = run_role("train", ranks,
                      {{"MODEL", model},
                       {"SCHEDULE", schedule},
                       {"MICROBATCHES", std::to_string(microbatches)},
                       {"PER_RANK", std::to_string(per_rank)}});
  for (auto& e : run.errors) EXPECT_EQ(e, "") << what;
  ASSERT_EQ(run.result.exit_code(), 0) << what;
  Values all;
  for (auto& r : run.reports) all.insert(r.begin(), r.end());
  expect_equal_values(all, expected, what);
}

TEST(Pipeline, TwoProcessesEqualOneUnderGPipeAnd1F1B) {
  const auto expected = train_eager(test_model("mlp", 2), 4, 3);
  for (const char* schedule : {"GPipe", "1F1B"}) expect_processes_equal("mlp", schedule, 2, 4, 1, expected);
}

TEST(Pipeline, OneProcessEqualsEagerUnderEverySchedule) {
  for (const auto& name : schedule_names()) {
    const auto& traits = schedule_traits(name);
    if (traits.two_way) continue;
    const int per_rank = std::max(traits.min_stages_per_rank, traits.max_stages_per_rank > 1 ? 2 : 1);
    for (const char* model : {"mlp", "skip", "norm"}) {
      auto m = test_model(model, per_rank);
      auto schedule = schedule_for(name, 1, 4, per_rank);
      expect_equal_values(train_pipeline(m, schedule, {}, 3), train_eager(m, 4, 3), name + ", " + model);
    }
  }
}

}  // namespace
}  // namespace plumb
