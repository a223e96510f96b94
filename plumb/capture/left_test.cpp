// Tensors that a forward leaves in members of a C++ module.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using at::Tensor;
using testing::ElementsAre;
using testing::HasSubstr;

struct Layer : torch::nn::Module {
  explicit Layer(int64_t width) : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  torch::nn::Linear linear;
  Tensor member;
};

TEST(TensorsLeftInMembers, AreStateThatIsRefusedIfTheNextCallReadsThem) {
  struct Recurrent : Layer {
    explicit Recurrent(bool detached) : Layer(4), detached(detached) { member = torch::zeros({3, 4}); }
    Tensor forward(Tensor x) {
      member = torch::tanh(linear(x) + member);
      if (detached) member = member.detach();
      return linear(x) * member;
    }
    bool detached;
  };
  for (const bool detached : {false, true}) {
    auto model = std::make_shared<Recurrent>(detached);
    const std::string message = message_of([&] { capture(model, torch::randn({3, 4})); });
    EXPECT_THAT(message, HasSubstr("the forward leaves a tensor, f32[3, 4]"));
    EXPECT_THAT(message, HasSubstr("register it as a buffer"));
  }
}

TEST(TensorsLeftInMembers, AreNotedIfNoCallReadsThem) {
  struct WithLoss : Layer {
    WithLoss() : Layer(4) {}
    Tensor forward(Tensor x) {
      x = linear(x);
      member = x.pow(2).mean();
      return x;
    }
  };
  auto model = std::make_shared<WithLoss>();
  const Tensor x = torch::randn({3, 4});
  std::vector<std::string> notes;
  CaptureOptions options;
  options.notes = &notes;
  auto graph = capture(options, model, x);
  EXPECT_THAT(notes, ElementsAre(HasSubstr("leaves a tensor, f32[], outside of its outputs")));
  EXPECT_TRUE(at::equal((*graph)(x), model->linear(x)));
}

TEST(TensorsLeftInMembers, ThatAreMadeOnceHaveTheirValuesAlthoughCapturesLeaveProductsOut) {
  struct Merged : Layer {
    explicit Merged(bool asks) : Layer(200), asks(asks) {}
    Tensor forward(Tensor x) {
      if (!member.defined()) {
        const torch::NoGradGuard no_grad;
        member = linear->weight.mm(linear->weight);
      }
      Tensor y = x.mm(member);
      if (asks) EXPECT_TRUE(at::equal(y, y.clone()));  // asks for values, so that the capture begins again
      return y;
    }
    bool asks;
  };
  for (const bool asks : {false, true}) {
    auto model = std::make_shared<Merged>(asks);
    const Tensor x = torch::randn({200, 200});
    auto graph = capture(model, x);
    EXPECT_TRUE(at::equal(model->member, model->linear->weight.mm(model->linear->weight)));
    EXPECT_TRUE(at::equal((*graph)(x), model->forward(x)));
  }
}

}  // namespace
}  // namespace plumb
