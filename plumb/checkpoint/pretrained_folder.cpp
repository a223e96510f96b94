// Folders that transformers reads, written part by part.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>

#include "plumb/checkpoint/pretrained.h"
#include "plumb/core/error.h"
#include "plumb/core/input_file.h"
#include "plumb/core/output_file.h"
#include "plumb/exported/json_doc.h"
#include "plumb/tensors/parameter_tag.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;

// Files of tokenizers and processors, as transformers names them; none is large.
constexpr const char* kCopied[] = {"added_tokens.json",
                                   "audio_tokenizer_config.json",
                                   "bpe.codes",
                                   "byte_maps.json",
                                   "chat_template.jinja",
                                   "chat_template.json",
                                   "dict.txt",
                                   "emoji.json",
                                   "entity_vocab.json",
                                   "merges.txt",
                                   "normalizer.json",
                                   "preprocessor_config.json",
                                   "processor_config.json",
                                   "prophetnet.tokenizer",
                                   "sentencepiece.bpe.model",
                                   "sentencepiece.model",
                                   "source.spm",
                                   "special_tokens_map.json",
                                   "spiece.model",
                                   "spm.model",
                                   "spm_char.model",
                                   "target.spm",
                                   "target_vocab.json",
                                   "tekken.json",
                                   "tiktoken.model",
                                   "tokenizer.json",
                                   "tokenizer.model",
                                   "tokenizer_config.json",
                                   "video_preprocessor_config.json",
                                   "vocab-src.json",
                                   "vocab-tgt.json",
                                   "vocab.json",
                                   "vocab.txt",
                                   "word_pronunciation.json",
                                   "word_shape.json"};
// Holds templates of chats by name: NAME.jinja.
constexpr const char* kTemplates = "additional_chat_templates";
constexpr uint64_t kMostCopied = uint64_t{1} << 28;

// The tensors that a part writes: the stored names of plain tensors with their names in its state, and its conversions.
struct Share {
  std::map<std::string, std::string> plain;
  std::vector<const Pretrained::Conversion*> conversions;
  bool empty() const { return plain.empty() && conversions.empty(); }
};

std::vector<Share> shares(const StateParts& parts, const Pretrained& as) {
  std::vector<Share> result(parts.size());
  std::set<std::string> taken;
  for (size_t p = 0; p < parts.size(); ++p) {
    for (const Attr& attr : *parts[p]) {
      const auto name = as.names.find(attr.name);
      if (name != as.names.end() && taken.insert(name->second).second) result[p].plain.emplace(name->second, attr.name);
    }
  }
  for (const auto& conversion : as.conversions) {
    const auto has = [&](const State* state) {
      return std::ranges::all_of(conversion.state, [&](const std::string& name) { return state->contains(name); });
    };
    const auto whole = std::ranges::find_if(parts, has);
    if (whole == parts.end()) {
      const bool nowhere =
          std::ranges::none_of(parts, [&](const State* state) { return state->contains(conversion.state[0]); });
      if (nowhere) continue;  // a tensor that the program does not use
      throw Error(ErrorKind::InvalidArgument,
                  "'" + conversion.state[0] + "' and what the folder has in one piece with it are in several stages",
                  "", "a cut between modules: --at MODULE");
    }
    result[static_cast<size_t>(whole - parts.begin())].conversions.push_back(&conversion);
  }
  return result;
}

// Returns the file of a part among those that have something to write.
std::string shard_name(const std::vector<Share>& all, size_t part) {
  size_t place = 0, count = 0;
  for (size_t p = 0; p < all.size(); ++p) {
    place += p <= part && !all[p].empty();
    count += !all[p].empty();
  }
  if (count <= 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", place, count);
  return name;
}

at::Tensor tensor_of(const State& state, const std::string& name) {
  const at::Tensor& tensor = state.get(name).tensor;
  if (parameter_data(tensor)) {
    throw Error(ErrorKind::InvalidArgument,
                "'" + name + "' is a unit-scaled weight, and means something else in a model of transformers", "",
                "plumb scale --fold, which gives plain weights of the same function, and then save");
  }
  return tensor.detach();
}

// The tensors of a part that was never loaded: they are copied from the folder it would have been loaded from.
class Unread {
 public:
  explicit Unread(std::string source) : source_(std::move(source)) {}
  at::Tensor read(const std::string& stored, const std::string& name) {
    if (source_.empty())
      throw Error(ErrorKind::InvalidState, "'" + name + "' has no values to save", "", "load its weights first");
    if (std::error_code error; !folder_ && !fs::exists(source_, error)) {
      throw Error(ErrorKind::InvalidState,
                  "'" + name + "' has no values to save: " + source_ + ", which has them, is not there any more", "",
                  "that folder in its place, and save again");
    }
    if (!folder_) folder_ = std::make_unique<TensorFolder>(source_);
    return folder_->read(stored);
  }

 private:
  std::string source_;
  std::unique_ptr<TensorFolder> folder_;
};

void write_index(const fs::path& folder, const StateParts& parts, const std::vector<Share>& all) {
  Json map = Json::object();
  uint64_t total = 0;
  for (size_t p = 0; p < all.size(); ++p) {
    const std::string file = shard_name(all, p);
    for (const auto& [stored, name] : all[p].plain) {
      map[stored] = file;
      total += parts[p]->get(name).tensor.nbytes();
    }
    for (const auto* conversion : all[p].conversions) {
      for (const std::string& stored : conversion->stored) map[stored] = file;
      for (const std::string& name : conversion->state) total += parts[p]->get(name).tensor.nbytes();
    }
  }
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(map)}};
  write_file_atomically(folder / "model.safetensors.index.json", index.dump(2) + "\n");
}

// Calls `function` with the name and the bytes of each file of the tokenizer that is in the folder.
template <class Function>
void for_files_to_copy(const std::string& source, const Function& function) {
  if (source.empty()) return;
  std::error_code error;
  std::vector<std::string> names(std::begin(kCopied), std::end(kCopied));
  for (fs::directory_iterator it(fs::path(source) / kTemplates, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".jinja") names.push_back((kTemplates / it->path().filename()).string());
  }
  for (const std::string& name : names) {
    if (fs::is_regular_file(fs::path(source) / name, error))
      function(name, read_file_of_folder(source, name, kMostCopied));
  }
}

}  // namespace

void check_files_to_copy(const std::string& source) {
  for_files_to_copy(source, [](const std::string&, const std::string&) {});
}

void check_weights_to_write(const StateParts& parts, const Pretrained& as) {
  const auto all = shares(parts, as);
  for (size_t p = 0; p < all.size(); ++p) {
    for (const auto& [stored, name] : all[p].plain) tensor_of(*parts[p], name);
    for (const Pretrained::Conversion* conversion : all[p].conversions) {
      for (const std::string& name : conversion->state) tensor_of(*parts[p], name);
    }
  }
}

void check_new_folder(const std::string& out) {
  std::error_code error;
  fs::create_directories(out, error);
  if (error) throw Error(ErrorKind::CannotWrite, out + ": cannot be made: " + error.message(), "", "another folder");
  const bool empty = fs::is_empty(out, error);
  if (error || !empty) {
    throw Error(ErrorKind::CannotWrite, out + (error ? ": cannot be read: " + error.message() : ": is not empty"), "",
                "a folder that is new");
  }
}

void write_weights(const std::string& out, const StateParts& parts, size_t part, const Pretrained& as,
                   const std::string& source) {
  const auto all = shares(parts, as);
  const Share& share = all.at(part);
  if (share.empty()) return;
  std::error_code error;
  fs::create_directories(out, error);
  const State& state = *parts[part];
  Unread unread(source);
  NamedTensors tensors;
  for (const auto& [stored, name] : share.plain) {
    const at::Tensor tensor = tensor_of(state, name);
    tensors.emplace_back(stored, tensor.is_meta() ? value_for(name, tensor, unread.read(stored, name)) : tensor);
  }
  for (const Pretrained::Conversion* conversion : share.conversions) {
    std::vector<at::Tensor> from;
    for (const std::string& name : conversion->state) from.push_back(tensor_of(state, name));
    std::vector<at::Tensor> results;
    if (from[0].is_meta()) {
      for (const std::string& stored : conversion->stored)
        results.push_back(unread.read(stored, conversion->state[0]).to(from[0].scalar_type()));
    } else {
      results = run_conversion(*conversion->save, conversion->state, conversion->stored, from);
    }
    for (size_t i = 0; i < results.size(); ++i) tensors.emplace_back(conversion->stored[i], results[i]);
  }
  write_safetensors((fs::path(out) / shard_name(all, part)).string(), tensors);
}

void finish_weights_folder(const std::string& out, const StateParts& parts, const Pretrained& as,
                           const std::string& source) {
  const fs::path folder(out);
  const auto all = shares(parts, as);
  if (shard_name(all, 0) != "model.safetensors") write_index(folder, parts, all);
  for (const auto& [name, text] : as.files) write_file_atomically(folder / name, text);
  // Last: whatever is wrong with one, the weights can be loaded.
  for_files_to_copy(
      source, [&](const std::string& name, const std::string& bytes) { write_file_atomically(folder / name, bytes); });
}

}  // namespace plumb
