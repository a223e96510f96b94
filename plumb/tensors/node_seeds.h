// Random numbers of a graph's nodes that do not depend on where the graph was cut.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

namespace plumb {

// While it lives, plans that run on this thread seed these generators anew for every random node, from `seed`, the
// first of the running rows (run_rows.h) and the node's name. Names stay when a graph is cut, so a node draws the same
// numbers in the whole and in any stage. The generators' states are afterwards those of the last node. Threads with
// seeds of their own draw what each draws alone.
//
// Dropout draws row by row where the number of running rows is known, so that its masks do not depend on how the batch
// is cut into microbatches (run_by_rows()).
class NodeSeeds {
 public:
  NodeSeeds(std::uint64_t seed, std::vector<at::Generator> generators);
  ~NodeSeeds();
  NodeSeeds(const NodeSeeds&) = delete;
  NodeSeeds& operator=(const NodeSeeds&) = delete;

 private:
  friend void seed_node(std::uint64_t node, std::int64_t row);
  std::uint64_t seed_;
  std::vector<at::Generator> generators_;
  NodeSeeds* before_;
};

std::uint64_t seed_of_name(std::string_view name);
// Seeds the generators of this thread's NodeSeeds, if there is one, for the node of this seed_of_name() and for this
// row of the running ones.
void seed_node(std::uint64_t node, std::int64_t row = 0);
// Calls the operator of a random node row by row and puts the results together: dropout in its many forms, and
// attention with dropout. The rows are the first dimension of its first argument; if that is a multiple of them ([rows
// * heads, ...]), each row is that many entries. Returns false, and leaves the stack alone, if
// - there is one row or their number is unknown,
// - that dimension is no multiple of it,
// - a row's result does not lie in memory as a part of the whole result would.
bool run_by_rows(std::uint64_t node, const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);
// Returns whether a NodeSeeds lives on this thread.
bool nodes_are_seeded();

// Keeps seeded nodes of other threads from drawing while it is held. The generators are those of the process: a node is
// seeded and draws under one lock. Threads that draw without a NodeSeeds are not kept from it.
std::unique_lock<std::recursive_mutex> lock_seeded_draws();
// Each function takes that lock and the generators' own.
at::Tensor generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const at::Tensor& state);
void set_generator_seed(at::Generator generator, std::uint64_t seed);
void seed_all_generators(std::uint64_t seed);  // as at::manual_seed

}  // namespace plumb
