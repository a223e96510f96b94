#include "plumb/autograd/nested_backward.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "plumb/core/error.h"

namespace plumb {
namespace {

TEST(NestedBackward, TakesOutputsAsAModelReturnsThem) {
  const at::Tensor x = at::ones({3}).requires_grad_(), w = at::full({3}, 2.0).requires_grad_();
  auto outputs = [&] {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    dict.insert("y", x * w);
    dict.insert("more", c10::ivalue::Tuple::create({c10::IValue(x * x), c10::IValue(7)}));
    return dict;
  };
  c10::impl::GenericDict grads(c10::StringType::get(), c10::AnyType::get());
  grads.insert("y", at::full({3}, 10.0));
  grads.insert("more", c10::ivalue::Tuple::create({c10::IValue(at::ones({3})), c10::IValue()}));
  const Tensors back = stage_backward_nested(outputs(), grads, {x});
  EXPECT_TRUE(at::equal(back[0], at::full({3}, 22.0)));
  EXPECT_TRUE(at::equal(w.grad(), at::full({3}, 10.0)));
  EXPECT_THROW(stage_backward_nested(outputs(), c10::IValue(at::ones({3})), {x}), Error);
}

TEST(NestedBackward, WithoutGradientsStartsFromOnes) {
  const at::Tensor x = at::ones({}).requires_grad_();
  EXPECT_EQ(
      stage_backward_nested(c10::ivalue::Tuple::create({c10::IValue(x * 3)}), c10::IValue(), {x})[0].item<float>(), 3);
}

}  // namespace
}  // namespace plumb
