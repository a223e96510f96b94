// plumb::Error and plumb.Error: one carries over into the other with all its fields.
#pragma once

#include <torch/extension.h>

#include "plumb/core/error.h"

namespace plumb::python {

// The Error that a Python exception stands for: a plumb.Error with its fields; any other is of kind ExecutionFailed and
// reads "ValueError: what it said". Needs the GIL.
Error to_error(const py::error_already_set& error);

}  // namespace plumb::python
