// Whether a training's numbers come from one kind of CPU (plumb/numerics/cpu_kind.h, docs/determinism.md).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

// Returns "" if all ranks compute on one kind of machine, else a sentence that names the first rank on another one.
// Every rank calls it. Throws Error(Communication) if a peer is lost.
std::string other_machines(const ProcessGroup& world);

// Returns a checkpoint's record of the machine and the threads that wrote it.
nlohmann::json machine_state(int threads);
// Returns "" if `state` says this machine and this number of threads, or says nothing; else a sentence.
std::string machine_changed(const nlohmann::json& state, int threads);

}  // namespace plumb
