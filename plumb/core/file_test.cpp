
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/output_file.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

class File : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "plumb_file_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }

  static std::string read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }
  fs::path folder_;
};

TEST_F(File, HoldsEveryByteAndNothingIsLeftBeside) {
  const std::string bytes("a\0b\n\xff", 5);
  write_file_atomically(folder_ / "x", bytes);
  EXPECT_EQ(read(folder_ / "x"), bytes);
  write_file_atomically(folder_ / "x", "");
  EXPECT_EQ(read(folder_ / "x"), "");
  EXPECT_EQ(files(), 1u);
}

TEST_F(File, MakesTheFoldersOnTheWay) {
  write_file_atomically(folder_ / "a" / "b" / "x", "1");
  EXPECT_EQ(read(folder_ / "a" / "b" / "x"), "1");
}

TEST_F(File, KeepsALinkAndThePermissionsOfWhatItReplaces) {
  write_file_atomically(folder_ / "x", "1");
  ASSERT_EQ(chmod((folder_ / "x").c_str(), 0640), 0);
  fs::create_symlink("x", folder_ / "link");
  write_file_atomically(folder_ / "link", "2");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read(folder_ / "x"), "2");
  EXPECT_EQ(fs::status(folder_ / "x").permissions(), fs::perms(0640));
}

TEST_F(File, SaysWhichPathCannotBeWrittenAndWhy) {
  write_file_atomically(folder_ / "file", "1");
  for (const fs::path& path : {folder_, folder_ / "file" / "x", fs::path("/proc/nowhere/x"), fs::path()}) {
    try {
      write_file_atomically(path, "2");
      FAIL() << path;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::CannotWrite);
      EXPECT_NE(e.message().find(path.string()), std::string::npos) << e.what();
    }
  }
  EXPECT_EQ(read(folder_ / "file"), "1");
  EXPECT_EQ(files(), 1u);
}

TEST_F(File, ALinkToWhatIsNotThereYetStaysALink) {
  fs::create_directory(folder_ / "there");
  fs::create_symlink("there/x", folder_ / "link");
  write_file_atomically(folder_ / "link", "1");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read(folder_ / "there" / "x"), "1");
}

TEST_F(File, LinksThatLeadToNoFileAreErrorsAndStay) {
  fs::create_symlink("self", folder_ / "self");
  fs::create_symlink("b", folder_ / "a");
  fs::create_symlink("a", folder_ / "b");
  fs::create_symlink("self", folder_ / "to_self");
  fs::create_directory(folder_ / "folder");
  fs::create_symlink("folder", folder_ / "to_folder");
  fs::create_symlink("no/such/x", folder_ / "to_nowhere");
  fs::create_symlink("self/x", folder_ / "through_self");
  const size_t before = files();
  for (const char* name : {"self", "a", "to_self", "to_folder", "to_nowhere", "through_self"}) {
    const fs::path leads = fs::read_symlink(folder_ / name);
    try {
      OutputFile file((folder_ / name).string());
      FAIL() << name;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::CannotWrite);
      EXPECT_NE(e.message().find((folder_ / name).string()), std::string::npos) << e.what();
    }
    EXPECT_EQ(fs::read_symlink(folder_ / name), leads);
  }
  EXPECT_EQ(files(), before);
}

TEST_F(File, AZeroByteDoesNotEndAName) {
  const std::string cut = (folder_ / "x").string(), name = cut + std::string("\0.txt", 5);
  write_file_atomically(cut, "1");
  EXPECT_THROW(OutputFile(std::string(name)), Error);
  EXPECT_THROW(InputFile(std::string(name)), Error);
}

TEST_F(File, OfHolesIsNotReadWhole) {
  write_file_atomically(folder_ / "x", "1");
  fs::resize_file(folder_ / "x", uint64_t{1} << 40);
  try {
    read_file(folder_ / "x");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::BadFile);
    EXPECT_NE(e.message().find("has 1099511627776 bytes"), std::string::npos) << e.what();
  }
}

TEST_F(File, AFifoIsWrittenToAndStays) {
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  std::string got;
  std::thread reader([&] { got = read(folder_ / "fifo"); });
  write_file_atomically(folder_ / "fifo", "through");
  reader.join();
  EXPECT_EQ(got, "through");
  EXPECT_TRUE(fs::is_fifo(folder_ / "fifo"));
  EXPECT_EQ(files(), 1u);
}

TEST_F(File, ADeviceIsWrittenToAndStays) {
  write_file_atomically("/dev/null", "away");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THROW(write_file_atomically("/dev/full", "no room"), Error);
}

TEST_F(File, TryingWhetherAFifoCanBeWrittenDoesNotWaitForItsReader) {
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  const OutputFile never_written((folder_ / "fifo").string());
}

TEST_F(File, NamesAreAsLongAsTheyCanBe) {
  const std::string name(255, 'n');
  write_file_atomically(folder_ / name, "1");
  EXPECT_EQ(read(folder_ / name), "1");
}

TEST_F(File, IsReadWholeAndOnlyIfItHasAnEnd) {
  write_file_atomically(folder_ / "x", std::string("a\0b", 3));
  EXPECT_EQ(read_file(folder_ / "x"), std::string("a\0b", 3));
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  for (const fs::path& path : {folder_ / "fifo", fs::path("/dev/zero"), folder_, folder_ / "none"}) {
    try {
      read_file(path);
      FAIL() << path;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::BadFile);
      EXPECT_NE(e.message().find(path.string()), std::string::npos) << e.what();
    }
  }
}

TEST_F(File, ThatShrinksWhileItIsReadIsANamedError) {
  write_file_atomically(folder_ / "x", std::string(5000, 'a'));
  const InputFile file((folder_ / "x").string());
  fs::resize_file(folder_ / "x", 10);
  char bytes[10];
  file.read_at(0, bytes, 10);
  EXPECT_THROW(file.read_at(4000, bytes, 10), Error);
}

TEST_F(File, AWriteThatFailsHalfWayLeavesTheOldFile) {
  write_file_atomically(folder_ / "x", "old");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 4096;
  auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(write_file_atomically(folder_ / "x", std::string(100000, 'n')), Error);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read(folder_ / "x"), "old");
  EXPECT_EQ(files(), 1u);
}

TEST_F(File, AKilledWriterLeavesNothing) {
  const int unnamed = ::open(folder_.c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (unnamed < 0) GTEST_SKIP() << "this file system has no files without a name";
  ::close(unnamed);
  write_file_atomically(folder_ / "x", "old");
  const pid_t writer = ::fork();
  if (writer == 0) {
    OutputFile file((folder_ / "x").string());
    const std::string bytes(100000, 'n');
    file.write(bytes.data(), bytes.size());
    ::raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(writer, &status, 0), writer);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(read(folder_ / "x"), "old");
  EXPECT_EQ(files(), 1u);
}

// Process numbers repeat: in containers that share a folder every first process is 1.
TEST_F(File, NamesThatAnotherProcessOfThisNumberMayHaveStandNeitherInTheWayNorAreTheyRemoved) {
  std::vector<fs::path> others;
  for (int i = 0; i < 500; ++i) {
    others.push_back(folder_ / (".plumb." + std::to_string(::getpid()) + "." + std::to_string(i) + ".part"));
    std::ofstream(others.back()) << "another's";
  }
  { const OutputFile given_up((folder_ / "x").string()); }
  write_file_atomically(folder_ / "x", "1");
  EXPECT_EQ(read(folder_ / "x"), "1");
  for (const fs::path& other : others) EXPECT_EQ(read(other), "another's") << other;
}

TEST_F(File, WritersAtTheSameTimeLeaveOneWholeFile) {
  std::vector<std::thread> writers;
  for (char c = 'a'; c < 'e'; ++c) {
    writers.emplace_back([&, c] {
      for (int i = 0; i < 20; ++i) write_file_atomically(folder_ / "x", std::string(20000, c));
    });
  }
  for (auto& writer : writers) writer.join();
  const std::string text = read(folder_ / "x");
  ASSERT_EQ(text.size(), 20000u);
  EXPECT_EQ(text, std::string(20000, text[0]));
  EXPECT_EQ(files(), 1u);
}

}  // namespace
}  // namespace plumb
