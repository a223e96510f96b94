#include "plumb/pipeline/launch/environment.h"

#include <charconv>
#include <cstdlib>

#include "plumb/core/error.h"
#include "plumb/core/str.h"

namespace plumb {
namespace {

// `otherwise`: where it is not set.
int number(const Variables& read, const std::string& name, int least, int most, std::optional<int> otherwise = {}) {
  const auto text = read(name);
  if (!text && otherwise) return *otherwise;
  const std::string remedy = "set it as the launcher does, for every rank, or unset the launcher's variables";
  if (!text) throw Error(ErrorKind::InvalidArgument, "environment variable " + name + " is not set", "", remedy);
  int value = 0;
  auto [end, failed] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (failed != std::errc() || end != text->data() + text->size() || value < least || value > most) {
    throw Error(ErrorKind::InvalidArgument,
                str("environment variable ", name, " is '", *text, "', not a whole number from ", least, " to ", most),
                "", remedy);
  }
  return value;
}

constexpr int kMostRanks = 1 << 24;

// A port every rank of a job derives alike: FNV-1a of the job's id, in the range that IANA leaves to private use.
int port_of_job(const std::string& id) {
  std::uint32_t hash = 2166136261u;
  for (unsigned char c : id) hash = (hash ^ c) * 16777619u;
  return 49152 + static_cast<int>(hash % (65000 - 49152));
}

void read_ranks(const Variables& read, RankEnvironment& env, const char* rank, const char* size, const char* local) {
  env.world_size = number(read, size, 1, kMostRanks);
  env.rank = number(read, rank, 0, env.world_size - 1);
  env.local_rank = number(read, local, 0, kMostRanks, 0);
}

}  // namespace

std::optional<std::string> process_variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

bool started_by_plumb() { return process_variable("PLUMB_STORE_SOCKET") || process_variable("PLUMB_PROCESS"); }

bool launched_again() {
  for (const char* name : {"TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"}) {
    if (process_variable(name).value_or("0") != "0") return true;
  }
  return false;
}

std::string first_slurm_host(const std::string& list) {
  const auto open = list.find('[');
  const auto comma = list.find(',');
  if (open == std::string::npos || comma < open) return list.substr(0, comma);
  const auto end = list.find_first_of("-,]", open);
  if (end == std::string::npos) {
    throw Error(ErrorKind::InvalidArgument, "the SLURM host list '" + list + "' has no closing bracket");
  }
  const auto close = list.find(']', open);
  const auto tail_end = close == std::string::npos ? close : list.find(',', close);
  std::string tail = close == std::string::npos ? "" : list.substr(close + 1, tail_end - close - 1);
  return list.substr(0, open) + list.substr(open + 1, end - open - 1) + tail;
}

std::optional<RankEnvironment> discover_ranks(const Variables& read) {
  RankEnvironment env;
  std::string job;  // names this job among others on the host
  bool one_host = false;
  if (read("RANK") || (read("WORLD_SIZE") && read("MASTER_ADDR"))) {
    env.launcher = "torchrun";
    read_ranks(read, env, "RANK", "WORLD_SIZE", "LOCAL_RANK");
    one_host = number(read, "LOCAL_WORLD_SIZE", 1, kMostRanks, -1) == env.world_size || env.world_size == 1;
    if (read("PLUMB_PROCESS")) env.launcher = "plumb";
    if (read("PLUMB_STORE_SOCKET")) {
      env.launcher = "plumb";
      if (env.rank == 0) env.listening_socket = number(read, "PLUMB_STORE_SOCKET", 0, 1 << 20);
    }
    job = read("TORCHELASTIC_RUN_ID").value_or("");
    env.starts_again = env.launcher == "torchrun" && !job.empty();
    env.host = number(read, "GROUP_RANK", 0, kMostRanks, 0);
    if (read("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True") {
      env.launcher_serves_store = true;
      env.store_prefix = "plumb/attempt" + read("TORCHELASTIC_RESTART_COUNT").value_or("0");
    }
  } else if (read("OMPI_COMM_WORLD_RANK")) {
    env.launcher = "Open MPI";
    read_ranks(read, env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK");
    one_host = number(read, "OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks, -1) == env.world_size;
    job = read("PMIX_NAMESPACE").value_or(read("OMPI_MCA_ess_base_jobid").value_or(""));
  } else if (read("PMI_RANK")) {
    env.launcher = "MPICH";
    read_ranks(read, env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID");
    one_host = number(read, "MPI_LOCALNRANKS", 1, kMostRanks, -1) == env.world_size;
    job = read("PMI_JOBID").value_or(read("HYDRA_JOBID").value_or(""));
  } else if (read("SLURM_PROCID") && read("SLURM_NTASKS")) {
    env.launcher = "SLURM";
    read_ranks(read, env, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID");
    one_host = number(read, "SLURM_NNODES", 1, kMostRanks, -1) == 1;
    job = read("SLURM_JOB_ID").value_or("") + "." + read("SLURM_STEP_ID").value_or("");
    for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
      if (one_host || !read(name)) continue;
      env.master_address = first_slurm_host(*read(name));
      one_host = true;  // known well enough
      break;
    }
  } else {
    return std::nullopt;
  }
  if (auto address = read("MASTER_ADDR")) {
    env.master_address = *address;
  } else if (!one_host && env.world_size > 1) {
    throw Error(ErrorKind::InvalidArgument,
                str(env.launcher, " started ", env.world_size,
                    " ranks on more than one host and MASTER_ADDR does not say which host rank 0 is on"),
                "", "set MASTER_ADDR to the host of rank 0 for all ranks");
  }
  env.master_port = number(read, "MASTER_PORT", 1, 65535, job.empty() ? 29500 : port_of_job(job));
  return env;
}

}  // namespace plumb
