// The program of docs/tutorials/cpp.md.
#include <torch/torch.h>

#include <iomanip>
#include <iostream>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/exported/exported.h"
#include "plumb/graph/pass.h"
#include "plumb/scaling/optim.h"
#include "plumb/transforms/formats/simulate_format.h"
#include "plumb/transforms/scale/unit_scale.h"

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width)
      : norm(torch::nn::LayerNormOptions({width})), up(width, 4 * width), down(4 * width, width) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(at::Tensor x) { return x + down(torch::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

at::Tensor batch(int64_t step) {
  torch::manual_seed(step);
  return torch::randn({64, 16});
}

int main() {
  torch::manual_seed(0);
  Block block(16);

  // 1. Capture.
  auto graph = plumb::capture(block, batch(0));
  std::cout << to_string(graph->graph(), {.locations = false});

  // 2. A pass by its name: the two operators of C++'s linear become one again.
  plumb::run_pass(plumb::find_pass("fuse_patterns"), *graph);
  for (const plumb::Node* node : graph->graph().nodes()) {
    if (node->is_call()) std::cout << node->describe() << "\n";
  }
  std::cout << "the same bits: " << std::boolalpha << at::equal((*graph)(batch(1)), block(batch(1))) << "\n";

  // 3. Unit-scaled FP8.
  auto fp8 = plumb::simulate_fp8(plumb::unit_scale(graph), {.fwd = "e4m3fn-RN", .bwd = "e5m2-RN"});
  std::cout << fp8->reports[0].to_text();

  // 4. Train: the magnitude of each input.
  plumb::optim::AdamW optimizer(fp8->parameters(), torch::optim::AdamWOptions(0.05));
  float first = 0, last = 0;
  for (int64_t step = 0; step < 100; ++step) {
    const at::Tensor x = batch(step);
    optimizer.zero_grad();
    at::Tensor loss = ((*fp8)(x)-x.abs()).pow(2).mean();
    loss.backward();
    optimizer.step();
    last = loss.item<float>();
    if (step == 0) first = last;
  }
  std::cout << "the loss fell: " << (last < first) << "\n";

  // 5. A file that C++, the command and torch.export.load open.
  plumb::save_pt2(*fp8, "fp8.pt2");
  auto again = plumb::load_pt2("fp8.pt2");
  std::cout << "parameters in the file: " << again.module->parameters().size() << "\n";

  // 6. Errors say what is wrong, where, and what to do.
  try {
    (*graph)(torch::randn({8, 16}));
  } catch (const plumb::Error& error) {
    std::cout << error.what() << "\n";
  }
}
