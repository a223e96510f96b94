// Held by pointer only. c10d's work objects own an unbound buffer, so its destructor must be known to be virtual.
#pragma once

namespace gloo::transport {

class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();  // in libtorch_cpu
};

}  // namespace gloo::transport
