#include "plumb/graph/node_seeds.h"

#include <mutex>
#include <utility>

#include "plumb/core/mix_bits.h"

namespace plumb {
namespace {

thread_local NodeSeeds* seeds_of_run = nullptr;

}  // namespace

NodeSeeds::NodeSeeds(std::uint64_t seed, std::vector<at::Generator> generators)
    : seed_(seed), generators_(std::move(generators)), before_(std::exchange(seeds_of_run, this)) {}
NodeSeeds::~NodeSeeds() { seeds_of_run = before_; }

std::uint64_t seed_of_name(std::string_view name) {
  std::uint64_t seed = 1;
  for (const char c : name) seed = mix_seeds(seed, static_cast<unsigned char>(c));
  return seed;
}

void seed_node(std::uint64_t node) {
  if (!seeds_of_run) return;
  for (at::Generator& generator : seeds_of_run->generators_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(mix_seeds(seeds_of_run->seed_, node));
  }
}

bool nodes_are_seeded() { return seeds_of_run != nullptr; }

}  // namespace plumb
