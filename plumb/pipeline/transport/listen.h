// Addresses of this host: sockets that listen at a given one, and the one that other hosts see.
#pragma once

#include <chrono>
#include <string>

namespace plumb {

// Listens at this address and no other; `port` 0 takes a free one and becomes it. Returns -1 if the address is a host's
// name other than localhost, which may mean another address to other hosts, or is none of this host's (a router's in
// front of it). Throws Error(Communication) if the port is taken.
int listen_at(const std::string& address, int& port);

// Waits until some host has this name: those of a cluster may come late. Throws Error(Communication) that begins with
// `what` if none has it after `timeout`.
void wait_for_host(const std::string& what, const std::string& name, std::chrono::milliseconds timeout);

// Returns this host's own address on the way to another host; no packet is sent. "" if there is no way, or the other
// has no address.
std::string address_towards(const std::string& other);

}  // namespace plumb
