#include "plumb/exported/tensor_files/tensor_file.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>

#include <cstring>
#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/core/output_file.h"
#include "plumb/exported/tensor_files/pickle_file.h"
#include "plumb/exported/weights.h"
#include "plumb/graph/names.h"

namespace plumb {
namespace {

[[noreturn]] void bad(const std::string& path, const std::string& what,
                      const std::string& remedy = "get the file again, or write it with numpy.save") {
  throw Error(ErrorKind::BadFile, path + ": " + what, "", remedy);
}

// Returns a key's value in numpy's header, a Python dict: {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
std::string header_field(const std::string& path, const std::string& header, const std::string& key) {
  size_t at = header.find("'" + key + "'");
  if (at != std::string::npos) at = header.find(':', at);
  if (at == std::string::npos) bad(path, "its header has no '" + key + "'");
  at = header.find_first_not_of(' ', at + 1);
  if (at == std::string::npos) bad(path, "its header has no '" + key + "'");
  const char open = header[at];
  const size_t end = open == '('    ? header.find(')', at)
                     : open == '\'' ? header.find('\'', at + 1)
                                    : header.find_first_of(",}", at);
  if (end == std::string::npos) bad(path, "its header is broken at '" + key + "'");
  return open == '(' || open == '\'' ? header.substr(at + 1, end - at - 1) : header.substr(at, end - at);
}

// Throws Error(Unsupported) for a tensor whose values are not all in one storage.
void check_dense(const std::string& path, const at::Tensor& tensor) {
  if (tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_meta()) return;
  throw Error(ErrorKind::Unsupported,
              path + ": a tensor that is sparse, quantized or on the meta device cannot be saved", "",
              "save tensor.to_dense() or tensor.dequantize(); a meta tensor has no values");
}

// torch.save's pickle, protocol 2.
class Pickler {
 public:
  explicit Pickler(const std::string& path) : path_(path) {}
  void write(const c10::IValue& v, int depth = 0) {
    if (depth > 60) throw Error(ErrorKind::InvalidArgument, path_ + ": the value is nested too deeply");
    if (v.isNone()) {
      out_ += 'N';
    } else if (v.isTensor()) {
      tensor(v.toTensor());
    } else if (v.isBool()) {
      out_ += v.toBool() ? '\x88' : '\x89';
    } else if (v.isInt()) {
      out_ += std::string("\x8a\x08", 2);
      little(static_cast<uint64_t>(v.toInt()), 8);
    } else if (v.isDouble()) {
      uint64_t bits;
      const double d = v.toDouble();
      std::memcpy(&bits, &d, 8);
      out_ += 'G';
      for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i));
    } else if (v.isString()) {
      text(v.toStringRef());
    } else if (v.isList()) {
      out_ += "](";
      for (const c10::IValue& e : v.toListRef()) write(e, depth + 1);
      out_ += 'e';
    } else if (v.isTuple()) {
      out_ += '(';
      for (const c10::IValue& e : v.toTupleRef().elements()) write(e, depth + 1);
      out_ += 't';
    } else if (v.isGenericDict()) {
      out_ += "}(";
      for (const auto& entry : v.toGenericDict()) {
        write(entry.key(), depth + 1);
        write(entry.value(), depth + 1);
      }
      out_ += 'u';
    } else {
      throw Error(ErrorKind::Unsupported, path_ + ": a value of kind " + v.tagKind() + " cannot be saved", "",
                  "save tensors, numbers, strings, and lists, tuples or dicts of them");
    }
  }
  std::string finish() && { return "\x80\x02" + std::move(out_) + "."; }
  const std::vector<at::Tensor>& storages() const { return storages_; }

 private:
  void little(uint64_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(v >> (8 * i));
  }
  void text(const std::string& s) {
    out_ += 'X';
    little(s.size(), 4);
    out_ += s;
  }
  void integers(at::IntArrayRef values) {
    out_ += '(';
    for (int64_t v : values) write(v);
    out_ += 't';
  }
  void global(const std::string& module, const std::string& name) { out_ += "c" + module + "\n" + name + "\n"; }

  void tensor(const at::Tensor& given) {
    if (!given.defined()) {
      out_ += 'N';
      return;
    }
    check_dense(path_, given);
    // A key by storage: tensors that share memory share it again. Slices of something larger are saved alone.
    at::Tensor t = given.detach().resolve_conj().resolve_neg().cpu();
    const void* storage = given.storage().unsafeGetStorageImpl();
    auto known = keys_.find(storage);
    if (known == keys_.end() || !t.is_alias_of(storages_[known->second])) {
      known = keys_.insert_or_assign(storage, storages_.size()).first;
      storages_.push_back(t);
    }
    const DtypeNames* names = dtype_names(t.scalar_type());
    if (!names)
      throw Error(ErrorKind::Unsupported,
                  path_ + ": tensors of dtype " + at::toString(t.scalar_type()) + " cannot be saved");
    // As newer torch does: types without a storage class are written as bytes with their dtype beside.
    const bool classic = !names->storage.empty();
    global("torch._utils", classic ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    out_ += "((";
    text("storage");
    if (classic) {
      global("torch", std::string(names->storage));
    } else {
      global("torch.storage", "UntypedStorage");
    }
    text(std::to_string(known->second));
    text("cpu");
    const int64_t bytes = static_cast<int64_t>(t.storage().nbytes());
    write(classic ? bytes / static_cast<int64_t>(t.itemsize()) : bytes);
    out_ += "tQ";
    write(t.storage_offset());
    integers(t.sizes());
    integers(t.strides());
    out_ += given.requires_grad() ? '\x88' : '\x89';
    global("collections", "OrderedDict");
    out_ += ")R";
    if (!classic) global("torch", std::string(names->torch));
    out_ += "tR";
  }

  const std::string path_;
  std::string out_;
  std::unordered_map<const void*, size_t> keys_;
  std::vector<at::Tensor> storages_;
};

void save_pickle(const c10::IValue& value, const std::string& path) {
  Pickler pickler(path);
  pickler.write(value);
  const auto storages = pickler.storages();
  const std::string pickle = std::move(pickler).finish();
  OutputFile file(path);
  try {
    caffe2::serialize::PyTorchStreamWriter zip([&](const void* data, size_t size) { return file.write(data, size); });
    zip.writeRecord("data.pkl", pickle.data(), pickle.size());
    zip.writeRecord("byteorder", "little", 6);
    for (size_t i = 0; i < storages.size(); ++i) {
      const size_t bytes = storages[i].storage().nbytes();
      zip.writeRecord("data/" + std::to_string(i), bytes ? storages[i].storage().data() : "", bytes);
      file.check();
    }
    zip.writeEndOfFile();
  } catch (const c10::Error& e) {
    file.check();
    bad(path, std::string("cannot be written: ") + e.what_without_backtrace(), "");
  }
  file.commit();
}

bool is_npy(const std::string& path) { return path.ends_with(".npy"); }
bool is_pickle(const std::string& path) { return path.ends_with(".pt") || path.ends_with(".pth"); }

}  // namespace

c10::IValue load_tensors(const std::string& path) {
  if (is_npy(path)) return load_npy(path);
  if (is_pickle(path)) return unpickle_file(path);
  throw Error(ErrorKind::InvalidArgument, path + ": is no tensor file by its name", "",
              "use a name that ends in .pt or .npy");
}

void save_tensors(const c10::IValue& value, const std::string& path) {
  if (is_pickle(path)) return save_pickle(value, path);
  if (!is_npy(path))
    throw Error(ErrorKind::InvalidArgument, path + ": is no tensor file by its name", "",
                "use a name that ends in .pt or .npy");
  if (!value.isTensor())
    throw Error(ErrorKind::InvalidArgument, path + ": a .npy file holds one tensor", "", "save to a .pt file");
  save_npy(value.toTensor(), path);
}

namespace {

NpyHeader read_npy_header(const std::string& path, const InputFile& file) {
  unsigned char start[12];
  if (file.size() < 10) bad(path, "is no .npy file");
  file.read_at(0, start, 10);
  if (std::memcmp(start, "\x93NUMPY", 6) != 0) bad(path, "is no .npy file");
  uint64_t length = start[8] | start[9] << 8, header_end = 10;
  if (start[6] >= 2) {
    if (file.size() < 12) bad(path, "ends inside its header");
    file.read_at(10, start + 10, 2);
    length |= static_cast<uint64_t>(start[10]) << 16 | static_cast<uint64_t>(start[11]) << 24;
    header_end = 12;
  }
  if (start[6] < 1 || start[6] > 3)
    bad(path, "has version " + std::to_string(start[6]) + " of the format, 1 to 3 are known");
  if (length > file.size() - header_end || length > (1u << 20)) bad(path, "ends inside its header");
  std::string header(length, '\0');
  file.read_at(header_end, header.data(), length);
  const std::string descr = header_field(path, header, "descr");
  const DtypeNames* type = nullptr;
  for (const DtypeNames& n : all_dtype_names()) {
    if (n.npy.empty()) continue;
    if (descr == n.npy || (descr.size() == 3 && descr.substr(1) == n.npy.substr(1) && n.npy[0] == '|')) type = &n;
  }
  if (!type) bad(path, "holds numbers of type '" + descr + "'", "save it as little-endian floats or integers");
  if (header_field(path, header, "fortran_order") != "False")
    bad(path, "is in Fortran order", "save numpy.ascontiguousarray of it");
  std::vector<int64_t> sizes;
  int64_t bytes = static_cast<int64_t>(at::elementSize(type->dtype));
  const std::string shape = header_field(path, header, "shape");
  for (size_t at = 0; at < shape.size();) {
    const size_t digit = shape.find_first_not_of(", ", at);
    if (digit == std::string::npos) break;
    size_t end = digit;
    int64_t size = 0;
    while (end < shape.size() && std::isdigit(static_cast<unsigned char>(shape[end])) && size < (int64_t{1} << 56))
      size = size * 10 + (shape[end++] - '0');
    if (end == digit || sizes.size() >= 64 || __builtin_mul_overflow(bytes, size, &bytes))
      bad(path, "has the shape (" + shape + ")");
    sizes.push_back(size);
    at = end;
  }
  if (static_cast<uint64_t>(bytes) != file.size() - header_end - length)
    bad(path, "has " + std::to_string(file.size() - header_end - length) + " bytes of data, its shape (" + shape +
                  ") needs " + std::to_string(bytes));
  return {type->dtype, sizes, header_end + length};
}

}  // namespace

NpyHeader read_npy_header(const std::string& path) { return read_npy_header(path, InputFile(path)); }

at::Tensor load_npy(const std::string& path) {
  const InputFile file(path);
  const NpyHeader header = read_npy_header(path, file);
  at::Tensor tensor = at::empty(header.sizes, at::dtype(header.dtype));
  if (tensor.numel()) file.read_at(header.offset, tensor.data_ptr(), tensor.nbytes());
  // A byte that is neither 0 nor 1 is no bool, but C++ would take it for one.
  if (header.dtype == at::kBool) tensor.view(at::kByte).ne_(0);
  return tensor;
}

void save_npy(const at::Tensor& tensor, const std::string& path) {
  if (!tensor.defined())
    throw Error(ErrorKind::InvalidArgument, path + ": an undefined tensor has nothing to save", "", "save a tensor");
  check_dense(path, tensor);
  const at::Tensor t = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const DtypeNames* type = dtype_names(t.scalar_type());
  if (!type || type->npy.empty())
    throw Error(ErrorKind::Unsupported, path + ": numpy has no type for " + at::toString(t.scalar_type()), "",
                "convert to float32, or save to a .pt file");
  std::string shape;
  for (int64_t size : t.sizes()) shape += std::to_string(size) + ", ";
  std::string header =
      "{'descr': '" + std::string(type->npy) + "', 'fortran_order': False, 'shape': (" + shape + "), }";
  header.append(63 - (10 + header.size()) % 64, ' ');
  header += '\n';
  std::string start("\x93NUMPY\x01\x00", 8);
  start += static_cast<char>(header.size() & 0xFF);
  start += static_cast<char>(header.size() >> 8);
  OutputFile file(path);
  file.write(start.data(), start.size());
  file.write(header.data(), header.size());
  file.write(t.numel() ? t.data_ptr() : "", t.nbytes());
  file.commit();
}

TokenFile::TokenFile(std::string path, at::ScalarType dtype) : path_(path), file_(path), dtype_(dtype) {
  if (dtype != at::kByte && dtype != at::kUInt16 && dtype != at::kInt)
    throw Error(ErrorKind::InvalidArgument, path + ": tokens are uint8, uint16 or int32, not " + at::toString(dtype));
  if (file_.size() % at::elementSize(dtype))
    bad(path, "has " + std::to_string(file_.size()) + " bytes, no whole number of " + at::toString(dtype) + " tokens",
        "tokens of another type, or the whole file");
  count_ = static_cast<int64_t>(file_.size() / at::elementSize(dtype));
}

TokenFile::TokenFile(std::string path, at::ScalarType dtype, uint64_t offset, int64_t count)
    : path_(path), file_(path), dtype_(dtype), offset_(offset), count_(count) {
  if (!at::isIntegralType(dtype, /*includeBool=*/false))
    bad(path, std::string("tokens are whole numbers, not ") + at::toString(dtype), "a file of integers");
  const uint64_t item = at::elementSize(dtype);
  if (count < 0 || offset > file_.size() || static_cast<uint64_t>(count) > (file_.size() - offset) / item)
    bad(path, "has not " + std::to_string(count) + " tokens from byte " + std::to_string(offset) + " on",
        "get the file again");
}

at::Tensor TokenFile::read(int64_t start, int64_t count) const {
  if (start < 0 || count < 0 || start > size() - count) {
    throw Error(ErrorKind::InvalidArgument, path_ + ": has " + std::to_string(size()) + " tokens, not " +
                                                std::to_string(count) + " from token " + std::to_string(start) + " on");
  }
  const at::Tensor tokens = at::empty({count}, at::dtype(dtype_));
  const uint64_t item = at::elementSize(dtype_);
  if (count) file_.read_at(offset_ + static_cast<uint64_t>(start) * item, tokens.data_ptr(), tokens.nbytes());
  return as_long_tokens(tokens, path_, start);
}

at::Tensor as_long_tokens(const at::Tensor& tokens, const std::string& name, int64_t first) {
  const at::Tensor numbers = tokens.to(at::kLong);
  if (tokens.scalar_type() != at::kUInt64) return numbers;
  const at::Tensor negative = at::nonzero(numbers < 0);
  if (negative.numel() == 0) return numbers;
  const auto place = negative[0].item<int64_t>();
  bad(name,
      "token " + std::to_string(first + place) + " is " +
          std::to_string(static_cast<uint64_t>(numbers[place].item<int64_t>())) + ", tokens are below 2^63",
      "tokens of the model's own tokenizer");
}

}  // namespace plumb
