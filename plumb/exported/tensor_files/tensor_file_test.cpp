#include "plumb/exported/tensor_files/tensor_file.h"
#include "plumb/core/checksum.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <torch/types.h>

#include <csignal>
#include <filesystem>

#include "plumb/exported/programs_testing.h"
#include "plumb/exported/sym_expr.h"
#include "plumb/exported/zip_file.h"
#include "tests/fuzz/mutate.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::HasSubstr;
using namespace plumb::testing;  // NOLINT

fs::path scratch(const std::string& name) {
  const fs::path folder = fs::path(PLUMB_BINARY_DIR) / "tests/tensors";
  fs::create_directories(folder);
  return folder / name;
}

const std::vector<at::ScalarType>& dtypes() {
  static const std::vector<at::ScalarType> all = {at::kFloat,        at::kDouble,        at::kHalf,       at::kBFloat16,
                                                  at::kLong,         at::kInt,           at::kShort,      at::kChar,
                                                  at::kByte,         at::kBool,          at::kUInt16,     at::kUInt32,
                                                  at::kComplexFloat, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
  return all;
}

TEST(TensorFile, EveryDtypeSurvivesAPtFile) {
  for (at::ScalarType dtype : dtypes()) {
    const at::Tensor t = torch::randint(0, 2, {3, 4}).to(dtype);
    save_tensors(t, scratch("t.pt"));
    EXPECT_TRUE(same(load_tensors(scratch("t.pt")), t)) << at::toString(dtype);
  }
}

TEST(TensorFile, NestedValuesAndSharedMemorySurvive) {
  at::Tensor base = torch::arange(12.0).view({3, 4});
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("t", base.t());
  dict.insert("row", base[1]);
  dict.insert("empty", torch::empty({0, 3}));
  dict.insert("grad", torch::randn({2}).set_requires_grad(true));
  dict.insert("rest", c10::ivalue::Tuple::create(
                          {c10::IValue(3), c10::IValue(-2.5), c10::IValue(true), c10::IValue(), c10::IValue("text")}));
  save_tensors(dict, scratch("d.pt"));
  const auto back = load_tensors(scratch("d.pt")).toGenericDict();
  EXPECT_TRUE(same(back.at("t"), base.t()));
  EXPECT_EQ(back.at("t").toTensor().strides(), base.t().strides());
  EXPECT_TRUE(back.at("t").toTensor().is_alias_of(back.at("row").toTensor()));
  EXPECT_EQ(back.at("empty").toTensor().sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_TRUE(back.at("grad").toTensor().requires_grad());
  const auto& rest = back.at("rest").toTupleRef().elements();
  EXPECT_EQ(rest[0].toInt(), 3);
  EXPECT_EQ(rest[1].toDouble(), -2.5);
  EXPECT_TRUE(rest[2].toBool());
  EXPECT_TRUE(rest[3].isNone());
  EXPECT_EQ(rest[4].toStringRef(), "text");
}

TEST(TensorFile, PythonReadsWhatPlumbWroteAndTheOtherWayRound) {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("a", torch::arange(6).to(at::kBFloat16).view({2, 3}));
  dict.insert("b", c10::ivalue::Tuple::create(
                       {torch::arange(3).to(at::kUInt16), c10::IValue(int64_t{1} << 40), c10::IValue(-1)}));
  save_tensors(dict, scratch("to_python.pt"));
  save_npy(torch::arange(6).to(at::kHalf).view({2, 3}), scratch("to_python.npy"));
  save_npy(torch::scalar_tensor(2.5), scratch("scalar.npy"));
  spill(scratch("read.py"), R"(
import sys, numpy, torch
f = sys.argv[1]
d = torch.load(f + "/to_python.pt", weights_only=True)
assert torch.equal(d["a"], torch.arange(6).to(torch.bfloat16).view(2, 3)), d
assert d["b"][0].dtype == torch.uint16 and d["b"][1:] == (1 << 40, -1), d
n = numpy.load(f + "/to_python.npy")
assert n.dtype == numpy.float16 and (n == numpy.arange(6).reshape(2, 3)).all()
assert numpy.load(f + "/scalar.npy") == 2.5
numpy.save(f + "/from_python.npy", numpy.arange(6, dtype=numpy.int32).reshape(3, 2))
numpy.save(f + "/fortran.npy", numpy.asfortranarray(numpy.ones((2, 3))))
x = torch.arange(8.0)
exported = torch.arange(3.0)
exported._specialize_on = {0: []}
torch.save({"exported": exported, "x": x, "view": x[2:4], "p": torch.nn.Parameter(x), 3: [1, None], "f8": x.to(torch.float8_e4m3fn)}, f + "/from_python.pt")
torch.save(torch.nn.Linear(2, 2).state_dict(), f + "/state.pt")
z = torch.complex(x, x + 1)
views = {"neg": z.clone().conj().imag, "conj": z.conj(), "both": torch._neg_view(z.conj()), "wide": torch._neg_view(x[2:3]).expand(4), "part": z[2:].conj()}
assert all(v.is_neg() or v.is_conj() for v in views.values())
torch.save(views, f + "/bits.pt")
torch.save({name: v.resolve_conj().resolve_neg() for name, v in views.items()}, f + "/values.pt")
torch.save(x, f + "/old.pt", _use_new_zipfile_serialization=False)
class Mine: pass
torch.save({"x": Mine()}, f + "/object.pt")
)");
  std::string said;
  ASSERT_EQ(python("'" + scratch("read.py").string() + "' '" + scratch("").string() + "'", &said), 0) << said;
  EXPECT_TRUE(same(load_npy(scratch("from_python.npy")), torch::arange(6).to(at::kInt).view({3, 2})));
  const auto back = load_tensors(scratch("from_python.pt")).toGenericDict();
  EXPECT_TRUE(same(back.at("x"), torch::arange(8.0)));
  EXPECT_TRUE(same(back.at("exported"), torch::arange(3.0)));
  EXPECT_TRUE(back.at("view").toTensor().is_alias_of(back.at("x").toTensor()));
  EXPECT_TRUE(back.at("p").toTensor().requires_grad());
  EXPECT_TRUE(back.at("3").toListRef()[1].isNone());
  EXPECT_EQ(back.at("f8").toTensor().scalar_type(), at::kFloat8_e4m3fn);
  EXPECT_EQ(load_tensors(scratch("state.pt")).toGenericDict().size(), 2u);
  const auto bits = load_tensors(scratch("bits.pt")).toGenericDict();
  for (const auto& entry : load_tensors(scratch("values.pt")).toGenericDict())
    EXPECT_TRUE(same(bits.at(entry.key()), entry.value())) << entry.key();
  EXPECT_TRUE(bits.at("part").toTensor().is_alias_of(bits.at("conj").toTensor()))
      << "many views of a storage need no copy of it each";
  EXPECT_THAT(error_of([] { load_tensors(scratch("object.pt")); }).what(), HasSubstr("Mine"));
  EXPECT_THAT(error_of([] { load_tensors(scratch("old.pt")); }).what(),
              HasSubstr("torch.export.save of PyTorch 1.6 or newer"));
  EXPECT_THAT(error_of([] { load_npy(scratch("fortran.npy")); }).what(), HasSubstr("Fortran"));
}

TEST(TensorFile, BrokenFilesEndInAnError) {
  save_tensors(torch::randn({4, 4}), scratch("seed.pt"));
  save_npy(torch::randn({4, 4}), scratch("seed.npy"));
  const std::string npy = slurp(scratch("seed.npy"));
  ZipFile zip(scratch("seed.pt"));
  std::vector<std::pair<std::string, std::string>> entries;
  for (const ZipEntry& e : zip.entries()) entries.emplace_back(e.name, zip.read(e));
  size_t errors = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    fuzz::Random random(seed);
    auto copy = entries;
    for (auto& [name, data] : copy) {
      if (name.ends_with("data.pkl")) fuzz::mutate_bytes(data, random);
    }
    std::string broken = npy;
    fuzz::mutate_bytes(broken, random);
    spill(scratch("broken.pt"), fuzz::make_zip(copy, crc32));
    spill(scratch("broken.npy"), broken);
    for (const char* file : {"broken.pt", "broken.npy"}) {
      try {
        const c10::IValue value = load_tensors(scratch(file));
        if (value.isTensor() && value.toTensor().numel() < 1000) value.toTensor().clone();
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::BadFile) << e.what();
        EXPECT_NE(e.remedy(), "") << e.what();
        ++errors;
      }
    }
  }
  EXPECT_GT(errors, 500u);
}

TEST(TensorFile, TokensAreReadInPieces) {
  spill(scratch("tokens.bin"), std::string("\x01\x00\xFF\xFF\x02\x01", 6));
  const TokenFile bytes(scratch("tokens.bin"), at::kByte);
  EXPECT_EQ(bytes.size(), 6);
  EXPECT_TRUE(same(bytes.read(0, 6), torch::tensor({1, 0, 255, 255, 2, 1}, at::kLong)));
  EXPECT_TRUE(same(bytes.read(4, 2), torch::tensor({2, 1}, at::kLong)));
  EXPECT_TRUE(
      same(TokenFile(scratch("tokens.bin"), at::kUInt16).read(0, 3), torch::tensor({1, 65535, 258}, at::kLong)));
  EXPECT_THAT(error_of([] { TokenFile(scratch("tokens.bin"), at::kInt); }).what(), HasSubstr("6 bytes"));
  EXPECT_EQ(error_of([&] { bytes.read(5, 2); }).kind(), ErrorKind::InvalidArgument);
  spill(scratch("none.bin"), "");
  EXPECT_EQ(TokenFile(scratch("none.bin"), at::kUInt16).read(0, 0).numel(), 0);
  EXPECT_EQ(error_of([] { TokenFile(scratch("tokens.bin"), at::kFloat); }).kind(), ErrorKind::InvalidArgument);
}

TEST(TensorFile, TokensThatAreNotThereOrBeyondInt64AreNamed) {
  const uint64_t numbers[] = {7, uint64_t{1} << 63, 5};
  spill(scratch("u64.bin"), std::string(reinterpret_cast<const char*>(numbers), sizeof numbers));
  const TokenFile tokens(scratch("u64.bin"), at::kUInt64, 0, 3);
  EXPECT_TRUE(same(tokens.read(0, 1), torch::tensor({7}, at::kLong)));
  const Error large = error_of([&] { tokens.read(1, 2); });
  EXPECT_EQ(large.kind(), ErrorKind::BadFile);
  EXPECT_THAT(large.what(), HasSubstr("u64.bin: token 1 is 9223372036854775808, tokens are below 2^63"));
  for (const auto& [start, count] : {std::pair{INT64_MAX, int64_t{2}}, {2, INT64_MAX}, {-1, 1}, {1, -1}}) {
    const Error error = error_of([&] { tokens.read(start, count); });
    EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("u64.bin: has 3 tokens, not " + std::to_string(count) + " from token " +
                                        std::to_string(start) + " on"));
  }
}

TEST(TensorFile, TensorsThatAFileCannotHoldAreNamedErrors) {
  const at::Tensor ones = at::ones({2, 2});
  for (const char* name : {"no.npy", "no.pt"}) {
    for (const at::Tensor& tensor : {ones.to_sparse(), ones.to(at::kMeta)}) {
      const Error error = error_of([&] { save_tensors(tensor, scratch(name)); });
      EXPECT_EQ(error.kind(), ErrorKind::Unsupported);
      EXPECT_THAT(error.what(), HasSubstr(std::string(name) + ": a tensor that is sparse, quantized or on the meta"));
    }
  }
  for (const auto save : {+[](const std::string& path) { save_npy({}, path); },
                          +[](const std::string& path) { save_tensors(at::Tensor(), path); }}) {
    const Error error = error_of([&] { save(scratch("no.npy")); });
    EXPECT_EQ(error.kind(), ErrorKind::InvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("no.npy: an undefined tensor has nothing to save"));
  }
  save_tensors(at::Tensor(), scratch("none.pt"));
  EXPECT_TRUE(load_tensors(scratch("none.pt")).isNone());
  EXPECT_FALSE(std::filesystem::exists(scratch("no.npy")) || std::filesystem::exists(scratch("no.pt")));
}

TEST(TensorFile, ATokenFileThatShrinksIsANamedError) {
  spill(scratch("shrinks.bin"), std::string(100000, 'a'));
  const TokenFile tokens(scratch("shrinks.bin"), at::kByte);
  std::filesystem::resize_file(scratch("shrinks.bin"), 10);
  EXPECT_THAT(error_of([&] { tokens.read(50000, 10); }).what(), HasSubstr("shrinks.bin: ends before byte 50010"));
  EXPECT_EQ(tokens.read(0, 4).numel(), 4);
}

TEST(TensorFile, AFullDiskIsANamedErrorAndLeavesNothing) {
  const std::string folder = scratch("full");
  std::filesystem::create_directories(folder);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 100000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  for (const char* name : {"/x.pt", "/x.npy"}) {
    EXPECT_EQ(error_of([&] { save_tensors(at::ones({1 << 18}), folder + name); }).kind(), ErrorKind::CannotWrite);
  }
  State state;
  state.add({"w", AttrKind::Parameter, at::ones({1 << 18})});
  const GraphModule module(parse_graph("graph {\n  %w = get_attr \"w\"\n  output(%w)\n}"), state,
                           TreeSpec::positional_inputs(0), TreeSpec::leaf());
  EXPECT_EQ(error_of([&] { save_pt2(module, folder + "/x.pt2"); }).kind(), ErrorKind::CannotWrite);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(SymExpr, ReadsTorchsSpellingAndWritesItBack) {
  std::map<std::string, std::string> spelling;
  const std::string text = "Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(-1))";
  auto e = SymExpr::parse(text, &spelling);
  ASSERT_TRUE(e);
  EXPECT_EQ(e->to_infix(), "2*s77 + (-1)");
  EXPECT_EQ(e->to_sympy(spelling), text);
  EXPECT_EQ(spelling.at("s77"), "Symbol('s77', positive=True, integer=True)");
  EXPECT_EQ(SymExpr::parse(e->to_infix())->to_sympy(spelling), text);
  EXPECT_EQ(e->evaluate({{"s77", 4}}), 7);
  EXPECT_EQ(e->evaluate({}), std::nullopt);
}

TEST(SymExpr, KeepsCallsItDoesNotKnow) {
  auto e = SymExpr::parse("FloorDiv(Symbol('s0', positive=True, integer=True), Integer(2))*Strange(s0, 3)**2");
  ASSERT_TRUE(e);
  EXPECT_EQ(e->to_infix(), "FloorDiv(s0, 2)*Strange(s0, 3)**2");
  EXPECT_EQ(SymExpr::parse(e->to_infix())->to_infix(), e->to_infix());
  // A product of a product is read as one; a sum of one argument stays a call.
  const auto nested = SymExpr::parse("Add(Mul(Mul(Integer(2), Symbol('s7')), s1*-1))");
  EXPECT_EQ(nested->to_infix(), "Add(2*s7*(s1*(-1)))");
  EXPECT_EQ(SymExpr::parse(nested->to_infix())->to_infix(), nested->to_infix());
  EXPECT_FALSE(SymExpr::parse("Symbol('077')"));
  EXPECT_EQ(e->evaluate({{"s0", 4}}), std::nullopt);
  EXPECT_EQ(SymExpr::parse("FloorDiv(-s0, 2)")->evaluate({{"s0", 3}}), -2);
}

TEST(SymExpr, RefusesWhatIsNoExpression) {
  for (const char* text : {"", "(", "1 +", "s0 s1", "f(", "'x'", "99999999999999999999", "__import__('os')", "a;b"})
    EXPECT_FALSE(SymExpr::parse(text)) << text;
  EXPECT_FALSE(SymExpr::parse(std::string(100000, '(')));
}

TEST(SymMath, IsPythons) {
  EXPECT_EQ(sym_math::floordiv(-7, 2), -4);
  EXPECT_EQ(sym_math::mod(-7, 2), 1);
  EXPECT_EQ(sym_math::mod(7, -2), -1);
  EXPECT_EQ(sym_math::floordiv(1, 0), std::nullopt);
  EXPECT_EQ(sym_math::floordiv(INT64_MIN, -1), std::nullopt);
  EXPECT_EQ(sym_math::pow(2, 62), int64_t{1} << 62);
  EXPECT_EQ(sym_math::pow(2, 63), std::nullopt);
  EXPECT_EQ(sym_math::pow(-1, INT64_MAX), -1);
  EXPECT_EQ(sym_math::mul(INT64_MAX, 2), std::nullopt);
}

}  // namespace
}  // namespace plumb
