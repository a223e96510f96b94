// A training over processes against the same in one process, and that against plain autograd, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "plumb/core/error.h"
#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing_processes::report;
using testing_processes::run_role;
using testing_processes::setting;

using Values = std::map<std::string, std::string>;

std::string hex(const at::Tensor& t) {
  if (!t.defined()) return "none";
  auto c = t.detach().cpu().contiguous();
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

// Steps with an optimizer in between; every loss, output, gradient and buffer as text.
Values train_pipeline(const TestModel& model, const Schedule& schedule, const ProcessGroup& group, int steps) {
  PipelineOptions options;
  options.loss = model.loss;
  options.seed = model.seed;
  options.wire = {setting("WIRE"), setting("WIRE")};
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

// Trains by plain autograd over the whole model, microbatch after microbatch.
Values train_eager(TestModel model, int microbatches, int steps) {
  std::multimap<std::string, int> stage_of;  // stages of each parameter of the whole model, by its name
  if (model.make_whole) {
    for (int s = 0; s < model.layout.num_stages(); s++) {
      for (const auto& p : model.make_stage(s)->parameters()) stage_of.emplace(p.name, s);
    }
    model.layout = PipeTable::chain(1);
    model.make_stage = [whole = model.make_whole](int) { return whole(); };
  }
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
        for (const auto& input : model.layout.stages[s].inputs) {
          const ValueSource& source = input.source;
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
        if (stage_of.empty()) values[key(s, p.name, step)] = hex(p.tensor.grad());
        for (auto [it, end] = stage_of.equal_range(p.name); it != end; ++it)
          values[key(it->second, p.name, step)] = hex(p.tensor.grad());
      }
      for (const auto& b : stages[s]->buffers) values[key(s, b.name, step)] = hex(b.tensor);
      sgd(stages[s]->parameters());
    }
  }
  return values;
}

struct Case {
  std::string model, schedule;
  int ranks, microbatches, per_rank;
  std::string text() const {
    return model + "," + schedule + "," + std::to_string(ranks) + "," + std::to_string(microbatches) + "," +
           std::to_string(per_rank);
  }
};

Case parse_case(const std::string& text) {
  std::istringstream in(text);
  Case c;
  char comma;
  std::getline(in, c.model, ',');
  std::getline(in, c.schedule, ',');
  in >> c.ranks >> comma >> c.microbatches >> comma >> c.per_rank;
  return c;
}

// Every case on one process group, one pipeline after the other.
testing_processes::Role train_role("train", [] {
  auto group = test_group(std::chrono::seconds(120));
  std::istringstream cases(setting("CASES"));
  for (std::string text; std::getline(cases, text, ';');) {
    const Case c = parse_case(text);
    auto model = test_model(c.model, c.ranks * c.per_rank);
    auto schedule = make_schedule(c.schedule, c.ranks, c.microbatches, c.per_rank);
    for (const auto& [k, v] : train_pipeline(model, schedule, group, 3)) report(text + ":" + k, v);
  }
  return 0;
});

void expect_equal_values(const Values& found, const Values& expected, const std::string& what) {
  for (const auto& [key, value] : expected) {
    auto it = found.find(key);
    if (it == found.end()) {
      ADD_FAILURE() << what << ": nothing reported " << key;
    } else {
      EXPECT_TRUE(it->second == value) << what << ": " << key << " is " << it->second.substr(0, 40) << ", expected "
                                       << value.substr(0, 40);
    }
  }
}

using Reference = std::function<Values(const Case&)>;

Values eager_reference(const Case& c) {
  return train_eager(test_model(c.model, c.ranks * c.per_rank), c.microbatches, 3);
}

// Trains with all stages in one process, under GPipe.
Values one_process_reference(const Case& c) {
  const int stages = c.ranks * c.per_rank;
  auto schedule = make_schedule("LoopedBFS", 1, c.microbatches, stages);
  return train_pipeline(test_model(c.model, stages), schedule, {}, 3);
}

void expect_processes_equal(const std::vector<Case>& cases, const Reference& reference) {
  std::string list;
  for (const auto& c : cases) list += c.text() + ";";
  auto run = run_role("train", cases[0].ranks, {{"CASES", list}});
  for (auto& e : run.errors) EXPECT_EQ(e, "");
  ASSERT_EQ(run.result.exit_code(), 0);
  Values all;
  for (auto& r : run.reports) all.insert(r.begin(), r.end());
  for (const auto& c : cases) {
    Values expected;
    for (const auto& [key, value] : reference(c)) expected[c.text() + ":" + key] = value;
    expect_equal_values(all, expected, "over processes");
  }
}

TEST(Pipeline, TwoProcessesEqualOneUnderGPipeAnd1F1B) {
  expect_processes_equal({{"mlp", "GPipe", 2, 4, 1}, {"mlp", "1F1B", 2, 4, 1}, {"mlp", "1F1B", 2, 1, 1}},
                         eager_reference);
}

TEST(Pipeline, TwoProcessesEqualOneUnderEverySchedule) {
  std::vector<Case> cases;
  for (const char* name : {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}) {
    for (const char* model : {"mlp", "skip"}) cases.push_back({model, name, 2, 4, 2});
  }
  expect_processes_equal(cases, eager_reference);
}

TEST(Pipeline, TwoProcessesEqualOneOnEveryModel) {
  std::vector<Case> cases;
  for (const char* model : {"ragged", "norm", "tokens", "inplace", "half", "cut"}) {
    cases.push_back({model, "1F1B", 2, 4, 1});
    cases.push_back({model, "InterleavedZeroBubble", 2, 4, 2});
  }
  expect_processes_equal(cases, eager_reference);
}

TEST(Pipeline, StagesOfOneGraphAloneRefuseOtherSizesAndNameThem) {
  TestTokens tokens(2, 6);
  SplitOptions cut;
  cut.points.emplace_back("layer1", SplitPoint::Beginning);
  auto pipe = pipeline(*capture(tokens, zeros_there({2, 4}, at::kLong)), cut);
  const auto schedule = make_schedule("LoopedBFS", 1, 2, 2);
  Pipeline runs(pipe->table(), schedule, stages_of_rank(*pipe, schedule, 0), {}, {});
  for (const int rank : {-1, 1}) EXPECT_THROW(stages_of_rank(*pipe, schedule, rank), Error);
  EXPECT_EQ(runs.eval({ones_there({4, 4}, at::kLong)}).outputs.at(0).size(0), 16);
  try {
    runs.eval({ones_there({4, 5}, at::kLong)});
    FAIL() << "sizes that the graph was not made for were taken";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(),
                testing::HasSubstr("stage 0 was cut for other sizes of the model's inputs: 'x0' was [2, 4] and "
                                   "is [2, 5]"));
    EXPECT_THAT(e.remedy(), testing::HasSubstr("dynamic shapes"));
  }
}

TEST(Pipeline, ThreeProcessesCarrySkippedValuesStraight) {
  expect_processes_equal(
      {{"skip", "GPipe", 3, 5, 1}, {"skip", "1F1B", 3, 5, 1}, {"skip", "InterleavedZeroBubble", 3, 6, 2}},
      eager_reference);
}

TEST(Pipeline, SumsTiedWeightsOverProcessesAsInOne) {
  expect_processes_equal({{"tied", "GPipe", 2, 4, 1}, {"tied", "1F1B", 2, 4, 1}, {"tied", "ZBVZeroBubble", 2, 4, 2}},
                         one_process_reference);
}

TEST(Pipeline, SumsTiedWeightsAsEagerDoesForOneMicrobatch) {
  // More microbatches are summed copy by copy, eager sums microbatch by microbatch.
  auto model = test_model("tied", 3);
  auto found = train_pipeline(model, make_schedule("LoopedBFS", 1, 1, 3), {}, 1);
  auto eager = train_eager(model, 1, 1);
  auto sum_of = [&](const Values& v, const std::string& k) { return v.at(k); };
  EXPECT_EQ(sum_of(found, "stage0.layers.0.weight@0"), sum_of(found, "stage2.head.weight@0"));
  EXPECT_NE(sum_of(found, "stage0.layers.0.weight@0"), sum_of(eager, "stage0.layers.0.weight@0"));
  EXPECT_EQ(sum_of(found, "stage1.layers.1.weight@0"), sum_of(eager, "stage1.layers.1.weight@0"));
}

TEST(Pipeline, OneProcessEqualsEagerUnderEverySchedule) {
  for (const auto& name : schedule_names()) {
    const auto& traits = schedule_traits(name);
    if (traits.bidirectional) continue;
    const int per_rank = std::max(traits.min_stages_per_rank, traits.max_stages_per_rank > 1 ? 2 : 1);
    for (const char* model : {"mlp", "skip", "norm"}) {
      auto m = test_model(model, per_rank);
      auto schedule = make_schedule(name, 1, 4, per_rank);
      expect_equal_values(train_pipeline(m, schedule, {}, 3), train_eager(m, 4, 3), name + ", " + model);
    }
  }
}

TEST(Pipeline, DropsTheSameUnderEveryScheduleWhenSeeded) {
  auto model = test_model("mlp", 2);
  auto make = model.make_stage;
  model.make_stage = [make](int s) {
    auto inner = make(s);
    return std::make_shared<TestStage>(
        [inner](const Tensors& in) { return Tensors{at::dropout(inner->forward(in)[0], 0.5, true)}; },
        inner->parameters());
  };
  model.seed = 7;
  auto a = train_pipeline(model, make_schedule("LoopedBFS", 1, 4, 2), {}, 2);
  at::manual_seed(99);
  auto before = at::rand({3});
  at::manual_seed(99);
  auto b = train_pipeline(model, make_schedule("ZBVZeroBubble", 1, 4, 2), {}, 2);
  EXPECT_TRUE(at::equal(at::rand({3}), before)) << "the generator was not put back";
  expect_equal_values(b, a, "dropout");
}

}  // namespace
}  // namespace plumb
