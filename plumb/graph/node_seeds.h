// Random numbers of a graph's nodes that do not depend on where the graph was cut.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace plumb {

// While it lives, plans that run on this thread seed these generators anew for every random node, from `seed` and
// the node's name. Names stay when a graph is cut, so a node draws the same numbers in the whole and in any stage. The
// generators' states are afterwards those of the last node.
class NodeSeeds {
 public:
  NodeSeeds(std::uint64_t seed, std::vector<at::Generator> generators);
  ~NodeSeeds();
  NodeSeeds(const NodeSeeds&) = delete;
  NodeSeeds& operator=(const NodeSeeds&) = delete;

 private:
  friend void seed_node(std::uint64_t node);
  std::uint64_t seed_;
  std::vector<at::Generator> generators_;
  NodeSeeds* before_;
};

std::uint64_t seed_of_name(std::string_view name);
// Where a NodeSeeds lives on this thread: seeds its generators for the node of this seed_of_name().
void seed_node(std::uint64_t node);
// Whether a NodeSeeds lives on this thread.
bool nodes_are_seeded();

}  // namespace plumb
