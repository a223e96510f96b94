// Brings arguments into the one form a schema asks for, so that equal calls print equally.
#pragma once

#include <ATen/core/function_schema.h>

#include "plumb/graph/arg.h"

namespace plumb {

// Returns whether a value in it is a null pointer.
bool has_null(const Arg& arg);

// Returns `arg` as the schema's argument `index` wants it (ints for floats become floats, untyped lists typed ones, a
// single int for int[2] is repeated). Throws an Error naming operator and argument if it does not fit or is null.
Arg fit_argument(const c10::FunctionSchema& schema, size_t index, Arg arg);

// Returns the schema's default of argument `index`, fitted. Throws if it has none.
Arg default_argument(const c10::FunctionSchema& schema, size_t index);
bool has_default(const c10::FunctionSchema& schema, size_t index);

// True where the schema means a dtype, layout or memory format although the boxed value is an int.
enum class IntMeaning { Plain, ScalarType, Layout, MemoryFormat };
IntMeaning int_meaning(const c10::Argument& argument);

}  // namespace plumb
