// A user's program against an installed plumb: capture a module, run the graph, compare bit for bit.
#include <plumb/capture/capture.h>
#include <plumb/exported/exported.h>
#include <plumb/transforms/scale/unit_scale.h>
#include <torch/torch.h>

#include <cstdio>

struct NetImpl : torch::nn::Module {
  NetImpl() : up(8, 16), down(16, 4) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Net);

int main() {
  torch::manual_seed(0);
  Net net;
  const auto x = torch::randn({3, 8});
  auto graph = plumb::capture(net, x);

  const auto eager = net->forward(x);
  eager.sum().backward();
  const auto gradient = net->up->weight.grad().clone();
  net->zero_grad();
  const auto ours = (*graph)(x);
  ours.sum().backward();

  const bool same = at::equal(eager, ours) && at::equal(gradient, net->up->weight.grad());
  std::printf("%s\n", same ? "consumer: equal bit for bit" : "consumer: DIFFERENT");
  return same ? 0 : 1;
}
