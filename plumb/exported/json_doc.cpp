#include "plumb/exported/json_doc.h"

#include <cmath>
#include <limits>

#include "plumb/core/error.h"
#include "plumb/core/json_text.h"

namespace plumb {
namespace {

bool search(const Json& in, const Json* target, std::string* path) {
  if (&in == target) return true;
  const size_t length = path->size();
  if (in.is_object()) {
    for (auto it = in.begin(); it != in.end(); ++it) {
      *path += (path->empty() ? "" : ".") + it.key();
      if (search(*it, target, path)) return true;
      path->resize(length);
    }
  } else if (in.is_array()) {
    for (size_t i = 0; i < in.size(); ++i) {
      *path += "[" + std::to_string(i) + "]";
      if (search(in[i], target, path)) return true;
      path->resize(length);
    }
  }
  return false;
}

}  // namespace

JsonDoc::JsonDoc(std::string file, std::string_view text, int max_depth) : file_(std::move(file)) {
  try {
    root_ = parse_json(text, max_depth);
  } catch (const Error& e) {
    throw Error(ErrorKind::BadFile, file_ + ": " + e.message());
  }
}

void JsonDoc::fail(const Json& element, const std::string& what, const std::string& remedy) const {
  throw Error(ErrorKind::BadFile, file_ + ": " + what, path_of(element), remedy);
}

std::string JsonDoc::path_of(const Json& element) const {
  std::string path;
  return search(root_, &element, &path) ? path : "";
}

const Json* JsonDoc::find(const Json& object, const char* key) const {
  auto it = this->object(object).find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

const Json& JsonDoc::at(const Json& object, const char* key) const {
  const Json* found = find(object, key);
  if (!found) fail(object, std::string("'") + key + "' is missing");
  return *found;
}

const Json& JsonDoc::expect(bool is, const Json& j, const char* what) const {
  if (!is) fail(j, std::string(what) + " was expected");
  return j;
}

const Json& JsonDoc::array(const Json& j) const { return expect(j.is_array(), j, "a list"); }
const Json& JsonDoc::object(const Json& j) const { return expect(j.is_object(), j, "an object"); }
const std::string& JsonDoc::string(const Json& j) const {
  return expect(j.is_string(), j, "a string").get_ref<const std::string&>();
}
bool JsonDoc::boolean(const Json& j) const { return expect(j.is_boolean(), j, "true or false").get<bool>(); }

int64_t JsonDoc::integer(const Json& j) const {
  if (j.is_number_unsigned() && j.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail(j, "the integer does not fit 64 bits");
  return expect(j.is_number_integer(), j, "an integer").get<int64_t>();
}

double JsonDoc::number(const Json& j) const {
  if (j.is_number()) return j.get<double>();
  if (j.is_string()) {
    const auto& text = j.get_ref<const std::string&>();
    if (text == "Infinity") return std::numeric_limits<double>::infinity();
    if (text == "-Infinity") return -std::numeric_limits<double>::infinity();
    if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  }
  fail(j, "a number was expected");
}

std::vector<int64_t> JsonDoc::integers(const Json& j) const {
  std::vector<int64_t> values;
  values.reserve(array(j).size());
  for (const Json& e : j) values.push_back(integer(e));
  return values;
}

std::vector<std::string> JsonDoc::strings(const Json& j) const {
  std::vector<std::string> values;
  for (const Json& e : array(j)) values.push_back(string(e));
  return values;
}

std::pair<const std::string&, const Json&> JsonDoc::tagged(const Json& j) const {
  object(j);
  const std::string* tag = nullptr;
  const Json* value = nullptr;
  for (auto it = j.begin(); it != j.end(); ++it) {
    if (it->is_null()) continue;
    if (tag) fail(j, "one of '" + *tag + "' and '" + it.key() + "' was expected, not both");
    tag = &it.key();
    value = &*it;
  }
  if (!tag) fail(j, "has no value");
  return {*tag, *value};
}

Json json_number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  return value;
}

}  // namespace plumb
