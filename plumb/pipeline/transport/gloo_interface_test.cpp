#include <gtest/gtest.h>

#include <future>

#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/pipeline/transport/listen.h"
#include "plumb/pipeline/transport/process_group.h"

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

}  // namespace
}  // namespace plumb
