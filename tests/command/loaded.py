"""loaded.py SOCKET: runs programs in forks of a Python that has loaded torch, for every request as loaded.cpp takes them."""

import os
import runpy
import signal
import socket
import sys

import torch  # noqa: F401


def texts(process: int, name: str) -> list[str]:
    with open(f"/proc/{process}/{name}", "rb") as file:
        return [os.fsdecode(text) for text in file.read().split(b"\0")[:-1]]


def run(connection: socket.socket) -> bool:
    """Returns whether this is the child, which is to be the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, files, *_ = socket.recv_fds(connection, 4, 4)
    child = os.fork()
    if child == 0:
        process = int.from_bytes(message, sys.byteorder)
        os.fchdir(files[3])
        for stream in range(3):
            os.dup2(files[stream], stream)
        os.closerange(3, max(files) + 1)
        sys.argv = texts(process, "cmdline")[2:]
        sys.path[0] = os.getcwd()
        os.environ.clear()
        os.environ.update(entry.split("=", 1) for entry in texts(process, "environ"))
        return True
    for file in [*files, 0, 1, 2]:
        os.close(file)
    connection.send(os.waitpid(child, 0)[1].to_bytes(4, sys.byteorder))
    os._exit(0)


def serve(listening: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for programs
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0 and run(connection):
            return
        connection.close()


serve(socket.socket(fileno=int(sys.argv[1])))
runpy.run_path(sys.argv[0], run_name="__main__")
