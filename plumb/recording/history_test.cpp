#include "plumb/recording/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <random>

#include "plumb/core/error.h"
#include "plumb/recording/history_format.h"
#include "plumb/recording/recorder.h"
#include "plumb/recording/recording_testing.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using namespace testing_recording;

std::string small_history(const fs::path& path) {
  HistoryWriter writer(path, false);
  writer.rules("[[rule]]");
  HistoryStep step{1, {}};
  for (int i = 0; i < 3; ++i) {
    HistoryRow row{writer.tensor({"t" + std::to_string(i), "", "aten::add", "float32", {2, i}}),
                   i == 1,
                   false,
                   kAllStatistics,
                   {}};
    row.data.std = i == 2 ? INFINITY : 0.5 * i;
    auto histogram = std::make_shared<ExponentHistogram>();
    histogram->counts[static_cast<size_t>(100 + i)] = 7;
    row.data.histogram = histogram;
    step.rows.push_back(row);
  }
  writer.step(step);
  writer.scalars({1, {{"loss", NAN}, {"rate", -INFINITY}}});
  writer.event({1, 0, "std > 1", 1, {{2, false, INFINITY}}});
  writer.hashes({1, {{2, true, 8, 4, 100, ~uint64_t{0}}, {0}}});
  step.step = 2;
  writer.step(step);
  return slurp(path);
}

TEST_F(Recording, WhatIsWrittenIsReadBack) {
  const History history = parse_history(small_history(file()));
  ASSERT_EQ(history.steps.size(), 2u);
  EXPECT_EQ(history.steps[0].rows[2].data.std, INFINITY);
  EXPECT_EQ(history.steps[0].rows[1].data.histogram->counts[101], 7);
  EXPECT_TRUE(history.steps[0].rows[1].backward);
  EXPECT_TRUE(std::isnan(history.scalars[0].values[0].second));
  EXPECT_EQ(history.scalars[0].values[1].second, -INFINITY);
  EXPECT_EQ(history.events[0].first[0].value, INFINITY);
  ASSERT_EQ(history.hashes.size(), 1u);
  EXPECT_EQ(history.hashes[0].hashes, (std::vector<HistoryHash>{{2, true, 8, 4, 100, ~uint64_t{0}}, {0}}));
  EXPECT_EQ(history.last_step(), 2);
}

TEST_F(Recording, ARecordThatNamesNoTensorIsNotWritten) {
  HistoryWriter writer(file(), false);
  const uint32_t t = writer.tensor({"t", "", "aten::add", "float32", {2}});
  writer.step({1, {HistoryRow{t}}});
  const std::string before = slurp(file());
  EXPECT_THAT(message_of([&] { writer.step({2, {HistoryRow{t + 1}}}); }), HasSubstr("no tensor number 1, it has 1"));
  EXPECT_THAT(message_of([&] { writer.hashes({2, {HistoryHash{7}}}); }), HasSubstr("no tensor number 7"));
  EXPECT_THAT(message_of([&] { writer.event({2, 0, "std > 1", 1, {{9, false, 2}}}); }), HasSubstr("number 9"));
  HistoryTensor from{"u", "", "aten::add", "float32", {2}};
  from.inputs = {1};
  EXPECT_THAT(message_of([&] { writer.tensor(from); }), HasSubstr("no tensor number 1"));
  EXPECT_EQ(slurp(file()), before);
}

TEST_F(Recording, ATornLastRecordIsNoticedAndDroppedWhereverItTore) {
  const std::string whole = small_history(file());
  size_t steps = 99;
  for (size_t size = whole.size(); size-- > 0;) {
    const History history = parse_history(whole.substr(0, size));
    EXPECT_LE(history.steps.size(), steps);
    steps = history.steps.size();
    if (size == whole.size() - 1) {
      EXPECT_EQ(steps, 1u);
      EXPECT_GT(history.torn_bytes, 0u);
    }
  }
  EXPECT_EQ(steps, 0u);
  // As after a power failure: the length is there, the bytes are not.
  const History zeros = parse_history(whole + std::string(4096, '\0'));
  EXPECT_EQ(zeros.steps.size(), 2u);
  EXPECT_EQ(zeros.torn_bytes, 4096u);
}

TEST_F(Recording, DamageBeforeTheLastRecordIsAnErrorThatNamesTheByte) {
  std::string bytes = small_history(file());
  bytes[60] ^= 1;
  EXPECT_THAT(message_of([&] { parse_history(bytes, "a.history"); }), AllOf(HasSubstr("a.history"), HasSubstr("byte")));
  EXPECT_THAT(message_of([] { parse_history("a file of another kind", "a"); }), HasSubstr("no history"));
}

TEST_F(Recording, HostileFilesEndInAnErrorOrInAHistory) {
  const std::string whole = small_history(file());
  std::mt19937 random(11);
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = whole;
    for (unsigned n = 1 + random() % 4; n > 0; --n) {
      const size_t at = random() % bytes.size();
      switch (random() % 3) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes.erase(at, random() % 32); break;
        default: bytes.insert(at, random() % 32, static_cast<char>(random()));
      }
    }
    // Broken records with a right checksum must be withstood as well.
    for (size_t at = 16; at + 16 <= bytes.size();) {
      uint64_t length = 0;
      std::memcpy(&length, bytes.data() + at + 8, 8);
      if (length > bytes.size() - at - 16) break;
      uint32_t kind = 0;
      std::memcpy(&kind, bytes.data() + at, 4);
      const uint32_t crc = history_format::checksum({kind, 0, length}, std::string_view(bytes).substr(at + 16, length));
      std::memcpy(bytes.data() + at + 4, &crc, 4);
      at += 16 + length;
    }
    try {
      const History history = parse_history(bytes);
      for (const HistoryStep& step : history.steps) {
        for (const HistoryRow& row : step.rows) ASSERT_LT(row.tensor, history.tensors.size());
      }
    } catch (const Error& e) {
      ASSERT_EQ(e.kind(), ErrorKind::BadFile) << e.what();
    }
  }
}

TEST_F(Recording, AStepThatCouldNotBeWrittenLeavesNoHashesToTheNext) {
  Recorder recorder(RecordRules(), file(), {.part = true});
  const auto step = [&] {
    recorder.add_hash({.name = "w", .operation = "state"}, at::ones({4}));
    recorder.step({{"loss", 1.0}});
  };
  step();
  const auto before = ::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  getrlimit(RLIMIT_FSIZE, &limit);
  const rlimit full{fs::file_size(file()), limit.rlim_max};
  setrlimit(RLIMIT_FSIZE, &full);
  EXPECT_THAT(message_of(step), HasSubstr("cannot write the history"));
  setrlimit(RLIMIT_FSIZE, &limit);
  ::signal(SIGXFSZ, before);
  step();
  EXPECT_EQ(read_history(file()).hashes.back().hashes.size(), 1u);
}

TEST_F(Recording, ARecordNestedWithoutEndIsRefusedBeforeItIsRead) {
  std::string bytes(history_format::kMagic);
  const std::string payload = R"({"rules": "", "more": )" + std::string(100000, '[') + std::string(100000, ']') + "}";
  history_format::Head head{history_format::kRules, 0, payload.size()};
  head.crc = history_format::checksum(head, payload);
  bytes.append(reinterpret_cast<const char*>(&head), sizeof head).append(payload);
  try {
    parse_history(bytes);
    FAIL() << "it was read";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::BadFile);
    EXPECT_NE(e.message().find("nested deeper than"), std::string::npos) << e.what();
  }
}

// ---- ranks ----

TEST_F(Recording, TheHighestRankIsMissedToo) {
  for (const char* name : {"run.history.rank0", "run.history.rank1"}) HistoryWriter(file(name), false).rules("", 3);
  EXPECT_THAT(message_of([&] { read_history(file()); }), AllOf(HasSubstr("rank 2"), HasSubstr("run.history.rank2")));
  HistoryWriter(file("run.history.rank2"), false).rules("", 3);
  EXPECT_EQ(read_history(file()).rules.size(), 1u);
  // The run went on with fewer.
  for (const char* name : {"run.history.rank0", "run.history.rank1"}) HistoryWriter(file(name), true).rules("", 2);
  fs::remove(file("run.history.rank2"));
  read_history(file());
}

// Writes the history of rank `rank` of a pipeline: a tensor of each of its stages.
void write_rank(const fs::path& path, int rank, const std::vector<int64_t>& stages, int steps, double loss) {
  HistoryWriter writer(fs::path(path).concat(".rank" + std::to_string(rank)), false);
  writer.rules("[[rule]]");
  for (int s = 1; s <= steps; ++s) {
    HistoryStep step{s, {}};
    for (const int64_t stage : stages) {
      HistoryRow row{writer.tensor({"y" + std::to_string(stage), "", "aten::linear", "float32", {4}, stage}),
                     false,
                     false,
                     kAllStatistics >> 1,
                     {}};
      row.data.std = double(stage), row.data.numel = 4;
      step.rows.push_back(row);
    }
    writer.step(step);
    writer.scalars({s, {{"loss", loss}, {"rate", 0.5}}});
    writer.event({s, 0, "std > 1", 2, {{0, false, double(rank)}}});
  }
}

TEST_F(Recording, TheFilesOfARunsRanksAreOneHistory) {
  write_rank(file(), 0, {0, 2}, 3, 1);
  write_rank(file(), 1, {1, 3}, 2, 2);  // still writes its third step
  std::ofstream(file("run.history.rank1"), std::ios::app | std::ios::binary) << "half";
  const History history = read_history(file());
  ASSERT_EQ(history.tensors.size(), 4u);
  for (int64_t stage = 0; stage < 4; ++stage) {
    const HistoryTensor& t = history.tensors[static_cast<size_t>(stage)];
    EXPECT_EQ(t.name, "y" + std::to_string(stage));
    EXPECT_EQ(t.stage, stage);
    EXPECT_EQ(t.rank, stage % 2);
  }
  EXPECT_EQ(history.tensors[3].part(), "stage 3, rank 1");
  ASSERT_EQ(history.steps.size(), 3u);
  EXPECT_EQ(history.steps[2].rows.size(), 2u);
  ASSERT_EQ(history.steps[1].rows.size(), 4u);
  for (const HistoryRow& row : history.steps[1].rows) EXPECT_EQ(row.data.std, history.tensors[row.tensor].stage);
  EXPECT_EQ(history.rules.size(), 1u);
  EXPECT_EQ(history.torn_bytes, 4u);
  ASSERT_EQ(history.events.size(), 3u);
  EXPECT_EQ(history.events[0].count, 4);
  ASSERT_EQ(history.events[0].first.size(), 2u);
  EXPECT_EQ(history.tensors[history.events[0].first[1].tensor].name, "y1");
  using Values = std::vector<std::pair<std::string, double>>;
  EXPECT_EQ(history.scalars[0].values, (Values{{"loss (rank 0)", 1}, {"loss (rank 1)", 2}, {"rate", 0.5}}));
  EXPECT_EQ(history.scalars[2].values, (Values{{"loss (rank 0)", 1}, {"rate", 0.5}}));
  EXPECT_EQ(history.last_step(), 3);
}

TEST_F(Recording, ARankWritesNoFileThatAnotherOneHides) {
  small_history(file());
  EXPECT_THAT(message_of([&] { write_rank(file(), 1, {0}, 1, 1); }),
              AllOf(HasSubstr("run.history.rank1\" would not be read"), HasSubstr("run.history\"")));
  EXPECT_FALSE(fs::exists(file("run.history.rank1")));
  HistoryWriter(file("run.history.rank01"), false);  // no file of a rank
}

TEST_F(Recording, AFileOfJustThatNameIsReadAloneAndAMissingRankIsNamed) {
  write_rank(file(), 0, {0}, 1, 1);
  write_rank(file(), 2, {2}, 1, 1);
  EXPECT_THAT(message_of([&] { read_history(file()); }), AllOf(HasSubstr("rank 2"), HasSubstr("run.history.rank1")));
  EXPECT_EQ(read_history(file("run.history.rank2")).tensors[0].part(), "stage 2");
  small_history(file());
  EXPECT_EQ(read_history(file()).tensors.size(), 3u);
  EXPECT_EQ(read_history(file()).tensors[0].part(), "");
  // Other files beside them are nobody's ranks.
  for (const char* name : {"b.history.rank", "b.history.rank00", "b.history.rankx", "b.history.rank1.bak"})
    spill(file(name), "");
  EXPECT_THAT(message_of([&] { read_history(file("b.history")); }), HasSubstr("cannot be opened"));
}

}  // namespace
}  // namespace plumb
