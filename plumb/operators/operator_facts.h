// Facts about operators beyond their schemas: one table for readers, passes, capture, costs and formats. A row holds
// for all overloads of its operator. Facts that schemas and tags say (arguments written in place, random operators,
// sizes that depend on the data) are not repeated; the table holds what they leave out.
//
// A new operator needs a row before a file may name it: a RegisterOperators beside its declaration. Rows of torch's
// operators stand in `torch_operators.cpp`.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace plumb {

enum class ContractionKind : uint8_t {
  None,
  Product,                // rows times columns, summed over one dimension
  BatchProduct,           // the same, summed over the batch too (addbmm)
  Bilinear,               // a sum over two inputs
  Einsum,                 // as its equation says
  Attention,              // query times key, and the weights times value
  Convolution,            // an output element sums over a filter
  TransposedConvolution,  // an input element is spread over a filter
};

// An argument that is multiplied, and the dimension of it that the product sums over.
struct ContractedOperand {
  std::string_view argument;
  int8_t dim = -1;
};

struct Contraction {
  ContractionKind kind = ContractionKind::None;
  ContractedOperand operands[3] = {};  // those with a name
  // dimension of the result that the gradient of the first operand sums over
  int8_t result_dim = -1;

  explicit operator bool() const { return kind != ContractionKind::None; }
  std::span<const ContractedOperand> named_operands() const {
    size_t n = 0;
    while (n < 3 && !operands[n].argument.empty()) ++n;
    return {operands, n};
  }

  static constexpr Contraction product(std::string_view left, int8_t left_dim, std::string_view right,
                                       int8_t right_dim) {
    return {ContractionKind::Product, {{left, left_dim}, {right, right_dim}}};
  }
  static constexpr Contraction linear() { return product("input", -1, "weight", -1); }
  static constexpr Contraction attention() { return {ContractionKind::Attention, {{"query"}, {"key"}, {"value", -2}}}; }
  // Channels stand before the places, with a batch or without.
  static constexpr Contraction convolution(int8_t places) {
    return {ContractionKind::Convolution, {{"input", int8_t(-1 - places)}, {"weight", 1}}, int8_t(-1 - places)};
  }
  static constexpr Contraction transposed_convolution(int8_t places) {
    return {
        ContractionKind::TransposedConvolution, {{"input", int8_t(-1 - places)}, {"weight", 0}}, int8_t(-1 - places)};
  }
};

enum class RecurrentLayer : uint8_t { None, Lstm, Gru, Tanh, Relu };

// Operators whose sizes depend on the data although no tag says so, or not in every call although one does.
enum class DataSizes : uint8_t {
  ByTag,        // as at::Tag::dynamic_output_shape says
  Always,       // in every overload
  OfCondition,  // `where` of a condition alone
  OfMasks,      // indexing: by masks, not by numbers
};

struct OperatorFacts {
  // "aten::linear", no overload; or "c10d::", which stands for a whole namespace where an operator has no row.
  std::string_view name;

  // Why no file may name it: "it opens files". Empty: a file may.
  std::string_view refused = {};

  // Arguments that it writes though its schema does not say so, as long as the bool argument `writes_if` is true.
  std::string_view writes[2] = {};
  std::string_view writes_if = {};
  // It may return an input, or a view of it, though its schema does not say so.
  bool may_alias = false;
  // It runs opaque code: it may write every argument and do anything else.
  bool opaque = false;
  // It does something that no result shows: measures, waits for other processes.
  bool has_effects = false;

  // A random operator (at::Tag::nondeterministic_seeded) draws nothing where this bool argument is false ...
  std::string_view draws_if = {};
  // ... or this probability is 0.
  std::string_view draws_with = {};

  // It takes values out of a tensor into the program.
  bool reads_value = false;
  DataSizes data_sizes = DataSizes::ByTag;

  // Its result, or in-place its argument, holds memory that was never written.
  bool uninitialised = false;
  // It passes its first argument through, rearranged, copied, cast, rounded or measured, but not computed with.
  bool passes_through = false;
  // Its result holds each element of its first argument exactly once, in another shape or order (with `view` of a dtype
  // only the memory stays).
  bool rearranges = false;
  // A view of its first argument that can be made again, from the same other arguments, on other memory.
  bool plain_view = false;

  // Its in-place form ("aten::add_" of "aten::add") computes and differentiates as it does. elu, celu and selu do not:
  // in place their backward starts from the result, otherwise from the input.
  bool in_place_alike = false;

  Contraction contraction = {};
  // The argument that divides the rows of a product into groups, each of which has a matrix of its own.
  std::string_view groups = {};
  RecurrentLayer recurrent = RecurrentLayer::None;
  bool recurrent_cell = false;  // one step, with the weights of one layer
};

// A reason to refuse an operator: that of all backward passes with a row.
constexpr const char* kTrustsSaved = "its kernel takes what a forward pass saved on trust";

// Operators, or whole namespaces, whose rows are equal.
struct OperatorGroup {
  std::string_view space;    // "aten::"; "" where the names have theirs
  std::string_view names;    // apart by spaces
  OperatorFacts facts = {};  // facts about each of them, except its name
};

// Adds rows to the table at start-up: `const RegisterOperators file_rows{...};` at namespace scope, beside the
// operators' declarations. The texts must last. Throws Error(Internal) for an operator that has a row.
struct RegisterOperators {
  RegisterOperators(std::initializer_list<OperatorGroup> groups);
};

// Returns the row of "aten::add" or "aten::add.Tensor", else that of its namespace, else a row that says nothing but
// that no file may name it.
const OperatorFacts& operator_facts(std::string_view name);
// Returns the operator's own row. Null if operator_facts() would fall back to a less specific one.
const OperatorFacts* find_operator_facts(std::string_view name);
// Returns every row, in the order of names.
std::span<const OperatorFacts* const> operator_table();

// --- which operators a file may name ---
// Bytes of a `.pt2` file, of a stage and of a graph's text may come from anywhere. They may name the operators of the
// table that are not refused, the in-place and out= forms of these, and what the process has allowed by name.

struct OperatorRefusal {
  std::string message;  // "aten::from_file may not stand in a file: it opens files"
  std::string remedy;
};
// Returns nullopt if a file may name the operator ("aten::add.Tensor").
std::optional<OperatorRefusal> refused_in_files(std::string_view name);

// Lets every file that this process reads from now on name an operator ("mylib::op", all its overloads) or those of a
// namespace ("mylib"). The operators must be safe with arguments that a file's author chose. Thread-safe. Throws
// Error(InvalidArgument) for what is no such name, and for torch's own namespaces as a whole.
void allow_operators(std::string_view name);

}  // namespace plumb
