#include "plumb/schedule/torch_lowering.h"

#include <gtest/gtest.h>

#include "plumb/core/error.h"
#include "plumb/schedule/check.h"
#include "plumb/schedule/generators.h"

namespace plumb {
namespace {

TEST(TorchLowering, MessagesStandBehindTheirMakerAndAtTheEndOfTheReceiversRow) {
  EXPECT_EQ(to_csv(add_send_recv(parse_csv("0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"))),
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n");
}

TEST(TorchLowering, StagesOfOneRankNeedNoMessages) {
  EXPECT_EQ(to_csv(add_send_recv(parse_csv("0F0,1F0,1B0,0B0\n"))), "0F0,1F0,1B0,0B0\n");
}

TEST(TorchLowering, EveryKnownScheduleRunsWithThem) {
  for (const char* name : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                           "DualPipeV", "ZBH1", "VHalf", "DualPipe"}) {
    SCOPED_TRACE(name);
    const Schedule lowered = add_send_recv(make_schedule(name, 4, 10));
    CheckOptions options;
    options.blocking_receives = true;
    EXPECT_EQ(check_schedule(lowered, {}, options).text(), "ok");
    const Schedule played = simulate_send_recv(lowered);
    EXPECT_EQ(without_idle(played), lowered);
    EXPECT_EQ(check_schedule(defer_receives(lowered), {}, options).text(), "ok");
  }
}

TEST(TorchLowering, ATableThatStopsNamesTheEntries) {
  try {
    add_send_recv(parse_csv("0F0,0B0\n1B0,1F0\n"));
    simulate_send_recv(parse_csv("0RECV_B0,0F0,0B0\n1F0,1B0\n"));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::Schedule);
    EXPECT_NE(error.message().find("rank 0 at 0RECV_B0, rank 1 at 1F0"), std::string::npos) << error.message();
  }
}

TEST(TorchLowering, LateReceivesStandBeforeTheirUserAndTheLowerRankReceivesFirst) {
  const Schedule lowered = parse_csv(
      "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n");
  EXPECT_EQ(to_csv(defer_receives(lowered)),
            "0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n");
  EXPECT_THROW(defer_receives(parse_csv("0F0,0SEND_F0,0B0\n1RECV_F0,1B0\n")), Error);
}

}  // namespace
}  // namespace plumb
