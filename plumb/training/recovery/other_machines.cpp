#include "plumb/training/recovery/other_machines.h"

#include <ATen/ops/zeros.h>

#include <cstring>

#include "plumb/core/checksum.h"
#include "plumb/core/text.h"
#include "plumb/numerics/cpu_kind.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/training/step/gradients.h"

namespace plumb {
namespace {

constexpr int64_t kMostBytes = 512;
constexpr const char* kRead = " (docs/determinism.md)";

std::string shortened(std::string_view text) { return printable(text.substr(0, size_t(kMostBytes))); }

}  // namespace

std::string other_machines(const ProcessGroup& world) {
  if (world.size() == 1) return "";
  const std::string mine = to_string(cpu_kind());
  const auto number = static_cast<int64_t>(crc64(mine.data(), mine.size()) >> 1);
  const bool differs = of_rank_0(world, number) != number;
  const int64_t first = -largest_of_all(world, differs ? -world.rank() : -world.size());
  if (first >= world.size()) return "";
  const at::Tensor text = at::zeros({kMostBytes}, at::kByte);
  if (world.rank() == first)
    std::memcpy(text.mutable_data_ptr(), mine.data(), std::min(mine.size(), size_t(kMostBytes - 1)));
  broadcast(world, text, static_cast<int>(first));
  return "rank " + std::to_string(first) + " computes on another kind of machine than rank 0 does: " +
         shortened(static_cast<const char*>(text.const_data_ptr())) + "; rank 0: " + shortened(mine) +
         ". The last bits of losses depend on which rank computes what" + kRead;
}

nlohmann::json machine_state(int threads) { return {{"machine", to_string(cpu_kind())}, {"threads", threads}}; }

std::string machine_changed(const nlohmann::json& state, int threads) {
  const nlohmann::json was = state.is_object() ? state.value("computed_on", nlohmann::json()) : nlohmann::json();
  if (!was.is_object()) return "";
  const nlohmann::json there = was.value("machine", nlohmann::json()), count = was.value("threads", nlohmann::json());
  std::string changed;
  if (there.is_string() && there.get<std::string>() != to_string(cpu_kind()))
    changed = "on " + shortened(there.get<std::string>()) + ", this is " + shortened(to_string(cpu_kind()));
  if (count.is_number_integer() && count.get<int64_t>() != threads)
    changed += (changed.empty() ? "" : "; ") + std::string("with ") + count.dump() + " threads a process, this has " +
               std::to_string(threads);
  return changed.empty() ? "" : "was written " + changed + ": last bits may differ from here on" + kRead;
}

}  // namespace plumb
