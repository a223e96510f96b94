#include "plumb/recording/event_file.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/system_remedy.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string raw(const double* values, size_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(double)};
}

// "Masked", as TFRecord has it.
std::string checksum(const std::string& bytes) {
  const uint32_t c = crc32c(bytes.data(), bytes.size());
  return raw<uint32_t>((c >> 15 | c << 17) + 0xA282EAD8u);
}

// --- the wire format of protocol buffers

enum WireType : uint64_t { kVarint = 0, kDouble = 1, kLengthDelimited = 2, kFloat = 5 };

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value > 127; value >>= 7) bytes += static_cast<char>((value & 127) | 128);
  return bytes + static_cast<char>(value);
}

std::string key(uint64_t field, WireType type) { return varint(field << 3 | type); }

std::string text(uint64_t field, const std::string& bytes) {
  return key(field, kLengthDelimited) + varint(bytes.size()) + bytes;
}

// HistogramProto: min, max, num, sum, sum of squares (of the bins' middles), upper edges, counts.
std::string histogram_proto(const EventFile::Histogram& h) {
  double total = 0, sum = 0, squares = 0;
  for (size_t i = 0; i < h.counts.size(); ++i) {
    const double middle = (h.edges[i] + h.edges[i + 1]) / 2;
    total += h.counts[i];
    sum += h.counts[i] * middle;
    squares += h.counts[i] * middle * middle;
  }
  std::string bytes;
  uint64_t field = 1;
  for (const double fact : {h.edges.front(), h.edges.back(), total, sum, squares})
    bytes += key(field++, kDouble) + raw(fact);
  return bytes + text(6, raw(h.edges.data() + 1, h.counts.size())) + text(7, raw(h.counts.data(), h.counts.size()));
}

std::string host_name() {
  char name[256] = "host";
  if (::gethostname(name, sizeof name - 1) != 0) return "host";
  return name;
}

}  // namespace

EventFile::EventFile(const std::string& folder, std::optional<int64_t> after) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  path_ =
      (fs::path(folder) / (c10::str("events.out.tfevents.", microseconds, ".", host_name(), ".", ::getpid()))).string();
  std::error_code failed;
  fs::create_directories(folder, failed);
  if (failed) fail(failed.value());
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (file_ < 0) fail(errno);
  write(text(3, "brain.Event:2"));
  const std::string start = key(1, kVarint) + varint(1);
  if (after) write(key(2, kVarint) + varint(static_cast<uint64_t>(*after + 1)) + text(7, start));
}

EventFile::~EventFile() { ::close(file_); }

void EventFile::fail(int reason) const {
  throw Error(ErrorKind::CannotWrite, path_ + ": events cannot be written: " + std::strerror(reason), "",
              system_remedy(reason, "another folder"));
}

void EventFile::write(const std::string& fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string data = key(1, kDouble) + raw(std::chrono::duration<double>(now).count()) + fields;
  const std::string length = raw(static_cast<uint64_t>(data.size()));
  const std::string record = length + checksum(length) + data + checksum(data);
  for (size_t done = 0; done < record.size();) {
    const ssize_t wrote = ::write(file_, record.data() + done, record.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail(errno);
    done += static_cast<size_t>(wrote);
  }
}

void EventFile::add(int64_t step, const std::vector<std::pair<std::string, double>>& scalars,
                    const std::vector<Histogram>& histograms) {
  std::string values;
  for (const auto& [tag, value] : scalars)
    values += text(1, text(1, tag) + key(2, kFloat) + raw(static_cast<float>(value)));
  for (const Histogram& h : histograms) {
    if (h.edges.size() != h.counts.size() + 1) {
      throw Error(ErrorKind::InvalidArgument, c10::str("the histogram '", h.tag, "' has ", h.counts.size(),
                                                       " counts and ", h.edges.size(), " edges"));
    }
    values += text(1, text(1, h.tag) + text(5, histogram_proto(h)));
  }
  if (values.empty()) return;
  write(key(2, kVarint) + varint(static_cast<uint64_t>(step)) + text(5, values));
}

}  // namespace plumb
