#include "plumb/training/inputs.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <cerrno>

#include "plumb/core/join.h"
#include "plumb/graph/names.h"
#include "plumb/partition/stage_io.h"
#include "plumb/training/data/samples.h"
#include "plumb/training/usage.h"

namespace plumb {
namespace {

// Returns a constant in place of a file; none if it is not one.
std::optional<c10::IValue> constant(const std::string& text, const std::string& option) {
  if (text == "none") return c10::IValue();
  if (text == "true" || text == "false") return c10::IValue(text == "true");
  if (text.empty()) return std::nullopt;
  char* end = nullptr;
  errno = 0;
  const long long integer = std::strtoll(text.c_str(), &end, 10);
  if (*end == '\0' && errno == ERANGE) {
    throw UsageError(option + " " + text + ": is no 64-bit integer", "a smaller number, or 1e20 for a float");
  }
  if (*end == '\0') return c10::IValue(static_cast<int64_t>(integer));
  const double number = std::strtod(text.c_str(), &end);
  if (*end == '\0') return c10::IValue(number);
  return std::nullopt;
}

std::string list_inputs(const std::vector<Node*>& inputs) {
  if (inputs.empty()) return "none";
  return join(inputs, [](const Node* p) { return p->target() + ": " + type_text(p->result()->meta()); });
}

// Returns the only value that the program takes for this input, as torch.export fixes numbers and texts, or nothing.
std::optional<c10::IValue> only_value(const Value& input) {
  for (const Node* node : input.users()) {
    if (node->is_op("plumb::check_input") && node->arg(1).is_constant()) return node->arg(1).constant();
  }
  return std::nullopt;
}

bool fits(const TensorMeta& want, const at::Tensor& got, bool any_rows) {
  if (got.scalar_type() != want.dtype || got.dim() != static_cast<int64_t>(want.sizes.size())) return false;
  for (size_t i = any_rows ? 1 : 0; i < want.sizes.size(); ++i) {
    if (!is_dynamic(want, i) && got.size(static_cast<int64_t>(i)) != want.sizes[i]) return false;
  }
  return true;
}

class Inputs {
 public:
  Inputs(const GraphModule& module, std::string option, bool any_rows, std::vector<std::string> beside)
      : option_(std::move(option)), any_rows_(any_rows), beside_(std::move(beside)) {
    for (Node* node : module.graph().placeholders()) nodes_.push_back(node);
    given_.resize(nodes_.size());
  }

  void read(const std::string& text) {
    const size_t equals = text.find('=');
    const bool named = equals != std::string::npos;
    const std::string name = named ? text.substr(0, equals) : "", source = named ? text.substr(equals + 1) : text;
    const c10::IValue value = read_value(text, source);
    if (named) {
      put_named(name, text, value);
    } else if (value.isGenericDict()) {
      for (const auto& item : value.toGenericDict()) {
        const std::string key = item.key().isString() ? item.key().toStringRef() : "?";
        if (std::ranges::find(beside_, key) == beside_.end()) put_named(key, text, item.value());
      }
    } else if (value.isTuple() || value.isList()) {
      for (const c10::IValue& leaf : flatten(value, nullptr)) put_next(text, leaf);
    } else {
      put_next(text, value);
    }
  }

  std::vector<c10::IValue> take() {
    std::vector<c10::IValue> values;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const Value& input = *nodes_[i]->result();
      if (!given_[i]) {
        if (const auto only = only_value(input)) {
          values.push_back(*only);
          continue;
        }
        throw UsageError(
            option_ + ": no value for input '" + nodes_[i]->target() + "' (" + type_text(input.meta()) + ")",
            any_rows_ ? "a .pt or .safetensors that holds every input by its name, '" + nodes_[i]->target() + "' too"
                      : option_ + " " + nodes_[i]->target() + "=FILE.pt");
      }
      check(input, *given_[i]);
      values.push_back(std::move(given_[i]->value));
    }
    return values;
  }

 private:
  struct Given {
    std::string text;
    c10::IValue value;
  };

  c10::IValue read_value(const std::string& text, const std::string& source) const {
    if (const auto number = constant(source, option_)) return *number;
    return prefixed(option_ + " " + text + ": ", [&] { return load_tensor_file(source); });
  }

  void put(size_t i, const std::string& text, const c10::IValue& value) {
    const Value* input = nodes_[i]->result();
    if (given_[i]) {
      throw UsageError(option_ + " " + text + ": input '" + nodes_[i]->target() + "' is given twice, by " + option_ +
                           " " + given_[i]->text + " before",
                       "one value for each input");
    }
    Given given{text, value};
    if (value.isTensor() && !input->is_tensor()) given.value = unpack_value(value.toTensor(), input->type());
    // A number for a tensor that is one.
    if (value.isScalar() && input->is_tensor() && input->meta() && input->meta()->sizes.empty()) {
      given.value = at::scalar_tensor(value.toScalar(), at::dtype(input->meta()->dtype));
    }
    given_[i] = std::move(given);
  }

  void put_named(const std::string& name, const std::string& text, const c10::IValue& value) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i]->target() == name || nodes_[i]->result()->name() == name) return put(i, text, value);
    }
    throw UsageError(option_ + " " + text + ": there is no input '" + name + "'",
                     "the inputs are " + list_inputs(nodes_));
  }

  void put_next(const std::string& text, const c10::IValue& value) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (!given_[i]) return put(i, text, value);
    }
    throw UsageError(option_ + " " + text + ": more values than inputs", "the inputs are " + list_inputs(nodes_));
  }

  void check(const Value& input, const Given& given) const {
    std::optional<TensorMeta> want = input.meta();
    if (!input.is_tensor() || !want) return;
    const bool tensor = given.value.isTensor() && given.value.toTensor().defined();
    if (tensor && fits(*want, given.value.toTensor(), any_rows_)) return;
    if (any_rows_ && !want->sizes.empty()) {
      want->symbols.resize(want->sizes.size());
      want->symbols[0] = "rows";
    }
    const std::string wants = type_text(want);
    std::string fix = "a tensor of " + wants;
    if (tensor && given.value.toTensor().scalar_type() != want->dtype) {
      fix += ": convert it, x.to(torch." + torch_name(want->dtype) + ") or x.astype('" + torch_name(want->dtype) + "')";
    } else if (tensor) {
      fix += ", or export the model with other or dynamic shapes";
    }
    throw UsageError(option_ + " " + given.text + ": is " + (tensor ? type_text(given.value.toTensor()) : "no tensor") +
                         ", input '" + input.name() + "' takes " + wants,
                     fix);
  }

  std::string option_;
  bool any_rows_;
  std::vector<std::string> beside_;
  std::vector<Node*> nodes_;
  std::vector<std::optional<Given>> given_;
};

}  // namespace

std::vector<c10::IValue> read_inputs(const GraphModule& module, const std::vector<std::string>& texts,
                                     const std::string& option, bool any_rows, const std::vector<std::string>& beside) {
  Inputs inputs(module, option, any_rows, beside);
  for (const std::string& text : texts) inputs.read(text);
  return inputs.take();
}

}  // namespace plumb
