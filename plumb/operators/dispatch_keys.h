// The two dispatch keys that plumb borrows from torch, which keeps them for its tests.
//
// If this file does not compile, or a test of DispatchKeys fails, torch changed, look here: it has renamed the keys,
// uses them itself or ranks them anew. plumb needs two keys that no operator of torch has kernels for, above autograd,
// autocast and composite operators, so that calls are seen as they were written.
#pragma once

#include <c10/core/DispatchKey.h>

// For TORCH_LIBRARY_IMPL, which takes a bare name.
#define PLUMB_CAPTURE_KEY TESTING_ONLY_GenericMode
#define PLUMB_RECOMPUTE_KEY TESTING_ONLY_GenericWrapper

namespace plumb {

// Included while a capture records the calls of its thread.
inline constexpr auto kCaptureKey = c10::DispatchKey::PLUMB_CAPTURE_KEY;
// Included while a stage's forward is watched, and while a graph runs that rounds values. Only the operators of
// recompute_facts() have kernels for it.
inline constexpr auto kRecomputeKey = c10::DispatchKey::PLUMB_RECOMPUTE_KEY;

static_assert(kCaptureKey > kRecomputeKey && kRecomputeKey > c10::DispatchKey::AutocastCPU &&
                  c10::DispatchKey::AutocastCPU > c10::DispatchKey::AutogradFunctionality,
              "torch changed, look here: captures see calls first, then recomputation, then autocast and autograd");

}  // namespace plumb
