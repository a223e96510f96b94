// c10d's Gloo header calls one method of Gloo's context, through a pointer; the object is made inside torch.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);  // in libtorch_cpu
};

}  // namespace gloo
