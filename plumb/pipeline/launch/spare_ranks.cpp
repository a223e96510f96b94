#include "plumb/pipeline/launch/spare_ranks.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <thread>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/pipeline/transport/gloo_backend.h"
#include "plumb/pipeline/transport/interruptible_wait.h"

namespace plumb {
namespace {

constexpr const char* kRelease = "plumb/spares/release";
constexpr const char* kGone = "plumb/spares/gone";
constexpr std::chrono::milliseconds kPause{100};

}  // namespace

void wait_as_spare(const ProcessGroup& group) {
  const std::string me = str("rank ", group.rank(), ", a spare,");
  const auto ask = [&](auto question) {
    const auto reply = connecting(me + " has lost the group's store", "look at what the other ranks printed", [&] {
      return within(group.timeout(), [store = group.store(), question] { return question(*store); });
    });
    if (reply) return *reply;
    throw Error(ErrorKind::Communication,
                str(me, " waited ", group.timeout().count(), " ms for the group's store, which does not answer"), "",
                "look at the host of rank 0, and at the network");
  };
  while (!ask([](c10d::Store& store) { return store.check({kRelease}); })) std::this_thread::sleep_for(kPause);
  ask([](c10d::Store& store) { return store.add(kGone, 1) > 0; });
}

void release_spares(const ProcessGroup& group, int spares) {
  if (spares == 0) return;
  within(std::chrono::seconds(5), [store = group.store(), spares] {
    try {
      store->set(kRelease, std::vector<std::uint8_t>{1});
      while (store->add(kGone, 0) < spares) std::this_thread::sleep_for(kPause);
    } catch (const std::exception&) {  // they end by themselves
    }
    return true;
  });
}

}  // namespace plumb
