// The norm of a whole model's gradient, for any stages, and its uses.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plumb/checkpoint/safetensors.h"
#include "plumb/partition/pipe.h"
#include "plumb/pipeline/transport/process_group.h"

namespace plumb {

// A trained parameter of the whole model, by the first of its names.
struct ModelParameter {
  std::string name;
  int stage = 0;        // the first that holds it
  std::string held_as;  // its name there
};
// Returns them in the model's order; those that no stage uses are left out.
std::vector<ModelParameter> trained_parameters(const GraphModule& model, const Pipe& pipe);

// Shares every rank's numbers: `values[i]` is that of rank `owners[i]`, on all of them. All ranks call it.
void share_numbers(const ProcessGroup& group, const std::vector<int>& owners, std::vector<double>& values);

// Returns rank 0's number, on all ranks. All ranks call it.
int64_t of_rank_0(const ProcessGroup& group, int64_t number);

// Returns the sum of the squares in double, in an order that depends on the number of elements alone (not on threads);
// of a complex tensor that of its real and imaginary parts.
double sum_of_squares(const at::Tensor& tensor);

// Scales gradients by max_norm / (norm + 1e-6) if that is below 1, as torch.nn.utils.clip_grad_norm_ does. Returns the
// factor, 1 if nothing was done.
double clip_gradients(const NamedTensors& parameters, double norm, double max_norm);

// The mean over several passes of a schedule: sums of gradients, each pass by its weight.
class PassSum {
 public:
  explicit PassSum(NamedTensors parameters) : parameters_(std::move(parameters)) {}
  // Takes the parameters' gradients of a pass away. `weight`: 1 if all passes count alike.
  void take(double weight);
  // Puts sum / passes where the gradients were.
  void give(int64_t passes);

 private:
  NamedTensors parameters_;
  std::map<size_t, at::Tensor> sums_;
};

}  // namespace plumb
