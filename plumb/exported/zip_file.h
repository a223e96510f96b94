// Reads untrusted zip archives.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "plumb/core/input_file.h"

namespace plumb {

// The remedy for an archive that is damaged, or none that torch writes today.
inline constexpr const char* kWriteAgain =
    "get the file again, or write it with torch.save or torch.export.save of PyTorch 1.6 or newer";

struct ZipEntry {
  std::string name;     // as in the archive, with its top folder
  uint64_t offset = 0;  // offset of the data in the file
  uint64_t stored_size = 0;
  uint64_t size = 0;  // after inflating
  uint32_t crc = 0;
  bool deflated = false;
};

// Every number in the archive is checked against the file's size when it is opened: entries lie inside the file, do not
// overlap, and have distinct plain names (no "..", no absolute paths). What entries inflate to and what texts become as
// documents takes `max_memory` bytes together (0: 128 MiB and 16 times the file), so a small file cannot ask for much.
// Checksums are verified on reading. Zip64, stored and deflated entries; no encryption. Throws Error (BadFile).
class ZipFile {
 public:
  explicit ZipFile(std::string path, uint64_t max_memory = 0);
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
  // Returns the text of an entry for parse_json(). Throws if its document would take too much memory.
  std::string read_text(const ZipEntry& entry) const;
  // `into` has room for entry.size bytes.
  void read_into(const ZipEntry& entry, void* into) const;

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& entry = "") const;
  void open(uint64_t max_memory);
  // Throws if the file has asked for more memory than it may.
  void ask(uint64_t bytes, const std::string& entry) const;
  void read_at(uint64_t offset, void* into, uint64_t size) const;
  void read_directory(uint64_t offset, uint64_t size, uint64_t count);
  void check_layout(uint64_t directory_offset);

  std::string path_;
  std::optional<InputFile> file_;  // none where the bytes are in memory
  uint64_t file_size_ = 0;
  uint64_t max_memory_ = 0;
  mutable std::atomic<uint64_t> asked_ = 0;  // bytes so far
  std::string_view memory_;
  std::string top_;
  std::vector<ZipEntry> entries_;
  std::unordered_map<std::string, size_t> by_name_;
};

}  // namespace plumb
