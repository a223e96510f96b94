#include "plumb/pipeline/runtime/shared_parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"

namespace plumb {
namespace {

using nlohmann::json;

struct Known {
  int rank, stage;
  std::string name, type;
  std::uint64_t hash = 0;  // hash of the parameter's values, set only if it has copies
};

std::string where(const Known& k) { return str("'", k.name, "' of stage ", k.stage, " on rank ", k.rank); }

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

namespace {

// Merges every rank's list of its parameters: which of them are copies of one.
class CopyFinder {
 public:
  CopyFinder(const std::map<int, std::vector<NamedTensor>>& local, Transport& transport)
      : local_(local),
        transport_(transport),
        me_(transport.group().rank()),
        known_(exchange_names()),
        sets_(known_.size()) {}

  SharedParameters find(const PipeTable& layout) {
    join_names();
    join_tied(layout);
    join_tensors();
    std::map<size_t, std::vector<size_t>> members;
    for (size_t i = 0; i < known_.size(); i++) members[sets_.root(i)].push_back(i);
    std::erase_if(members, [](const auto& set) { return set.second.size() < 2; });
    exchange_hashes(members);
    SharedParameters shared;
    const int size = transport_.group().size();
    shared.copy_peers.assign(size, std::vector<bool>(size, false));
    for (const auto& [root, list] : members) {
      check_alike(list);
      add_group(list, shared);
    }
    return shared;
  }

 private:
  // Returns the names in the same order on every rank: by rank, then as each rank lists them.
  std::vector<Known> exchange_names() {
    json mine = json::array();
    for (const auto& [stage, parameters] : local_) {
      // Copies may have devices of their own.
      for (const auto& p : parameters)
        mine.push_back({stage, p.name, describe(p.tensor.sizes(), at::TensorOptions(p.tensor.scalar_type()))});
    }
    std::vector<Known> known;
    const auto texts = transport_.exchange(mine.dump());
    for (size_t r = 0; r < texts.size(); r++) {
      read(texts[r], r, [&](const json& theirs) {
        for (const auto& entry : theirs) {
          known.push_back({static_cast<int>(r), entry.at(0).get<int>(), entry.at(1).get<std::string>(),
                           entry.at(2).get<std::string>()});
        }
      });
    }
    return known;
  }

  void join_names() {
    std::map<std::string, size_t> first_of_name;
    for (size_t i = 0; i < known_.size(); i++) {
      auto [it, fresh] = first_of_name.try_emplace(known_[i].name, i);
      if (!fresh) sets_.join(it->second, i);
    }
  }

  void join_tied(const PipeTable& layout) {
    std::map<std::pair<int, std::string>, size_t> by_place;
    for (size_t i = 0; i < known_.size(); i++) by_place.try_emplace({known_[i].stage, known_[i].name}, i);
    for (const ReplicatedParam& copies : layout.replicated) {
      for (const auto& [stage, name] : copies) {
        auto it = by_place.find({stage, name});
        if (it == by_place.end())
          throw Error(ErrorKind::UnknownName, str("the tied parameter '", name, "' does not exist in stage ", stage));
        sets_.join(by_place.at(*copies.begin()), it->second);
      }
    }
  }

  // Two names of one tensor in the stages of this rank are one parameter, too.
  void join_tensors() {
    std::map<const void*, size_t> by_tensor;
    for (size_t i = 0; i < known_.size(); i++) {
      if (known_[i].rank != me_) continue;
      auto [it, fresh] = by_tensor.try_emplace(tensor_of(known_[i]).unsafeGetTensorImpl(), i);
      if (!fresh) sets_.join(it->second, i);
    }
  }

  void exchange_hashes(const std::map<size_t, std::vector<size_t>>& members) {
    json hashes = json::object();
    for (const auto& [root, list] : members) {
      for (auto i : list) {
        if (known_[i].rank == me_) hashes[std::to_string(i)] = content_hash(tensor_of(known_[i]));
      }
    }
    const auto texts = transport_.exchange(hashes.dump());
    for (size_t r = 0; r < texts.size(); r++) {
      read(texts[r], r, [&](const json& theirs) {
        for (const auto& [key, value] : theirs.items()) known_.at(std::stoul(key)).hash = value.get<std::uint64_t>();
      });
    }
  }

  // Reads what a rank sent. Whatever is wrong with it is an Error that names the rank.
  static void read(const std::string& text, size_t rank, const std::function<void(const json&)>& take) {
    try {
      take(parse_json(text));
    } catch (const std::exception&) {
      throw Error(ErrorKind::Communication, str("what rank ", rank, " says of its parameters is malformed"));
    }
  }

  void check_alike(const std::vector<size_t>& list) const {
    const Known& first = known_[list[0]];
    for (auto i : list) {
      const Known& k = known_[i];
      if (k.type != first.type) {
        throw Error(ErrorKind::InvalidState, "copies of one parameter differ: " + where(first) + " is " + first.type +
                                                 ", " + where(k) + " is " + k.type);
      }
      if (k.hash != first.hash) {
        throw Error(ErrorKind::InvalidState,
                    "copies of one parameter hold different values: " + where(first) + " and " + where(k), "",
                    "initialize them alike on every rank, or load the same weights");
      }
    }
  }

  void add_group(const std::vector<size_t>& list, SharedParameters& shared) const {
    CopyGroup group;
    bool here = false;
    for (auto i : list) {
      const Known& k = known_[i];
      ParameterCopy copy{k.rank, k.stage, k.name};
      if (k.rank == me_) {
        here = true;
        copy.local_stage = k.stage;
        const auto& parameters = local_.at(k.stage);
        for (size_t j = 0; j < parameters.size(); j++) {
          if (parameters[j].name == k.name) copy.index = static_cast<int>(j);
        }
      }
      group.push_back(copy);
      for (auto j : list) shared.copy_peers[k.rank][known_[j].rank] = true;
    }
    std::ranges::sort(group, [](const auto& a, const auto& b) {
      return std::tie(b.stage, a.rank, a.name) < std::tie(a.stage, b.rank, b.name);
    });
    if (here) shared.groups.push_back(group);
  }

  const at::Tensor& tensor_of(const Known& k) const {
    for (const auto& p : local_.at(k.stage)) {
      if (p.name == k.name) return p.tensor;
    }
    throw Error(ErrorKind::Internal, where(k) + " is not held here");
  }

  const std::map<int, std::vector<NamedTensor>>& local_;
  Transport& transport_;
  const int me_;
  std::vector<Known> known_;
  Union sets_;
};

}  // namespace

bool SharedParameters::in_stage(int stage) const {
  return std::ranges::any_of(groups, [&](const CopyGroup& group) {
    return std::ranges::any_of(group, [&](const ParameterCopy& c) { return c.local_stage == stage; });
  });
}

SharedParameters find_shared_parameters(const PipeTable& layout, const std::map<int, std::vector<NamedTensor>>& local,
                                        Transport& transport) {
  return CopyFinder(local, transport).find(layout);
}

std::vector<std::pair<const CopyGroup*, const ParameterCopy*>> copies_for_peer(const SharedParameters& shared,
                                                                               int holder, int other) {
  std::vector<std::pair<const CopyGroup*, const ParameterCopy*>> copies;
  for (const auto& group : shared.groups) {
    if (std::ranges::none_of(group, [&](const auto& c) { return c.rank == other; })) continue;
    for (const auto& c : group) {
      if (c.rank == holder) copies.emplace_back(&group, &c);
    }
  }
  return copies;
}

}  // namespace plumb
