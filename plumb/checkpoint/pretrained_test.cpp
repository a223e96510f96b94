#include "plumb/checkpoint/pretrained.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "plumb/core/error.h"
#include "plumb/core/folder_testing.h"
#include "plumb/exported/programs_testing.h"
#include "plumb/tensors/parameter_tag.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using plumb::testing::slurp;
using plumb::testing::spill;
using ::testing::HasSubstr;

// Two experts: stacked in the program, one by one in the folder. And a weight of another name, tied to a third one.
const char* const kStack = R"(graph {
  %a: f32[3] = placeholder "a"
  %b: f32[3] = placeholder "b"
  %s: f32[2, 3] = aten::stack([%a, %b])
  output(%s)
}
)";
const char* const kUnstack = R"(graph {
  %s: f32[2, 3] = placeholder "s"
  %a: f32[3] = aten::select.int(%s, 0, 0)
  %b: f32[3] = aten::select.int(%s, 0, 1)
  output(%a, %b)
}
)";

json record() {
  return {
      {"folder", ""},
      {"files", {{"config.json", "{\"a\": 1}"}}},
      {"names", {{"wte", "old.wte"}, {"head", "old.wte"}}},
      {"conversions",
       json::array({{{"state", json::array({"experts"})}, {"stored", json::array({"e.0", "e.1"})}, {"graphs", 0}}})},
      {"graphs", json::array({{{"load", kStack}, {"save", kUnstack}}})}};
}

class Folders : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    fs::create_directory(folder_ / "in");
    at::manual_seed(0);
    wte_ = at::randn({4, 3});
    e0_ = at::randn({3}), e1_ = at::randn({3});
    write_safetensors((folder_ / "in/model.safetensors").string(), {{"old.wte", wte_}, {"e.0", e0_}, {"e.1", e1_}});
  }
  // Returns a part of the program, without values.
  static std::shared_ptr<GraphModule> part(const std::vector<std::string>& names, at::ScalarType dtype = at::kFloat) {
    State state;
    const auto meta = [&](at::IntArrayRef sizes) {
      return at::empty(sizes, at::device(at::kMeta).dtype(dtype)).set_requires_grad(true);
    };
    const at::Tensor tied = meta({4, 3});
    for (const std::string& name : names)
      state.add({name, AttrKind::Parameter, name == "experts" ? meta({2, 3}) : tied, true});
    return std::make_shared<GraphModule>(parse_graph("graph {\n  output()\n}\n"), state, TreeSpec::positional_inputs(0),
                                         TreeSpec::tuple({}));
  }
  TensorFolder in() const { return TensorFolder((folder_ / "in").string()); }
  std::string out() const { return (folder_ / "out").string(); }
  at::Tensor wte_, e0_, e1_;
};

TEST_F(Folders, APartReadsItsOwnTensorsAndNoOthers) {
  const auto known = Pretrained::parse(record().dump());
  const auto first = part({"wte", "head"}), second = part({"experts"});
  const TensorFolder one = in(), other = in();
  load_weights(*first, known, one);
  EXPECT_EQ(one.bytes_read(), wte_.nbytes());
  EXPECT_TRUE(at::equal(first->state().get("wte").tensor, wte_));
  EXPECT_TRUE(first->state().get("wte").tensor.is_same(first->state().get("head").tensor));
  EXPECT_TRUE(first->state().get("wte").tensor.requires_grad());
  load_weights(*second, known, other);
  EXPECT_EQ(other.bytes_read(), e0_.nbytes() + e1_.nbytes());
  EXPECT_TRUE(at::equal(second->state().get("experts").tensor, at::stack({e0_, e1_})));
  const auto low = part({"experts"}, at::kBFloat16);
  load_weights(*low, known, other);
  EXPECT_TRUE(at::equal(low->state().get("experts").tensor, at::stack({e0_, e1_}).to(at::kBFloat16)));
}

TEST_F(Folders, OfUnitScaledWeightsAreRefused) {
  const auto known = Pretrained::parse(record().dump());
  write_safetensors((folder_ / "in/marked.safetensors").string(), {{"old.wte", wte_}}, {{kUnitScaledKey, "yes"}});
  const TensorFolder marked((folder_ / "in/marked.safetensors").string());
  const auto first = part({"wte"});
  EXPECT_THAT(error_of([&] { load_weights(*first, known, marked); }).message(),
              HasSubstr("the folder's weights are unit-scaled"));
  // Or by the mark that Python's modules put into their state dicts, in whichever file it is.
  write_safetensors((folder_ / "in/model.safetensors").string(),
                    {{"old.wte", wte_}, {std::string("zz.") + kUnitScaledMark, at::ones({})}});
  EXPECT_THAT(error_of([&] { load_weights(*first, known, in()); }).message(), HasSubstr("unit-scaled"));
  EXPECT_TRUE(first->state().get("wte").tensor.is_meta()) << "nothing was loaded";
}

TEST_F(Folders, TakeAlongOnlyFilesThatAnImporterWrites) {
  for (const char* name : {"model.safetensors", "modeling_evil.py", "../config.json", "tokenizer.json", ""}) {
    json bad = record();
    bad["files"][name] = "evil";
    EXPECT_THAT(error_of([&] { Pretrained::parse(bad.dump()); }).message(), HasSubstr("takes along")) << name;
  }
}

TEST_F(Folders, GiveNoFileThatIsALinkOutOfThem) {
  const auto known = Pretrained::parse(record().dump());
  const auto all = part({"wte", "head", "experts"});
  load_weights(*all, known, in());
  spill((folder_ / "key").string(), "secret");
  fs::create_symlink("../key", folder_ / "in/tokenizer.json");
  write_weights(out(), {&all->state()}, 0, known, "");
  const std::string source = (folder_ / "in").string();
  EXPECT_THAT(error_of([&] { check_files_to_copy(source); }).message(), HasSubstr("leads out of the folder"));
  EXPECT_THAT(error_of([&] { finish_weights_folder(out(), {&all->state()}, known, source); }).message(),
              HasSubstr("tokenizer.json: is a symbolic link that leads out of the folder"));
  EXPECT_FALSE(fs::exists(out() + "/tokenizer.json"));
  EXPECT_TRUE(fs::exists(out() + "/config.json")) << "the rest is there";
}

TEST_F(Folders, PartsWriteTheFolderThatWasRead) {
  const auto known = Pretrained::parse(record().dump());
  spill((folder_ / "in/tokenizer.json").string(), "{}");
  spill((folder_ / "in/run.py").string(), "no");
  fs::create_directory(folder_ / "in/additional_chat_templates");
  spill((folder_ / "in/additional_chat_templates/tools.jinja").string(), "{}");
  spill((folder_ / "in/additional_chat_templates/run.py").string(), "no");
  const auto first = part({"wte"}), second = part({"experts", "head"});
  const StateParts parts = {&first->state(), &second->state()};
  // Each process has the values of its own part alone.
  load_weights(*second, known, in());
  write_weights(out(), parts, 1, known, "");
  const auto mine = part({"wte"}), theirs = part({"experts", "head"});
  load_weights(*mine, known, in());
  write_weights(out(), {&mine->state(), &theirs->state()}, 0, known, "");
  finish_weights_folder(out(), {&mine->state(), &theirs->state()}, known, (folder_ / "in").string());
  const TensorFolder again(out());
  EXPECT_EQ(again.names(), in().names());
  EXPECT_TRUE(at::equal(again.read("old.wte"), wte_));
  EXPECT_TRUE(at::equal(again.read("e.1"), e1_));
  EXPECT_EQ(slurp(out() + "/config.json"), "{\"a\": 1}");
  EXPECT_EQ(slurp(out() + "/tokenizer.json"), "{}");
  EXPECT_EQ(slurp(out() + "/additional_chat_templates/tools.jinja"), "{}");
  EXPECT_FALSE(fs::exists(out() + "/additional_chat_templates/run.py"));
  EXPECT_FALSE(fs::exists(out() + "/run.py"));
  const json index = json::parse(slurp(out() + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], wte_.nbytes() + e0_.nbytes() + e1_.nbytes());
}

TEST_F(Folders, WhatNoPartUsesIsCopiedFromTheFolder) {
  const auto known = Pretrained::parse(record().dump());
  const auto used = part({"wte"}), whole = part({"wte", "experts"});
  load_weights(*used, known, in());
  const StateParts parts = {&used->state(), &whole->state()};
  EXPECT_THAT(error_of([&] { write_weights(out(), parts, 1, known, ""); }).message(), HasSubstr("no values to save"));
  for (const size_t p : {0, 1}) write_weights(out(), parts, p, known, (folder_ / "in").string());
  finish_weights_folder(out(), parts, known, (folder_ / "in").string());
  EXPECT_EQ(TensorFolder(out()).names(), in().names());
  EXPECT_TRUE(at::equal(TensorFolder(out()).read("e.0"), e0_));
  write_safetensors((folder_ / "in/model.safetensors").string(), {{"old.wte", e0_}, {"e.0", e0_}, {"e.1", e1_}});
  const auto unread = part({"wte"});
  EXPECT_EQ(error_of([&] { write_weights(out(), {&unread->state()}, 0, known, (folder_ / "in").string()); }).message(),
            "'wte' is Float[3] in the folder, and Float[4, 3] in the program");
  fs::rename(folder_ / "in", folder_ / "gone");
  EXPECT_THAT(error_of([&] { write_weights(out(), parts, 1, known, (folder_ / "in").string()); }).message(),
              HasSubstr((folder_ / "in").string() + ", which has them, is not there any more"));
  // Nothing is left over: one file.
  fs::remove_all(out());
  write_weights(out(), {&used->state(), &used->state()}, 0, known, "");
  EXPECT_TRUE(fs::exists(out() + "/model.safetensors"));
}

TEST_F(Folders, WhatDoesNotFitIsNamed) {
  const auto known = Pretrained::parse(record().dump());
  EXPECT_THAT(error_of([&] { load_weights(*part({"other"}), known, in()); }).message(), HasSubstr("'other'"));
  write_safetensors((folder_ / "in/model.safetensors").string(), {{"old.wte", e0_}, {"e.0", e0_}, {"e.1", wte_}});
  const Error shape = error_of([&] { load_weights(*part({"wte"}), known, in()); });
  EXPECT_EQ(shape.kind(), ErrorKind::TensorMismatch);
  EXPECT_THAT(shape.message(), HasSubstr("'wte' is Float[3] in the folder, and Float[4, 3]"));
  EXPECT_THAT(error_of([&] { load_weights(*part({"experts"}), known, in()); }).message(), HasSubstr("'experts'"));
  write_safetensors((folder_ / "in/model.safetensors").string(), {{"e.0", e0_}});
  EXPECT_THAT(error_of([&] { load_weights(*part({"wte"}), known, in()); }).message(), HasSubstr("'old.wte'"));
}

TEST_F(Folders, UnitScaledWeightsAreNeitherReadNorWritten) {
  const auto known = Pretrained::parse(record().dump());
  const auto module = part({"wte"});
  tag(module->state().get("wte").tensor, {MupType::Weight, std::nullopt});
  EXPECT_THAT(error_of([&] { load_weights(*module, known, in()); }).message(), HasSubstr("unit-scaled"));
  EXPECT_THAT(error_of([&] { write_weights(out(), {&module->state()}, 0, known, ""); }).remedy(), HasSubstr("--fold"));
  const auto other = part({"experts"});
  check_weights_to_write({&other->state()}, known);
  EXPECT_THAT(error_of([&] { check_weights_to_write({&other->state(), &module->state()}, known); }).remedy(),
              HasSubstr("--fold"));
}

TEST_F(Folders, AFolderWithSomethingInItIsNotWrittenOver) {
  EXPECT_EQ(error_of([&] { check_new_folder((folder_ / "in").string()); }).kind(), ErrorKind::CannotWrite);
  check_new_folder(out());
  check_new_folder(out());  // empty
  EXPECT_EQ(error_of([&] { check_new_folder((folder_ / "in/model.safetensors/x").string()); }).kind(),
            ErrorKind::CannotWrite);
}

TEST_F(Folders, APieceOfTwoStagesIsRefusedWithTheCut) {
  json two = record();
  two["conversions"] =
      json::array({{{"state", json::array({"wte", "experts"})}, {"stored", json::array({"x"})}, {"graphs", 0}}});
  two["graphs"][0] = {{"load", kUnstack}, {"save", kStack}};
  const auto known = Pretrained::parse(two.dump());
  const auto first = part({"wte"}), second = part({"experts"});
  const Error e = error_of([&] { write_weights(out(), {&first->state(), &second->state()}, 0, known, ""); });
  EXPECT_THAT(e.remedy(), HasSubstr("--at"));
  EXPECT_EQ(error_of([&] { check_weights_to_write({&first->state(), &second->state()}, known); }).message(),
            e.message());
}

// Every byte of a record changed in some ways: read as something, or refused as a file.
TEST_F(Folders, AnAlteredRecordIsReadOrRefused) {
  const std::string text = record().dump();
  int refused = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    for (const char with : {'"', '{', '0', '%'}) {
      std::string other = text;
      other[i] = with;
      try {
        const auto known = Pretrained::parse(other);
        load_weights(*part({"wte", "experts"}), known, in());
      } catch (const Error& e) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, static_cast<int>(text.size()));
}

}  // namespace
}  // namespace plumb
