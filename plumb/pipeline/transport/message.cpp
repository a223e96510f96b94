#include "plumb/pipeline/transport/message.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>

#include "plumb/core/checksum.h"
#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/graph/names.h"
#include "plumb/numerics/carrier.h"
#include "plumb/numerics/codes.h"
#include "plumb/numerics/operators.h"
#include "plumb/partition/wire.h"

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

AgreedValue agreed_gradient(const at::Tensor& parameter, const at::Tensor& own) {
  const auto dtype = own.defined() ? own.scalar_type() : parameter.scalar_type();
  return {AgreedValue::Comes::Maybe, dtype, parameter.sizes().vec()};
}

namespace wire {
namespace {

// at::Tensor holds no more.
constexpr int kMostDims = 64;
constexpr std::int64_t kMostReach = 8;  // elements of memory that a received value takes for one of its own

std::int64_t align(std::int64_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

struct Entry {
  std::int8_t dtype = -1;  // -1: no value
  std::uint8_t requires_grad = 0;
  std::uint16_t dims = 0;
  std::uint8_t coded = 0;   // its bytes are codes of the format agreed on
  std::uint8_t direct = 0;  // and go through the device's backend
  std::uint8_t unused[2] = {};
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

// Returns the elements of memory from the first to the last one; nothing if two elements share memory.
std::optional<std::int64_t> reach_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::ranges::sort(dims);
  std::int64_t reach = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < reach) return std::nullopt;
    reach += stride * (size - 1);
  }
  return reach;
}

std::vector<std::int64_t> contiguous(at::IntArrayRef sizes) {
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

// Returns the strides of a value's bytes in a message.
std::vector<std::int64_t> wire_strides(const at::Tensor& t) {
  return t.is_non_overlapping_and_dense() ? t.strides().vec() : contiguous(t.sizes());
}

// Returns the strides that a value has at its receiver: its own, gaps too, as operators take other paths where rows do
// not follow each other. A part of a much larger tensor becomes contiguous.
std::vector<std::int64_t> kept_strides(const at::Tensor& t) {
  const auto reach = t.numel() == 0 ? std::nullopt : reach_of(t.sizes(), t.strides());
  return reach && *reach <= kMostReach * t.numel() ? t.strides().vec() : wire_strides(t);
}

std::int64_t value_bytes(const MessageValue& v) {
  return static_cast<std::int64_t>(v.codes != nullptr ? v.tensor.numel() : v.tensor.nbytes());
}

bool is_direct(const MessageValue& v, DirectDevice device) {
  return device && v.tensor.defined() && v.tensor.device().type() == *device && v.tensor.numel() > 0;
}

// Returns the tensor whose memory travels.
at::Tensor on_the_wire(const MessageValue& v) {
  if (v.codes == nullptr) return v.tensor;
  at::NoGradGuard no_grad;
  return ops::encode(v.tensor.detach(), v.codes->to_string());
}

// Into memory that must not be read before `copied`.
void copy_to_host(const at::Tensor& to, const at::Tensor& from, std::vector<c10::Event>& copied) {
  const auto device = from.device();
  const bool later = !from.is_cpu() && c10::impl::hasDeviceGuardImpl(device.type());
  to.copy_(from.detach(), /*non_blocking=*/later);
  if (!later) return;
  copied.emplace_back(device.type());
  copied.back().record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

// Quantized types and those of a few bits have no name: torch can hardly copy them.
bool has_plain_dtype(int number) {
  return number >= 0 && number < static_cast<int>(at::ScalarType::NumOptions) &&
         dtype_names(static_cast<at::ScalarType>(number)) != nullptr;
}

[[noreturn]] void raise_malformed(const std::string& what) {
  throw Error(ErrorKind::Communication, what, "", "run the same version of plumb on every rank");
}

std::uint32_t sum_of(const Prologue& prologue) { return crc32(&prologue, offsetof(Prologue, sum)); }

// Reads a message whose checksums are right: its sender may still lie.
class Reader {
 public:
  Reader(const at::Tensor& buffer, const Prologue& prologue, const FPFormat* codes)
      : buffer_(buffer),
        codes_(codes),
        base_(static_cast<const char*>(buffer.const_data_ptr())),
        prologue_(prologue),
        end_(prologue.total_bytes),
        at_(sizeof(Prologue)) {}

  Message read(const std::vector<at::Tensor>& direct) {
    Message message;
    const auto shapes = read_table(message.sizes);
    size_t next = 0;
    for (const auto& s : shapes)
      message.values.push_back(s.entry.direct ? take_direct(s, direct, next++) : take_value(s));
    if (next < direct.size()) raise_malformed(str("it has ", next, " values on the device"));
    if (at_ != end_) {
      raise_malformed(str("its values take ", at_, " of its ", end_, " bytes"));
    }
    return message;
  }

  std::vector<at::Tensor> make_direct(c10::Device device) {
    std::vector<std::int64_t> sizes;
    std::vector<at::Tensor> made;
    for (const auto& s : read_table(sizes)) {
      if (!s.entry.direct) continue;
      const auto dtype = s.entry.coded ? at::kByte : static_cast<at::ScalarType>(s.entry.dtype);
      made.push_back(at::empty_strided(s.sizes, s.wire_strides, at::TensorOptions(dtype).device(device)));
    }
    return made;
  }

 private:
  struct Shape {
    Entry entry;
    std::vector<std::int64_t> sizes, strides;
    std::vector<std::int64_t> wire_strides;  // those of its bytes: without gaps
    std::int64_t bytes = 0;
  };

  std::vector<Shape> read_table(std::vector<std::int64_t>& sizes) {
    if (prologue_.num_sizes > (end_ - at_) / sizeof(std::int64_t)) {
      raise_malformed("the sizes of its microbatch are cut off");
    }
    sizes = take_numbers(prologue_.num_sizes);
    if (prologue_.num_values > (end_ - at_) / sizeof(Entry)) raise_malformed("its table of values is cut off");
    std::vector<Shape> shapes;
    for (std::uint32_t i = 0; i < prologue_.num_values; i++) shapes.push_back(take_shape());
    at_ = align(at_);
    return shapes;
  }

  std::vector<std::int64_t> take_numbers(std::int64_t count) {
    std::vector<std::int64_t> numbers(count);
    if (count > 0) std::memcpy(numbers.data(), base_ + at_, bytes_of_sizes(count));
    at_ += bytes_of_sizes(count);
    return numbers;
  }

  Shape take_shape() {
    Shape s;
    if (end_ - at_ < static_cast<std::int64_t>(sizeof(Entry))) raise_malformed("its table of values is cut off");
    std::memcpy(&s.entry, base_ + at_, sizeof(Entry));
    at_ += sizeof(Entry);
    if (s.entry.direct > (s.entry.dtype == -1 ? 0 : 1)) raise_malformed("a value comes on a way that is unknown");
    if (s.entry.dtype == -1) return s;
    if (!has_plain_dtype(s.entry.dtype)) {
      raise_malformed(str("a value has the type ", s.entry.dtype, ", which no message carries"));
    }
    const auto dtype = static_cast<at::ScalarType>(s.entry.dtype);
    const bool may_ask =
        prologue_.kind == MessageKind::Activation && (at::isFloatingType(dtype) || at::isComplexType(dtype));
    if (s.entry.coded > (codes_ != nullptr && has_wire_codes(dtype) ? 1 : 0)) {
      raise_malformed("a value comes as codes, which was not agreed on");
    }
    if (s.entry.requires_grad > (may_ask ? 1 : 0)) raise_malformed("a value asks for a gradient that it cannot have");
    const std::int64_t n = s.entry.dims;
    if (n > kMostDims) raise_malformed(str("a value has ", n, " dimensions"));
    if (end_ - at_ < 2 * bytes_of_sizes(n)) raise_malformed("its table of values is cut off");
    s.sizes = take_numbers(n);
    s.strides = take_numbers(n);
    const std::int64_t numel = check_shape(s);
    if (s.entry.direct && numel == 0) raise_malformed("a value without elements comes on its own");
    if (!s.entry.direct) s.bytes = numel * static_cast<std::int64_t>(s.entry.coded ? 1 : c10::elementSize(dtype));
    return s;
  }

  // Returns how many elements there are.
  std::int64_t check_shape(Shape& s) const {
    // A value in the message itself has no more bytes than the message; a device reports by itself if it has no room.
    const std::int64_t most = s.entry.direct ? std::int64_t{1} << 48 : end_;
    std::int64_t numel = 1, furthest = 0;
    std::int64_t extent = 1;  // the elements if no size were 0: strides are products of sizes
    for (size_t i = 0; i < s.sizes.size(); i++) {
      if (s.sizes[i] < 0 || s.strides[i] < 0 || __builtin_mul_overflow(numel, s.sizes[i], &numel) || numel > most ||
          __builtin_mul_overflow(extent, std::max<std::int64_t>(s.sizes[i], 1), &extent)) {
        raise_malformed("a value's sizes are impossible");
      }
    }
    for (size_t i = 0; i < s.sizes.size() && numel > 0; i++) {
      std::int64_t reach = 0;
      if (__builtin_mul_overflow(s.sizes[i] - 1, s.strides[i], &reach) ||
          __builtin_add_overflow(furthest, reach, &furthest) || furthest >= kMostReach * numel) {
        raise_malformed("a value's strides leave its memory");
      }
    }
    if (numel > 0 && !reach_of(s.sizes, s.strides)) raise_malformed("a value's strides overlap");
    s.wire_strides = furthest < numel ? s.strides : contiguous(s.sizes);
    return numel;
  }

  MessageValue take_value(const Shape& s) {
    if (s.entry.dtype == -1) return {};
    if (s.bytes > end_ - at_) raise_malformed("a value's bytes are cut off");
    // from_blob, not views: each value has a version counter of its own.
    const auto dtype = static_cast<at::ScalarType>(s.entry.dtype);
    at::Tensor value = at::from_blob(
        const_cast<char*>(base_) + at_, s.sizes, s.wire_strides, [buffer = buffer_](void*) {},
        at::TensorOptions(s.entry.coded ? at::kByte : dtype));
    at_ += align(s.bytes);
    if (s.entry.coded) value = decode(value, *codes_, dtype);
    return {with_gaps(value, s), s.entry.requires_grad != 0, s.entry.coded ? codes_ : nullptr};
  }

  MessageValue take_direct(const Shape& s, const std::vector<at::Tensor>& direct, size_t index) const {
    if (index >= direct.size()) raise_malformed("a value comes through a device's backend, which was not agreed on");
    at::Tensor value = direct[index];
    const auto dtype = static_cast<at::ScalarType>(s.entry.dtype);
    if (s.entry.coded) value = ops::decode(value, codes_->to_string(), dtype);
    return {with_gaps(value, s), s.entry.requires_grad != 0, s.entry.coded ? codes_ : nullptr};
  }

  static at::Tensor with_gaps(const at::Tensor& value, const Shape& s) {
    if (s.wire_strides == s.strides) return value;
    return at::empty_strided(s.sizes, s.strides, value.options()).copy_(value);
  }

  const at::Tensor& buffer_;
  const FPFormat* const codes_;
  const char* base_;
  const Prologue& prologue_;
  const std::int64_t end_;
  std::int64_t at_;
};

std::string text(const AgreedValue& agreed) {
  if (agreed.comes == AgreedValue::Comes::Never) return "none";
  const at::TensorOptions options(agreed.dtype.value_or(at::kFloat));
  if (agreed.sizes) return describe(*agreed.sizes, options);
  return agreed.dtype ? describe(at::IntArrayRef(), options) + " of any sizes" : "a tensor";
}

void check_agreed(const std::vector<MessageValue>& values, const std::vector<AgreedValue>& agreed) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorKind::Communication, what, "", "run the same model and the same version of plumb on every rank");
  };
  if (values.size() != agreed.size()) {
    refuse(str("it has ", values.size(), " values, agreed were ", agreed.size()));
  }
  for (size_t i = 0; i < values.size(); i++) {
    const auto& t = values[i].tensor;
    const auto& a = agreed[i];
    bool fits = a.comes != (t.defined() ? AgreedValue::Comes::Never : AgreedValue::Comes::Always);
    if (fits && t.defined())
      fits = t.scalar_type() == a.dtype.value_or(t.scalar_type()) && (!a.sizes || t.sizes() == *a.sizes);
    if (fits && t.defined() && (values[i].codes != nullptr) != (a.codes != nullptr && has_wire_codes(t.scalar_type())))
      refuse(str("its value ", i,
                 a.codes ? " comes as it is, agreed were codes of " + a.codes->name()
                         : " comes as codes, which was not agreed on"));
    if (!fits) refuse(str("its value ", i, " is ", describe(t), ", agreed was ", text(a)));
  }
}

}  // namespace

void seal(Prologue& prologue) { prologue.sum = sum_of(prologue); }

bool intact(const Prologue& prologue) { return prologue.magic == kMagic && prologue.sum == sum_of(prologue); }

std::int64_t class_bytes(int size_class) { return std::int64_t{16 + size_class % 16} << (6 + size_class / 16); }

int size_class(std::int64_t bytes) {
  int found = 0;
  while (found < kSizeClasses && class_bytes(found) < bytes) found++;
  return found;
}

std::int64_t message_bytes(const std::vector<MessageValue>& values, size_t num_sizes, DirectDevice direct) {
  std::int64_t bytes = align(sizeof(Prologue) + bytes_of_sizes(num_sizes) + table_bytes(values));
  for (const auto& v : values) {
    if (v.tensor.defined() && !is_direct(v, direct)) bytes += align(value_bytes(v));
  }
  return bytes;
}

std::vector<MessageValue> sendable(const MessageId& id, std::vector<MessageValue> values) {
  for (size_t i = 0; i < values.size(); i++) {
    auto& t = values[i].tensor;
    if (!t.defined()) continue;
    if (!has_own_memory(t)) {
      const at::NoGradGuard no_grad;
      t = t.detach().clone();  // a plain tensor if the values are merely on their way (AsyncCollectiveTensor)
    }
    if (!has_own_memory(t)) {
      throw Error(ErrorKind::Unsupported,
                  str("value ", i, " of ", to_string(id), " is ", describe(t),
                      " of a class of Python's whose values are in other tensors (DTensor and the like)"),
                  "", "return plain tensors from a stage: value.to_local()");
    }
    if (t.layout() != at::kStrided || t.is_quantized() || t.is_meta() || t.is_nested()) {
      throw Error(ErrorKind::Unsupported,
                  str("value ", i, " of ", to_string(id), " is ", describe(t),
                      " without plain memory (sparse, quantized, nested or on the meta device)"),
                  "", "make it dense before the stage's end");
    }
  }
  return values;
}

std::vector<at::Tensor> direct_values(const std::vector<MessageValue>& values, c10::Device device) {
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> direct;
  for (const auto& v : values) {
    if (!is_direct(v, device.type())) continue;
    at::Tensor t = on_the_wire(v).detach().to(device);
    // A copy, as the stage may write to its own tensor while this one is under way.
    if (t.is_alias_of(v.tensor) || t.strides() != at::IntArrayRef(wire_strides(v.tensor)))
      t = at::empty_strided(t.sizes(), wire_strides(v.tensor), t.options()).copy_(t);
    direct.push_back(std::move(t));
  }
  return direct;
}

at::Tensor bytes_of(const at::Tensor& dense) {
  at::NoGradGuard no_grad;
  return dense.detach().as_strided({dense.numel()}, {1}).view(at::kByte);
}

void write_message(char* to, Prologue prologue, const std::vector<MessageValue>& values, at::IntArrayRef sizes,
                   DirectDevice direct) {
  prologue.content = Content::Values;
  prologue.num_values = static_cast<std::uint32_t>(values.size());
  prologue.num_sizes = static_cast<std::uint32_t>(sizes.size());
  prologue.total_bytes = message_bytes(values, sizes.size(), direct);
  char* at = to + sizeof prologue;
  auto put = [&at](const void* from, size_t bytes) {
    if (bytes > 0) std::memcpy(at, from, bytes);
    at += bytes;
  };
  // The gap between two values belongs to no value.
  auto fill = [&at, to] {
    const auto gap = align(at - to) - (at - to);
    std::memset(at, 0, gap);
    at += gap;
  };
  put(sizes.data(), bytes_of_sizes(sizes.size()));
  for (const auto& v : values) {
    const auto& t = v.tensor;
    Entry entry;
    if (t.defined()) {
      entry.dtype = static_cast<std::int8_t>(t.scalar_type());
      entry.requires_grad = v.requires_grad;
      entry.dims = static_cast<std::uint16_t>(t.dim());
      entry.coded = v.codes != nullptr;
      entry.direct = is_direct(v, direct);
    }
    put(&entry, sizeof entry);
    if (!t.defined()) continue;
    const auto strides = kept_strides(t);
    put(t.sizes().data(), bytes_of_sizes(t.dim()));
    put(strides.data(), bytes_of_sizes(t.dim()));
  }
  fill();
  // Copies from a device are asked for together and waited for once.
  std::vector<c10::Event> copied;
  for (const auto& v : values) {
    if (!v.tensor.defined() || is_direct(v, direct)) continue;
    const at::Tensor t = on_the_wire(v);
    if (t.is_cpu() && t.is_non_overlapping_and_dense() && !t.is_conj() && !t.is_neg() && !t._is_zerotensor()) {
      put(t.const_data_ptr(), t.nbytes());
    } else {
      if (t.numel() > 0)
        copy_to_host(at::from_blob(at, t.sizes(), wire_strides(v.tensor), at::TensorOptions(t.scalar_type())), t,
                     copied);
      at += t.nbytes();
    }
    fill();
  }
  for (const auto& event : copied) event.synchronize();
  prologue.body_sum = crc32(to + sizeof prologue, prologue.total_bytes - sizeof prologue);
  seal(prologue);
  std::memcpy(to, &prologue, sizeof prologue);
}

namespace {

// Returns the prologue of an undamaged message of values.
Prologue read_prologue_of(const at::Tensor& buffer) {
  Prologue prologue;
  if (buffer.numel() < static_cast<std::int64_t>(sizeof prologue)) raise_malformed("it is cut off");
  const char* base = static_cast<const char*>(buffer.const_data_ptr());
  std::memcpy(&prologue, base, sizeof prologue);
  if (!intact(prologue)) raise_malformed("it does not begin as plumb's messages do, or is damaged");
  if (prologue.content != Content::Values) raise_malformed("it has no values");
  if (prologue.total_bytes < static_cast<std::int64_t>(sizeof prologue) || prologue.total_bytes > buffer.numel()) {
    raise_malformed(str("it says it is ", prologue.total_bytes, " bytes long, the buffer is ", buffer.numel()));
  }
  if (crc32(base + sizeof prologue, prologue.total_bytes - sizeof prologue) != prologue.body_sum) {
    throw Error(ErrorKind::Communication, "it is damaged: its checksum does not match", "",
                "look at the network and the memory of both hosts");
  }
  return prologue;
}

}  // namespace

std::vector<at::Tensor> make_direct_values(const at::Tensor& buffer, c10::Device device) {
  const Prologue prologue = read_prologue_of(buffer);
  // Codes of any format take a byte each; read_message() knows which were agreed on.
  return Reader(buffer, prologue, wire_format("e4m3fn")).make_direct(device);
}

Message read_message(const at::Tensor& buffer, const AgreedValues& agreed, const FPFormat* codes,
                     const std::vector<at::Tensor>& direct) {
  const Prologue prologue = read_prologue_of(buffer);
  Message message = Reader(buffer, prologue, codes).read(direct);
  if (agreed) check_agreed(message.values, *agreed);
  return message;
}

}  // namespace wire
}  // namespace plumb
