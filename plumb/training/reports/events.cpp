#include "plumb/training/reports/events.h"

namespace plumb {
namespace {

using nlohmann::json;

struct Put {
  json& out;
  void operator()(const char* key, const auto& value) const { out[key] = value; }
  template <class T>
  void operator()(const char* key, const std::optional<T>& value) const {
    if (value) out[key] = *value;
  }
};

struct Take {
  const json& in;
  template <class T>
  void operator()(const char* key, T& value) const {
    value = in.at(key).get<T>();
  }
  // JSON has no NaN.
  void operator()(const char* key, double& value) const {
    value = in.at(key).is_null() ? NAN : in.at(key).get<double>();
  }
  template <class T>
  void operator()(const char* key, std::optional<T>& value) const {
    if (in.contains(key)) (*this)(key, value.emplace());
  }
};

template <class Event>
std::string_view first_key() {
  std::string_view first;
  Event event;
  Event::keys(event, [&](const char* key, const auto&) { first = first.empty() ? key : first; });
  return first;
}

template <class... Event>
std::optional<TrainEvent> read(const json& line, const std::variant<Event...>&) {
  std::optional<TrainEvent> found;
  const auto is = [&](auto event) {
    if (!line.contains(first_key<decltype(event)>())) return false;
    event.keys(event, Take{line});
    found = std::move(event);
    return true;
  };
  (is(Event()) || ...);
  return found;
}

}  // namespace

nlohmann::json to_json(const TrainEvent& event) {
  json out;
  std::visit([&](const auto& e) { e.keys(e, Put{out}); }, event);
  return out;
}

std::optional<TrainEvent> event_from_json(const nlohmann::json& line) {
  try {
    return read(line, TrainEvent());
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

std::string_view kind_of(const TrainEvent& event) {
  return std::visit([](const auto& e) { return first_key<std::decay_t<decltype(e)>>(); }, event);
}

}  // namespace plumb
