#include "plumb/training/data/batches.h"

#include "plumb/core/error.h"
#include "plumb/core/mix_bits.h"

namespace plumb {

EpochBatches::EpochBatches(std::unique_ptr<Samples> samples, int64_t rows_of_batch, bool shuffle, uint64_t seed)
    : samples_(std::move(samples)), rows_(rows_of_batch), shuffle_(shuffle), seed_(seed) {
  if (!samples_ || samples_->rows() < 1 || rows_ < 1)
    throw Error(ErrorKind::InvalidArgument, "batches need samples, at least one row of them and one row a batch");
}

Batch EpochBatches::next() {
  const int64_t all = samples_->rows();
  std::vector<int64_t> rows;
  rows.reserve(static_cast<size_t>(rows_));
  while (static_cast<int64_t>(rows.size()) < rows_) {
    const int64_t epoch = drawn_ / all;
    const Permutation order(all, mix_bits(seed_) ^ static_cast<uint64_t>(epoch));
    const int64_t end = std::min((epoch + 1) * all, drawn_ + rows_ - static_cast<int64_t>(rows.size()));
    for (; drawn_ < end; ++drawn_) rows.push_back(shuffle_ ? order(drawn_ % all) : drawn_ % all);
  }
  return samples_->read(rows);
}

nlohmann::json EpochBatches::state() { return {{"rows", drawn_}, {"epoch", drawn_ / samples_->rows()}}; }

void EpochBatches::load_state(const nlohmann::json& state) {
  const auto rows = state.is_object() ? state.find("rows") : state.end();
  if (!state.is_object() || rows == state.end() || !rows->is_number_integer() || rows->get<int64_t>() < 0 ||
      rows->get<int64_t>() > int64_t{1} << 60) {
    throw Error(ErrorKind::BadFile, "the checkpoint's position in the data is no number of rows", "",
                "a checkpoint of a training on files");
  }
  drawn_ = rows->get<int64_t>();
}

std::string EpochBatches::identity() const { return samples_->identity(); }

ReadAhead::ReadAhead(std::unique_ptr<BatchSource> source, size_t ahead)
    : source_(std::move(source)), ahead_(std::max<size_t>(ahead, 1)) {
  if (!source_) throw Error(ErrorKind::InvalidArgument, "ReadAhead has no source of batches");
  state_ = source_->state();
}

ReadAhead::~ReadAhead() { stop(); }

void ReadAhead::start() {
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void ReadAhead::stop() {
  {
    const std::lock_guard lock(lock_);
    closing_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  closing_ = false;
  read_.clear();
}

void ReadAhead::run() {
  for (;;) {
    {
      std::unique_lock lock(lock_);
      changed_.wait(lock, [&] { return closing_ || read_.size() < ahead_; });
      if (closing_) return;
    }
    Read read;
    try {
      read.batch = source_->next();
      read.after = source_->state();
    } catch (...) {
      read.failure = std::current_exception();
    }
    const bool failed = read.failure != nullptr;
    {
      const std::lock_guard lock(lock_);
      read_.push_back(std::move(read));
    }
    changed_.notify_all();
    if (failed) return;
  }
}

Batch ReadAhead::next() {
  start();
  std::unique_lock lock(lock_);
  changed_.wait(lock, [&] { return !read_.empty(); });
  Read read = std::move(read_.front());
  read_.pop_front();
  lock.unlock();
  changed_.notify_all();
  if (read.failure) {
    stop();  // the next call begins again
    std::rethrow_exception(read.failure);
  }
  state_ = std::move(read.after);
  return std::move(read.batch);
}

nlohmann::json ReadAhead::state() { return state_; }

void ReadAhead::load_state(const nlohmann::json& state) {
  stop();
  source_->load_state(state);
  state_ = state;
}

Permutation::Permutation(int64_t n, uint64_t key) : n_(static_cast<uint64_t>(n)) {
  if (n < 1 || n > int64_t{1} << 62)
    throw Error(ErrorKind::InvalidArgument, "a permutation of " + std::to_string(n) + " numbers", "", "1 to 2^62");
  while (2 * half_bits_ < 62 && (n_ - 1) >> (2 * half_bits_) != 0) ++half_bits_;
  mask_ = (uint64_t{1} << half_bits_) - 1;
  for (size_t round = 0; round < keys_.size(); ++round) keys_[round] = mix_bits(mix_bits(key) + round);
}

int64_t Permutation::operator()(int64_t i) const {
  auto x = static_cast<uint64_t>(i);
  if (x >= n_) {
    throw Error(ErrorKind::InvalidArgument,
                "a permutation of " + std::to_string(n_) + " numbers has no number " + std::to_string(i));
  }
  do {
    uint64_t left = x >> half_bits_, right = x & mask_;
    for (const uint64_t key : keys_) {
      const uint64_t next = left ^ (mix_bits(right ^ key) & mask_);
      left = right;
      right = next;
    }
    x = left << half_bits_ | right;
  } while (x >= n_);
  return static_cast<int64_t>(x);
}

}  // namespace plumb
