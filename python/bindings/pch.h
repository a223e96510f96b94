// Precompiled for the bindings: torch's extension header (pybind11 with tensor casters).
#pragma once
#include <torch/extension.h>
#include <nlohmann/json.hpp>
