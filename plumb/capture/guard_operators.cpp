// The operators of guard nodes, which check in every run that values and sizes are still those of the capture.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>

#include "plumb/capture/capture.h"
#include "plumb/core/error.h"
#include "plumb/operators/operator_facts.h"
#include "plumb/tensors/deferred_checks.h"

namespace plumb {
namespace {

thread_local ControlValueLog* control_value_log = nullptr;

// While a ControlValueLog is active, a failed check selects another graph. It is then read at once, before the run
// continues on a path that is not for these values.
void check_guard(const at::Tensor& passed, std::function<Error()> failure) {
  if (!control_value_log) return check_value(passed, std::move(failure));
  if (!passed.item<bool>()) throw failure();
}

// Whether two tensors are equal: bool [] on their device, which is not waited for.
at::Tensor same_values(const at::Tensor& a, const at::Tensor& b) {
  // at::equal knows more of these without reading them.
  if (a.is_cpu() || a.sizes() != b.sizes() || a.is_alias_of(b)) return at::scalar_tensor(at::equal(a, b), at::kBool);
  return a.eq(b).all();
}

// Whether a tensor of one element counts as true, as bool [].
at::Tensor truth_of(const at::Tensor& x) {
  return x.numel() == 1 ? x.reshape({}).ne(0) : at::scalar_tensor(at::is_nonzero(x), at::kBool);
}

void guard_equal(const at::Tensor& a, const at::Tensor& b, bool expected) {
  if (a.is_meta() || b.is_meta()) return;
  at::NoGradGuard no_grad;
  const at::Tensor same = same_values(a, b);
  check_guard(expected ? same : same.logical_not(), [expected] {
    return Error(ErrorKind::GuardFailed,
                 std::string("the model took the path for ") + (expected ? "equal" : "different") +
                     " tensors when it was captured; these are " + (expected ? "different" : "equal"),
                 "", "capture the model again on inputs like these");
  });
}

void guard_check(const at::Tensor& condition, bool expected, std::string_view where) {
  if (condition.is_meta()) return;
  at::NoGradGuard no_grad;
  const at::Tensor answer = truth_of(condition);
  check_guard(expected ? answer : answer.logical_not(), [expected, where = std::string(where)] {
    return Error(ErrorKind::GuardFailed,
                 std::string("a check that the model makes in its forward fails: the condition was ") +
                     (expected ? "true" : "false") + " when it was captured and is " + (expected ? "false" : "true") +
                     " now, where the model itself raises an error",
                 where, "look at the line of the check: the inputs or parameters are not what it asks for");
  });
}

void guard_value(const at::Tensor& buffer, const at::Tensor& expected, std::string_view where) {
  if (buffer.is_meta()) return;
  at::NoGradGuard no_grad;
  check_guard(same_values(buffer, expected), [where = std::string(where)] {
    return Error(ErrorKind::GuardFailed,
                 "a buffer whose value the model took into the program (item, float, int) has another value than when "
                 "it was captured",
                 where, "capture the model again, or compute with the buffer as a tensor");
  });
}

// NaN is as good as NaN.
at::Tensor same_answer(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor same = same_values(a, b);
  if (!a.is_floating_point() || a.sizes() != b.sizes() || (a.is_cpu() && same.item<bool>())) return same;
  return a.isnan().logical_and(b.isnan()).logical_or(a == b).all();
}

// truth: the program asked only whether the tensor counts as true.
void guard_value_read(const at::Tensor& x, const at::Tensor& expected, bool truth, std::string_view where) {
  if (x.is_meta()) return;
  at::NoGradGuard no_grad;
  const bool number = !truth && x.numel() == 1 && !x.is_complex();
  // On a device the model may overwrite x before the check is read.
  const at::Tensor found = number && !x.is_cpu() ? x.clone() : x;
  check_guard(
      truth ? truth_of(x).eq(truth_of(expected).to(x.device())) : same_answer(x, expected),
      [truth, number, found, expected, where = std::string(where)] {
        std::string was = "values out of a tensor into the program when it was captured; they are others now";
        if (truth) {
          const bool then = at::is_nonzero(expected);
          was = std::string("the path for a ") + (then ? "true" : "false") + " condition when it was captured; it is " +
                (then ? "false" : "true") + " now";
        } else if (number) {
          was = "the value " + c10::str(expected.item()) +
                " out of a tensor into the program when it was captured; it is " + c10::str(found.item()) + " now";
        }
        return Error(ErrorKind::GuardFailed, "the model took " + was, where,
                     "capture the model again on data like these, or use torch.where or masks instead of branching on "
                     "values");
      });
}

void control_value(const at::Tensor& x) {
  if (control_value_log && !x.is_meta()) control_value_log->tensors.push_back(x.detach().clone());
}

void guard_size(const at::Tensor& x, at::IntArrayRef sizes, bool exact, std::string_view where) {
  // No product: sizes that a file wrote overflow.
  const bool was_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  if (x.is_meta() || (exact ? x.sizes() == sizes : (x.numel() == 0) == was_empty)) return;
  if (exact) {
    throw Error(ErrorKind::GuardFailed,
                "the model read a size that depends on the data: " + c10::str(sizes) + " when it was captured, " +
                    c10::str(x.sizes()) + " now",
                std::string(where),
                "capture the model again on data like these, or use masks instead of boolean indexing and nonzero");
  }
  throw Error(ErrorKind::GuardFailed,
              std::string("the model took the path for a tensor ") + (was_empty ? "without" : "with") +
                  " elements when it was captured; now it has " + (was_empty ? "some" : "none"),
              std::string(where),
              "capture the model again on data like these, or leave the branch out: operators take empty tensors");
}

void guard_requires_grad(const at::Tensor& x, bool expected, std::string_view where) {
  if (x.is_meta() || x.requires_grad() == expected) return;
  throw Error(ErrorKind::GuardFailed,
              std::string("the model asked whether an input requires a gradient when it was captured, where it did") +
                  (expected ? "; it does not now" : " not; it does now"),
              std::string(where), "capture the model again with an input like this, or give the input as it was");
}

// On meta tensors, and so under a tracer (torch.compile), they do nothing: they check when the traced program runs.
void implement(torch::Library& m) {
  m.impl("guard_equal", guard_equal);
  m.impl("guard_check", guard_check);
  m.impl("guard_value", guard_value);
  m.impl("guard_value_read", guard_value_read);
  m.impl("guard_size", guard_size);
  m.impl("guard_requires_grad", guard_requires_grad);
  m.impl("control_value", control_value);
  m.impl("guard_answer", guard_value_read);
  m.impl("decision", control_value);
}

}  // namespace

const RegisterOperators guard_operators_rows{
    {"plumb::",
     "guard_equal guard_check guard_value guard_value_read guard_size guard_requires_grad control_value guard_answer "
     "decision"},
};
TORCH_LIBRARY_FRAGMENT(plumb, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def("guard_equal(Tensor a, Tensor b, bool expected) -> ()", tags);
  m.def("guard_check(Tensor condition, bool expected, str where) -> ()", tags);
  m.def("guard_value(Tensor buffer, Tensor expected, str where) -> ()", tags);
  m.def("guard_value_read(Tensor x, Tensor expected, bool truth, str where) -> ()", tags);
  m.def("guard_size(Tensor x, int[] sizes, bool exact, str where) -> ()", tags);
  m.def("guard_requires_grad(Tensor x, bool expected, str where) -> ()", tags);
  m.def("control_value(Tensor x) -> ()", tags);
  // Their names in files of older versions.
  m.def("guard_answer(Tensor x, Tensor expected, bool truth, str where) -> ()", tags);
  m.def("decision(Tensor x) -> ()", tags);
}
TORCH_LIBRARY_IMPL(plumb, CompositeExplicitAutograd, m) { implement(m); }
TORCH_LIBRARY_IMPL(plumb, Meta, m) { implement(m); }

ControlValueLog::ControlValueLog() : outer_(control_value_log) { control_value_log = this; }
ControlValueLog::~ControlValueLog() { control_value_log = outer_; }

}  // namespace plumb
