#include "plumb/checkpoint/safetensors.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <filesystem>

#include "plumb/core/error.h"
#include "plumb/core/folder_testing.h"
#include "plumb/exported/programs_testing.h"
#include "tests/fuzz/mutate.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using plumb::testing::slurp;
using plumb::testing::spill;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Safetensors : public FolderTest {
 protected:
  std::string path(const std::string& name = "x.safetensors") const { return (folder_ / name).string(); }
  // Returns a file with this header and so many bytes after it.
  std::string with_header(const std::string& header, size_t bytes) const {
    std::string text(8, '\0');
    for (int i = 0; i < 8; ++i) text[static_cast<size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
    spill(path(), text + header + std::string(bytes, '\1'));
    return path();
  }
};

// Bytes and all, for NaN and dtypes without arithmetic.
bool same(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.numel() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

NamedTensors one_of_each() {
  at::manual_seed(0);
  NamedTensors tensors;
  for (const at::ScalarType dtype :
       {at::kByte, at::kBool, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
        at::kDouble, at::kUInt16, at::kUInt32, at::kUInt64, at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    tensors.emplace_back(std::string("layers.0.") + at::toString(dtype), (at::randn({3, 5}) * 10).abs().to(dtype));
  }
  tensors.emplace_back("scalar", at::tensor(3.5));
  tensors.emplace_back("empty", at::empty({0, 4}));
  tensors.emplace_back("transposed", at::arange(6).reshape({2, 3}).t());
  tensors.emplace_back("nan", at::full({2}, std::nan("")));
  tensors.emplace_back("ü \"quoted\"", at::ones({1}));
  return tensors;
}

TEST_F(Safetensors, HoldsEveryDtypeOfTheFormatBitForBit) {
  const NamedTensors tensors = one_of_each();
  const auto sums = write_safetensors(path(), tensors, {{"format", "pt"}, {"note", "ä"}});
  const SafetensorsFile file(path());
  EXPECT_EQ(file.entries().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("note"), "ä");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    Checksum sum, in_pieces;
    EXPECT_TRUE(same(file.read(name, &sum), tensor)) << name;
    EXPECT_EQ(sum, sums[i]) << name;
    file.add_to(name, in_pieces);
    EXPECT_EQ(in_pieces, sums[i]) << name;
    EXPECT_EQ(file.get(name).offset % tensor.element_size(), 0u) << name;
  }
}

TEST_F(Safetensors, AreThoseOfTheFormatsOwnLibraryInBothDirections) {
  const NamedTensors tensors = one_of_each();
  write_safetensors(path("ours.safetensors"), tensors);
  const std::string script = path("check.py");
  spill(script, R"(import sys
from safetensors.torch import load_file, save_file
tensors = load_file(sys.argv[1])
assert len(tensors) == 21 and tensors["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]], tensors
save_file(tensors, sys.argv[2], metadata={"format": "pt"})
)");
  std::string said;
  ASSERT_EQ(plumb::testing::python(
                "'" + script + "' '" + path("ours.safetensors") + "' '" + path("theirs.safetensors") + "'", &said),
            0)
      << said;
  const SafetensorsFile theirs(path("theirs.safetensors"));
  EXPECT_EQ(theirs.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(same(theirs.read(name), tensor)) << name;
}

TEST_F(Safetensors, AFileOfNoTensorsIsOne) {
  write_safetensors(path(), {}, {});
  EXPECT_EQ(slurp(path()).size(), 16u);
  EXPECT_TRUE(SafetensorsFile(path()).entries().empty());
}

TEST_F(Safetensors, RefuseEveryHeaderThatIsNotTheFormats) {
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_TRUE(SafetensorsFile(with_header("{" + a + "}", 8)).find("a"));
  const struct {
    std::string header;
    size_t bytes;
    std::string says;
  } cases[] = {
      {"", 0, "no JSON"},
      {"[]", 0, "no JSON at byte 8"},
      {"{", 0, "no JSON"},
      {"{" + a + "} x", 8, "no JSON"},
      {"{" + a + "}", 7, "ends before its last byte"},
      {"{" + a + "}", 9, "1 bytes at its end"},
      {"{" + a + "," + a + "}", 8, "comes twice"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", 0, "'k' comes twice"},
      {R"({"__metadata__":{"k":1}})", 0, "a number stands"},
      {R"({"__metadata__":{"k":["1"]}})", 0, "a list stands"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "12 bytes, its data_offsets 8"},
      {R"({"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}})", 1, "none that torch has"},
      {R"({"a":{"dtype":"F32","dtype":"U8","shape":[2],"data_offsets":[0,8]}})", 8, "'dtype'"},
      {R"({"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}})", 8, "'shape'"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", 0, "has no dtype, shape or data_offsets"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "negative"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "fraction"},
      {R"({"a":{"dtype":"F32","shape":[[2]],"data_offsets":[0,8]}})", 8, "a list stands"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "no begin and end"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8, "no begin and end"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "no begin and end"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "belong to no tensor"},
      {R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
       6, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[0,4611686018427387904,4],"data_offsets":[0,0]}})", 0, "more elements"},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0, "more elements"},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,0]}})", 0, "63 bits"},
      {R"({"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,0]}})", 0, "fraction"},
      {R"({"a":null})", 0, "null stands"},
      {R"({"a":"b"})", 0, "a text stands"},
      {"{\"\xff\":{}}", 0, "no JSON"},
      {"{\"a\":" + std::string(100000, '{'), 0, "no JSON"},
      {"{\"a\":{\"b\":{", 0, "an object stands"},
  };
  for (const auto& c : cases) {
    const Error error = error_of([&] { SafetensorsFile(with_header(c.header, c.bytes)); });
    EXPECT_EQ(error.kind(), ErrorKind::BadFile) << c.header.substr(0, 200);
    EXPECT_THAT(error.what(), HasSubstr(c.says)) << c.header.substr(0, 200);
    EXPECT_THAT(error.what(), HasSubstr("x.safetensors"));
  }
  spill(path(), std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10));
  EXPECT_THAT(error_of([&] { SafetensorsFile{path()}; }).what(), HasSubstr("limit"));
  spill(path(), std::string("\x09\0\0\0\0\0\0\0{}", 10));
  EXPECT_THAT(error_of([&] { SafetensorsFile{path()}; }).what(), HasSubstr("ends within"));
}

TEST_F(Safetensors, RefuseToWriteWhatTheFormatCannotHold) {
  const auto kind = [&](const NamedTensors& tensors) {
    return error_of([&] { write_safetensors(path(), tensors); }).kind();
  };
  const at::Tensor x = at::ones({2});
  EXPECT_EQ(kind({{"a", x}, {"a", x}}), ErrorKind::InvalidArgument);
  EXPECT_EQ(kind({{"__metadata__", x}}), ErrorKind::InvalidArgument);
  EXPECT_EQ(kind({{"\xff", x}}), ErrorKind::InvalidArgument);
  EXPECT_EQ(kind({{"a", at::Tensor()}}), ErrorKind::Unsupported);
  EXPECT_EQ(kind({{"a", x.to_sparse()}}), ErrorKind::Unsupported);
  EXPECT_EQ(kind({{"a", x.to(at::kComplexDouble)}}), ErrorKind::Unsupported);
  EXPECT_EQ(kind({{"a", at::empty({2}, at::device(at::kMeta))}}), ErrorKind::Unsupported);
  EXPECT_FALSE(fs::exists(path()));
  EXPECT_EQ(error_of([&] { write_safetensors(path("none/x.safetensors"), {}); }).kind(), ErrorKind::CannotWrite);
}

TEST_F(Safetensors, BrokenFilesAreErrorsOrTensors) {
  write_safetensors(path("whole.safetensors"), {{"a", at::arange(6).to(at::kInt)}, {"b", at::ones({2, 2}) > 0}});
  const std::string whole = slurp(path("whole.safetensors"));
  fuzz::Random random(7);
  int read = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string bytes = whole;
    fuzz::mutate_bytes(bytes, random);
    spill(path(), bytes);
    try {
      const SafetensorsFile file(path());
      for (const auto& entry : file.entries()) {
        EXPECT_EQ(file.read(entry.name).nbytes(), entry.bytes);
        ++read;
      }
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::BadFile) << e.what();
    }
  }
  EXPECT_GT(read, 0);
}

TEST_F(Safetensors, ABoolIsTrueForEveryByteButZero) {
  const std::string file = with_header(R"({"a":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}})", 0);
  spill(file, slurp(file) + std::string("\x02\0", 2));
  const at::Tensor a = SafetensorsFile(file).read("a");
  EXPECT_EQ(static_cast<const uint8_t*>(a.data_ptr())[0], 1);
  EXPECT_EQ(static_cast<const uint8_t*>(a.data_ptr())[1], 0);
}

TEST_F(Safetensors, AFolderReadsOnlyWhatIsAskedFor) {
  write_safetensors(path("model-1.safetensors"), {{"a", at::ones({8})}, {"b", at::ones({16})}});
  write_safetensors(path("model-2.safetensors"), {{"c", at::ones({32})}});
  spill(
      path("model.safetensors.index.json"),
      R"({"metadata":{"total_size":224},"weight_map":{"a":"model-1.safetensors","b":"model-1.safetensors","c":"model-2.safetensors"}})");
  const TensorFolder folder(folder_.string());
  EXPECT_THAT(folder.names(), ElementsAre("a", "b", "c"));
  EXPECT_EQ(folder.meta("b").sizes, std::vector<int64_t>{16});
  EXPECT_EQ(folder.bytes_read(), 0u);
  fs::remove(path("model-2.safetensors"));  // nobody has asked for it
  EXPECT_TRUE(same(folder.read("b"), at::ones({16})));
  EXPECT_EQ(folder.bytes_read(), 64u);
  EXPECT_EQ(error_of([&] { folder.read("c"); }).kind(), ErrorKind::BadFile);
  EXPECT_EQ(error_of([&] { folder.read("d"); }).kind(), ErrorKind::UnknownName);
}

TEST_F(Safetensors, AFolderOfOneFileNeedsNoIndex) {
  write_safetensors(path("any.safetensors"), {{"a", at::ones({8})}});
  EXPECT_THAT(TensorFolder(folder_.string()).names(), ElementsAre("a"));
  EXPECT_THAT(TensorFolder(path("any.safetensors")).names(), ElementsAre("a"));
  write_safetensors(path("model.safetensors"), {{"m", at::ones({8})}});
  EXPECT_THAT(TensorFolder(folder_.string()).names(), ElementsAre("m"));
  fs::rename(path("model.safetensors"), path("other.safetensors"));
  EXPECT_THAT(error_of([&] { TensorFolder{folder_.string()}; }).what(), HasSubstr("holds 2 .safetensors files"));
  EXPECT_THAT(error_of([&] { TensorFolder{path("none")}; }).what(), HasSubstr("none"));
}

TEST_F(Safetensors, AFolderWithBothIsReadAsTransformersReadsIt) {
  write_safetensors(path("model.safetensors"), {{"new", at::ones({8})}});
  spill(path("model.safetensors.index.json"), R"({"weight_map":{"old":"model-1.safetensors"}})");
  EXPECT_THAT(TensorFolder(folder_.string()).names(), ElementsAre("new"));
}

TEST_F(Safetensors, AnIndexLeadsOutOfItsFolderNowhere) {
  for (const char* file :
       {"../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "x.bin", "", "a\\u0000.safetensors"}) {
    spill(path("model.safetensors.index.json"), std::string(R"({"weight_map":{"a":")") + file + "\"}}");
    const Error error = error_of([&] { TensorFolder{folder_.string()}; });
    EXPECT_EQ(error.kind(), ErrorKind::BadFile);
    EXPECT_THAT(error.what(), HasSubstr("no name of a file here"));
  }
  for (const char* text : {"{}", "[]", "{", R"({"weight_map":[]})", R"({"weight_map":{"a":1}})"}) {
    spill(path("model.safetensors.index.json"), text);
    EXPECT_EQ(error_of([&] { TensorFolder{folder_.string()}; }).kind(), ErrorKind::BadFile) << text;
  }
  spill(path("model.safetensors.index.json"), R"({"weight_map":{"a":5}})");
  EXPECT_THAT(error_of([&] { TensorFolder{folder_.string()}; }).what(), HasSubstr("tensor 'a' is in something"));
}

}  // namespace
}  // namespace plumb
