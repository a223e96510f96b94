"""Hosts for tests: network namespaces with addresses of their own, which nothing outside of them can reach.

A switch (a namespace with a bridge) joins them. It is where the rendezvous' store runs, as on a cluster's head node.
A host is lost when all of its processes are killed, switched off when its link goes first, cut off when its packets are
dropped. Needs root, iproute2 and iptables; a link is slow by tc netem, or by a relay of frames where the kernel has none.
"""

import collections
import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

NUMBERS = itertools.count()
STORE = "import signal, torch.distributed as d; s = d.TCPStore('0.0.0.0', 29400, is_master=True, wait_for_workers=False)"


def why_not():
    """Returns why this machine has no such hosts, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc", "iptables"):
        if not shutil.which(program):
            return f"there is no {program}: install iproute2 and iptables"
    made = subprocess.run(["unshare", "--net", "iptables", "-A", "INPUT", "-j", "DROP"], capture_output=True, text=True)
    return "" if made.returncode == 0 else "no network namespace can be made: " + made.stderr.strip()


def run(*words):
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Agent:
    """torchrun's agent on a host, and the events that its ranks print, each with its time."""

    def __init__(self, process, told):
        self.process, self.told, self.errors, self.pause = process, told, [], 0
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # the ranks go on only while somebody reads
        self.threads = [threading.Thread(target=self.read, args=(told,)), threading.Thread(target=self.read_errors)]
        for thread in self.threads:
            thread.start()

    def read(self, told):
        for line in self.process.stdout:
            time.sleep(self.pause)
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    told.append((time.monotonic(), event))

    def read_errors(self):
        self.errors.extend(self.process.stderr)

    def ranks(self):
        """Returns the processes of its ranks that live."""
        found = []
        with contextlib.suppress(OSError):
            for pid in open(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read().split():
                with contextlib.suppress(OSError):
                    found += [pid] if open(f"/proc/{pid}/cmdline").read() else []
        return found

    def wait(self, seconds):
        code = self.process.wait(timeout=seconds)
        for thread in self.threads:
            thread.join(timeout=60)
        return code


class Hosts:
    """`count` hosts, numbered from 0; a context manager that leaves no process and no namespace behind."""

    def __init__(self, count, slow=()):
        self.name = f"plumb{os.getpid()}x{next(NUMBERS)}"
        self.switch, self.count, self.relays, self.started = f"{self.name}s", count, [], []
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "name", "switch", "type", "bridge")
        run("ip", "-n", self.switch, "addr", "add", "10.77.0.254/24", "dev", "switch")
        for device in ("lo", "switch"):
            run("ip", "-n", self.switch, "link", "set", device, "up")
        for host in range(count):
            run("ip", "netns", "add", self.space(host))
            if host in slow and not has_netem():
                self.relays.append(relay(self.space(host), self.switch, f"h{host}"))
            else:
                peer = ["peer", "name", f"h{host}", "netns", self.switch]
                run("ip", "link", "add", "eth0", "netns", self.space(host), "type", "veth", *peer)
            run("ip", "-n", self.switch, "link", "set", f"h{host}", "master", "switch", "up")
            run("ip", "-n", self.space(host), "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", self.space(host), "link", "set", device, "up")

    def space(self, host):
        return f"{self.name}h{host}"

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.relays:
            process.kill()
            process.wait()
        for space in [self.switch, *map(self.space, range(self.count))]:
            self.kill_in(space)
            run("ip", "netns", "del", space)
        for process in self.started:
            process.wait()

    def start(self, space, *words, **settings):
        settings = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True} | settings
        process = subprocess.Popen(["ip", "netns", "exec", space, *words], text=True, **settings)
        self.started.append(process)
        return process

    def start_store(self):
        words = [sys.executable, "-c", STORE + "; print('ready', flush=True); signal.pause()"]
        assert self.start(self.switch, *words, stdout=subprocess.PIPE).stdout.readline() == "ready\n", "the store"

    def agent(self, host, told, words, nodes, ranks, cwd, patience):
        """Starts torchrun on a host: `words` are the ranks' command."""
        conf = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,is_host=0"
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks)]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.254:29400", "--rdzv-id", "job"]
        launch += ["--rdzv-conf", f"{conf},read_timeout={patience}", "--local-addr", self.address(host)]
        launch += ["--max-restarts", "100", "--no-python", *words]
        settings = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": cwd, "env": settings, "errors": "replace"}
        return Agent(self.start(self.space(host), *launch, **pipes), told)

    def pids(self, space):
        return [int(pid) for pid in run("ip", "netns", "pids", space).split()]

    def kill_in(self, space):
        while pids := self.pids(space):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def lose(self, host):
        """Kills all processes of a host; others see its connections close."""
        self.kill_in(self.space(host))

    def switch_off(self, host):
        """Loses a host of which others hear nothing any more."""
        run("ip", "-n", self.switch, "link", "set", f"h{host}", "down")
        self.lose(host)

    def switch_on(self, host):
        run("ip", "-n", self.switch, "link", "set", f"h{host}", "up")

    def cut_off(self, host):
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            run("ip", "netns", "exec", self.space(host), "iptables", "-A", chain, way, "eth0", "-j", "DROP")

    def join_again(self, host):
        run("ip", "netns", "exec", self.space(host), "iptables", "-F")

    def slow_down(self, host, milliseconds=200, mbit=10):
        """Delays what a host of `slow` sends, and limits what it sends and receives."""
        if not has_netem():
            return [process.send_signal(signal.SIGUSR1) for process in self.relays]
        rate = ["rate", f"{mbit}mbit"]
        run("tc", "-n", self.space(host), "qdisc", "add", "dev", "eth0", "root", "netem", "delay", f"{milliseconds}ms", *rate)
        return run("tc", "-n", self.switch, "qdisc", "add", "dev", f"h{host}", "root", "netem", *rate)


class Lost(Exception):
    """A training over hosts did not do what it should."""


class Training:
    """torchrun's agents on all hosts, each with `ranks` ranks that run `words`, in a folder that all of them see."""

    def __init__(self, hosts, words, folder, nodes, ranks, patience):
        self.hosts, self.rest, self.agents, self.told = hosts, (words, nodes, ranks, folder, patience), {}, []
        for host in range(hosts.count):
            self.begin(host)

    def begin(self, host):
        self.told.append([])
        self.agents[host] = self.hosts.agent(host, self.told[-1], *self.rest)

    def read_slowly(self, pause):
        """Makes every step take this many seconds or more: each prints a line. 0: as fast as it can again."""
        for agent in self.agents.values():
            agent.pause = pause

    def events(self):
        return sorted((event for told in self.told for event in list(told)), key=lambda event: event[0])

    def count_steps(self, since=0.0):
        return sum("loss" in event for when, event in self.events() if when > since)

    def resumed(self, since):
        """Returns when the run went on, and from what, if it has made a step then."""
        found = [(when, event) for when, event in self.events() if when > since and "resumed" in event]
        return found[0] if found and self.count_steps(found[-1][0]) else None

    def wait_for(self, done, seconds=400):  # beyond the 300 s that agents wait for one that was lost as they met
        """Returns what done() does once it is true; None if the training has ended before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := done():
                return found
            if any(agent.process.poll() == 0 for agent in self.agents.values()):
                return None
            time.sleep(0.02)
        raise Lost(f"nothing came of it in {seconds} s" + self.errors())

    def end(self, seconds=400):
        """Waits until all agents have ended. Nothing is left on their hosts: the keepers see their agents end.

        An agent whose ranks have ended while the others began again with a host that came waits for them, for 300 s.
        """
        codes = {host: agent.wait(seconds) for host, agent in self.agents.items()}
        for host, code in codes.items():
            # torchrun's agent that would join when the others have just ended finds the rendezvous closed.
            late = 0 in codes.values() and any("RendezvousClosedError" in line for line in self.agents[host].errors)
            if code != 0 and not late:
                raise Lost(f"host {host} ended with {code}" + self.errors())
        until = time.monotonic() + 60
        while left := [pid for host in range(self.hosts.count) for pid in self.hosts.pids(self.hosts.space(host))]:
            if time.monotonic() > until:
                raise Lost(f"left behind: {left}")
            time.sleep(0.05)

    def errors(self):
        return "".join(f"\nhost {host}:\n" + "".join(agent.errors[-40:]) for host, agent in self.agents.items())


def has_netem():
    words = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(words, capture_output=True).returncode == 0


def tap(space, name):
    """Returns a descriptor of a new network device in a namespace: reads are frames that it sends."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{space}") as other:
        assert libc.setns(other.fileno(), 0) == 0, ctypes.get_errno()
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))  # TUNSETIFF: IFF_TAP, IFF_NO_PI
        assert libc.setns(own.fileno(), 0) == 0, ctypes.get_errno()
    return device


def relay_frames(space, switch, port, milliseconds=200, mbit=10, most=256 * 1024):
    """Joins eth0 of a host with a port of the switch; once it got SIGUSR1, slowly. Drops what does not fit a queue."""
    host, other = tap(space, "eth0"), tap(switch, port)
    delays, slow = {host: milliseconds / 1000, other: 0}, []
    signal.signal(signal.SIGUSR1, lambda *_: slow.append(True))
    print("ready", flush=True)
    queues = {host: collections.deque(), other: collections.deque()}  # by where frames come from: when due, frame
    free = dict.fromkeys(queues, 0.0)  # when the link has sent all that came before
    while True:
        due = [queue[0][0] for queue in queues.values() if queue]
        wait = max(0, min(due) - time.monotonic()) if due else 1
        for device in select.select([host, other], [], [], wait)[0]:
            with contextlib.suppress(OSError):  # the link is down
                frame, now = os.read(device, 65536), time.monotonic()
                if sum(len(f) for t, f in queues[device] if t > now + delays[device]) < most:
                    free[device] = max(free[device], now) + (len(frame) * 8e-6 / mbit if slow else 0)
                    queues[device].append((free[device] + (delays[device] if slow else 0), frame))
        for device, queue in queues.items():
            while queue and queue[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):
                    os.write(other if device == host else host, queue.popleft()[1])


def relay(space, switch, port):
    process = subprocess.Popen([sys.executable, __file__, space, switch, port], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n", "the relay of a slow link"
    return process


if __name__ == "__main__":
    relay_frames(*sys.argv[1:])
