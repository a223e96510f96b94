#include "plumb/recording/module_diff.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "plumb/core/error.h"
#include "plumb/numerics/hash.h"
#include "plumb/recording/recorder.h"
#include "plumb/recording/recording_testing.h"
#include "plumb/tensors/run_rows.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/models_testing.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using namespace testing_models;
using namespace testing_recording;

const char* kHashes = "every = 1\n[[rule]]\nstatistics = [\"hash\"]\n";

// y = x w', z = gelu(y), o = sum(z v') by rows.
std::shared_ptr<GraphModule> two_layers(double bump = 0, int rows = 16) {
  at::manual_seed(7);
  State state;
  parameter(state, "up.weight", randn_there({8, 8}));
  parameter(state, "down.weight", randn_there({8, 8}));
  if (bump != 0) {
    const at::NoGradGuard no_grad;
    state.get("down.weight").tensor.view(-1)[5].add_(bump);
  }
  return module_of(c10::str("graph {\n%x: f32[", rows, ", 8] = placeholder \"x\"\n", R"(
    %w = get_attr "up.weight"
    %v = get_attr "down.weight"
    %y = aten::linear(%x, %w) in "":"Net" "up":"Linear"
    %z = aten::gelu(%y)
    %u = aten::linear(%z, %v) in "":"Net" "down":"Linear"
    output(%u)
  })"),
                   std::move(state));
}

// A step of some microbatches, of which the rows are known as a pipeline's.
History step_of(GraphModule& module, const at::Tensor& x, const std::vector<int64_t>& rows, const fs::path& path,
                bool whole = false) {
  Recorder recorder(
      module, RecordRules::parse(whole ? "every = 1\n[[rule]]\nstatistics = [\"hash\", \"std\"]\n" : kHashes), path);
  int64_t first = 0;
  for (const at::Tensor& part : x.split(rows)) {
    const RunningRows running({first, part.size(0)});
    module.run({part})[0].toTensor().pow(2).sum().backward();
    first += part.size(0);
  }
  recorder.step();
  return read_history(path);
}

class Diffs : public Recording {};

TEST_F(Diffs, ARuleOfHashesRecordsEveryMicrobatchAndNoRows) {
  const History history = step_of(*two_layers(), randn_there({16, 8}), {16}, file());
  EXPECT_TRUE(history.steps.empty());
  ASSERT_EQ(history.hashes.size(), 1u);
  EXPECT_EQ(history.hashes[0].hashes.size(), 12u);  // six values and their gradients
  EXPECT_EQ(history.tensors.back().inputs.size(), 2u);
}

TEST_F(Diffs, EqualStepsAreEqual) {
  const at::Tensor x = randn_there({16, 8});
  const auto net = two_layers();
  const DiffReport report = diff(step_of(*two_layers(), x, {16}, file("a")), step_of(*net, x, {16}, file("b")));
  EXPECT_FALSE(report.first);
  EXPECT_EQ(report.basis, DiffBasis::SameRows);
  EXPECT_EQ(report.compared, 12);
  EXPECT_THAT(report.conclusion(), HasSubstr("Equal to step 1."));
}

TEST_F(Diffs, ResultsOfTheSameOperatorsInTheSameModulesAreComparedWhateverTheirNames) {
  const at::Tensor x = randn_there({16, 8});
  const History history = step_of(*two_layers(), x, {16}, file("a"), true);
  History other = step_of(*two_layers(1e-3), x, {16}, file("b"), true);
  for (HistoryTensor& tensor : other.tensors)
    if (tensor.operation.starts_with("aten::")) tensor.name += "_1";
  const DiffReport report = diff(history, other);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.name, "down.weight");
  EXPECT_EQ(report.compared, 12);
  EXPECT_THAT(report.only_b, ElementsAre());

  History keys;  // in another order
  keys.tensors = {{.name = "q.linear", .module = "q", .operation = "aten::linear"},
                  {.name = "k.linear", .module = "k", .operation = "aten::linear"}};
  keys.hashes = {{1, {{0, false, 0, 4, 4, 11}, {1, false, 0, 4, 4, 12}}}};
  History turned = keys;
  std::swap(turned.tensors[0], turned.tensors[1]);
  std::swap(turned.hashes[0].hashes[0].hash, turned.hashes[0].hashes[1].hash);
  EXPECT_TRUE(diff(keys, turned).equal()) << diff(keys, turned).conclusion();
}

TEST_F(Diffs, ABufferThatForwardsWriteIsComparedTurnByTurnWhicheverRankHasIt) {
  History whole;
  whole.tensors = {{.name = "norm.mean", .operation = "buffer"}};
  whole.hashes = {{1, {{0, false, 0, 0, 4, 11}, {0, false, 0, 0, 4, 12}}}};
  History staged = whole;
  staged.tensors[0].stage = staged.tensors[0].rank = 1;
  EXPECT_TRUE(diff(whole, staged).equal()) << diff(whole, staged).conclusion();
  staged.hashes[0].hashes[1].hash = 13;
  EXPECT_EQ(diff(whole, staged).differing, 1);
  EXPECT_EQ(diff(whole, staged).first->rank, 1);
  staged.hashes[0].hashes.pop_back();
  EXPECT_EQ(diff(whole, staged).differing, 1);
  EXPECT_EQ(diff(staged, whole).differing, 1);
}

TEST_F(Diffs, AGradientOfWhatSeveralStagesUseIsComparedWithThatOfTheSameStagesAlone) {
  History whole;
  whole.tensors = {{.name = "x", .operation = "input"}};
  whole.hashes = {{1, {{0, false, 0, 4, 4, 11}, {0, true, 0, 4, 4, 12}}}};
  History staged = whole;  // each stage has a part of the gradient
  staged.tensors = {{.name = "x", .operation = "input", .stage = 0, .rank = 0},
                    {.name = "x", .operation = "input", .stage = 1, .rank = 1}};
  staged.hashes = {
      {1, {{0, false, 0, 4, 4, 11}, {1, false, 0, 4, 4, 11}, {0, true, 0, 4, 4, 5}, {1, true, 0, 4, 4, 7}}}};
  History elsewhere = staged;
  elsewhere.tensors[1].stage = elsewhere.tensors[1].rank = 2;
  for (const auto& [a, b] : {std::pair(whole, staged), std::pair(staged, whole), std::pair(staged, elsewhere)}) {
    EXPECT_TRUE(diff(a, b).equal()) << diff(a, b).to_text();
    EXPECT_EQ(diff(a, b).not_comparable, 1);
  }
  History wrong = staged;
  wrong.hashes[0].hashes[3].hash = 8;
  EXPECT_EQ(diff(staged, wrong).first->stage, 1);
  wrong.hashes[0].hashes[1].hash = 10;  // the value itself is compared everywhere
  EXPECT_EQ(diff(whole, wrong).first->stage, 1);
}

TEST_F(Diffs, ReplicasMayDifferInWhatTheirOwnMicrobatchesWroteIntoBuffers) {
  History whole;
  whole.tensors = {{.name = "norm.mean", .operation = "buffer"}};
  whole.hashes = {{1, {{0, false, 0, 0, 4, 11}, {0, false, 0, 0, 4, 12}, {0, false, 0, 0, 4, 13}}}};
  History replicas = whole;
  replicas.tensors.push_back(replicas.tensors[0]);
  replicas.tensors[0].rank = 0, replicas.tensors[1].rank = 1;
  replicas.hashes = {{1, {{0, false, 0, 0, 4, 11}, {0, false, 0, 0, 4, 12}, {1, false, 0, 0, 4, 11}}}};
  replicas.hashes[0].hashes.push_back({1, false, 0, 0, 4, 15});
  EXPECT_TRUE(diff(whole, replicas).equal()) << diff(whole, replicas).conclusion();
  History staged = replicas;
  staged.tensors[0].rank = 2, staged.tensors[1].rank = 3;
  EXPECT_TRUE(diff(replicas, staged).equal()) << diff(replicas, staged).conclusion();
  replicas.hashes[0].hashes[2].hash = 16;
  EXPECT_EQ(diff(whole, replicas).first->rank, 1);
  staged.hashes[0].hashes[3].hash = 17;
  EXPECT_EQ(diff(replicas, staged).differing, 2);
}

TEST_F(Diffs, MicrobatchesWhoseRowsOneRunDoesNotKnowAreComparedInTheirOrder) {
  const at::Tensor x = randn_there({16, 8});
  const History known = step_of(*two_layers(0, 8), x, {8, 8}, file("a"));
  History unknown = known;
  for (HistoryHash& each : unknown.hashes[0].hashes) each.first /= 8, each.rows = 0;
  DiffReport report = diff(known, unknown);
  EXPECT_TRUE(report.equal()) << report.to_text();
  EXPECT_EQ(report.basis, DiffBasis::SameRows);
  EXPECT_EQ(report.not_comparable, 0);
  ++unknown.hashes[0].hashes[1].hash;
  report = diff(unknown, known);
  EXPECT_THAT(report.conclusion(), HasSubstr("microbatch 1, rows 8 to 15"));
  EXPECT_THAT(report.statement(), HasSubstr("An input differs"));
}

TEST_F(Diffs, StepsThatOneRunLacksAreCounted) {
  History longer = step_of(*two_layers(), randn_there({16, 8}), {16}, file());
  const History shorter = longer;
  longer.hashes.push_back(longer.hashes.back());
  longer.hashes.back().step = 2;
  EXPECT_THAT(diff(shorter, longer, {"a", "b"}).conclusion(), HasSubstr("compared. 1 step is only in b."));
}

TEST_F(Diffs, TensorsThatOneRunLacksInALaterStepAreNamed) {
  History whole = step_of(*two_layers(), randn_there({16, 8}), {16}, file());
  whole.hashes.push_back(whole.hashes.back());
  whole.hashes.back().step = 2;
  History ended = whole;  // a rank's history ends before the others'
  ended.hashes.back().hashes.resize(2);
  for (const auto& report : {diff(whole, ended, {"a", "b"}), diff(ended, whole, {"b", "a"})})
    EXPECT_THAT(report.conclusion(), HasSubstr("Not compared, only in a: "));
}

TEST_F(Diffs, TheFirstDifferenceIsTheParameterThatDiffersAndTheRestFollows) {
  const at::Tensor x = randn_there({16, 8});
  const DiffReport report = diff(step_of(*two_layers(), x, {16}, file("a"), true),
                                 step_of(*two_layers(0.5), x, {16}, file("b"), true), {"a", "b"});
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.name, "down.weight");
  EXPECT_EQ(report.first->kind, DiffKind::Value);
  EXPECT_EQ(*report.first->step, 1);
  EXPECT_EQ(report.following, report.differing - 1);
  EXPECT_THAT(report.first->statistics, HasSubstr("std"));
  EXPECT_THAT(report.conclusion(), HasSubstr("In step 1 first differs: down.weight"));
}

TEST_F(Diffs, AMicrobatchIsNamed) {
  const at::Tensor x = randn_there({16, 8});
  at::Tensor other = x.clone();
  other[9][3] += 1;
  const History a = step_of(*two_layers(0, 4), x, {4, 4, 4, 4}, file("a")),
                b = step_of(*two_layers(0, 4), other, {4, 4, 4, 4}, file("b"));
  const DiffReport report = diff(a, b);
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.operation, "input");
  EXPECT_EQ(report.first->microbatch, 2);
  EXPECT_EQ(report.first->first_row, 8);
  EXPECT_THAT(report.conclusion(), HasSubstr("microbatch 2, rows 8 to 11"));
}

// Two stages that are modules by themselves: their tensors have the same names.
TEST_F(Diffs, StagesWhoseTensorsHaveEqualNamesAreComparedApart) {
  const at::Tensor x = randn_there({16, 8});
  const auto step = [&](double bump, const char* name) {
    const auto first = two_layers(), second = two_layers(bump);
    Recorder recorder(RecordRules::parse(kHashes), file(name), {.part = true});
    recorder.attach(*first, 0), recorder.attach(*second, 1);
    second->run({first->run({x})[0].toTensor()})[0].toTensor().sum().backward();
    recorder.step();
    return read_history(file(name));
  };
  const History a = step(0.5, "a");
  const DiffReport same = diff(a, a);
  EXPECT_FALSE(same.first) << same.to_text();
  EXPECT_EQ(same.compared, 24);
  const DiffReport report = diff(a, step(0.25, "b"));
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.name, "down.weight");
  EXPECT_EQ(report.first->stage, 1);
  EXPECT_EQ(report.following, report.differing - 1);
}

// Each rank has other rows of which nobody knows the numbers.
TEST_F(Diffs, RanksWithOtherRowsAreComparedEachWithItself) {
  const auto run = [&](double of_second, const char* name) {
    std::vector<History> ranks;
    for (const double value : {1.0, of_second}) {
      Recorder recorder(RecordRules(), file(c10::str(name, value)), {.part = true});
      recorder.add_hash({.name = "y", .operation = "aten::relu", .stage = 0}, at::full({4}, value));
      recorder.step();
      ranks.push_back(read_history(file(c10::str(name, value))));
    }
    return merge_histories(std::move(ranks));
  };
  const History a = run(2, "a");
  EXPECT_FALSE(diff(a, run(2, "b")).first);
  const DiffReport report = diff(a, run(3, "c"));
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.first->rank, 1);
}

TEST_F(Diffs, OtherMicrobatchesAreComparedByTheirSums) {
  // Products may see the number of rows: the model has none.
  const auto pointwise = [](int rows) {
    State state;
    parameter(state, "w", at::full({8}, 0.5));
    return module_of(c10::str("graph {\n%x: f32[", rows, ", 8] = placeholder \"x\"\n", R"(
      %w = get_attr "w"
      %y = aten::mul.Tensor(%x, %w)
      output(%y)
    })"),
                     std::move(state));
  };
  const at::Tensor x = randn_there({16, 8});
  const History a = step_of(*pointwise(16), x, {16}, file("a")), b = step_of(*pointwise(8), x, {8, 8}, file("b"));
  const DiffReport same = diff(a, b);
  EXPECT_FALSE(same.first) << same.to_text();
  EXPECT_EQ(same.basis, DiffBasis::OtherRows);
  EXPECT_EQ(same.not_comparable, 1);  // the parameter's gradient
  at::Tensor other = x.clone();
  other[2][2] += 1;
  const DiffReport report = diff(a, step_of(*pointwise(8), other, {8, 8}, file("c")));
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.operation, "input");
}

// Histories of one step, of the hashes of some tensors by microbatch.
History hashed(const fs::path& path, const std::vector<std::pair<HistoryTensor, std::vector<at::Tensor>>>& tensors) {
  HistoryWriter writer(path, false);
  HistoryHashes step{1, {}};
  for (const auto& [tensor, parts] : tensors) {
    int64_t first = 0;
    for (const at::Tensor& part : parts) {
      const int64_t rows = parts.size() > 1 || tensor.operation.starts_with("aten") ? part.size(0) : 0;
      step.hashes.push_back({writer.tensor(tensor), false, first, rows, hashed_words(part), hash_of(part)});
      first += rows;
    }
  }
  writer.hashes(step);
  return read_history(path);
}

TEST_F(Diffs, EqualRowsAreEqualInOtherMicrobatches) {
  const HistoryTensor mask{.name = "ones", .operation = "aten::ones"}, sum{.name = "w", .operation = "gradient"};
  const at::Tensor four = at::ones({4, 3}), two = at::ones({2, 3});
  const auto one = [](float value) { return std::vector{at::full({4}, value)}; };
  const History a = hashed(file("a"), {{mask, {four, four}}, {sum, one(1)}}),
                b = hashed(file("b"), {{mask, {two, two, two, two}}, {sum, one(2)}});
  for (const auto& report : {diff(a, b), diff(b, a)}) {
    EXPECT_FALSE(report.first) << report.to_text();
    EXPECT_EQ(report.compared, 1);
    EXPECT_EQ(report.not_comparable, 1);  // the sum over microbatches
  }
  const DiffReport shorter = diff(a, hashed(file("c"), {{mask, {two}}}));
  EXPECT_FALSE(shorter.equal());
  EXPECT_FALSE(shorter.equal_to);
  EXPECT_THAT(shorter.to_text(), AllOf(HasSubstr("Nothing was compared"), HasSubstr("1 tensors cannot be compared")));
}

TEST_F(Diffs, TensorsOfOtherSizesDifferWhateverTheirHashes) {
  const auto run = [&](const char* name, int64_t size) {
    return hashed(file(name), {{{.name = "b", .operation = "state"}, {at::zeros({size})}}});
  };
  const History a = run("a", 4), b = run("b", 8);
  ASSERT_EQ(a.hashes[0].hashes[0].hash, b.hashes[0].hashes[0].hash);
  const DiffReport report = diff(a, b);
  ASSERT_TRUE(report.first) << report.to_text();
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.name, "b");
  for (const auto& [one, other] : {std::pair(a, b), std::pair(b, a)}) {
    const DiffReport of_ranks = diff(merge_histories({one, one}), merge_histories({one, other}));
    ASSERT_TRUE(of_ranks.first) << of_ranks.to_text();
    EXPECT_EQ(of_ranks.first->rank, 1);
    EXPECT_TRUE(diff(merge_histories({one, one}), other).first);
  }
}

// A damaged file of a rank may say that a stage is made of a later one.
TEST_F(Diffs, AnInputMayStandBehindItsUser) {
  History of_rank = hashed(file("a"), {{{.name = "late", .operation = "aten::relu", .stage = 1}, {at::ones({4})}},
                                       {{.name = "early", .operation = "aten::relu", .stage = 0}, {at::ones({4})}}});
  of_rank.tensors[1].inputs = {0};
  const History a = merge_histories({of_rank});
  const DiffReport report = diff(a, a);
  EXPECT_TRUE(report.equal()) << report.to_text();
  EXPECT_THAT(report.tensors[0].tensor.inputs, ElementsAre(1u));
}

TEST_F(Diffs, TornRecordsAreSaid) {
  History whole = step_of(*two_layers(), randn_there({16, 8}), {16}, file()), torn = whole;
  torn.torn_bytes = 7;
  const std::string says = "left out: the last record of b (7 bytes)";
  EXPECT_THAT(diff(whole, torn, {"a", "b"}).to_text(), HasSubstr(says));
  EXPECT_THAT(diff(whole, torn, {"a", "b"}).to_json().dump(), HasSubstr(says));
  torn.hashes.clear();
  EXPECT_THAT(message_of([&] { diff(whole, torn, {"a", "b"}); }), HasSubstr("the last record of b (7 bytes)"));
}

TEST_F(Diffs, AReplayThatHasNoTensorOfItsRunSaysNothingOfIt) {
  const auto of = [&](const char* name) {
    return hashed(file(name), {{{.name = name, .operation = "state"}, {at::ones({4})}}});
  };
  const History a = of("a"), other = of("other");
  EXPECT_THAT(conclude_replays(a, a, other, a, {"a", "b"}), HasSubstr("Nothing follows from a and a, again: Nothing"));
}

TEST_F(Diffs, StateIsComparedStepByStepAndAReplaySaysWhoWasWrong) {
  const auto write = [&](const char* name, double at_three) {
    Recorder recorder(RecordRules(), file(name), {.part = true});
    for (int64_t step = 1; step <= 3; ++step) {
      recorder.set_step(step);
      const double value = step == 3 ? at_three : 1.0;
      recorder.add_hash({.name = "w", .operation = "state"}, at::full({4}, value));
      recorder.add_hash({.name = "exp_avg/w", .operation = "optimizer"}, at::full({4}, value));
      recorder.step();
    }
    return read_history(file(name));
  };
  const History a = write("a", 1), b = write("b", 2);
  const DiffReport report = diff(a, b, {"a", "b"});
  ASSERT_TRUE(report.first);
  EXPECT_EQ(*report.first->step, 3);
  EXPECT_EQ(report.first->kind, DiffKind::AfterStep);
  EXPECT_EQ(report.following, 1);
  EXPECT_THAT(report.conclusion(), HasSubstr("Equal to step 2. In step 3 first differs: w after the step"));
  EXPECT_THAT(report.statement(), HasSubstr("equal if both runs had the same rows in every microbatch"));
  EXPECT_THAT(report.statement(), HasSubstr("as many threads a process"));
  EXPECT_THAT(conclude_replays(a, b, a, a, {"a", "b"}), HasSubstr("a machine of b was wrong"));
  EXPECT_THAT(conclude_replays(a, b, a, b, {"a", "b"}), HasSubstr("programs, options or kernels"));
  EXPECT_THAT(conclude_replays(a, b, b, a, {"a", "b"}), HasSubstr("Neither run is reproduced"));
}

TEST_F(Diffs, HistoriesWithoutHashesAreRefused) {
  const auto write = [&](const char* name) {
    const auto net = two_layers();
    Recorder recorder(*net, RecordRules::everything(1), file(name));
    net->run({randn_there({16, 8})})[0].toTensor().sum().backward();
    recorder.step();
    return read_history(file(name));
  };
  EXPECT_THAT(message_of([&] { diff(write("a"), write("b")); }), HasSubstr("hashes of no step in common"));
}

TEST_F(Diffs, ModulesAreComparedTensorByTensor) {
  const at::Tensor x = randn_there({16, 8});
  const auto net = two_layers(), same = two_layers();
  EXPECT_FALSE(diff(*net, *same, {x}).first);
  const DiffReport report = diff(*net, *two_layers(1e-6), {x});
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.name, "down.weight");
  EXPECT_EQ(report.first->distance->differing, 1);
  EXPECT_GT(report.first->distance->ulps, 0);
  EXPECT_EQ(report.basis, DiffBasis::SameRows);
  EXPECT_FALSE(net->state().get("up.weight").tensor.grad().defined());
  // A relative tolerance.
  EXPECT_FALSE(diff(*net, *two_layers(1e-6), {x}, {.tolerance = 1e-3}).first);
  for (const double wrong : {-1.0, double{NAN}, double{INFINITY}})
    EXPECT_THROW(diff(*net, *two_layers(1e-6), {x}, {.tolerance = wrong}), Error);
}

TEST_F(Diffs, ATransformedModelIsComparedByDistance) {
  const auto net = two_layers();
  const auto rounded = simulate_fp8(net);
  const DiffReport report = diff(*net, *rounded, {randn_there({16, 8})});
  EXPECT_EQ(report.basis, DiffBasis::Distance);
  ASSERT_TRUE(report.first);
  EXPECT_EQ(report.tensors[report.first->tensor].tensor.operation, "aten::linear") << report.to_text();
  EXPECT_GT(report.first->distance->relative, 1e-3);
}

TEST_F(Diffs, DistancesOfLargeTensorsAreTakenInParts) {
  const at::Tensor a = at::zeros({(int64_t{1} << 24) + 8});
  at::Tensor b = a.clone();
  a[-1] = 4, a[0] = 3;
  b[-1] = 7, b[0] = 7;
  const TensorDistance apart = distance_between(a, b);
  EXPECT_EQ(apart.differing, 2);
  EXPECT_DOUBLE_EQ(apart.relative, 1);  // (4, 3) of (3, 4)
  EXPECT_EQ(apart.ulps, distance_between(at::tensor({3.0f}), at::tensor({7.0f})).ulps);
}

TEST_F(Diffs, DistancesCountUnitsOfTheLastPlace) {
  const at::Tensor a = at::tensor({1.0f, -1.0f, 0.0f});
  at::Tensor b = a.clone();
  b.view(at::kInt)[1].add_(3);
  const TensorDistance apart = distance_between(a, b);
  EXPECT_EQ(apart.differing, 1);
  EXPECT_EQ(apart.ulps, 3);
  EXPECT_EQ(distance_between(a, a).differing, 0);
  EXPECT_EQ(distance_between(at::tensor({0.0}), at::tensor({-0.0})).ulps, 0);
  EXPECT_EQ(distance_between(at::tensor({0.0}), at::tensor({-0.0})).differing, 1);
  const TensorDistance overflow = distance_between(at::tensor({1.0}), at::tensor({double{INFINITY}}));
  EXPECT_TRUE(std::isnan(overflow.relative));
  EXPECT_EQ(overflow.to_string().find("relative"), std::string::npos) << overflow.to_string();
}

TEST_F(Diffs, QuantizedTensorsOfOtherScalesDiffer) {
  const auto quantized = [](double scale) {
    return at::quantize_per_tensor(at::ones({3}) * scale, scale, 0, at::kQInt8);
  };
  ASSERT_TRUE(quantized(0.5).int_repr().equal(quantized(0.25).int_repr()));
  EXPECT_EQ(distance_between(quantized(0.5), quantized(0.25)).differing, 3);
  EXPECT_EQ(distance_between(quantized(0.5), quantized(0.5)).differing, 0);
}

TEST_F(Diffs, ANameThatStandsTwiceIsRefused) {
  const DiffTensors once{{"w", at::ones({2})}}, twice{{"w", at::ones({2})}, {"w", at::zeros({2})}};
  for (const auto& [a, b] : {std::pair(once, twice), std::pair(twice, once)})
    EXPECT_THAT(message_of([&] { diff(a, b); }), HasSubstr("two tensors are called 'w'"));
}

TEST_F(Diffs, WhatIsMissingIsNamed) {
  EXPECT_THAT(message_of([] { diff(DiffTensors{{"w", at::Tensor()}}, DiffTensors{{"w", at::ones({2})}}); }),
              HasSubstr("w: an undefined tensor has no values"));
  const auto module = two_layers();
  ModuleDiff both(*module, *module);
  EXPECT_THAT(message_of([&] { both.run(nullptr); }), HasSubstr("ModuleDiff::run() has no function"));
}

}  // namespace
}  // namespace plumb
