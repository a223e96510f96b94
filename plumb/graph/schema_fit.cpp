#include "plumb/graph/schema_fit.h"

#include <ATen/core/jit_type.h>

#include <algorithm>

#include "plumb/core/error.h"
#include "plumb/graph/graph.h"

namespace plumb {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

[[noreturn]] void misfit(const c10::FunctionSchema& schema, size_t index, const std::string& got) {
  const auto& argument = schema.arguments()[index];
  throw Error(ErrorKind::InvalidArgument,
              "operator " + toString(schema.operator_name()) + ": argument '" + argument.name() + "' takes " +
                  argument.type()->str() + ", got " + got,
              "", "see the operator's schema: " + toString(schema));
}

bool is_undefined(const IValue& v) { return v.isTensor() && !v.toTensor().defined(); }

std::string kind_of(const Arg& arg) {
  if (arg.is_value()) return "value %" + arg.value()->name();
  if (arg.is_list()) return "a list";
  const IValue& v = arg.constant();
  if (v.isNone() || is_undefined(v)) return "None";
  return v.tagKind();
}

bool is_number(const IValue& v) { return v.isInt() || v.isDouble() || v.isBool() || v.isComplexDouble(); }

struct Fitter {
  const c10::FunctionSchema& schema;
  size_t index;

  [[noreturn]] void fail(const Arg& arg) const { misfit(schema, index, kind_of(arg)); }

  Arg constant(const TypePtr& type, const IValue& v, const Arg& original) const {
    bool fits = true;
    switch (type->kind()) {
      case TypeKind::TensorType:
        // A number is a wrapped number. None would be an undefined tensor, at which some of torch's kernels crash.
        fits = is_number(v);
        break;
      case TypeKind::IntType:
      case TypeKind::SymIntType:
        if (v.isBool()) return IValue(static_cast<int64_t>(v.toBool()));
        if (v.isSymInt()) {
          if (auto plain = v.toSymInt().maybe_as_int()) return IValue(*plain);
        }
        fits = v.isInt();
        break;
      case TypeKind::FloatType:
      case TypeKind::SymFloatType:
        if (v.isInt()) return IValue(static_cast<double>(v.toInt()));
        if (v.isSymFloat() && !v.toSymFloat().is_symbolic()) return IValue(v.toSymFloat().as_float_unchecked());
        fits = v.isDouble();
        break;
      case TypeKind::BoolType:
      case TypeKind::SymBoolType:
        if (v.isInt()) return IValue(v.toInt() != 0);
        fits = v.isBool();
        break;
      case TypeKind::DeviceObjType:
        try {
          if (v.isString()) return IValue(c10::Device(v.toStringRef()));
        } catch (const c10::Error&) {
        }
        fits = v.isDevice();
        break;
      case TypeKind::NumberType: fits = is_number(v); break;
      case TypeKind::ComplexType: fits = v.isComplexDouble(); break;
      case TypeKind::StringType: fits = v.isString(); break;
      case TypeKind::GeneratorType: fits = v.isGenerator() || v.isNone(); break;
      default: break;  // Any, custom classes, streams: the operator checks them
    }
    if (!fits) fail(original);
    return v;
  }

  Arg fit(const TypePtr& type, const Arg& arg) const {
    if (type->kind() == TypeKind::OptionalType) {
      if (arg.is_constant() && (arg.is_none() || is_undefined(arg.constant()))) return IValue();
      return fit(type->castRaw<c10::OptionalType>()->getElementType(), arg);
    }
    if (arg.is_value()) {
      if (type->kind() == TypeKind::ListType && arg.value()->is_tensor()) fail(arg);
      return arg;
    }
    if (type->kind() == TypeKind::ListType) return fit_list(type, arg);
    if (arg.is_list()) {
      if (type->kind() == TypeKind::AnyType) return arg;
      fail(arg);
    }
    return constant(type, arg.constant(), arg);
  }

  Arg fit_list(const TypePtr& type, const Arg& arg) const {
    const TypePtr element = type->castRaw<c10::ListType>()->getElementType();
    Arg::List fitted;
    if (arg.is_list()) {
      fitted.reserve(arg.list().size());
      for (const Arg& e : arg.list()) fitted.push_back(fit(element, e));
    } else if (arg.constant().isList()) {
      for (const IValue& e : arg.constant().toListRef()) fitted.push_back(fit(element, Arg(e)));
    } else if (is_number(arg.constant()) && schema.arguments()[index].N().has_value()) {
      // int[2] takes a single int for both, as torch does.
      const Arg one = fit(element, arg);
      fitted.assign(static_cast<size_t>(*schema.arguments()[index].N()), one);
    } else {
      fail(arg);
    }
    for (const Arg& e : fitted) {
      if (e.has_values() || e.is_list()) return Arg(std::move(fitted));
    }
    // No values: a typed constant list. (A list of Tensor? with only None, or numbers for tensors, stays a list of
    // args.)
    if (element->kind() == TypeKind::TensorType || element->kind() == TypeKind::OptionalType) {
      if (!fitted.empty()) return Arg(std::move(fitted));
      return IValue(c10::impl::GenericList(element));
    }
    const bool ints = element->kind() == TypeKind::IntType || element->kind() == TypeKind::SymIntType;
    c10::impl::GenericList list(ints ? TypePtr(c10::IntType::get()) : element);
    list.reserve(fitted.size());
    for (const Arg& e : fitted) list.push_back(e.constant());
    return IValue(list);
  }
};

// torch takes any integer for these and looks it up in tables without asking.
void check_meaning(const c10::FunctionSchema& schema, size_t index, IntMeaning meaning, const Arg& arg) {
  if (!arg.is_constant() || !arg.constant().isInt()) misfit(schema, index, kind_of(arg) + ", which no file states");
  const int64_t number = arg.constant().toInt();
  int64_t end = static_cast<int64_t>(at::ScalarType::Undefined);
  const char* what = "dtype";
  if (meaning == IntMeaning::Layout) end = static_cast<int64_t>(at::Layout::NumOptions), what = "layout";
  if (meaning == IntMeaning::MemoryFormat)
    end = static_cast<int64_t>(at::MemoryFormat::NumOptions), what = "memory format";
  if (number < 0 || number >= end) misfit(schema, index, std::to_string(number) + ", which is no " + what);
}

}  // namespace

bool has_null(const Arg& arg) {
  return arg.is_list() ? std::ranges::any_of(arg.list(), has_null) : arg.is_value() && arg.value() == nullptr;
}

Arg fit_argument(const c10::FunctionSchema& schema, size_t index, Arg arg) {
  const c10::Argument& argument = schema.arguments()[index];
  if (has_null(arg)) {
    throw Error(
        ErrorKind::InvalidArgument,
        "operator " + toString(schema.operator_name()) + ": argument '" + argument.name() + "' is a null pointer", "",
        "give it a value of the graph");
  }
  Arg fitted = Fitter{schema, index}.fit(argument.type(), arg);
  const IntMeaning meaning = int_meaning(argument);
  if (meaning != IntMeaning::Plain && !fitted.is_none()) check_meaning(schema, index, meaning, fitted);
  return fitted;
}

bool has_default(const c10::FunctionSchema& schema, size_t index) {
  return schema.arguments()[index].default_value().has_value();
}

Arg default_argument(const c10::FunctionSchema& schema, size_t index) {
  const auto& argument = schema.arguments()[index];
  if (!argument.default_value()) {
    throw Error(ErrorKind::InvalidArgument,
                "operator " + toString(schema.operator_name()) + ": argument '" + argument.name() + "' is missing", "",
                "see the operator's schema: " + toString(schema));
  }
  return fit_argument(schema, index, Arg(*argument.default_value()));
}

IntMeaning int_meaning(const c10::Argument& argument) {
  TypePtr real = argument.real_type();
  if (real->kind() == TypeKind::OptionalType) real = real->castRaw<c10::OptionalType>()->getElementType();
  switch (real->kind()) {
    case TypeKind::ScalarTypeType: return IntMeaning::ScalarType;
    case TypeKind::LayoutType: return IntMeaning::Layout;
    case TypeKind::MemoryFormatType: return IntMeaning::MemoryFormat;
    default: return IntMeaning::Plain;
  }
}

}  // namespace plumb
