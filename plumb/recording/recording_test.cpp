#include "plumb/recording/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "plumb/core/error.h"
#include "plumb/recording/recording_testing.h"
#include "plumb/transforms/models_testing.h"
#include "plumb/transforms/track/track_scales.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using namespace testing_models;
using namespace testing_recording;

const char* kModel = R"(graph {
    %x: f32[16, 8] = placeholder "x"
    %w = get_attr "fc.weight"
    %y: f32[16, 8] = aten::linear(%x, %w) in "":"Net" "fc":"Linear"
    %z: f32[16, 8] = aten::gelu(%y)
    %s: f32[16, 8] = aten::mul.Tensor(%z, %y)
    %o: f32[] = aten::sum(%s)
    output(%o)
  })";

std::shared_ptr<GraphModule> model() {
  State state;
  parameter(state, "fc.weight", randn_there({8, 8}));
  return module_of(kModel, std::move(state));
}

at::Tensor train_step(GraphModule& module, const at::Tensor& x) {
  for (const Attr& attr : module.state()) attr.tensor.mutable_grad().reset();
  at::Tensor loss = module.run({x})[0].toTensor();
  loss.backward();
  return loss;
}

TEST(Statistics, TakeAlongWhatTheyAreComputedFrom) {
  const Statistic histogram{StatisticKind::Histogram}, lost = Statistic::parse("underflow(e5m2)");
  EXPECT_EQ(histogram.bits() & lost.bits(), lost.bits());
  HistoryRow row;
  row.data.numel = 4, row.data.zero_count = 1, row.data.std = 2;
  row.present = Statistic{StatisticKind::Std}.bits();
  EXPECT_EQ(row.value({StatisticKind::Std}), 2);
  for (const char* other : {"nan_count", "numel", "zero_share", "histogram", "underflow(e5m2)"}) {
    EXPECT_FALSE(row.has(Statistic::parse(other))) << other;
    EXPECT_TRUE(std::isnan(row.value(Statistic::parse(other)))) << other;
  }
  row.present |= Statistic::parse("zero_share").bits();
  EXPECT_EQ(row.value(Statistic::parse("zero_share")), 0.25);
}

// ---- rules ----

TEST(RecordRules, ReadsWhatTheDocumentationShows) {
  const RecordRules rules = RecordRules::parse(R"toml(
every = 10
[[rule]]
name = "layers.*.attn*"
operator = ["aten::linear", "parameter"]
direction = "backward"
statistics = ["std", "underflow(e5m2)"]
every = 50

[[rule]]
when = { statistic = "underflow(e4m3fn)", above = 0.25 }
then = "all"
limit = 20
)toml");
  ASSERT_EQ(rules.rules.size(), 2u);
  const RecordRule &a = rules.rules[0], &b = rules.rules[1];
  EXPECT_EQ(a.names, std::vector<std::string>{"layers.*.attn*"});
  EXPECT_EQ(a.operators, (std::vector<std::string>{"aten::linear", "parameter"}));
  EXPECT_FALSE(a.forward);
  EXPECT_TRUE(a.backward);
  EXPECT_EQ(a.every, 50);
  EXPECT_TRUE(a.histogram());
  EXPECT_EQ(a.statistics & Statistic{StatisticKind::MeanAbs}.bits(), 0);
  EXPECT_EQ(b.every, 10);
  EXPECT_EQ(b.statistics, kAllStatistics);
  EXPECT_TRUE(b.then_all);
  EXPECT_EQ(b.limit, 20);
  EXPECT_EQ(b.when->to_string(), "underflow(e4m3fn) > 0.25");
}

TEST(RecordRules, ErrorsNameFileLineKeyAndTheFix) {
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"[[rule]]\nnmae = \"a\"", "r.toml:2: \"nmae\"", "name, operator"},
      {"[[rule]]\nevery = 0", "r.toml:2: every", "every = 10"},
      {"[[rule]]\nevery = \"ten\"", "r.toml:2: every", "every = 10"},
      {"every = 5\n[[rule]]\n\ndirection = \"back\"", "r.toml:4: direction is \"back\"", "\"backward\""},
      {"[[rule]]\nstatistics = [\"std\",\n \"median\"]", "r.toml:3: statistics: \"median\"", "underflow(FORMAT)"},
      {"[[rule]]\nstatistics = [\"underflow(e9m9)\"]", "r.toml:2: statistics:", "try:"},
      {"[[rule]]\nstatistics = [\"underflow\"]", "r.toml:2: statistics: \"underflow\"", "underflow(e5m2)"},
      {"[[rule]]\nstatistics = [\"std(e5m2)\"]", "r.toml:2: statistics:", "try:"},
      {"[[rule]]\nstatistics = []", "r.toml:2: statistics", "[\"std\""},
      {"[[rule]]\nname = []", "r.toml:2: name", "layers.*"},
      {"[[rule]]\nname = 3", "r.toml:2: name", "layers.*"},
      {"[[rule]]\nwhen = { statistic = \"std\" }", "r.toml:2: when", "above = 0"},
      {"[[rule]]\nwhen = { above = 1 }", "r.toml:2: when has no statistic", "nan_count"},
      {"[[rule]]\nwhen = { statistic = \"std\", above = nan }", "r.toml:2: above", "above = 0"},
      {"[[rule]]\nwhen = { statistic = \"histogram\", above = 1 }", "r.toml:2: statistic", "nan_count"},
      {"[[rule]]\nwhen = { statistic = \"std\", over = 1 }", "r.toml:2: \"over\"", "above"},
      {"[[rule]]\nthen = \"all\"", "r.toml:2: then", "when"},
      {"[[rule]]\nlimit = 3", "r.toml:2: limit", "when"},
      {"[[rule]]\nwhen = { statistic = \"std\", above = 1 }\nthen = \"some\"", "r.toml:3: then", "\"all\""},
      {"rule = 3", "r.toml:1: rule", "[[rule]]"},
      {"every = 3", "r.toml: has no rule", "[[rule]]"},
      {"", "r.toml: has no rule", "[[rule]]"},
      {"[[rule]]\nname = layers", "r.toml:2: is no TOML", "quotes"},
  };
  for (const auto& [text, place, fix] : cases) {
    EXPECT_THAT(message_of([&] { RecordRules::parse(text, "r.toml"); }), AllOf(HasSubstr(place), HasSubstr(fix)))
        << text;
  }
  EXPECT_THAT(message_of([] { RecordRules::load("/none/r.toml"); }), HasSubstr("/none/r.toml"));
}

TEST(Statistic, NamesRoundTrip) {
  for (const char* name : {"mean_abs", "numel", "histogram", "zero_share", "underflow(e5m2)", "overflow(e4m3fn-SR)"}) {
    EXPECT_EQ(Statistic::parse(name).to_string(), name);
  }
}

// ---- recorder ----

TEST_F(Recording, RecordsWhatTorchComputesAndLeavesTheTrainingAlone) {
  auto recorded = model();
  auto plain = recorded->deep_copy();
  Recorder recorder(*recorded, RecordRules::everything(2), file());
  at::Tensor weight, gradient;
  for (int step = 1; step <= 3; ++step) {
    at::Tensor x = randn_there({16, 8});
    EXPECT_TRUE(at::equal(train_step(*recorded, x), train_step(*plain, x)));
    const at::Tensor a = recorded->state().get("fc.weight").tensor, b = plain->state().get("fc.weight").tensor;
    EXPECT_TRUE(at::equal(a.grad(), b.grad()));
    EXPECT_EQ(recorder.step({{"loss", step * 1.5}}), step == 2 ? 0u : 12u);
    if (step == 3) weight = a.detach().clone(), gradient = a.grad().clone();
    at::NoGradGuard none;
    a.sub_(a.grad(), 0.01), b.sub_(b.grad(), 0.01);
  }
  const History history = read_history(file());
  ASSERT_EQ(history.steps.size(), 2u);
  EXPECT_EQ(history.steps[0].step, 1);
  EXPECT_EQ(history.steps[1].step, 3);
  ASSERT_EQ(history.tensors.size(), 6u);
  EXPECT_EQ(history.tensors[1], (HistoryTensor{"fc.weight", "fc", "parameter", "float32", {8, 8}}));
  EXPECT_EQ(history.tensors[2], (HistoryTensor{"fc.y", "fc", "aten::linear", "float32", {16, 8}}));
  EXPECT_EQ(history.tensors[0].operation, "input");
  ASSERT_EQ(history.scalars.size(), 3u);
  EXPECT_EQ(history.scalars[1].values, (std::vector<std::pair<std::string, double>>{{"loss", 3.0}}));
  int seen = 0;
  for (const HistoryRow& row : history.steps[1].rows) {
    if (row.tensor != 1) continue;
    const at::Tensor& t = row.backward ? gradient : weight;
    EXPECT_NEAR(row.data.std, t.std().item<double>(), 1e-6 * row.data.std);
    EXPECT_EQ(row.data.abs_max, t.abs().max().item<double>());
    EXPECT_EQ(row.data.numel, 64);
    EXPECT_EQ(row.present, kAllStatistics);
    int64_t counted = 0;
    for (int64_t n : row.data.histogram->counts) counted += n;
    EXPECT_EQ(counted, 64);
    ++seen;
  }
  EXPECT_EQ(seen, 2);
}

TEST_F(Recording, KeepsToTheRules) {
  auto module = model();
  Recorder recorder(*module, RecordRules::parse(R"toml(
[[rule]]
name = "fc.*"
operator = "parameter"
direction = "backward"
statistics = ["std"]
every = 1
[[rule]]
operator = "aten::mul"
direction = "forward"
statistics = ["abs_max", "histogram"]
every = 3
)toml"),
                    file());
  for (int step = 1; step <= 4; ++step) {
    train_step(*module, randn_there({16, 8}));
    EXPECT_EQ(recorder.step(), step % 3 == 1 ? 2u : 1u);
  }
  const History history = read_history(file());
  ASSERT_EQ(history.steps.size(), 4u);
  const auto& rows = history.steps[0].rows;
  ASSERT_EQ(rows.size(), 2u);
  EXPECT_TRUE(rows[0].backward);
  EXPECT_EQ(history.tensors[rows[0].tensor].name, "fc.weight");
  EXPECT_GT(rows[0].data.std, 0);
  EXPECT_TRUE(std::isnan(rows[0].data.abs_max));
  EXPECT_EQ(rows[0].data.histogram, nullptr);
  EXPECT_EQ(history.tensors[rows[1].tensor].operation, "aten::mul.Tensor");
  EXPECT_FALSE(rows[1].backward);
  EXPECT_NE(rows[1].data.histogram, nullptr);
}

TEST_F(Recording, RecordsOnAConditionAndTheWholeNextStep) {
  auto module = model();
  Recorder recorder(*module, RecordRules::parse(R"toml(
every = 1000
[[rule]]
direction = "forward"
statistics = ["std"]
[[rule]]
name = "x"
direction = "forward"
statistics = ["nan_count"]
when = { statistic = "nan_count", above = 0 }
every = 1
then = "all"
limit = 2
)toml"),
                    file());
  std::vector<size_t> rows;
  for (int step = 1; step <= 8; ++step) {
    at::Tensor x = randn_there({16, 8});
    if (step == 3 || step == 5 || step == 7) x[0][0] = NAN;
    train_step(*module, x);
    rows.push_back(recorder.step());
  }
  // Step 1 by the first rule, 3 and 5 by the second, 4 and 6 as next steps; 7 is over the limit.
  EXPECT_EQ(rows, (std::vector<size_t>{6, 0, 1, 6, 1, 6, 0, 0}));
  const History history = read_history(file());
  ASSERT_EQ(history.events.size(), 2u);
  EXPECT_EQ(history.events[0].step, 3);
  EXPECT_EQ(history.events[0].rule, 1);
  EXPECT_EQ(history.events[0].condition, "nan_count > 0");
  ASSERT_EQ(history.events[0].first.size(), 1u);
  EXPECT_EQ(history.events[0].first[0].value, 1);
  EXPECT_EQ(history.tensors[history.events[0].first[0].tensor].name, "x");
  EXPECT_TRUE(history.steps[1].rows[0].by_condition);
  EXPECT_FALSE(history.steps[2].rows[0].by_condition);
}

TEST_F(Recording, AnswersWhatAFormatWouldDoToAGradient) {
  auto module = model();
  const char* rules =
      "[[rule]]\ndirection = \"backward\"\nwhen = { statistic = \"underflow(e4m3fn)\", above = 0.5 }\nevery = 1\n";
  Recorder recorder(*module, RecordRules::parse(rules), file());
  at::Tensor x = randn_there({16, 8});
  module->run({x})[0].toTensor().backward();
  EXPECT_EQ(recorder.step(), 0u);
  // The same gradients, 2^-14 times as large: most are below half of E4M3's smallest value, 2^-9.
  (module->run({x})[0].toTensor() * 0x1p-14).backward();
  EXPECT_GT(recorder.step(), 0u);
}

TEST_F(Recording, MeasuresNothingBetweenStepsAndWhileSwitchedOff) {
  auto module = model();
  Recorder recorder(*module, RecordRules::everything(2), file());
  recorder.set_enabled(false);
  train_step(*module, randn_there({16, 8}));
  EXPECT_EQ(recorder.step(), 0u);
  recorder.set_enabled(true);
  train_step(*module, randn_there({16, 8}));
  EXPECT_EQ(recorder.step(), 0u);
  train_step(*module, randn_there({16, 8}));
  EXPECT_EQ(recorder.step(), 12u);
}

TEST_F(Recording, StandsBesideATrackerAndAnotherRecorder) {
  auto tracked = track_scales(model());
  Recorder a(*tracked, RecordRules::everything(1), file("a"));
  Recorder b(*tracked, RecordRules::everything(1), file("b"));
  train_step(*tracked, randn_there({16, 8}));
  EXPECT_EQ(a.step(), 12u);
  EXPECT_EQ(b.step(), 12u);
  const ScalesGraph scales = scales_graph(*tracked);
  const ScaleNode* y = scales.find("y");
  ASSERT_TRUE(y != nullptr && y->metrics && y->metrics->bwd);
  const History ha = read_history(file("a")), hb = read_history(file("b"));
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(ha.steps[0].rows[i].data.abs_max, hb.steps[0].rows[i].data.abs_max);
  EXPECT_EQ(ha.tensors, hb.tensors);
}

const HistoryRow* find_row(const History& history, const HistoryStep& step, const std::string& name, bool backward) {
  for (const HistoryRow& row : step.rows) {
    if (history.tensors[row.tensor].name == name && row.backward == backward) return &row;
  }
  return nullptr;
}

void expect_measured(const HistoryRow* row, const at::Tensor& x) {
  ASSERT_NE(row, nullptr);
  const TensorMetrics m = measure(x, {.histogram = true});
  const Metrics::Data& d = row->data;
  EXPECT_NEAR(d.mean_abs, m.mean_abs, 1e-6 * m.mean_abs);
  EXPECT_NEAR(d.abs_mean, m.abs_mean, 1e-6 * m.mean_abs);
  EXPECT_NEAR(d.std, m.std, 1e-6 * m.std);
  EXPECT_EQ(d.abs_max, m.abs_max);
  EXPECT_EQ(d.abs_min, m.abs_min);
  EXPECT_EQ(d.numel, m.numel);
  EXPECT_EQ(d.nan_count, m.nan_count);
  EXPECT_EQ(d.zero_count, m.zero_count);
  ASSERT_NE(d.histogram, nullptr);
  EXPECT_EQ(d.histogram->counts, m.histogram->counts);
}

TEST_F(Recording, MicrobatchesOfAStepAreMeasuredAsOneTensor) {
  // Forwards first, as a pipeline has them; or each with its backward, as accumulated gradients have them.
  for (const bool forwards_first : {true, false}) {
    auto module = model();
    const fs::path path = file(forwards_first ? "a" : "b");
    Recorder recorder(*module, RecordRules::everything(1), path);
    std::vector<at::Tensor> inputs, losses, gradients;
    for (int m = 0; m < 3; ++m) {
      inputs.push_back(randn_there({16, 8}) * (m + 1) + m);
      losses.push_back(module->run({inputs.back()})[0].toTensor() * std::exp2(-4 * m));
      if (!forwards_first) losses.back().backward();
    }
    if (forwards_first) {
      for (auto& loss : losses) loss.backward();
    }
    EXPECT_EQ(recorder.step(), 12u);
    auto plain = model();
    plain->state().get("fc.weight").tensor.data().copy_(module->state().get("fc.weight").tensor.detach());
    for (int m = 0; m < 3; ++m) {
      plain->state().get("fc.weight").tensor.mutable_grad().reset();
      (plain->run({inputs[size_t(m)]})[0].toTensor() * std::exp2(-4 * m)).backward();
      gradients.push_back(plain->state().get("fc.weight").tensor.grad());
    }
    train_step(*module, inputs[0]);
    recorder.step();
    const History history = read_history(path);
    const HistoryStep &three = history.steps[0], &one = history.steps[1];
    expect_measured(find_row(history, three, "x", false), at::cat(inputs));
    expect_measured(find_row(history, three, "fc.weight", true), at::cat(gradients));
    // Once, as it is the same in every microbatch.
    expect_measured(find_row(history, three, "fc.weight", false), module->state().get("fc.weight").tensor.detach());
    // The next step begins anew.
    expect_measured(find_row(history, one, "x", false), inputs[0]);
    expect_measured(find_row(history, one, "fc.weight", true), gradients[0]);
  }
}

TEST_F(Recording, AConditionSeesEveryMicrobatch) {
  auto module = model();
  Recorder recorder(
      *module,
      RecordRules::parse("[[rule]]\nname = \"x\"\nevery = 1\nwhen = { statistic = \"nan_count\", above = 0 }\n"),
      file());
  at::Tensor bad = randn_there({16, 8});
  bad[0][0] = NAN;
  train_step(*module, bad);
  train_step(*module, randn_there({16, 8}));
  EXPECT_EQ(recorder.step(), 2u);
  train_step(*module, randn_there({16, 8}));
  EXPECT_EQ(recorder.step(), 0u);
}

TEST_F(Recording, GraphsForSeveralShapesShareAParametersGradient) {
  State state;
  parameter(state, "fc.weight", randn_there({8, 8}));
  auto large = module_of(kModel, state);
  std::string text = kModel;
  for (size_t at = 0; (at = text.find("[16, 8]", at)) != std::string::npos;) text.replace(at, 7, "[4, 8]");
  auto small = module_of(text.c_str(), state);
  Recorder recorder(*large, RecordRules::everything(1), file());
  recorder.attach(*small);
  large->run({randn_there({16, 8})})[0].toTensor().backward();
  const at::Tensor first = large->state().get("fc.weight").tensor.grad().clone();
  small->run({randn_there({4, 8})})[0].toTensor().backward();
  const at::Tensor second = large->state().get("fc.weight").tensor.grad() - first;
  recorder.step();
  const History history = read_history(file());
  const HistoryRow* row = find_row(history, history.steps[0], "fc.weight", true);
  ASSERT_NE(row, nullptr);
  EXPECT_EQ(row->data.numel, 128);
  EXPECT_NEAR(row->data.std, at::cat({first, second}).std().item<double>(), 1e-5);
}

TEST_F(Recording, AGraphOutlivesItsRecorder) {
  auto module = model();
  { Recorder recorder(*module, RecordRules::everything(1), file()); }
  EXPECT_NO_THROW(train_step(*module, randn_there({16, 8})));
}

TEST_F(Recording, RulesAndStepsThatAreNoneAreRefused) {
  auto module = model();
  RecordRules rules = RecordRules::everything(1);
  rules.rules[0].names.clear();
  EXPECT_THAT(message_of([&] { Recorder(*module, rules, file()); }), HasSubstr("rule 1 has no pattern of names"));
  for (const int64_t after : {int64_t{-1}, INT64_MAX}) {
    EXPECT_THAT(message_of([&] { Recorder(*module, RecordRules::everything(1), file(), {true, after}); }),
                HasSubstr("RecorderOptions::after is " + std::to_string(after)));
  }
  Recorder recorder(*module, RecordRules::everything(1), file());
  train_step(*module, randn_there({16, 8}));
  recorder.step();
  EXPECT_THAT(message_of([&] { recorder.set_step(INT64_MAX); }), HasSubstr("2^62 at most"));
  EXPECT_THROW(recorder.add_hash({"w", "", "state", "", {}}, at::Tensor()), Error);
}

TEST_F(Recording, ARuleThatFitsNothingIsRefusedWithTheNamesThereAre) {
  auto module = model();
  EXPECT_THAT(
      message_of([&] { Recorder(*module, RecordRules::parse("[[rule]]\nname = \"layer.*\"", "r.toml"), file()); }),
      AllOf(HasSubstr("r.toml:1: name = \"layer.*\""), HasSubstr("fc.weight")));
  EXPECT_THAT(
      message_of([&] { Recorder(*module, RecordRules::parse("[[rule]]\noperator = \"linear\"", "r.toml"), file()); }),
      AllOf(HasSubstr("operator = \"linear\""), HasSubstr("aten::linear")));
  // Refused recorders leave no files; a file of another kind is left alone.
  EXPECT_FALSE(std::filesystem::exists(file()));
  EXPECT_NO_THROW(Recorder(*module, RecordRules::everything(), file()));
  spill(file("other"), "mine");
  EXPECT_THAT(message_of([&] { Recorder(*module, RecordRules::everything(), file("other")); }),
              HasSubstr("there already"));
  EXPECT_EQ(slurp(file("other")), "mine");
}

TEST_F(Recording, AppendsAfterTheLastStepAndRefusesToOverwrite) {
  auto module = model();
  {
    Recorder recorder(*module, RecordRules::everything(1), file());
    train_step(*module, randn_there({16, 8}));
    recorder.step();
    EXPECT_THAT(message_of([&] { Recorder(RecordRules::everything(1), file(), {.append = true}); }),
                HasSubstr("another recorder"));
  }
  EXPECT_THAT(message_of([&] { Recorder(RecordRules::everything(1), file()); }), HasSubstr("append"));
  spill(file(), slurp(file()) + "half a record");
  {
    auto again = model();
    Recorder recorder(*again, RecordRules::everything(1), file(), {.append = true});
    EXPECT_EQ(recorder.current_step(), 2);
    train_step(*again, randn_there({16, 8}));
    recorder.step();
  }
  const History history = read_history(file());
  EXPECT_EQ(history.torn_bytes, 0u);
  ASSERT_EQ(history.steps.size(), 2u);
  EXPECT_EQ(history.steps[1].step, 2);
  EXPECT_EQ(history.tensors.size(), 6u);
  EXPECT_EQ(history.rules.size(), 2u);
}

TEST_F(Recording, StepsThatAreComputedAgainAreThereOnce) {
  auto module = model();
  const auto train = [&](RecorderOptions options, int64_t last) {
    Recorder recorder(*module, RecordRules::parse("every = 2\n[[rule]]\n", "r.toml"), file(), options);
    for (int64_t step = recorder.current_step(); step <= last; ++step) {
      train_step(*module, randn_there({16, 8}));
      recorder.step({{"loss", static_cast<double>(step)}});
    }
  };
  train({}, 6);  // recorded: 1, 3, 5
  const std::string before = slurp(file());
  train({.append = true, .after = 4}, 8);
  const auto steps = [&] {
    std::vector<int64_t> found;
    for (const HistoryStep& step : read_history(file()).steps) found.push_back(step.step);
    return found;
  };
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 3, 5, 7}));
  EXPECT_EQ(read_history(file()).scalars.size(), 8u);
  EXPECT_EQ(read_history(file()).tensors.size(), 6u);
  // A history that ends before: its steps keep the run's numbers.
  train({.append = true, .after = 12}, 14);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1, 3, 5, 7, 13}));
  // Nothing of it is left; a torn end does not matter.
  spill(file(), before + "half a record");
  train({.append = true, .after = 0}, 2);
  EXPECT_EQ(steps(), (std::vector<int64_t>{1}));
  EXPECT_EQ(read_history(file()).torn_bytes, 0u);
}

TEST_F(Recording, RefusesRulesAndStepsThatMakeNoSense) {
  auto graph = model();
  RecordRules rules = RecordRules::everything(1);
  rules.rules[0].every = 0;
  EXPECT_THAT(message_of([&] { Recorder(*graph, rules, file()); }), HasSubstr("rule 1 has every = 0"));
  Recorder recorder(*graph, RecordRules::everything(1), file());
  recorder.set_step(5);
  recorder.step({{"loss", 1}});
  EXPECT_THAT(message_of([&] { recorder.set_step(5); }), HasSubstr("set to step 5"));
  EXPECT_EQ(recorder.current_step(), 6);
}

TEST_F(Recording, SaysWhichFileCannotBeWritten) {
  EXPECT_THAT(message_of([] { Recorder(RecordRules::everything(), "/proc/none/a.history"); }),
              HasSubstr("/proc/none/a.history"));
  EXPECT_THAT(message_of([] { read_history("/proc/none/a.history"); }), HasSubstr("/proc/none/a.history"));
}

// ---- the file ----

}  // namespace
}  // namespace plumb
