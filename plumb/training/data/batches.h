// A training's batches, one after the other, read ahead.
#pragma once

#include <nlohmann/json.hpp>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "plumb/training/data/samples.h"

namespace plumb {

// A permutation of 0 ... n - 1 by a key, in constant memory: a Feistel network over the smallest even number of bits
// that holds n, applied again until the value is below n ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary
// Finite Domains, CT-RSA 2002, section 3). Six rounds; the round function is mix_bits(). Under four applications on
// average. The same on every machine.
class Permutation {
 public:
  // n from 1 to 2^62, else throws Error(InvalidArgument).
  Permutation(int64_t n, uint64_t key);
  // i from 0 to n - 1, else throws Error(InvalidArgument).
  int64_t operator()(int64_t i) const;

 private:
  uint64_t n_, mask_ = 0;
  int half_bits_ = 1;
  std::array<uint64_t, 6> keys_{};
};

// Batches without end. Every rank of a training has an equal one.
class BatchSource {
 public:
  virtual ~BatchSource() = default;
  virtual Batch next() = 0;
  // Returns its position, for a checkpoint: the next batch after load_state(state()) is the one that came next.
  virtual nlohmann::json state() = 0;
  virtual void load_state(const nlohmann::json& state) = 0;
  // Returns Samples::identity() of its samples.
  virtual std::string identity() const = 0;
};

// Rows of samples by epochs: in each every row once, in an order by seed and epoch, or as they stand. A batch may take
// its last rows from the next epoch, so that every batch is whole and no row is left out. Its state is a number: how
// many rows were drawn.
class EpochBatches : public BatchSource {
 public:
  EpochBatches(std::unique_ptr<Samples> samples, int64_t rows_of_batch, bool shuffle, uint64_t seed);
  Batch next() override;
  nlohmann::json state() override;
  // Throws Error(BadFile) for what is no such state.
  void load_state(const nlohmann::json& state) override;
  std::string identity() const override;

 private:
  std::unique_ptr<Samples> samples_;
  const int64_t rows_;
  const bool shuffle_;
  const uint64_t seed_;
  int64_t drawn_ = 0;
};

// Reads another source's batches on a thread, at most `ahead` of them before they are asked for. Its exception is
// thrown by the next() it was for.
class ReadAhead : public BatchSource {
 public:
  explicit ReadAhead(std::unique_ptr<BatchSource> source, size_t ahead = 2);
  ~ReadAhead() override;
  Batch next() override;
  nlohmann::json state() override;
  void load_state(const nlohmann::json& state) override;
  std::string identity() const override { return source_->identity(); }

 private:
  struct Read {
    Batch batch;
    nlohmann::json after;  // the source's state
    std::exception_ptr failure;
  };
  void start();
  void stop();
  void run();

  const std::unique_ptr<BatchSource> source_;
  const size_t ahead_;
  nlohmann::json state_;  // after the last batch that was taken
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Read> read_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace plumb
