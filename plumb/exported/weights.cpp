#include "plumb/exported/weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <unordered_map>

#include "plumb/core/error.h"
#include "plumb/exported/pt2_types.h"
#include "plumb/exported/tensor_files/pickle_file.h"

namespace plumb::pt2 {
namespace {

void check_device(const JsonDoc& doc, const Json& j, at::Device device) {
  const bool there = device.is_cpu() || device.is_meta() ||
                     (c10::impl::hasDeviceGuardImpl(device.type()) &&
                      device.index() < c10::impl::getDeviceGuardImpl(device.type())->deviceCount());
  if (!there) {
    doc.fail(j, "the tensor belongs on device '" + device.str() + "', which is not available here",
             "load the file onto another device, for example cpu");
  }
}

}  // namespace

bool lies_inside(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset,
                 int64_t item_size, uint64_t bytes) {
  int64_t last = offset, all = item_size;  // all: a stride of 0 shows a byte any number of times
  for (int64_t size : sizes) {
    if (__builtin_mul_overflow(all, size, &all)) return false;
  }
  if (all == 0) return true;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t reach;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &reach) || __builtin_add_overflow(last, reach, &last))
      return false;
  }
  int64_t end;
  if (__builtin_add_overflow(last, 1, &end) || __builtin_mul_overflow(end, item_size, &end)) return false;
  return static_cast<uint64_t>(end) <= bytes;
}

at::Tensor view_of_bytes(const at::Tensor& bytes, at::ScalarType dtype, int64_t offset,
                         const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  return at::empty({0}, bytes.options().dtype(dtype)).set_(bytes.storage(), offset, sizes, strides);
}

StoredTensors read_stored(const ZipFile& zip, const std::string& config, const std::string& folder,
                          std::optional<at::Device> device) {
  StoredTensors stored_tensors;
  auto& found = stored_tensors.by_name;
  const std::string config_text = zip.read_text(zip.get(config));
  const JsonDoc doc(zip.path() + "/" + config, config_text);
  std::unordered_map<std::string, at::Tensor> storages;  // by record and device
  std::unordered_map<std::string, c10::IValue> pickled_records;
  std::map<std::string, StoredTensor> same;  // by everything that makes two entries one tensor
  const Json& entries = doc.object(doc.at(doc.root(), "config"));
  for (auto it = entries.begin(); it != entries.end(); ++it) {
    const Json& entry = *it;
    const std::string& record = doc.string(doc.at(entry, "path_name"));
    const bool is_parameter = doc.boolean(doc.at(entry, "is_param"));
    if (!doc.find(entry, "tensor_meta"))
      doc.fail(entry, "'" + it.key() + "' is no tensor but a custom object, which a graph cannot hold");
    const StoredMeta stored = read_stored_meta(doc, doc.at(entry, "tensor_meta"));
    const TensorMeta& meta = stored.meta;
    const std::string identity = Json({record, doc.at(entry, "tensor_meta"), is_parameter}).dump();
    // torch writes all tensors without elements to one record.
    if (auto known = same.find(identity); known != same.end() && known->second.tensor.numel() > 0) {
      found.emplace(it.key(), known->second);
      continue;
    }
    const at::Device where = device.value_or(meta.device);
    check_device(doc, entry, where);
    const bool pickled = doc.find(entry, "use_pickle") && doc.boolean(doc.at(entry, "use_pickle"));
    StoredTensor result;
    result.is_parameter = is_parameter;
    if (pickled) {
      auto [archive, fresh] = pickled_records.try_emplace(record);
      if (fresh) {
        const std::string text = zip.read(zip.get(folder + record));
        archive->second = unpickle_archive(text, zip.path() + "/" + folder + record);
      }
      if (!archive->second.isTensor()) doc.fail(entry, "'" + it.key() + "' is no tensor");
      result.tensor = archive->second.toTensor().detach().to(where);
    } else if (where.is_meta()) {
      const auto item = static_cast<int64_t>(at::elementSize(meta.dtype));
      if (!lies_inside(meta.sizes, meta.strides, 0, item, UINT64_MAX))
        doc.fail(entry, "'" + it.key() + "' has more elements than numbers count");
      result.tensor = at::empty_strided(meta.sizes, meta.strides, at::dtype(meta.dtype).device(where));
    } else {
      at::Tensor& bytes = storages[record + "@" + where.str()];
      const ZipEntry& data = zip.get(folder + record);
      if (!lies_inside(meta.sizes, meta.strides, stored.storage_offset,
                       static_cast<int64_t>(at::elementSize(meta.dtype)), data.size)) {
        doc.fail(entry,
                 "'" + it.key() + "' does not fit the " + std::to_string(data.size) + " bytes of its record " + record);
      }
      if (!bytes.defined()) {
        bytes = at::empty({static_cast<int64_t>(data.size)}, at::kByte);
        zip.read_into(data, bytes.data_ptr());
        bytes = bytes.to(where);
      }
      result.tensor = view_of_bytes(bytes, meta.dtype, stored.storage_offset, meta.sizes, meta.strides);
    }
    if (is_parameter && meta.requires_grad) {
      // A pickled tensor's own dtype may be another than the entry says.
      if (!result.tensor.is_floating_point() && !result.tensor.is_complex())
        doc.fail(entry, "an integer tensor cannot require gradients");
      result.tensor.set_requires_grad(true);
    }
    same.emplace(identity, result);
    found.emplace(it.key(), std::move(result));
  }
  const OrderedJson ordered = OrderedJson::parse(config_text);
  for (const auto& item : ordered.at("config").items()) stored_tensors.order.push_back(item.key());
  return stored_tensors;
}

OrderedJson write_stored(const std::vector<ToStore>& tensors, const std::string& folder, const std::string& prefix,
                         const std::function<void(const std::string&, const void*, size_t)>& write_record) {
  // How many different tensors look into a storage.
  std::unordered_map<const void*, std::vector<const at::TensorImpl*>> users;
  auto storage_of = [](const at::Tensor& t) -> const void* { return t.storage().unsafeGetStorageImpl(); };
  for (const ToStore& item : tensors) {
    if (!item.tensor.defined() || item.tensor.layout() != at::kStrided || item.tensor.is_quantized()) {
      throw Error(ErrorKind::Unsupported, "tensor '" + item.name + "' is not an ordinary dense tensor", "",
                  "a .pt2 file holds strided tensors only");
    }
    auto& list = users[storage_of(item.tensor)];
    if (std::find(list.begin(), list.end(), item.tensor.unsafeGetTensorImpl()) == list.end())
      list.push_back(item.tensor.unsafeGetTensorImpl());
  }
  struct Written {
    std::string record;
    bool compact;  // the record holds the tensor alone, from its first element on
    at::Tensor tensor;
  };
  std::unordered_map<const void*, Written> written;
  OrderedJson config = OrderedJson::object();  // torch's state_dict has this order
  for (const ToStore& item : tensors) {
    const void* storage = storage_of(item.tensor);
    auto known = written.find(storage);
    if (known == written.end()) {
      at::Tensor tensor = item.tensor.detach().resolve_conj().resolve_neg();
      const size_t own = static_cast<size_t>(tensor.numel()) * tensor.itemsize();
      // A slice of something larger that nobody else stores is written alone.
      const bool compact = users[storage].size() == 1 && tensor.storage().nbytes() != own;
      if (compact && !tensor.is_meta()) tensor = tensor.clone();
      if (!tensor.is_cpu() && !tensor.is_meta()) {
        at::Tensor all = at::empty({0}, tensor.options().dtype(at::kByte))
                             .set_(tensor.storage(), 0, {static_cast<int64_t>(tensor.storage().nbytes())}, {1});
        all = all.cpu();
        tensor = view_of_bytes(all, tensor.scalar_type(), tensor.storage_offset(), tensor.sizes().vec(),
                               tensor.strides().vec());
      }
      Written w{prefix + std::to_string(written.size()), compact, tensor};
      const size_t bytes = tensor.is_meta() ? 0 : tensor.storage().nbytes();
      write_record(folder + w.record, bytes ? tensor.storage().data() : "", bytes);
      known = written.emplace(storage, std::move(w)).first;
    }
    const Written& w = known->second;
    const at::Tensor& shape = w.compact ? w.tensor : item.tensor;
    Json meta = write_stored_meta(shape, shape.storage_offset());
    meta["device"] = write_device(item.tensor.device());
    meta["requires_grad"] = item.tensor.requires_grad();
    config[item.name] = {{"path_name", w.record},
                         {"is_param", item.is_parameter},
                         {"use_pickle", false},
                         {"tensor_meta", std::move(meta)}};
  }
  return {{"config", std::move(config)}};
}

}  // namespace plumb::pt2
