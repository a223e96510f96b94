#include "plumb/capture/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/message_of.h"

namespace plumb {
namespace {

using testing::HasSubstr;

struct WithBuffer : torch::nn::Module {
  explicit WithBuffer(std::function<at::Tensor(WithBuffer&, at::Tensor)> forward) : forward_(std::move(forward)) {
    register_buffer("count", torch::ones({}));
    state = &register_buffer("state", torch::ones({2}));
  }
  at::Tensor forward(at::Tensor x) { return forward_(*this, x); }
  at::Tensor* state;
  std::function<at::Tensor(WithBuffer&, at::Tensor)> forward_;
};

std::string refusal_of(std::function<at::Tensor(WithBuffer&, at::Tensor)> forward) {
  WithBuffer module(std::move(forward));
  return message_of([&] { capture(module, torch::ones({2})); });
}

TEST(Session, RefusesABufferReassignedWithAnotherShape) {
  EXPECT_THAT(refusal_of([](WithBuffer& m, at::Tensor x) {
                *m.state = torch::ones({3});
                return x * 2;
              }),
              HasSubstr("buffer 'state' is re-assigned in the forward with another shape or dtype"));
}

TEST(Session, RefusesABufferWhoseValueIsTakenAndThatIsWritten) {
  EXPECT_THAT(refusal_of([](WithBuffer& m, at::Tensor x) {
                at::Tensor count = m.named_buffers(false)["count"];
                const float factor = count.item<float>();
                count.add_(1);
                return x * factor;
              }),
              HasSubstr("the value of buffer 'count' is taken into the program, and the forward writes the buffer"));
}

TEST(Session, RefusesRawStorage) {
  EXPECT_THAT(refusal_of([](WithBuffer&, at::Tensor x) {
                at::Tensor y = torch::empty({2});
                y.set_(x.detach().storage());
                return y + x;
              }),
              HasSubstr("raw storage"));
}

TEST(Session, TakesABufferThatIsWrittenAndPutsItBack) {
  WithBuffer module([](WithBuffer& m, at::Tensor x) {
    at::Tensor count = m.named_buffers(false)["count"];
    count.add_(1);
    return x * count;
  });
  const auto graph = capture(module, torch::ones({2}));
  EXPECT_EQ(module.named_buffers()["count"].item<float>(), 1);
  EXPECT_TRUE(at::equal(graph->run({torch::ones({2})})[0].toTensor(), torch::full({2}, 2.0)));
  EXPECT_EQ(module.named_buffers()["count"].item<float>(), 2);
}

TEST(Session, PutsBackABufferThatTheForwardReplaces) {
  WithBuffer module([](WithBuffer& m, at::Tensor x) {
    *m.state = *m.state * 3;
    return x * *m.state;
  });
  const at::Tensor state = *module.state;
  for (const bool verify : {false, true}) {
    CaptureOptions options;
    options.verify = verify;
    const auto graph = capture(options, module, torch::ones({2}));
    EXPECT_TRUE(module.state->is_same(state));
    EXPECT_TRUE(graph->state().get("state").tensor.is_same(state));
    state.fill_(1);
    EXPECT_TRUE(at::equal(graph->run({torch::ones({2})})[0].toTensor(), torch::full({2}, 3.0)));
    EXPECT_TRUE(at::equal(*module.state, torch::full({2}, 3.0)));
    state.fill_(1);
  }
}

TEST(Session, AVerificationWhoseBackwardFailsPutsTheModelBack) {
  WithBuffer module([](WithBuffer& m, at::Tensor x) {
    at::Tensor count = m.named_buffers(false)["count"];
    const at::Tensor y = x * count;
    count.add_(1);  // the backward of the product would find another value
    return y;
  });
  CaptureOptions options;
  options.verify = true;
  EXPECT_THAT(message_of([&] { capture(options, module, torch::ones({2})); }),
              HasSubstr("verify: the backward fails: one of the variables"));
  EXPECT_EQ(module.named_buffers()["count"].item<float>(), 1);
}

TEST(Session, IsOfOneThreadAndNoneAfterwards) {
  EXPECT_FALSE(is_capturing());
  bool inside = false;
  WithBuffer module([&](WithBuffer&, at::Tensor x) {
    inside = is_capturing();
    return x;
  });
  capture(module, torch::ones({2}));
  EXPECT_TRUE(inside);
  EXPECT_FALSE(is_capturing());
}

}  // namespace
}  // namespace plumb
