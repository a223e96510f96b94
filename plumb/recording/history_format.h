// The bytes of a history file, which docs/history.md describes. Little-endian.
#pragma once

#include <bit>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include "plumb/transforms/track/tracker.h"

namespace plumb::history_format {

static_assert(std::endian::native == std::endian::little, "histories are written as memory holds them");

inline constexpr std::string_view kMagic{"PLUMBHIS\x01\0\0\0\0\0\0\0", 16};

inline constexpr uint64_t kMostBytes = uint64_t{1} << 36;  // size limit of a file that is read

struct Head {
  uint32_t kind = 0;
  uint32_t crc = 0;  // CRC-32 of kind, length and payload
  uint64_t length = 0;
};
static_assert(sizeof(Head) == 16);

enum Kind : uint32_t { kRules = 1, kTensors = 2, kStep = 3, kScalars = 4, kEvent = 5, kHashes = 6 };

struct StepHead {
  int64_t step = 0;
  uint64_t rows = 0;
};
static_assert(sizeof(StepHead) == 16);

struct Row {
  uint32_t tensor = 0;
  uint8_t backward = 0, by_condition = 0;
  uint16_t present = 0;
  uint32_t bins = 0, zero = 0;
  double reals[5] = {};    // kReals
  int64_t counts[4] = {};  // kCounts
};
static_assert(sizeof(Row) == 88);

struct HashRow {
  uint32_t tensor = 0;
  uint8_t backward = 0, padding[3] = {};
  int64_t first = 0, rows = 0, words = 0;
  uint64_t hash = 0;
};
static_assert(sizeof(HashRow) == 40);

// Fields of a row, in the order of StatisticKind, which begins with them.
inline constexpr double Metrics::Data::*kReals[] = {&Metrics::Data::mean_abs, &Metrics::Data::abs_mean,
                                                    &Metrics::Data::std, &Metrics::Data::abs_max,
                                                    &Metrics::Data::abs_min};
inline constexpr int64_t Metrics::Data::*kCounts[] = {&Metrics::Data::numel, &Metrics::Data::nan_count,
                                                      &Metrics::Data::inf_count, &Metrics::Data::zero_count};

// A histogram's bin: its number in the top byte, the count below.
inline constexpr int kBinShift = 56;

uint32_t checksum(const Head& head, std::string_view payload);

// Returns the path that read_history() reads this file of a rank by, PATH of PATH.rank3; nullopt for other names.
std::optional<std::filesystem::path> path_of_all_ranks(const std::filesystem::path& path);

// Returns the part of bytes that parse_history() takes before the first record of a step beyond `last`.
std::string_view until_step(std::string_view bytes, int64_t last);

}  // namespace plumb::history_format
