// Quantizers and metrics beside what they are measured by: x.sum(), x.clone(), memcpy. One thread.
//
//   numerics_bench                     all cases, Google Benchmark's options
//   numerics_bench --ratios            interleaved rounds in this process, best of each, and the ratios
//                                      that matter: the memory's speed moves between runs, so only
//                                      ratios within one run mean anything
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/hash.h"
#include "plumb/numerics/metrics.h"
#include "plumb/numerics/quantise.h"

namespace {

struct Case {
  std::string name, yardstick;  // empty: is one itself
  std::function<void()> run;
  double best = 1e9;
};

struct Data {
  at::Tensor x, out, half, bhalf;
  explicit Data(int64_t n) {
    at::manual_seed(0);
    x = at::randn({n});
    out = at::zeros({n});
    half = x.to(at::kHalf);
    bhalf = x.to(at::kBFloat16);
  }
};

std::vector<Case> cases(Data& d) {
  const auto nearest = plumb::FPFormat::parse("E4M3-RN"), chance = plumb::FPFormat::parse("E4M3-SR");
  auto metrics = [](const at::Tensor& x, bool histogram) {
    return [&x, histogram] { benchmark::DoNotOptimize(plumb::measure(x, {histogram})); };
  };
  std::vector<Case> all = {
      {"sum", "", [&] { benchmark::DoNotOptimize(d.x.sum()); }},
      {"clone", "", [&] { benchmark::DoNotOptimize(d.x.clone()); }},
      {"memcpy", "", [&] { std::memcpy(d.out.mutable_data_ptr(), d.x.const_data_ptr(), d.x.nbytes()); }},
      {"metrics", "sum", metrics(d.x, false)},
      {"metrics_histogram", "sum", metrics(d.x, true)},
      {"hash", "metrics", [&] { benchmark::DoNotOptimize(plumb::hash_of(d.x)); }},
      {"hash_bf16", "metrics_bf16", [&] { benchmark::DoNotOptimize(plumb::hash_of(d.bhalf)); }},
      {"metrics_bf16", "", metrics(d.bhalf, false)},
      {"metrics_fp16", "", metrics(d.half, false)},
      {"nearest_fresh", "clone", [&, nearest] { benchmark::DoNotOptimize(plumb::quantise(d.x, nearest)); }},
      {"nearest_given", "memcpy", [&, nearest] { plumb::quantise_out(d.out, d.x, nearest); }},
      {"stochastic_fresh", "clone", [&, chance] { benchmark::DoNotOptimize(plumb::quantise(d.x, chance, 1)); }},
      {"stochastic_given", "memcpy", [&, chance] { plumb::quantise_out(d.out, d.x, chance, 1); }},
      {"encode", "clone", [&, nearest] { benchmark::DoNotOptimize(plumb::encode(d.x, nearest)); }},
      {"quantise_and_measure", "clone",
       [&, nearest] {
         plumb::TensorMetrics before;
         benchmark::DoNotOptimize(plumb::quantise_and_measure(d.x, nearest, &before, nullptr));
       }},
  };
  auto codes = plumb::encode(d.x, nearest);
  all.push_back({"decode", "clone", [codes, nearest] { benchmark::DoNotOptimize(plumb::decode(codes, nearest)); }});
  return all;
}

int ratios(int rounds) {
  for (int64_t n : {int64_t(16), int64_t(1) << 18, int64_t(16) << 20}) {
    Data data(n);
    auto all = cases(data);
    const int inner = n == 16 ? 20000 : n < (1 << 20) ? 20 : 1;
    for (auto& c : all) c.run();
    for (int round = 0; round < rounds; ++round)
      for (auto& c : all) {
        const double begin = thread_seconds();
        for (int i = 0; i < inner; ++i) c.run();
        c.best = std::min(c.best, (thread_seconds() - begin) / inner);
      }
    std::printf("%lld float32 values\n", static_cast<long long>(n));
    for (const auto& c : all) {
      std::printf("  %-22s %10.2f us", c.name.c_str(), c.best * 1e6);
      for (const auto& other : all)
        if (other.name == c.yardstick) std::printf("   %.2f of %s", other.best / c.best, c.yardstick.c_str());
      std::printf("\n");
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc > 1 && std::strcmp(argv[1], "--ratios") == 0) return ratios(argc > 2 ? std::atoi(argv[2]) : 15);
  static std::vector<std::unique_ptr<Data>> kept;
  for (int64_t n : {int64_t(16), int64_t(1) << 18, int64_t(16) << 20}) {
    kept.push_back(std::make_unique<Data>(n));
    for (auto& c : cases(*kept.back()))
      benchmark::RegisterBenchmark((c.name + "/" + std::to_string(n)).c_str(), [c, n](benchmark::State& state) {
        for (auto _ : state) c.run();
        const int64_t item = c.name.ends_with("16") ? 2 : 4;  // metrics_bf16, metrics_fp16
        state.SetBytesProcessed(state.iterations() * n * item);
      });
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
