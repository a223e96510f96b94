#include "plumb/exported/zip_file.h"

#include <algorithm>
#include <cstring>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/json_text.h"

// libtorch_cpu carries miniz; this is its one-call inflater. Flags 0: raw deflate data, output not a ring.
extern "C" size_t tinfl_decompress_mem_to_mem(void* out, size_t out_size, const void* in, size_t in_size, int flags);

namespace plumb {
namespace {

constexpr uint32_t kEndOfDirectory = 0x06054b50, kEnd64 = 0x06064b50, kEnd64Locator = 0x07064b50;
constexpr uint32_t kDirectoryEntry = 0x02014b50, kLocalHeader = 0x04034b50;

uint16_t u16(const unsigned char* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
uint32_t u32(const unsigned char* p) { return static_cast<uint32_t>(u16(p)) | static_cast<uint32_t>(u16(p + 2)) << 16; }
uint64_t u64(const unsigned char* p) { return static_cast<uint64_t>(u32(p)) | static_cast<uint64_t>(u32(p + 4)) << 32; }

// Returns whether a name means one place below the top folder and nothing else.
bool plain_name(std::string_view name) {
  if (name.empty() || name.front() == '/' || name.find('\\') != name.npos || name.find('\0') != name.npos) return false;
  size_t start = 0;
  while (start <= name.size()) {
    const size_t end = std::min(name.find('/', start), name.size());
    const std::string_view part = name.substr(start, end - start);
    if (part == ".." || part == ".") return false;
    start = end + 1;
  }
  return true;
}

}  // namespace

void ZipFile::fail(const std::string& what, const std::string& entry) const {
  throw Error(ErrorKind::BadFile, path_ + ": " + what, entry.empty() ? "" : "entry " + entry, kWriteAgain);
}

void ZipFile::read_at(uint64_t offset, void* into, uint64_t size) const {
  if (file_) return file_->read_at(offset, into, size);
  if (offset > file_size_ || size > file_size_ - offset) fail("ends before byte " + std::to_string(offset + size));
  if (size) std::memcpy(into, memory_.data() + offset, size);
}

ZipFile::ZipFile(std::string path, uint64_t max_memory) : path_(std::move(path)) {
  file_.emplace(path_);
  file_size_ = file_->size();
  open(max_memory);
}

ZipFile::ZipFile(std::string name, std::string_view bytes)
    : path_(std::move(name)), file_size_(bytes.size()), memory_(bytes) {
  open(0);
}

void ZipFile::open(uint64_t max_memory) {
  max_memory_ = max_memory ? max_memory : (uint64_t{128} << 20) + 16 * file_size_;
  const uint64_t tail_size = std::min<uint64_t>(file_size_, 22 + 65535 + 20);
  std::vector<unsigned char> tail(tail_size);
  read_at(file_size_ - tail_size, tail.data(), tail_size);
  int64_t end = static_cast<int64_t>(tail_size) - 22;
  while (end >= 0 && u32(&tail[static_cast<size_t>(end)]) != kEndOfDirectory) --end;
  if (end < 0) fail("is not a zip archive (it may be truncated)");
  const unsigned char* e = &tail[static_cast<size_t>(end)];
  const uint64_t end_offset = file_size_ - tail_size + static_cast<uint64_t>(end);
  uint64_t count = u16(e + 10), size = u32(e + 12), offset = u32(e + 16), limit = end_offset;
  if (end >= 20 && u32(e - 20) == kEnd64Locator) {
    const uint64_t end64 = u64(e - 20 + 8);
    unsigned char b[56];
    if (end64 > end_offset || end_offset - end64 < sizeof b) fail("has a broken zip64 end record");
    read_at(end64, b, sizeof b);
    if (u32(b) != kEnd64) fail("has a broken zip64 end record");
    count = u64(b + 32);
    size = u64(b + 40);
    offset = u64(b + 48);
    limit = end64;
  }
  if (offset > limit || size > limit - offset || count > size / 46) fail("has a directory that does not fit the file");
  read_directory(offset, size, count);
  check_layout(offset);
}

void ZipFile::read_directory(uint64_t offset, uint64_t size, uint64_t count) {
  std::vector<unsigned char> directory(size);
  read_at(offset, directory.data(), size);
  uint64_t at = 0;
  entries_.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    if (size - at < 46 || u32(&directory[at]) != kDirectoryEntry)
      fail("has a broken directory at entry " + std::to_string(i));
    const unsigned char* d = &directory[at];
    const uint64_t name_size = u16(d + 28), extra_size = u16(d + 30), comment_size = u16(d + 32);
    if (size - at - 46 < name_size + extra_size + comment_size)
      fail("has a broken directory at entry " + std::to_string(i));
    ZipEntry entry;
    entry.name.assign(reinterpret_cast<const char*>(d + 46), name_size);
    entry.crc = u32(d + 16);
    entry.stored_size = u32(d + 20);
    entry.size = u32(d + 24);
    uint64_t header = u32(d + 42);
    if (!plain_name(entry.name)) fail("has an entry with a name that is not a plain path");
    // Sizes of 2^32-1 stand in the extra field, in this order.
    const unsigned char* x = d + 46 + name_size;
    for (uint64_t left = extra_size; left >= 4;) {
      const uint64_t id = u16(x), length = u16(x + 2);
      if (length > left - 4) break;
      if (id == 1) {
        const unsigned char* field = x + 4;
        uint64_t rest = length;
        for (uint64_t* number : {&entry.size, &entry.stored_size, &header}) {
          if (*number != 0xFFFFFFFFu) continue;
          if (rest < 8) fail("has a broken zip64 field", entry.name);
          *number = u64(field);
          field += 8;
          rest -= 8;
        }
      }
      x += 4 + length;
      left -= 4 + length;
    }
    const uint16_t flags = u16(d + 8), method = u16(d + 10);
    if (flags & 1) fail("is encrypted", entry.name);
    if (method != 0 && method != 8) fail("uses compression method " + std::to_string(method), entry.name);
    entry.deflated = method == 8;
    if (!entry.deflated && entry.size != entry.stored_size) fail("has two sizes for uncompressed data", entry.name);
    // Deflate makes at most 1032 bytes of one.
    if (entry.deflated && entry.size / 1040 > entry.stored_size)
      fail("claims more data than its bytes can hold", entry.name);
    unsigned char local[30];
    if (header > file_size_ || file_size_ - header < sizeof local) fail("lies outside of the file", entry.name);
    read_at(header, local, sizeof local);
    if (u32(local) != kLocalHeader || u16(local + 26) != name_size) fail("has a broken header", entry.name);
    entry.offset = header + 30 + u16(local + 26) + u16(local + 28);
    if (entry.offset > offset || entry.stored_size > offset - entry.offset)
      fail("lies outside of the file", entry.name);
    std::string local_name(name_size, '\0');
    read_at(header + 30, local_name.data(), name_size);
    if (local_name != entry.name) fail("has two names", entry.name);
    at += 46 + name_size + extra_size + comment_size;
    if (entry.name.back() == '/') continue;  // a folder
    if (!by_name_.emplace(entry.name, entries_.size()).second) fail("is there twice", entry.name);
    entries_.push_back(std::move(entry));
  }
}

void ZipFile::check_layout(uint64_t directory_offset) {
  if (entries_.empty()) fail("is an empty archive");
  std::vector<const ZipEntry*> by_offset;
  for (const ZipEntry& e : entries_) by_offset.push_back(&e);
  std::sort(by_offset.begin(), by_offset.end(), [](auto* a, auto* b) { return a->offset < b->offset; });
  for (size_t i = 0; i < by_offset.size(); ++i) {
    const ZipEntry& e = *by_offset[i];
    const uint64_t next = i + 1 < by_offset.size() ? by_offset[i + 1]->offset : directory_offset;
    if (e.offset + e.stored_size > next) fail("overlaps with another entry", e.name);
    if (e.deflated) ask(e.size, e.name);
  }
  const std::string& first = entries_.front().name;
  const size_t slash = first.find('/');
  if (slash == first.npos) return;
  top_ = first.substr(0, slash + 1);
  for (const ZipEntry& e : entries_) {
    if (!e.name.starts_with(top_)) top_.clear();
  }
}

const ZipEntry* ZipFile::find(std::string_view name) const {
  auto it = by_name_.find(top_ + std::string(name));
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

const ZipEntry& ZipFile::get(std::string_view name) const {
  const ZipEntry* entry = find(name);
  if (!entry) fail("has no entry " + top_ + std::string(name));
  return *entry;
}

std::string ZipFile::read(const ZipEntry& entry) const {
  std::string data(entry.size, '\0');
  read_into(entry, data.data());
  return data;
}

std::string ZipFile::read_text(const ZipEntry& entry) const {
  std::string text = read(entry);
  ask(json_memory(text), entry.name);
  return text;
}

void ZipFile::ask(uint64_t bytes, const std::string& entry) const {
  if ((asked_ += bytes) <= max_memory_) return;
  throw Error(ErrorKind::BadFile,
              path_ + ": asks for more than the " + std::to_string(max_memory_) + " bytes of memory that a file of " +
                  std::to_string(file_size_) + " bytes may take",
              "entry " + entry, "an archive that is not compressed; in C++ also LoadOptions::max_memory_bytes");
}

void ZipFile::read_into(const ZipEntry& entry, void* into) const {
  if (entry.deflated) {
    std::vector<char> packed(entry.stored_size);
    read_at(entry.offset, packed.data(), packed.size());
    char none = 0;  // the inflater takes no null pointers
    const size_t got =
        tinfl_decompress_mem_to_mem(entry.size ? into : &none, entry.size, packed.empty() ? &none : packed.data(),
                                    packed.size(), 4 /* output is not a ring */);
    if (got != entry.size) fail("does not inflate to its size", entry.name);
  } else {
    read_at(entry.offset, into, entry.size);
  }
  if (crc32(into, entry.size) != entry.crc) fail("is damaged: its checksum does not match", entry.name);
}

}  // namespace plumb
