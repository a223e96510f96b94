// plumb's operators on arguments nobody would give, on the CPU, on the meta device and through autograd: every call
// must end in a result or an exception. --seconds is for all of them; --only=plumb::softmax calls one.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd.h>

#include "tests/fuzz/driver.h"

namespace plumb::fuzz {
namespace {

constexpr int64_t kNumbers[] = {
    INT64_MIN,        -(int64_t{1} << 31) - 1, -2,       -1, 0, 1, 2, 3, 4, 5, 300, int64_t{1} << 31,
    int64_t{1} << 40, int64_t{1} << 62,        INT64_MAX};
constexpr double kReals[] = {-1.0, 0.0, 0.5, 1.0, 2.0, 1e308, -1e-320};
const std::vector<std::vector<int64_t>> kShapes = {
    {}, {0}, {1}, {3}, {2, 3}, {3, 3}, {2, 0, 3}, {2, 3, 4}, {1, 2, 3, 4}, {2, 3, 4, 5}, {1, 1, 2, 3, 4}};
constexpr at::ScalarType kDtypes[] = {at::kFloat,  at::kFloat,    at::kFloat,        at::kFloat,
                                      at::kDouble, at::kBFloat16, at::kHalf,         at::kLong,
                                      at::kByte,   at::kBool,     at::kComplexFloat, at::kFloat8_e4m3fn};
constexpr size_t kLengths[] = {0, 1, 1, 2, 2, 3, 4, 9};
const char* const kTexts[] = {"",      "none",    "tanh",  "E4M3", "E5M2-SR", "E99M1", "to_output_scale",
                              "hmean", "nearest", "0 1 2", "mean", "sum"};

template <class List>
auto& pick(const List& list, Random& random) {
  return list[below(random, std::size(list))];
}

// One call's arguments: of one device, mostly of one shape, so that calls come further than the first check.
class Arguments {
 public:
  explicit Arguments(Random& random)
      : random_(random),
        meta_(chance(random, 3)),
        alike_(chance(random, 2)),
        shape_(pick(kShapes, random)),
        dtype_(pick(kDtypes, random)) {}

  c10::IValue make(const c10::TypePtr& type) {
    if (const auto optional = type->cast<c10::OptionalType>()) {
      return chance(random_, 3) ? c10::IValue() : make(optional->getElementType());
    }
    if (const auto list = type->cast<c10::ListType>()) {
      c10::impl::GenericList made(list->getElementType());
      for (size_t n = pick(kLengths, random_); n > 0; --n) made.push_back(make(list->getElementType()));
      return made;
    }
    switch (type->kind()) {
      case c10::TypeKind::TensorType: return tensor();
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType: return pick(kNumbers, random_);
      case c10::TypeKind::FloatType: return real();
      case c10::TypeKind::NumberType:
        return chance(random_, 2) ? c10::IValue(real()) : c10::IValue(pick(kNumbers, random_));
      case c10::TypeKind::BoolType: return chance(random_, 2);
      case c10::TypeKind::StringType: return std::string(pick(kTexts, random_));
      default: throw std::runtime_error("no arguments of type " + type->str() + " are made here");
    }
  }

 private:
  double real() {
    if (chance(random_, 8)) return chance(random_, 2) ? std::numeric_limits<double>::quiet_NaN() : INFINITY;
    return pick(kReals, random_);
  }

  at::Tensor tensor() {
    const bool like = alike_ && !chance(random_, 6);
    const auto& shape = like ? shape_ : pick(kShapes, random_);
    const auto dtype = like ? dtype_ : pick(kDtypes, random_);
    at::Tensor made = dtype == at::kLong ? at::randint(-2, 5, shape, at::kLong) : at::randn(shape).to(dtype);
    if (chance(random_, 12)) {
      std::vector<int64_t> wider = shape;
      wider.insert(wider.begin(), 2);
      made = made.expand(wider);
    }
    if (made.dim() > 1 && chance(random_, 6)) made = made.transpose(0, -1);
    if (meta_) made = made.to(at::kMeta);
    if (made.is_floating_point() && chance(random_, 2)) made.requires_grad_();
    return made;
  }

  Random& random_;
  const bool meta_, alike_;
  const std::vector<int64_t>& shape_;
  const at::ScalarType dtype_;
};

std::string text_of(const c10::IValue& value) {
  std::ostringstream out;
  if (value.isTensor()) {
    out << value.toTensor().sizes() << value.toTensor().dtype() << value.toTensor().strides()
        << value.toTensor().device();
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) out << text_of(t) << ';';
  } else {
    out << value;
  }
  return out.str();
}

void go_back(const std::vector<c10::IValue>& results) {
  at::Tensor sum;
  for (const c10::IValue& value : results) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().requires_grad()) continue;
    const at::Tensor part = at::real(value.toTensor()).sum();
    sum = sum.defined() ? sum + part : part;
  }
  if (sum.defined()) torch::autograd::backward({sum}, {});
}

// Any exception is a good end: c10's, plumb's, the library's.
void call(const c10::OperatorHandle& op, Random& random, const std::string& file) {
  Arguments arguments(random);
  torch::jit::Stack stack;
  std::string said = op.schema().name() + "." + op.schema().overload_name();
  for (const c10::Argument& argument : op.schema().arguments()) {
    const bool use_default = argument.default_value() && !chance(random, 3);
    stack.push_back(use_default ? *argument.default_value() : arguments.make(argument.type()));
    said += "\n  " + argument.name() + " = " + text_of(stack.back());
  }
  spill(file, said + "\n");
  try {
    op.callBoxed(stack);
    go_back(stack);
  } catch (const std::exception& e) {
    throw Error(ErrorKind::InvalidArgument, e.what());
  }
}

}  // namespace
}  // namespace plumb::fuzz

int main(int argc, char** argv) {
  using namespace plumb::fuzz;
  const Options options = parse_options(argc, argv);
  at::set_num_threads(1);
  std::vector<c10::OperatorHandle> operators;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const bool wanted = options.only.empty() ? name.name.starts_with("plumb::") : name.name == options.only;
    if (const auto op = dispatcher.findSchema(name); wanted && op) operators.push_back(*op);
  }
  if (operators.empty()) {
    std::printf("no operator to call\n");
    return 1;
  }
  std::sort(operators.begin(), operators.end(),
            [](const auto& a, const auto& b) { return toString(a.operator_name()) < toString(b.operator_name()); });
  const std::string file = work_file("operators.txt");
  const bool clean = run(options, std::to_string(operators.size()) + " operators", file, [&](Random& random) {
    at::manual_seed(random());
    call(operators[below(random, operators.size())], random, file);
  });
  return clean ? 0 : 1;
}
