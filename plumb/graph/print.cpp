// Graph -> text. parse.cpp is its inverse; the grammar is in docs/design/graph.md.
#include <c10/util/irange.h>

#include <charconv>

#include "plumb/graph/graph.h"
#include "plumb/graph/names.h"
#include "plumb/graph/node_kind.h"
#include "plumb/graph/parse_tokens.h"
#include "plumb/graph/schema_fit.h"

namespace plumb {
namespace {

class Printer {
 public:
  explicit Printer(const PrintOptions& options) : options_(options) {}

  std::string print(const Graph& graph) {
    out_ = "graph {\n";
    for (const Node* node : graph.nodes()) {
      out_ += "  ";
      line(*node);
      out_ += '\n';
    }
    out_ += "}\n";
    return std::move(out_);
  }

 private:
  void line(const Node& node) {
    if (node.kind() != NodeKind::Output) results(node);
    switch (node.kind()) {
      case NodeKind::Placeholder:
      case NodeKind::GetAttr:
        out_ += std::string(to_string(node.kind())) + " ";
        quoted(node.target());
        break;
      case NodeKind::CallFunction:
        out_ += node.target();
        call_args(node);
        break;
      case NodeKind::Output:
        out_ += "output";
        plain_args(node);
        break;
    }
    if (!node.meta().grad_enabled) out_ += " no_grad";
    if (options_.locations) location(node.meta());
  }

  // Writes the elements by `put`, with commas between.
  template <class Range, class Put>
  void commas(const Range& range, const Put& put) {
    bool first = true;
    for (const auto& element : range) {
      if (!first) out_ += ", ";
      first = false;
      put(element);
    }
  }

  void results(const Node& node) {
    size_t next = 0;
    commas(node.result_layout(), [&](int32_t count) {
      if (count < 0) return value(*node.result(next++));
      out_ += '[';
      commas(c10::irange(count), [&](int32_t) { value(*node.result(next++)); });
      out_ += ']';
    });
    if (!node.result_layout().empty()) out_ += " = ";
  }

  void value(const Value& v) {
    out_ += '%';
    out_ += v.name();
    // The type of a non-tensor is part of what the graph means; a tensor's meta can be left out.
    if (!v.is_tensor()) {
      out_ += ": " + std::string(kValueTypes[static_cast<size_t>(v.type()) - 1]);
    } else if (options_.types && v.meta()) {
      out_ += ": ";
      tensor_type(*v.meta());
    }
  }

  void tensor_type(const TensorMeta& m) {
    out_ += short_name(m.dtype);
    out_ += '[';
    commas(c10::irange(m.sizes.size()), [&](size_t i) {
      if (i < m.symbols.size() && !m.symbols[i].empty()) {
        quoted(m.symbols[i]);
        out_ += '=';
      }
      out_ += std::to_string(m.sizes[i]);
    });
    out_ += ']';
    if (!m.is_contiguous()) {
      out_ += '{';
      commas(m.strides, [&](int64_t stride) { out_ += std::to_string(stride); });
      out_ += '}';
    }
    if (m.device != at::Device(at::kCPU)) out_ += '@' + m.device.str();
    if (m.requires_grad) out_ += " grad";
  }

  void plain_args(const Node& node) {
    out_ += '(';
    commas(node.args(), [&](const Arg& a) { arg(a, IntMeaning::Plain); });
    out_ += ')';
  }

  // Positional as long as nothing was left out; what equals its default is left out where a name can follow.
  void call_args(const Node& node) {
    const auto& schema = node.schema();
    out_ += '(';
    std::vector<size_t> shown;
    for (size_t i = 0; i < node.args().size(); ++i) {
      if (!is_default(schema, i, node.arg(i))) shown.push_back(i);
    }
    size_t next = 0;
    commas(shown, [&](size_t i) {
      const auto& argument = schema.arguments()[i];
      if (i != next++ || argument.kwarg_only()) {
        out_ += argument.name() + "=";
        next = node.args().size();  // and so are all that follow
      }
      arg(node.arg(i), int_meaning(argument));
    });
    out_ += ')';
  }

  static bool is_default(const c10::FunctionSchema& schema, size_t i, const Arg& a) {
    return has_default(schema, i) && !a.has_values() && a == default_argument(schema, i);
  }

  void arg(const Arg& a, IntMeaning meaning) {
    if (a.is_value()) {
      out_ += '%';
      out_ += a.value()->name();
    } else if (a.is_list()) {
      out_ += '[';
      commas(a.list(), [&](const Arg& e) { arg(e, meaning); });
      out_ += ']';
    } else {
      constant(a.constant(), meaning);
    }
  }

  void constant(const c10::IValue& v, IntMeaning meaning) {
    if (v.isNone()) {
      out_ += "None";
    } else if (v.isBool()) {
      out_ += v.toBool() ? "True" : "False";
    } else if (v.isInt()) {
      integer(v.toInt(), meaning);
    } else if (v.isDouble()) {
      number(v.toDouble());
    } else if (v.isComplexDouble()) {
      out_ += "complex(";
      number(v.toComplexDouble().real());
      out_ += ", ";
      number(v.toComplexDouble().imag());
      out_ += ')';
    } else if (v.isString()) {
      quoted(v.toStringRef());
    } else if (v.isDevice()) {
      out_ += "device(";
      quoted(v.toDevice().str());
      out_ += ')';
    } else if (v.isList()) {
      out_ += '[';
      commas(v.toListRef(), [&](const c10::IValue& e) { constant(e, meaning); });
      out_ += ']';
    } else {
      out_ += "<" + v.tagKind() + ">";  // has no text; parse refuses it
    }
  }

  void integer(int64_t v, IntMeaning meaning) {
    if (meaning == IntMeaning::ScalarType && v >= 0 && v < static_cast<int64_t>(at::ScalarType::NumOptions)) {
      out_ += "torch." + torch_name(static_cast<at::ScalarType>(v));
    } else if (meaning == IntMeaning::Layout && v == static_cast<int64_t>(at::kStrided)) {
      out_ += "torch.strided";
    } else if (meaning == IntMeaning::MemoryFormat && v >= 0 && v <= 3) {
      out_ += "torch." + std::string(kMemoryFormats[static_cast<size_t>(v)]);
    } else {
      out_ += std::to_string(v);
    }
  }

  void number(double v) {
    if (v != v) {
      out_ += "nan";
      return;
    }
    if (v == v + v && v != 0) {
      out_ += v > 0 ? "inf" : "-inf";
      return;
    }
    char buffer[40];
    auto end = std::to_chars(buffer, buffer + sizeof buffer, v).ptr;
    std::string_view text(buffer, static_cast<size_t>(end - buffer));
    out_ += text;
    if (text.find_first_of(".e") == std::string_view::npos) out_ += ".0";
  }

  void location(const NodeMeta& meta) {
    if (meta.modules && !meta.modules->empty()) {
      out_ += " in";
      for (const ModuleFrame& frame : *meta.modules) {
        out_ += ' ';
        quoted(frame.path);
        out_ += ':';
        quoted(frame.type);
      }
    }
    if (meta.source) {
      out_ += " at ";
      quoted(meta.source->file);
      out_ += ':' + std::to_string(meta.source->line) + ':';
      quoted(meta.source->function);
    }
  }

  void quoted(std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    out_ += '"';
    for (unsigned char c : text) {
      if (c == '"' || c == '\\') {
        out_ += '\\';
        out_ += static_cast<char>(c);
      } else if (c < 0x20 || c == 0x7f) {
        out_ += "\\x";
        out_ += kHex[c >> 4];
        out_ += kHex[c & 15];
      } else {
        out_ += static_cast<char>(c);
      }
    }
    out_ += '"';
  }

  PrintOptions options_;
  std::string out_;
};

}  // namespace

std::string to_string(const Graph& graph, const PrintOptions& options) { return Printer(options).print(graph); }

}  // namespace plumb
