#include "plumb/training/data/samples.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/core/join.h"
#include "plumb/core/table.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/training/data/token_files.h"
#include "plumb/training/inputs.h"
#include "plumb/training/usage.h"

namespace plumb {

const TensorMeta& first_input(const GraphModule& module) {
  const auto inputs = module.graph().placeholders();
  if (inputs.empty() || !inputs[0]->result()->meta() || inputs[0]->result()->meta()->sizes.empty()) {
    throw UsageError("FILE: its first input is no tensor with rows", "export the model on a batch of samples");
  }
  return *inputs[0]->result()->meta();
}

bool is_dynamic(const TensorMeta& meta, size_t dim) { return dim < meta.symbols.size() && !meta.symbols[dim].empty(); }

void check_memory(int64_t batch, double bytes_of_row) {
  const double needs = static_cast<double>(batch) * bytes_of_row;
  const double has = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  if (needs <= has) return;
  throw UsageError(c10::str("--batch: the inputs of a step of ", batch, " rows need ", bytes_text(needs),
                            ", this machine has ", bytes_text(has)),
                   "a smaller --batch, or fewer --microbatches");
}

namespace {

// Targets that the loss could not be taken of, before the first step.
void check_targets(const TrainOptions& o, const DataFiles& files, const GraphModule& module,
                   const at::Tensor& targets) {
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
  const std::string file = files.targets_option + " " + files.targets;
  if (!fits) {
    throw UsageError(file + ": is " + type_text(targets) + ", --loss " + o.loss + " needs " + wanted + "[" + shape +
                         "] for the model's first output",
                     "targets of that type and shape, or another --loss");
  }
  if (mse || meta.sizes.empty() || is_dynamic(meta, meta.sizes.size() - 1)) return;
  const at::Tensor outside = targets.lt(0).logical_or_(targets.ge(meta.sizes.back()));
  const at::Tensor wrong = targets.masked_select(outside.logical_and_(targets.ne(o.ignore_index)));
  if (wrong.numel() == 0) return;
  throw UsageError(
      c10::str(file, ": has class ", wrong[0].item<int64_t>(), ", the model has 0 to ", meta.sizes.back() - 1),
      "targets of these classes; --ignore-index or --mask for those that do not count");
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
  TokenWindows(const TrainOptions& o, const DataFiles& files, const GraphModule& module, std::unique_ptr<Tokens> tokens)
      : vocabulary_(vocabulary_of(module)),
        data_(files.option + " " + files.data),
        with_targets_(o.loss == "output"),
        tokens_(std::move(tokens)) {
    const size_t inputs = module.graph().placeholders().size();
    const TensorMeta& ids = first_input(module);
    if (inputs != (with_targets_ ? 2u : 1u) || ids.sizes.size() != 2 || ids.sizes[1] < 1 || ids.dtype != at::kLong) {
      throw UsageError(data_ + ": raw tokens need a model of " +
                           (with_targets_ ? "ids and targets" : "one input, the ids") + ", i64[batch, length]",
                       "give a .pt or .npy file of the inputs, or another --loss");
    }
    if (o.loss == "mse") throw UsageError("--loss mse: tokens have no numbers to be near", "--loss cross_entropy");
    for (const auto& [option, file] : {std::pair{files.targets_option, files.targets}, {"--mask", files.mask}}) {
      if (!file.empty()) throw UsageError(option + ": raw tokens are their own targets", "leave " + option + " out");
    }
    length_ = ids.sizes[1];
    if (tokens_->size() < length_ + 1) {
      throw UsageError(c10::str(data_, ": has ", tokens_->size(), " tokens, one sample needs ", length_ + 1),
                       "a longer file, or another --token-type");
    }
  }

  int64_t rows() const override { return (tokens_->size() - 1) / length_; }

  Batch read(const std::vector<int64_t>& rows) override {
    std::vector<at::Tensor> windows;
    for (const int64_t row : rows) windows.push_back(tokens_->read(row * length_, length_ + 1));
    const at::Tensor all = at::stack(windows);
    const auto largest = all.max().item<int64_t>(), least = all.min().item<int64_t>();
    if (vocabulary_ && (largest >= *vocabulary_ || least < 0)) {
      throw UsageError(
          c10::str(data_, ": has token ", least < 0 ? least : largest, ", the model knows 0 to ", *vocabulary_ - 1),
          "another --token-type, or tokens of the model's own tokenizer");
    }
    // Copies: a view of one row is contiguous, and who writes to the targets would write to the inputs.
    const at::Tensor ids = all.narrow(1, 0, length_).clone(at::MemoryFormat::Contiguous),
                     next = all.narrow(1, 1, length_).clone(at::MemoryFormat::Contiguous);
    return with_targets_ ? Batch{{ids, next}, {}} : Batch{{ids}, {next}};
  }

  double bytes_of_row() const override { return 16.0 * static_cast<double>(length_ + 1); }
  std::string identity() const override { return tokens_->identity(); }

 private:
  const std::optional<int64_t> vocabulary_;
  const std::string data_;
  const bool with_targets_;
  const std::unique_ptr<Tokens> tokens_;
  int64_t length_ = 0;
};

// Returns the file's only tensor, or that of this name.
at::Tensor load_one(const std::string& option, const std::string& path, const std::string& name) {
  const c10::IValue value = load_tensor_file(path);
  if (value.isGenericDict()) {
    const auto found = value.toGenericDict().find(name);
    if (found != value.toGenericDict().end() && found->value().isTensor()) return found->value().toTensor();
  }
  if (!value.isTensor())
    throw UsageError(option + " " + path + ": is not one tensor",
                     "one tensor, a row a sample, or one that is named '" + name + "'");
  return value.toTensor();
}

class TensorRows : public Samples {
 public:
  TensorRows(const TrainOptions& o, DataFiles files, const GraphModule& module) {
    find_beside(o, files, module);
    const std::string& targets_option = files.targets_option;
    for (const c10::IValue& v : read_inputs(module, {files.data}, files.option, true, beside_)) {
      if (!v.isTensor())
        throw UsageError(files.option + " " + files.data + ": holds what is no tensor", "tensors with a row a sample");
      inputs_.push_back(v.toTensor());
    }
    if (o.loss != "output") {
      if (files.targets.empty())
        throw UsageError(targets_option + " is missing", targets_option + " FILE.pt, or --loss output");
      targets_.push_back(load_one(targets_option, files.targets, "targets"));
    }
    if (!files.mask.empty()) add_mask(o, load_one("--mask", files.mask, "mask"));
    if (!targets_.empty()) check_targets(o, files, module, targets_[0]);
    std::vector<at::Tensor> all = inputs_;
    all.insert(all.end(), targets_.begin(), targets_.end());
    for (const at::Tensor& t : all) {
      if (t.dim() == 0 || t.size(0) == 0)
        throw UsageError(files.option + " " + files.data + ": holds " + type_text(t) + ", which has no rows",
                         "tensors with a row a sample");
      if (t.size(0) != all[0].size(0)) {
        throw UsageError(files.option + " and " + targets_option + ": " + type_text(t) + " and " + type_text(all[0]) +
                             " have other rows",
                         "as many rows in each");
      }
      bytes_ += static_cast<double>(t.nbytes()) / static_cast<double>(t.size(0));
    }
    identity_ = join(all, [](const at::Tensor& t) { return type_text(t); }) + (files.mask.empty() ? "" : ", masked");
  }

  int64_t rows() const override { return inputs_.at(0).size(0); }

  Batch read(const std::vector<int64_t>& rows) override {
    const at::Tensor index = at::tensor(rows, at::kLong);
    Batch batch;
    for (const at::Tensor& t : inputs_) batch.inputs.push_back(t.index_select(0, index));
    for (const at::Tensor& t : targets_) batch.targets.push_back(t.index_select(0, index));
    return batch;
  }

  double bytes_of_row() const override { return bytes_; }
  std::string identity() const override { return identity_; }

 private:
  // Targets and mask in the data's own file.
  void find_beside(const TrainOptions& o, DataFiles& files, const GraphModule& module) {
    if (!files.data.ends_with(".safetensors")) return;
    const SafetensorsFile all(files.data);
    for (auto [name, file] : {std::pair{"targets", &files.targets}, {"mask", &files.mask}}) {
      bool is_input = false;
      for (const Node* input : module.graph().placeholders()) is_input = is_input || input->target() == name;
      if (is_input || all.find(name) == nullptr) continue;
      beside_.push_back(name);
      if (file->empty() && o.loss != "output") *file = files.data;
    }
  }

  void add_mask(const TrainOptions& o, const at::Tensor& mask) {
    if (targets_.empty()) throw UsageError("--mask: --loss output has no targets", "leave --mask out");
    if (mask.scalar_type() != at::kBool || mask.sizes() != targets_[0].sizes()) {
      throw UsageError("--mask: is " + type_text(mask) + ", the targets are " + type_text(targets_[0]),
                       "true and false (bool) of the targets' shape");
    }
    if (o.loss == "cross_entropy") {
      targets_[0] = targets_[0].masked_fill(mask.logical_not(), o.ignore_index);
    } else {
      targets_.push_back(mask.to(targets_[0].scalar_type()));
    }
  }

  std::vector<at::Tensor> inputs_, targets_;
  std::vector<std::string> beside_;  // names in the data's file that are no inputs
  double bytes_ = 0;
  std::string identity_;
};

}  // namespace

std::unique_ptr<Samples> open_samples(const TrainOptions& o, const DataFiles& files, const GraphModule& module) {
  if (files.data.empty()) throw UsageError(files.option + " is missing", files.option + " FILE");
  const bool may_be_tokens = files.targets.empty() && first_input(module).sizes.size() == 2;
  if (is_tensor_file(files.data) && !(may_be_tokens && is_token_tensor(files.data))) {
    const bool pickled = files.data.ends_with(".pt") || files.data.ends_with(".pth");
    const c10::IValue tokens = may_be_tokens && pickled ? load_tensors(files.data) : c10::IValue();
    if (tokens.isTensor() && tokens.toTensor().dim() == 1 &&
        c10::isIntegralType(tokens.toTensor().scalar_type(), false)) {
      return std::make_unique<TokenWindows>(o, files, module,
                                            std::make_unique<TensorTokens>(tokens.toTensor(), "tokens"));
    }
    return std::make_unique<TensorRows>(o, files, module);
  }
  const auto dtype = o.token_type == "u8" ? at::kByte : o.token_type == "u16" ? at::kUInt16 : at::kInt;
  return std::make_unique<TokenWindows>(o, files, module,
                                        std::make_unique<TokenFiles>(files.data, o.data_pattern, dtype, files.option));
}

int64_t parts_of_step(const TrainOptions& o) { return o.microbatches * o.replicas * o.accumulate; }

int64_t rows_of_step(const TrainOptions& o, const GraphModule& module) {
  const TensorMeta& meta = first_input(module);
  const int64_t parts = parts_of_step(o);
  if (!is_dynamic(meta, 0) && meta.sizes[0] == 0) {
    throw UsageError("the file was exported for microbatches of 0 rows, which is no batch",
                     "export it with a row or more, or with a dynamic batch");
  }
  int64_t whole = 0;
  if (__builtin_mul_overflow(meta.sizes[0], parts, &whole)) {
    throw UsageError(c10::str(parts, " microbatches of ", meta.sizes[0], " rows are more rows than can be counted"),
                     "export the file with fewer rows");
  }
  if (o.batch == 0) return whole;
  if (!is_dynamic(meta, 0) && o.batch != whole) {
    const int64_t of_each = whole / o.microbatches;  // rows that one microbatch of every replica and accumulation takes
    const bool fits = o.batch % of_each == 0;
    throw UsageError(
        c10::str("--batch ", o.batch, ": the file was exported for microbatches of ", meta.sizes[0], " rows"),
        (fits ? c10::str("--microbatches ", o.batch / of_each, ", or ") : "") +
            c10::str("--batch ", whole, " with --microbatches ", o.microbatches, ", or export with a dynamic batch"));
  }
  if (o.batch < parts) {
    throw UsageError(c10::str("--batch ", o.batch, ": fewer rows than microbatches"), "--microbatches of at most it");
  }
  return o.batch;
}

}  // namespace plumb
