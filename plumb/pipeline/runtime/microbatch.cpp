#include "plumb/pipeline/runtime/microbatch.h"

#include <ATen/ATen.h>

#include <numeric>

#include "plumb/core/error.h"
#include "plumb/core/str.h"
#include "plumb/graph/describe.h"
#include "plumb/pipeline/runtime/gradients.h"

namespace plumb {

Microbatches split_batch(const Tensors& tensors, const std::vector<TensorChunkSpec>& specs, int num) {
  if (num < 1) throw Error(ErrorKind::InvalidArgument, str("a batch cannot be cut into ", num, " microbatches"));
  if (specs.size() > tensors.size()) {
    throw Error(ErrorKind::StructureMismatch, str(specs.size(), " chunk specs for ", tensors.size(), " tensors"));
  }
  auto spec_of = [&](size_t i) {
    if (i < specs.size()) return specs[i];
    return tensors[i].defined() && tensors[i].dim() == 0 ? TensorChunkSpec::whole() : TensorChunkSpec{};
  };
  auto refuse = [&](size_t i, const std::string& why, const std::string& remedy) {
    throw Error(ErrorKind::TensorMismatch, str("tensor ", i, " of the batch, ", describe(tensors[i]), ", ", why), "",
                remedy + "TensorChunkSpec::whole()");
  };
  int64_t shortest = -1;
  for (size_t i = 0; i < tensors.size(); i++) {
    const auto spec = spec_of(i);
    if (!tensors[i].defined() || spec.replicated) continue;
    const int64_t dims = tensors[i].dim();
    if (spec.dim < -dims || spec.dim >= dims)
      refuse(i, str("has no dimension ", spec.dim, " to cut along"), "give it ");
    const int64_t length = tensors[i].size(spec.dim);
    if (length < num)
      refuse(i, str("has ", length, " rows along dimension ", spec.dim, ", too few for ", num, " microbatches"),
             "use fewer microbatches, or ");
    if (shortest < 0 || length < shortest) shortest = length;
  }
  Microbatches result;
  result.inputs.assign(num, Tensors(tensors.size()));
  const int64_t base = shortest < 0 ? num : shortest;
  for (int m = 0; m < num; m++) result.rows.push_back(base / num + (m < base % num ? 1 : 0));
  for (size_t i = 0; i < tensors.size(); i++) {
    if (!tensors[i].defined()) continue;
    const auto spec = spec_of(i);
    if (spec.replicated) {
      for (int m = 0; m < num; m++) result.inputs[m][i] = tensors[i];
      continue;
    }
    const int64_t length = tensors[i].size(spec.dim);
    if (length % base != 0)
      refuse(i, str("cannot be cut beside another of ", base, " rows"), "make the lengths equal or multiples, or use ");
    int64_t at = 0;
    for (int m = 0; m < num; m++) {
      const int64_t rows = result.rows[m] * (length / base);
      result.inputs[m][i] = tensors[i].narrow(spec.dim, at, rows);
      at += rows;
    }
  }
  return result;
}

void check_merges(const std::vector<OutputMerge>& merges) {
  for (size_t k = 0; k < merges.size(); k++) {
    if (merges[k].kind != OutputMerge::Kind::Custom || merges[k].reduce) continue;
    throw Error(ErrorKind::InvalidArgument, str("OutputMerge::custom() of output ", k, " has no function"), "",
                "give it one, or use OutputMerge::concatenate(), sum() or mean()");
  }
}

Tensors merge_outputs(const std::vector<Tensors>& by_microbatch, const std::vector<OutputMerge>& merges,
                      const std::vector<int64_t>& rows) {
  check_merges(merges);
  if (by_microbatch.empty()) return {};
  if (merges.size() > by_microbatch[0].size()) {
    throw Error(ErrorKind::StructureMismatch,
                str(merges.size(), " output merges for ", by_microbatch[0].size(), " outputs"), "",
                "give one merge an output, in their order");
  }
  if (rows.size() != by_microbatch.size()) {
    throw Error(ErrorKind::StructureMismatch,
                str("outputs of ", by_microbatch.size(), " microbatches, and rows of ", rows.size()));
  }
  for (size_t m = 0; m < by_microbatch.size(); m++) {
    for (size_t k = 0; k < by_microbatch[0].size(); k++) {
      const bool same_number = by_microbatch[m].size() == by_microbatch[0].size();
      if (same_number && by_microbatch[m][k].defined() == by_microbatch[0][k].defined()) continue;
      throw Error(ErrorKind::StructureMismatch,
                  same_number ? str("output ", k, " is a tensor in one of the microbatches 0 and ", m, " only")
                              : str("microbatch ", m, " has ", by_microbatch[m].size(), " outputs, microbatch 0 ",
                                    by_microbatch[0].size()),
                  "", "return the same outputs for every microbatch");
    }
  }
  Tensors merged;
  for (size_t k = 0; k < by_microbatch[0].size(); k++) {
    const OutputMerge merge = k < merges.size() ? merges[k] : OutputMerge{};
    Tensors parts;
    for (const auto& outputs : by_microbatch) {
      if (outputs[k].defined()) parts.push_back(outputs[k]);
    }
    if (parts.empty()) {
      merged.emplace_back();
      continue;
    }
    try {
      switch (merge.kind) {
        case OutputMerge::Kind::Concatenate:
          merged.push_back(parts[0].dim() == 0 ? at::stack(parts) : at::cat(parts, merge.dim));
          break;
        case OutputMerge::Kind::Sum:
        case OutputMerge::Kind::Mean: {
          int64_t total = 0;
          for (auto n : rows) total += n;
          at::Tensor sum;
          for (size_t m = 0; m < parts.size(); m++) {
            auto part = parts[m];
            if (merge.kind == OutputMerge::Kind::Mean) {
              part = part * (static_cast<double>(rows.at(m)) / static_cast<double>(total));
            }
            sum = sum.defined() ? sum + part : part;
          }
          merged.push_back(sum);
          break;
        }
        case OutputMerge::Kind::Custom: merged.push_back(merge.reduce(parts)); break;
      }
    } catch (const c10::Error& e) {
      throw Error(ErrorKind::TensorMismatch,
                  str("output ", k, " of the microbatches cannot be merged: ", first_line(e.what_without_backtrace())),
                  describe(parts), "give the output an OutputMerge that fits its shape");
    }
  }
  return merged;
}

at::Tensor mean_by_rows(const Tensors& losses, const std::vector<int64_t>& rows) {
  if (losses.size() != rows.size())
    throw Error(ErrorKind::StructureMismatch, str(losses.size(), " losses, and rows of ", rows.size()));
  double total = 0;
  for (size_t m = 0; m < losses.size(); m++) total += static_cast<double>(rows[m]);
  at::Tensor mean;
  for (size_t m = 0; m < losses.size(); m++) {
    if (!losses[m].defined()) return {};
    const auto part = losses[m] * (total > 0 ? static_cast<double>(rows[m]) / total : 0);
    mean = mean.defined() ? mean + part : part;
  }
  return mean;
}

at::Tensor sum_by_rows(const Tensors& losses, const std::vector<int64_t>& rows, int groups) {
  if (losses.size() != rows.size() || groups < 1 || losses.size() % static_cast<size_t>(groups) != 0) {
    throw Error(ErrorKind::StructureMismatch,
                str(losses.size(), " losses with ", rows.size(), " rows make no ", groups, " equal groups"));
  }
  const auto size = static_cast<std::ptrdiff_t>(losses.size()) / groups;
  Tensors sums;
  for (auto m = std::ptrdiff_t{0}; m < size * groups; m += size) {
    const std::vector<int64_t> own(rows.begin() + m, rows.begin() + m + size);
    const at::Tensor mean = mean_by_rows(Tensors(losses.begin() + m, losses.begin() + m + size), own);
    sums.push_back(mean.to(at::kDouble) * static_cast<double>(std::accumulate(own.begin(), own.end(), int64_t{0})));
  }
  return tree_sum(std::move(sums));
}

}  // namespace plumb
