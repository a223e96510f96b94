#include "plumb/training/run_log.h"

#include <unistd.h>

#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "plumb/analysis/html_report.h"
#include "plumb/core/table.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

constexpr std::chrono::seconds kPageEvery{5};

std::string csv_number(double value) {
  return std::isfinite(value) ? nlohmann::json(value).dump() : std::isnan(value) ? "nan" : "inf";
}

// --- TFRecord and the wire format of protocol buffers, as far as TensorBoard's event.proto and summary.proto need it

// CRC-32C, by which a record's length and data are checked (RFC 3720, appendix B.4).
uint32_t crc32c(const std::string& bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
      made[i] = c;
    }
    return made;
  }();
  uint32_t c = ~0u;
  for (const char byte : bytes) c = table[(c ^ static_cast<unsigned char>(byte)) & 255] ^ c >> 8;
  return ~c;
}

template <class T>
std::string raw(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string masked_crc(const std::string& bytes) {
  const uint32_t c = crc32c(bytes);
  return raw<uint32_t>((c >> 15 | c << 17) + 0xA282EAD8u);
}

std::string varint(uint64_t value) {
  std::string bytes;
  for (; value > 127; value >>= 7) bytes += static_cast<char>((value & 127) | 128);
  return bytes + static_cast<char>(value);
}

std::string field_key(int field, int wire_type) { return varint(static_cast<uint64_t>(field << 3 | wire_type)); }

std::string length_delimited(int field, const std::string& bytes) {
  return field_key(field, 2) + varint(bytes.size()) + bytes;
}

std::string scalar(const std::string& tag, double value) {
  return length_delimited(1, length_delimited(1, tag) + field_key(2, 5) + raw(static_cast<float>(value)));
}

LineChart chart_of(const std::string& title, const std::vector<StepNumbers>& steps, double StepNumbers::*number) {
  Curve curve{title, {}, {}};
  for (const StepNumbers& s : steps) {
    curve.values.push_back(s.*number);
    curve.steps.push_back(static_cast<double>(s.step));
  }
  LineChart chart;
  chart.title = title;
  chart.curves = {std::move(curve)};
  chart.height = 260;
  return chart;
}

}  // namespace

RunLog::RunLog(const TrainOptions& options, int64_t start) : options_(options) {
  if (!options.csv.empty()) open_table(start);
  if (!options.tensorboard.empty()) open_events();
}

// The lines of steps that are not done again stay.
void RunLog::open_table(int64_t start) {
  std::string kept = "step,loss,lr,norm,rows_per_second,seconds,eval_loss\n";
  if (start > 0 && std::filesystem::exists(options_.csv)) {
    std::ifstream before(options_.csv);
    std::string line;
    std::getline(before, line);
    while (std::getline(before, line) && std::strtoll(line.c_str(), nullptr, 10) <= start) kept += line + "\n";
  }
  table_.open(options_.csv, std::ios::trunc);
  table_ << kept << std::flush;
}

void RunLog::open_events() {
  char host[256] = "host";
  ::gethostname(host, sizeof host - 1);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  const std::filesystem::path folder = options_.tensorboard;
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  const std::string path =
      (folder / ("events.out.tfevents." + std::to_string(microseconds) + "." + host + "." + std::to_string(::getpid())))
          .string();
  events_.open(path, std::ios::binary);
  if (!events_.is_open()) {
    throw Error(ErrorKind::CannotWrite, "--tensorboard " + path + ": cannot be written: " + std::strerror(errno), "",
                "another folder");
  }
  write_event(length_delimited(3, "brain.Event:2"));
}

void RunLog::write_event(const std::string& fields) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::string data = field_key(1, 1) + raw(std::chrono::duration<double>(now).count()) + fields;
  const std::string length = raw(static_cast<uint64_t>(data.size()));
  events_ << length << masked_crc(length) << data << masked_crc(data) << std::flush;
}

void RunLog::add(const StepNumbers& n, bool last) {
  if (table_.is_open()) {
    table_ << n.step;
    for (const double value : {n.loss, n.lr, n.norm, n.rows_per_second, n.seconds}) table_ << "," << csv_number(value);
    table_ << "," << (n.eval_loss ? csv_number(*n.eval_loss) : "") << std::endl;
  }
  if (events_.is_open()) {
    std::string values = scalar("loss", n.loss) + scalar("lr", n.lr) + scalar("gradient_norm", n.norm) +
                         scalar("rows_per_second", n.rows_per_second);
    if (n.eval_loss) values += scalar("eval_loss", *n.eval_loss);
    write_event(field_key(2, 0) + varint(static_cast<uint64_t>(n.step)) + length_delimited(5, values));
  }
  if (options_.page.empty()) return;
  steps_.push_back(n);
  const auto now = std::chrono::steady_clock::now();
  if (!last && steps_.size() > 1 && now - page_written_ < kPageEvery) return;
  write_page();
  page_written_ = std::chrono::steady_clock::now();
}

void RunLog::write_page() const {
  const StepNumbers& now = steps_.back();
  HtmlReport report("Training", options_.file.empty() ? "a model" : options_.file);
  std::vector<Figure> figures = {{std::to_string(now.step) + " of " + std::to_string(options_.steps), "steps", ""},
                                 {short_number(now.loss), "loss", ""},
                                 {short_number(now.rows_per_second), "rows a second", ""}};
  LineChart losses = chart_of("loss", steps_, &StepNumbers::loss);
  Curve evaluations{"held-out data", {}, {}};
  for (const StepNumbers& s : steps_) {
    if (!s.eval_loss) continue;
    evaluations.values.push_back(*s.eval_loss);
    evaluations.steps.push_back(static_cast<double>(s.step));
  }
  if (!evaluations.values.empty()) {
    figures.push_back({short_number(evaluations.values.back()), "loss on held-out data", ""});
    losses.curves.push_back(std::move(evaluations));
  }
  report.figures(figures);
  report.section("Losses").prose(conclusion(losses)).add(losses);
  report.section("Learning rate").add(chart_of("learning rate", steps_, &StepNumbers::lr));
  LineChart norms = chart_of("norm of the gradient", steps_, &StepNumbers::norm);
  norms.log_y = true;
  report.section("Norm of the gradient").add(norms);
  report.section("Throughput").add(chart_of("rows a second", steps_, &StepNumbers::rows_per_second));
  report.section("Options").code(to_toml(options_));
  report.write(options_.page);
}

}  // namespace plumb
