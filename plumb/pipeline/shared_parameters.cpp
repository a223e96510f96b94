#include "plumb/pipeline/shared_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "plumb/core/error.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

using nlohmann::json;

struct Known {
  int rank, stage;
  std::string name, type;
};

std::string where(const Known& k) {
  return "'" + k.name + "' of stage " + std::to_string(k.stage) + " on rank " + std::to_string(k.rank);
}

// Merges sets of indices that share an element.
class Union {
 public:
  explicit Union(size_t n) : parent_(n) { std::iota(parent_.begin(), parent_.end(), 0); }
  size_t root(size_t i) {
    while (parent_[i] != i) i = parent_[i] = parent_[parent_[i]];
    return i;
  }
  void join(size_t a, size_t b) { parent_[std::max(root(a), root(b))] = std::min(root(a), root(b)); }

 private:
  std::vector<size_t> parent_;
};

json parse(const std::string& text, size_t rank) {
  try {
    return json::parse(text);
  } catch (const std::exception&) {
    throw Error(ErrorKind::Communication, "what rank " + std::to_string(rank) + " says of its parameters is malformed");
  }
}

}  // namespace

std::uint64_t content_hash(const at::Tensor& tensor) {
  auto t = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(t.const_data_ptr());
  std::uint64_t hash = 14695981039346656037ull;
  size_t n = t.nbytes(), i = 0;
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 29;
  }
  for (; i < n; i++) hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 1099511628211ull;
  return hash;
}

bool SharedParameters::in_stage(int stage) const {
  return std::any_of(groups.begin(), groups.end(), [&](const CopyGroup& group) {
    return std::any_of(group.begin(), group.end(), [&](const ParameterCopy& c) { return c.local_stage == stage; });
  });
}

SharedParameters find_shared_parameters(const PipelineLayout& layout, const Placement& placement,
                                        const std::map<int, std::vector<NamedTensor>>& local, Transport& transport) {
  const int me = transport.group().rank(), size = transport.group().size();
  json mine = json::array();
  for (const auto& [stage, parameters] : local) {
    for (const auto& p : parameters) mine.push_back({stage, p.name, describe(p.tensor)});
  }
  std::vector<Known> known;
  const auto texts = transport.exchange(mine.dump());
  for (size_t r = 0; r < texts.size(); r++) {
    const json theirs = parse(texts[r], r);
    for (const auto& entry : theirs) {
      known.push_back({static_cast<int>(r), entry.at(0).get<int>(), entry.at(1).get<std::string>(),
                       entry.at(2).get<std::string>()});
    }
  }
  Union sets(known.size());
  std::map<std::string, size_t> first_of_name;
  std::map<std::pair<int, std::string>, std::vector<size_t>> by_place;
  for (size_t i = 0; i < known.size(); i++) {
    auto [it, fresh] = first_of_name.try_emplace(known[i].name, i);
    if (!fresh) sets.join(it->second, i);
    by_place[{known[i].stage, known[i].name}].push_back(i);
  }
  for (const auto& group : layout.tied) {
    for (const auto& copy : group.copies) {
      auto it = by_place.find({copy.stage, copy.name});
      if (it == by_place.end()) {
        throw Error(ErrorKind::UnknownName,
                    "the tied parameter '" + copy.name + "' does not exist in stage " + std::to_string(copy.stage));
      }
      sets.join(by_place.at({group.copies[0].stage, group.copies[0].name})[0], it->second[0]);
    }
  }
  // Two names of one tensor in the stages of one rank are one parameter, too.
  std::map<const void*, size_t> by_tensor;
  for (size_t i = 0; i < known.size(); i++) {
    if (known[i].rank != me) continue;
    for (const auto& p : local.at(known[i].stage)) {
      if (p.name != known[i].name) continue;
      auto [it, fresh] = by_tensor.try_emplace(p.tensor.unsafeGetTensorImpl(), i);
      if (!fresh) sets.join(it->second, i);
    }
  }
  std::map<size_t, std::vector<size_t>> members;
  for (size_t i = 0; i < known.size(); i++) members[sets.root(i)].push_back(i);

  json hashes = json::object();
  auto tensor_of = [&](const Known& k) -> at::Tensor {
    for (const auto& p : local.at(k.stage)) {
      if (p.name == k.name) return p.tensor;
    }
    return {};
  };
  for (const auto& [root, list] : members) {
    if (list.size() < 2) continue;
    for (auto i : list) {
      if (known[i].rank == me) hashes[std::to_string(i)] = content_hash(tensor_of(known[i]));
    }
  }
  std::map<size_t, std::uint64_t> hash_of;
  const auto all_hashes = transport.exchange(hashes.dump());
  for (size_t r = 0; r < all_hashes.size(); r++) {
    const json theirs = parse(all_hashes[r], r);
    for (const auto& [key, value] : theirs.items()) hash_of[std::stoul(key)] = value.get<std::uint64_t>();
  }

  SharedParameters shared;
  shared.copy_peers.assign(size, std::vector<bool>(size, false));
  for (const auto& [root, list] : members) {
    if (list.size() < 2) continue;
    CopyGroup group;
    TiedParameter tied;
    bool here = false;
    for (auto i : list) {
      const auto& k = known[i];
      if (k.type != known[list[0]].type) {
        throw Error(ErrorKind::InvalidState, "copies of one parameter differ: " + where(known[list[0]]) + " is " +
                                                 known[list[0]].type + ", " + where(k) + " is " + k.type);
      }
      if (hash_of[i] != hash_of[list[0]]) {
        throw Error(ErrorKind::InvalidState,
                    "copies of one parameter hold different values: " + where(known[list[0]]) + " and " + where(k), "",
                    "initialise them alike on every rank, or load the same weights");
      }
      ParameterCopy copy{k.rank, k.stage, k.name};
      if (k.rank == me) {
        here = true;
        copy.local_stage = k.stage;
        const auto& parameters = local.at(k.stage);
        for (size_t j = 0; j < parameters.size(); j++) {
          if (parameters[j].name == k.name) copy.index = static_cast<int>(j);
        }
      }
      group.push_back(copy);
      tied.copies.push_back({k.stage, k.name});
      for (auto j : list) shared.copy_peers[k.rank][known[j].rank] = true;
    }
    std::sort(group.begin(), group.end(), [](const auto& a, const auto& b) {
      return std::tie(b.stage, a.rank, a.name) < std::tie(a.stage, b.rank, b.name);
    });
    std::sort(tied.copies.begin(), tied.copies.end());
    tied.copies.erase(std::unique(tied.copies.begin(), tied.copies.end()), tied.copies.end());
    shared.tied.push_back(tied);
    if (here) shared.groups.push_back(group);
  }
  return shared;
}

std::vector<const ParameterCopy*> copies_for_peer(const SharedParameters& shared, int holder, int other) {
  std::vector<const ParameterCopy*> copies;
  for (const auto& group : shared.groups) {
    if (std::none_of(group.begin(), group.end(), [&](const auto& c) { return c.rank == other; })) continue;
    for (const auto& c : group) {
      if (c.rank == holder) copies.push_back(&c);
    }
  }
  return copies;
}

}  // namespace plumb
