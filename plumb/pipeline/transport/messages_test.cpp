// Messages: their contents, and the errors of damaged ones and of ones that were not agreed on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <string_view>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/numerics/quantise.h"
#include "plumb/pipeline/models_testing.h"
#include "plumb/pipeline/processes_testing.h"
#include "plumb/pipeline/runtime/run_plan.h"
#include "plumb/pipeline/runtime/runtime.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/pipeline/transport/message.h"
#include "plumb/pipeline/transport/transport_state.h"
#include "plumb/schedule/generators.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using namespace testing_processes;
using testing::AllOf;
using testing::HasSubstr;

at::Tensor pack(const std::vector<MessageValue>& values) {
  auto buffer = at::empty({wire::message_bytes(values)}, at::kByte);
  wire::write_message(static_cast<char*>(buffer.data_ptr()), {}, values);
  return buffer;
}

TEST(Message, CarriesEveryTypeShapeAndStride) {
  std::vector<MessageValue> values;
  for (auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool,
                    at::kComplexFloat, at::kFloat8_e4m3fn}) {
    values.push_back({(at::rand({3, 5}) * 9).to(type), type == at::kFloat});
  }
  values.push_back({at::Tensor(), false});
  values.push_back({at::rand({4, 6}).t(), true});
  values.push_back({at::rand({4, 6}).narrow(1, 1, 2), false});
  values.push_back({at::rand({3, 1}).expand({3, 4}), false});
  values.push_back({at::scalar_tensor(2.5), false});
  values.push_back({at::empty({0, 3}), false});
  values.push_back({at::rand({1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2}), false});
  auto buffer = pack(values);
  auto back = wire::read_message(buffer).values;
  buffer = at::Tensor();
  ASSERT_EQ(back.size(), values.size());
  for (size_t i = 0; i < values.size(); i++) {
    const auto &a = values[i].tensor, &b = back[i].tensor;
    ASSERT_EQ(a.defined(), b.defined()) << i;
    EXPECT_EQ(values[i].requires_grad, back[i].requires_grad);
    if (!a.defined()) continue;
    EXPECT_EQ(a.scalar_type(), b.scalar_type());
    EXPECT_TRUE(a.sizes() == b.sizes() && at::equal(a.to(at::kComplexDouble), b.to(at::kComplexDouble))) << i;
  }
  EXPECT_EQ(back[10].tensor.strides(), values[10].tensor.strides()) << "dense values keep their strides";
  EXPECT_EQ(back[11].tensor.strides(), values[11].tensor.strides()) << "parts keep their gaps";
  EXPECT_TRUE(back[12].tensor.is_contiguous());
}

// A liar's message: its checksums are right.
void seal_again(at::Tensor& buffer) {
  auto* bytes = static_cast<char*>(buffer.data_ptr());
  auto* prologue = reinterpret_cast<wire::Prologue*>(bytes);
  prologue->body_sum = crc32(bytes + sizeof *prologue, buffer.numel() - sizeof *prologue);
  wire::seal(*prologue);
}

TEST(Message, CarriesTheSizesOfItsMicrobatchAndNoMoreThanItHolds) {
  const std::vector<MessageValue> values{{at::rand({3, 5}), true}};
  const std::vector<int64_t> sizes{0, 2, 7, 4};
  auto whole = at::empty({wire::message_bytes(values, sizes.size())}, at::kByte);
  wire::write_message(static_cast<char*>(whole.data_ptr()), {}, values, sizes);
  const auto back = wire::read_message(whole);
  EXPECT_TRUE(at::equal(back.values[0].tensor, values[0].tensor));
  EXPECT_EQ(back.sizes, sizes);
  EXPECT_TRUE(wire::read_message(pack(values)).sizes.empty());
  for (const std::uint32_t lie : {5u, 1000u, 0xffffffffu}) {
    for (const bool of_values : {true, false}) {
      auto damaged = whole.clone();
      auto* prologue = static_cast<wire::Prologue*>(damaged.data_ptr());
      (of_values ? prologue->num_values : prologue->num_sizes) = lie;
      seal_again(damaged);
      EXPECT_THROW(wire::read_message(damaged), Error) << lie;
    }
  }
}

TEST(Message, CarriesCodesOfAByteAndGivesRoundedValues) {
  const FPFormat format = FPFormat::parse("e4m3fn");
  std::vector<MessageValue> values;
  for (auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16})
    values.push_back({at::randn({40, 50}).to(type).t(), true, &format});
  values.push_back({at::arange(7), false});
  values.push_back({at::tensor({NAN, INFINITY, -0.0f, 1e9f}), false, &format});
  const auto buffer = pack(values);
  EXPECT_LT(buffer.numel(), 5 * 2048 + 4 * 256 + 64);
  std::vector<AgreedValue> agreed(values.size());
  for (size_t i = 0; i < values.size(); i++) agreed[i].codes = values[i].codes;
  const auto back = wire::read_message(buffer, agreed, &format).values;
  for (size_t i = 0; i < 4; i++) {
    EXPECT_TRUE(at::equal(back[i].tensor, quantise(values[i].tensor, format))) << i;
    EXPECT_EQ(back[i].tensor.scalar_type(), values[i].tensor.scalar_type());
    EXPECT_EQ(back[i].tensor.strides(), values[i].tensor.strides());
    EXPECT_TRUE(back[i].requires_grad);
  }
  EXPECT_TRUE(at::equal(back[4].tensor, values[4].tensor));
  EXPECT_TRUE(back[5].tensor[0].isnan().item<bool>());
  EXPECT_EQ(back[5].tensor[3].item<float>(), 448.0f);
}

// Values on a device are the backend's business: these are the CPU's.
TEST(Message, LeavesValuesOnTheirDeviceToItsBackend) {
  const FPFormat format = FPFormat::parse("e4m3fn");
  const std::vector<MessageValue> values{{at::rand({4, 6}).t(), true},        {},
                                         {at::rand({3, 1}).expand({3, 4})},   {at::empty({0, 3})},
                                         {at::randn({8, 8}), false, &format}, {at::arange(7)}};
  auto buffer = at::empty({wire::message_bytes(values, 0, at::kCPU)}, at::kByte);
  wire::write_message(static_cast<char*>(buffer.data_ptr()), {}, values, {}, at::kCPU);
  EXPECT_LT(buffer.numel(), wire::message_bytes(values));
  const Tensors sent = wire::direct_values(values, at::kCPU);
  const Tensors received = wire::make_direct_values(buffer, at::kCPU);
  ASSERT_EQ(sent.size(), 4u);
  ASSERT_EQ(received.size(), 4u);
  for (size_t i = 0; i < sent.size(); i++) {
    ASSERT_EQ(wire::bytes_of(sent[i]).numel(), wire::bytes_of(received[i]).numel()) << i;
    wire::bytes_of(received[i]).copy_(wire::bytes_of(sent[i]));
  }
  const auto back = wire::read_message(buffer, std::nullopt, &format, received).values;
  ASSERT_EQ(back.size(), values.size());
  EXPECT_EQ(back[0].tensor.strides(), values[0].tensor.strides());
  EXPECT_TRUE(back[0].requires_grad);
  EXPECT_FALSE(back[1].tensor.defined());
  EXPECT_EQ(back[3].tensor.sizes(), values[3].tensor.sizes());
  for (size_t i : {0, 2, 5}) EXPECT_TRUE(at::equal(back[i].tensor, values[i].tensor)) << i;
  EXPECT_TRUE(at::equal(back[4].tensor, quantise(values[4].tensor, format)));
  EXPECT_THAT(message_of([&] { wire::read_message(buffer, std::nullopt, &format); }),
              HasSubstr("comes through a device's backend, which was not agreed on"));
  EXPECT_THAT(message_of([&] { wire::read_message(pack(values), std::nullopt, &format, received); }),
              HasSubstr("it has 0 values on the device"));
  // The flag of a value that is not there, and of one without elements.
  for (const size_t entry : {sizeof(wire::Prologue) + 8 + 4 * 8, sizeof(wire::Prologue) + 16 + 4 * 8 + 8 + 4 * 8}) {
    auto lie = buffer.clone();
    static_cast<char*>(lie.data_ptr())[entry + 5] = 1;
    seal_again(lie);
    EXPECT_THROW(wire::make_direct_values(lie, at::kCPU), Error) << entry;
  }
  // Sizes beyond any memory.
  auto lie = buffer.clone();
  auto* sizes = reinterpret_cast<std::int64_t*>(static_cast<char*>(lie.data_ptr()) + sizeof(wire::Prologue) + 8);
  sizes[0] = sizes[1] = std::int64_t{1} << 31;
  seal_again(lie);
  EXPECT_THAT(message_of([&] { wire::make_direct_values(lie, at::kCPU); }), HasSubstr("sizes are impossible"));
}

TEST(Message, RefusesCodesThatWereNotAgreedOnAndValuesInTheirPlace) {
  const FPFormat format = FPFormat::parse("e5m2");
  const at::Tensor x = at::randn({8, 8});
  const auto coded = pack({{x, false, &format}}), plain = pack({{x, false}});
  EXPECT_THAT(message_of([&] { wire::read_message(coded); }), HasSubstr("comes as codes, which was not agreed on"));
  const std::vector<AgreedValue> as_codes{{AgreedValue::Comes::Maybe, at::kFloat, std::nullopt, &format}};
  const std::vector<AgreedValue> as_it_is{{AgreedValue::Comes::Maybe, at::kFloat, std::nullopt, nullptr}};
  EXPECT_THAT(message_of([&] { wire::read_message(plain, as_codes, &format); }), HasSubstr("comes as it is"));
  EXPECT_THAT(message_of([&] { wire::read_message(coded, as_it_is, &format); }), HasSubstr("comes as codes"));
  auto integers = pack({{at::arange(64), false}});
  const int64_t flag = sizeof(wire::Prologue) + 4;  // offset of the flag `coded` in the first value's entry
  static_cast<unsigned char*>(integers.data_ptr())[flag] = 1;
  seal_again(integers);
  EXPECT_THAT(message_of([&] { wire::read_message(integers, std::nullopt, &format); }), HasSubstr("not agreed on"));
}

TEST(Message, NeverReadsBeyondALiarsCodes) {
  const FPFormat format = FPFormat::parse("e4m3fn");
  const auto whole = pack({{at::rand({3, 5}), true, &format}, {at::rand({70}), false, &format}});
  for (int64_t i = 0; i < 192; i++) {
    for (int flip : {0x01, 0x80, 0xff}) {
      auto damaged = whole.clone();
      static_cast<unsigned char*>(damaged.data_ptr())[i] ^= flip;
      seal_again(damaged);
      try {
        for (auto& v : wire::read_message(damaged, std::nullopt, &format).values) {
          if (v.tensor.defined()) v.tensor.clone();
        }
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::Communication) << e.what();
      }
    }
  }
}

TEST(Message, GivesEveryValueAVersionOfItsOwn) {
  auto buffer = pack({{at::ones({4}), true}, {at::ones({4}), true}});
  auto back = wire::read_message(buffer).values;
  back[0].tensor.mul_(2);
  EXPECT_EQ(back[1].tensor._version(), 0u);
  EXPECT_TRUE(at::equal(back[1].tensor, at::ones({4})));
}

TEST(Message, NoticesEveryFlippedBit) {
  const auto whole = pack({{at::rand({3, 5}), true}, {at::arange(7), false}, {at::Tensor(), false}});
  for (int64_t i = 0; i < whole.numel() * 8; i++) {
    auto damaged = whole.clone();
    static_cast<unsigned char*>(damaged.data_ptr())[i / 8] ^= 1 << (i % 8);
    EXPECT_THROW(wire::read_message(damaged), Error) << "bit " << i;
  }
}

TEST(Message, NeverReadsBeyondALiarsBuffer) {
  const auto whole = pack({{at::rand({3, 5}), true}, {at::arange(7), false}, {at::Tensor(), false}});
  int refused = 0;
  for (int64_t i = 0; i < 160; i++) {
    for (int flip : {0x01, 0x80, 0xff}) {
      auto damaged = whole.clone();
      static_cast<unsigned char*>(damaged.data_ptr())[i] ^= flip;
      seal_again(damaged);
      try {
        for (auto& v : wire::read_message(damaged).values) {
          if (v.tensor.defined()) v.tensor.clone();
        }
      } catch (const Error& e) {
        refused++;
        EXPECT_EQ(e.kind(), ErrorKind::Communication) << e.what();
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST(Message, SizesOfAnEmptyValueWhoseStridesAreBeyondInt64AreRefused) {
  auto lie = pack({{at::empty({0, 2, 3}), false}});
  auto* const begin = static_cast<char*>(lie.data_ptr());
  const std::int64_t sizes[] = {0, 2, 3}, large = std::int64_t{1} << 58;
  const auto table = std::string_view(begin, lie.numel()).find({reinterpret_cast<const char*>(sizes), sizeof sizes});
  ASSERT_NE(table, std::string_view::npos);
  for (const size_t place : {1, 2}) std::memcpy(begin + table + place * sizeof large, &large, sizeof large);
  seal_again(lie);
  EXPECT_THAT(message_of([&] { wire::read_message(lie); }), HasSubstr("sizes are impossible"));
}

TEST(Message, BuffersHaveOneOfAFewSizes) {
  EXPECT_EQ(wire::class_bytes(0), 1024);
  for (int c = 1; c < wire::kSizeClasses; c++) {
    EXPECT_LE(wire::class_bytes(c), wire::class_bytes(c - 1) * 17 / 16);
    EXPECT_EQ(wire::size_class(wire::class_bytes(c)), c);
    EXPECT_EQ(wire::size_class(wire::class_bytes(c - 1) + 1), c);
  }
  EXPECT_EQ(wire::size_class(std::int64_t{1} << 50), wire::kSizeClasses);
}

TEST(Message, RefusesTensorsWithoutPlainMemory) {
  EXPECT_THAT(message_of([] { wire::sendable({MessageKind::Activation, 0, 1, 2}, {{at::eye(3).to_sparse()}}); }),
              HasSubstr("value 0 of 0SEND_F2"));
}

Role transport_role("transport", [] {
  auto group = make_group_from_environment({std::chrono::seconds(60)});
  Transport transport(group);
  const int me = group.rank(), other = 1 - me;
  auto texts = transport.exchange(std::string(me == 0 ? 5 : 5000, static_cast<char>('a' + me)));
  report("texts", std::to_string(texts[0].size()) + "," + std::to_string(texts[1].size()));
  MessagePlan plan;
  for (int m = 0; m < 6; m++) {
    plan.sends.push_back({{MessageKind::Activation, me, other, m}, other});
    plan.receives.push_back({{MessageKind::Activation, other, me, m}, other});
  }
  bool right = true;
  std::string grown;
  for (int64_t size : {100, 5000, 200, 5000, 9000}) {  // larger and smaller again; received from the last to the first
    transport.begin_step(plan);
    for (int m = 0; m < 6; m++) transport.send(m, {{at::full({size}, 10.0 * me + m)}});
    for (int m = 5; m >= 0; m--) {
      const auto values = transport.receive(m, "the test").values;
      right = right && at::equal(values[0].tensor, at::full({size}, 10.0 * other + m));
    }
    transport.end_step();
    grown += std::to_string(transport.grown()) + ",";
  }
  report("right", right ? "yes" : "no");
  report("grown", grown);
  return 0;
});

TEST(Transport, FollowsSizesThatChange) {
  auto run = run_role("transport", 2);
  ASSERT_EQ(run.result.exit_code(), 0) << run.errors[0] << run.errors[1];
  for (auto& r : run.reports) {
    EXPECT_EQ(r["texts"], "5,5000");
    EXPECT_EQ(r["right"], "yes");
  }
  // Counted on both ends: one text, then six messages each way the first time they are larger than ever before.
  EXPECT_EQ(run.reports[0]["grown"], "1,13,13,13,25,");
}

// Rank 0 trains a pipeline. Rank 1 takes part as far as the first gradient, which is a LIE.
class Liar {
 public:
  explicit Liar(ProcessGroup group) : group_(std::move(group)), transport_(group_) {}

  void tell(const std::string& lie) {
    const auto model = test_model("skip", 2);
    const auto schedule = make_schedule("1F1B", 2, 4);
    transport_.exchange(model.layout.text() + to_csv(compute_only(schedule)) +
                        "gradient groups 1, scale_grads 1, average_replicas 0\n");
    for (int i : {0, 1}) transport_.exchange("");  // on a host of its own
    transport_.exchange("[]");                     // its parameters
    transport_.exchange("{}");                     // and their values
    const RunPlan plan = plan_run(schedule, connect_stages(model.layout), 1, {});
    transport_.begin_step(plan.messages);
    const auto values = transport_.receive(0, "the lie").values;
    gradients_ = {{at::ones_like(values[0].tensor)}, {at::ones_like(values[1].tensor)}, {}};
    if (change_values(lie)) {
      transport_.send(0, gradients_);
    } else {
      send_bytes(lie);
    }
    for (int m = 1; m < 4; m++) transport_.receive(m, "the end of the lie");
  }

 private:
  // Another gradient than was agreed, as any peer of plumb may send it.
  bool change_values(const std::string& lie) {
    if (lie == "dtype") {
      gradients_[0].tensor = gradients_[0].tensor.to(at::kDouble);
    } else if (lie == "sizes") {
      gradients_[1].tensor = at::ones({6, 2});
    } else if (lie == "presence") {
      gradients_[2].tensor = at::ones({2, 6});
    } else if (lie == "count") {
      gradients_.pop_back();
    } else if (lie == "flag") {
      gradients_[0].requires_grad = true;
    } else {
      return lie == "none";
    }
    return true;
  }

  // Bytes that plumb would not send. Those that a checksum would give away have a right one.
  void send_bytes(const std::string& lie) {
    auto message = at::zeros({wire::message_bytes(gradients_)}, at::kByte);
    auto* bytes = static_cast<char*>(message.data_ptr());
    wire::write_message(bytes, prologue(), gradients_);
    auto& p = *reinterpret_cast<wire::Prologue*>(bytes);
    auto* strides = reinterpret_cast<std::int64_t*>(bytes + sizeof p + 8 + 2 * 8);
    if (lie == "bit") {
      bytes[message.numel() - 100] ^= 4;
    } else if (lie == "header") {
      p.from ^= 4;
    } else {
      if (lie == "stranger") p.magic = 0x12345678;
      if (lie == "quantised") bytes[sizeof p] = static_cast<char>(at::kQInt8);
      if (lie == "overlap") strides[0] = 0;
      if (lie == "reach") strides[0] = 60000;
      if (lie == "length") p.total_bytes = 1 << 20;
      if (lie == "other") p.microbatch = 2;
      if (lie == "answer") p.received = 1000;
      if (lie == "forward") p.has_backward = 0;
      if (lie == "huge" || lie == "parts") p.content = wire::Content::Grow;
      if (lie == "huge") p.total_bytes = std::int64_t{1} << 50;
      if (lie == "parts") p.total_bytes = 5000;
      seal_again(message);
    }
    send(message, MessageTags(0).message(0));
    if (lie != "parts") return;
    p.microbatch = 2;
    seal_again(message);
    send(message, MessageTags(0).second_part(wire::size_class(5000), 0));
  }

  static wire::Prologue prologue() {
    wire::Prologue p;
    p.kind = MessageKind::Gradient;
    p.step = 5;  // after the exchanges
    p.from = 1;
    p.to = 0;
    p.microbatch = 0;
    p.has_backward = 1;
    return p;
  }

  void send(const at::Tensor& message, int tag) {
    std::vector<at::Tensor> tensors{message};
    group_.backend()->send(tensors, 0, tag)->wait();
  }

  ProcessGroup group_;
  Transport transport_;
  std::vector<MessageValue> gradients_;
};

Role lie_role("lie", [] {
  auto group = make_group_from_environment({std::chrono::seconds(60)});
  if (group.rank() == 1) {
    Liar(group).tell(setting("LIE"));
    return 0;
  }
  auto model = test_model("skip", 2);
  PipelineOptions options;
  options.loss = model.loss;
  Pipeline pipeline(model.layout, make_schedule("1F1B", 2, 4), {{0, model.make_stage(0)}}, group, options);
  auto [inputs, targets] = model.batch(0);
  pipeline.step(inputs, targets);
  return 0;
});

struct Lie {
  const char* name;
  const char* said;
};

class ALiar : public testing::TestWithParam<Lie> {};

TEST_P(ALiar, IsNamedWithStageMicrobatchDirectionAndRemedy) {
  auto run = run_role("lie", 2, {{"LIE", GetParam().name}});
  EXPECT_EQ(run.result.processes[0].signal, 0) << run.errors[0];
  EXPECT_EQ(run.result.processes[0].exit_code, 1);
  EXPECT_THAT(run.errors[0], AllOf(HasSubstr("rank 0 at 0B0"), HasSubstr("from rank 1"),
                                   HasSubstr("1SEND_B0 (gradient from stage 1 for stage 0, microbatch 0) of step 5"),
                                   HasSubstr(GetParam().said), HasSubstr("try: ")));
}

INSTANTIATE_TEST_SUITE_P(Messages, ALiar,
                         testing::Values(Lie{"dtype", "value 0 is double[2, 6], agreed was float[2, 6]"},
                                         Lie{"sizes", "value 1 is float[6, 2], agreed was float[2, 6]"},
                                         Lie{"presence", "value 2 is float[2, 6], agreed was none"},
                                         Lie{"count", "2 values, agreed were 3"},                                    //
                                         Lie{"flag", "asks for a gradient that it cannot have"},                     //
                                         Lie{"bit", "damaged: its checksum does not match"},                         //
                                         Lie{"header", "a message whose header is damaged"},                         //
                                         Lie{"stranger", "not plumb's, or of another version"},                      //
                                         Lie{"quantised", "the type 12, which no message carries"},                  //
                                         Lie{"overlap", "strides overlap"},                                          //
                                         Lie{"reach", "strides leave its memory"},                                   //
                                         Lie{"length", "1048576 bytes long, the buffer is 1024"},                    //
                                         Lie{"other", "and got 1SEND_B2"},                                           //
                                         Lie{"forward", "it is of a step without a backward"},                       //
                                         Lie{"answer", "the answer to 1000 messages"},                               //
                                         Lie{"huge", "asks for a buffer of 1125899906842624 bytes"},                 //
                                         Lie{"parts", "and got 1SEND_B2 (gradient from stage 1 for stage 0, mic"}),  //
                         [](const auto& info) { return info.param.name; });

// Rank 1 sends in the second step another message than rank 0 waits for, longer than rank 0's buffer for it.
Role other_plan_role("other_plan", [] {
  auto group = make_group_from_environment({std::chrono::seconds(60)});
  const PlannedMessage small{{MessageKind::Activation, 1, 0, 0}, 1 - group.rank()};
  const PlannedMessage large{{MessageKind::Activation, 3, 2, 0}, 1 - group.rank()};
  Transport transport(group);
  MessagePlan both, one;
  if (group.rank() == 1) {
    both.sends = {small, large};
    one.sends = {large};
    transport.begin_step(both);
    transport.send(0, {{at::ones({10})}});
    transport.send(1, {{at::ones({5000})}});
    transport.end_step();
    transport.begin_step(one);
    transport.send(0, {{at::ones({5000})}});
    transport.end_step();
  } else {
    both.receives = {small, large};
    one.receives = {small};
    transport.begin_step(both);
    for (int i : {0, 1}) transport.receive(i, "the test");
    transport.end_step();
    group.set_timeout(std::chrono::seconds(2));
    transport.begin_step(one);
    transport.receive(0, "the test");
  }
  return 0;
});

TEST(Transport, AMessageLongerThanAnotherThatIsWaitedForEndsNoProcess) {
  auto run = run_role("other_plan", 2);
  EXPECT_EQ(run.result.processes[0].signal, 0);
  EXPECT_EQ(run.result.processes[0].exit_code, 1);
  EXPECT_THAT(run.errors[0], AllOf(HasSubstr("waiting for 1SEND_F0"), HasSubstr("rank 1: no answer within 2000 ms"),
                                   HasSubstr("such as eval() for step()")));
}

Role other_broadcast_role("other_broadcast", [] {
  auto group = make_group_from_environment({std::chrono::seconds(60)});
  broadcast(group, group.rank() == 0 ? at::ones({5000}) : at::ones({3}), 0);
  return 0;
});

TEST(Broadcast, OfATensorOfOtherSizesEndsNoProcess) {
  auto run = run_role("other_broadcast", 2);
  EXPECT_EQ(run.result.processes[1].signal, 0);
  EXPECT_EQ(run.result.processes[1].exit_code, 1);
  EXPECT_THAT(run.errors[1],
              HasSubstr("rank 1: the tensor that rank 0 sends to all is float[5000], here it is float[3]"));
}

}  // namespace
}  // namespace plumb
