// Values that travel on their device, through a backend that behaves as NCCL (tests/device/strict_backend.h): every
// table and model, replicas and faults. Processes of these tests compute on the test device.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <thread>

#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/stage_costs.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

using namespace testing_processes;
using testing::HasSubstr;

using Settings = std::map<std::string, std::string>;

Settings strict(Settings settings) {
  settings.insert({{"DEVICE", "testdevice"}, {"BACKEND", "strict"}});
  return settings;
}

std::string text_of(const std::vector<std::string>& errors) {
  std::string all;
  for (size_t rank = 0; rank < errors.size(); rank++) {
    if (!errors[rank].empty()) all += "rank " + std::to_string(rank) + ": " + errors[rank];
  }
  return all;
}

// Returns the reports of all ranks.
std::map<std::string, std::string> reports(const Run& run) {
  EXPECT_EQ(run.result.exit_code(), 0) << text_of(run.errors);
  std::map<std::string, std::string> all;
  for (const auto& of_rank : run.reports) all.insert(of_rank.begin(), of_rank.end());
  return all;
}

// "MODEL,SCHEDULE,RANKS,MICROBATCHES,STAGES A RANK" over strict processes and in one process.
void expect_strict_equals_one(const std::vector<std::pair<std::string, std::string>>& cases, int ranks,
                              const Settings& more = {}) {
  std::string over, alone;
  std::vector<std::pair<std::string, std::string>> names;
  for (const auto& [model, schedule] : cases) {
    const int per_rank = std::min(2, schedule_traits(schedule).max_stages_per_rank);
    const std::string n = std::to_string(ranks), v = std::to_string(per_rank);
    names.emplace_back(model + "," + schedule + "," + n + ",5," + v,
                       model + ",LoopedBFS,1,5," + std::to_string(ranks * per_rank));
    over += names.back().first + ";";
    if (alone.find(names.back().second + ";") == std::string::npos) alone += names.back().second + ";";
  }
  Settings settings = more;
  settings["CASES"] = over;
  const auto found = reports(run_role("train", ranks, strict(settings), std::chrono::seconds(60)));
  settings["CASES"] = alone;
  settings["DEVICE"] = "testdevice";
  const auto expected = reports(run_role("train", 1, settings, std::chrono::seconds(60)));
  for (const auto& [mine, one] : names) {
    size_t count = 0;
    for (auto it = expected.lower_bound(one + ":"); it != expected.end() && it->first.starts_with(one + ":"); ++it) {
      const auto at = found.find(mine + it->first.substr(one.size()));
      ASSERT_TRUE(at != found.end()) << mine << ": nothing reported " << it->first;
      EXPECT_TRUE(at->second == it->second) << at->first;
      count++;
    }
    EXPECT_GT(count, 20u) << mine;
  }
}

// DualPipe's sums over two ranks are of another order than one process's; tools/pipeline_tables.py holds it to itself.
TEST(Strict, EveryScheduleOnTwoProcessesEqualsOne) {
  std::vector<std::pair<std::string, std::string>> cases;
  for (const auto& name : schedule_names()) {
    if (!schedule_traits(name).bidirectional) cases.emplace_back("skip", name);
  }
  expect_strict_equals_one(cases, 2);
}

TEST(Strict, EveryModelOnTwoProcessesEqualsOne) {
  expect_strict_equals_one({{"tied", "1F1B"},
                            {"tied", "ZBVZeroBubble"},
                            {"cut", "Interleaved1F1B"},
                            {"norm", "1F1B"},
                            {"tokens", "DualPipeV"},
                            {"half", "1F1B"},
                            {"inplace", "GPipe"},
                            {"ragged", "ZBH1"}},
                           2);
}

TEST(Strict, FourProcessesEqualOne) {
  expect_strict_equals_one({{"skip", "1F1B"}, {"tied", "InterleavedZeroBubble"}, {"cut", "VHalf"}}, 4);
}

TEST(Strict, CodesTravelOnTheDevice) {
  expect_strict_equals_one({{"mlp", "1F1B"}, {"skip", "ZBVZeroBubble"}}, 2, {{"WIRE", "e4m3fn"}});
}

TEST(Strict, ReplicasEqualThoseOverGloo) {
  const Settings cases{{"CASES", "mlp,1F1B;tied,ZBVZeroBubble;"}};
  const auto found = reports(run_role("replicas", 4, strict(cases), std::chrono::seconds(60)));
  EXPECT_GT(found.size(), 20u);
  EXPECT_EQ(found, reports(run_role("replicas", 4, cases)));
}

TEST(Strict, AStageMayWriteToWhatItHasSent) {
  const Settings cases{{"CASES", "scribbling,1F1B,2,6,1;scribbling,GPipe,2,6,1;"}};
  const auto found = reports(run_role("train", 2, strict(cases), std::chrono::seconds(60)));
  auto over_gloo = cases;
  over_gloo["DEVICE"] = "testdevice";
  EXPECT_GT(found.size(), 20u);
  EXPECT_EQ(found, reports(run_role("train", 2, over_gloo)));
}

Run strict_fault(const std::string& kind, int ranks, int faulty, int timeout = 60000) {
  return run_role("fault", ranks,
                  strict({{"KIND", kind}, {"FAULTY", std::to_string(faulty)}, {"TIMEOUT", std::to_string(timeout)}}),
                  std::chrono::seconds(kind == "stop" ? 10 : 40));
}

TEST(Strict, FaultsAreNamedAsOverGloo) {
  auto run = strict_fault("raise", 3, 2);
  EXPECT_THAT(run.errors[2], HasSubstr("rank 2 at 2F2: no more cheese"));
  EXPECT_THAT(run.errors[1], HasSubstr("rank 2 failed: rank 2 at 2F2: no more cheese"));
  EXPECT_THAT(run.errors[0], HasSubstr("rank 2 failed: rank 2 at 2F2: no more cheese"));
  run = strict_fault("kill", 2, 0);
  EXPECT_THAT(run.errors[1], HasSubstr("rank 0: it is gone"));
  run = strict_fault("shape", 2, 0);
  EXPECT_THAT(run.errors[1], HasSubstr("rank 1 at 1F2: "));
  EXPECT_THAT(run.errors[0], HasSubstr("rank 1 failed: rank 1 at 1F2: "));
  run = strict_fault("stop", 2, 1, 3000);
  EXPECT_THAT(run.errors[0], HasSubstr("rank 1: no answer within 3000 ms"));
  EXPECT_FALSE(run.result.processes[0].stopped_by_launcher);
}

// Every rank knows what it must get, forward and backward, and fails on anything else. Rank 1 ends at any moment.
Role watchful_role("watchful", [] {
  // Once in some hundred times Gloo misses that a peer is gone, and waits for the time-out.
  const auto group = test_group(std::chrono::seconds(8));
  const int rank = group.rank(), last = group.size() - 1;
  const auto expect = [](const at::Tensor& got, int value) {
    TORCH_CHECK(got.eq(value).all().item<bool>(), "what came is not what was sent");
  };
  int forwards = 0;
  const at::Tensor weight = at::ones({1}, test_device()).requires_grad_(true);
  const auto stage = test_stage(
      [&](const Tensors& in) -> Tensors {
        const int n = ++forwards;
        if (rank > 0) expect(in[0], n);
        at::Tensor y = (rank == 0 ? at::full_like(in[0], n) : in[0]) * weight;
        if (rank < last) y.register_hook([&, n](const at::Tensor& grad) { expect(grad, n); });
        return {rank == last ? y * n : y};
      },
      {{"weight", weight}});
  PipelineOptions options;
  options.loss = [](const Tensors& out, const Tensors&) { return out[0].sum(); };
  options.scale_grads = false;
  Pipeline pipeline(PipeTable::chain(group.size()), make_schedule("1F1B", group.size(), 6), {{rank, stage}}, group,
                    options);
  const Tensors inputs{at::zeros({6, 500}, test_device())};
  pipeline.step(inputs, inputs);
  std::thread end;
  if (rank == 1) {
    end = std::thread([] {
      std::this_thread::sleep_for(std::chrono::microseconds(number_setting("AFTER", 0)));
      ::raise(SIGKILL);
    });
  }
  while (true) pipeline.step(inputs, inputs);
  return 0;
});

TEST(Strict, TheLostRankIsNamedAndNotWhatAStageMadeOfItsValues) {
  for (const int after : {0, 3100, 17300, 46900, 90100}) {
    const auto run = run_role("watchful", 3, strict({{"LINK_MS", "5"}, {"AFTER", std::to_string(after)}}));
    for (const size_t other : {0, 2}) {
      EXPECT_EQ(run.result.processes[other].exit_code, 1) << after << run.errors[other];
      // In the words of the rank that noticed, or as it passed them on.
      EXPECT_THAT(run.errors[other], testing::ContainsRegex("rank 1( failed)?: (it is gone|no answer within 8000 ms)"))
          << after;
      EXPECT_THAT(run.errors[other], testing::Not(HasSubstr("what was sent"))) << after;
    }
  }
}

Role costs_role("stage costs", [] {
  TestTokens tokens(2, 16);
  SplitOptions cut;
  cut.points.emplace_back("layer1", SplitPoint::Beginning);
  const auto batch = at::zeros({4, 8}, at::device(test_device()).dtype(at::kLong));
  const auto pipe = pipeline(*capture(tokens, batch), cut);
  const StageCosts costs = measure_stages(*pipe, {batch}, {});
  for (size_t s = 0; s < 2; s++) {
    report("activation " + std::to_string(s), std::to_string(costs.costs.activation[s]));
    report("resident " + std::to_string(s), std::to_string(costs.resident[s]));
    report("takes time " + std::to_string(s), costs.costs.forward[s] > 0 && costs.costs.full[s] > 0 ? "yes" : "no");
  }
  return 0;
});

TEST(DeviceCosts, CountADevicesMemoryAsTheCpus) {
  auto there = reports(run_role("stage costs", 1, {{"DEVICE", "testdevice"}}));
  auto here = reports(run_role("stage costs", 1));
  for (const std::string stage : {"0", "1"}) {
    EXPECT_EQ(there["resident " + stage], here["resident " + stage]);
    EXPECT_EQ(there["takes time " + stage], "yes");
    // Devices keep what the CPU makes again. The CPU keeps stage 1's message whole, of whose two values one is saved.
    const double unsaved = stage == "1" ? 4 * 8 * 16 * sizeof(float) : 0;
    const double kept = std::stod(there["activation " + stage]), least = std::stod(here["activation " + stage]);
    EXPECT_GE(kept, least - unsaved);
    EXPECT_GT(least, 0);
    EXPECT_LT(kept, 3 * least);
  }
}

std::string said(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& e) {
    return std::string(e.what()).substr(0, std::string(e.what()).find('\n'));
  }
  return "";
}

// The backend itself: rank 1 posts its receive late, then both send first.
Role backend_role("strict backend", [] {
  const auto group = test_group(std::chrono::seconds(60));
  auto& backend = *group.device_backend();
  auto& gloo = *group.backend();
  const int other = 1 - group.rank();
  Tensors x{at::full({4}, group.rank() + 1, at::device(test_device()).dtype(at::kByte))};
  Tensors y{at::zeros({4}, at::device(test_device()).dtype(at::kByte))}, on_cpu{at::zeros({4})};
  report("cpu", said([&] { backend.send(on_cpu, other, 0); }));
  report("broadcast", said([&] { backend.broadcast(x, {}); }));
  const auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  if (group.rank() == 0) {
    const auto work = backend.send(x, other, 0);
    sleep(200);
    report("done before its receive", work->isCompleted() ? "yes" : "no");
    gloo.send(on_cpu, other, 7)->wait();
    work->wait();
  } else {
    gloo.recv(on_cpu, other, 7)->wait();
    backend.recv(y, other, 0)->wait();
    report("received", std::to_string(y[0][0].item<int>()));
  }
  backend.startCoalescing();
  backend.send(x, other, 0);
  backend.recv(y, other, 0);
  backend.endCoalescing()->wait();
  report("coalesced", std::to_string(y[0][0].item<int>()));
  const auto send = backend.send(x, other, 0), receive = backend.recv(y, other, 0);
  sleep(300);
  report("crossed", receive->isCompleted() ? "passed" : "wait");
  const auto bye = gloo.send(on_cpu, other, 8);
  Tensors told{at::zeros({4})};
  gloo.recv(told, other, 8)->wait();
  bye->wait();
  backend.abort();
  report("aborted", said([&] { send->wait(std::chrono::seconds(30)); }));
  return 0;
});

// Memory that a receive fills is touched, and let go, before anybody has waited for it.
Role memory_role("memory of transfers", [] {
  const auto group = test_group(std::chrono::seconds(60));
  auto& backend = *group.device_backend();
  auto& gloo = *group.backend();
  Tensors token{at::zeros({1})};
  if (group.rank() == 1) {
    gloo.recv(token, 0, 7)->wait();
    return 0;
  }
  Tensors y{at::zeros({4}, at::device(test_device()).dtype(at::kByte))};
  const auto work = backend.recv(y, 1, 0);
  report("read", said([&] { y[0].cpu(); }));
  report("written", said([&] { y[0].copy_(at::ones({4}, at::kByte)); }));
  gloo.send(token, 1, 7)->wait();
  y.clear();
  return 0;
});

TEST(Strict, MemoryIsNotUsedAndNotLetGoWhileATransferHasIt) {
  const auto run = run_role("memory of transfers", 2, strict({}));
  auto of = run.reports[0];
  EXPECT_THAT(of["read"], HasSubstr("memory is read that a transfer receives into"));
  EXPECT_THAT(of["written"], HasSubstr("memory is written that a transfer receives into"));
  EXPECT_THAT(run.errors[0], HasSubstr("memory is let go that a transfer receives into"));
  EXPECT_NE(run.result.exit_code(), 0);
}

constexpr double kForward = 0.06, kLink = 0.04;  // seconds of a forward, of a transfer
constexpr int kUnderWay = 6;                     // microbatches

at::Tensor compute_on_device(const at::Tensor& x) {
  static const auto compute = c10::Dispatcher::singleton()
                                  .findSchemaOrThrow("plumb_test_device::compute", "")
                                  .typed<at::Tensor(const at::Tensor&, double)>();
  return compute.call(x, kForward);
}

// Each stage takes its time on the device, while its host goes on.
Role under_way_role("under way", [] {
  const auto group = test_group(std::chrono::seconds(60));
  const int rank = group.rank();
  const auto stage = test_stage([](const Tensors& in) { return Tensors{compute_on_device(in[0])}; }, {});
  Pipeline pipeline(PipeTable::chain(2), make_schedule("GPipe", 2, kUnderWay, 1), {{rank, stage}}, group, {});
  const auto x = test_data(1, {kUnderWay, 1000});
  const Tensors inputs{x};
  pipeline.eval(inputs);
  const auto activities =
      c10::Dispatcher::singleton().findSchemaOrThrow("plumb_test_device::activities", "").typed<std::string()>();
  const size_t before = activities.call().size();
  const auto outputs = pipeline.eval(inputs).outputs;
  if (rank == 1) report("output", at::equal(outputs.at(0), x) ? "right" : "wrong");
  std::istringstream lines(activities.call().substr(before));
  int count = 0;
  for (std::string line; std::getline(lines, line);)
    report(std::to_string(rank) + " " + line.substr(0, line.find(' ')) + " " + std::to_string(count++),
           line.substr(line.find(' ') + 1));
  return 0;
});

using Spans = std::vector<std::pair<double, double>>;

Spans spans_of(const std::map<std::string, std::string>& reports, const std::string& of) {
  Spans spans;
  for (const auto& [key, value] : reports) {
    if (!key.starts_with(of)) continue;
    std::istringstream in(value);
    in >> spans.emplace_back().first >> spans.back().second;
  }
  return spans;
}

// Returns how many seconds both last at once.
double both_last(const Spans& a, const Spans& b) {
  double seconds = 0;
  for (const auto& [begin, end] : a) {
    for (const auto& [other_begin, other_end] : b)
      seconds += std::max(0.0, std::min(end, other_end) - std::max(begin, other_begin));
  }
  return seconds;
}

TEST(Strict, TransfersAreUnderWayWhileBothRanksCompute) {
  double least = 0;
  // A busy machine may let the host of a rank stand still, from whom the device has its work: then once more.
  for (int attempt = 0; attempt < 5 && least <= 0.7; attempt++) {
    const auto all = reports(run_role("under way", 2, strict({{"LINK_MS", "40"}})));
    ASSERT_EQ(all.at("output"), "right");
    const Spans transfers = spans_of(all, "0 transfer");
    ASSERT_EQ(transfers.size(), size_t(kUnderWay));
    least = 1;
    for (const std::string rank : {"0", "1"}) {
      const Spans forwards = spans_of(all, rank + " compute");
      ASSERT_EQ(forwards.size(), size_t(kUnderWay));
      // All but the last transfer count on the sender, all but the first one on the receiver.
      least = std::min(least, both_last(transfers, forwards) / ((kUnderWay - 1) * kLink));
    }
  }
  EXPECT_GT(least, 0.7) << "of the transfers' time";
}

TEST(Strict, TheBackendBehavesAsNccl) {
  const auto run = run_role("strict backend", 2, strict({}));
  ASSERT_EQ(run.result.exit_code(), 0) << text_of(run.errors);
  for (int rank = 0; rank < 2; rank++) {
    auto of = run.reports[static_cast<size_t>(rank)];
    EXPECT_THAT(of["cpu"], HasSubstr("no tensors of cpu"));
    EXPECT_THAT(of["broadcast"], HasSubstr("does not support broadcast"));
    EXPECT_EQ(of["coalesced"], std::to_string(2 - rank));
    EXPECT_EQ(of["crossed"], "wait") << "both send first";
    EXPECT_NE(of["aborted"], "");
  }
  auto first = run.reports[0], second = run.reports[1];
  EXPECT_EQ(first["done before its receive"], "no");
  EXPECT_EQ(second["received"], "1");
}

}  // namespace
}  // namespace plumb
