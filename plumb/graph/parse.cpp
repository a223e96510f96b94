// Text -> Graph: the inverse of print.cpp. The text is untrusted: every fault is an Error that names line and column.
#include <algorithm>
#include <cctype>
#include <charconv>

#include "plumb/core/error.h"
#include "plumb/graph/graph.h"
#include "plumb/graph/names.h"
#include "plumb/graph/parse_tokens.h"
#include "plumb/graph/schema_fit.h"
#include "plumb/operators/operator_facts.h"

namespace plumb {
namespace {

constexpr int kMaxNesting = 64;              // largest depth of nested lists: bounds the recursion
constexpr size_t kMaxListResults = 1 << 20;  // largest number of results of a node that returns a list

class Parser : private Tokens {
 public:
  Parser(std::string_view text, bool is_trusted) : Tokens(text), is_trusted_(is_trusted) {}

  Graph parse() {
    expect_word("graph");
    Graph graph = body();
    skip_space();
    if (at_ < text_.size()) fail("text after the graph's closing brace");
    return graph;
  }

 private:
  struct Result {
    std::string name;
    ValueType type = ValueType::Tensor;
    std::optional<TensorMeta> meta;
  };

  // --- structure ---
  Graph body() {
    expect('{');
    Graph graph;
    while (!accept('}')) {
      if (graph.output_node()) fail("a node after the output");
      line(graph);
    }
    return graph;
  }

  void line(Graph& graph) {
    skip_space();
    const size_t start = at_;
    std::vector<Result> results;
    std::vector<int32_t> list_sizes;
    std::vector<int32_t> layout;
    if (peek('%') || peek('[')) {
      do {
        if (accept('[')) {
          int32_t n = 0;
          elements(']', [&] {
            results.push_back(result());
            if (results.size() > kMaxListResults) fail("too many results");
            ++n;
          });
          list_sizes.push_back(n);
          layout.push_back(n);
        } else {
          results.push_back(result());
          layout.push_back(-1);
        }
      } while (accept(','));
      expect('=');
    }
    Node* node = nullptr;
    try {
      node = operation(graph, results, list_sizes);
    } catch (const ParseError&) {
      throw;  // names its place already
    } catch (const Error& e) {
      std::string message = e.message();
      if (!e.remedy().empty()) message += " (" + e.remedy() + ")";
      fail_at(start, message);
    }
    if (node->kind() != NodeKind::Output && node->result_layout() != layout) {
      fail_at(start,
              node->describe() + " has " + std::to_string(node->num_results()) + " results in another arrangement");
    }
    name_results(graph, node, results, start);
    suffix(node);
  }

  void name_results(Graph& graph, Node* node, std::vector<Result>& results, size_t start) {
    for (size_t i = 0; i < results.size(); ++i) {
      Value* v = node->result(i);
      Result& r = results[i];
      if (Value* taken = graph.find_value(r.name); taken && taken != v) {
        // Only a name that this very node was given on the way can be moved aside.
        if (taken->producer() != node) fail_at(start, "the name %" + r.name + " is used twice");
        taken->rename(graph.unique_name("aside"));
      }
      try {
        v->rename(r.name);
      } catch (const Error& e) {
        fail_at(start, e.message());
      }
      v->set_type(r.type);
      v->set_meta(std::move(r.meta));
    }
  }

  Node* operation(Graph& graph, const std::vector<Result>& results, const std::vector<int32_t>& list_sizes) {
    skip_space();
    const size_t start = at_;
    std::string_view head = word();
    if (head == "placeholder" || head == "get_attr") {
      std::string target = quoted();
      if (results.size() != 1) fail_at(start, std::string(head) + " has one result");
      if (head == "get_attr") return graph.get_attr(std::move(target));
      auto here = graph.inserting_before(nullptr);
      return graph.placeholder(std::move(target), std::nullopt, results[0].type);
    }
    if (head == "output") return graph.output(plain_args(graph));
    at_ = start;
    return call(graph, list_sizes);
  }

  Node* call(Graph& graph, const std::vector<int32_t>& list_sizes) {
    skip_space();
    const size_t start = at_;
    const std::string name(take([](char c) { return word_char(c) || c == ':' || c == '.'; }));
    if (name.empty()) fail("expected an operator" + found());
    const c10::OperatorHandle op = [&] {
      try {
        return find_operator(name);
      } catch (const Error& e) {
        fail_at(start, e.message() + " (" + e.remedy() + ")");
      }
    }();
    if (!is_trusted_) {
      if (auto refusal = refused_in_files(name)) fail_at(start, refusal->message + " (" + refusal->remedy + ")");
    }
    const auto& arguments = op.schema().arguments();
    std::vector<std::optional<Arg>> given(arguments.size());
    expect('(');
    bool named = false;
    for (size_t position = 0; !accept(')'); ++position) {
      if (position) expect(',');
      skip_space();
      const size_t here = at_;
      size_t index = position;
      std::string_view key = peek_word();
      const bool word_here = !key.empty() && (std::isalpha(static_cast<unsigned char>(key[0])) || key[0] == '_');
      if (word_here && (word(), accept('='))) {
        const auto found = op.schema().argumentIndexWithName(key);
        if (!found) fail_at(here, name + " has no argument '" + std::string(key) + "'");
        index = static_cast<size_t>(*found);
        named = true;
      } else {
        at_ = here;
        if (named) fail("a positional argument after a named one");
      }
      if (index >= arguments.size()) fail_at(here, name + " takes " + std::to_string(arguments.size()) + " arguments");
      if (given[index]) fail_at(here, "argument '" + arguments[index].name() + "' is given twice");
      given[index] = arg(graph, int_meaning(arguments[index]), 0);
    }
    std::vector<Arg> args;
    args.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); ++i) {
      args.push_back(given[i] ? std::move(*given[i]) : default_argument(op.schema(), i));
    }
    return graph.call(op, std::move(args), list_sizes);
  }

  Result result() {
    Result r;
    r.name = value_name();
    if (accept(':')) {
      skip_space();
      const size_t start = at_;
      std::string_view type = word();
      const auto known = std::ranges::find(kValueTypes, type);
      if (known != std::end(kValueTypes)) {
        r.type = static_cast<ValueType>(known - kValueTypes + 1);
      } else {
        auto dtype = dtype_from_short_name(type);
        if (!dtype) fail_at(start, "unknown type '" + std::string(type) + "'");
        r.meta = tensor_type(*dtype);
      }
    }
    return r;
  }

  TensorMeta tensor_type(at::ScalarType dtype) {
    TensorMeta m;
    m.dtype = dtype;
    expect('[');
    elements(']', [&] {
      std::string symbol;
      if (peek('"')) {
        symbol = quoted();
        expect('=');
      }
      if (!symbol.empty() && m.symbols.empty()) m.symbols.resize(m.sizes.size());
      m.sizes.push_back(integer());
      if (m.sizes.back() < 0) fail("a negative size");
      if (!symbol.empty() || !m.symbols.empty()) m.symbols.push_back(std::move(symbol));
      if (m.sizes.size() > 64) fail("a tensor of more than 64 dimensions");
    });
    m.strides = contiguous_strides(m.sizes);
    if (accept('{')) {
      m.strides.clear();
      elements('}', [&] {
        m.strides.push_back(integer());
        if (m.strides.size() > 64) fail("a tensor of more than 64 dimensions");
      });
      if (m.strides.size() != m.sizes.size() && !m.strides.empty()) fail("as many strides as sizes are needed");
    }
    if (accept('@')) {
      size_t start = at_;
      m.device = device(std::string(take([](char c) { return word_char(c) || c == ':'; })), start);
    }
    if (accept_word("grad")) m.requires_grad = true;
    return m;
  }

  at::Device device(const std::string& name, size_t at) {
    try {
      return at::Device(name);
    } catch (const std::exception&) {
      fail_at(at, "unknown device '" + name + "'");
    }
  }

  std::vector<Arg> plain_args(Graph& graph) {
    std::vector<Arg> args;
    expect('(');
    elements(')', [&] { args.push_back(arg(graph, IntMeaning::Plain, 0)); });
    return args;
  }

  Arg arg(Graph& graph, IntMeaning meaning, int depth) {
    if (depth > kMaxNesting) fail("lists nested deeper than " + std::to_string(kMaxNesting));
    skip_space();
    const size_t start = at_;
    if (peek('%')) {
      std::string name = value_name();
      if (Value* v = graph.find_value(name)) return v;
      fail_at(start, "%" + name + " is used before it is produced");
    }
    if (accept('[')) {
      Arg::List list;
      elements(']', [&] { list.push_back(arg(graph, meaning, depth + 1)); });
      return list;
    }
    if (peek('"')) return quoted();
    if (at_ < text_.size() && (std::isdigit(static_cast<unsigned char>(text_[at_])) || text_[at_] == '-'))
      return number();
    std::string_view w = word();
    if (w == "None") return std::nullopt;
    if (w == "True") return true;
    if (w == "False") return false;
    if (w == "inf" || w == "nan") {
      at_ = start;
      return number();
    }
    if (w == "complex") {
      expect('(');
      double re = real();
      expect(',');
      double im = real();
      expect(')');
      return c10::IValue(c10::complex<double>(re, im));
    }
    if (w == "device") {
      expect('(');
      std::string name = quoted();
      expect(')');
      return c10::IValue(device(name, start));
    }
    if (w == "torch" && accept('.')) return torch_constant(word(), meaning, start);
    fail_at(start, "expected an argument" + found());
  }

  Arg torch_constant(std::string_view name, IntMeaning meaning, size_t at) {
    if (meaning == IntMeaning::Layout && name == "strided") return static_cast<int64_t>(at::kStrided);
    if (meaning == IntMeaning::MemoryFormat) {
      const auto known = std::ranges::find(kMemoryFormats, name);
      if (known != std::end(kMemoryFormats)) return static_cast<int64_t>(known - kMemoryFormats);
    }
    if (meaning == IntMeaning::ScalarType) {
      if (auto dtype = dtype_from_torch_name(name)) return static_cast<int64_t>(*dtype);
    }
    fail_at(at, "torch." + std::string(name) + " does not fit this argument");
  }

  double real() {
    Arg a = number();
    const auto& v = a.constant();
    return v.isInt() ? static_cast<double>(v.toInt()) : v.toDouble();
  }

  Arg number() {
    skip_space();
    const size_t start = at_;
    size_t end = at_;
    if (end < text_.size() && text_[end] == '-') ++end;
    bool floating = false;
    if (text_.substr(end).starts_with("inf") || text_.substr(end).starts_with("nan")) {
      end += 3;
      floating = true;
    } else {
      while (end < text_.size() &&
             (std::isdigit(static_cast<unsigned char>(text_[end])) || text_[end] == '.' || text_[end] == 'e' ||
              ((text_[end] == '-' || text_[end] == '+') && text_[end - 1] == 'e'))) {
        floating = floating || text_[end] == '.' || text_[end] == 'e';
        ++end;
      }
    }
    if (!floating) return integer();
    double v = 0;
    auto [stop, error] = std::from_chars(text_.data() + start, text_.data() + end, v);
    if (error != std::errc() || stop != text_.data() + end) fail("a number that cannot be read");
    at_ = end;
    return v;
  }

  void suffix(Node* node) {
    if (accept_word("no_grad")) node->meta().grad_enabled = false;
    if (peek_word() == "in") {
      word();
      ModuleStack stack;
      while (peek('"')) {
        ModuleFrame frame;
        frame.path = quoted();
        expect(':');
        frame.type = quoted();
        stack.push_back(std::move(frame));
      }
      if (stack.empty()) fail("'in' needs a module path");
      // Thousands of nodes share a stack: keep one object for equal neighbors.
      if (!last_modules_ || *last_modules_ != stack)
        last_modules_ = std::make_shared<const ModuleStack>(std::move(stack));
      node->meta().modules = last_modules_;
    }
    if (peek_word() == "at") {
      word();
      SourceLocation source;
      source.file = quoted();
      expect(':');
      const int64_t line = integer();
      if (line < 0 || line > INT32_MAX) fail("a line number out of range");
      source.line = static_cast<int>(line);
      expect(':');
      source.function = quoted();
      if (!last_source_ || *last_source_ != source)
        last_source_ = std::make_shared<const SourceLocation>(std::move(source));
      node->meta().source = last_source_;
    }
  }

  bool is_trusted_;
  std::shared_ptr<const ModuleStack> last_modules_;
  std::shared_ptr<const SourceLocation> last_source_;
};

}  // namespace

Graph parse_graph(std::string_view text) { return Parser(text, false).parse(); }
Graph parse_trusted_graph(std::string_view text) { return Parser(text, true).parse(); }

}  // namespace plumb
