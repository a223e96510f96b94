// Connections of a group: Gloo's backend, its needs of the system, and its errors.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    const std::string& master_address, const GlooOptions& options);

// Returns a text as c10d's stores take it.
inline std::vector<std::uint8_t> as_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// Returns Gloo's own words, without the place in its source and its advice:
// "Read error [127.0.0.1]:61108: Connection reset by peer".
std::string what_gloo_says(const std::exception& error);

// Does `work`. What it throws becomes Error(Communication): `what`, and Gloo's own words.
template <class Work>
std::invoke_result_t<Work> connecting(const std::string& what, const std::string& remedy, Work work) {
  try {
    return work();
  } catch (const std::exception& e) {
    throw Error(ErrorKind::Communication, str(what, ": ", what_gloo_says(e)), "", remedy);
  }
}

// Descriptors of a group beside one for each connection to a rank: the store, listening sockets, Gloo's loop.
inline constexpr int kDescriptorsBeside = 8;
// Throws Error(ExecutionFailed) that begins with `who` if this process may not open `count` more files: without them,
// Gloo's threads end the process.
void require_descriptors(const std::string& who, int count);

}  // namespace plumb
