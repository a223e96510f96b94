// Reads untrusted zip archives.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plumb/core/input_file.h"

namespace plumb {

struct ZipEntry {
  std::string name;     // as in the archive, with its top folder
  uint64_t offset = 0;  // of the data in the file
  uint64_t stored_size = 0;
  uint64_t size = 0;  // after inflating
  uint32_t crc = 0;
  bool deflated = false;
};

// Every number in the archive is checked against the file's size when it is opened: entries lie inside the file, do not
// overlap, have distinct plain names (no "..", no absolute paths), and the sum of inflated sizes is bounded by
// `max_inflated` (0: 64 MiB and 64 times the file), so a small file cannot ask for much memory. Checksums are verified
// on reading. Zip64, stored and deflated entries; no encryption. Throws Error (BadFile).
class ZipFile {
 public:
  explicit ZipFile(std::string path, uint64_t max_inflated = 0);
  // An archive in memory, which must outlive this; `name` is for messages.
  ZipFile(std::string name, std::string_view bytes);
  ZipFile(const ZipFile&) = delete;
  ZipFile& operator=(const ZipFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<ZipEntry>& entries() const { return entries_; }
  // Returns the folder that every entry is in, with its slash ("model/"); "" if there is none.
  const std::string& top_folder() const { return top_; }

  // By the name below the top folder; null if there is none.
  const ZipEntry* find(std::string_view name) const;
  const ZipEntry& get(std::string_view name) const;  // throws
  std::string read(const ZipEntry& entry) const;
  // Returns the text of an entry. Throws if it inflates beyond 1 MiB + 16 x the file's size, or if its values may take
  // more than 64 MiB + 32 x the file's size when they are parsed.
  std::string read_text(const ZipEntry& entry) const;
  // `into` has room for entry.size bytes.
  void read_into(const ZipEntry& entry, void* into) const;

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& entry = "") const;
  void open(uint64_t max_inflated);
  void read_at(uint64_t offset, void* into, uint64_t size) const;
  void read_directory(uint64_t offset, uint64_t size, uint64_t count);
  void check_layout(uint64_t directory_offset, uint64_t max_inflated);

  std::string path_;
  std::optional<InputFile> file_;  // none where the bytes are in memory
  uint64_t file_size_ = 0;
  std::string_view memory_;
  std::string top_;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace plumb
