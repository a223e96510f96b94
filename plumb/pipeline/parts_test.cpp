// Environment, microbatches, layouts, launching: the parts that need no pipeline.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>
#include <unistd.h>

#include <fstream>
#include <iterator>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/microbatch.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/pipeline/runtime/timeline.h"
#include "plumb/pipeline/transport/transport.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using namespace testing_processes;
using testing::AllOf;
using testing::HasSubstr;

std::optional<RankEnvironment> discover(std::map<std::string, std::string> variables) {
  return discover_ranks([&](const std::string& name) -> std::optional<std::string> {
    auto it = variables.find(name);
    return it == variables.end() ? std::nullopt : std::optional(it->second);
  });
}

TEST(Environment, IsNoneWithoutALauncher) { EXPECT_FALSE(discover({{"PATH", "/bin"}, {"MASTER_PORT", "1"}})); }

TEST(Environment, ReadsTorchrun) {
  auto env = discover({{"RANK", "3"},
                       {"WORLD_SIZE", "8"},
                       {"LOCAL_RANK", "1"},
                       {"MASTER_ADDR", "host7"},
                       {"MASTER_PORT", "1234"},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"TORCHELASTIC_RESTART_COUNT", "2"}});
  ASSERT_TRUE(env);
  EXPECT_EQ(env->rank, 3);
  EXPECT_EQ(env->world_size, 8);
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_EQ(env->master_address, "host7");
  EXPECT_EQ(env->master_port, 1234);
  EXPECT_TRUE(env->launcher_serves_store);
  EXPECT_EQ(env->store_prefix, "plumb/attempt2");
}

TEST(Environment, ReadsOpenMpiMpichAndSlurm) {
  auto ompi = discover({{"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"PMIX_NAMESPACE", "job1"}});
  ASSERT_TRUE(ompi);
  EXPECT_EQ(ompi->launcher, "Open MPI");
  EXPECT_EQ(ompi->rank, 1);
  EXPECT_EQ(ompi->master_address, "127.0.0.1");
  auto same = discover({{"OMPI_COMM_WORLD_RANK", "0"},
                        {"OMPI_COMM_WORLD_SIZE", "2"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                        {"PMIX_NAMESPACE", "job1"}});
  EXPECT_EQ(ompi->master_port, same->master_port) << "every rank of a job derives the same port";
  auto mpich = discover({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "4"}, {"MPI_LOCALRANKID", "1"}});
  ASSERT_TRUE(mpich);
  EXPECT_EQ(mpich->local_rank, 1);
  auto slurm = discover({{"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NNODES", "2"},
                         {"SLURM_JOB_ID", "77"},
                         {"SLURM_STEP_NODELIST", "node[03-04]"}});
  ASSERT_TRUE(slurm);
  EXPECT_EQ(slurm->rank, 5);
  EXPECT_EQ(slurm->master_address, "node03");
}

TEST(Environment, ReadsSlurmHostLists) {
  EXPECT_EQ(first_slurm_host("node[007-010,12],gpu3"), "node007");
  EXPECT_EQ(first_slurm_host("gpu3,node[1-2]"), "gpu3");
  EXPECT_EQ(first_slurm_host("a"), "a");
  EXPECT_EQ(first_slurm_host("rack[2]-ib,x"), "rack2-ib");
  EXPECT_THAT(message_of([] { first_slurm_host("node[7"); }), HasSubstr("closing bracket"));
}

TEST(Environment, NamesTheVariableThatIsWrong) {
  EXPECT_THAT(message_of([] { discover({{"RANK", "two"}, {"WORLD_SIZE", "4"}}); }), HasSubstr("RANK is 'two'"));
  EXPECT_THAT(message_of([] { discover({{"RANK", "4"}, {"WORLD_SIZE", "4"}}); }), HasSubstr("from 0 to 3"));
  EXPECT_THAT(message_of([] { discover({{"RANK", "1"}}); }),
              AllOf(HasSubstr("WORLD_SIZE is not set"), HasSubstr("unset the launcher's variables")));
  EXPECT_THAT(message_of([] { discover({{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}); }), HasSubstr("set MASTER_ADDR"));
}

TEST(Microbatches, GiveTheFirstOnesTheRowsThatAreOver) {
  auto x = at::arange(14).view({7, 2}), tokens = at::arange(21), mask = at::ones({3});
  auto cut =
      split_batch({x, tokens, mask, at::Tensor(), at::scalar_tensor(2.0)}, {{}, {}, TensorChunkSpec::whole()}, 3);
  EXPECT_THAT(cut.rows, testing::ElementsAre(3, 2, 2));
  EXPECT_EQ(cut.inputs[0][0].size(0), 3);
  EXPECT_EQ(cut.inputs[1][1].size(0), 6) << "three tokens a row, cut at the same places";
  EXPECT_TRUE(at::equal(cut.inputs[2][2], mask));
  EXPECT_FALSE(cut.inputs[0][3].defined());
  EXPECT_EQ(cut.inputs[1][4].dim(), 0);
  std::vector<Tensors> outputs;
  for (auto& m : cut.inputs) outputs.push_back({m[0]});
  EXPECT_TRUE(at::equal(merge_outputs(outputs, {}, cut.rows)[0], x));
}

TEST(Microbatches, MergeByWhatIsAskedFor) {
  std::vector<Tensors> outputs{{at::full({2, 1}, 1.0), at::scalar_tensor(3.0), at::scalar_tensor(1.0), at::ones({1})},
                               {at::full({2, 1}, 2.0), at::scalar_tensor(6.0), at::scalar_tensor(4.0), at::ones({1})}};
  auto merged = merge_outputs(
      outputs, {OutputMerge::concatenate(1), OutputMerge::mean(), {}, OutputMerge::custom([](const Tensors& t) {
                  return t[0] + 10 * t[1];
                })},
      {2, 1});
  EXPECT_EQ(merged[0].sizes(), at::IntArrayRef({2, 2}));
  EXPECT_FLOAT_EQ(merged[1].item<float>(), 4);
  EXPECT_EQ(merged[2].sizes(), at::IntArrayRef({2}));
  EXPECT_FLOAT_EQ(merged[3].item<float>(), 11);
  EXPECT_FLOAT_EQ(merge_outputs(outputs, {{}, OutputMerge::sum()}, {2, 1})[1].item<float>(), 9);
}

TEST(Microbatches, NameATensorThatCannotBeCut) {
  EXPECT_THAT(message_of([] { split_batch({at::ones({2, 3})}, {}, 4); }),
              HasSubstr("tensor 0 of the batch, float[2, 3], has 2 rows"));
  EXPECT_THAT(message_of([] { split_batch({at::ones({4})}, {TensorChunkSpec::along(1)}, 2); }),
              HasSubstr("no dimension 1"));
  EXPECT_THAT(message_of([] { split_batch({at::ones({4}), at::ones({5})}, {}, 2); }),
              HasSubstr("beside another of 4 rows"));
  EXPECT_THAT(message_of([] { split_batch({at::ones({4})}, {}, 0); }), HasSubstr("0 microbatches"));
  EXPECT_THAT(message_of([] { merge_outputs({{at::ones({2, 3})}, {at::ones({2, 4})}}, {}, {2, 2}); }),
              HasSubstr("output 0"));
}

TEST(Microbatches, TargetsLieInThoseOfTheInputs) {
  PipelineOptions options;
  options.loss = [](const Tensors& out, const Tensors& target) { return (out[0] - target[0].mean()).sum(); };
  const at::Tensor w = at::ones({4}).requires_grad_(true);
  const auto stage = std::make_shared<LambdaStage>([=](const Tensors& in) { return Tensors{in[0] * w}; },
                                                   std::vector<NamedTensor>{{"w", w}});
  Pipeline pipeline(PipeTable::chain(1), parse_csv("0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3\n"), {{0, stage}}, {}, options);
  EXPECT_THAT(message_of([&] { pipeline.step({at::ones({8, 4})}, {at::ones({6, 4})}); }),
              HasSubstr("targets of 6 rows are not cut into 4 microbatches beside inputs of 8 rows"));
  EXPECT_FALSE(w.grad().defined());
  EXPECT_EQ(pipeline.step({at::ones({8, 4})}, {at::ones({32, 4})}).losses.size(), 4u) << "a target for each token";
}

TEST(Microbatches, AreNotMergedIfTheyDiffer) {
  const at::Tensor one = at::ones({2});
  const auto kind = [](const auto& run) {
    try {
      run();
    } catch (const Error& e) {
      return e.kind();
    }
    return ErrorKind::Internal;
  };
  EXPECT_THAT(message_of([&] { merge_outputs({{one, one}, {one, {}}}, {}, {2, 2}); }),
              HasSubstr("output 1 is a tensor in one of the microbatches 0 and 1 only"));
  EXPECT_THAT(message_of([&] { merge_outputs({{one}, {}}, {}, {2, 2}); }),
              HasSubstr("microbatch 1 has 0 outputs, microbatch 0 1"));
  EXPECT_THAT(message_of([&] { merge_outputs({{one}, {one}}, {OutputMerge::mean()}, {2}); }),
              HasSubstr("outputs of 2 microbatches, and rows of 1"));
  EXPECT_EQ(kind([&] { mean_by_rows({one, one}, {1}); }), ErrorKind::StructureMismatch);
  EXPECT_EQ(kind([&] { sum_by_rows({one, one}, {1, 1}, 0); }), ErrorKind::StructureMismatch);
  EXPECT_EQ(kind([&] { sum_by_rows({one, one, one}, {1, 1, 1}, 2); }), ErrorKind::StructureMismatch);
  EXPECT_THAT(message_of([&] { merge_outputs({{one}}, {{}, OutputMerge::sum()}, {2}); }),
              HasSubstr("2 output merges for 1 outputs"));
  EXPECT_EQ(kind([&] { merge_outputs({{one}}, {OutputMerge::custom(nullptr)}, {2}); }), ErrorKind::InvalidArgument);
}

TEST(Layout, SendsTheGradientOfASkippedValueFromUserToUser) {
  PipeTable layout = PipeTable::chain(4);
  layout.stages[2].inputs.push_back({{0, 0}});
  layout.stages[3].inputs.push_back({{0, 0}});
  auto wiring = connect_stages(layout);
  ASSERT_EQ(wiring[0].values_out.size(), 3u) << "straight to each of its users";
  ASSERT_EQ(wiring[0].grads_in.size(), 1u) << "one sum comes back, from the first user";
  EXPECT_EQ(wiring[0].grads_in[0].stage, 1);
  ASSERT_EQ(wiring[3].grads_out.size(), 1u);
  EXPECT_EQ(wiring[3].grads_out[0].stage, 2);
  EXPECT_THAT(wiring[3].grads_out[0].indices, testing::ElementsAre(0, 1));
}

TEST(Layout, NamesAnInputThatCannotBe) {
  auto layout = PipeTable::chain(2);
  layout.stages[0].inputs = {{{1, 0}}};
  EXPECT_THAT(message_of([&] { layout.check(); }), HasSubstr("input 0 of stage 0 comes from stage 1"));
  layout.stages[0].inputs = {{{-1, 4}}};
  EXPECT_THAT(message_of([&] { layout.check(); }), HasSubstr("the model's input 4"));
  layout = PipeTable::chain(2);
  layout.stages[1].inputs = {{{0, 2}}};
  EXPECT_THAT(message_of([&] { layout.check(); }), HasSubstr("is output 2 of stage 0"));
}

Role subgroup_role("subgroup", [] {
  auto group = make_group_from_environment({std::chrono::seconds(60)});
  auto pair =
      make_subgroup(group, group.rank() < 2 ? "low" : "high", group.rank() < 2 ? std::vector{0, 1} : std::vector{3, 2});
  auto texts = Transport(pair).exchange("rank " + std::to_string(group.rank()));
  report("texts", texts[0] + "," + texts[1]);
  try {
    make_subgroup(group, "none", {(group.rank() + 1) % 4});
  } catch (const Error& e) {
    report("refused", e.message());
  }
  return 0;
});

TEST(ProcessGroup, DividesIntoSubgroups) {
  auto run = run_role("subgroup", 4);
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[3];
  EXPECT_EQ(run.reports[1]["texts"], "rank 0,rank 1");
  EXPECT_EQ(run.reports[2]["texts"], "rank 3,rank 2");
  EXPECT_EQ(run.reports[2]["refused"], "rank 2 is not in the subgroup 'none' it asks for");
}

TEST(ProcessGroup, RefusesABackendWithoutAFunctionAndAPortThatThereIsNot) {
  EXPECT_THAT(message_of([] { register_device_backend(at::kXPU, {}); }), HasSubstr("the function is empty"));
  for (const int port : {-2, 1 << 16}) {
    const RankEnvironment env{.world_size = 2, .master_port = port};
    EXPECT_THAT(message_of([&] { make_gloo_group(env, {.timeout = std::chrono::milliseconds(100)}); }),
                HasSubstr(str("there is no port ", port)));
  }
}

Role alone_role("alone", [] {
  if (std::getenv("RANK") == std::string("1")) return 0;  // never joins
  make_group_from_environment({std::chrono::milliseconds(1500)});
  return 0;
});

TEST(ProcessGroup, NamesTheRanksThatDidNotCome) {
  auto run = run_role("alone", 2);
  EXPECT_THAT(run.errors[0], HasSubstr("rank 0 of 2 waited 1500 ms"));
  EXPECT_THAT(run.errors[0], HasSubstr("for rank 1"));
}

Role codes_role("codes", [] {
  const auto rank = std::stoi(std::getenv("RANK"));
  std::fprintf(stderr, "no line end from %d", rank);
  meet();
  if (rank == 1) wait_for_end_of(0);
  if (rank == 1) return 7;
  if (rank == 2) ::pause();
  return 0;
});

TEST(Launch, GivesEveryExitCodeAndEndsTheRest) {
  auto run = run_role("codes", 3, {}, std::chrono::seconds(2));
  EXPECT_EQ(run.result.exit_code(), 7);
  EXPECT_EQ(run.result.first_failed, 1);
  EXPECT_EQ(run.result.processes[0].exit_code, 0);
  EXPECT_EQ(run.result.processes[2].signal, SIGTERM);
  EXPECT_TRUE(run.result.processes[2].stopped_by_launcher);
  EXPECT_EQ(run.errors[1], "no line end from 1\n");
}

Role by_signal_role("by signal", [] {
  ::signal(SIGUSR1, [](int) { ::_exit(1); });
  report("process", std::to_string(::getpid()));
  while (true) ::pause();
  return 0;
});

bool has_ended(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  return text.substr(text.rfind(')') + 1).rfind(" Z", 0) == 0;
}

// Rank 1 is killed, and rank 0 fails because of it, before the launcher looks.
TEST(Launch, NamesTheRankThatASignalEndedWhereOthersHaveFailedSince) {
  LaunchOptions options;
  options.num_processes = 2;
  options.environment = {{"PLUMB_TEST_ROLE", "by signal"}};
  std::map<int, int> processes;
  options.on_line = [&](int rank, bool is_stderr, const std::string& line) {
    if (is_stderr || line.rfind("process=", 0) != 0) return;
    processes[rank] = std::stoi(line.substr(8));
    if (processes.size() < 2) return;
    ::kill(processes[1], SIGKILL);
    ::kill(processes[0], SIGUSR1);
    while (!has_ended(processes[0]) || !has_ended(processes[1])) ::usleep(1000);
  };
  const LaunchResult result = launch_local(options);
  EXPECT_EQ(result.first_failed, 1);
  EXPECT_EQ(result.exit_code(), 128 + SIGKILL);
  EXPECT_EQ(result.processes[0].exit_code, 1);
}

TEST(Launch, NamesAProgramThatCannotBeStarted) {
  LaunchOptions options;
  options.program = "/no/such/program";
  EXPECT_THAT(message_of([&] { launch_local(options); }), HasSubstr("cannot start '/no/such/program'"));
}

TEST(Launch, TakesNoNumberOfProcessesBelowZero) {
  for (int LaunchOptions::*number :
       {&LaunchOptions::num_processes, &LaunchOptions::replacements, &LaunchOptions::spares}) {
    LaunchOptions options;
    options.program = "/bin/true";
    options.*number = -1;
    EXPECT_EQ(error_of([&] { launch_local(options); }).kind(), ErrorKind::InvalidArgument);
  }
}

TEST(Launch, SaysThatDescriptorsAreFew) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next = ::dup(0);
  ::close(next);
  for (int spare = 0; spare < 6; spare++) {
    const rlimit few{static_cast<rlim_t>(next + spare), before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    const std::string said = message_of([] {
      LaunchOptions options;
      options.program = "/bin/true";
      launch_local(options);
    });
    ::setrlimit(RLIMIT_NOFILE, &before);
    EXPECT_THAT(said, testing::AllOf(HasSubstr("Too many open files"), HasSubstr("ulimit -n"))) << spare;
  }
}

TEST(Timeline, GivesTheCostsThatItsSimulationNeeds) {
  // Two ranks; the message takes 1 and its gradient 2, which count where a rank waited for them.
  const auto events = parse_timeline(
      "0 0F0 0 0 10\n0 0F1 10 10 22\n1 1F0 0 11 31\n1 1B0 31 31 61\n0 0B0 22 63 83\n"
      "1 1F1 61 61 83\n1 1B1 83 83 115\n0 0B1 83 117 137\n");
  const Costs costs = measured_costs(events, 2);
  const double unit = 1e-6;
  EXPECT_NEAR(costs.forward[0] / unit, 11, 1e-6);
  EXPECT_NEAR(costs.forward[1] / unit, 21, 1e-6);
  EXPECT_NEAR(costs.full[0] / unit, 20, 1e-6);
  EXPECT_NEAR(costs.full[1] / unit, 31, 1e-6);
  EXPECT_NEAR(costs.communication[0] / unit, 2, 1e-6) << "the median of 1, 2 and 2";
  EXPECT_EQ(costs.communication[1], 0);
  const auto simulation = simulate_schedule(parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"), costs);
  EXPECT_NEAR(simulation.bubble_rate(), measured_bubble(events), 0.01);
}

}  // namespace
}  // namespace plumb
