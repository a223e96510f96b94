#include "plumb/training/recovery/state_copies.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/pipeline/transport/transport.h"

namespace plumb {
namespace {

using Json = nlohmann::json;

constexpr int64_t kAlignment = 64;
constexpr const char* kModel = "model/";
constexpr const char* kOptimizer = "optimizer/";
constexpr int kDepth = 64;

// A copy: the step after its edge (0 while it is written), lengths of the header, of what was counted and of the
// tensors; the first two, and after a multiple of 64 bytes the tensors as the header says (that of a safetensors file).
// The memory may be larger.
struct Begin {
  int64_t next_step = 0, header = 0, counted = 0, tensors = 0;
  int64_t data() const {
    return (static_cast<int64_t>(sizeof(Begin)) + header + counted + kAlignment - 1) / kAlignment * kAlignment;
  }
};

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorKind::Communication, "the copy of a rank's state " + what, "",
              "run the same version of plumb on every rank");
}

// "exp_avg/layers.0.weight" is of layers.0.weight.
std::string name_of(const std::string& key) {
  if (key.starts_with(kModel)) return key.substr(std::strlen(kModel));
  const size_t end = key.find('/', std::strlen(kOptimizer));
  return end == std::string::npos ? key : key.substr(end + 1);
}

NamedTensors everything(const RankState& state) {
  NamedTensors all;
  for (const auto& [name, tensor] : state.held) all.emplace_back(kModel + name, tensor);
  for (auto& [name, tensor] : state.optimizer.state()) all.emplace_back(kOptimizer + name, tensor);
  return all;
}

Json parse_or_refuse(const std::string& text) {
  try {
    return parse_json(text, kDepth);
  } catch (const std::exception& e) {
    refuse(std::string("is described in no JSON: ") + e.what());
  }
}

// Returns "layers.0.weight and 3 more": the names that no rank holds.
std::string missing_of(const std::set<std::string>& wanted, const std::vector<std::set<std::string>>& held) {
  std::string first;
  size_t count = 0;
  for (const std::string& name : wanted) {
    if (std::ranges::any_of(held, [&](const auto& names) { return names.contains(name); })) continue;
    if (count++ == 0) first = name;
  }
  return count > 1 ? c10::str(first, " and ", count - 1, " more") : first;
}

}  // namespace

NamedTensors held_tensors(const TrainJob& job, int rank) {
  NamedTensors held;
  std::set<std::string> seen;
  for (const int stage : job.schedule.placement.stages_of(rank)) {
    for (const Attr& attr : job.pipe->stage(stage)->state()) {
      if (attr.kind == AttrKind::Constant) continue;
      const std::string name = job.first_name(attr.name);
      if (seen.insert(name).second) held.emplace_back(name, attr.tensor);
    }
  }
  return held;
}

StateCopies::StateCopies(std::shared_ptr<Keeper> keeper) : keeper_(std::move(keeper)) {
  if (keeper_) before_ = keeper_->memory();
}

at::Tensor StateCopies::last() const { return memory_[static_cast<size_t>(last_ % 2)].bytes(); }

void StateCopies::take(int64_t edge, const RankState& state, const Json& counted, bool keep_old) {
  const at::NoGradGuard no_grad;
  if (first_ < 0) first_ = edge;
  last_ = edge;
  // All have taken the first edge of this generation.
  if (edge > first_ && !keep_old && !before_.empty()) {
    before_.clear();
    if (keeper_) keeper_->drop_old();
  }
  const NamedTensors all = everything(state);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : all) names.push_back(name);
  if (names != names_ || layout_.header.empty()) {
    layout_ = safetensors_layout("the copy of a rank's state", all);
    names_ = std::move(names);
  }
  const std::string &header = layout_.header, counted_text = counted.dump();
  const Begin begin{edge + 1, static_cast<int64_t>(header.size()), static_cast<int64_t>(counted_text.size()),
                    static_cast<int64_t>(layout_.bytes)};
  char* to = memory_[static_cast<size_t>(edge % 2)].grow(begin.data() + begin.tensors);
  const auto mark = mark_of(to);
  mark.store(0, std::memory_order_seq_cst);
  std::memcpy(to + offsetof(Begin, header), &begin.header, sizeof begin - offsetof(Begin, header));
  std::memcpy(to + sizeof begin, header.data(), header.size());
  std::memcpy(to + sizeof begin + header.size(), counted_text.data(), counted_text.size());
  to += begin.data();
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Tensor& tensor = all[i].second;
    if (tensor.nbytes() == 0) continue;
    if (tensor.is_cpu() && tensor.is_contiguous()) {
      std::memcpy(to + layout_.offsets[i], tensor.const_data_ptr(), tensor.nbytes());
    } else {
      at::from_blob(to + layout_.offsets[i], tensor.sizes(), at::dtype(tensor.scalar_type())).copy_(tensor.detach());
    }
  }
  mark.store(begin.next_step, std::memory_order_seq_cst);
}

void StateCopies::forget(int64_t edge) {
  const auto mark = mark_of(memory_[static_cast<size_t>(edge % 2)].grow(static_cast<int64_t>(sizeof(Begin))));
  if (mark.load() == edge + 1) mark.store(0, std::memory_order_seq_cst);
}

std::map<std::string, at::Tensor> StateCopies::model_of(int rank, int64_t edge) const {
  std::map<std::string, at::Tensor> found;
  const auto place = static_cast<size_t>(2 + 2 * (rank < rank_ ? rank : rank - 1) + edge % 2);
  const auto copy = are_shared() && place < memory_.size() ? open(memory_[place].bytes()) : std::nullopt;
  if (!copy || copy->edge != edge) return found;
  for (const auto& [key, tensor] : copy->tensors)
    if (key.starts_with(kModel)) found.emplace(name_of(key), tensor);
  return found;
}

void StateCopies::leave() {
  std::move(memory_.begin(), memory_.end(), std::back_inserter(before_));
  memory_.clear();
  opened_.clear();
  first_ = -1;
  names_.clear();
  layout_ = {};
}

std::optional<StateCopies::Opened> StateCopies::open(const at::Tensor& all) {
  const auto* from = static_cast<const char*>(all.const_data_ptr());
  const int64_t bytes = all.numel();
  Begin begin;
  if (bytes < static_cast<int64_t>(sizeof begin)) return {};
  std::memcpy(&begin, from, sizeof begin);
  if (begin.next_step == 0) return {};
  const auto fits = [&](int64_t length) { return length >= 0 && length <= bytes; };
  if (!fits(begin.header) || !fits(begin.counted) || !fits(begin.tensors) || begin.data() > bytes - begin.tensors)
    refuse("is cut off");
  Opened opened;
  opened.edge = begin.next_step - 1;
  from += sizeof begin;
  opened.counted = parse_or_refuse(std::string(from + begin.header, static_cast<size_t>(begin.counted)));
  const SafetensorsHeader header = parse_safetensors_header(
      "the copy of a rank's state", {from, static_cast<size_t>(begin.header)}, static_cast<uint64_t>(begin.tensors));
  for (const SafetensorsEntry& entry : header.entries) {
    const int64_t at = begin.data() + static_cast<int64_t>(entry.offset);
    if (at % c10::elementSize(entry.dtype) != 0) refuse("has tensors at odd places");
    opened.tensors[entry.name] =
        all.narrow(0, at, static_cast<int64_t>(entry.bytes)).view(entry.dtype).view(entry.sizes);
  }
  return opened;
}

std::optional<int64_t> StateCopies::find_edge(const ProcessGroup& world, const TrainJob& job) {
  // All ranks have left the generations before, or are gone: nothing is written to these any more.
  opened_.clear();
  for (const SharedMemory& memory : before_) {
    if (auto copy = open(memory.bytes())) opened_.push_back(*std::move(copy));
  }
  Json own = Json::array();
  for (const Opened& copy : opened_) {
    Json names = Json::array();
    for (const auto& [key, tensor] : copy.tensors) {
      if (key.starts_with(kModel)) names.push_back(name_of(key));
    }
    own.push_back({{"edge", copy.edge}, {"names", std::move(names)}, {"counted", copy.counted}});
  }
  const auto texts = Transport(world).exchange(own.dump());
  std::map<int64_t, Json> counted;
  std::map<int64_t, std::vector<std::set<std::string>>> held;  // by edge and rank
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const Json said = parse_or_refuse(texts[rank]);
    try {
      for (const Json& copy : said) {
        auto& by_rank = held[copy.at("edge").get<int64_t>()];
        by_rank.resize(texts.size());
        const auto names = copy.at("names").get<std::vector<std::string>>();
        by_rank[rank].insert(names.begin(), names.end());
        counted.emplace(copy.at("edge"), copy.at("counted"));
      }
    } catch (const Json::exception& e) {
      refuse(std::string("is described otherwise than expected: ") + e.what());
    }
  }
  std::set<std::string> wanted;
  for (int rank = 0; rank < job.schedule.num_ranks(); ++rank) {
    for (const auto& [name, tensor] : held_tensors(job, rank)) wanted.insert(name);
  }
  std::optional<int64_t> found;
  for (auto it = held.rbegin(); it != held.rend() && !found; ++it) {
    if (missing_of(wanted, it->second).empty()) found = it->first;
  }
  std::erase_if(opened_, [&](const Opened& copy) { return copy.edge != found; });
  any_found_ = !held.empty();
  missing_.clear();
  if (!found && any_found_) missing_ = missing_of(wanted, held.rbegin()->second);
  if (!found) return found;
  held_by_ = held[*found];
  counted_ = counted[*found];
  return found;
}

Json StateCopies::restore(const ProcessGroup& world, const TrainJob& job, int training, const RankState* state) {
  const at::NoGradGuard no_grad;
  const int size = world.size(), me = world.rank(), length = job.schedule.num_ranks();
  std::map<std::string, at::Tensor> mine;
  for (const Opened& copy : opened_) mine.insert(copy.tensors.begin(), copy.tensors.end());
  // The sender for each rank: itself if it has the tensor, else the first rank that has it.
  std::vector<std::set<std::string>> to(static_cast<size_t>(size));
  std::set<int> from;
  for (int rank = 0; rank < training; ++rank) {
    for (const auto& [name, tensor] : held_tensors(job, rank % length)) {
      if (held_by_[static_cast<size_t>(rank)].contains(name)) continue;
      const auto holder = std::ranges::find_if(held_by_, [&](const auto& names) { return names.contains(name); });
      const int giver = static_cast<int>(holder - held_by_.begin());
      if (giver == me) to[static_cast<size_t>(rank)].insert(name);
      if (rank == me) from.insert(giver);
    }
  }
  MessagePlan plan;
  std::vector<std::vector<MessageValue>> values;
  for (int rank = 0; rank < size; ++rank) {
    if (to[static_cast<size_t>(rank)].empty()) continue;
    Json keys = Json::array();
    std::vector<MessageValue> message(1);
    for (const auto& [key, tensor] : mine) {
      if (!to[static_cast<size_t>(rank)].contains(name_of(key))) continue;
      keys.push_back(key);
      message.push_back({tensor});
    }
    message[0].tensor = text_tensor(keys.dump());
    plan.sends.push_back({{MessageKind::Exchange, me, rank}, rank});
    values.push_back(std::move(message));
  }
  for (const int rank : from) plan.receives.push_back({{MessageKind::Exchange, rank, me}, rank});
  Transport transport(world);
  transport.begin_step(plan);
  for (size_t i = 0; i < values.size(); ++i) transport.send(static_cast<int>(i), values[i]);
  for (size_t i = 0; i < plan.receives.size(); ++i) {
    const auto came = transport.receive(static_cast<int>(i), "going on").values;
    const auto text = text_of(came);
    const Json keys = text ? parse_or_refuse(*text) : Json();
    if (!keys.is_array() || keys.size() + 1 != came.size()) refuse("comes without its names");
    for (size_t k = 0; k < keys.size(); ++k) {
      if (!keys[k].is_string() || !came[k + 1].tensor.defined()) refuse("comes without its names");
      mine.emplace(keys[k].get<std::string>(), came[k + 1].tensor);
    }
  }
  transport.end_step();
  if (state == nullptr) return counted_;
  for (const auto& [name, tensor] : state->held) {
    const auto found = mine.find(kModel + name);
    if (found == mine.end() || found->second.sizes() != tensor.sizes() ||
        found->second.scalar_type() != tensor.scalar_type())
      refuse("has no " + name + " of this shape");
    tensor.detach().copy_(found->second);
  }
  state->optimizer.load_state("the copy of a rank's state", [&](const std::string& key) {
    const auto found = mine.find(kOptimizer + key);
    return found == mine.end() ? at::Tensor() : found->second.clone();
  });
  return counted_;
}

void StateCopies::connect(const ProcessGroup& world, const std::vector<SharedMemory>& more) {
  opened_.clear();
  memory_.resize(2);
  rank_ = world.rank();
  memory_.insert(memory_.end(), more.begin(), more.end());
  if (keeper_) {
    for (const SharedMemory& memory : memory_) keeper_->keep(memory);
    return;
  }
  if (world.size() == 1) return;
  Json own = Json::array();
  for (const SharedMemory& memory : memory_) own.push_back({memory.address().process, memory.address().descriptor});
  const auto texts = Transport(world).exchange(own.dump());
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == world.rank()) continue;
    std::vector<std::array<int64_t, 2>> addresses;
    try {
      addresses = parse_or_refuse(texts[static_cast<size_t>(rank)]).get<decltype(addresses)>();
    } catch (const Json::exception& e) {
      refuse(std::string("is at no place that can be read: ") + e.what());
    }
    if (addresses.size() != 2) refuse("is not at two places");
    for (const auto& [process, descriptor] : addresses)
      memory_.emplace_back(SharedMemory::Address{process, descriptor});
  }
}

}  // namespace plumb
