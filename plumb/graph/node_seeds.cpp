#include "plumb/graph/node_seeds.h"

#include <mutex>
#include <utility>

namespace plumb {
namespace {

thread_local NodeSeeds* seeds_of_run = nullptr;

}  // namespace

NodeSeeds::NodeSeeds(std::uint64_t seed, std::vector<at::Generator> generators)
    : seed_(seed), generators_(std::move(generators)), before_(std::exchange(seeds_of_run, this)) {}
NodeSeeds::~NodeSeeds() { seeds_of_run = before_; }

std::uint64_t mix_seeds(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a * 0x9E3779B97F4A7C15u + b + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

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
