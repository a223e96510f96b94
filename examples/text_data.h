// Bytes of text files as training batches, the same for the same seed on every machine.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace example {

// A file, or every .py, .txt and .md file directly in a folder, in the order of their names, up to `limit` bytes.
inline std::vector<uint8_t> read_text(const std::string& path, size_t limit = 4 << 20) {
  namespace fs = std::filesystem;
  std::vector<fs::path> files;
  if (fs::is_directory(path)) {
    for (const auto& entry : fs::directory_iterator(path)) {
      const auto ext = entry.path().extension();
      if (entry.is_regular_file() && (ext == ".py" || ext == ".txt" || ext == ".md")) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  } else if (fs::is_regular_file(path)) {
    files.push_back(path);
  }
  std::vector<uint8_t> bytes;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    bytes.insert(bytes.end(), std::istreambuf_iterator<char>(in), {});
    if (bytes.size() > limit) break;
  }
  bytes.resize(std::min(bytes.size(), limit));
  if (bytes.size() < 10'000) {
    throw std::runtime_error("'" + path + "' holds " + std::to_string(bytes.size()) +
                             " bytes of text (.py, .txt, .md); training needs at least 10,000");
  }
  return bytes;
}

struct Batch {
  at::Tensor ids, targets;  // (batch, time), int64
};

class TextBatches {
 public:
  TextBatches(std::vector<uint8_t> text, int64_t batch, int64_t time, uint64_t seed)
      : text_(std::move(text)), batch_(batch), time_(time), random_(seed) {}

  Batch next() {
    Batch b{at::empty({batch_, time_}, at::kLong), at::empty({batch_, time_}, at::kLong)};
    auto ids = b.ids.accessor<int64_t, 2>(), targets = b.targets.accessor<int64_t, 2>();
    for (int64_t i = 0; i < batch_; ++i) {
      // Not std::uniform_int_distribution, whose numbers differ between libraries.
      const size_t start = random_() % (text_.size() - static_cast<size_t>(time_) - 1);
      for (int64_t t = 0; t < time_; ++t) {
        ids[i][t] = text_[start + static_cast<size_t>(t)];
        targets[i][t] = text_[start + static_cast<size_t>(t) + 1];
      }
    }
    return b;
  }

 private:
  std::vector<uint8_t> text_;
  int64_t batch_, time_;
  std::mt19937_64 random_;
};

}  // namespace example
