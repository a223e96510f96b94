// This process's rank and the number of ranks, as its launcher says in environment variables.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace plumb {

struct RankEnvironment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int host = 0;  // number of this rank's host among the hosts of the job, where the launcher tells it
  // The launcher ends all of its processes and starts them anew when one is lost (torchrun's agent).
  bool starts_again = false;
  std::string master_address = "127.0.0.1";
  int master_port = 29500;
  // The launcher itself serves the store (torchrun's agent): no rank opens it, every rank connects.
  bool launcher_serves_store = false;
  std::string store_prefix;  // keeps restarts of a job apart in a store that outlives them
  // A socket that listens for the store on rank 0, inherited from plumb's own launcher; -1: bind master_port.
  int listening_socket = -1;
  std::string launcher;  // "plumb", "torchrun", "Open MPI", "MPICH", "SLURM"
};

// The value of an environment variable, none if unset or empty.
using Variables = std::function<std::optional<std::string>(const std::string& name)>;
std::optional<std::string> process_variable(const std::string& name);

// Reads, in this order: RANK / WORLD_SIZE / LOCAL_RANK / MASTER_ADDR / MASTER_PORT (torchrun, which adds GROUP_RANK,
// and plumb's own launcher, which adds PLUMB_STORE_SOCKET or PLUMB_PROCESS); OMPI_COMM_WORLD_* (Open MPI); PMI_RANK /
// PMI_SIZE (MPICH, Intel MPI); SLURM_PROCID / SLURM_NTASKS (srun). MASTER_ADDR and MASTER_PORT are honored under all of
// them. Without them the address is loopback when all ranks are on this host, SLURM's first host otherwise, and the
// port is derived from the job's id. None when no launcher is seen. Throws Error(InvalidArgument) that names the
// variable for values that make no sense.
std::optional<RankEnvironment> discover_ranks(const Variables& variables = process_variable);

// Returns whether plumb's own launcher (launch.h) started this process.
bool started_by_plumb();

// Returns whether the launcher (torchrun, SLURM) has started the processes of this job before.
bool launched_again();

// Returns the first host of a SLURM list: "node[007-010,12],gpu3" gives "node007".
std::string first_slurm_host(const std::string& list);

}  // namespace plumb
