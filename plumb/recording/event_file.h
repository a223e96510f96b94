// TensorBoard's event files: records of TFRecord, each an Event of event.proto and summary.proto of TensorBoard.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace plumb {

// A new file in a folder, which is made if it is not there; beside those that others wrote. Every step reaches the
// system when it is added. Raises Error(CannotWrite) that names the file.
class EventFile {
 public:
  struct Histogram {
    std::string tag;
    std::vector<double> edges, counts;  // one edge more than counts
  };

  // `after`: the step that a run goes on after. What files beside it say of later steps is out of date (a SessionLog
  // that starts, at which TensorBoard drops those).
  explicit EventFile(const std::string& folder, std::optional<int64_t> after = {});
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // Values are stored as float32. Nothing is written for a step without any. Raises Error(InvalidArgument) for a
  // histogram without one edge more than counts.
  void add(int64_t step, const std::vector<std::pair<std::string, double>>& scalars,
           const std::vector<Histogram>& histograms = {});

 private:
  void write(const std::string& fields);
  [[noreturn]] void fail(int reason) const;
  std::string path_;
  int file_ = -1;
};

}  // namespace plumb
