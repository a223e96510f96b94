// The names of Gloo that c10d's Gloo header mentions. torch's wheel has Gloo inside, but leaves its headers out.
//
// If a file that includes this one does not compile, or the test GlooInterface fails, torch changed, look here: it was
// built with another version of Gloo. Compare with the Gloo of that torch (third_party/gloo). What is only held by
// pointer needs a name; of Store the order of the methods is the order in Gloo's binary interface; Context::setTimeout
// and ~UnboundBuffer are in libtorch_cpu.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#define GLOO_STORE_HAS_STORE_V2

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

// c10d's work objects own one, so its destructor must be known to be virtual.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer();
};

}  // namespace transport

namespace rendezvous {

// c10d wraps its own store in one.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& data) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
  virtual bool has_v2_support() = 0;
  virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string>& keys) = 0;
  virtual void multi_set(const std::vector<std::string>& keys, const std::vector<std::vector<char>>& values) = 0;
  virtual void append(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::int64_t add(const std::string& key, std::int64_t value) = 0;
};

}  // namespace rendezvous
}  // namespace gloo
