// Ways to break a seed of a reader that keep what the reader checks first: lengths, checksums, the form of a document.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plumb/core/checksum.h"
#include "plumb/exported/zip_file.h"
#include "plumb/pipeline/transport/message.h"
#include "plumb/recording/history_format.h"
#include "tests/fuzz/mutate.h"

namespace plumb::fuzz {

using nlohmann::json;

inline std::string broken_bytes(const std::string& seed, Random& random) {
  std::string bytes = seed;
  mutate_bytes(bytes, random);
  return bytes;
}

// A whole line or word of another place, beside or instead of what stands there, is a likelier mistake than a flipped
// bit.
inline std::string broken_text(const std::string& seed, Random& random) {
  std::string text = seed;
  for (const char* ends : {"\n", " ,()[]=\n"}) {
    if (!chance(random, 3) || text.empty()) continue;
    const size_t from = text.find_first_of(ends, below(random, text.size()));
    const size_t to = text.find_first_of(ends, below(random, text.size()));
    if (from == text.npos || to == text.npos) continue;
    const std::string piece = text.substr(from, text.find_first_of(ends, from + 1) - from);
    const size_t end = std::min(text.find_first_of(ends, to + 1), text.size());
    text.replace(to, chance(random, 2) ? end - to : 0, piece);
  }
  const bool numbers = chance(random, 2);
  for (bool more = numbers; more; more = chance(random, 2)) mutate_number(text, random);
  if (!numbers || chance(random, 4)) mutate_bytes(text, random);
  return text;
}

inline std::string broken_json(const std::string& seed, Random& random) {
  json document = json::parse(seed, nullptr, false);
  if (document.is_discarded() || chance(random, 4)) return broken_text(seed, random);
  for (size_t rounds = 1 + below(random, 3); rounds > 0; --rounds) mutate_json(document, random);
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

inline std::string broken_archive(const std::string& seed, Random& random) {
  ZipFile zip("seed", std::string_view(seed));
  std::vector<std::pair<std::string, std::string>> entries;
  for (const ZipEntry& e : zip.entries()) entries.emplace_back(e.name, zip.read(e));
  return mutate_archive(seed, std::move(entries), random, crc32);
}

// Breaks a file whose JSON header's length stands at byte `at`: the header changes, and its length fits again.
inline std::string broken_header(const std::string& seed, size_t at, Random& random) {
  if (chance(random, 4)) return broken_bytes(seed, random);
  uint64_t length = 0;
  std::memcpy(&length, seed.data() + at, 8);
  json header = json::parse(seed.substr(at + 8, length));
  if (chance(random, 2)) {
    mutate_json(header, random);
  } else {
    // Texts within the header: the graph, and JSON of their own.
    auto text = header.begin();
    std::advance(text, below(random, header.size()));
    if (text->is_string()) *text = broken_json(text->get<std::string>(), random);
  }
  const std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  const uint64_t size = text.size();
  return seed.substr(0, at) + std::string(reinterpret_cast<const char*>(&size), 8) + text +
         seed.substr(at + 8 + length);
}

inline std::string broken_stage(const std::string& seed, Random& random) { return broken_header(seed, 8, random); }
inline std::string broken_safetensors(const std::string& seed, Random& random) {
  return broken_header(seed, 0, random);
}

// Most are a liar's: the checksum of the values is right.
inline std::string broken_checkpoint(const std::string& seed, Random& random) {
  const std::string text = broken_json(seed, random);
  json document = json::parse(text, nullptr, false);
  if (!document.is_object() || chance(random, 4)) return text;
  document.erase("checksum");
  const std::string dumped = document.dump(-1, ' ', false, json::error_handler_t::replace);
  document["checksum"] = crc32(dumped.data(), dumped.size());
  return document.dump(-1, ' ', false, json::error_handler_t::replace);
}

// Most broken records have a right checksum.
inline std::string broken_history(const std::string& seed, Random& random) {
  std::string bytes = broken_bytes(seed, random);
  if (chance(random, 4)) return bytes;
  for (size_t at = 16; at + sizeof(history_format::Head) <= bytes.size();) {
    history_format::Head head;
    std::memcpy(&head, bytes.data() + at, sizeof head);
    if (head.length > bytes.size() - at - sizeof head) break;
    head.crc = history_format::checksum(head, std::string_view(bytes).substr(at + sizeof head, head.length));
    std::memcpy(bytes.data() + at, &head, sizeof head);
    at += sizeof head + head.length;
  }
  return bytes;
}

// Most are a liar's: the checksums are right, the length often is.
inline std::string broken_message(const std::string& seed, Random& random) {
  std::string bytes = broken_bytes(seed, random);
  wire::Prologue p;
  if (bytes.size() < sizeof p || chance(random, 8)) return bytes;
  std::memcpy(&p, bytes.data(), sizeof p);
  if (!chance(random, 4)) p.magic = wire::kMagic;
  if (!chance(random, 4)) p.content = wire::Content::Values;
  if (!chance(random, 4)) p.total_bytes = static_cast<int64_t>(bytes.size());
  p.body_sum = crc32(bytes.data() + sizeof p, bytes.size() - sizeof p);
  wire::seal(p);
  std::memcpy(bytes.data(), &p, sizeof p);
  return bytes;
}

}  // namespace plumb::fuzz
