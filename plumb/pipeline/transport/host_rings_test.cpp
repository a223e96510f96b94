// Messages through memory that ranks of one host share: their order and bytes, lost peers, hostile peers.
#include "plumb/pipeline/transport/host_rings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <sstream>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/pipeline/transport/message.h"

namespace plumb {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

const auto kNever = [] { return false; };

at::Tensor message_of_bytes(std::int64_t bytes, int first) {
  return at::arange(first, first + bytes, at::kLong).remainder(251).to(at::kByte);
}

// Ranks 0 and 1, both in this process.
struct RingPair {
  HostRings a{0, 2}, b{1, 2};
  explicit RingPair(int processes = 0) {
    EXPECT_TRUE(a.open(1, b.address()));
    EXPECT_TRUE(b.open(0, a.address()));
    for (HostRings* rings : {&a, &b}) rings->look_first(processes);
  }
};

// Returns the text of what `work` throws.
template <class Work>
std::string end_of(Work work) {
  try {
    work();
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "";
}

std::string end_of_wait(HostRings& rings, int peer, milliseconds timeout) {
  return end_of([&] { rings.wait(peer, timeout, kNever); });
}

TEST(HostRings, BringMessagesInOrderWhetherReceiversLookOrSleep) {
  const int most = static_cast<int>(std::thread::hardware_concurrency());
  for (const int processes : {0, most + 1}) {  // enough cores for the ranks, and too few
    RingPair rings(processes);
    constexpr int kCount = 3000;
    const auto bytes_of = [](int i) {
      return 64 + std::int64_t{i} * 7919 % ((i % 100 == 0 ? HostRings::kLongest : 16384) - 63);
    };
    std::thread sender([&] {
      for (int i = 0; i < kCount; i++) {
        if (i % 500 == 0) std::this_thread::sleep_for(milliseconds(3));  // the receiver falls asleep
        rings.a.send(1, message_of_bytes(bytes_of(i), i), seconds(60), kNever);
      }
    });
    for (int i = 0; i < kCount; i++) {
      at::Tensor message = rings.b.take(0);
      while (!message.defined()) {
        rings.b.wait(0, seconds(60), kNever);
        message = rings.b.take(0);
      }
      ASSERT_TRUE(at::equal(message, message_of_bytes(bytes_of(i), i))) << i;
    }
    sender.join();
    EXPECT_FALSE(rings.b.take(0).defined());
  }
}

TEST(HostRings, TakeNoMoreThanTheyHoldUntilItIsRead) {
  RingPair rings;
  const at::Tensor message = message_of_bytes(1000000, 3);
  int sent = 0;
  while (rings.a.try_send(1, message)) sent++;
  EXPECT_EQ(sent, HostRings::kBytes / HostRings::taken_by(1000000));
  EXPECT_TRUE(at::equal(rings.b.take(0), message));
  EXPECT_TRUE(rings.a.try_send(1, message));
  EXPECT_FALSE(rings.a.try_send(1, message));
  EXPECT_EQ(end_of([&] { rings.a.send(1, message, milliseconds(50), kNever); }), "timed out");
}

// A ring that was read to its end begins anew, so the system gives it only what is under way at once.
TEST(HostRings, TakeTheMemoryOfMessagesUnderWay) {
  RingPair rings;
  const auto given = [&] {
    std::istringstream words(rings.a.address());
    std::string host, process;
    int descriptor = -1;
    words >> host >> process >> descriptor;
    struct stat found {};
    EXPECT_EQ(::fstat(descriptor, &found), 0);
    return std::int64_t{found.st_blocks} * 512;
  };
  const at::Tensor message = message_of_bytes(1000000, 3);
  for (int i = 0; i < 200; i++) {
    for (int m = 0; m < 2; m++) ASSERT_TRUE(rings.a.try_send(1, message));
    for (int m = 0; m < 2; m++) ASSERT_TRUE(at::equal(rings.b.take(0), message)) << i;
  }
  EXPECT_LE(given(), 4 << 20);
  while (rings.a.try_send(1, message)) continue;
  EXPECT_GE(given(), HostRings::kBytes / 1000000 * 1000000);
}

TEST(HostRings, SayThatThereIsNoMemoryForAMessage) {
  RingPair rings;
  ASSERT_TRUE(rings.a.try_send(1, message_of_bytes(1000, 3)));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string text = end_of([&] { rings.a.try_send(1, message_of_bytes(1000000, 3)); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(text, testing::HasSubstr("bytes of memory that processes share cannot be had"));
  ASSERT_TRUE(rings.a.try_send(1, message_of_bytes(1000000, 3)));
  EXPECT_EQ(rings.b.take(0).numel(), 1000);
  EXPECT_TRUE(at::equal(rings.b.take(0), message_of_bytes(1000000, 3)));
}

TEST(HostRings, EndAWaitByItsTimeAndByAnInterrupt) {
  RingPair rings;
  EXPECT_EQ(end_of_wait(rings.a, 1, milliseconds(30)), "timed out");
  std::atomic<bool> interrupted = false;
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(30));
    interrupted = true;
  });
  EXPECT_EQ(end_of([&] { rings.a.wait(1, seconds(60), [&] { return interrupted.load(); }); }), "interrupted");
  other.join();
}

// A lost peer's messages are there after it has gone; then the wait ends.
TEST(HostRings, NoticeThatAPeerHasClosedOrEnded) {
  HostRings own(0, 2);
  {
    HostRings closing(1, 2);
    ASSERT_TRUE(own.open(1, closing.address()));
    ASSERT_TRUE(closing.open(0, own.address()));
    ASSERT_TRUE(closing.try_send(0, message_of_bytes(100, 1)));
  }
  own.wait(1, seconds(60), kNever);
  EXPECT_TRUE(at::equal(own.take(1), message_of_bytes(100, 1)));
  EXPECT_EQ(end_of_wait(own, 1, seconds(60)), "it has closed its connection");

  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  HostRings again(0, 2);  // numbers of a ring are those of one peer
  const std::string address = again.address();
  const pid_t peer = ::fork();
  if (peer == 0) {
    HostRings theirs(1, 2);
    const bool sent = theirs.open(0, address) && theirs.try_send(0, at::full({200}, 7, at::kByte));
    const std::string text = sent ? theirs.address() : "";
    if (!sent || ::write(pipe[1], text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(1);
    while (true) ::pause();
  }
  ::close(pipe[1]);
  char text[512];
  const ssize_t size = ::read(pipe[0], text, sizeof text);
  ASSERT_GT(size, 0);
  ASSERT_TRUE(again.open(1, std::string(text, static_cast<size_t>(size))));
  std::thread killer([&] {
    std::this_thread::sleep_for(milliseconds(50));
    ::kill(peer, SIGKILL);
  });
  again.wait(1, seconds(60), kNever);
  EXPECT_TRUE(again.take(1).eq(7).all().item<bool>());
  EXPECT_EQ(end_of_wait(again, 1, seconds(60)), "its process has ended");
  killer.join();
  const at::Tensor message = message_of_bytes(10000, 3);
  const auto fill = [&] {
    while (true) again.send(1, message, seconds(60), kNever);
  };
  EXPECT_EQ(end_of(fill), "its process has ended");
  ASSERT_EQ(::waitpid(peer, nullptr, 0), peer);
  ::close(pipe[0]);
}

TEST(HostRings, AreOpenedOnThisHostByTheirSecretAlone) {
  HostRings own(0, 2), peer(1, 2), larger(1, 5);
  std::istringstream words(peer.address());
  std::string host, process, descriptor, secret;
  words >> host >> process >> descriptor >> secret;
  for (const std::string& wrong :
       {std::string(), std::string("x"), host + " " + process + " " + descriptor + " 1",
        "other" + host + " " + process + " " + descriptor + " " + secret, host + " 1 0 " + secret,
        host + " " + process + " 0 " + secret, host + " -1 -1 " + secret,
        host + " " + process + " 99999999999999999999 " + secret}) {
    EXPECT_FALSE(own.open(1, wrong)) << wrong;
    EXPECT_FALSE(own.has(1));
  }
  EXPECT_FALSE(larger.open(0, own.address())) << "the memory of a smaller group";
  EXPECT_TRUE(own.open(1, peer.address()));
  own.close(1);
  EXPECT_FALSE(own.has(1));
}

// A peer that writes whatever it likes: messages of a bounded length, or errors.
TEST(HostRings, OfAHostilePeerGiveBoundedMessagesOrErrors) {
  HostRings own(0, 2);
  SharedMemory hostile;
  constexpr std::int64_t kRing = 64 << 10, kFilled = 64 << 10;  // where the ring for rank 0 begins; of either end
  auto* bytes = reinterpret_cast<unsigned char*>(hostile.reserve(kRing + 2 * HostRings::kBytes));
  std::istringstream words(own.address());
  std::string host;
  words >> host;
  std::mt19937 random(1);
  int messages = 0, errors = 0;
  for (int round = 0; round < 2000; round++) {
    // Numbers near what is right, so that some pass the checks.
    const std::uint32_t written = random() % 4 == 0 ? random() : random() % 2000 * 8;
    const std::uint32_t start = random() % 4 == 0 ? random() : random() % 3000 * 8;
    const std::uint32_t length = random() % 4 == 0 ? random() : random() % 20000;
    for (std::int64_t i = 0; i < kFilled; i += 8) {
      std::memcpy(bytes + kRing + i, &length, sizeof length);
      std::memcpy(bytes + kRing + HostRings::kBytes - kFilled + i, &length, sizeof length);
    }
    const std::uint64_t secret = 77;
    std::memset(bytes, 0, 64);
    std::memcpy(bytes, &secret, sizeof secret);
    std::memcpy(bytes + 64, &written, sizeof written);
    std::memcpy(bytes + 68, &start, sizeof start);
    const std::uint32_t read = random();
    std::memcpy(bytes + 128, &read, sizeof read);
    const auto [process, descriptor] = hostile.address();
    std::ostringstream address;
    address << host << " " << process << " " << descriptor << " 77";
    HostRings rings(0, 2);
    ASSERT_TRUE(rings.open(1, address.str()));
    try {
      for (int i = 0; i < 5; i++) {
        const at::Tensor message = rings.take(1);
        if (!message.defined()) break;
        ASSERT_LE(message.numel(), HostRings::kLongest);
        ASSERT_GE(message.numel(), static_cast<std::int64_t>(sizeof(wire::Prologue)));
        messages++;
      }
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::Communication);
      errors++;
    }
    rings.try_send(1, message_of_bytes(1000, 1));
  }
  EXPECT_GT(messages, 50);
  EXPECT_GT(errors, 50);
}

}  // namespace
}  // namespace plumb
