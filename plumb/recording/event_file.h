// TensorBoard's event files: records of TFRecord, each an Event of event.proto and summary.proto of TensorBoard.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace plumb {

// A new file in a folder, beside those of other writers. The folder is made if it does not exist. Every step reaches
// the system when it is added. Throws Error(CannotWrite) that names the file.
class EventFile {
 public:
  struct Histogram {
    std::string tag;
    std::vector<double> edges, counts;  // one edge more than counts
  };

  // `after`: the last step to keep of an earlier run. Later steps of files beside this one are out of date (a
  // SessionLog that starts, at which TensorBoard drops them).
  explicit EventFile(const std::string& folder, std::optional<int64_t> after = {});
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // Values are stored as float32. Nothing is written for a step without any. Throws Error(InvalidArgument) for a
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
