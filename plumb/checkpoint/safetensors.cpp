#include "plumb/checkpoint/safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "plumb/checkpoint/safetensors_header.h"
#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/core/text.h"

namespace plumb {
namespace {

std::string read_header(const std::string& path, const InputFile& file) {
  const auto bad = [&](const std::string& what) {
    throw Error(ErrorKind::BadFile, path + ": " + what, "",
                "get the file again; it is damaged, or no safetensors file");
  };
  unsigned char start[8];
  if (file.size() < 8) bad("is too short for a safetensors file");
  file.read_at(0, start, 8);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | start[i];
  if (length > kLongestSafetensorsHeader)
    bad(c10::str("its header's length is ", length, ", the format's limit is 100000000"));
  if (length > file.size() - 8) bad("ends within its header");
  std::string text(length, '\0');
  file.read_at(8, text.data(), length);
  if (text.empty() || text[0] != '{') bad("its header is no JSON at byte 8");
  return text;
}

// Returns the tensor in the format's layout: dense, little-endian, in memory of the host.
at::Tensor plain(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous(); }

}  // namespace

void check_holdable(const std::string& place, const NamedTensors& tensors) {
  std::set<std::string_view> names;
  for (const auto& [name, tensor] : tensors) {
    const auto refuse = [&, &name = name](ErrorKind kind, const std::string& what, const std::string& remedy) {
      throw Error(kind, place + ": tensor '" + name + "' " + what, "", remedy);
    };
    if (name == "__metadata__" || !is_utf8(name))
      refuse(ErrorKind::InvalidArgument, "has a name that the format cannot hold", "give it another name, in UTF-8");
    if (!names.insert(name).second) refuse(ErrorKind::InvalidArgument, "is given twice", "give every name once");
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
      refuse(ErrorKind::Unsupported, "is not an ordinary dense one with values", "save its values as a dense tensor");
    if (safetensors_dtype(tensor.scalar_type()).empty())
      refuse(ErrorKind::Unsupported,
             std::string("has the dtype ") + at::toString(tensor.scalar_type()) + ", which the format lacks",
             "save it as another dtype");
  }
}

SafetensorsLayout safetensors_layout(const std::string& place, const NamedTensors& tensors,
                                     const std::map<std::string, std::string>& metadata) {
  using nlohmann::json;
  check_holdable(place, tensors);
  SafetensorsLayout made{"{", std::vector<size_t>(tensors.size()), std::vector<uint64_t>(tensors.size())};
  std::iota(made.order.begin(), made.order.end(), 0);
  std::ranges::stable_sort(made.order, std::greater(), [&](size_t i) { return tensors[i].second.element_size(); });
  std::string& text = made.header;
  try {
    if (!metadata.empty()) text += "\"__metadata__\":" + json(metadata).dump() + ",";
    for (const size_t i : made.order) {
      const auto& [name, tensor] = tensors[i];
      made.offsets[i] = made.bytes;
      made.bytes += tensor.nbytes();
      const json entry = {{"dtype", safetensors_dtype(tensor.scalar_type())},
                          {"shape", tensor.sizes().vec()},
                          {"data_offsets", {made.offsets[i], made.bytes}}};
      text += json(name).dump() + ":" + entry.dump() + ",";
    }
  } catch (const json::exception& e) {
    throw Error(ErrorKind::InvalidArgument, place + ": metadata that is no UTF-8: " + e.what());
  }
  if (text.size() > 1) text.pop_back();
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kLongestSafetensorsHeader) {
    throw Error(ErrorKind::InvalidArgument,
                c10::str(place, ": names and metadata of ", tensors.size(),
                         " tensors are longer than the format's limit of 100 MB"),
                "", "write several files");
  }
  return made;
}

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)), file_(path_) {
  const std::string text = read_header(path_, file_);
  const uint64_t data = 8 + text.size();
  SafetensorsHeader header = parse_safetensors_header(path_, text, file_.size() - data);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].offset += data;
    index_.emplace(entries_[i].name, i);
  }
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::get(std::string_view name) const {
  if (const SafetensorsEntry* entry = find(name)) return *entry;
  throw Error(ErrorKind::UnknownName, path_ + ": holds no tensor '" + std::string(name) + "'");
}

at::Tensor SafetensorsFile::read(std::string_view name, Checksum* checksum) const {
  const SafetensorsEntry& entry = get(name);
  const at::Tensor tensor = at::empty(entry.sizes, at::dtype(entry.dtype));
  if (entry.bytes) file_.read_at(entry.offset, tensor.data_ptr(), entry.bytes);
  if (checksum && entry.bytes) checksum->add(tensor.data_ptr(), entry.bytes);
  // A byte that is neither 0 nor 1 is no bool, but C++ would take it for one.
  if (entry.dtype == at::kBool) tensor.view(at::kByte).ne_(0);
  return tensor;
}

void SafetensorsFile::add_to(std::string_view name, Checksum& checksum) const {
  const SafetensorsEntry& entry = get(name);
  std::string piece(std::min<uint64_t>(entry.bytes, uint64_t{1} << 20), '\0');
  for (uint64_t done = 0; done < entry.bytes; done += piece.size()) {
    piece.resize(std::min<uint64_t>(piece.size(), entry.bytes - done));
    file_.read_at(entry.offset + done, piece.data(), piece.size());
    checksum.add(piece.data(), piece.size());
  }
}

std::vector<Checksum> write_safetensors(const std::string& path, const NamedTensors& tensors,
                                        const std::map<std::string, std::string>& metadata) {
  const SafetensorsLayout layout = safetensors_layout(path, tensors, metadata);
  const std::string& header = layout.header;
  OutputFile file(path);
  std::string length;
  for (int i = 0; i < 8; ++i) length += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  file.write(length.data(), length.size());
  file.write(header.data(), header.size());
  std::vector<Checksum> sums(tensors.size());
  for (const size_t i : layout.order) {
    const at::Tensor tensor = plain(tensors[i].second);
    const void* bytes = tensor.numel() ? tensor.data_ptr() : "";
    file.write(bytes, tensor.nbytes());
    file.check();
    sums[i].add(bytes, tensor.nbytes());
  }
  file.commit();
  return sums;
}

}  // namespace plumb
