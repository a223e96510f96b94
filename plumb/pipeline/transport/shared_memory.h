// Memory that other processes of the host hold, too: it stays when the process that made it is gone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

namespace plumb {

// Bytes without a name in any file system: they are free with the last process that holds them, however it ends.
// The maker may let it grow while others hold it, and nobody can make it smaller under them.
class SharedMemory {
 public:
  // Its address for others: a process and one of its file descriptors.
  struct Address {
    std::int64_t process = 0, descriptor = -1;
  };

  // Makes an empty memory. Throws Error(ExecutionFailed) if the system gives none.
  SharedMemory();
  // Opens the memory of another process, to read it. Throws Error(Communication) if the process is gone or names
  // something else.
  explicit SharedMemory(const Address& address);

  Address address() const;
  // For its maker: grows to at least `bytes`, keeps the contents, and returns their address. Throws Error(CannotWrite)
  // without room: another process in this one's place would have none, either.
  char* grow(std::int64_t bytes);
  // For its maker: has room for `bytes` from here on and returns their address; each part is taken before it is used.
  // Both throw as grow() does.
  char* reserve(std::int64_t bytes);
  void take(std::int64_t begin, std::int64_t bytes);
  // Returns its bytes by now. Throws Error(Communication) if the system does not say.
  std::int64_t size() const;
  // Returns all that it has by now, or a part that begins at a page, as a tensor of bytes to read, which holds them by
  // itself. The part must be within size(). Throws Error(ExecutionFailed) if it cannot be mapped.
  at::Tensor bytes() const { return bytes(0, size()); }
  at::Tensor bytes(std::int64_t begin, std::int64_t size) const;

 private:
  char* map(std::int64_t bytes);
  struct Held;
  std::shared_ptr<Held> held_;
};

}  // namespace plumb
