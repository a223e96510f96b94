#include "plumb/analysis/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "plumb/analysis/page_assets.h"
#include "plumb/core/text.h"

namespace plumb::svg {
namespace {

constexpr std::array<std::string_view, kSeriesColors> kSeries = {"#2563eb", "#ea580c", "#16a34a", "#9333ea",
                                                                 "#0891b2", "#db2777", "#a16207", "#475569"};
constexpr double kMargin = 18;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

// Length of the character at the front, 0 if XML has none such.
size_t character(std::string_view s) {
  const size_t n = utf8_length(s);
  return n == 3 && (s.starts_with("\xEF\xBF\xBE") || s.starts_with("\xEF\xBF\xBF")) ? 0 : n;
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t n = character(text);
    if (n > 1) {
      out += text.substr(0, n);
      text.remove_prefix(n);
      continue;
    }
    switch (const char c = text.front(); c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      case '\n':
      case '\t': out += c; break;
      default:
        if (n == 0 || static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
          out += kReplacement;
        } else {
          out += c;
        }
    }
    text.remove_prefix(1);
  }
  return out;
}

std::string number(double value) {
  if (!std::isfinite(value)) return "0";
  char text[48];
  std::snprintf(text, sizeof text, "%.2f", std::clamp(value, -1e9, 1e9));
  std::string out = text;
  out.erase(out.find_last_not_of('0') + 1);
  if (out.back() == '.') out.pop_back();
  return out == "-0" ? "0" : out;
}

std::string script_json(const std::string& json) {
  std::string out;
  for (const char c : json) out += c == '<' ? "\\u003c" : std::string(1, c);
  return out;
}

std::string data_script(const nlohmann::json& data) {
  return "<script type=\"application/json\">" +
         script_json(data.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)) + "</script>\n";
}

std::string base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  out.reserve((bytes.size() + 2) / 3 * 4);
  auto byte = [&](size_t i) { return i < bytes.size() ? static_cast<unsigned char>(bytes[i]) : 0u; };
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const uint32_t word = byte(i) << 16 | byte(i + 1) << 8 | byte(i + 2);
    out += kDigits[word >> 18];
    out += kDigits[word >> 12 & 63];
    out += i + 1 < bytes.size() ? kDigits[word >> 6 & 63] : '=';
    out += i + 2 < bytes.size() ? kDigits[word & 63] : '=';
  }
  return out;
}

std::string_view series_color(size_t i) { return kSeries[i % kSeries.size()]; }
std::string series_class(size_t i) { return "s" + std::to_string(i % kSeries.size()); }

std::string text(double x, double y, std::string_view content, const Text& style) {
  std::string out =
      "<text x=\"" + number(x) + "\" y=\"" + number(y) + "\" class=\"" + std::string(style.kind) + "\" fill=\"";
  out += style.color.empty() ? style.kind == "muted" ? "#64748b" : "#1e293b" : style.color;
  out += "\"";
  if (style.size != 12) out += " font-size=\"" + number(style.size) + "\"";
  if (style.anchor != "start") out += " text-anchor=\"" + std::string(style.anchor) + "\"";
  if (style.bold) out += " font-weight=\"600\"";
  return out + ">" + escaped(content) + "</text>";
}

std::string line(std::string_view look, double x1, double y1, double x2, double y2) {
  return "<line " + std::string(look) + " x1=\"" + number(x1) + "\" y1=\"" + number(y1) + "\" x2=\"" + number(x2) +
         "\" y2=\"" + number(y2) + "\"/>";
}

std::string rect(std::string_view look, double x, double y, double width, double height) {
  return "<rect " + std::string(look) + " x=\"" + number(x) + "\" y=\"" + number(y) + "\" width=\"" + number(width) +
         "\" height=\"" + number(height) + "\"/>";
}

double text_width(std::string_view content, double size) {
  const auto characters = std::ranges::count_if(content, [](char c) { return (c & 0xC0) != 0x80; });
  return static_cast<double>(characters) * size * 0.58;
}

std::string shortened(std::string_view content, double width, double size) {
  if (text_width(content, size) <= width) return std::string(content);
  auto keep = static_cast<size_t>(std::max(0.0, width / (size * 0.58) - 1));
  size_t begin = content.size();
  while (begin > 0 && keep > 0) {
    --begin;
    if ((content[begin] & 0xC0) != 0x80) --keep;
  }
  return "…" + std::string(content.substr(begin));
}

std::string picture(double width, double height, const std::string& body, bool standalone) {
  // On a page its figure has the margins.
  const double margin = standalone ? kMargin : 0;
  const std::string w = number(width + 2 * margin), h = number(height + 2 * margin), corner = number(-margin);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + w + "\" height=\"" + h + "\" viewBox=\"" + corner +
         " " + corner + " " + w + " " + h +
         "\" font-family=\"system-ui,-apple-system,'Segoe UI',Roboto,sans-serif\" font-size=\"12\">\n" +
         (standalone ? "<style>\n" + std::string(picture_style()) + "</style>\n<rect class=\"ground\" x=\"" + corner +
                           "\" y=\"" + corner + "\" width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
                     : "") +
         body + "</svg>\n";
}

std::vector<double> ticks(double lo, double hi, int count) {
  const double rough = (hi - lo) / std::max(1, count);
  if (!(rough > 0) || !std::isfinite(rough)) return {lo};
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (double m : {1.0, 2.0, 5.0}) {
    if (m * power >= rough * 0.999) {
      step = m * power;
      break;
    }
  }
  std::vector<double> out;
  // By index, so that a step too small to change the number cannot loop for ever.
  for (int i = 0; i < 4 * count + 4; ++i) {
    const double t = (std::ceil(lo / step - 1e-9) + i) * step;
    if (t > hi + step * 1e-9) break;
    out.push_back(std::fabs(t) < step * 1e-9 ? 0 : t);
  }
  return out;
}

}  // namespace plumb::svg
