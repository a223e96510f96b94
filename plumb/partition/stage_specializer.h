// The graphs of a pipe's stages for other sizes than it was cut for.
//
// A graph is made for one set of sizes. If a microbatch has others, the model is captured and cut again for exactly
// those, and the stage runs that graph with its own parameters and buffers. The sizes of the model's inputs are not
// guessed from what a stage sees (a boundary may hide a batch, a length or a pooled dimension): they travel with the
// microbatch (ModelSizes, Microbatch).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plumb/capture/capture.h"
#include "plumb/graph/graph_store.h"
#include "plumb/partition/pipe.h"
#include "plumb/partition/split.h"

namespace plumb {

// The sizes of those of a model's flat inputs that are known, by the input's number.
using ModelSizes = std::map<size_t, std::vector<int64_t>>;
// Returns the sizes as they travel between stages: number, dimensions and sizes, input by input.
std::vector<int64_t> pack_sizes(const ModelSizes& sizes);
// Throws Error(StructureMismatch) for numbers that are no such row.
ModelSizes unpack_sizes(at::IntArrayRef row);

class StageSpecializer {
 public:
  // Captures the model for these flat inputs and cuts it as the pipe was cut. Returns null if the model is gone.
  using Cut = std::function<std::shared_ptr<Pipe>(const std::vector<c10::IValue>& inputs)>;

  // `example`: flat inputs as those the pipe was captured with; it is tiled or narrowed to other sizes. `same_names`:
  // the cuts are places in the graph (SplitOptions::cut_before, policy) and not in the model, so the values at the
  // boundaries must bear the same names again. Remembers autocast as it is now: captures are made in that.
  StageSpecializer(const Pipe& pipe, std::vector<c10::IValue> example, Cut cut, bool same_names = false);
  ~StageSpecializer();
  StageSpecializer(const StageSpecializer&) = delete;

  // Returns a graph of stage `index` for these sizes, with the parameters and buffers of `now` (the stage as it was
  // cut, and moved since) and in its mode. An input of the model that is known neither here nor at a stage before is
  // taken to follow the others: it matters to later stages alone. Leaves the model as it is. Thread-safe.
  //
  // Throws Error(InvalidArgument) for a stage that is not there, Error(TensorMismatch) if an input has another number
  // of dimensions, Error(InvalidState) if the model is gone, Error(ExecutionFailed) if it does not take the sizes, and
  // Error(Partition) if it is cut otherwise with them or a stage then uses other parameters. Errors of the capture keep
  // their kind. All name the sizes.
  std::shared_ptr<GraphModule> stage(int index, const ModelSizes& known, const GraphModule& now);

  // Returns how often the model was captured.
  int captures() const { return captures_; }

 private:
  struct Stage {
    Graph graph;
    State state;  // constants; parameters and buffers by name alone
    TreeSpec in_spec, out_spec;
  };
  struct Ambient;

  std::vector<c10::IValue> inputs_for(int index, const ModelSizes& known) const;
  const std::vector<Stage>& stages_for(std::vector<c10::IValue> inputs, int index);
  void check(const Pipe& pipe) const;
  std::string describe(const std::vector<c10::IValue>& inputs) const;

  PipeTable table_;
  std::vector<std::string> input_names_;
  std::vector<c10::IValue> example_;
  Cut cut_;
  bool same_names_;
  std::unique_ptr<Ambient> ambient_;
  std::mutex mutex_;
  // By the inputs' sizes. These change at every step for some: what a step needs again at once is kept.
  GraphStore<std::vector<std::vector<int64_t>>, std::vector<Stage>> made_{16};
  int captures_ = 0;
};

namespace specializer_detail {

std::vector<bool> modes_of(const torch::nn::Module& model);
// Sets the modes, and restores them at the end of the scope. Throws Error(InvalidState) if the model has other modules
// now.
class WithModes {
 public:
  WithModes(torch::nn::Module& model, const std::vector<bool>& modes);
  ~WithModes();
  WithModes(const WithModes&) = delete;

 private:
  torch::nn::Module& model_;
  std::vector<bool> before_;
};
bool cuts_by_place(const SplitOptions& options);

}  // namespace specializer_detail

// Lets the stages of `pipe` follow other sizes of `inputs`: give it to stages_of_rank() or GraphStage. The pipe is
// pipeline(*capture(*model, inputs...), options) of that model, which is referred to weakly: keep it. Its training mode
// may change meanwhile.
template <typename M, typename... Inputs>
std::shared_ptr<StageSpecializer> specialize_on_sizes(const Pipe& pipe, const std::shared_ptr<M>& model,
                                                      const SplitOptions& options, const Inputs&... inputs) {
  std::vector<c10::IValue> example{c10::IValue(at::Tensor(inputs))...};
  auto cut = [alive = std::weak_ptr<M>(model), modes = specializer_detail::modes_of(*model),
              options](const std::vector<c10::IValue>& flat) -> std::shared_ptr<Pipe> {
    const auto model = alive.lock();
    if (!model) return nullptr;
    const specializer_detail::WithModes as_cut(*model, modes);
    return [&]<size_t... I>(std::index_sequence<I...>) {
      auto copy = model;
      return pipeline(*capture(copy, flat[I].toTensor()...), options);
    }(std::index_sequence_for<Inputs...>{});
  };
  return std::make_shared<StageSpecializer>(pipe, std::move(example), std::move(cut),
                                            specializer_detail::cuts_by_place(options));
}
template <typename M, typename... Inputs>
std::shared_ptr<StageSpecializer> specialize_on_sizes(const Pipe& pipe, const torch::nn::ModuleHolder<M>& model,
                                                      const SplitOptions& options, const Inputs&... inputs) {
  return specialize_on_sizes(pipe, model.ptr(), options, inputs...);
}

}  // namespace plumb
