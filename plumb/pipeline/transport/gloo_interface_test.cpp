#include <gtest/gtest.h>

#include <future>
#include <stdexcept>

#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/listen.h"
#include "plumb/pipeline/transport/process_group.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

TEST(GlooInterface, TwoRanksOfOneProcessMeetThroughTheGlooInsideTorch) {
  RankEnvironment env;
  env.world_size = 2;
  env.master_port = 0;
  env.listening_socket = listen_at(env.master_address, env.master_port);
  const auto run = [&env](int rank) {
    RankEnvironment own = env;
    own.rank = rank;
    return largest_of_all(make_gloo_group(own), rank + 5);
  };
  auto other = std::async(std::launch::async, run, 1);
  EXPECT_EQ(run(0), 6) << "torch changed: look at plumb/pipeline/transport/gloo_seam/gloo_interface.h";
  EXPECT_EQ(other.get(), 6);
}

TEST(GlooInterface, ErrorsHaveNeitherThePlaceInItsSourcesNorItsAdvice) {
  const auto lose = [] {
    connecting("rank 1 lost a peer", "look at it", []() -> int {
      throw std::runtime_error(
          "[/pytorch/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:28298: Connection reset by peer. "
          "This is typically caused by a remote worker hanging. GLHF!");
    });
  };
  EXPECT_EQ(error_of(lose).message(), "rank 1 lost a peer: Read error [127.0.0.1]:28298: Connection reset by peer");
}

}  // namespace
}  // namespace plumb
