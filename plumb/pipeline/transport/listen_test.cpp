#include "plumb/pipeline/transport/listen.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <optional>

#include "plumb/core/error.h"
#include "plumb/pipeline/transport/process_group.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

bool connects(in_addr address, int port) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr = address;
  to.sin_port = htons(static_cast<uint16_t>(port));
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool done = ::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  ::close(fd);
  return done;
}

in_addr loopback(uint32_t last) { return {htonl(0x7F000000u + last)}; }

// Returns an address of this host that is not of the loopback interface.
std::optional<in_addr> outside() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return std::nullopt;
  std::optional<in_addr> found;
  for (const ifaddrs* each = all; each; each = each->ifa_next) {
    if (!each->ifa_addr || each->ifa_addr->sa_family != AF_INET) continue;
    const in_addr address = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    if (ntohl(address.s_addr) >> 24 != 127) found = address;
  }
  ::freeifaddrs(all);
  return found;
}

void expect_loopback_alone(int port) {
  EXPECT_TRUE(connects(loopback(1), port));
  EXPECT_FALSE(connects(loopback(2), port)) << "it listens at all addresses";
  if (const auto address = outside()) {
    EXPECT_FALSE(connects(*address, port));
  }
}

TEST(Listen, AtTheAddressItIsToldAndNoOther) {
  for (const char* address : {"127.0.0.1", "localhost"}) {
    int port = 0;
    const int fd = listen_at(address, port);
    ASSERT_GE(fd, 0);
    if (std::string(address) == "127.0.0.1") expect_loopback_alone(port);
    ::close(fd);
  }
}

TEST(Listen, LeavesNamesOfHostsAndForeignAddressesAlone) {
  for (const char* address : {"some-host", "192.0.2.1"}) {
    int port = 0;
    EXPECT_EQ(listen_at(address, port), -1) << address;
  }
}

TEST(Listen, ARankGivesUpInTimeOnANameThatNoHostHas) {
  RankEnvironment env;
  env.rank = 1;
  env.world_size = 2;
  env.master_address = "nobody.invalid";
  GlooOptions options;
  options.timeout = std::chrono::seconds(1);
  EXPECT_THAT(
      message_of([&] { make_gloo_group(env, options); }),
      testing::AllOf(testing::HasSubstr("rank 1 of 2"), testing::HasSubstr("no host has the name 'nobody.invalid'"),
                     testing::HasSubstr("check MASTER_ADDR")));
}

TEST(Listen, NamesAPortThatIsTaken) {
  int port = 0;
  const int fd = listen_at("127.0.0.1", port);
  EXPECT_THROW(listen_at("127.0.0.1", port), Error);
  ::close(fd);
}

TEST(Listen, TheStoreOfRankZeroIsReachedFromLoopbackAlone) {
  int port = 0;
  ::close(listen_at("127.0.0.1", port));
  auto join = [&](int rank) {
    RankEnvironment env;
    env.rank = rank;
    env.world_size = 2;
    env.master_address = "127.0.0.1";
    env.master_port = port;
    return make_gloo_group(env, {});
  };
  auto other = std::async(std::launch::async, join, 1);
  const ProcessGroup first = join(0);
  const ProcessGroup second = other.get();
  expect_loopback_alone(port);
}

}  // namespace
}  // namespace plumb
