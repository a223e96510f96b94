// Memory of a host's ranks that outlives them all, for launchers that start every process anew: torchrun's agent ends
// all ranks of its host when any rank, or any host, is lost or comes.
//
// The first rank that needs it starts the keeper: a process without a group of its launcher's, which holds the memory
// by descriptors, maps none of it, and ends with the launcher (its parent then), however that ends. Ranks of the same
// launcher find it by a socket whose name is no file. It serves processes of its own user only.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "plumb/pipeline/launch/descriptor.h"
#include "plumb/pipeline/transport/shared_memory.h"

namespace plumb {

class Keeper {
 public:
  // Connects to the keeper of the launcher `launcher`, a parent of this process, and starts it if there is none. Call
  // it while the process is small: it forks. Throws Error(ExecutionFailed) if the system does not allow it.
  explicit Keeper(pid_t launcher);
  Keeper(const Keeper&) = delete;

  // Returns all memory that it has by now. Throws Error(ExecutionFailed) if the keeper is gone.
  std::vector<SharedMemory> memory();
  // Holds this memory from here on.
  void keep(const SharedMemory& memory);
  // Lets go of what the last memory() returned.
  void drop_old();

 private:
  std::vector<std::int64_t> ask(const std::vector<std::int64_t>& request);

  Descriptor socket_;
  std::vector<std::int64_t> old_;  // descriptors of the keeper's
};

}  // namespace plumb
