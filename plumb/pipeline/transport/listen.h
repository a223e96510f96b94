// Sockets that listen at a given address.
#pragma once

#include <string>

namespace plumb {

// Listens at this address and no other; `port` 0 takes a free one and becomes it. Returns -1 if the address is a host's
// name other than localhost, which may mean another address to other hosts, or is none of this host's (a router's in
// front of it). Throws Error(Communication) if the port is taken.
int listen_at(const std::string& address, int& port);

}  // namespace plumb
