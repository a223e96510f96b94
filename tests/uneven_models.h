// Costs of four uneven models, for searches over cuts and schedules.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "plumb/schedule/joint.h"

namespace plumb {

inline constexpr const char* uneven_models[] = {"head", "encoder-decoder", "experts", "unet"};

struct Layer {
  double forward, input, weight, activation, resident;
  int skip_to = -1;  // a later layer that needs this one's result
  double message = 1;
};

inline Layer layer(double work = 1, double activation = 1, double resident = 1) {
  return {work, work, work, activation, resident};
}

// Four uneven models of `count` layers: a vocabulary head of four layers, an encoder and a decoder, experts, a U-Net.
inline std::vector<Layer> uneven(const std::string& name, int count) {
  std::vector<Layer> layers;
  const Layer embedding{.1, 0, .2, .1, 4}, head{4, 4, 4, 1.5, 4};
  for (int i = 0; i < count; ++i) {
    const int half = count / 2;
    if (name == "unet") {
      const double depth = std::min(i, count - 1 - i) / (count / 2.0), work = 3 * std::pow(1 - depth, 1.5) + .5;
      const double size = 3 * (1 - depth) * (1 - depth);
      const bool skips = i < half - 2 && i % 4 == 0;
      layers.push_back({work, work, work, 2 * size + .3, .2 + 3 * depth, skips ? count - 1 - i : -1, .3 + size});
    } else if (name == "encoder-decoder") {
      layers.push_back(i < half ? layer(.6, .6, .7) : layer(1.6, 1.4, 1.4));
    } else if (i == 0 || i == count - 1) {
      layers.push_back(i == 0 ? embedding : head);
    } else {
      const bool expert = name == "experts" && i % 4 == 3;
      layers.push_back(expert ? layer(2.2, 2.2, 4) : name == "experts" && i % 4 < 2 ? layer(.7, .6, .7) : layer());
    }
  }
  return layers;
}

inline PieceCosts pieces_of(const std::vector<Layer>& layers, double link = 0.05) {
  PieceCosts pieces;
  PieceCosts::Way way{.recompute = "cheap"};
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& l = layers[i];
    way.forward.push_back(l.forward);
    way.input.push_back(l.input);
    way.weight.push_back(l.weight);
    way.full.push_back(l.input + l.weight);
    way.activation.push_back(l.activation);
    pieces.resident.push_back(l.resident);
    const int at = static_cast<int>(i);
    if (i + 1 < layers.size()) pieces.values.push_back({at, std::max(at + 1, l.skip_to), l.message * link});
  }
  pieces.ways = {way};
  return pieces;
}

}  // namespace plumb
