#include "plumb/checkpoint/checkpoint_json.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>

#include "plumb/checkpoint/safetensors_header.h"
#include "plumb/core/error.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormatName = "plumb checkpoint";
constexpr int64_t kFormatVersion = 2;
constexpr std::string_view kStep = "step-", kUnfinished = ".writing-";

// Returns the digits after "step-", and what follows them.
std::optional<std::pair<int64_t, std::string_view>> step_and_rest(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  name.remove_prefix(kStep.size());
  const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + digits, step);
  if (digits < 8 || error != std::errc() || end != name.data() + digits) return std::nullopt;
  return std::pair{step, name.substr(digits)};
}

Checksum checksum_of(Json document, int bits) {
  document.erase("checksum");
  const std::string text = document.dump();
  Checksum sum{bits};
  sum.add(text.data(), text.size());
  return sum;
}

std::string to_text(const Checksum& sum) {
  char digits[20];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum.value));
  return digits;
}

// A number is a crc32, 16 digits are a crc64.
Checksum checksum_from(const JsonDoc& doc, const Json& element) {
  if (!element.is_string()) {
    const int64_t value = doc.integer(element);
    if (value < 0 || value > UINT32_MAX) doc.fail(element, "is no checksum");
    return {32, static_cast<uint64_t>(value)};
  }
  const std::string digits = doc.string(element);
  Checksum sum;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), sum.value, 16);
  if (digits.size() != 16 || error != std::errc() || end != digits.data() + 16) doc.fail(element, "is no checksum");
  return sum;
}

const Json* find_checksum(const JsonDoc& doc, const Json& of) {
  const Json* found = doc.find(of, "crc64");
  return found ? found : doc.find(of, "crc32");
}

void check_files(const JsonDoc& doc, const Json& files, const fs::path& folder) {
  for (auto it = doc.object(files).begin(); it != files.end(); ++it) {
    if (!is_plain_file_name(it.key(), ".safetensors") && !is_plain_file_name(it.key(), ".json"))
      doc.fail(*it, "'" + it.key() + "' is no name of a file here");
    const InputFile file((folder / it.key()).string());
    const int64_t bytes = doc.integer(doc.at(*it, "bytes"));
    if (static_cast<uint64_t>(bytes) != file.size()) {
      throw Error(ErrorKind::BadFile,
                  c10::str((folder / it.key()).string(), ": has ", file.size(), " bytes, ", bytes, " were written"));
    }
    const Json* given = find_checksum(doc, *it);
    if (!given) continue;
    const Checksum wanted = checksum_from(doc, *given);
    std::string text(file.size(), '\0');
    file.read_at(0, text.data(), text.size());
    Checksum sum{wanted.bits};
    sum.add(text.data(), text.size());
    if (sum != wanted) throw Error(ErrorKind::BadFile, (folder / it.key()).string() + ": is not as it was written");
  }
}

void check_ties(const JsonDoc& doc, const Json& element, const CheckpointContents& contents) {
  for (const auto& [name, first] : contents.ties) {
    if (contents.model.count(name) || !contents.model.count(first))
      doc.fail(element, "'" + name + "' is tied to '" + first + "', of which one and the other are tensors here");
  }
}

}  // namespace

std::string checkpoint_name(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return std::string(kStep) + digits;
}

std::optional<int64_t> step_of_checkpoint(const std::string& name) {
  const auto found = step_and_rest(name);
  return found && found->second.empty() && checkpoint_name(found->first) == name ? std::optional(found->first)
                                                                                 : std::nullopt;
}

std::optional<int64_t> step_of_unfinished(const std::string& name) {
  const auto found = step_and_rest(name);
  return found && found->second.starts_with(kUnfinished) ? std::optional(found->first) : std::nullopt;
}

std::vector<int64_t> checkpoint_steps(const std::string& run_folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  if (!fs::exists(run_folder, error)) return steps;
  for (fs::directory_iterator it(run_folder, error), end; !error && it != end; it.increment(error)) {
    if (const auto step = step_of_checkpoint(it->path().filename().string())) steps.push_back(*step);
  }
  if (error)
    throw Error(ErrorKind::BadFile, run_folder + ": cannot be read: " + error.message(), "", "name a run's folder");
  std::ranges::sort(steps);
  return steps;
}

bool is_plain_file_name(const std::string& name, const std::string& ending) {
  return name.size() > ending.size() && name.ends_with(ending) &&
         name.find_first_of(std::string_view("/\0", 2)) == name.npos;
}

nlohmann::json tensors_to_json(const std::map<std::string, CheckpointTensor>& tensors) {
  nlohmann::json all = nlohmann::json::object();
  for (const auto& [name, t] : tensors) {
    all[name] = {
        {"file", t.file}, {"dtype", safetensors_dtype(t.dtype)}, {"shape", t.sizes}, {"crc64", to_text(t.checksum)}};
  }
  return all;
}

std::map<std::string, CheckpointTensor> tensors_from_json(const JsonDoc& doc, const Json& element) {
  std::map<std::string, CheckpointTensor> tensors;
  for (auto it = doc.object(element).begin(); it != element.end(); ++it) {
    const auto dtype = dtype_of_safetensors(doc.string(doc.at(*it, "dtype")));
    if (!dtype) doc.fail(*it, "has a dtype that torch does not have");
    const Json* sum = find_checksum(doc, *it);
    if (!sum) doc.fail(*it, "has no checksum");
    CheckpointTensor tensor{doc.string(doc.at(*it, "file")), *dtype, doc.integers(doc.at(*it, "shape")),
                            checksum_from(doc, *sum)};
    if (!is_plain_file_name(tensor.file, ".safetensors"))
      doc.fail(*it, "is in '" + tensor.file + "', which is no name of a file here");
    tensors.emplace(it.key(), std::move(tensor));
  }
  return tensors;
}

std::map<std::string, std::string> texts_from_json(const JsonDoc& doc, const Json& element) {
  std::map<std::string, std::string> texts;
  for (auto it = doc.object(element).begin(); it != element.end(); ++it) texts.emplace(it.key(), doc.string(*it));
  return texts;
}

std::string checkpoint_to_text(const CheckpointContents& contents, const std::map<std::string, CheckpointFile>& files) {
  nlohmann::json document = {{"format", kFormatName},
                             {"version", kFormatVersion},
                             {"step", contents.step},
                             {"state", contents.state},
                             {"model", tensors_to_json(contents.model)},
                             {"optimizer", tensors_to_json(contents.optimizer)},
                             {"ties", contents.ties},
                             {"files", nlohmann::json::object()}};
  for (const auto& [name, file] : files) {
    document["files"][name] = {{"bytes", file.bytes}};
    if (file.checksum) document["files"][name]["crc64"] = to_text(*file.checksum);
  }
  document["checksum"] = to_text(checksum_of(document, 64));
  return document.dump(1);
}

CheckpointContents checkpoint_from_text(const std::string& path, const std::string& folder, std::string_view text) {
  const JsonDoc doc(path, text, 100);
  const Json& root = doc.object(doc.root());
  const Json* format = doc.find(root, "format");
  if (!format || *format != kFormatName) doc.fail(root, "is no checkpoint of plumb");
  const int64_t version = doc.integer(doc.at(root, "version"));
  if (version < 1 || version > kFormatVersion)
    doc.fail(doc.at(root, "version"), "another version than 1 and 2", "read it with the plumb that wrote it");
  const Checksum wanted = checksum_from(doc, doc.at(root, "checksum"));
  if (checksum_of(root, wanted.bits) != wanted) doc.fail(root, "is not as it was written");
  CheckpointContents contents;
  contents.step = doc.integer(doc.at(root, "step"));
  if (root.contains("state")) contents.state = root["state"];
  contents.model = tensors_from_json(doc, doc.at(root, "model"));
  contents.optimizer = tensors_from_json(doc, doc.at(root, "optimizer"));
  contents.ties = texts_from_json(doc, doc.at(root, "ties"));
  check_ties(doc, doc.at(root, "ties"), contents);
  check_files(doc, doc.at(root, "files"), folder);
  return contents;
}

}  // namespace plumb
