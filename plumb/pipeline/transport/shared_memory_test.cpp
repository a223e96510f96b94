#include "plumb/pipeline/transport/shared_memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstring>

#include "plumb/core/error.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::HasSubstr;

TEST(SharedMemory, OutlivesTheProcessThatMadeIt) {
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t maker = ::fork();
  if (maker == 0) {
    SharedMemory memory;
    std::memset(memory.grow(5000), 7, 5000);
    const SharedMemory::Address address = memory.address();
    if (::write(pipe[1], &address, sizeof address) != sizeof address) ::_exit(1);
    char word = 0;
    while (true) ::read(pipe[0], &word, 0), ::pause();
  }
  SharedMemory::Address address;
  ASSERT_EQ(::read(pipe[0], &address, sizeof address), static_cast<ssize_t>(sizeof address));
  EXPECT_EQ(address.process, maker);
  const SharedMemory held(address);
  ::kill(maker, SIGKILL);
  ASSERT_EQ(::waitpid(maker, nullptr, 0), maker);
  const at::Tensor bytes = held.bytes();
  EXPECT_EQ(bytes.numel(), 5000);
  EXPECT_TRUE(bytes.eq(7).all().item<bool>());
  EXPECT_THAT(message_of([&] { SharedMemory again(address); }), HasSubstr("/proc/" + std::to_string(maker)));
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(SharedMemory, GrowsUnderThoseWhoHoldIt) {
  SharedMemory memory;
  const SharedMemory other(memory.address());
  EXPECT_EQ(other.bytes().numel(), 0);
  std::memset(memory.grow(100), 1, 100);
  const at::Tensor first = other.bytes();
  char* at = memory.grow(1 << 20);
  EXPECT_EQ(memory.grow(10), at) << "never shrinks";
  at[99] = 2;
  EXPECT_EQ(first[98].item<int>(), 1);
  EXPECT_EQ(first[99].item<int>(), 2) << "one memory";
  EXPECT_EQ(other.bytes().numel(), 1 << 20);
  EXPECT_NE(::ftruncate(static_cast<int>(memory.address().descriptor), 10), 0) << "nobody can make it smaller";
}

TEST(SharedMemory, BeyondALimitIsAnErrorThatSaysSo) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Error error = error_of([] { SharedMemory().grow(1 << 20); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(error.kind(), ErrorKind::CannotWrite);
  EXPECT_THAT(error.remedy(), HasSubstr("limits of memory and file sizes"));
}

TEST(SharedMemory, WhatAPeerNamesIsMemoryOfPlumbOrRefused) {
  const int file = ::open("/proc/self/exe", O_RDONLY);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const std::int64_t me = ::getpid();
  for (const SharedMemory::Address& wrong :
       {SharedMemory::Address{me, file}, {me, pipe[0]}, {me, -1}, {-1, 0}, {0, 1 << 30}}) {
    try {
      SharedMemory taken(wrong);
      ADD_FAILURE() << wrong.process << " " << wrong.descriptor;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::Communication) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("another rank"));
    }
  }
  for (const int descriptor : {file, pipe[0], pipe[1]}) ::close(descriptor);
}

}  // namespace
}  // namespace plumb
