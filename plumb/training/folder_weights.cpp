#include "plumb/training/folder_weights.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>

#include "plumb/checkpoint/pretrained.h"
#include "plumb/pipeline/transport/broadcast.h"
#include "plumb/training/usage.h"

namespace plumb {

bool has_values(const State& state) {
  return std::ranges::none_of(state, [](const Attr& a) { return a.tensor.defined() && a.tensor.is_meta(); });
}

namespace {

// Returns the folder that a saved one's tokenizer is copied from.
std::string source_of(const TrainOptions& o, const Pretrained& known) {
  return o.weights.empty() ? known.folder : o.weights;
}

// Returns the stages, and the whole for what none of them uses.
StateParts parts_of(const TrainJob& job) {
  StateParts parts;
  for (int s = 0; s < job.pipe->num_stages(); ++s) parts.push_back(&job.pipe->stage(s)->state());
  parts.push_back(&job.module().state());
  return parts;
}

}  // namespace

std::string weights_folder(const std::string& weights, const ExportedProgram& program) {
  const bool has = has_values(program.module->state());
  if (!weights.empty() && program.pretrained.empty()) {
    throw UsageError("--weights " + weights + ": the program was not imported from a folder",
                     "plumb import FOLDER -o model.pt2, and that file");
  }
  if (!weights.empty() && has)
    throw UsageError("--weights " + weights + ": the program has its own weights", "leave --weights out");
  if (has || program.pretrained.empty()) return "";
  const Pretrained known = Pretrained::parse(program.pretrained);
  const std::string folder = weights.empty() ? known.folder : weights;
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) {
    throw UsageError(weights.empty() ? "--weights is missing: the program has no weights, and " + folder +
                                           ", which it was imported from, is not there"
                                     : "--weights " + folder + ": is not there",
                     "--weights FOLDER");
  }
  if (!std::filesystem::is_directory(folder, error))
    throw UsageError("--weights " + folder + ": is no folder", "--weights FOLDER");
  const TensorFolder opened = used_by(
      weights.empty() ? "--weights is missing: the program has no weights" : "--weights",
      [&] { return TensorFolder(folder); }, "--weights FOLDER");
  refuse_unit_scaled(opened);
  for (const auto& [name, stored] : known.names) {
    if (!opened.contains(stored))
      throw UsageError("--weights " + folder + ": has no tensor '" + stored + "'", "the folder that was imported");
  }
  return folder;
}

void load_folder_weights(const std::string& weights, const ExportedProgram& program) {
  const std::string folder = weights_folder(weights, program);
  if (!folder.empty()) load_weights(*program.module, Pretrained::parse(program.pretrained), TensorFolder(folder));
}

void check_folders(const TrainOptions& o, const TrainJob& job) {
  if (!o.save_hf.empty() && job.program.pretrained.empty()) {
    throw UsageError("--save-hf " + o.save_hf + ": the program was not imported from a folder",
                     "plumb import FOLDER -o model.pt2, and train that");
  }
  weights_folder(o.weights, job.program);
  if (o.save_hf.empty()) return;
  check_new_folder(o.save_hf);
  check_files_to_copy(source_of(o, Pretrained::parse(job.program.pretrained)));
}

void check_weights_to_save(const TrainOptions& o, const TrainJob& job) {
  if (o.save_hf.empty()) return;
  used_by("--save-hf " + o.save_hf,
          [&] { check_weights_to_write(parts_of(job), Pretrained::parse(job.program.pretrained)); });
}

void load_folder_weights(const TrainOptions& o, const TrainJob& job, int rank) {
  if (job.program.pretrained.empty()) return;
  const Pretrained known = Pretrained::parse(job.program.pretrained);
  std::unique_ptr<TensorFolder> folder;
  for (const int s : job.schedule.placement.stages_of(rank)) {
    GraphModule& stage = *job.pipe->stage(s);
    if (has_values(stage.state())) continue;
    if (!folder) folder = std::make_unique<TensorFolder>(source_of(o, known));
    load_weights(stage, known, *folder);
  }
}

void make_room_for_weights(const TrainJob& job) {
  for (int s = 0; s < job.pipe->num_stages(); ++s) {
    if (!has_values(job.pipe->stage(s)->state())) job.pipe->move_stage(s, at::kCPU);
  }
}

void save_folder_weights(const TrainOptions& o, const TrainJob& job, const ProcessGroup& group) {
  const Pretrained known = Pretrained::parse(job.program.pretrained);
  const StateParts parts = parts_of(job);
  const std::string folder = source_of(o, known);
  std::exception_ptr problem;
  int64_t failed = -1;  // a rank that could not write, or -1
  const auto attempt = [&](const std::function<void()>& write) {
    try {
      write();
    } catch (const std::exception&) {
      problem = std::current_exception();
    }
    failed = largest_of_all(group, problem ? group.rank() : -1);
  };
  attempt([&] {
    for (const int s : job.schedule.placement.stages_of(group.rank()))
      write_weights(o.save_hf, parts, static_cast<size_t>(s), known, folder);
    if (group.rank() == 0) write_weights(o.save_hf, parts, parts.size() - 1, known, folder);
  });
  if (failed < 0) {
    attempt([&] {
      if (group.rank() == 0) finish_weights_folder(o.save_hf, parts, known, folder);
    });
  }
  if (problem) std::rethrow_exception(problem);
  if (failed >= 0) {
    throw Error(ErrorKind::CannotWrite, c10::str("--save-hf ", o.save_hf, ": rank ", failed, " cannot write its part"),
                "", "look at what that rank printed");
  }
}

}  // namespace plumb
