#include "plumb/operators/operator_facts.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <torch/library.h>

#include <map>
#include <set>

#include "plumb/core/error.h"
#include "plumb/graph/graph.h"
#include "tests/message_of.h"

namespace plumb {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor twice(const at::Tensor& x) { return x + x; }
TORCH_LIBRARY(facts_test, m) {
  m.def("twice(Tensor x) -> Tensor", twice);
  m.def("thrice(Tensor x) -> Tensor", twice);
}

// Full name and handle of every operator registered here.
using Operators = std::vector<std::pair<std::string, c10::OperatorHandle>>;

const Operators& registered() {
  static const Operators all = [] {
    Operators found;
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (auto op = c10::Dispatcher::singleton().findSchema(name)) found.emplace_back(operator_name(*op), *op);
    }
    return found;
  }();
  return all;
}

const std::vector<c10::OperatorHandle>& overloads(std::string_view name) {
  static const std::map<std::string, std::vector<c10::OperatorHandle>> by_name = [] {
    std::map<std::string, std::vector<c10::OperatorHandle>> found;
    for (const auto& [full, op] : registered()) found[op.schema().name()].push_back(op);
    return found;
  }();
  static const std::vector<c10::OperatorHandle> none;
  auto it = by_name.find(std::string(name));
  return it == by_name.end() ? none : it->second;
}

bool is_out(const c10::OperatorHandle& op) {
  return std::any_of(op.schema().arguments().begin(), op.schema().arguments().end(),
                     [](const c10::Argument& a) { return a.is_out(); });
}

const c10::Argument* argument(const c10::OperatorHandle& op, std::string_view name) {
  for (const c10::Argument& a : op.schema().arguments()) {
    if (a.name() == name) return &a;
  }
  return nullptr;
}

std::string read(std::string_view op_call) {
  return message_of([&] {
    parse_graph("graph {\n  %x: f32[2] = placeholder \"x\"\n  %y = " + std::string(op_call) + "\n  output(%y)\n}\n");
  });
}

// --- what files may name ---

TEST(Files, OpenNoFiles) {
  EXPECT_THAT(read("aten::from_file(\"/etc/passwd\", False, 4)"),
              AllOf(HasSubstr("line 3"), HasSubstr("it opens files")));
  EXPECT_THAT(read("aten::from_file.out(\"/tmp/x\", True, 4, out=%x)"),
              HasSubstr("aten::from_file may not stand in a file"));
}

TEST(Files, NameNoOperatorThatLeavesTensorArithmetic) {
  for (const char* name : {"aten::from_file",
                           "aten::from_file.out",
                           "aten::_print",
                           "aten::set_.source_Tensor",
                           "aten::set_.source_Storage",
                           "aten::set.source_Tensor",
                           "aten::set_data",
                           "aten::_reshape_alias",
                           "aten::_backward",
                           "aten::record_stream",
                           "aten::fbgemm_linear_fp16_weight",
                           "aten::fbgemm_pack_gemm_matrix_fp16",
                           "aten::_cudnn_init_dropout_state",
                           "aten::_cufft_set_plan_cache_max_size",
                           "aten::_make_dual",
                           "aten::_add_batch_dim",
                           "aten::_test_warn_in_autograd",
                           "aten::_sparse_coo_tensor_unsafe",
                           "aten::sparse_coo_tensor.indices_size",
                           "aten::_nested_view_from_buffer",
                           "aten::_foobar",
                           "aten::_lazy_clone",
                           "aten::quantize_per_tensor",
                           "aten::embedding_dense_backward",
                           "profiler::_record_function_enter_new",
                           "c10d::allreduce_",
                           "_c10d_functional::all_reduce",
                           "rpc::remote",
                           "inductor::_reinterpret_tensor",
                           "inductor::resize_storage_bytes_",
                           "mkldnn::data_ptr",
                           "symm_mem::nvshmem_put",
                           "quantized::linear",
                           "_test::leaky_relu",
                           "static_runtime::create_owned_ref",
                           "prim::Print",
                           "plumb::python_function",
                           "facts_test::twice",
                           "nobody::knows"}) {
    EXPECT_TRUE(refused_in_files(name)) << name;
  }
}

TEST(Files, NameWhatModelsAreMadeOf) {
  for (const char* name : {"aten::add.Tensor",
                           "aten::add_.Tensor",
                           "aten::add.out",
                           "aten::linear",
                           "aten::index.Tensor",
                           "aten::index_put_",
                           "aten::scaled_dot_product_attention",
                           "aten::native_layer_norm",
                           "aten::lstm.input",
                           "aten::embedding_bag",
                           "aten::upsample_bilinear2d.vec",
                           "aten::fft_rfft",
                           "aten::linalg_svd",
                           "aten::special_erfcx",
                           "aten::sym_size.int",
                           "aten::_assert_scalar",
                           "aten::empty.memory_format",
                           "aten::resize_",
                           "aten::requires_grad_",
                           "aten::copy_",
                           "aten::__and__.Tensor",
                           "aten::_foreach_add.List",
                           "aten::gelu_backward",
                           "pippy::_pipe_split"}) {
    EXPECT_FALSE(refused_in_files(name)) << name;
  }
}

TEST(Files, NameOperatorsOfOthersOnceTheProcessAllowsThem) {
  EXPECT_THAT(read("facts_test::twice(%x)"), AllOf(HasSubstr("facts_test::twice may not stand in a file"),
                                                   HasSubstr("allow_operators(\"facts_test::twice\")")));
  allow_operators("facts_test::twice");
  EXPECT_EQ(read("facts_test::twice(%x)"), "no error");
  EXPECT_THAT(read("facts_test::thrice(%x)"), HasSubstr("may not stand"));
  allow_operators("facts_test");
  EXPECT_EQ(read("facts_test::thrice(%x)"), "no error");
}

TEST(Files, AreNotAllowedWholeNamespacesOfTorch) {
  for (const char* name : {"aten", "prim", "c10d", "plumb"})
    EXPECT_THAT(message_of([&] { allow_operators(name); }), HasSubstr("name the operators")) << name;
  for (const char* name : {"", "a b", "aten::", "::add", "aten:add", "aten::add.Tensor", "aten::*", "../x"})
    EXPECT_THAT(message_of([&] { allow_operators(name); }), HasSubstr("names no operators")) << name;
}

TEST(Files, LeaveTextsOfTheProcessItselfAlone) {
  const char* text = "graph {\n  %x: f32[4] = aten::from_file(\"/tmp/x\", False, 4)\n  output(%x)\n}\n";
  EXPECT_EQ(parse_trusted_graph(text).size(), 2u);
}

// Every argument of an operator that a file may name can be stated by a file: handles and streams cannot.
TEST(Files, NameNoOperatorThatTakesAHandle) {
  for (const auto& [name, op] : registered()) {
    if (refused_in_files(name)) continue;
    for (const c10::Argument& a : op.schema().arguments()) {
      const std::string type = a.type()->repr_str();
      const bool handle = type.find("__torch__") != std::string::npos || type.find("Storage") != std::string::npos ||
                          type.find("Stream") != std::string::npos;
      EXPECT_FALSE(handle) << name << " takes a " << type << " as " << a.name();
      const bool path = a.name().find("file") != std::string::npos || a.name().find("path") == 0;
      EXPECT_FALSE(path && type.find("str") == 0) << name << " takes " << a.name();
    }
  }
}

// Strings choose among ways to compute, or are messages; a new one is looked at before a file may give it.
TEST(Files, GiveNoStringsButModesAndMessages) {
  const std::set<std::string> known = {
      "UPLO",         "api_name", "approximate", "assert_msg", "bwd",      "constraint",    "driver",
      "equation",     "expected", "format",      "fwd",        "indexing", "interpolation", "kernel",
      "mode",         "name",     "norm",        "ord",        "p",        "pad_mode",      "padding",
      "padding_side", "program",  "recipe",      "reduce",     "rounding", "rounding_mode", "side",
      "spec",         "value",    "where"};
  for (const auto& [name, op] : registered()) {
    const bool names_dimensions = op.schema().overload_name().find("name") != std::string::npos;  // until torch 2.11
    if (refused_in_files(name) || names_dimensions) continue;
    for (const c10::Argument& a : op.schema().arguments()) {
      if (a.type()->repr_str().find("str") != std::string::npos)
        EXPECT_TRUE(known.count(a.name())) << name << " takes " << a.name();
    }
  }
}

// --- the rows against the dispatcher's schemas ---

TEST(Table, NamesOperatorsThatExist) {
  const std::set<std::string_view> of_some = {"aten::cholesky",
                                              "aten::qr",  // until torch 2.13
                                              "aten::_flash_attention_forward_no_dropout_inplace",
                                              "aten::_foreach_clone",
                                              "aten::_foreach_mm",
                                              "aten::_upsample_lanczos2d_aa",
                                              "aten::dim",
                                              "aten::is_contiguous",
                                              "aten::numel",
                                              "aten::storage_offset"};  // not in torch 2.11
  for (const OperatorFacts* row : operator_table()) {
    if (!row->name.starts_with("aten::") && !row->name.starts_with("plumb::")) continue;  // others live in Python
    EXPECT_TRUE(!overloads(row->name).empty() || of_some.count(row->name)) << row->name;
  }
}

TEST(Table, HasARowForEveryOperatorOfPlumb) {
  for (const auto& [name, op] : registered()) {
    if (name.starts_with("plumb::"))
      EXPECT_TRUE(find_operator_facts(name)) << name << " has no row: RegisterOperators beside its declaration";
  }
}

TEST(Table, NamesArgumentsThatEveryOverloadHas) {
  for (const OperatorFacts* row : operator_table()) {
    for (const c10::OperatorHandle& op : overloads(row->name)) {
      std::vector<std::string_view> names = {row->writes[0], row->writes[1], row->writes_if, row->draws_if,
                                             row->draws_with};
      for (const ContractedOperand& operand : row->contraction.named_operands()) names.push_back(operand.argument);
      for (std::string_view name : names) {
        if (!name.empty()) EXPECT_TRUE(argument(op, name)) << operator_name(op) << " has no argument " << name;
      }
    }
  }
}

TEST(Table, SaysOnlyOfOperatorsWithAnInPlaceFormThatItIsAlike) {
  size_t alike = 0;
  for (const OperatorFacts* row : operator_table()) {
    if (!row->in_place_alike) continue;
    EXPECT_FALSE(overloads(std::string(row->name) + "_").empty()) << row->name;
    ++alike;
  }
  EXPECT_GT(alike, 70u);
  for (const char* name : {"aten::elu", "aten::celu", "aten::selu"}) EXPECT_FALSE(operator_facts(name).in_place_alike);
}

TEST(Table, SaysOnlyOfOperatorsThatPassThroughThatTheyRearrange) {
  for (const OperatorFacts* row : operator_table()) EXPECT_LE(row->rearranges, row->passes_through) << row->name;
}

TEST(Table, SaysWhichArgumentsAreWrittenWhereTheSchemaDoesNot) {
  for (const OperatorFacts* row : operator_table()) {
    for (const c10::OperatorHandle& op : overloads(row->name)) {
      for (std::string_view name : row->writes) {
        if (name.empty() || is_out(op)) continue;
        EXPECT_EQ(argument(op, name)->alias_info(), nullptr)
            << operator_name(op) << " says itself that it writes " << name;
      }
    }
  }
}

TEST(Table, KnowsEveryNormThatKeepsRunningStatistics) {
  for (const auto& [name, op] : registered()) {
    const c10::Argument* mean = argument(op, "running_mean");
    const bool in_training = argument(op, "training") || argument(op, "use_input_stats");
    if (!mean || !in_training || mean->alias_info() || name.find("backward") != std::string::npos) continue;
    if (name.ends_with("_functional")) continue;  // returns the new statistics
    EXPECT_EQ(operator_facts(name).writes[0], "running_mean") << name;
  }
}

TEST(Table, KnowsEveryOperatorThatTorchTagsAsAliasingOrWriting) {
  for (const auto& [name, op] : registered()) {
    if (!op.hasTag(at::Tag::maybe_aliasing_or_mutating)) continue;
    EXPECT_TRUE(operator_facts(name).may_alias || !operator_facts(name).writes[0].empty()) << name;
  }
}

TEST(Table, KnowsThatAHistogramHandsBackTheBinsThatItIsGiven) {
  const at::Tensor bins = at::linspace(0, 1, 4);
  const auto [counts, edges] = at::histogramdd(at::rand({5, 1}), at::TensorList{bins});
  EXPECT_TRUE(edges.at(0).is_alias_of(bins)) << "torch copies them now: the row can go";
  EXPECT_TRUE(operator_facts("aten::histogramdd").may_alias);
}

TEST(Table, KnowsWhenRandomOperatorsDrawNothing) {
  for (const auto& [name, op] : registered()) {
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) continue;
    if (argument(op, "dropout_p") && !name.ends_with("_backward"))
      EXPECT_EQ(operator_facts(name).draws_with, "dropout_p") << name;
    if (argument(op, "train") && !is_out(op) && operator_facts(name).refused.empty())
      EXPECT_EQ(operator_facts(name).draws_if, "train") << name;
  }
  for (const OperatorFacts* row : operator_table()) {
    if (row->draws_if.empty() && row->draws_with.empty()) continue;
    for (const c10::OperatorHandle& op : overloads(row->name))
      EXPECT_TRUE(op.hasTag(at::Tag::nondeterministic_seeded)) << operator_name(op) << " draws nothing";
  }
}

TEST(Table, SaysOnlyOfTensorsThatTheyPassThrough) {
  for (const OperatorFacts* row : operator_table()) {
    if (!row->passes_through && !row->plain_view) continue;
    for (const c10::OperatorHandle& op : overloads(row->name)) {
      ASSERT_FALSE(op.schema().arguments().empty()) << operator_name(op);
      EXPECT_EQ(op.schema().arguments()[0].type()->kind(), c10::TypeKind::TensorType) << operator_name(op);
      if (row->plain_view) EXPECT_TRUE(op.schema().returns()[0].alias_info()) << operator_name(op) << " is no view";
    }
  }
}

TEST(Table, HasOneRowForEveryRecurrentLayerAndCell) {
  for (const auto& [name, op] : registered()) {
    const bool layer = argument(op, "num_layers") && argument(op, "has_biases") && name.starts_with("aten::") &&
                       op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    if (layer && name.find("quantized") == std::string::npos)
      EXPECT_NE(operator_facts(name).recurrent, RecurrentLayer::None) << name;
  }
}

}  // namespace
}  // namespace plumb
