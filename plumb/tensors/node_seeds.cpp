#include "plumb/tensors/node_seeds.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/split.h>

#include <algorithm>
#include <utility>

#include "plumb/core/mix_bits.h"
#include "plumb/tensors/run_rows.h"

namespace plumb {
namespace {

thread_local NodeSeeds* seeds_of_run = nullptr;
thread_local std::optional<RunRows> rows_of_run;

}  // namespace

NodeSeeds::NodeSeeds(std::uint64_t seed, std::vector<at::Generator> generators)
    : seed_(seed), generators_(std::move(generators)), before_(std::exchange(seeds_of_run, this)) {}
NodeSeeds::~NodeSeeds() { seeds_of_run = before_; }

RunningRows::RunningRows(const RunRows& rows) : before_(std::exchange(rows_of_run, rows)) {}
RunningRows::~RunningRows() { rows_of_run = before_; }

std::optional<RunRows> running_rows() { return rows_of_run; }

std::uint64_t seed_of_name(std::string_view name) {
  std::uint64_t seed = 1;
  for (const char c : name) seed = mix_seeds(seed, static_cast<unsigned char>(c));
  return seed;
}

void seed_node(std::uint64_t node, std::int64_t row) {
  if (!seeds_of_run) return;
  const std::int64_t number = (rows_of_run ? rows_of_run->first : 0) + row;
  const std::uint64_t of_row = mix_seeds(seeds_of_run->seed_, static_cast<std::uint64_t>(number));
  for (const at::Generator& generator : seeds_of_run->generators_)
    set_generator_seed(generator, mix_seeds(of_row, node));
}

bool run_by_rows(std::uint64_t node, const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  const std::int64_t rows = seeds_of_run && rows_of_run ? rows_of_run->count : 0;
  if (rows < 2 || stack.empty() || !stack[0].isTensor() || !stack[0].toTensor().defined()) return false;
  const at::Tensor& first = stack[0].toTensor();
  if (first.dim() == 0 || first.size(0) == 0 || first.size(0) % rows != 0) return false;
  // Others are cut as well if they have the same rows; what is broadcast over rows is of each.
  std::vector<std::vector<at::Tensor>> parts(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) {
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    const at::Tensor& t = stack[i].toTensor();
    if (t.dim() == first.dim() && t.size(0) == first.size(0)) parts[i] = at::split(t, first.size(0) / rows);
  }
  // The result of one tensor lies in memory as that does.
  const auto tensors = std::count_if(stack.begin(), stack.end(), [](const c10::IValue& v) { return v.isTensor(); });
  if (tensors == 1 && !first.is_contiguous()) return false;
  // Attention of two dimensions goes over the first one.
  if (tensors > 1 && first.dim() < 3) return false;
  std::vector<std::vector<at::Tensor>> results;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::vector<c10::IValue> given = stack;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].empty()) given[i] = parts[i][static_cast<size_t>(row)];
    }
    seed_node(node, row);
    op.callBoxed(given);
    results.resize(given.size());
    for (size_t k = 0; k < given.size(); ++k) {
      const bool fits = given[k].isTensor() && given[k].toTensor().defined() && given[k].toTensor().dim() > 0 &&
                        given[k].toTensor().size(0) == first.size(0) / rows && given[k].toTensor().is_contiguous();
      if (!fits) return false;
      results[k].push_back(given[k].toTensor());
    }
  }
  stack.clear();
  for (const auto& of_rows : results) stack.emplace_back(at::cat(of_rows));
  return true;
}

bool nodes_are_seeded() { return seeds_of_run != nullptr; }

std::unique_lock<std::recursive_mutex> lock_seeded_draws() {
  static auto& draws = *new std::recursive_mutex;  // an opaque function may run a graph; outlives threads
  return std::unique_lock(draws);
}

at::Tensor generator_state(at::Generator generator) {
  const auto draws = lock_seeded_draws();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(at::Generator generator, const at::Tensor& state) {
  const auto draws = lock_seeded_draws();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

void set_generator_seed(at::Generator generator, std::uint64_t seed) {
  const auto draws = lock_seeded_draws();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

void seed_all_generators(std::uint64_t seed) {
  const auto draws = lock_seeded_draws();
  at::manual_seed(seed);
}

}  // namespace plumb
