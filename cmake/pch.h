// Precompiled for every room that uses torch: brings a file's compile from a minute to seconds. Narrow on purpose:
// every template that a precompiled header leaves pending is instantiated again in every file (torch/torch.h costs
// each 6.8 s, this 3.5 s).
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>
