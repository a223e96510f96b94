#include "plumb/cli/samples.h"

#include <unistd.h>

#include "plumb/cli/inputs.h"
#include "plumb/core/table.h"
#include "plumb/exported/tensor_file.h"

namespace plumb::cli {
namespace {

const TensorMeta& first_input(const GraphModule& module) {
  const auto inputs = module.graph().placeholders();
  if (inputs.empty() || !inputs[0]->result()->meta() || inputs[0]->result()->meta()->sizes.empty()) {
    throw UsageError("FILE: its first input is no tensor with rows", "export the model on a batch of samples");
  }
  return *inputs[0]->result()->meta();
}

bool is_dynamic(const TensorMeta& meta, size_t dim) { return dim < meta.symbols.size() && !meta.symbols[dim].empty(); }

// A step's rows that cannot be held are wrong use, not a machine that swaps.
void check_memory(int64_t batch, double bytes_of_row) {
  const double needs = static_cast<double>(batch) * bytes_of_row;
  const double has = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  if (needs <= has) return;
  auto gib = [](double bytes) { return short_number(bytes / (1 << 30)) + " GiB"; };
  throw UsageError("--batch: the inputs of a step of " + std::to_string(batch) + " rows need " + gib(needs) +
                       ", this machine has " + gib(has),
                   "a smaller --batch, or fewer --microbatches");
}

// Targets that the loss could not be taken of, before the first step.
void check_targets(const TrainOptions& o, const GraphModule& module, const at::Tensor& targets) {
  const auto outputs = module.graph().output_node()->args();
  if (outputs.empty() || !outputs[0].is_value() || !outputs[0].value()->meta()) return;
  const TensorMeta& meta = *outputs[0].value()->meta();
  const bool mse = o.loss == "mse";
  std::string wanted = mse ? "float" : "i64";
  std::vector<int64_t> sizes(meta.sizes.begin(), meta.sizes.end() - (mse || meta.sizes.empty() ? 0 : 1));
  bool fits = targets.dim() == static_cast<int64_t>(sizes.size()) &&
              (mse ? targets.is_floating_point() : targets.scalar_type() == at::kLong);
  std::string shape;
  for (size_t d = 0; d < sizes.size(); ++d) {
    shape += (d == 0 ? "rows" : ", " + (is_dynamic(meta, d) ? meta.symbols[d] : std::to_string(sizes[d])));
    if (d > 0 && !is_dynamic(meta, d))
      fits = fits && d < static_cast<size_t>(targets.dim()) && targets.size(d) == sizes[d];
  }
  if (fits) return;
  throw UsageError("--targets " + o.targets + ": is " + type_text(targets) + ", --loss " + o.loss + " needs " + wanted +
                       "[" + shape + "] for the model's first output",
                   "targets of that type and shape, or another --loss");
}

// Rows of the table that the first input looks up, if it does.
std::optional<int64_t> vocabulary_of(const GraphModule& module) {
  for (const Node* user : module.graph().placeholders().at(0)->result()->users()) {
    if (!user->is_call() || !user->op_name().ends_with("::embedding") || user->num_inputs() == 0) continue;
    if (const auto& table = user->input(0)->meta(); table && !table->sizes.empty()) return table->sizes[0];
  }
  return std::nullopt;
}

class TokenWindows : public Samples {
 public:
  TokenWindows(const TrainOptions& o, const GraphModule& module, int64_t batch)
      : batch_(batch), generator_(at::detail::createCPUGenerator(static_cast<uint64_t>(o.seed))) {
    const size_t inputs = module.graph().placeholders().size();
    targets_as_input_ = o.loss == "output";
    const TensorMeta& ids = first_input(module);
    if (inputs != (targets_as_input_ ? 2u : 1u) || ids.sizes.size() != 2 || ids.dtype != at::kLong) {
      throw UsageError("--data " + o.data + ": raw tokens need a model of " +
                           (targets_as_input_ ? "ids and targets" : "one input, the ids") + ", i64[batch, length]",
                       "give a .pt or .npy file of the inputs, or another --loss");
    }
    if (o.loss == "mse") throw UsageError("--loss mse: tokens have no numbers to be near", "--loss cross_entropy");
    if (!o.targets.empty()) throw UsageError("--targets: raw tokens are their own targets", "leave --targets out");
    length_ = ids.sizes[1];
    vocabulary_ = vocabulary_of(module);
    data_ = o.data;
    check_memory(batch_, 16.0 * static_cast<double>(length_ + 1));
    tokens_.emplace(o.data, o.token_type == "u8" ? at::kByte : o.token_type == "u16" ? at::kUInt16 : at::kInt);
    if (tokens_->size() < length_ + 1) {
      throw UsageError("--data " + o.data + ": has " + std::to_string(tokens_->size()) + " tokens, one sample needs " +
                           std::to_string(length_ + 1),
                       "a longer file, or another --token-type");
    }
  }

  Batch draw() override {
    const at::Tensor starts = at::randint(tokens_->size() - length_, {batch_}, generator_, at::kLong);
    std::vector<at::Tensor> windows;
    for (int64_t i = 0; i < batch_; ++i) {
      windows.push_back(tokens_->read(starts[i].item<int64_t>(), length_ + 1));
    }
    const at::Tensor all = at::stack(windows);
    const auto largest = all.max().item<int64_t>(), least = all.min().item<int64_t>();
    if (vocabulary_ && (largest >= *vocabulary_ || least < 0)) {
      throw UsageError("--data " + data_ + ": has token " + std::to_string(least < 0 ? least : largest) +
                           ", the model knows 0 to " + std::to_string(*vocabulary_ - 1),
                       "another --token-type, or tokens of the model's own tokenizer");
    }
    const at::Tensor ids = all.narrow(1, 0, length_).contiguous(), next = all.narrow(1, 1, length_).contiguous();
    return targets_as_input_ ? Batch{{ids, next}, {}} : Batch{{ids}, {next}};
  }

 private:
  int64_t batch_, length_ = 0;
  std::optional<int64_t> vocabulary_;
  std::string data_;
  at::Generator generator_;
  bool targets_as_input_ = false;
  std::optional<TokenFile> tokens_;
};

class Rows : public Samples {
 public:
  Rows(const TrainOptions& o, const GraphModule& module, int64_t batch)
      : batch_(batch), generator_(at::detail::createCPUGenerator(static_cast<uint64_t>(o.seed))) {
    for (const c10::IValue& v : read_inputs(module, {o.data}, "--data", false)) {
      if (!v.isTensor())
        throw UsageError("--data " + o.data + ": holds what is no tensor", "tensors with a row a sample");
      inputs_.push_back(v.toTensor());
    }
    if (o.loss != "output") {
      if (o.targets.empty()) throw UsageError("--targets is missing", "--targets FILE.pt, or --loss output");
      const c10::IValue targets = load_tensors(o.targets);
      if (!targets.isTensor())
        throw UsageError("--targets " + o.targets + ": is not one tensor", "one tensor, a row a sample");
      targets_.push_back(targets.toTensor());
      check_targets(o, module, targets_[0]);
    }
    std::vector<at::Tensor> all = inputs_;
    all.insert(all.end(), targets_.begin(), targets_.end());
    for (const at::Tensor& t : all) {
      if (t.dim() == 0 || t.size(0) == 0 || t.size(0) != all[0].size(0)) {
        throw UsageError("--data and --targets: " + type_text(t) + " and " + type_text(all[0]) + " have other rows",
                         "as many rows in each");
      }
    }
    rows_ = all[0].size(0);
    double bytes = 0;
    for (const at::Tensor& t : all) bytes += static_cast<double>(t.nbytes()) / static_cast<double>(rows_);
    check_memory(batch_, bytes);
  }

  Batch draw() override {
    const at::Tensor rows = at::randint(rows_, {batch_}, generator_, at::kLong);
    Batch batch;
    for (const at::Tensor& t : inputs_) batch.inputs.push_back(t.index_select(0, rows));
    for (const at::Tensor& t : targets_) batch.targets.push_back(t.index_select(0, rows));
    return batch;
  }

 private:
  int64_t batch_, rows_ = 0;
  at::Generator generator_;
  std::vector<at::Tensor> inputs_, targets_;
};

}  // namespace

std::unique_ptr<Samples> open_samples(const TrainOptions& options, const GraphModule& module, int64_t batch) {
  if (is_tensor_file(options.data)) return std::make_unique<Rows>(options, module, batch);
  return std::make_unique<TokenWindows>(options, module, batch);
}

int64_t rows_of_step(const TrainOptions& o, const GraphModule& module) {
  const TensorMeta& meta = first_input(module);
  const int64_t parts = int64_t{o.microbatches} * o.replicas;
  const int64_t whole = meta.sizes[0] * parts;
  if (o.batch == 0) return whole;
  if (!is_dynamic(meta, 0) && o.batch != whole) {
    throw UsageError("--batch " + std::to_string(o.batch) + ": the file was exported for microbatches of " +
                         std::to_string(meta.sizes[0]) + " rows",
                     "--batch " + std::to_string(whole) + " with --microbatches " + std::to_string(o.microbatches) +
                         ", or export with a dynamic batch");
  }
  if (o.batch < parts) {
    throw UsageError("--batch " + std::to_string(o.batch) + ": fewer rows than microbatches",
                     "--microbatches of at most it");
  }
  return o.batch;
}

}  // namespace plumb::cli
