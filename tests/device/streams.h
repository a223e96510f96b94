// The test device's streams: two for each device. A stream runs its tasks in order. A task given to an idle stream is
// done at once by the caller, else in a thread of the stream's own, later: so a host may run ahead of the device, as
// with a GPU.
//
// Transfers between processes use memory that nothing else may use meanwhile. An access without having waited is an
// error; freeing the memory ends the process.
#pragma once

#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <future>
#include <string>

namespace plumb_test {

using Task = std::function<void()>;

// This thread's stream of a device.
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);

// A task that throws ends the process. Tensors that it holds are held until it is done.
void enqueue(c10::Stream stream, Task task);
bool is_idle(c10::Stream stream);
// Waits until the stream has nothing to do.
void drain(c10::Stream stream);
// Ready when what the stream was given by now is done.
std::shared_future<void> marker(c10::Stream stream);

// Memory of a transfer, from when it is posted until it ends. A receive writes it from then on, a send reads it from
// begin() on.
class InTransfer {
 public:
  InTransfer(const void* at, size_t bytes, bool receives);
  ~InTransfer();
  InTransfer(const InTransfer&) = delete;
  InTransfer& operator=(const InTransfer&) = delete;
  void begin();

 private:
  const void* at_;
};
// Throws where a transfer uses the memory.
void check_access(const void* at, size_t bytes, bool writes);
// Ends the process where a transfer uses the memory.
void check_release(const void* at, size_t bytes);

// Notes an activity of the device, in seconds of the machine's steady clock.
void note_activity(const std::string& what, double begin, double end);
double clock_now();
// "WHAT BEGIN END", a line each.
std::string activities();

}  // namespace plumb_test
