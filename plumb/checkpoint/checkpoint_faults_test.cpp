#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <thread>

#include "plumb/checkpoint/checkpoints_testing.h"
#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/exported/programs_testing.h"
#include "tests/fuzz/mutate.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using plumb::testing::slurp;
using plumb::testing::spill;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

TEST_F(Checkpoints, OfALostRankFailAndNameIt) {
  CheckpointWriter writer(folder_, 0, 3, "r", {.timeout = 0.2});
  std::thread other([&] {
    CheckpointWriter second(folder_, 1, 3, "r", {.timeout = 60});
    second.save(1, part(1), {});
    second.wait();
    EXPECT_THAT(second.problem().value_or(""), HasSubstr("rank 0 gave it up"));
  });
  const fs::path there = fs::path(folder_) / "step-00000001.writing-r" / "rank-00001.json";
  for (int i = 0; i < 6000 && !fs::exists(there); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  writer.save(1, {}, {});
  writer.wait();
  EXPECT_THAT(writer.problem().value_or(""), HasSubstr("rank 2 did not write its part"));
  other.join();
  EXPECT_EQ(Checkpoint::newest(folder_), std::nullopt);
  // A rank that is late sees it too, and does not wait.
  CheckpointWriter late(folder_, 2, 3, "r", {.background = false, .timeout = 60});
  late.save(1, part(1), {});
  EXPECT_THAT(late.problem().value_or(""), HasSubstr("rank 0 gave it up"));
}

TEST_F(Checkpoints, ThatAreAbandonedDoNotWait) {
  CheckpointWriter writer(folder_, 0, 2, "r", {.timeout = 600});
  writer.save(1, part(1), {});
  writer.abandon();
  writer.wait();
  EXPECT_THAT(writer.problem().value_or(""), HasSubstr("rank 1"));
}

TEST_F(Checkpoints, WithoutMemoryForACopyFailByNameAndTheRunGoesOn) {
  CheckpointWriter writer(folder_, 0, 1, "r");
  CheckpointPart large;
  large.model.emplace_back("w", at::zeros({1}).expand({int64_t{1} << 46}));  // 256 TiB when it is copied
  writer.save(1, large, {});
  writer.wait();
  EXPECT_THAT(writer.problem().value_or(""),
              ::testing::AllOf(HasSubstr("step-00000001: rank 0 could not copy its part: "), HasSubstr("memory")));
  writer.save(2, part(0), {});
  writer.wait();
  EXPECT_EQ(writer.problem(), std::nullopt);
  EXPECT_EQ(Checkpoint::newest(folder_)->step(), 2);
}

// In a process of its own: a limit of files' sizes is a full disk.
TEST_F(Checkpoints, OfAFullDiskFailAndTheNextIsTried) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    CheckpointWriter writer(folder_, 0, 1, "r", {.background = false});
    writer.save(1, part(1), {});
    rlimit limit{1000, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    writer.save(2, part(2, 4000), {});
    const std::string problem = writer.problem().value_or("");
    limit.rlim_cur = RLIM_INFINITY;
    setrlimit(RLIMIT_FSIZE, &limit);
    writer.save(3, part(3), {});
    const bool right = problem.find("model.rank-00000.safetensors: cannot be written") != problem.npos &&
                       !writer.problem() && Checkpoint::newest(folder_)->step() == 3;
    if (!right) fprintf(stderr, "%s\n%s\n", problem.c_str(), writer.problem().value_or("").c_str());
    _exit(right ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(entries(), ElementsAre("step-00000001", "step-00000003"));
}

TEST_F(Checkpoints, OfARankWithoutRoomForItsReasonFailAtOnce) {
  CheckpointWriter writer(folder_, 0, 2, "r", {.background = false, .timeout = 60});
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    CheckpointWriter other(folder_, 1, 2, "r", {.background = false, .timeout = 60});
    const rlimit limit{0, 0};
    setrlimit(RLIMIT_FSIZE, &limit);
    other.save(1, part(1), {});
    const bool right =
        other.problem().value_or("").find("model.rank-00001.safetensors: cannot be written") != std::string::npos;
    _exit(right ? 0 : 1);
  }
  writer.save(1, {}, {});
  EXPECT_THAT(writer.problem().value_or(""), HasSubstr("rank 1 could not write its part, nor the reason"));
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(entries(), ElementsAre("step-00000001.writing-r-failed"));
}

TEST_F(Checkpoints, WithoutPermissionFailAndTheRunGoesOn) {
  if (geteuid() == 0) {
    // Root may write everywhere: a file in the folder's place is as good.
    CheckpointWriter writer(folder_, 0, 1, "r");
    spill(folder_ / "step-00000001.writing-r", "");
    writer.save(1, part(1), {});
    writer.wait();
    EXPECT_THAT(writer.problem().value_or(""), HasSubstr("step-00000001.writing-r"));
    writer.save(2, part(2), {});
    writer.wait();
    EXPECT_EQ(writer.problem(), std::nullopt);
  } else {
    CheckpointWriter writer(folder_, 0, 1, "r");
    fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec);
    writer.save(1, part(1), {});
    writer.wait();
    EXPECT_THAT(writer.problem().value_or(""), HasSubstr("ermission"));
    fs::permissions(folder_, fs::perms::owner_all);
    writer.save(2, part(2), {});
    writer.wait();
    EXPECT_EQ(writer.problem(), std::nullopt);
  }
  expect_step(*Checkpoint::newest(folder_), 2);
  const Error error = error_of([&] { CheckpointWriter("/proc/none", 0, 1, "r"); });
  EXPECT_EQ(error.kind(), ErrorKind::CannotWrite);
}

TEST_F(Checkpoints, ThatAreTornOrAlteredAreNamedAndTheOneBeforeIsUsed) {
  {
    CheckpointWriter writer(folder_, 0, 1, "r", {.keep_last = 0});
    for (int step : {1, 2, 3, 4, 5}) writer.save(step, part(step), {});
  }
  fs::remove(folder_ / "step-00000005/checkpoint.json");
  std::string bytes = slurp(folder_ / "step-00000004/model-00001-of-00001.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  spill(folder_ / "step-00000004/model-00001-of-00001.safetensors", bytes);
  fs::resize_file(folder_ / "step-00000003/optimizer-00001-of-00001.safetensors", 20);
  std::vector<std::string> problems;
  expect_step(*Checkpoint::newest(folder_, &problems), 2);
  EXPECT_THAT(problems, ElementsAre(AllOf(HasSubstr("step-00000005 is not used"), HasSubstr("checkpoint.json")),
                                    AllOf(HasSubstr("step-00000004 is not used"),
                                          HasSubstr("'b.weight' is not as it was written")),
                                    AllOf(HasSubstr("step-00000003 is not used"), HasSubstr("20 bytes"))));
}

TEST_F(Checkpoints, UnderTheNameOfAnotherStepAreNotUsed) {
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    for (int step : {1, 2}) writer.save(step, part(step), {});
  }
  fs::rename(folder_ / "step-00000002", folder_ / "step-00000003");  // ranks open it by its step
  std::vector<std::string> problems;
  expect_step(*Checkpoint::newest(folder_, &problems), 1);
  EXPECT_THAT(problems, ElementsAre("step-00000003 is not used: it is of step 2"));
}

TEST_F(Checkpoints, ThatAreBrokenAreErrorsOrEqual) {
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    writer.save(1, part(1), {{"data", 17}, {"rate", 0.25}});
  }
  const fs::path folder = folder_ / "step-00000001";
  std::vector<fs::path> files;
  for (const auto& e : fs::directory_iterator(folder)) files.push_back(e.path());
  std::sort(files.begin(), files.end());
  ASSERT_THAT(files, SizeIs(5));
  fuzz::Random random(11);
  int errors = 0, equal = 0;
  for (int i = 0; i < 3000; ++i) {
    const fs::path& file = files[static_cast<size_t>(i) % files.size()];
    const std::string whole = slurp(file);
    std::string bytes = whole;
    fuzz::mutate_bytes(bytes, random);
    spill(file, bytes);
    try {
      const Checkpoint c = Checkpoint::open(folder);
      c.verify();
      expect_step(c, 1);
      EXPECT_EQ(c.state(), json({{"data", 17}, {"rate", 0.25}}));
      ++equal;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::BadFile) << e.what();
      ++errors;
    }
    spill(file, whole);
    if (HasFailure()) FAIL() << file << " at " << i;
  }
  EXPECT_GT(errors, 2500);
  std::printf("3000 broken checkpoints: %d errors, %d equal, 0 wrong\n", errors, equal);
}

// A liar's files have right checksums.
TEST_F(Checkpoints, ThatLieLeadOutOfTheirFolderNowhere) {
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    writer.save(1, part(1), {});
  }
  const fs::path path = folder_ / "step-00000001/checkpoint.json";
  const std::string text = slurp(path);
  const auto lie = [&](const std::function<void(json&)>& change) {
    json document = json::parse(text);
    change(document);
    document.erase("checksum");
    const std::string dumped = document.dump();
    document["checksum"] = crc32(dumped.data(), dumped.size());
    spill(path, document.dump());
    const Error error = error_of([&] { Checkpoint::open(folder_ / "step-00000001").verify(); });
    EXPECT_EQ(error.kind(), ErrorKind::BadFile) << error.what();
  };
  lie([](json& d) { d["model"]["a.weight"]["file"] = "../step-00000001/model-00001-of-00001.safetensors"; });
  lie([](json& d) { d["files"]["../../etc/passwd"] = {{"bytes", 1}}; });
  lie([](json& d) { d["files"]["/etc/x.json"] = {{"bytes", 1}}; });
  lie([](json& d) { d["model"]["a.weight"]["shape"] = {8}; });
  lie([](json& d) { d["model"]["a.weight"]["dtype"] = "I32"; });
  for (const json& sum : {json(-1), json("12"), json("00000000000000g0"), json("-000000000000001"), json(nullptr)})
    lie([&](json& d) { d["model"]["a.weight"]["crc64"] = sum; });
  lie([](json& d) { d["model"]["a.weight"].erase("crc64"); });
  lie([](json& d) { d["model"]["a.weight"]["crc64"] = "0123456789abcdef"; });
  lie([](json& d) { d["ties"]["x"] = "nobody"; });
  lie([](json& d) { d["ties"]["a.weight"] = "b.weight"; });
  lie([](json& d) { d["version"] = 3; });
  lie([](json& d) { d["model"] = json::array(); });
}

TEST_F(Checkpoints, OfTheFirstVersionAreReadAndHeldAgainstTheirChecksums) {
  {
    CheckpointWriter writer(folder_, 0, 1, "r");
    writer.save(1, part(1), {{"data", 17}});
  }
  const fs::path folder = folder_ / "step-00000001", path = folder / "checkpoint.json";
  json document = json::parse(slurp(path));
  document["version"] = 1;
  for (const char* kind : {"model", "optimizer"}) {
    for (auto& [name, tensor] : document[kind].items()) {
      const SafetensorsFile file((folder / tensor["file"].get<std::string>()).string());
      Checksum sum{32};
      file.add_to(name, sum);
      tensor.erase("crc64");
      tensor["crc32"] = sum.value;
    }
  }
  for (auto& [name, file] : document["files"].items()) {
    const std::string bytes = slurp(folder / name);
    if (file.erase("crc64")) file["crc32"] = crc32(bytes.data(), bytes.size());
  }
  const auto write = [&] {
    document.erase("checksum");
    const std::string dumped = document.dump();
    document["checksum"] = crc32(dumped.data(), dumped.size());
    spill(path, document.dump());
  };
  write();
  const Checkpoint old = Checkpoint::open(folder);
  old.verify();
  expect_step(old, 1);
  document["model"]["a.weight"]["crc32"] = 1;
  write();
  EXPECT_THAT(error_of([&] { Checkpoint::open(folder).read("a.weight"); }).message(), HasSubstr("a.weight"));
}

// Written, killed and read again; every time at another moment of a save. Most children are let write one whole
// checkpoint first, however slow the machine is; the first ten may have none.
TEST_F(Checkpoints, OfAWriterThatIsKilledAreWholeOrNotThere) {
  const auto start = std::chrono::steady_clock::now();
  {
    CheckpointWriter writer(folder_ / "timed", 0, 1, "timed", {.background = false});
    writer.save(1, part(1), {});
  }
  const double microseconds =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  const fs::path run = folder_ / "killed";
  std::map<std::string, int> outcomes;
  int64_t last = 0;
  for (int kill_at = 0; kill_at < 100; ++kill_at) {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      CheckpointWriter writer(run, 0, 1, "run-" + std::to_string(kill_at), {.background = false});
      for (int64_t step = last + 1;; ++step) {
        if (kill_at < 10 && write(ready[1], "x", 1) != 1) _exit(1);
        writer.save(step, part(double(step)), {{"step", step}});
        if (kill_at >= 10 && write(ready[1], "x", 1) != 1) _exit(1);
      }
    }
    close(ready[1]);
    char byte;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    usleep(static_cast<useconds_t>(microseconds * (kill_at * 37 % 100) / 50));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(ready[0]);  // not before: a write to a pipe that nobody reads would end the child
    std::vector<std::string> problems;
    const auto newest = Checkpoint::newest(run, &problems);
    ASSERT_THAT(problems, SizeIs(0)) << "kill " << kill_at;
    if (newest) {
      expect_step(*newest, newest->step());
      EXPECT_EQ(newest->state(), json({{"step", newest->step()}}));
      EXPECT_GE(newest->step(), last);
      ++outcomes[newest->step() > last ? "a newer one, whole" : "the one before, whole"];
      last = newest->step();
    } else {
      EXPECT_EQ(last, 0);
      ++outcomes["none yet"];
    }
  }
  std::printf("100 kills while writing, %lld checkpoints:", static_cast<long long>(last));
  for (const auto& [what, count] : outcomes) std::printf(" %d %s;", count, what.c_str());
  std::printf(" 0 torn\n");
  EXPECT_GE(last, 90);
}

}  // namespace
}  // namespace plumb
