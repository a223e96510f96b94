#include "plumb/exported/tensor_files/pickle_file.h"

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>

#include <bit>
#include <deque>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "plumb/core/error.h"
#include "plumb/exported/weights.h"
#include "plumb/exported/zip_file.h"
#include "plumb/graph/names.h"

namespace plumb {
namespace {

constexpr uint64_t kMaxPickle = uint64_t{64} << 20;
constexpr size_t kMaxObjects = 4'000'000;
constexpr size_t kMaxLeaves = 4'000'000;
constexpr int kMaxDepth = 64;
constexpr const char* kSaveTensors = "save tensors without attributes (x.detach()), or a dict, list or tuple of them";

// An entry of the pickle machine's stack. Owned by the machine, so cycles leak nothing.
struct Object {
  enum Kind : uint8_t { Plain, Global, Storage, List, Tuple, Dict, Mark } kind = Plain;
  c10::IValue value;           // Plain
  std::string text;            // Global: "module name"
  std::vector<Object*> items;  // List, Tuple; Dict: key, value, key, value, ...
  at::Tensor bytes;            // Storage
  at::ScalarType dtype = at::kByte;
};

// Returns the dtype of "torch FloatStorage", "torch uint16" and the like.
std::optional<at::ScalarType> dtype_of_global(std::string_view name) {
  if (name == "torch.storage UntypedStorage") return at::kByte;
  for (const DtypeNames& n : all_dtype_names()) {
    if (name == "torch " + std::string(n.storage.empty() ? n.torch : n.storage)) return n.dtype;
  }
  return std::nullopt;
}

class Machine {
 public:
  Machine(const ZipFile& zip, std::string pickle) : zip_(zip), data_(std::move(pickle)) {}

  c10::IValue run() {
    for (;;) {
      switch (const auto op = static_cast<unsigned char>(take(1)[0]); op) {
        case 0x80:
          if (const int version = take(1)[0]; version != 2)
            fail("pickle protocol " + std::to_string(version) + ", 2 was expected");
          break;
        case '.': return finish(*pop());
        case 'N': push(c10::IValue()); break;
        case 0x88: push(c10::IValue(true)); break;
        case 0x89: push(c10::IValue(false)); break;
        case 'J': push(c10::IValue(static_cast<int64_t>(static_cast<int32_t>(little(4))))); break;
        case 'K': push(c10::IValue(static_cast<int64_t>(little(1)))); break;
        case 'M': push(c10::IValue(static_cast<int64_t>(little(2)))); break;
        case 0x8a: push(c10::IValue(long_integer())); break;
        case 'G': push(c10::IValue(big_endian_double())); break;
        case 'X': push(c10::IValue(std::string(take(little(4))))); break;
        case 'U': push(c10::IValue(std::string(take(little(1))))); break;
        case 'c': global(); break;
        case '}': make(Object::Dict); break;
        case ']': make(Object::List); break;
        case ')': make(Object::Tuple); break;
        case '(': make(Object::Mark); break;
        case 't': collect(since_mark()); break;
        case 0x85: collect(pop_n(1)); break;
        case 0x86: collect(pop_n(2)); break;
        case 0x87: collect(pop_n(3)); break;
        case 'a': extend(Object::List, pop_n(1)); break;
        case 'e': extend(Object::List, since_mark()); break;
        case 's': extend(Object::Dict, pop_n(2)); break;
        case 'u': extend(Object::Dict, since_mark()); break;
        case 'q': memo_[little(1)] = top(); break;
        case 'r': memo_[little(4)] = top(); break;
        case 'h': recall(little(1)); break;
        case 'j': recall(little(4)); break;
        case 'Q': storage(*pop()); break;
        case 0x81: {
          pop();
          const Object* type = pop();
          fail("holds an object of '" + type->text + "'", kSaveTensors);
        }
        case 'R': reduce(); break;
        case 'b': build(); break;
        default: fail("pickle opcode " + std::to_string(op) + " at byte " + std::to_string(at_ - 1));
      }
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what, const std::string& remedy = kWriteAgain) const {
    throw Error(ErrorKind::BadFile, zip_.path() + ": " + what, "entry " + zip_.top_folder() + "data.pkl", remedy);
  }

  std::string_view take(uint64_t n) {
    if (n > data_.size() - at_) fail("the pickle ends early");
    at_ += n;
    return std::string_view(data_).substr(at_ - n, n);
  }
  uint64_t little(size_t n) {
    uint64_t v = 0;
    auto bytes = take(n);
    for (size_t i = n; i-- > 0;) v = v << 8 | static_cast<unsigned char>(bytes[i]);
    return v;
  }
  int64_t long_integer() {
    const size_t n = little(1);
    if (n > 8) fail("an integer of " + std::to_string(n) + " bytes");
    if (n == 0) return 0;
    const uint64_t v = little(n);
    const int shift = static_cast<int>(64 - 8 * n);
    return static_cast<int64_t>(v << shift) >> shift;
  }
  double big_endian_double() {
    uint64_t v = 0;
    for (char c : take(8)) v = v << 8 | static_cast<unsigned char>(c);
    return std::bit_cast<double>(v);
  }

  Object& push(Object object) {
    if (objects_.size() >= kMaxObjects) fail("more than " + std::to_string(kMaxObjects) + " objects");
    objects_.push_back(std::move(object));
    stack_.push_back(&objects_.back());
    return objects_.back();
  }
  void push(c10::IValue value) { push(Object{.value = std::move(value)}); }
  Object& make(Object::Kind kind) { return push(Object{.kind = kind}); }
  Object* top() {
    if (stack_.empty()) fail("the pickle's stack is empty");
    return stack_.back();
  }
  Object* pop() {
    Object* object = top();
    stack_.pop_back();
    return object;
  }
  std::vector<Object*> pop_n(size_t n) {
    if (stack_.size() < n) fail("the pickle's stack is empty");
    std::vector<Object*> items(stack_.end() - static_cast<std::ptrdiff_t>(n), stack_.end());
    stack_.resize(stack_.size() - n);
    return items;
  }
  std::vector<Object*> since_mark() {
    size_t i = stack_.size();
    while (i > 0 && stack_[i - 1]->kind != Object::Mark) --i;
    if (i == 0) fail("the pickle has no mark");
    auto items = pop_n(stack_.size() - i);
    stack_.pop_back();
    return items;
  }
  void collect(std::vector<Object*> items) { make(Object::Tuple).items = std::move(items); }
  void extend(Object::Kind kind, std::vector<Object*> items) {
    Object* to = top();
    if (to->kind != kind || (kind == Object::Dict && items.size() % 2))
      fail("elements for something that is no container");
    to->items.insert(to->items.end(), items.begin(), items.end());
  }
  void recall(uint64_t index) {
    auto it = memo_.find(index);
    if (it == memo_.end()) fail("the pickle refers to something it has not made");
    stack_.push_back(it->second);
  }
  std::string_view line() {
    const size_t end = data_.find('\n', at_);
    if (end == std::string::npos) fail("the pickle ends early");
    auto text = take(end - at_);
    take(1);
    return text;
  }
  void global() {
    std::string name(line());
    name += " ";
    name += line();
    make(Object::Global).text = std::move(name);
  }

  const std::string& text(const Object& o) const {
    if (o.kind != Object::Plain || !o.value.isString()) fail("a string was expected");
    return o.value.toStringRef();
  }
  int64_t integer(const Object& o) const {
    if (o.kind != Object::Plain || !o.value.isInt()) fail("an integer was expected");
    return o.value.toInt();
  }
  std::vector<int64_t> integers(const Object& o) const {
    if (o.kind != Object::Tuple && o.kind != Object::List) fail("a tuple of integers was expected");
    if (o.items.size() > 64) fail("a tensor of " + std::to_string(o.items.size()) + " dimensions");
    std::vector<int64_t> values;
    for (const Object* item : o.items) values.push_back(integer(*item));
    return values;
  }

  // ("storage", type, key, device, elements)
  void storage(const Object& id) {
    if (id.kind != Object::Tuple || id.items.size() < 5 || text(*id.items[0]) != "storage")
      fail("unknown kind of persistent object");
    const Object& type = *id.items[1];
    const auto known = dtype_of_global(type.kind == Object::Global ? type.text : "");
    if (!known) fail("unknown storage type '" + type.text + "'");
    const std::string& key = text(*id.items[2]);
    const ZipEntry& record = zip_.get("data/" + key);
    at::Tensor& bytes = storages_[key];
    if (!bytes.defined()) {
      bytes = at::empty({static_cast<int64_t>(record.size)}, at::kByte);
      zip_.read_into(record, bytes.data_ptr());
    }
    push(Object{.kind = Object::Storage, .bytes = bytes, .dtype = *known});
  }

  void reduce() {
    Object* args = pop();
    Object* function = pop();
    if (function->kind != Object::Global || args->kind != Object::Tuple)
      fail("a call of something that is no function");
    const std::string& name = function->text;
    const auto& items = args->items;
    if ((name == "torch._utils _rebuild_tensor_v2" || name == "torch._utils _rebuild_tensor") && items.size() >= 4) {
      tensor(*items[0], items, items[0]->dtype, items.size() > 6 ? items[6] : nullptr);
    } else if (name == "torch._utils _rebuild_tensor_v3" && items.size() >= 7) {
      const auto dtype = dtype_of_global(items[6]->kind == Object::Global ? items[6]->text : "");
      if (!dtype) fail("unknown dtype '" + items[6]->text + "'");
      tensor(*items[0], items, *dtype, items.size() > 7 ? items[7] : nullptr);
    } else if (name == "torch._utils _rebuild_parameter" && items.size() >= 2 && items[0]->kind == Object::Plain &&
               items[0]->value.isTensor()) {
      push(with_gradients(items[0]->value.toTensor(), *items[1]));
    } else if (name == "torch._tensor _rebuild_from_type_v2" && items.size() == 4 &&
               items[0]->text.starts_with("torch._utils _rebuild_tensor_v") && items[1]->text == "torch Tensor") {
      // A tensor with attributes, which torch.export leaves on its inputs. They are of no interest.
      stack_.insert(stack_.end(), {items[0], items[2]});
      reduce();
    } else if (name == "collections OrderedDict") {
      make(Object::Dict);
    } else if (name.starts_with("torch.jit._pickle ") && !items.empty()) {
      stack_.push_back(items[0]);  // build_intlist, restore_type_tag: the plain list or dict is what is meant
    } else {
      fail("holds an object of '" + name + "'", kSaveTensors);
    }
  }

  void tensor(const Object& storage, const std::vector<Object*>& items, at::ScalarType dtype, const Object* bits) {
    if (storage.kind != Object::Storage) fail("a tensor without a storage");
    const int64_t offset = integer(*items[1]);
    const auto sizes = integers(*items[2]), strides = integers(*items[3]);
    bool sound = offset >= 0 && sizes.size() == strides.size();
    for (int64_t v : sizes) sound = sound && v >= 0;
    for (int64_t v : strides) sound = sound && v >= 0;
    if (!sound || !pt2::lies_inside(sizes, strides, offset, static_cast<int64_t>(at::elementSize(dtype)),
                                    storage.bytes.storage().nbytes()))
      fail("a tensor reaches outside of its storage");
    const at::Tensor bytes = bits == nullptr ? storage.bytes : with_bits(storage.bytes, dtype, *bits);
    const at::Tensor result = pt2::view_of_bytes(bytes, dtype, offset, sizes, strides);
    push(items.size() > 4 ? with_gradients(result, *items[4]) : result);
  }

  // Returns the bytes of a storage as numbers of a view that torch reads through a dict of bits, {"conj": True, "neg":
  // True}. Views with the same bits share these numbers, as they share the storage: a small file may have many.
  at::Tensor with_bits(const at::Tensor& bytes, at::ScalarType dtype, const Object& bits) {
    if (bits.kind == Object::Plain && bits.value.isNone()) return bytes;
    if (bits.kind != Object::Dict) fail("a tensor whose bits are no dict");
    bool neg = false, conj = false;
    for (size_t i = 0; i + 1 < bits.items.size(); i += 2) {
      const std::string& name = text(*bits.items[i]);
      const Object& set = *bits.items[i + 1];
      const bool is_neg = name == "neg" && at::isSignedType(dtype) && !at::isFloat8Type(dtype);
      if (set.kind != Object::Plain || !set.value.isBool() || !(is_neg || (name == "conj" && at::isComplexType(dtype))))
        fail("a tensor of " + std::string(at::toString(dtype)) + " with the property '" + name + "'",
             "save tensor.clone()");
      (is_neg ? neg : conj) = set.value.toBool();
    }
    if (!neg && !conj) return bytes;
    at::Tensor& numbers = numbers_[{bytes.unsafeGetTensorImpl(), dtype, neg, conj}];
    if (!numbers.defined()) {
      const int64_t count = bytes.numel() / static_cast<int64_t>(at::elementSize(dtype));
      numbers = pt2::view_of_bytes(bytes, dtype, 0, {count}, {1});
      if (neg) numbers = at::neg(numbers);
      if (conj) numbers = at::conj_physical(numbers);
    }
    return numbers;
  }

  // Returns the tensor, which requires gradients if the flag is true.
  at::Tensor with_gradients(at::Tensor tensor, const Object& flag) const {
    if (flag.kind != Object::Plain || !flag.value.isBool() || !flag.value.toBool()) return tensor;
    if (!tensor.is_floating_point() && !tensor.is_complex()) fail("an integer tensor cannot require gradients");
    return tensor.set_requires_grad(true);
  }

  // State of an OrderedDict (its attributes) is of no interest; of anything else it is refused.
  void build() {
    pop();
    if (top()->kind != Object::Dict) fail("an object with a state of its own");
  }

  c10::IValue finish(const Object& o, int depth = 0) {
    if (depth > kMaxDepth) fail("is nested deeper than " + std::to_string(kMaxDepth));
    if (++leaves_ > kMaxLeaves) fail("has more than " + std::to_string(kMaxLeaves) + " elements");
    switch (o.kind) {
      case Object::Plain: return o.value;
      case Object::Tuple: {
        std::vector<c10::IValue> items;
        for (const Object* item : o.items) items.push_back(finish(*item, depth + 1));
        return c10::ivalue::Tuple::create(std::move(items));
      }
      case Object::List: {
        c10::impl::GenericList items(c10::AnyType::get());
        for (const Object* item : o.items) items.push_back(finish(*item, depth + 1));
        return items;
      }
      case Object::Dict: {
        c10::impl::GenericDict items(c10::StringType::get(), c10::AnyType::get());
        for (size_t i = 0; i + 1 < o.items.size(); i += 2) {
          const Object& key = *o.items[i];
          if (key.kind != Object::Plain || !(key.value.isString() || key.value.isInt()))
            fail("a dict key that is no string or integer");
          items.insert_or_assign(key.value.isString() ? key.value : c10::IValue(std::to_string(key.value.toInt())),
                                 finish(*o.items[i + 1], depth + 1));
        }
        return items;
      }
      default: fail("holds something that is no tensor, number or string: " + o.text);
    }
  }

  const ZipFile& zip_;
  std::string data_;
  size_t at_ = 0, leaves_ = 0;
  std::deque<Object> objects_;
  std::vector<Object*> stack_;
  std::unordered_map<uint64_t, Object*> memo_;
  std::unordered_map<std::string, at::Tensor> storages_;
  // Numbers of with_bits(), by storage, dtype and the bits neg and conj.
  std::map<std::tuple<const at::TensorImpl*, at::ScalarType, bool, bool>, at::Tensor> numbers_;
};

c10::IValue unpickle(const ZipFile& zip) {
  const ZipEntry& pickle = zip.get("data.pkl");
  if (pickle.size > kMaxPickle)
    throw Error(ErrorKind::BadFile, zip.path() + ": a pickle of " + std::to_string(pickle.size) + " bytes", "",
                kWriteAgain);
  if (const ZipEntry* order = zip.find("byteorder"); order && order->size < 16 && zip.read(*order) != "little")
    throw Error(ErrorKind::BadFile, zip.path() + ": was written on a big-endian machine", "",
                "save it on a little-endian machine, or as .safetensors");
  return Machine(zip, zip.read(pickle)).run();
}

}  // namespace

c10::IValue unpickle_file(const std::string& path) { return unpickle(ZipFile(path)); }
c10::IValue unpickle_archive(std::string_view bytes, const std::string& name) { return unpickle(ZipFile(name, bytes)); }

}  // namespace plumb
