#include "plumb/autograd/node_names.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

template <class Self>
struct Doubled : torch::autograd::Function<Self> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0] * 2};
  }
};

namespace {
struct UsersFunction : Doubled<UsersFunction> {};
}  // namespace

namespace plumb {
namespace {

struct PlumbsFunction : Doubled<PlumbsFunction> {};

constexpr const char* kLookHere = "torch changed: look at plumb/autograd/node_names.h";

const torch::autograd::Node& node_of(const at::Tensor& x) { return *x.grad_fn(); }

TEST(NodeNames, TellGeneratedNodesGroupNormsAndWritesIntoViewsApart) {
  const at::Tensor x = at::rand({2, 4, 3}).requires_grad_();
  const at::Tensor sum = x + 1;
  EXPECT_TRUE(node_names::is_generated(node_of(sum))) << kLookHere;
  EXPECT_TRUE(node_names::is_generated(node_of(x.view({8, 3})))) << kLookHere;
  EXPECT_FALSE(node_names::is_group_norm(node_of(sum)));
  EXPECT_FALSE(node_names::needs_whole_backward(node_of(sum)));
  EXPECT_TRUE(node_names::is_group_norm(node_of(at::group_norm(x, 2)))) << kLookHere;
  const at::Tensor written = x * 1;
  written.select(0, 0).mul_(2);
  EXPECT_TRUE(node_names::needs_whole_backward(node_of(written))) << kLookHere;
}

TEST(NodeNames, TellPlumbsFunctionsFromAUsers) {
  const at::Tensor x = at::rand({4}).requires_grad_();
  const at::Tensor users = UsersFunction::apply(x), plumbs = PlumbsFunction::apply(x);
  EXPECT_TRUE(node_names::is_cpp_function(node_of(users))) << kLookHere;
  EXPECT_FALSE(node_names::is_cpp_function_of_plumb(node_of(users))) << kLookHere;
  EXPECT_TRUE(node_names::is_cpp_function_of_plumb(node_of(plumbs))) << kLookHere;
  EXPECT_FALSE(node_names::is_generated(node_of(users)));
}

}  // namespace
}  // namespace plumb
