// A JSON document from a file, read with errors that say what and where.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace plumb {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;  // members in the order they came

// The accessors throw Error (BadFile) that names the file and the path to the element
// ("graph_module.graph.nodes[3].inputs[0].arg").
class JsonDoc {
 public:
  // `file` is for messages. Nesting deeper than max_depth is refused.
  JsonDoc(std::string file, std::string_view text, int max_depth = 200);

  const Json& root() const { return root_; }
  const std::string& file() const { return file_; }

  const Json& at(const Json& object, const char* key) const;    // a member that must be there
  const Json* find(const Json& object, const char* key) const;  // null if missing or JSON null
  const Json& array(const Json& j) const;
  const Json& object(const Json& j) const;
  const std::string& string(const Json& j) const;
  int64_t integer(const Json& j) const;
  bool boolean(const Json& j) const;
  double number(const Json& j) const;  // also "Infinity", "-Infinity", "NaN"
  std::vector<int64_t> integers(const Json& j) const;
  std::vector<std::string> strings(const Json& j) const;
  // Returns the one member of a tagged union that is set: {"as_int": 3}.
  std::pair<const std::string&, const Json&> tagged(const Json& j) const;

  [[noreturn]] void fail(const Json& element, const std::string& what, const std::string& remedy = "") const;
  // Returns the path to an element, found by searching: only for messages.
  std::string path_of(const Json& element) const;

 private:
  const Json& expect(bool is, const Json& j, const char* what) const;
  std::string file_;
  Json root_;
};

// Returns a number that JSON can hold: itself, or "Infinity", "-Infinity", "NaN" as torch.export writes them.
Json json_number(double value);

}  // namespace plumb
