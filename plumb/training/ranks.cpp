#include "plumb/training/ranks.h"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "plumb/core/mix_bits.h"
#include "plumb/core/text.h"
#include "plumb/graph/describe.h"
#include "plumb/numerics/hash.h"
#include "plumb/pipeline/launch/environment.h"
#include "plumb/pipeline/transport/transport.h"
#include "plumb/training/stages.h"
#include "plumb/training/usage.h"

namespace plumb {

void before_meeting(const std::function<void()>& prepare) {
  try {
    prepare();
  } catch (const std::exception& e) {
    if (const auto place = discover_ranks()) tell_cannot_start(*place, error_text(e));
    throw;
  }
}

TrainRanks meet_ranks(const TrainOptions& o, const RankEnvironment* given) {
  const auto place = given != nullptr ? std::optional(*given) : o.processes() > 1 ? discover_ranks() : std::nullopt;
  TrainRanks ranks;
  ranks.device = device_of(o.device, place ? place->local_rank : 0);
  GlooOptions of_group;
  if (!ranks.device.is_cpu()) of_group.device = ranks.device;
  if (given != nullptr) {
    // torchrun starts all at once, on hosts that may be more or less busy; plumb lets those meet that are ready.
    of_group.timeout = std::chrono::seconds(given->starts_again ? std::max<int64_t>(o.patience, 30) : o.patience);
    ranks.everyone = make_gloo_group(*given, of_group);
  } else if (o.processes() > 1) {
    of_group.timeout = std::chrono::seconds(std::max<int64_t>(o.patience, 60));  // one may read longer than others
    ranks.everyone = make_group_from_environment(of_group);
  }
  ranks.everyone.set_timeout(std::chrono::seconds(o.patience));
  ranks.world = ranks.everyone;
  if (given != nullptr && given->starts_again && ranks.world.size() > o.processes()) {
    if (given->rank >= o.processes()) return ranks;
    std::vector<int> training;
    for (int r = 0; r < o.processes(); ++r) training.push_back(r);
    ranks.world = make_subgroup(ranks.everyone, "training", training);
  }
  if (ranks.world.size() != o.processes()) {
    throw UsageError(c10::str("--stages ", o.stages, " --data-parallel ", o.replicas, ": the launcher started ",
                              ranks.world.size(), " processes"),
                     "--stages times --data-parallel of " + std::to_string(ranks.world.size()));
  }
  ranks.groups = divide_into_replicas(ranks.world, static_cast<int>(o.replicas));
  return ranks;
}

void check_equal_options(const ProcessGroup& world, const TrainOptions& options) {
  if (world.size() == 1) return;
  const TrainOptions defaults;
  TrainOptions shared = options;
  for (const TrainField& field : train_fields()) {
    if (field.is_ranks_own)
      set_field(shared, field, field_texts(defaults, field));
    else if (field.is_path() && !field_texts(options, field)[0].empty())
      set_field(shared, field, {"given"});
  }
  const std::vector<std::string> texts = Transport(world).exchange(to_toml(shared), "its options");
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    std::istringstream found(texts[rank]), wanted(texts[0]);
    std::string own, first;
    while (own == first && std::getline(found, own) && std::getline(wanted, first)) {
    }
    throw Error(ErrorKind::InvalidArgument,
                c10::str("rank ", rank, " was given '", printable(own), "', and rank 0 '", printable(first), "'"), "",
                "the same options on every rank");
  }
}

int64_t hash_of_batch(const Batch& batch) {
  std::vector<at::Tensor> tensors = batch.inputs;
  tensors.insert(tensors.end(), batch.targets.begin(), batch.targets.end());
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    hash = mix_seeds(hash, static_cast<uint64_t>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) hash = mix_seeds(hash, static_cast<uint64_t>(size));
    if (tensor.layout() == at::kStrided) hash = mix_seeds(hash, hash_of(tensor));
  }
  return static_cast<int64_t>(hash >> 1);
}

void check_equal_batches(const ProcessGroup& world, int64_t hash, int64_t step) {
  if (world.size() == 1) return;
  const std::vector<std::string> hashes = Transport(world).exchange(std::to_string(hash), "the hash of a batch");
  for (size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    throw Error(
        ErrorKind::InvalidArgument,
        c10::str("the batch of rank ", rank, " for step ", step, " is another than that of rank 0"), "",
        "equal batches on every rank, all rows of a step: no DistributedSampler, and a generator of its own with "
        "one seed for a shuffle");
  }
}

}  // namespace plumb
