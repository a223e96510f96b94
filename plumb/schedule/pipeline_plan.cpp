#include "plumb/schedule/pipeline_plan.h"

#include <cmath>
#include <limits>

#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/json_text.h"
#include "plumb/core/str.h"
#include "plumb/schedule/check.h"

namespace plumb {
namespace {

constexpr int kVersion = 1;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 26;

// Reads the entries of a document and names them in its errors.
class Reader {
 public:
  Reader(const nlohmann::json& document, const std::string& where) : document_(document), where_(where) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorKind::BadFile, "is no plan of plumb: " + what, where_, "a file that plumb plan -o wrote");
  }
  const nlohmann::json& entry(const char* name) const {
    const auto found = document_.find(name);
    if (found == document_.end()) fail(str("'", name, "' is missing"));
    return *found;
  }
  int whole(const char* name, int least, int most) const {
    const nlohmann::json& value = entry(name);
    if (!value.is_number_integer() || value < least || value > most)
      fail(str("'", name, "' is no whole number from ", least, " to ", most));
    return value.get<int>();
  }
  std::string text(const char* name) const {
    const nlohmann::json& value = entry(name);
    if (!value.is_string()) fail(str("'", name, "' is no text"));
    return value.get<std::string>();
  }
  std::vector<std::string> texts(const char* name) const {
    const nlohmann::json& value = entry(name);
    if (!value.is_array()) fail(str("'", name, "' is no list"));
    std::vector<std::string> list;
    for (const auto& each : value) {
      if (!each.is_string()) fail(str("'", name, "' holds what is no text"));
      list.push_back(each.get<std::string>());
    }
    return list;
  }
  double number(const nlohmann::json& value, const char* name) const {
    if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
      fail(str("'", name, "' is no number of 0 or more"));
    return value.get<double>();
  }

 private:
  const nlohmann::json& document_;
  const std::string& where_;
};

}  // namespace

std::string to_json(const PipelinePlan& plan) {
  nlohmann::json table = nlohmann::json::array();
  std::string row;
  for (const char c : to_csv(plan.schedule)) {
    if (c != '\n') {
      row += c;
      continue;
    }
    table.push_back(row);
    row.clear();
  }
  const nlohmann::ordered_json document = {{"plumb_plan", kVersion},
                                           {"schedule", plan.schedule.name},
                                           {"ranks", plan.schedule.num_ranks()},
                                           {"microbatches", plan.schedule.num_microbatches},
                                           {"replicas", plan.replicas},
                                           {"seconds", plan.seconds},
                                           {"memory", plan.memory},
                                           {"operators", plan.operators},
                                           {"cut", plan.cut},
                                           {"recompute", plan.recompute},
                                           {"transmit", plan.transmit},
                                           {"table", table}};
  const bool finite = std::isfinite(plan.seconds) &&
                      std::ranges::all_of(plan.memory, [](double bytes) { return std::isfinite(bytes); });
  if (!finite)
    throw Error(ErrorKind::InvalidArgument, "a plan's seconds or memory are not finite: JSON has no such number");
  try {
    return document.dump(1) + "\n";
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorKind::InvalidArgument, "a plan's texts are no UTF-8");
  }
}

PipelinePlan parse_plan(std::string_view text, const std::string& where) {
  const nlohmann::json document = [&] {
    try {
      return parse_json(text, 4, /*unique_keys=*/true);
    } catch (const Error& e) {
      throw Error(ErrorKind::BadFile, "is no plan of plumb: " + e.message(), where, "a file that plumb plan -o wrote");
    }
  }();
  const Reader reader(document, where);
  if (!document.is_object()) reader.fail("it is no object");
  if (reader.whole("plumb_plan", 1, 65536) != kVersion)
    throw Error(ErrorKind::BadFile, "is a plan of a newer plumb", where, "plan again with this one: plumb plan -o");
  const int ranks = reader.whole("ranks", 1, kMostPlanRanks);
  PipelinePlan plan;
  std::string csv;
  for (const std::string& row : reader.texts("table")) {
    if (row.find_first_of("\n#") != std::string::npos) reader.fail("a row of 'table' holds more than actions");
    csv += row + "\n";
  }
  plan.schedule = parse_csv(csv, where);
  plan.schedule.name = reader.text("schedule");
  if (plan.schedule.num_ranks() != ranks)
    reader.fail(str("'table' has ", plan.schedule.num_ranks(), " rows for ", ranks, " ranks"));
  if (plan.schedule.num_microbatches != reader.whole("microbatches", 1, kMostPlanParts))
    reader.fail(str("'table' has ", plan.schedule.num_microbatches, " microbatches"));
  if (plan.schedule.has_messages()) reader.fail("'table' holds messages, which a run adds itself");
  plan.replicas = reader.whole("replicas", 1, kMostPlanParts);
  if (document.contains("operators")) plan.operators = reader.whole("operators", 0, std::numeric_limits<int>::max());
  plan.cut = reader.texts("cut");
  plan.recompute = reader.texts("recompute");
  if (document.contains("transmit")) plan.transmit = reader.texts("transmit");
  const auto stages = static_cast<std::size_t>(plan.num_stages());
  if (plan.cut.size() + 1 != stages || plan.recompute.size() != stages)
    reader.fail(str("'table' has ", stages, " stages, 'cut' ", plan.cut.size() + 1, " and 'recompute' ",
                    plan.recompute.size()));
  for (const std::string& how : plan.recompute) {
    if (how != "cheap" && how != "none") reader.fail("'recompute' is neither cheap nor none");
  }
  plan.seconds = reader.number(reader.entry("seconds"), "seconds");
  if (!reader.entry("memory").is_array()) reader.fail("'memory' is no list");
  for (const auto& bytes : reader.entry("memory")) plan.memory.push_back(reader.number(bytes, "memory"));
  try {
    require_runnable(plan.schedule, {}, {.blocking_receives = false});
  } catch (const Error& e) {
    throw Error(e.kind(), e.message(), where, "a file that plumb plan -o wrote, as it wrote it");
  }
  return plan;
}

PipelinePlan read_plan(const std::string& path) { return parse_plan(read_file(path, kMostBytes), path); }

}  // namespace plumb
