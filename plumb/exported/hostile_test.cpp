// Files that nobody vouches for end in an error that says what and where.
#include <gmock/gmock.h>

#include <chrono>

#include "plumb/core/checksum.h"
#include "plumb/exported/exported.h"
#include "plumb/exported/json_doc.h"
#include "plumb/exported/programs_testing.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/exported/zip_file.h"
#include "tests/fuzz/mutate.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using namespace plumb::testing;  // NOLINT

// A program's archive, to be taken apart and put together again.
struct Archive {
  explicit Archive(const std::string& name) {
    const fs::path path = programs() / (name + ".pt2");
    bytes = slurp(path);
    ZipFile zip(path);
    for (const ZipEntry& e : zip.entries()) entries.emplace_back(e.name, zip.read(e));
  }
  std::string& entry(const std::string& ending) {
    for (auto& [name, data] : entries) {
      if (name.ends_with(ending)) return data;
    }
    throw std::runtime_error("no entry " + ending);
  }
  // Returns the model's JSON, changed by `edit`.
  template <typename Edit>
  Archive& model(Edit&& edit) {
    Json j = Json::parse(entry("models/model.json"));
    edit(j);
    entry("models/model.json") = j.dump();
    return *this;
  }
  std::string zip() const { return fuzz::make_zip(entries, crc32); }
  std::string bytes;
  std::vector<std::pair<std::string, std::string>> entries;
};

Error load_error(const std::string& bytes) {
  const fs::path path = programs() / "hostile.pt2";
  spill(path, bytes);
  const Error error = error_of([&] { load_pt2(path); });
  EXPECT_EQ(error.kind(), ErrorKind::BadFile);
  EXPECT_THAT(error.what(), HasSubstr("hostile.pt2"));
  return error;
}

TEST(HostileFiles, AnArchivePutTogetherAgainLoads) {
  const fs::path path = programs() / "hostile.pt2";
  spill(path, Archive("linear").zip());
  EXPECT_EQ(load_pt2(path).module->parameters().size(), 4u);
}

TEST(HostileFiles, TruncatedAnywhereIsAnError) {
  const std::string whole = Archive("linear").bytes;
  for (size_t size = 0; size < whole.size(); size += 97) load_error(whole.substr(0, size));
}

TEST(HostileFiles, AFlippedBitInTheWeightsIsAnErrorThatNamesTheRecord) {
  Archive archive("linear");
  std::string bytes = archive.bytes;
  const size_t at = bytes.find(archive.entry("data/weights/weight_0"));
  ASSERT_NE(at, std::string::npos);
  bytes[at + 5] ^= 4;
  EXPECT_THAT(load_error(bytes).what(), AllOf(HasSubstr("checksum"), HasSubstr("weight_0")));
}

TEST(HostileFiles, TagsOfParametersAreChecked) {
  const std::string name = load_pt2(programs() / "linear.pt2").module->state().names(AttrKind::Parameter)[0];
  for (const auto& [tags, says] : std::initializer_list<std::pair<std::string, std::string>>{
           {R"({"no.such": {"type": "weight"}})", "no.such"},
           {"{\"" + name + R"(": {"type": "heavy"}})", "heavy"},
           {"{\"" + name + R"(": {"type": 3}})", "a string was expected"},
           {"{\"" + name + R"(": {"type": "weight", "depth": -1}})", "-1"},
           {"{\"" + name + R"(": {"type": "weight", "depth": "x"}})", "an integer was expected"},
           {"{\"" + name + R"(": {"type": "weight", "fan_in": 0}})", "A fan-in is at least 1"},
           {"[]", "an object was expected"},
           {"{", "plumb_parameter_tags.json"}}) {
    Archive archive("linear");
    std::string top = archive.entries[0].first;
    top = top.substr(0, top.find('/') + 1);
    archive.entries.emplace_back(top + "extra/plumb_parameter_tags.json", tags);
    EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr(says));
  }
}

TEST(HostileFiles, TheRecordOfTheTrainingModeIsChecked) {
  const std::string line(8193, 'x');
  for (const auto& [mode, says] : std::initializer_list<std::pair<std::string, std::string>>{
           {R"({"training": 1, "read_at": "model.py:3"})", "true or false"},
           {R"({"training": true, "read_at": 3})", "a string was expected"},
           {R"({"training": true})", "read_at"},
           {R"({"training": true, "read_at": ")" + line + "\"}", "8193 bytes"},
           {"[]", "an object was expected"},
           {"{", "plumb_training_mode.json"}}) {
    Archive archive("linear");
    std::string top = archive.entries[0].first;
    top = top.substr(0, top.find('/') + 1);
    archive.entries.emplace_back(top + "extra/plumb_training_mode.json", mode);
    EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr(says));
  }
}

TEST(HostileFiles, OtherFilesAreToldFromPrograms) {
  EXPECT_THAT(load_error("hello").what(), HasSubstr("not a zip"));
  EXPECT_THAT(load_error(slurp(programs() / "linear.expect.pt")).what(),
              AllOf(HasSubstr("no .pt2 file"), HasSubstr("torch.export.save")));
  EXPECT_EQ(error_of([] { load_pt2("/no/such/file.pt2"); }).kind(), ErrorKind::BadFile);
  EXPECT_EQ(error_of([] { load_pt2(programs()); }).kind(), ErrorKind::BadFile);
}

TEST(HostileFiles, UnknownVersionsAreNamed) {
  EXPECT_THAT(load_error(Archive("linear").model([](Json& j) { j["schema_version"]["major"] = 9; }).zip()).what(),
              HasSubstr("9."));
  Archive archive("linear");
  archive.entry("archive_version") = "7";
  EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr("'7'"));
}

TEST(HostileFiles, UnknownOperatorsAreListedWithTheLibraryTheyNeed) {
  const Error error = load_error(Archive("linear")
                                     .model([](Json& j) {
                                       j["graph_module"]["graph"]["nodes"][0]["target"] =
                                           "torch.ops.mine.fast_linear.default";
                                       j["graph_module"]["graph"]["nodes"][2]["target"] = "torch.ops.theirs.op.out";
                                     })
                                     .zip());
  EXPECT_THAT(error.what(), AllOf(HasSubstr("mine::fast_linear"), HasSubstr("theirs::op.out"), HasSubstr("library"),
                                  HasSubstr("nodes[0]")));
}

TEST(HostileFiles, WrongContentNamesItsPlace) {
  auto broken = [](auto&& edit) { return load_error(Archive("linear").model(edit).zip()); };
  EXPECT_THAT(broken([](Json& j) {
                j["graph_module"]["graph"]["nodes"][1]["inputs"][0]["arg"]["as_tensor"]["name"] = "nowhere";
              }).what(),
              AllOf(HasSubstr("nowhere"), HasSubstr("graph_module.graph.nodes[1].inputs[0]")));
  EXPECT_THAT(broken([](Json& j) { j["graph_module"]["graph"]["nodes"][1]["inputs"][0]["name"] = "elbow"; }).what(),
              HasSubstr("elbow"));
  EXPECT_THAT(broken([](Json& j) {
                j["graph_module"]["graph"]["nodes"][1]["outputs"][0]["as_tensor"]["name"] = "linear";
              }).what(),
              HasSubstr("twice"));
  EXPECT_THAT(broken([](Json& j) {
                j["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = {{"as_ints", {1, 2}}};
              }).what(),
              HasSubstr("nodes[0]"));
  EXPECT_THAT(broken([](Json& j) { j["graph_module"].erase("signature"); }).what(),
              HasSubstr("'signature' is missing"));
  EXPECT_THAT(broken([](Json& j) { j["graph_module"]["graph"]["tensor_values"]["input"]["dtype"] = 99; }).what(),
              HasSubstr("dtype 99"));
  EXPECT_THAT(broken([](Json& j) {
                j["graph_module"]["signature"]["input_specs"][0]["parameter"]["parameter_name"] = "../../etc";
              }).what(),
              HasSubstr("../../etc"));
  EXPECT_THAT(
      broken([](Json& j) { j["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = "[1, {"; }).what(),
      HasSubstr("in_spec"));
}

TEST(HostileFiles, ACopyOfANumberStaysAndNothingIsCopiedNowhere) {
  const auto copy = [](const Json& self, const Json& source) {
    return Archive("linear")
        .model([&](Json& j) {
          Json& node = j["graph_module"]["graph"]["nodes"][1];
          node["target"] = "torch.ops.aten.copy_.default";
          node["inputs"] = {{{"name", "self"}, {"arg", self}, {"kind", 1}},
                            {{"name", "src"}, {"arg", source}, {"kind", 1}}};
        })
        .zip();
  };
  const Json tensor = {{"as_tensor", {{"name", "linear"}}}}, none = {{"as_none", true}}, number = {{"as_int", 3}};
  EXPECT_THAT(load_error(copy(none, tensor)).what(), HasSubstr("argument 'self' takes Tensor, got None"));
  EXPECT_THAT(load_error(copy(tensor, none)).what(), HasSubstr("argument 'src' takes Tensor, got None"));
  const fs::path path = programs() / "hostile.pt2";
  spill(path, copy(tensor, number));
  EXPECT_THAT(to_string(load_pt2(path).module->graph()), HasSubstr("aten::copy_(%linear, 3)"));
}

TEST(HostileFiles, OperatorsThatAreNoTensorArithmeticAreRefusedByName) {
  auto broken = [](const std::string& target) {
    return std::string(
        load_error(
            Archive("linear").model([&](Json& j) { j["graph_module"]["graph"]["nodes"][0]["target"] = target; }).zip())
            .what());
  };
  for (const char* target : {"torch.ops.aten.from_file.default", "torch.ops.aten.from_file.out"})
    EXPECT_THAT(broken(target), AllOf(HasSubstr("nodes[0]"), HasSubstr("aten::from_file"), HasSubstr("opens files")));
  for (const char* name : {"set_.source_Storage", "_print.default", "fbgemm_linear_fp16_weight.default",
                           "_sparse_coo_tensor_unsafe.default", "_reshape_alias.default"}) {
    EXPECT_THAT(broken("torch.ops.aten." + std::string(name)), HasSubstr("may not stand in a file")) << name;
  }
  EXPECT_THAT(broken("torch.ops.plumb.python_function.default"), HasSubstr("by their number"));
}

TEST(HostileFiles, CustomObjectsTokensAndControlFlowAreRefusedByName) {
  auto broken = [](auto&& edit) { return load_error(Archive("linear").model(edit).zip()); };
  EXPECT_THAT(
      broken([](Json& j) { j["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.higher_order.cond"; }).what(),
      HasSubstr("higher_order.cond"));
  EXPECT_THAT(broken([](Json& j) { j["graph_module"]["graph"]["nodes"][0]["target"] = "os.system"; }).what(),
              HasSubstr("os.system"));
  EXPECT_THAT(broken([](Json& j) {
                j["graph_module"]["signature"]["input_specs"][0] = {
                    {"custom_obj", {{"arg", {{"name", "o"}, {"class_fqn", "c"}}}, {"custom_obj_name", "o"}}}};
              }).what(),
              HasSubstr("custom objects"));
}

TEST(HostileFiles, TensorsThatReachOutsideOfTheirRecordAreRefused) {
  for (const auto& [what, value] :
       {std::pair<const char*, Json>{"sizes", {{{"as_int", 5}}, {{"as_int", int64_t{1} << 62}}}},
        {"strides", {{{"as_int", 6}}, {{"as_int", 7}}}},
        {"sizes", {{{"as_int", 5}}, {{"as_int", -6}}}},
        {"storage_offset", {{"as_int", 1}}},
        {"storage_offset", {{"as_int", INT64_MAX}}},
        {"dtype", 8}}) {
    Archive archive("linear");
    Json config = Json::parse(archive.entry("model_weights_config.json"));
    config["config"]["0.weight"]["tensor_meta"][what] = value;
    archive.entry("model_weights_config.json") = config.dump();
    EXPECT_THAT(load_error(archive.zip()).what(),
                AnyOf(HasSubstr("0.weight"), HasSubstr("negative"), HasSubstr("data/weights")))
        << what;
  }
}

TEST(HostileFiles, TensorsOfMoreElementsThanNumbersCountAreRefused) {
  for (const int64_t last : {int64_t{1} << 32, int64_t{0}}) {  // last size; with strides 0 all elements are the first
    for (const char* device : {"cpu", "meta"}) {
      Archive archive("linear");
      Json config = Json::parse(archive.entry("model_weights_config.json"));
      Json& meta = config["config"]["0.weight"]["tensor_meta"];
      meta["sizes"] = {{{"as_int", int64_t{1} << 32}}, {{"as_int", int64_t{1} << 32}}, {{"as_int", last}}};
      meta["strides"] = {{{"as_int", 0}}, {{"as_int", 0}}, {{"as_int", 0}}};
      meta["device"]["type"] = device;
      archive.entry("model_weights_config.json") = config.dump();
      EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr("0.weight")) << device;
    }
  }
}

TEST(HostileFiles, APickledParameterOfIntegersIsNamed) {
  Archive archive("linear");
  Json config = Json::parse(archive.entry("model_weights_config.json"));
  Json& entry = config["config"]["0.weight"];
  entry["use_pickle"] = true;
  const std::string file = (programs() / "integers.pt").string();
  save_tensors(torch::ones({6, 5}, at::kLong), file);
  archive.entry(entry["path_name"].get<std::string>()) = slurp(file);
  archive.entry("model_weights_config.json") = config.dump();
  const Error e = load_error(archive.zip());
  EXPECT_THAT(e.what(), AllOf(HasSubstr("an integer tensor cannot require gradients"), HasSubstr("0.weight")));
}

TEST(HostileFiles, RecordsOutsideOfTheArchiveAreNotLookedFor) {
  Archive archive("linear");
  Json config = Json::parse(archive.entry("model_weights_config.json"));
  config["config"]["0.weight"]["path_name"] = "../../../../etc/passwd";
  archive.entry("model_weights_config.json") = config.dump();
  EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr("has no entry"));
}

TEST(HostileFiles, NamesThatAreNoPlainPathsAreRefused) {
  for (const char* name : {"../x", "/etc/passwd", "a/../../b", "a\\b", "."}) {
    Archive archive("linear");
    archive.entries.emplace_back(name, "x");
    EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr("not a plain path")) << name;
  }
  Archive twice("linear");
  twice.entries.push_back(twice.entries[0]);
  EXPECT_THAT(load_error(twice.zip()).what(), HasSubstr("twice"));
}

TEST(HostileFiles, DeepNestingIsRefused) {
  Archive archive("linear");
  archive.entry("models/model.json") = std::string(1'000'000, '[');
  EXPECT_THAT(load_error(archive.zip()).what(), HasSubstr("deeper"));
}

TEST(HostileFiles, TreeSpecsNestedInsideOfTextAreRefused) {
  const std::string deep(100'000, '[');
  for (const std::string& context : {Json(deep).dump(), std::string(100'000, '[') + std::string(100'000, ']')}) {
    const std::string spec = "[1, {\"type\": \"builtins.dict\", \"context\": " + context + ", \"children_spec\": []}]";
    auto broken = Archive("linear").model(
        [&](Json& j) { j["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = spec; });
    EXPECT_THAT(load_error(broken.zip()).what(), HasSubstr("nested deeper"));
  }
}

TEST(HostileFiles, LongSumsOfSizesAreReadInTimeLinearInTheirLength) {
  std::string sum = "s0", product = "s0";
  for (int i = 0; i < 200'000; ++i) sum += "+s0", product += "*s0";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(SymExpr::parse(sum)->args().size(), 200'001u);
  EXPECT_EQ(SymExpr::parse(product)->args().size(), 200'001u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(SymExpr::parse("(a + b) + c - d")->to_infix(), "a + b + c + (-1)*d");
}

TEST(HostileFiles, AJsonBombIsRefusedWithoutInflatingIt) {
  // A deflated text of 140 MiB in a small file.
  std::string zip = fuzz::make_zip({{"m/models/model.json", std::string(160'000, '[')},
                                    {"m/archive_format", "pt2"},
                                    {"m/archive_version", "0"},
                                    {"m/byteorder", "little"}},
                                   crc32);
  const size_t directory = zip.find("PK\x01\x02");
  auto put = [&](size_t at, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) zip[at + static_cast<size_t>(i)] = static_cast<char>(v >> (8 * i));
  };
  put(directory + 10, 8, 2);  // deflated
  put(directory + 24, uint64_t{140} << 20, 4);
  EXPECT_THAT(load_error(zip).what(), HasSubstr("asks for more than the"));
}

TEST(HostileFiles, ADocumentThatTakesManyTimesTheFileInMemoryIsRefused) {
  std::string lists = "[";
  while (lists.size() < size_t{12} << 20) lists += "[],[],[],[],";
  lists += "0]";
  const std::string zip = fuzz::make_zip({{"m/models/model.json", lists},
                                          {"m/archive_format", "pt2"},
                                          {"m/archive_version", "0"},
                                          {"m/byteorder", "little"}},
                                         crc32);
  EXPECT_THAT(load_error(zip).what(), HasSubstr("bytes of memory that a file of"));
}

TEST(HostileFiles, NumbersThatAreNoDtypeLayoutOrMemoryFormatAreRefused) {
  auto error = [](const std::string& call) {
    return std::string(
        error_of([&] { parse_graph("graph { %x: f32[2] = placeholder \"x\" %y = " + call + " output(%y) }"); }).what());
  };
  for (const char* number : {"-1", "300", "99", "9223372036854775807"}) {
    EXPECT_THAT(error("aten::to.dtype(%x, " + std::string(number) + ")"), HasSubstr("is no dtype")) << number;
    EXPECT_THAT(error("aten::zeros([2], layout=" + std::string(number) + ")"), HasSubstr("is no layout")) << number;
    EXPECT_THAT(error("aten::clone(%x, memory_format=" + std::string(number) + ")"), HasSubstr("is no memory format"))
        << number;
  }
  EXPECT_THAT(error_of([&] {
                parse_graph(
                    "graph { %x: f32[2] = placeholder \"x\" %n: int = aten::sym_size.int(%x, 0) %y = "
                    "aten::to.dtype(%x, %n) output(%y) }");
              }).what(),
              HasSubstr("which no file states"));
}

TEST(HostileFiles, AZipBombIsRefusedWithoutInflatingIt) {
  // One deflated entry that claims 3 GiB, a thousand times its bytes.
  std::string zip = fuzz::make_zip({{"m/models/model.json", std::string(3 << 20, '\0')}}, crc32);
  const size_t directory = zip.rfind("PK\x01\x02");
  auto put = [&](size_t at, uint64_t v, int bytes) {
    for (int i = 0; i < bytes; ++i) zip[at + static_cast<size_t>(i)] = static_cast<char>(v >> (8 * i));
  };
  put(directory + 10, 8, 2);                  // deflated
  put(directory + 24, uint64_t{3} << 30, 4);  // its size
  EXPECT_THAT(load_error(zip).what(), HasSubstr("asks for more than the"));
  put(directory + 24, 0xFFFFFFF0u, 4);
  EXPECT_THAT(load_error(zip).what(), HasSubstr("claims more data"));
}

TEST(HostileFiles, BrokenCopiesEndInAnErrorOrAModule) {
  std::vector<Archive> seeds;
  for (const char* name : {"linear", "values", "sizes", "modes", "convnet_functional", "autocast", "recurrent"})
    seeds.emplace_back(name);
  const fs::path path = programs() / "broken.pt2";
  size_t errors = 0;
  for (uint64_t seed = 0; seed < 700; ++seed) {
    fuzz::Random random(seed);
    const Archive& archive = seeds[seed % seeds.size()];
    spill(path, fuzz::mutate_archive(archive.bytes, archive.entries, random, crc32));
    try {
      ExportedProgram program = load_pt2(path);
      const std::string text = to_string(program.module->graph());
      EXPECT_EQ(to_string(parse_graph(text)), text) << "seed " << seed;
    } catch (const Error& e) {
      EXPECT_FALSE(e.message().empty());
      ++errors;
    } catch (const std::exception& e) {
      ADD_FAILURE() << "seed " << seed << ": " << e.what();
    }
  }
  EXPECT_GT(errors, 200u);
}

TEST(HostileFiles, BrokenGraphTextsEndInAnErrorOrAGraph) {
  const std::string seed_text = to_string(load_pt2(programs() / "gpt.pt2").module->graph());
  size_t errors = 0;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    fuzz::Random random(seed);
    std::string text = seed_text;
    fuzz::mutate_bytes(text, random);
    try {
      const std::string printed = to_string(parse_graph(text));
      EXPECT_EQ(to_string(parse_graph(printed)), printed) << "seed " << seed;
    } catch (const Error&) {
      ++errors;
    } catch (const std::exception& e) {
      ADD_FAILURE() << "seed " << seed << ": " << e.what();
    }
  }
  EXPECT_GT(errors, 100u);
}

TEST(JsonDoc, NamesThePathOfWhatIsWrong) {
  const JsonDoc doc("f.json", R"({"a": [{"b": 1}, {"b": "x"}], "big": 18446744073709551615})");
  EXPECT_EQ(doc.path_of(doc.root()["a"][1]["b"]), "a[1].b");
  EXPECT_THAT(error_of([&] { doc.integer(doc.root()["a"][1]["b"]); }).what(),
              AllOf(HasSubstr("f.json"), HasSubstr("a[1].b")));
  EXPECT_THAT(error_of([&] { doc.integer(doc.root()["big"]); }).what(), HasSubstr("64 bits"));
  EXPECT_EQ(error_of([] { JsonDoc("f.json", "{"); }).kind(), ErrorKind::BadFile);
}

}  // namespace
}  // namespace plumb
