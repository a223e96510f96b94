// Brings together what ranks have in parts, after a step or a training.
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <set>

#include "plumb/pipeline/runtime/graph_stage.h"
#include "plumb/pipeline/runtime/step_runner.h"
#include "plumb/pipeline/transport/broadcast.h"

namespace plumb {
namespace {

// Returns the mean of `loss` over the ranks of `replicas` by their rows, summed as ReplicaSums does.
at::Tensor mean_over_replicas(const ProcessGroup& replicas, const at::Tensor& loss, double rows) {
  const at::Tensor own = at::tensor({loss.item<double>() * rows, rows}, at::kDouble);
  Tensors all;
  for (int r = 0; r < replicas.size(); r++) {
    all.push_back(own.clone());
    broadcast(replicas, all.back(), r);
  }
  const at::Tensor sum = tree_sum(std::move(all));
  return sum[0].div(sum[1]).to(loss.scalar_type());
}

}  // namespace

at::Tensor StepRunner::gather_loss() const {
  const StepBatch& batch = runner_.batch;
  const auto num = static_cast<int>(batch.losses.size());
  auto holder = [&](int m) { return setup_.schedule.placement.rank_of(setup_.last_stage(), m); };
  std::set<int> holders;
  for (int m = 0; m < num; m++) holders.insert(holder(m));
  if (holders.size() <= 1) return loss_;
  // A loss and whether there is one.
  at::Tensor losses = at::zeros({num, 2}, at::kDouble);
  auto dtype = at::kFloat;
  for (int m = 0; m < num; m++) {
    if (!batch.losses[m].defined()) continue;
    dtype = batch.losses[m].scalar_type();
    losses[m][0].copy_(batch.losses[m]);
    losses[m][1].fill_(1);
  }
  for (int rank : holders) {
    const at::Tensor theirs = losses.clone();
    broadcast(transport_.group(), theirs, rank);
    for (int m = 0; m < num; m++) {
      if (holder(m) == rank) losses[m].copy_(theirs[m]);
    }
  }
  if (setup_.rank != holder(0)) return {};
  Tensors by_microbatch(num);
  double rows = 0;
  for (int m = 0; m < num; m++) {
    if (losses[m][1].item<double>() != 0) by_microbatch[m] = losses[m][0].to(dtype);
    rows += static_cast<double>(batch.rows[m]);
  }
  at::Tensor loss = mean_by_rows(by_microbatch, batch.rows);
  if (!loss.defined() || !replicas_ || !runner_.training) return loss;
  return mean_over_replicas(setup_.options.replicas, loss, rows);
}

void gather_state(const Pipe& pipe, const Schedule& schedule, const ProcessGroup& group) {
  for (int stage = 0; stage < pipe.num_stages(); stage++) {
    for (const Attr& attr : pipe.stage(stage)->state()) {
      if (attr.kind != AttrKind::Constant) broadcast(group, attr.tensor, schedule.placement.rank_of(stage, 0));
    }
  }
}

}  // namespace plumb
