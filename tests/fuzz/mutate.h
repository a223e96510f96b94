// Breaks files on purpose, the same way for the same seed: for the fuzzers, and for a short run among the tests.
#pragma once

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace plumb::fuzz {

using Random = std::mt19937_64;

inline size_t below(Random& random, size_t n) { return n ? static_cast<size_t>(random() % n) : 0; }
inline bool chance(Random& random, size_t one_in) { return below(random, one_in) == 0; }

// Flips, overwrites, cuts, repeats and removes bytes.
inline void mutate_bytes(std::string& bytes, Random& random) {
  const size_t rounds = 1 + below(random, 4);
  for (size_t i = 0; i < rounds && !bytes.empty(); ++i) {
    const size_t at = below(random, bytes.size());
    const size_t length = std::min(bytes.size() - at, 1 + below(random, 16));
    switch (below(random, 7)) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(random, 8))); break;
      case 1: bytes[at] = static_cast<char>(random()); break;
      case 2: bytes.resize(at); break;
      case 3: bytes.erase(at, length); break;
      case 4: bytes.insert(at, bytes.substr(below(random, bytes.size()), 1 + below(random, 64))); break;
      case 5: {
        static constexpr uint64_t numbers[] = {
            0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF};
        const uint64_t number = numbers[below(random, 10)];
        const size_t width = size_t{1} << below(random, 4);
        for (size_t k = 0; k < width && at + k < bytes.size(); ++k)
          bytes[at + k] = static_cast<char>(number >> (8 * k));
        break;
      }
      default: std::swap(bytes[at], bytes[below(random, bytes.size())]);
    }
  }
}

// Replaces a number of a text by one that no program has, or empties a list: sizes, dimensions and counts.
inline void mutate_number(std::string& text, Random& random) {
  static const char* const numbers[] = {"0", "1", "-1", "2", "3", "100", "1000000000000", "9223372036854775807", "nan"};
  const bool is_list = chance(random, 4);
  const size_t from = text.find_first_of(is_list ? "[" : "0123456789", below(random, text.size()));
  if (from == text.npos) return;
  const size_t to = std::min(is_list ? text.find(']', from) : text.find_first_not_of("0123456789", from), text.size());
  if (is_list)
    text.erase(from + 1, to - from - 1);
  else
    text.replace(from, to - from, numbers[below(random, std::size(numbers))]);
}

// Replaces, removes, repeats and swaps elements of a document, so that it stays JSON and stops being a program.
inline void mutate_json(nlohmann::json& root, Random& random) {
  using Json = nlohmann::json;
  std::vector<Json*> all;
  std::vector<Json*> todo{&root};
  std::vector<std::string> strings;
  while (!todo.empty()) {
    Json* j = todo.back();
    todo.pop_back();
    all.push_back(j);
    if (j->is_string()) strings.push_back(j->get<std::string>());
    if (j->is_structured()) {
      for (Json& e : *j) todo.push_back(&e);
    }
  }
  Json& victim = *all[below(random, all.size())];
  switch (below(random, 8)) {
    case 0: {
      static const Json values[] = {0,
                                    1,
                                    -1,
                                    7,
                                    64,
                                    4294967296,
                                    9223372036854775807,
                                    18446744073709551615ull,
                                    -9223372036854775807 - 1,
                                    1e300,
                                    -0.5,
                                    true,
                                    false,
                                    nullptr,
                                    "",
                                    "x",
                                    "NaN",
                                    Json::array(),
                                    Json::object(),
                                    Json::array({1, 2, 3})};
      victim = values[below(random, std::size(values))];
      break;
    }
    case 1:
      if (!strings.empty()) victim = strings[below(random, strings.size())];
      break;
    case 2:
      if (victim.is_array() && !victim.empty())
        victim.erase(victim.begin() + static_cast<std::ptrdiff_t>(below(random, victim.size())));
      if (victim.is_object() && !victim.empty()) {
        auto it = victim.begin();
        std::advance(it, below(random, victim.size()));
        victim.erase(it);
      }
      break;
    case 3:
      if (victim.is_array() && !victim.empty()) {
        Json copy = victim[below(random, victim.size())];
        victim.insert(victim.begin() + static_cast<std::ptrdiff_t>(below(random, victim.size())), copy);
      }
      break;
    case 4:
      if (victim.is_array() && victim.size() > 1)
        std::swap(victim[below(random, victim.size())], victim[below(random, victim.size())]);
      break;
    case 5: {
      Json copy = *all[below(random, all.size())];
      victim = std::move(copy);
      break;
    }
    case 6:
      if (victim.is_string()) {
        auto text = victim.get<std::string>();
        mutate_bytes(text, random);
        for (char& c : text) c = static_cast<char>(c & 0x7F);
        victim = text;
      } else if (victim.is_number_integer()) {
        // Unsigned: past the ends it wraps, which is one more thing to be read.
        victim = static_cast<int64_t>(victim.get<uint64_t>() + below(random, 5) - 2);
      }
      break;
    default:
      if (victim.is_object() && !victim.empty()) {
        auto it = victim.begin();
        std::advance(it, below(random, victim.size()));
        Json value = *it;
        victim.erase(it);
        static const char* const tags[] = {"as_none",
                                           "as_tensor",
                                           "as_tensors",
                                           "as_int",
                                           "as_ints",
                                           "as_float",
                                           "as_string",
                                           "as_sym_int",
                                           "as_sym_ints",
                                           "as_graph",
                                           "as_expr",
                                           "as_bool",
                                           "parameter",
                                           "buffer",
                                           "user_input",
                                           "name",
                                           "as_optional_tensors",
                                           "as_scalar_type",
                                           "as_device"};
        victim[tags[below(random, std::size(tags))]] = std::move(value);
      }
  }
}

// A zip archive with these entries, stored, with right checksums.
inline std::string make_zip(const std::vector<std::pair<std::string, std::string>>& entries,
                            uint32_t (*crc32)(const void*, uint64_t, uint32_t)) {
  std::string zip, directory;
  auto put = [](std::string& to, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) to += static_cast<char>(i < 8 ? v >> (8 * i) : 0);
  };
  for (const auto& [name, data] : entries) {
    const size_t offset = zip.size();
    std::string common;
    put(common, 0, 2);  // flags
    put(common, 0, 2);  // stored
    put(common, 0, 4);  // time
    put(common, crc32(data.data(), data.size(), 0), 4);
    put(common, data.size(), 4);
    put(common, data.size(), 4);
    put(common, name.size(), 2);
    put(common, 0, 2);
    put(zip, 0x04034b50, 4);
    put(zip, 20, 2);
    zip += common + name + data;
    put(directory, 0x02014b50, 4);
    put(directory, 20, 2);
    put(directory, 20, 2);
    directory += common;
    put(directory, 0, 2 + 2 + 2 + 4);
    put(directory, offset, 4);
    directory += name;
  }
  const size_t start = zip.size();
  zip += directory;
  put(zip, 0x06054b50, 4);
  put(zip, 0, 4);
  put(zip, entries.size(), 2);
  put(zip, entries.size(), 2);
  put(zip, directory.size(), 4);
  put(zip, start, 4);
  put(zip, 0, 2);
  return zip;
}

// A broken copy of an archive: its bytes as they are, or an entry's content with everything around it right again.
inline std::string mutate_archive(const std::string& bytes, std::vector<std::pair<std::string, std::string>> entries,
                                  Random& random, uint32_t (*crc32)(const void*, uint64_t, uint32_t)) {
  if (chance(random, 4) || entries.empty()) {
    std::string broken = bytes;
    mutate_bytes(broken, random);
    return broken;
  }
  auto& entry = entries[below(random, entries.size())];
  auto* target = &entry;
  // Most of what there is to get wrong is in the documents.
  if (!chance(random, 4)) {
    for (auto& e : entries) {
      if (e.first.ends_with(".json") && (chance(random, 2) || !target->first.ends_with(".json"))) target = &e;
    }
  }
  if (target->first.ends_with(".json") && !chance(random, 5)) {
    auto document = nlohmann::json::parse(target->second, nullptr, false);
    const size_t rounds = 1 + below(random, 3);
    for (size_t i = 0; i < rounds && !document.is_discarded(); ++i) mutate_json(document, random);
    target->second = document.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  } else if (chance(random, 6)) {
    target->first += "x";
  } else {
    mutate_bytes(target->second, random);
  }
  return make_zip(entries, crc32);
}

}  // namespace plumb::fuzz
