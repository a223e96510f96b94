#include "plumb/pipeline/message.h"

#include <ATen/ATen.h>

#include <cstring>

#include "plumb/core/error.h"
#include "plumb/graph/describe.h"

namespace plumb {

std::string to_string(const MessageId& id) {
  const std::string from = std::to_string(id.from), to = std::to_string(id.to), m = std::to_string(id.microbatch);
  switch (id.kind) {
    case MessageKind::Activation:
      return from + "SEND_F" + m + " (output of stage " + from + " for stage " + to + ", microbatch " + m + ")";
    case MessageKind::Gradient:
      return from + "SEND_B" + m + " (gradient from stage " + from + " for stage " + to + ", microbatch " + m + ")";
    case MessageKind::TiedGradients: return "the gradients of shared parameters from rank " + from + " for rank " + to;
    case MessageKind::Replicas:
      return (id.to == 1 ? "gradients (part " : "summed gradients (part ") + from + ") of a replica";
    case MessageKind::Exchange: return "the description of rank " + from + " for rank " + to;
  }
  return "an unknown message";
}

namespace wire {
namespace {

std::int64_t align(std::int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

struct Entry {
  std::int8_t dtype = -1;  // -1: no value
  std::uint8_t requires_grad = 0;
  std::uint16_t dims = 0;
  std::uint32_t unused = 0;
};
static_assert(sizeof(Entry) == 8);

std::int64_t table_bytes(const std::vector<MessageValue>& values) {
  std::int64_t bytes = 0;
  for (const auto& v : values) {
    bytes += sizeof(Entry) + (v.tensor.defined() ? v.tensor.dim() : 0) * 2 * sizeof(std::int64_t);
  }
  return bytes;
}

std::int64_t bytes_of_sizes(size_t count) { return static_cast<std::int64_t>(count * sizeof(std::int64_t)); }

// A tensor that fills its memory keeps its strides over the wire, so that later operators take the same paths.
std::vector<std::int64_t> wire_strides(const at::Tensor& t) {
  if (t.is_non_overlapping_and_dense()) return t.strides().vec();
  std::vector<std::int64_t> strides(t.dim());
  std::int64_t step = 1;
  for (std::int64_t i = t.dim() - 1; i >= 0; i--) {
    strides[i] = step;
    step *= std::max<std::int64_t>(t.size(i), 1);
  }
  return strides;
}

[[noreturn]] void raise_malformed(const std::string& what) {
  throw Error(ErrorKind::Communication, "a message between stages is malformed: " + what, "",
              "run the same version of plumb on every rank");
}

}  // namespace

std::int64_t message_bytes(const std::vector<MessageValue>& values, size_t num_sizes) {
  std::int64_t bytes = align(sizeof(Prologue) + bytes_of_sizes(num_sizes) + table_bytes(values));
  for (const auto& v : values) {
    if (v.tensor.defined()) bytes += align(static_cast<std::int64_t>(v.tensor.nbytes()));
  }
  return bytes;
}

void check_sendable(const MessageId& id, const std::vector<MessageValue>& values) {
  for (size_t i = 0; i < values.size(); i++) {
    const auto& t = values[i].tensor;
    if (!t.defined()) continue;
    if (t.layout() != at::kStrided || t.is_quantized() || t.is_meta() || t.is_nested()) {
      throw Error(ErrorKind::Unsupported,
                  "value " + std::to_string(i) + " of " + to_string(id) + " is " + describe(t) +
                      " without plain memory (sparse, quantised, nested or on the meta device)",
                  "", "make it dense before the stage's end");
    }
    if (t.is_conj() || t.is_neg()) continue;  // materialised by the copy
  }
}

void write_message(char* to, Prologue prologue, const std::vector<MessageValue>& values, at::IntArrayRef sizes) {
  prologue.content = Content::Values;
  prologue.num_values = static_cast<std::uint16_t>(values.size());
  prologue.num_sizes = static_cast<std::uint32_t>(sizes.size());
  prologue.total_bytes = message_bytes(values, sizes.size());
  std::memcpy(to, &prologue, sizeof prologue);
  if (!sizes.empty()) std::memcpy(to + sizeof prologue, sizes.data(), bytes_of_sizes(sizes.size()));
  char* table = to + sizeof prologue + bytes_of_sizes(sizes.size());
  char* data = to + align(sizeof prologue + bytes_of_sizes(sizes.size()) + table_bytes(values));
  for (const auto& v : values) {
    Entry entry;
    if (v.tensor.defined()) {
      entry.dtype = static_cast<std::int8_t>(v.tensor.scalar_type());
      entry.requires_grad = v.requires_grad;
      entry.dims = static_cast<std::uint16_t>(v.tensor.dim());
    }
    std::memcpy(table, &entry, sizeof entry);
    table += sizeof entry;
    if (!v.tensor.defined()) continue;
    const auto& t = v.tensor;
    const auto strides = wire_strides(t);
    for (const at::IntArrayRef numbers : {t.sizes(), at::IntArrayRef(strides)}) {
      if (!numbers.empty()) std::memcpy(table, numbers.data(), numbers.size() * sizeof(std::int64_t));
      table += numbers.size() * sizeof(std::int64_t);
    }
    if (t.is_cpu() && t.is_non_overlapping_and_dense() && !t.is_conj() && !t.is_neg()) {
      if (t.nbytes() > 0) std::memcpy(data, t.const_data_ptr(), t.nbytes());
    } else if (t.numel() > 0) {
      at::from_blob(data, t.sizes(), strides, at::TensorOptions(t.scalar_type())).copy_(t.detach());
    }
    data += align(static_cast<std::int64_t>(t.nbytes()));
  }
}

std::vector<MessageValue> read_values(const at::Tensor& buffer, std::int64_t bytes) {
  const char* base = static_cast<const char*>(buffer.const_data_ptr());
  Prologue prologue;
  std::memcpy(&prologue, base, sizeof prologue);
  if (prologue.total_bytes < static_cast<std::int64_t>(sizeof prologue) || prologue.total_bytes > bytes) {
    raise_malformed("it says it is " + std::to_string(prologue.total_bytes) + " bytes long, the buffer is " +
                    std::to_string(bytes));
  }
  const std::int64_t end = prologue.total_bytes;
  struct Shape {
    Entry entry;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t bytes = 0;
  };
  std::vector<Shape> shapes(prologue.num_values);
  std::int64_t at = static_cast<std::int64_t>(sizeof prologue) + bytes_of_sizes(prologue.num_sizes);
  if (at > end) raise_malformed("the sizes of its microbatch are cut off");
  for (auto& s : shapes) {
    if (at + static_cast<std::int64_t>(sizeof(Entry)) > end) raise_malformed("its table of values is cut off");
    std::memcpy(&s.entry, base + at, sizeof s.entry);
    at += sizeof s.entry;
    if (s.entry.dtype < 0) continue;
    if (s.entry.dtype >= static_cast<int>(at::ScalarType::NumOptions)) raise_malformed("a value has no known type");
    const std::int64_t n = s.entry.dims;
    if (at + n * 16 > end) raise_malformed("its table of values is cut off");
    s.sizes.resize(n);
    s.strides.resize(n);
    for (auto* numbers : {&s.sizes, &s.strides}) {
      if (n > 0) std::memcpy(numbers->data(), base + at, n * sizeof(std::int64_t));
      at += n * static_cast<std::int64_t>(sizeof(std::int64_t));
    }
    // Dense by construction, so the element count bounds the memory; checked against overflow all the same.
    std::int64_t numel = 1, furthest = 0;
    for (std::int64_t i = 0; i < n; i++) {
      if (s.sizes[i] < 0 || s.strides[i] < 0 || __builtin_mul_overflow(numel, s.sizes[i], &numel) || numel > end) {
        raise_malformed("a value's sizes are impossible");
      }
    }
    for (std::int64_t i = 0; i < n && numel > 0; i++) {
      std::int64_t reach = 0;
      if (__builtin_mul_overflow(s.sizes[i] - 1, s.strides[i], &reach) ||
          __builtin_add_overflow(furthest, reach, &furthest) || furthest >= numel) {
        raise_malformed("a value's strides leave its memory");
      }
    }
    const auto item = static_cast<std::int64_t>(c10::elementSize(static_cast<at::ScalarType>(s.entry.dtype)));
    s.bytes = numel * item;
  }
  at = align(at);
  std::vector<MessageValue> values(shapes.size());
  for (size_t i = 0; i < shapes.size(); i++) {
    const auto& s = shapes[i];
    if (s.entry.dtype < 0) continue;
    if (at + s.bytes > end) raise_malformed("a value's bytes are cut off");
    // from_blob, not views: each value has a version counter of its own.
    values[i].tensor = at::from_blob(
        const_cast<char*>(base) + at, s.sizes, s.strides, [buffer](void*) {},
        at::TensorOptions(static_cast<at::ScalarType>(s.entry.dtype)));
    values[i].requires_grad = s.entry.requires_grad != 0;
    at += align(s.bytes);
  }
  if (at != end) raise_malformed("its values take " + std::to_string(at) + " of its " + std::to_string(end) + " bytes");
  return values;
}

std::vector<std::int64_t> read_sizes(const at::Tensor& buffer) {
  const char* base = static_cast<const char*>(buffer.const_data_ptr());
  Prologue prologue;
  std::memcpy(&prologue, base, sizeof prologue);
  std::vector<std::int64_t> sizes(prologue.num_sizes);
  if (!sizes.empty()) std::memcpy(sizes.data(), base + sizeof prologue, bytes_of_sizes(sizes.size()));
  return sizes;
}

}  // namespace wire
}  // namespace plumb
