// The C++ quickstart of README.md.
#include <iostream>

#include "plumb/plumb.h"

struct NetImpl : torch::nn::Module {
  NetImpl() : up(16, 64), down(64, 4) {
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
  at::Tensor x = torch::randn({32, 16});

  auto graph = plumb::capture(net, x);  // bit for bit what net computes, gradients too
  std::cout << to_string(graph->graph(), {.locations = false});

  auto fp8 = plumb::track_scales(plumb::simulate_fp8(plumb::unit_scale(graph)));
  plumb::optim::AdamW optimizer(fp8->parameters(), torch::optim::AdamWOptions(0.1));
  at::Tensor loss;
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    at::Tensor y = (*fp8)(x);
    loss = (y - x.slice(1, 0, 4)).pow(2).mean();
    loss.backward();
    optimizer.step();
  }
  std::cout << fp8->reports[0].to_text();            // what unit_scale replaced, and what it left alone
  std::cout << plumb::scales_graph(*fp8).to_text();  // the scale of every tensor and gradient
  plumb::save_pt2(*graph, "net.pt2");                // torch.export.load opens it in Python
  auto again = plumb::load_pt2("net.pt2");
  return at::equal((*again.module)(x), net(x)) && loss.item<float>() < 1.0f ? 0 : 1;
}
