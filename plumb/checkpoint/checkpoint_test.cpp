#include "plumb/checkpoint/checkpoint.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <barrier>
#include <filesystem>
#include <thread>

#include "plumb/checkpoint/checkpoints_testing.h"
#include "plumb/checkpoint/optimizer_state.h"
#include "plumb/core/error.h"
#include "plumb/exported/programs_testing.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using plumb::testing::spill;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST_F(Checkpoints, HoldTensorsStateAndStep) {
  const json state = {{"rng", {1, 2, UINT64_MAX}}, {"rate", 0.1}, {"text", "ä"}};
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    writer.save(120, part(120), state);
    writer.wait();
    const auto reports = writer.take_reports();
    ASSERT_THAT(reports, SizeIs(1));
    EXPECT_EQ(reports[0].problem, "");
    EXPECT_EQ(reports[0].folder, (folder_ / "step-00000120").string());
    EXPECT_EQ(reports[0].bytes, 80u);
  }
  EXPECT_THAT(entries(), ElementsAre("step-00000120"));
  const Checkpoint c = Checkpoint::open(folder_ / "step-00000120");
  expect_step(c, 120);
  EXPECT_EQ(c.state(), state);
  EXPECT_THAT(c.names(), ElementsAre("a.weight", "b.weight"));
  EXPECT_THAT(c.optimizer_names(), ElementsAre("exp_avg/a.weight"));
  EXPECT_EQ(c.bytes_read(), 80u);
  EXPECT_EQ(error_of([&] { c.read("c"); }).kind(), ErrorKind::UnknownName);
}

TEST_F(Checkpoints, OfSeveralRanksAreOneModel) {
  std::vector<std::thread> ranks;
  std::barrier all(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      CheckpointWriter writer(folder_, rank, 3, "r");
      all.arrive_and_wait();
      CheckpointPart p;
      // Rank 1 has nothing. A tensor of two ranks is the same on both.
      if (rank != 1) p.model = {{"x." + std::to_string(rank), at::full({4}, rank)}, {"shared", at::ones({2})}};
      if (rank == 2) p.ties = {{"head", "x.0"}};
      for (int step : {1, 2}) writer.save(step, p, {{"from", rank}});
      writer.wait();
      EXPECT_EQ(writer.problem(), std::nullopt);
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_THAT(entries(), ElementsAre("step-00000001", "step-00000002"));
  const Checkpoint c = *Checkpoint::newest(folder_);
  EXPECT_EQ(c.step(), 2);
  EXPECT_EQ(c.state(), json({{"from", 0}}));
  EXPECT_THAT(c.names(), ElementsAre("head", "shared", "x.0", "x.2"));
  EXPECT_TRUE(at::equal(c.read("head"), at::zeros({4})));
  EXPECT_TRUE(at::equal(c.read("x.2"), at::full({4}, 2)));
  EXPECT_TRUE(fs::exists(folder_ / "step-00000002/model-00002-of-00002.safetensors"));
  // The names that other readers see.
  EXPECT_THAT(TensorFolder((folder_ / "step-00000002").string()).names(), ElementsAre("shared", "x.0", "x.2"));
}

TEST_F(Checkpoints, SayWhichTensorRanksDifferIn) {
  std::vector<std::thread> ranks;
  std::barrier all(2);
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      CheckpointWriter writer(folder_, rank, 2, "r");
      all.arrive_and_wait();
      writer.save(1, {{{"w", at::full({4}, rank)}}, {}}, {});
      writer.wait();
      EXPECT_THAT(writer.problem().value_or(""), HasSubstr(rank == 0 ? "'w' of rank 1" : "rank 0 gave it up"));
    });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(Checkpoint::newest(folder_), std::nullopt);
}

TEST_F(Checkpoints, StoreATensorOfSeveralNamesOnce) {
  const at::Tensor w = at::ones({3, 3});
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    writer.save(1, {{{"embed", w}, {"head", w}, {"head.t", w.t()}}, {{"exp_avg/embed", w}}}, {});
  }
  const Checkpoint c = *Checkpoint::newest(folder_);
  EXPECT_EQ(c.contents().ties, (std::map<std::string, std::string>{{"head", "embed"}}));
  EXPECT_EQ(c.contents().model.size(), 2u);
  EXPECT_TRUE(at::equal(c.read("head"), w));
  EXPECT_TRUE(at::equal(c.read_optimizer("exp_avg/head"), w));
  const SafetensorsFile file(folder_ / "step-00000001/model-00001-of-00001.safetensors");
  EXPECT_EQ(file.metadata().at("head"), "embed");
}

TEST_F(Checkpoints, AreCopiesOfTheStepsEdge) {
  CheckpointWriter writer(folder_, 0, 1, "r");
  CheckpointPart p = part(1);
  writer.save(1, p, {});
  for (auto& [name, tensor] : p.model) tensor.zero_();
  for (auto& [name, tensor] : p.optimizer) tensor.zero_();
  writer.wait();
  expect_step(Checkpoint::open(folder_ / "step-00000001"), 1);
}

TEST_F(Checkpoints, KeepTheLastAndEveryNth) {
  fs::create_directories(folder_ / "step-7");
  fs::create_directories(folder_ / "step-00000001x");
  fs::create_directories(folder_ / "mine");
  {
    CheckpointWriter writer(folder_, 0, 1, "r", {.keep_last = 2, .keep_every = 30});
    for (int step = 10; step <= 80; step += 10) writer.save(step, part(step), {});
  }
  EXPECT_THAT(entries(), ElementsAre("mine", "step-00000001x", "step-00000030", "step-00000060", "step-00000070",
                                     "step-00000080", "step-7"));
  // A run that went back to step 60 does not count what it left behind, and removes none of it.
  {
    CheckpointWriter writer(folder_, 0, 1, "r2", {.keep_last = 1});
    writer.save(65, part(65), {});
  }
  EXPECT_THAT(entries(),
              ElementsAre("mine", "step-00000001x", "step-00000065", "step-00000070", "step-00000080", "step-7"));
}

TEST_F(Checkpoints, OfAStepThatIsThereReplaceIt) {
  for (const char* run : {"r1", "r2"}) {
    CheckpointWriter writer(folder_, 0, 1, run);
    writer.save(1, part(1), {{"run", run}});
  }
  EXPECT_THAT(entries(), ElementsAre("step-00000001"));
  EXPECT_EQ(Checkpoint::newest(folder_)->state(), json({{"run", "r2"}}));
}

TEST_F(Checkpoints, OfDeadRunsThatAreUnfinishedAreRemoved) {
  fs::create_directories(folder_ / "step-00000001.writing-dead");
  spill(folder_ / "step-00000001.writing-dead/rank-00000.json", "{}");
  EXPECT_EQ(Checkpoint::newest(folder_), std::nullopt);
  CheckpointWriter writer(folder_, 0, 1, "r");
  EXPECT_THAT(entries(), ElementsAre());
}

TEST_F(Checkpoints, OfTwoLiveRunsDoNotMix) {
  CheckpointWriter writer(folder_, 0, 1, "r");
  const auto refused = [&] { return error_of([&] { CheckpointWriter(folder_, 0, 1, "r2"); }); };
  EXPECT_EQ(refused().kind(), ErrorKind::InvalidState);
  EXPECT_THAT(refused().what(), HasSubstr("another writer of this process"));
  spill(folder_ / ".checkpoints.lock", "1");  // as the lock of another process
  EXPECT_THAT(refused().what(), HasSubstr("another run"));
  writer.close();
  EXPECT_EQ(error_of([&] { writer.save(1, part(1), {}); }).kind(), ErrorKind::InvalidState);
  CheckpointWriter(folder_, 0, 1, "r2").save(1, part(1), {});
}

TEST_F(Checkpoints, AreRefusedWithArgumentsThatCannotBeKept) {
  for (const char* run : {"", "../x", "a b", "a.b"})
    EXPECT_EQ(error_of([&] { CheckpointWriter(folder_, 0, 1, run); }).kind(), ErrorKind::InvalidArgument) << run;
  EXPECT_EQ(error_of([&] { CheckpointWriter(folder_, 1, 1, "r"); }).kind(), ErrorKind::InvalidArgument);
  CheckpointWriter writer(folder_, 0, 1, "r");
  json deep = 1;
  for (int i = 0; i < 70; ++i) deep = json::array({deep});
  for (const json& state : {json(std::nan("")), json(INFINITY), json("\xff"), deep})
    EXPECT_EQ(error_of([&] { writer.save(1, part(1), state); }).kind(), ErrorKind::InvalidArgument);
  EXPECT_EQ(error_of([&] { writer.save(-1, part(1), {}); }).kind(), ErrorKind::InvalidArgument);
  EXPECT_EQ(error_of([&] { writer.save(1, {{{"w", at::ones({2}).to_sparse()}}, {}}, {}); }).kind(),
            ErrorKind::Unsupported);
}

TEST_F(Checkpoints, LoadIntoTensorsOrSayWhatDiffers) {
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    writer.save(1, part(1), {});
  }
  const Checkpoint c = Checkpoint::open(folder_ / "step-00000001");
  const at::Tensor a = at::zeros({4, 2}).t().requires_grad_(), b = at::zeros({4});
  c.load({{"a.weight", a}, {"b.weight", b}});
  EXPECT_TRUE(at::equal(a, at::ones({2, 4})));
  b.zero_();
  const Error missing = error_of([&] { c.load({{"b.weight", b}, {"c.weight", a}, {"d.weight", a}}); });
  EXPECT_EQ(missing.kind(), ErrorKind::UnknownName);
  EXPECT_THAT(missing.what(), HasSubstr("2 tensors are missing: c.weight, d.weight"));
  const Error other = error_of([&] { c.load({{"b.weight", at::zeros({5})}}); });
  EXPECT_EQ(other.kind(), ErrorKind::TensorMismatch);
  EXPECT_THAT(other.what(), HasSubstr("'b.weight' is Float[4], the model has Float[5]"));
  EXPECT_EQ(error_of([&] { c.load({{"b.weight", at::zeros({4}, at::kDouble)}}); }).kind(), ErrorKind::TensorMismatch);
  for (const at::Tensor& none : {at::Tensor(), at::empty({4}, at::kMeta)}) {
    EXPECT_THAT(message_of([&] { c.load({{"a.weight", a}, {"b.weight", none}}); }),
                HasSubstr("'b.weight' has no memory to load values into"));
  }
  EXPECT_TRUE(at::equal(b, at::zeros({4})));
}

template <class Optimizer, class Options>
void resumes(const fs::path& run, const Options& options) {
  const auto make = [] {
    at::manual_seed(0);
    return NamedTensors{{"a", at::randn({3}).requires_grad_()}, {"b", at::randn({2, 2}).requires_grad_()}};
  };
  const auto tensors = [](const NamedTensors& named) {
    std::vector<at::Tensor> list;
    for (const auto& [name, tensor] : named) list.push_back(tensor);
    return list;
  };
  const auto train = [](const NamedTensors& p, Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      (p[0].second.pow(2).sum() * step + p[1].second.exp().sum()).backward();
      optimizer.step();
    }
  };
  const NamedTensors whole = make(), first = make(), again = make();
  Optimizer undisturbed(tensors(whole), options), before(tensors(first), options), after(tensors(again), options);
  train(whole, undisturbed, 0, 6);
  train(first, before, 0, 3);
  {
    CheckpointWriter writer(run, 0, 1, "r");
    writer.save(3, {first, optimizer_state(before, first)}, {});
  }
  const Checkpoint c = *Checkpoint::newest(run);
  c.load(again);
  load_optimizer_state(after, again, c);
  train(again, after, 3, 6);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(whole[i].second, again[i].second));
}

TEST_F(Checkpoints, OptimizersGoOnBitForBit) {
  resumes<torch::optim::AdamW>(folder_ / "adamw", torch::optim::AdamWOptions(0.1).amsgrad(true));
  resumes<torch::optim::AdamW>(folder_ / "plain", torch::optim::AdamWOptions(0.1));
  resumes<torch::optim::SGD>(folder_ / "sgd", torch::optim::SGDOptions(0.1).momentum(0.9));
  at::Tensor a = at::zeros({3}).requires_grad_();
  torch::optim::SGD sgd({a}, torch::optim::SGDOptions(0.1).momentum(0.9));
  const Error error = error_of([&] { load_optimizer_state(sgd, {{"a", a}}, *Checkpoint::newest(folder_ / "plain")); });
  EXPECT_THAT(error.what(), HasSubstr("momentum_buffer/a"));
  EXPECT_THAT(message_of([&] { load_optimizer_state(sgd, {{"a", a}}, "here", ReadState()); }),
              HasSubstr("here: the function that reads the state is empty"));
}

}  // namespace
}  // namespace plumb
