// Elements of the charts. Colors are set twice: as attributes, which every SVG viewer and converter understands,
// and as classes, by which a page gives them its own (light and dark): sN the Nth series' color, "line" drawn in it,
// "area" filled with it, "text", "muted", "grid", "axis".
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace plumb::svg {

// Escapes text and attributes of XML and HTML. Bytes that are not UTF-8 and characters XML cannot hold become U+FFFD.
std::string escaped(std::string_view text);
// Returns a length or place, to a hundredth of a pixel.
std::string number(double value);
// Returns JSON for inside a <script> element: no "<" that could end it.
std::string script_json(const std::string& json);

// Returns the element with a page's data for its scripts.
std::string data_script(const nlohmann::json& data);

// Encodes bytes for inside a script.
std::string base64(std::string_view bytes);
template <class T>
std::string packed(const std::vector<T>& numbers) {
  return base64({reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(T)});
}

inline constexpr size_t kSeriesColors = 8;
// Returns the Nth series' color on white; they repeat.
std::string_view series_color(size_t i);
// "s3"
std::string series_class(size_t i);

struct Text {
  std::string_view kind = "text";     // the class: also "muted"
  std::string_view anchor = "start";  // or "middle", "end"
  double size = 12;
  bool bold = false;
  std::string_view color = {};  // fill color; the kind's if empty
};
// `content` is escaped.
std::string text(double x, double y, std::string_view content, const Text& style = {});
// `look`: the other attributes.
std::string line(std::string_view look, double x1, double y1, double x2, double y2);
std::string rect(std::string_view look, double x, double y, double width, double height);
// Returns about how wide text is drawn.
double text_width(std::string_view content, double size = 12);
// Shortens text to `width`, with an ellipsis at the front (the end of a module's path says more than its start).
std::string shortened(std::string_view content, double width, double size = 12);

// Draws a whole picture: standalone with margins, a ground and colors of light and dark viewers; on a page without.
std::string picture(double width, double height, const std::string& body, bool standalone);

// Returns round numbers that divide lo..hi in about `count` parts. lo < hi, both finite.
std::vector<double> ticks(double lo, double hi, int count);

}  // namespace plumb::svg
