// Graphs for the tests of this room.
#pragma once

#include <random>

#include "tests/gpt_graph.h"

namespace plumb::testing_models {

// A program of adds, products, softmaxes, chunks and shapes, whose operands are mostly among the last `reach` values.
inline Graph random_graph(std::mt19937& random, int nodes, int reach) {
  Graph graph;
  std::vector<Value*> values;
  for (int i = 0; i < 2; ++i) values.push_back(graph.placeholder("x")->result());
  auto pick = [&] {
    const int n = static_cast<int>(values.size());
    const int back = random() % 4 == 0 ? n : std::min(n, reach);
    return values[static_cast<size_t>(n - 1 - static_cast<int>(random() % static_cast<unsigned>(back)))];
  };
  for (int i = 0; i < nodes; ++i) {
    switch (random() % 9) {
      case 0: values.push_back(graph.call("aten::softmax.int", {pick(), -1})->result()); break;
      case 1: {
        Node* chunk = graph.call("aten::chunk", {pick(), 2, -1}, {2});
        values.push_back(chunk->result(0));
        values.push_back(chunk->result(1));
        break;
      }
      case 2: values.push_back(graph.call("aten::mul.Tensor", {pick(), pick()})->result()); break;
      case 3: values.push_back(graph.call("aten::zeros_like", {pick()})->result()); break;
      case 4: values.push_back(graph.get_attr("w" + std::to_string(i))->result()); break;
      case 5: values.push_back(graph.call("aten::relu", {pick()})->result()); break;
      default: values.push_back(graph.call("aten::add.Tensor", {pick(), pick()})->result());
    }
  }
  graph.output({values.back()});
  return graph;
}

}  // namespace plumb::testing_models
