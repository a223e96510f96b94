#include "plumb/pipeline/transport/failure_store.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <vector>

#include "plumb/core/str.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/interruptible_wait.h"

namespace plumb {
namespace {

std::string failure_key(int rank) { return str("plumb/failure/", rank); }
std::string late_key(int rank) { return str("plumb/late/", rank); }

// The rank at the begin of a text that a peer wrote; `otherwise` where it is none of a group of `size`.
int written_rank(std::string_view text, int size, int otherwise) {
  int rank = -1;
  std::from_chars(text.data(), text.data() + text.size(), rank);
  return rank >= 0 && rank < size ? rank : otherwise;
}

}  // namespace

// Returns nullopt if the store does not respond.
template <class Ask>
auto FailureStore::ask(Ask question) {
  using Answer = std::optional<std::invoke_result_t<Ask, c10d::Store&>>;
  const auto& store = group_.store();
  if (!store || reach_ != Reach::Answers) return Answer();
  try {
    Answer answer = within(std::min(group_.timeout(), std::chrono::milliseconds(2000)),
                           [store, question] { return question(*store); });
    if (!answer) reach_ = Reach::Silent;
    return answer;
  } catch (const std::exception&) {
    reach_ = Reach::Lost;
    return Answer();
  }
}

void FailureStore::publish(const Cause& cause) {
  ask([key = failure_key(group_.rank()), text = str(cause.rank, ":", cause.text)](c10d::Store& store) {
    store.set(key, as_bytes(text));
    return true;
  });
}

std::optional<Cause> FailureStore::find(int suspect) {
  std::vector<std::string> keys;
  for (int k = 0; k < group_.size(); k++) {
    const int rank = (suspect + k) % group_.size();
    if (rank != group_.rank()) keys.push_back(failure_key(rank));
  }
  const auto text = ask([keys](c10d::Store& store) {
    for (const auto& key : keys) {
      if (!store.check({key})) continue;
      const auto bytes = store.get(key);
      return std::string(bytes.begin(), bytes.end());
    }
    return std::string();
  });
  if (!text || text->empty()) return std::nullopt;
  return Cause{written_rank(*text, group_.size(), suspect), text->substr(text->find(':') + 1)};
}

void FailureStore::publish_late(int peer) {
  // Without the store the neighbor is named.
  ask([key = late_key(group_.rank()), peer](c10d::Store& store) {
    store.set(key, as_bytes(std::to_string(peer)));
    return true;
  });
}

int FailureStore::last_waited_for(int peer) {
  const int last = ask([peer, size = group_.size()](c10d::Store& store) {
                     int rank = peer;
                     for (int k = 0; k < size && store.check({late_key(rank)}); k++) {
                       const auto bytes = store.get(late_key(rank));
                       rank = written_rank({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, size, rank);
                     }
                     return rank;
                   }).value_or(peer);
  if (reach_ == Reach::Silent && !group_.launcher_serves_store()) {
    for (int rank = 0; rank < group_.size(); rank++) {
      if (group_.world_rank(rank) == 0) return rank == group_.rank() ? peer : rank;
    }
  }
  return last == group_.rank() ? peer : last;
}

void FailureStore::note_closed(int peer) {
  if (group_.world_rank(peer) == 0 && !group_.launcher_serves_store() && reach_ == Reach::Answers) reach_ = Reach::Lost;
}

}  // namespace plumb
