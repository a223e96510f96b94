// Data parallel beside pipeline: four processes, two pipelines of two stages.
#include "plumb/pipeline/runtime/replicas.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <thread>

#include "plumb/core/error.h"
#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/pipeline/runtime/shared_parameters.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using namespace testing_processes;
using testing::HasSubstr;

constexpr int kReplicas = 2, kSteps = 3, kMicrobatches = 4;

std::string bits(const at::Tensor& t) {
  return std::to_string(content_hash(t)) + " " + std::to_string(t.detach().sum().item<double>());
}

int stages_of(const std::string& schedule) { return schedule_traits(schedule).min_stages_per_rank == 2 ? 4 : 2; }

void descend(const std::vector<NamedTensor>& parameters) {
  at::NoGradGuard no_grad;
  for (const auto& p : parameters) {
    at::Tensor value = p.tensor;
    if (p.tensor.grad().defined()) value.sub_(p.tensor.grad(), 0.1);
    p.tensor.mutable_grad() = at::Tensor();
  }
}

std::string key(int step, int stage, const std::string& name) {
  return std::to_string(step) + "/" + std::to_string(stage) + "/" + name;
}

// "MODEL,SCHEDULE;...", each trained for some steps by replicas that get batches of their own.
Role replicas_role("replicas", [] {
  auto world = test_group(std::chrono::seconds(60));
  auto groups = divide_into_replicas(world, kReplicas);
  std::istringstream cases(setting("CASES"));
  for (std::string text; std::getline(cases, text, ';');) {
    const std::string name = text.substr(0, text.find(',')), table = text.substr(text.find(',') + 1);
    auto model = test_model(name, stages_of(table));
    auto schedule = make_schedule(table, 2, kMicrobatches);
    std::map<int, std::shared_ptr<StageFunction>> stages;
    for (int s : schedule.placement.stages_of(groups.pipeline.rank())) stages[s] = model.make_stage(s);
    if (setting("KIND") == "differ" && world.rank() == 3) stages.begin()->second->parameters()[0].tensor.data().add_(1);
    PipelineOptions options;
    options.loss = model.loss;
    options.replicas = groups.replicas;
    Pipeline pipeline(model.layout, schedule, stages, groups.pipeline, options);
    for (int step = 0; step < kSteps; step++) {
      auto [inputs, targets] = model.batch(kReplicas * step + groups.replicas.rank());
      if (setting("KIND") == "raise" && world.rank() == 3 && step == 1) targets = {at::zeros({8, 5})};
      auto result = pipeline.step(inputs, targets);
      if (result.loss.defined()) report(text + "/loss" + std::to_string(step), bits(result.loss.to(at::kFloat)));
      for (const auto& [s, stage] : stages) {
        for (const auto& p : stage->parameters()) report(text + "/" + key(step, s, p.name), bits(p.tensor.grad()));
        descend(stage->parameters());
      }
    }
  }
  report("finished", "yes");
  return 0;
});

// Trains one process whose microbatches are a group for each replica: the promised order of sums.
std::map<std::string, std::string> by_one_process(const std::string& name, const std::string& table) {
  const int num = stages_of(table);
  auto model = test_model(name, num);
  std::map<int, std::shared_ptr<StageFunction>> stages;
  for (int s = 0; s < num; s++) stages[s] = model.make_stage(s);
  PipelineOptions options;
  options.loss = model.loss;
  options.gradient_groups = kReplicas;
  const Schedule schedule = make_schedule("LoopedBFS", 1, kReplicas * kMicrobatches, num);
  Pipeline pipeline(model.layout, schedule, stages, {}, options);
  std::map<std::string, std::string> values;
  for (int step = 0; step < kSteps; step++) {
    auto [inputs, targets] = model.batch(kReplicas * step);
    for (int r = 1; r < kReplicas; r++) {
      const auto [more, more_targets] = model.batch(kReplicas * step + r);
      for (size_t i = 0; i < inputs.size(); i++) inputs[i] = at::cat({inputs[i], more[i]});
      for (size_t i = 0; i < targets.size(); i++) targets[i] = at::cat({targets[i], more_targets[i]});
    }
    values["loss" + std::to_string(step)] = bits(pipeline.step(inputs, targets).loss.to(at::kFloat));
    for (const auto& [s, stage] : stages) {
      for (const auto& p : stage->parameters()) values[key(step, s, p.name)] = bits(p.tensor.grad());
      descend(stage->parameters());
    }
  }
  return values;
}

TEST(Replicas, OfAPipelineEqualOneProcessBitForBit) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"mlp", "1F1B"}, {"skip", "ZBVZeroBubble"}, {"tied", "ZBH1"}, {"tokens", "GPipe"}};
  std::string list;
  for (const auto& [model, table] : cases) list += model + "," + table + ";";
  auto run = run_role("replicas", 4, {{"CASES", list}});
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1] << run.errors[2] << run.errors[3];
  for (const auto& [model, table] : cases) {
    for (const auto& [name, value] : by_one_process(model, table)) {
      int found = 0;
      for (const auto& reports : run.reports) {
        auto it = reports.find(model + "," + table + "/" + name);
        if (it == reports.end()) continue;
        EXPECT_EQ(it->second, value) << model << " " << table << " " << name;
        found++;
      }
      EXPECT_EQ(found, kReplicas) << "replicas that know " << name;
    }
  }
}

TEST(Replicas, NameTheRankThatFailedAmongAll) {
  auto run = run_role("replicas", 4, {{"CASES", "mlp,1F1B"}, {"KIND", "raise"}});
  EXPECT_THAT(run.errors[3], HasSubstr("rank 3 at 1F0"));
  for (int r = 0; r < 3; r++) {
    EXPECT_EQ(run.result.processes[r].exit_code, 1) << run.errors[r];
    EXPECT_THAT(run.errors[r], HasSubstr("rank 3 at 1F0")) << "rank " << r;
  }
}

TEST(Replicas, FindWeightsThatDifferBeforeTheFirstStep) {
  auto run = run_role("replicas", 4, {{"CASES", "mlp,1F1B"}, {"KIND", "differ"}});
  EXPECT_THAT(run.errors[3], HasSubstr("replicas 1 and 0 differ: stage 1 layers.1.weight"));
  EXPECT_THAT(run.errors[1], HasSubstr("replicas 0 and 1 differ"));
  for (int r = 0; r < 4; r++) EXPECT_EQ(run.reports[r].count("finished"), 0u);
}

// How much of each stage's all-reduce lies beside actions: "STAGE in time" for one that began right after the stage's
// last gradient, "STAGE before N" for the actions that came after that.
void report_overlap(const std::string& table, const std::vector<TimelineEvent>& events) {
  for (const auto& reduce : events) {
    if (reduce.action.kind != ActionKind::ReduceGrad) continue;
    const TimelineEvent* last = nullptr;
    int later = 0;
    bool in_time = reduce.waiting <= reduce.start && reduce.start <= reduce.end;
    for (const auto& e : events) {
      const bool adds = e.action.kind == ActionKind::FullBackward || e.action.kind == ActionKind::BackwardWeight;
      if (adds && e.action.stage == reduce.action.stage) last = &e;
      if (!e.action.is_compute() || e.waiting < reduce.waiting) continue;
      later++;
    }
    for (const auto& e : events) {
      if (!e.action.is_compute() || &e == last) continue;
      // No action between the stage's last gradient and its reduction.
      in_time = in_time && (e.end <= last->start || e.waiting >= reduce.waiting);
    }
    in_time = in_time && last->end <= reduce.waiting;
    const std::string key = table + "/" + to_string(reduce.action);
    report(key, (in_time ? "in time, before " : "late, before ") + std::to_string(later));
  }
}

Role overlap_role("overlapping replicas", [] {
  auto groups = divide_into_replicas(test_group(std::chrono::seconds(60)), kReplicas);
  std::istringstream cases(setting("CASES"));
  for (std::string table; std::getline(cases, table, ';');) {
    auto schedule = make_schedule(table, 2, kMicrobatches);
    auto model = test_model("mlp", schedule.num_stages());
    std::map<int, std::shared_ptr<StageFunction>> stages;
    for (int s : schedule.placement.stages_of(groups.pipeline.rank())) stages[s] = model.make_stage(s);
    PipelineOptions options;
    options.loss = model.loss;
    options.replicas = groups.replicas;
    options.record_timeline = true;
    Pipeline pipeline(model.layout, schedule, stages, groups.pipeline, options);
    for (int step = 0; step < 2; step++) {
      auto [inputs, targets] = model.batch(groups.replicas.rank());
      auto result = pipeline.step(inputs, targets);
      if (step == 1) report_overlap(table, result.timeline);
    }
    const double bubble = measured_bubble(pipeline.gather_timeline());
    report(table + "/bubble", bubble >= 0 && bubble < 1 ? "a share" : std::to_string(bubble));
  }
  return 0;
});

TEST(Replicas, SumAStagesGradientsWhileTheOthersGoOn) {
  const std::vector<std::string> tables = {
      "1F1B", "GPipe", "ZBH1", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"};
  std::string list;
  for (const auto& table : tables) list += table + ";";
  auto run = run_role("overlapping replicas", 4, {{"CASES", list}});
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1] << run.errors[2] << run.errors[3];
  for (const auto& table : tables) {
    int beside = 0;
    const int per_rank = make_schedule(table, 2, kMicrobatches).num_stages() / 2;
    for (const auto& reports : run.reports) {
      int reduced = 0;
      for (const auto& [key, value] : reports) {
        if (key.rfind(table + "/", 0) != 0 || key == table + "/bubble") continue;
        EXPECT_EQ(value.rfind("in time", 0), 0u) << key << ": " << value;
        beside += value != "in time, before 0";
        reduced++;
      }
      EXPECT_EQ(reduced, per_rank) << table;
      EXPECT_EQ(reports.at(table + "/bubble"), "a share");
    }
    // If a rank has several stages, the first one to be complete is summed beside the other's actions.
    EXPECT_EQ(beside, per_rank == 2 ? 4 : 0) << table;
  }
}

// Sums of two stages by hand, by KIND.
Role sums_role("sums by hand", [] {
  const std::string kind = setting("KIND");
  auto group = test_group(std::chrono::seconds(60));
  const bool faulty = group.rank() == 1;
  RunPlan plan;
  std::map<int, std::vector<NamedTensor>> parameters;
  std::map<int, GradientAccumulator> accumulators;
  for (int stage : {1, 0}) {
    RunAction run;
    run.action = {.kind = ActionKind::FullBackward, .stage = stage, .microbatch = 0};
    run.completes_gradients = true;
    plan.actions.push_back(run);
    parameters[stage] = {{"w" + std::to_string(stage), at::ones({3}).requires_grad_(true)}};
    accumulators.emplace(stage, GradientAccumulator({0}, {}, true)).first->second.begin_step(parameters[stage]);
  }
  ReplicaSums sums(group, "by hand", parameters, {}, plan);
  group.set_timeout(std::chrono::milliseconds(number_setting("TIMEOUT", 60000)));
  sums.begin_step(1, true);
  auto done = [&](int stage) {
    at::Tensor w = parameters[stage][0].tensor;
    accumulators.at(stage).accumulate(0, [&] { (w * w * (10.0 * stage + group.rank() + 1)).sum().backward(); });
    sums.stage_done(stage, accumulators.at(stage));
  };
  auto until = [&](const std::function<bool()>& there) {
    for (int i = 0; i < 20000 && !there(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  done(1);
  if (kind == "overlap") {
    // The other stage's gradients have not even begun.
    until([&] { return sums.summed(1); });
    report("first", sums.summed(1) && !sums.summed(0) ? "early" : "late");
  }
  if (faulty && kind == "exit") ::_exit(3);
  if (faulty && kind == "stop") ::raise(SIGSTOP);
  if (faulty && kind == "raise") {
    sums.tell_failure("out of cheese");
    throw Error(ErrorKind::InvalidArgument, "out of cheese");
  }
  done(0);
  if (kind == "exit") {
    // Other work goes on, and notices.
    until([&] {
      sums.check();
      return false;
    });
  }
  std::map<int, GradientAccumulator*> all;
  for (auto& [stage, accumulator] : accumulators) all.emplace(stage, &accumulator);
  std::map<int, Tensors> no_buffers;
  sums.finish(all, at::ones({}), no_buffers);
  for (auto& [stage, accumulator] : accumulators) {
    report("sum" + std::to_string(stage), std::to_string(accumulator.step_gradient(0).sum().item<int64_t>()));
  }
  return 0;
});

TEST(Replicas, HaveAStagesSumBeforeAnotherStageIsDone) {
  auto run = run_role("sums by hand", 2, {{"KIND", "overlap"}});
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1];
  for (const auto& reports : run.reports) {
    EXPECT_EQ(reports.at("first"), "early");
    EXPECT_EQ(reports.at("sum1"), std::to_string(3 * 2 * (11 + 12)));
    EXPECT_EQ(reports.at("sum0"), std::to_string(3 * 2 * (1 + 2)));
  }
}

TEST(Replicas, NameTheOneThatIsLostWhileGradientsAreSummed) {
  auto gone = run_role("sums by hand", 2, {{"KIND", "exit"}});
  EXPECT_EQ(gone.result.processes[0].exit_code, 1);
  EXPECT_THAT(gone.errors[0], HasSubstr("REDUCE_GRAD waiting for"));
  EXPECT_THAT(gone.errors[0], HasSubstr("rank 1: it is gone"));
  auto stopped = run_role("sums by hand", 2, {{"KIND", "stop"}, {"TIMEOUT", "1000"}}, std::chrono::seconds(4));
  EXPECT_EQ(stopped.result.processes[0].exit_code, 1);
  EXPECT_THAT(stopped.errors[0], HasSubstr("rank 1: no answer within 1000 ms"));
  auto raised = run_role("sums by hand", 2, {{"KIND", "raise"}});
  EXPECT_EQ(raised.result.processes[0].exit_code, 1);
  EXPECT_THAT(raised.errors[0], HasSubstr("rank 1 failed: out of cheese"));
  EXPECT_THAT(raised.errors[1], HasSubstr("out of cheese"));
}

Role uneven_role("uneven replicas", [] {
  auto groups = divide_into_replicas(test_group(std::chrono::seconds(60)), 2);
  auto model = test_model("mlp", 1);
  auto stage = model.make_stage(0);
  PipelineOptions options;
  options.loss = model.loss;
  options.replicas = groups.replicas;
  Pipeline pipeline(model.layout, make_schedule("1F1B", 1, 2), {{0, stage}}, groups.pipeline, options);
  auto [inputs, targets] = model.batch(0);
  const bool first = groups.replicas.rank() == 0;
  auto part = [&](const at::Tensor& t) { return first ? t.narrow(0, 0, 2) : t.narrow(0, 2, 6); };
  auto loss = pipeline.step({part(inputs[0])}, {part(targets[0])}).loss;
  auto whole = test_model("mlp", 1).make_stage(0);
  auto expected = model.loss(whole->forward({inputs[0]}), targets);
  expected.backward();
  const auto near = [](const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-5, 1e-6); };
  report("loss", near(loss, expected) ? "right" : "wrong");
  for (size_t i = 0; i < 2; i++) {
    const auto grad = stage->parameters()[i].tensor.grad();
    report("grad" + std::to_string(i), near(grad, whole->parameters()[i].tensor.grad()) ? "right" : "wrong");
  }
  return 0;
});

TEST(Replicas, OfUnequalBatchesCountByTheirRows) {
  auto run = run_role("uneven replicas", 2);
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1];
  for (const auto& reports : run.reports) {
    for (const char* what : {"loss", "grad0", "grad1"}) EXPECT_EQ(reports.at(what), "right") << what;
  }
}

TEST(Replicas, NeedAMultipleOfRanks) { EXPECT_THROW(divide_into_replicas({}, 2), Error); }

}  // namespace
}  // namespace plumb
