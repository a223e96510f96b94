// Precompiled for tests and examples, which use all of torch's C++ front end; tests also the test library.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>
#if __has_include(<gmock/gmock.h>)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#endif
