// Joint plans of four uneven models beside the best named schedule and beside Interleaved1F1B, all in the memory that
// Interleaved1F1B takes on its balanced cut. Steps are simulated; the time is the search's.
#include <benchmark/benchmark.h>

#include <cmath>
#include <iterator>

#include "plumb/schedule/joint.h"
#include "tests/uneven_models.h"

namespace {

// Geometric means over the models.
void joint(benchmark::State& state) {
  const int ranks = static_cast<int>(state.range(0)), microbatches = static_cast<int>(state.range(1));
  double over_named = 0, over_interleaved = 0, least = 1e9;
  for (auto _ : state) {
    for (const char* name : plumb::uneven_models) {
      const plumb::PieceCosts pieces = plumb::pieces_of(plumb::uneven(name, 6 * ranks));
      const auto costs = [&](int stages) {
        return plumb::costs_of_stages(pieces, plumb::balanced_stages(pieces, stages));
      };
      const plumb::ScheduleChoice interleaved =
          plumb::compare_schedules(ranks, microbatches, costs, {.names = {"Interleaved1F1B"}}).front();
      const plumb::JointResult found =
          plumb::joint_search(ranks, microbatches, pieces, {.memory_limit = interleaved.peak()});
      const double step = found.simulation.makespan, gain = found.named.simulation.makespan / step;
      over_named += std::log(gain);
      over_interleaved += std::log(interleaved.simulation.makespan / step);
      least = std::min(least, gain);
    }
  }
  const double models = std::size(plumb::uneven_models) * static_cast<double>(state.iterations());
  state.counters["best named / joint"] = std::exp(over_named / models);
  state.counters["the same, least of the models"] = least;
  state.counters["Interleaved1F1B / joint"] = std::exp(over_interleaved / models);
}

BENCHMARK(joint)
    ->ArgNames({"ranks", "microbatches"})
    ->Args({4, 4})
    ->Args({8, 8})
    ->Args({8, 16})
    ->Args({16, 16})
    ->Args({16, 32})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
