#include "plumb/graph/pass.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "plumb/core/error.h"

namespace plumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

GraphModule module_for_passes() {
  return GraphModule(parse_graph(R"(graph {
    %x: f32[3] = placeholder "x"
    %a = aten::exp(%x)
    %b = aten::exp(%x)
    %dead = aten::cos(%x)
    %y = aten::add.Tensor(%a, %b)
    output(%y)
  })"),
                     State(), TreeSpec::positional_inputs(1), TreeSpec::leaf());
}

std::string message_and_remedy(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& e) {
    return e.message() + " | " + e.remedy();
  }
  return "";
}

TEST(RunPasses, RunsStepsInOrderAndSaysWhatEachDid) {
  GraphModule m = module_for_passes();
  std::vector<std::string> begun, ended;
  RunPassesOptions options;
  options.check = true;
  options.before = [&](const PassStep& step) { begun.push_back(step.pass->name); };
  options.after = [&](const PassResult& result) { ended.push_back(result.pass); };
  const auto results =
      run_passes({parse_pass_step("dead_code"), parse_pass_step("common_subexpressions,differentiable=true"),
                  parse_pass_step("dead_code")},
                 m, options);
  EXPECT_THAT(begun, ElementsAre("dead_code", "common_subexpressions", "dead_code"));
  EXPECT_EQ(begun, ended);
  ASSERT_EQ(results.size(), 3u);
  EXPECT_TRUE(results[0].changed);
  EXPECT_TRUE(results[1].changed);
  EXPECT_FALSE(results[2].changed);
  for (const PassResult& r : results) EXPECT_GE(r.seconds, 0);
  EXPECT_EQ(m.graph().size(), 4u);
  EXPECT_THROW(run_passes({PassStep()}, m), Error);
}

TEST(RunPasses, WritesTheGraphBeforeAndAfterEveryStep) {
  const auto folder = std::filesystem::temp_directory_path() / ("plumb_pass_test_" + std::to_string(getpid()));
  GraphModule m = module_for_passes();
  const std::string before = to_string(m.graph());
  run_passes({parse_pass_step("dead_code")}, m, {.dump = folder.string()});
  auto read = [&](const char* name) {
    std::ifstream file(folder / name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  EXPECT_EQ(read("00-input.txt"), before);
  EXPECT_EQ(read("01-dead_code.txt"), to_string(m.graph()));
  std::filesystem::remove_all(folder);
}

TEST(RunPasses, AStepsTextHasANameAndOptions) {
  const PassStep step = parse_pass_step("raise,inexact=true");
  EXPECT_EQ(step.pass->name, "fuse_patterns");
  EXPECT_EQ(step.options.at("inexact"), "true");
  EXPECT_THAT(message_and_remedy([] { parse_pass_step("nothing"); }), HasSubstr("no pass 'nothing' | one of: "));
  EXPECT_THAT(message_and_remedy([] { parse_pass_step("raise,exact=1"); }),
              HasSubstr("no option 'exact' | one of: inexact"));
  EXPECT_THAT(message_and_remedy([] { parse_pass_step("raise,inexact"); }),
              HasSubstr("'inexact' of pass fuse_patterns has no value"));
}

TEST(RunChecked, AGraphThatIsBrokenAfterwardsNamesThePass) {
  GraphModule m = module_for_passes();
  const auto broken = [&] {
    m.graph().output({Arg(3)});
    return true;
  };
  EXPECT_EQ(message_and_remedy([&] { run_checked("fine", [] { return false; }, m, true); }), "");
  EXPECT_THAT(message_and_remedy([&] { run_checked("says_no", [&] { return broken(), false; }, m, true); }),
              HasSubstr("says_no"));
  EXPECT_THAT(message_and_remedy([&] { run_checked("says_yes", [] { return true; }, m, true); }),
              HasSubstr("pass says_yes returned 'changed' but the module is as before"));
}

TEST(RunChecked, AGraphThatIsBrokenBeforeIsNoFaultOfThePass) {
  GraphModule m = module_for_passes();
  m.graph().erase(m.graph().output_node());
  const auto kind = [&](const std::function<bool()>& run) {
    try {
      run_checked("mine", run, m, false);
    } catch (const Error& e) {
      return e.kind();
    }
    return ErrorKind::ExecutionFailed;
  };
  EXPECT_EQ(kind([] { return true; }), ErrorKind::InvalidGraph);
  EXPECT_EQ(kind(nullptr), ErrorKind::InvalidArgument);
  EXPECT_THAT(message_and_remedy([&] { run_pass(Pass{"mine"}, m); }), HasSubstr("pass mine has no function"));
}

}  // namespace
}  // namespace plumb
