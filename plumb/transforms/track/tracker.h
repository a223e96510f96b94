// Holds the measurements of a tracked graph: `plumb::track(x, slot, tracker)` nodes return x and write their
// measurement into a slot of the ScaleTracker of that number.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "plumb/numerics/metrics.h"
#include "plumb/tensors/run_rows.h"

namespace plumb {

// Measurements of a tensor and of its gradient. The fields of TensorMetrics, with the histogram on the side, so that
// graphs of many nodes stay small.
struct Metrics {
  struct Data {
    double mean_abs = 0, abs_mean = 0, std = 0, abs_max = 0, abs_min = 0;
    int64_t numel = 0, nan_count = 0, inf_count = 0, zero_count = 0;
    std::shared_ptr<const ExponentHistogram> histogram;  // null unless asked for

    static Data of(const TensorMetrics& metrics);
    TensorMetrics full() const;
  };
  Data fwd;
  std::optional<Data> bwd;  // nothing before backward, or where no gradient comes
};

// Thread-safe. Forward measurements replace earlier ones and drop the gradient's, but where all are wanted together.
class ScaleTracker : public std::enable_shared_from_this<ScaleTracker> {
 public:
  static std::shared_ptr<ScaleTracker> create(MetricsOptions options = {});
  ~ScaleTracker();
  ScaleTracker(const ScaleTracker&) = delete;

  // Returns the number by which `plumb::track` nodes know it; unique in the process, never used again.
  int64_t id() const { return id_; }
  // Returns the tracker of that number, or null when it is gone: its nodes then only return their tensors.
  static std::shared_ptr<ScaleTracker> find(int64_t id);

  // input: the value is the caller's own tensor, which is not touched. probe: its gradient is measured even if the
  // caller asked for none.
  int64_t add_slot(bool input, bool probe = false);
  size_t num_slots() const;
  bool is_input(int64_t slot) const;
  bool is_probed(int64_t slot) const;

  // Switched off, the nodes only return their tensors. On at the start.
  void set_enabled(bool enabled) { enabled_ = enabled; }
  bool enabled() const { return enabled_; }

  enum class Direction { Forward, Backward };

  // The measurements of a slot: everything at the start. With less, its node measures less or only returns its tensor.
  struct Wanted {
    bool forward = true, backward = true;
    bool histogram = false;  // even if the options asked for none
    bool metrics = true;     // off: hashes at most
    bool hash = false;       // hashes of every tensor until clear()
    bool keep = false;       // copies of all of them instead of their hashes
    // All tensors until clear() are measured as one tensor.
    bool forward_together = false, backward_together = false;
  };
  void want(int64_t slot, Wanted wanted);
  Wanted wanted(int64_t slot) const;  // nothing for a slot that is not there

  // Nothing if there is no such slot or it saw no tensor.
  std::optional<Metrics> metrics(int64_t slot) const;
  // Returns the measurement of one direction; a slot may have a gradient's where the value itself was not wanted.
  std::optional<Metrics::Data> measured(int64_t slot, Direction direction) const;
  // Returns the sums behind measured(), to be added to others'; null where it is not wanted together.
  std::shared_ptr<const MetricsSum> sum(int64_t slot, Direction direction) const;
  // A tensor's hash, and the rows of the batch that it belongs to. Where nothing says them: the number of the tensor
  // among those of this slot, and 0 rows.
  struct Hashed {
    RunRows rows;
    int64_t words = 0;
    uint64_t hash = 0;
    at::Tensor kept;
  };
  // Returns them in the order of forwards; waits for devices.
  std::vector<Hashed> hashes(int64_t slot, Direction direction) const;
  void clear();

  // Returns an empty tracker with the same slots and options.
  std::shared_ptr<ScaleTracker> twin() const;

  // Takes strided floating-point tensors on any device; others, and meta tensors, are passed over. A device measures
  // them itself and is not waited for until the numbers are asked for. `rows`: those of next_rows() in the forward.
  void record(int64_t slot, Direction direction, const at::Tensor& x, const RunRows& rows);
  // Returns the rows that run on this thread now, once for each forward of a slot.
  RunRows next_rows(int64_t slot);
  // Records what was measured elsewhere, as options_for() says; not for slots wanted together.
  void record(int64_t slot, Direction direction, const TensorMetrics& metrics);
  MetricsOptions options_for(int64_t slot) const;
  // Returns whether record() needs the tensor itself: sums of several, and hashes.
  bool takes_tensors(int64_t slot, Direction direction) const;

 private:
  bool together(int64_t slot, Direction direction) const;
  // The measurements of one direction of a slot: the numbers, or the sum that they are asked of.
  struct Seen {
    bool any = false, together = false;
    Metrics::Data data;
    std::shared_ptr<MetricsSum> sum;
    Metrics::Data numbers() const { return sum ? Metrics::Data::of(sum->metrics()) : data; }
  };
  // A hash, a device's as int64 [] there, or a copy.
  struct Hashing {
    RunRows rows;
    int64_t words = 0;
    uint64_t hash = 0;
    at::Tensor on_device, kept;
  };
  struct Slot {
    bool input = false, probed = false;
    Wanted wanted;
    Seen fwd, bwd;
    std::vector<Hashing> fwd_hashes, bwd_hashes;
    int64_t runs = 0;  // forwards whose rows nothing says
  };
  void hash(int64_t slot, Direction direction, const at::Tensor& x, const RunRows& rows, bool keep);
  explicit ScaleTracker(MetricsOptions options);
  void keep(int64_t slot, Direction direction, Seen seen);
  const int64_t id_;
  const MetricsOptions options_;
  std::atomic<bool> enabled_ = true;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
};

}  // namespace plumb
