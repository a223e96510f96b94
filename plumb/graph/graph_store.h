// Graphs by what they were made for. Python's, which also asks guards, is plumb._capture.guards.GraphStore.
#pragma once

#include <cstddef>
#include <list>
#include <utility>

namespace plumb {

// Graphs by a key, the last used first. Of more than `most` the one that was unused for longest goes. Not for several
// threads at once.
template <typename Key, typename Made>
class GraphStore {
 public:
  explicit GraphStore(size_t most) : most_(most) {}

  // Returns what was added under this key, or null.
  Made* find(const Key& key) {
    for (auto it = all_.begin(); it != all_.end(); ++it) {
      if (it->first != key) continue;
      all_.splice(all_.begin(), all_, it);
      return &it->second;
    }
    return nullptr;
  }
  Made& add(Key key, Made made) {
    if (all_.size() >= most_) all_.pop_back();
    return all_.emplace_front(std::move(key), std::move(made)).second;
  }
  size_t size() const { return all_.size(); }

 private:
  size_t most_;
  std::list<std::pair<Key, Made>> all_;
};

}  // namespace plumb
