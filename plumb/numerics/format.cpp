#include "plumb/numerics/format.h"

#include <charconv>
#include <cmath>

#include "plumb/core/error.h"
#include "plumb/core/join.h"

namespace plumb {
namespace {

struct StandardFormat {
  std::string_view name;
  int exponent_bits, mantissa_bits;
  Encoding encoding;
  BlockScale block_scale = BlockScale::None;
  int block_size = 0;
};

constexpr StandardFormat kStandard[] = {
    {"e4m3fn", 4, 3, Encoding::Fn},
    {"e5m2", 5, 2, Encoding::Ieee},
    {"e4m3fnuz", 4, 3, Encoding::Fnuz},
    {"e5m2fnuz", 5, 2, Encoding::Fnuz},
    {"e3m4", 3, 4, Encoding::Ieee},
    {"e2m3fn", 2, 3, Encoding::Finite},
    {"e3m2fn", 3, 2, Encoding::Finite},
    {"e2m1fn", 2, 1, Encoding::Finite},
    {"fp16", 5, 10, Encoding::Ieee},
    {"bf16", 8, 7, Encoding::Ieee},
    {"tf32", 8, 10, Encoding::Ieee},
    {"fp32", 8, 23, Encoding::Ieee},
    {"mxfp8e4m3", 4, 3, Encoding::Fn, BlockScale::PowerOfTwo, 32},
    {"mxfp8e5m2", 5, 2, Encoding::Ieee, BlockScale::PowerOfTwo, 32},
    {"mxfp6e2m3", 2, 3, Encoding::Finite, BlockScale::PowerOfTwo, 32},
    {"mxfp6e3m2", 3, 2, Encoding::Finite, BlockScale::PowerOfTwo, 32},
    {"mxfp4", 2, 1, Encoding::Finite, BlockScale::PowerOfTwo, 32},
    {"nvfp4", 2, 1, Encoding::Finite, BlockScale::E4M3, 16},
};

constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"mxfp8", "mxfp8e4m3"}, {"mxfp6", "mxfp6e2m3"}, {"mxfp4e2m1", "mxfp4"}};

[[noreturn]] void bad_format(std::string_view text, std::string why) {
  throw Error(ErrorKind::InvalidArgument, "'" + std::string(text) + "' is not a number format: " + std::move(why), "",
              "write E<exponent bits>M<mantissa bits> or one of " + standard_format_names() +
                  ", then -RN, -SR, -SR<bits> or -RZ, then -sat or -inf");
}

// The whole of `text` as a number, or -1.
int number(std::string_view text) {
  int value = -1;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 ? value : -1;
}

void check(const FPFormat& f) {
  auto fail = [&](std::string what, std::string remedy) {
    throw Error(ErrorKind::InvalidArgument, std::move(what), "", std::move(remedy));
  };
  if (f.exponent_bits < 2 || f.exponent_bits > 8)
    fail("a number format has 2 to 8 exponent bits, not " + std::to_string(f.exponent_bits),
         "values are held in float32, whose exponent has 8 bits");
  if (f.mantissa_bits < 0 || f.mantissa_bits > 23)
    fail("a number format has 0 to 23 mantissa bits, not " + std::to_string(f.mantissa_bits),
         "values are held in float32, whose mantissa has 23 bits");
  if (f.rounding != Rounding::Stochastic && f.srbits != 0)
    fail("srbits is " + std::to_string(f.srbits) + " but rounding is " + std::string(to_string(f.rounding)),
         "leave srbits at 0, or round stochastically");
  if (f.srbits < 0 || f.srbits > 23 - f.mantissa_bits)
    fail("srbits is " + std::to_string(f.srbits) + " for a format with " + std::to_string(f.mantissa_bits) +
             " mantissa bits",
         "give 1 to " + std::to_string(23 - f.mantissa_bits) + " random bits, or 0 for all");
}

}  // namespace

std::string_view to_string(Rounding rounding) {
  switch (rounding) {
    case Rounding::Stochastic: return "stochastic";
    case Rounding::Nearest: return "nearest";
    case Rounding::TowardZero: return "toward_zero";
  }
  return "unknown";
}

Rounding parse_rounding(std::string_view text) {
  if (text == "stochastic") return Rounding::Stochastic;
  if (text == "nearest") return Rounding::Nearest;
  if (text == "toward_zero" || text == "towards_zero") return Rounding::TowardZero;
  throw Error(ErrorKind::InvalidArgument, "'" + std::string(text) + "' is not a rounding", "",
              "use \"stochastic\", \"nearest\" or \"toward_zero\"");
}

std::string standard_format_names() { return join(kStandard, &StandardFormat::name, " "); }

FPFormat::FPFormat(int exponent_bits, int mantissa_bits, Rounding rounding, int srbits)
    : exponent_bits(exponent_bits), mantissa_bits(mantissa_bits) {
  *this = with_rounding(rounding, srbits);
}

FPFormat::FPFormat(int exponent_bits, int mantissa_bits, std::string_view rounding, int srbits)
    : FPFormat(exponent_bits, mantissa_bits, parse_rounding(rounding), srbits) {}

FPFormat FPFormat::with_rounding(Rounding rounding, int srbits) const {
  FPFormat result = *this;
  result.rounding = rounding;
  result.srbits = srbits;
  check(result);
  if (rounding == Rounding::Stochastic && srbits == 0) result.srbits = 23 - mantissa_bits;
  return result;
}

FPFormat FPFormat::parse(std::string_view text) {
  std::string_view rest = text;
  auto next = [&rest]() {
    auto dash = rest.find('-');
    auto part = rest.substr(0, dash);
    rest = dash == std::string_view::npos ? std::string_view() : rest.substr(dash + 1);
    return part;
  };
  FPFormat format;
  auto name = next();
  for (const auto& [other, standard] : kOtherNames)
    if (name == other) name = standard;
  bool found = false;
  for (const auto& standard : kStandard) {
    if (standard.name != name) continue;
    format.exponent_bits = standard.exponent_bits;
    format.mantissa_bits = standard.mantissa_bits;
    format.encoding = standard.encoding;
    format.block_scale = standard.block_scale;
    format.block_size = standard.block_size;
    format.saturate = format.saturates_by_default();
    found = true;
  }
  if (!found) {
    auto m = name.find('M');
    if (name.empty() || name[0] != 'E' || m == std::string_view::npos) bad_format(text, "its name is not known");
    format.exponent_bits = number(name.substr(1, m - 1));
    format.mantissa_bits = number(name.substr(m + 1));
    if (format.exponent_bits < 0 || format.mantissa_bits < 0) bad_format(text, "its bits are not numbers");
  }
  Rounding rounding = Rounding::Nearest;
  int srbits = 0;
  bool rounding_said = false, range_said = false;
  while (!rest.empty()) {
    auto part = next();
    if (!rounding_said && (part == "RN" || part == "RZ" || part.substr(0, 2) == "SR")) {
      rounding_said = true;
      rounding = part == "RN" ? Rounding::Nearest : part == "RZ" ? Rounding::TowardZero : Rounding::Stochastic;
      if (part.size() > 2) srbits = number(part.substr(2));
      if (srbits < 0 || (part.size() > 2 && srbits == 0)) bad_format(text, "its random bits are not a number");
    } else if (!range_said && (part == "sat" || part == "inf")) {
      range_said = true;
      format.saturate = part == "sat";
    } else {
      bad_format(text, "'" + std::string(part) + "' is not understood");
    }
  }
  if (!text.empty() && text.back() == '-') bad_format(text, "it ends in '-'");
  return format.with_rounding(rounding, srbits);
}

int FPFormat::bias() const {
  int half = 1 << (exponent_bits - 1);
  return encoding == Encoding::Plain || encoding == Encoding::Fnuz ? half : half - 1;
}

int FPFormat::max_exponent() const {
  int top = (1 << exponent_bits) - 1;
  if (encoding == Encoding::Ieee || (encoding == Encoding::Fn && mantissa_bits == 0)) --top;
  return top - bias();
}

int FPFormat::min_exponent() const { return 1 - bias(); }

double FPFormat::max_absolute_value() const {
  double step = std::ldexp(1.0, -mantissa_bits);
  return std::ldexp(encoding == Encoding::Fn && mantissa_bits > 0 ? 2.0 - 2 * step : 2.0 - step, max_exponent());
}

double FPFormat::min_absolute_normal() const { return std::ldexp(1.0, min_exponent()); }

double FPFormat::min_absolute_subnormal() const { return std::ldexp(1.0, min_exponent() - mantissa_bits); }

FPFormat FPFormat::element() const {
  FPFormat result = *this;
  result.block_scale = BlockScale::None;
  result.block_size = 0;
  return result;
}

bool FPFormat::saturates_by_default() const { return !(encoding == Encoding::Ieee && bits() > 8); }

std::string FPFormat::name() const {
  for (const auto& standard : kStandard)
    if (standard.exponent_bits == exponent_bits && standard.mantissa_bits == mantissa_bits &&
        standard.encoding == encoding && standard.block_scale == block_scale)
      return std::string(standard.name);
  return "E" + std::to_string(exponent_bits) + "M" + std::to_string(mantissa_bits);
}

std::string FPFormat::to_string() const {
  std::string text = name();
  switch (rounding) {
    case Rounding::Nearest: text += "-RN"; break;
    case Rounding::TowardZero: text += "-RZ"; break;
    case Rounding::Stochastic: text += srbits == 23 - mantissa_bits ? "-SR" : "-SR" + std::to_string(srbits); break;
  }
  if (saturate != saturates_by_default()) text += saturate ? "-sat" : "-inf";
  return text;
}

}  // namespace plumb
