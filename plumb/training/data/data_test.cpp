// The order of rows, positions in it, files that change, what counts in the loss.
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/training/data/batches.h"
#include "plumb/training/step/loss.h"
#include "plumb/training/training_testing.h"

namespace plumb {
namespace {

using namespace testing_training;
using testing::AllOf;
using testing::HasSubstr;

class TrainingData : public Training {
 public:
  std::unique_ptr<Samples> open(const std::string& file) { return open_samples(options, {path(file), "", ""}, *lm()); }
  EpochBatches epochs(int64_t rows, uint64_t seed = 3) { return {open("held.bin"), rows, true, seed}; }
};

TEST(Permutation, IsOneForEverySize) {
  for (const int64_t n : {1, 2, 3, 4, 5, 17, 64, 1000, 4097}) {
    const Permutation order(n, 42);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_LT(order(i), n);
      seen.insert(order(i));
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
  }
  const int64_t large = (int64_t{1} << 61) + 7;
  const Permutation order(large, 1);
  for (int64_t i = 0; i < 1000; ++i) EXPECT_LT(order(large - 1 - i), large);
}

TEST(Permutation, RefusesNumbersThatAreNotThere) {
  for (const int64_t n : {int64_t{-5}, int64_t{0}, INT64_MAX}) EXPECT_THROW(Permutation(n, 1), Error) << n;
  const Permutation order(5, 1);
  for (const int64_t i : {-1, 5, 77}) EXPECT_THROW(order(i), Error) << i;
}

TEST(ReadAhead, RefusesASourceThatIsNotThere) {
  EXPECT_THROW(ReadAhead(nullptr), Error);
  EXPECT_THROW(EpochBatches(nullptr, 4, true, 1), Error);
}

TEST(Permutation, IsAnotherOneForEveryKeyAndHasNoPlaceForARow) {
  // In 200 orders, no row of 10 should stand in a place much more often than in a tenth of them.
  std::vector<std::vector<int>> counts(10, std::vector<int>(10));
  for (uint64_t key = 0; key < 2000; ++key) {
    const Permutation order(10, key);
    for (int i = 0; i < 10; ++i) ++counts[i][static_cast<size_t>(order(i))];
  }
  for (const auto& row : counts) {
    for (const int count : row) EXPECT_NEAR(count, 200, 80);
  }
}

TEST_F(TrainingData, HasTargetsThatAreNoViewOfTheInputs) {
  const Batch one = open("held.bin")->read({0});
  const at::Tensor ids = one.inputs[0].clone();
  one.targets[0].fill_(-100);
  EXPECT_TRUE(at::equal(one.inputs[0], ids)) << "of one row, too";
}

TEST_F(TrainingData, HasEveryRowOnceInAnEpochAndBatchesOverItsEnd) {
  auto batches = epochs(5);
  const auto all = open("held.bin")->rows();
  ASSERT_EQ(all, 12);
  std::multiset<std::string> seen;
  for (int b = 0; b < 12; ++b) {
    const Batch batch = batches.next();
    ASSERT_EQ(batch.inputs[0].size(0), 5) << "every batch is whole";
    for (int64_t r = 0; r < 5; ++r) {
      const at::Tensor row = batch.inputs[0][r].contiguous();
      seen.insert(std::string(static_cast<const char*>(row.const_data_ptr()), row.nbytes()));
    }
  }
  for (const auto& row : seen) EXPECT_EQ(seen.count(row) % 5, 0u) << "60 rows are 5 epochs";
}

TEST_F(TrainingData, GoesOnAtItsPosition) {
  auto whole = epochs(5);
  for (int b = 0; b < 4; ++b) whole.next();
  const auto state = whole.state();
  EXPECT_EQ(state["rows"], 20);
  EXPECT_EQ(state["epoch"], 1);
  auto again = ReadAhead(std::make_unique<EpochBatches>(open("held.bin"), 5, true, 3));
  again.next();
  again.load_state(state);
  for (int b = 0; b < 7; ++b) {
    EXPECT_TRUE(at::equal(again.next().inputs[0], whole.next().inputs[0])) << b;
    EXPECT_EQ(again.state(), whole.state()) << "of what was taken, not of what was read ahead";
  }
  for (const char* bad : {"{}", "3", "{\"rows\": -1}", "{\"rows\": 1e300}", "{\"rows\": 9223372036854775807}"}) {
    EXPECT_THAT(message_of([&] { whole.load_state(nlohmann::json::parse(bad)); }), HasSubstr("position in the data"));
  }
}

TEST_F(TrainingData, NamesAFileThatChangesUnderTheTraining) {
  EpochBatches batches(open("held.bin"), 4, true, 3);
  batches.next();
  const auto says = [&] {
    return message_of([&] {
      for (int i = 0; i < 4; ++i) batches.next();
    });
  };
  fs::resize_file(folder / "held.bin", 40);
  EXPECT_THAT(says(), AllOf(HasSubstr("held.bin: has changed since the training began: 90 bytes then, 40 now")));
  std::ofstream(folder / "held.bin") << std::string(90, 'x');
  EXPECT_THAT(says(), HasSubstr("90 now, written again"));
  fs::remove(folder / "held.bin");
  EXPECT_THAT(says(), HasSubstr("held.bin: cannot be read"));
}

TEST_F(TrainingData, ReadsAFoldersFilesAsOneText) {
  fs::create_directories(folder / "texts" / ".hidden");
  const std::string text = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f\x10";
  for (size_t i = 0; i < text.size(); ++i) {
    std::ofstream(folder / "texts" / ("f" + std::to_string(10 + i))) << text[i];
    std::ofstream(folder / "texts" / ("f" + std::to_string(10 + i) + "_empty"));
  }
  std::ofstream(folder / "texts" / ".hidden" / "a") << text;
  const auto samples = open("texts");
  ASSERT_EQ(samples->rows(), 2);
  const Batch batch = samples->read({0, 1});
  EXPECT_TRUE(at::equal(batch.inputs[0].reshape({-1}), at::arange(1, 15)));
  EXPECT_TRUE(at::equal(batch.targets[0].reshape({-1}), at::arange(2, 16)));
}

TEST_F(TrainingData, ReadsTokensInPiecesFromNpyAndSafetensors) {
  const at::Tensor tokens = at::arange(400) * 7 % 32;
  save_npy(tokens.to(at::kShort), path("t.npy"));
  write_safetensors(path("one.safetensors"), {{"text", tokens.to(at::kInt)}});
  write_safetensors(path("named.safetensors"), {{"length", at::ones({2})}, {"tokens", tokens}});
  std::ofstream raw(folder / "t.bin", std::ios::binary);
  for (int i = 0; i < 400; ++i) raw.put(static_cast<char>(i * 7 % 32));
  raw.close();
  const Batch wanted = open("t.bin")->read({0, 3, 11});
  for (const char* name : {"t.npy", "one.safetensors", "named.safetensors"}) {
    const auto samples = open(name);
    EXPECT_EQ(samples->rows(), open("t.bin")->rows()) << name;
    const Batch batch = samples->read({0, 3, 11});
    EXPECT_TRUE(at::equal(batch.inputs[0], wanted.inputs[0])) << name;
    EXPECT_TRUE(at::equal(batch.targets[0], wanted.targets[0])) << name;
    fs::resize_file(folder / name, fs::file_size(folder / name) - 100);
    EXPECT_THAT(message_of([&] { samples->read({0}); }), HasSubstr("has changed since the training began")) << name;
    EXPECT_THAT(message_of([&] { open(name); }), HasSubstr(name)) << "is cut off";
  }
  fs::create_directories(folder / "mixed");
  save_npy(tokens.narrow(0, 0, 150), path("mixed/a.npy"));
  write_safetensors(path("mixed/b.safetensors"), {{"text", tokens.narrow(0, 150, 250)}});
  EXPECT_TRUE(at::equal(open("mixed")->read({0, 3, 11}).inputs[0], wanted.inputs[0]));
  save_npy(at::rand({3}), path("mixed/c.npy"));
  EXPECT_THAT(message_of([&] { open("mixed"); }), HasSubstr("c.npy: holds no tokens"));
}

TEST_F(TrainingData, ATokenBeyondInt64IsNamedAsItStandsInTheFile) {
  at::Tensor tokens = at::arange(400) % 32;
  tokens[5] = INT64_MIN + 3;
  write_safetensors(path("large.safetensors"), {{"tokens", tokens.view(at::kUInt64)}});
  save_tensors(tokens.view(at::kUInt64), path("large.pt"));
  for (const char* name : {"large.safetensors", "large.pt"}) {
    EXPECT_THAT(message_of([&] { open(name)->read({0, 3}); }), HasSubstr("token 5 is 9223372036854775811")) << name;
  }
}

TEST_F(TrainingData, ReadsRowsByNameFromSafetensors) {
  const at::Tensor x = at::randn({20, 4}), y = at::randn({20, 2}), mask = at::rand({20, 2}) > 0.5;
  write_safetensors(path("rows.safetensors"), {{"x0", x}, {"targets", y}, {"mask", mask}});
  save_tensors(x, path("x2.pt"));
  save_tensors(y, path("y2.pt"));
  save_tensors(mask, path("mask2.pt"));
  TrainOptions apart = rows(), together = rows();
  apart.data = path("x2.pt"), apart.targets = path("y2.pt"), apart.mask = path("mask2.pt");
  together.data = path("rows.safetensors"), together.targets = "";
  EXPECT_EQ(run(together, mlp()).losses(), run(apart, mlp()).losses());
  write_safetensors(path("rows.safetensors"), {{"z", x}, {"targets", y}});
  EXPECT_THAT(message_of([&] { run(together, mlp()); }), HasSubstr("there is no input 'z'"));
  write_safetensors(path("rows.safetensors"), {{"targets", y}, {"mask", mask}});
  EXPECT_THAT(message_of([&] { run(together, mlp()); }), HasSubstr("that holds every input by its name, 'x0' too"));
}

TEST_F(TrainingData, RowsThatTheModelDoesNotTakeAreNamedBeforeTheFirstStep) {
  const auto said = [&](const at::Tensor& x, const at::Tensor& y) {
    save_tensors(x, path("odd.pt"));
    save_tensors(y, path("y3.pt"));
    TrainOptions o = rows();
    o.data = path("odd.pt"), o.targets = path("y3.pt");
    return message_of([&] { open_samples(o, {o.data, o.targets, ""}, *mlp()); });
  };
  const at::Tensor y = at::randn({20, 2});
  EXPECT_THAT(said(at::randn({20, 4}, at::kDouble), y),
              HasSubstr("odd.pt: is f64[20, 4], input 'x0' takes f32[rows, 4]"));
  EXPECT_THAT(said(at::randn({20, 5}), y), HasSubstr("is f32[20, 5], input 'x0' takes f32[rows, 4]"));
  EXPECT_THAT(said(at::scalar_tensor(1.0), y), HasSubstr("is f32[], input 'x0' takes f32[rows, 4]"));
  EXPECT_THAT(said(at::randn({0, 4}), at::randn({0, 2})), HasSubstr("odd.pt: holds f32[0, 4], which has no rows"));
  EXPECT_THAT(said(at::randn({19, 4}), y), HasSubstr("f32[20, 2] and f32[19, 4] have other rows"));
}

TEST_F(TrainingData, AClassThatTheModelDoesNotHaveIsNamedBeforeTheFirstStep) {
  at::Tensor y = at::zeros({20}, at::kLong);
  TrainOptions o = rows();
  o.loss = "cross_entropy", o.targets = path("classes.pt");
  const auto said = [&](const DataFiles& files) {
    save_tensors(y, path("classes.pt"));
    return message_of([&] { open_samples(o, files, *mlp()); });
  };
  y[7] = 2;
  EXPECT_THAT(said({o.data, o.targets, ""}), HasSubstr("classes.pt: has class 2, the model has 0 to 1"));
  save_tensors(y < 2, path("mask.pt"));
  EXPECT_EQ(said({o.data, o.targets, path("mask.pt")}), "no error") << "it does not count";
  o.ignore_index = 2;
  EXPECT_EQ(said({o.data, o.targets, ""}), "no error");
  y[3] = -1;
  EXPECT_THAT(said({o.data, o.targets, ""}), HasSubstr("has class -1"));
}

// A source that says when it is asked.
class Counted : public BatchSource {
 public:
  explicit Counted(std::atomic<int>& asked) : asked_(asked) {}
  Batch next() override {
    if (++asked_ == 5) throw Error(ErrorKind::BadFile, "the fifth");
    return {{at::full({1}, asked_.load())}, {}};
  }
  nlohmann::json state() override { return asked_.load(); }
  void load_state(const nlohmann::json&) override {}
  std::string identity() const override { return ""; }

 private:
  std::atomic<int>& asked_;
};

TEST(ReadAhead, ReadsSoManyBeforeTheyAreAskedForAndRaisesInTurn) {
  std::atomic<int> asked = 0;
  ReadAhead batches(std::make_unique<Counted>(asked), 2);
  EXPECT_EQ(batches.next().inputs[0].item<int>(), 1);
  for (int i = 0; i < 6000 && asked < 3; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  EXPECT_EQ(asked, 3);
  for (int i = 2; i < 5; ++i) EXPECT_EQ(batches.next().inputs[0].item<int>(), i);
  EXPECT_EQ(message_of([&] { batches.next(); }), "the fifth");
}

TEST_F(TrainingData, LossesCountByTheTargetsThatCount) {
  // One microbatch has few targets, one has none: the gradient is that of the mean over all targets that count.
  at::Tensor targets = at::arange(32).reshape({4, 8}).remainder(7);
  targets.slice(0, 0, 2).fill_(-100);
  targets[0][0] = 3;
  options.microbatches = 4;
  const at::Tensor logits = at::randn({4, 8, 7}).set_requires_grad(true);
  const Loss loss = make_loss(options, *lm());
  const Parts parts = cut_batch(options, {{logits.detach()}, {targets}}, 4);
  EXPECT_EQ(parts.counts, (std::vector<int64_t>{1, 0, 8, 8}));
  at::Tensor sum = at::zeros({});
  for (size_t i = 0; i < 4; ++i) {
    const at::Tensor one = loss({logits.narrow(0, static_cast<int64_t>(i), 1)}, parts.targets[i]);
    ASSERT_TRUE(std::isfinite(one.item<double>())) << i;
    sum = sum + one * (static_cast<double>(parts.counts[i]) / static_cast<double>(parts.total()));
  }
  const at::Tensor whole = loss({logits}, {targets});
  EXPECT_NEAR(sum.item<double>(), whole.item<double>(), 1e-6);
  const auto by_parts = torch::autograd::grad({sum}, {logits})[0],
             at_once = torch::autograd::grad({whole}, {logits})[0];
  EXPECT_TRUE(at::allclose(by_parts, at_once, 1e-5, 1e-7));
}

TEST_F(TrainingData, RefusesABatchWithOtherTargetsThanTheLossTakes) {
  const at::Tensor x = at::randn({4, 3}), classes = at::zeros({4}, at::kLong), mask = at::ones({4}, at::kLong);
  const auto says = [&](const std::string& loss, const Batch& batch) {
    TrainOptions o = options;
    o.loss = loss;
    return message_of([&] { cut_batch(o, batch, 2); });
  };
  EXPECT_THAT(says("cross_entropy", {{x}, {classes, mask}}), HasSubstr("2 tensors of targets, --loss cross_entropy"));
  EXPECT_THAT(says("cross_entropy", {{x}, {}}),
              AllOf(HasSubstr("has 0 tensors of targets"), HasSubstr("--loss output")));
  EXPECT_THAT(says("output", {{x}, {classes}}), HasSubstr("--loss output takes none"));
  EXPECT_THAT(says("mse", {{x}, {x, at::ones_like(x), x}}), HasSubstr("has 3 tensors of targets"));
  EXPECT_THAT(says("mse", {{x}, {x, at::full_like(x, 0.5)}}), HasSubstr("0 and 1, or false and true"));
  EXPECT_THAT(says("mse", {{x}, {x, at::ones({4, 1})}}), HasSubstr("mask is f32[4, 1], its targets are f32[4, 3]"));
  EXPECT_THAT(says("mse", {{}, {x}}), HasSubstr("has no inputs"));
  EXPECT_THAT(says("mse", {{at::ones({})}, {x}}), HasSubstr("has f32[] as its first input"));
  EXPECT_THAT(says("mse", {{x}, {x, at::Tensor()}}), HasSubstr("has an undefined tensor"));
  EXPECT_EQ(says("mse", {{x}, {x, x > 0}}), "no error");
  EXPECT_EQ(says("output", {{x}, {}}), "no error");
}

TEST_F(TrainingData, AStepWithoutATargetThatCountsIsAnError) {
  options.ignore_index = 5;
  std::ofstream(folder / "fives.bin") << std::string(100, '\x05');
  options.data = path("fives.bin");
  EXPECT_THAT(message_of([&] { run(options, lm()); }), HasSubstr("step 1: no target of the batch counts"));
}

TEST_F(TrainingData, RefusesAFileOfNoRowsOrOfMoreThanCanBeCounted) {
  const auto rows_with = [&](int64_t rows) {
    Graph graph;
    graph.output({graph.placeholder("x", TensorMeta{at::kFloat, {rows, 4}, {4, 1}})->result()});
    const GraphModule module(std::move(graph), {}, TreeSpec::positional_inputs(1), TreeSpec::leaf());
    return message_of([&] { rows_of_step(options, module); });
  };
  for (const int64_t batch : {0, 8}) {
    options.batch = batch;
    EXPECT_THAT(rows_with(0), AllOf(HasSubstr("exported for microbatches of 0 rows"), HasSubstr("a row or more")));
  }
  options.microbatches = 4;
  EXPECT_THAT(rows_with(INT64_MAX / 2), HasSubstr("more rows than can be counted"));
}

TEST_F(TrainingData, EvaluationIsTorchsEvalModeAndLeavesBuffersAlone) {
  TrainOptions o = rows();
  o.eval_data = o.data;
  o.eval_targets = o.targets;
  o.batch = 0;
  o.steps = 3;
  const Told told = run(o, mlp());
  // The same in torch: the trained weights in a module in eval mode.
  Mlp net;
  at::NoGradGuard no_grad;
  for (const auto& p : net->named_parameters()) p.value().copy_(told.module->state().get(p.key()).tensor);
  for (const auto& b : net->named_buffers()) b.value().copy_(told.module->state().get(b.key()).tensor);
  net->eval();
  const at::Tensor x = load_tensors(path("x.pt")).toTensor(), y = load_tensors(path("y.pt")).toTensor();
  EXPECT_NEAR(*told.result.eval_loss, torch::mse_loss(net(x), y).item<double>(), 1e-6);
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 3) << "the steps alone";
  TrainOptions without = rows();
  without.steps = 3;
  EXPECT_EQ(told.losses(), run(without, mlp()).losses());
}

TEST_F(TrainingData, EvaluationRefusesAGraphWhoseForwardTakesAnotherPathInTraining) {
  options.steps = 1;
  auto module = lm();
  module->set_mode_read_at("model.py:3");
  run(options, module);
  options.eval_data = path("held.bin");
  EXPECT_THAT(message_of([&] { run(options, module); }),
              ::testing::AllOf(HasSubstr("another path in evaluation"), HasSubstr("model.py:3")));
}

TEST_F(TrainingData, EvaluationDropsNothingOut) {
  options.steps = 1;
  options.lr = 1e-30;
  options.eval_data = path("held.bin");
  EXPECT_NEAR(*run(options, lm(0.5)).result.eval_loss, *run(options, lm(0)).result.eval_loss, 1e-6);
}

// Masks are drawn by seed, step, node and row: they do not change when the batch is cut otherwise. The sums have
// another order then, so losses agree within rounding.
TEST_F(TrainingData, DropoutDoesNotDependOnHowTheBatchIsCut) {
  TrainOptions o = options;
  o.steps = 4;
  const auto losses = [&](int64_t rows, int64_t microbatches, int64_t accumulate) {
    torch::manual_seed(5);
    Lm net(0.5);
    o.microbatches = microbatches;
    o.accumulate = accumulate;
    return run(o, capture(net, at::zeros({rows, 7}, at::kLong))).losses();
  };
  const auto whole = losses(8, 1, 1);
  for (const auto& [rows, microbatches, accumulate] : {std::tuple{4, 2, 1}, {2, 4, 1}, {2, 2, 2}, {1, 8, 1}}) {
    const auto cut = losses(rows, microbatches, accumulate);
    ASSERT_EQ(cut.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(cut[i], whole[i], 2e-6) << rows << " rows, step " << i + 1;
  }
  o.seed = 4;
  o.shuffle = false;
  const auto one = losses(8, 1, 1);
  o.seed = 5;
  EXPECT_GT(std::abs(losses(8, 1, 1)[0] - one[0]), 1e-4) << "masks do not depend on the seed";
}

}  // namespace
}  // namespace plumb
