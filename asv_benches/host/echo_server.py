"""An asyncio echo server of 1,000 connections: a Slab beside bytearrays and asyncio's own bytes.

The server is a process, the client another one, with a request on each connection at a time. Ways
take turns. The kernel says of the server, after a warm-up, its faults and its processor time, and
its most memory.

What this does not show: networks. Client and server share the processors of this machine, and most
of the server's time is asyncio's and the kernel's.
"""

import argparse
import asyncio
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import arenapy

CONNECTIONS = 1_000
BUFFER = 64 << 10
MESSAGES = (1 << 10, 48 << 10)
TICKS = os.sysconf("SC_CLK_TCK")


# ---- servers ----------------------------------------------------------------------------------


class OfSlab(asyncio.BufferedProtocol):
    """Each message in an item of its own, which the transport keeps while it needs it."""

    slab = arenapy.Slab(BUFFER, 16, max_count=2 * CONNECTIONS)

    def connection_made(self, transport):
        """Take no item yet."""
        self.transport = transport

    def get_buffer(self, sizehint):
        """Take an item, since there is something to read."""
        self.item = self.slab.alloc()
        return self.item

    def buffer_updated(self, nbytes):
        """Send it back, and drop the item."""
        self.transport.write(memoryview(self.item)[:nbytes])
        self.item = None


class OfPool(OfSlab):
    """The same of a list of bytearrays.

    One that the transport may still have is not put back: from Python 3.12 on it keeps what it
    could not send, and before, it makes a copy of it.
    """

    free: list = []  # noqa: RUF012

    def get_buffer(self, sizehint):
        """Take a bytearray of the list, or a new one."""
        self.item = self.free.pop() if self.free else bytearray(BUFFER)
        return self.item

    def buffer_updated(self, nbytes):
        """Send it back, and put the bytearray back."""
        self.transport.write(memoryview(self.item)[:nbytes])
        if not self.transport.get_write_buffer_size():
            self.free.append(self.item)
        self.item = None


class OfConnection(OfSlab):
    """A bytearray of each connection, written to again when all was sent."""

    item = None

    def get_buffer(self, sizehint):
        """Take that of this connection, or a new one."""
        if self.item is None:
            self.item = bytearray(BUFFER)
        return self.item

    def buffer_updated(self, nbytes):
        """Send it back."""
        self.transport.write(memoryview(self.item)[:nbytes])
        if self.transport.get_write_buffer_size():
            self.item = None


class OfBytes(asyncio.Protocol):
    """A protocol that gets new bytes objects, as asyncio gives them by itself."""

    def connection_made(self, transport):
        """Keep it."""
        self.transport = transport

    def data_received(self, data):
        """Send it back."""
        self.transport.write(data)


WAYS = {
    "arenapy.Slab": OfSlab,
    "a list of bytearrays": OfPool,
    "a bytearray for each connection": OfConnection,
    "asyncio's bytes": OfBytes,
}


async def serve(way):
    """Serve until standard input ends; print the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(WAYS[way], "127.0.0.1", 0, backlog=CONNECTIONS)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    os._exit(0)


# ---- the client -------------------------------------------------------------------------------


def exchange(connections, poll, message, seconds):
    """Send messages and read their echoes for so long; the number of them, and the seconds."""
    inbox, count = bytearray(1 << 20), 0
    start = now = time.perf_counter()
    for one in connections.values():
        one.sendall(message)
    left = dict.fromkeys(connections, len(message))
    waiting = len(connections)
    while waiting:
        for number, _ in poll.poll():
            left[number] -= connections[number].recv_into(inbox)
            if left[number]:
                continue
            count += 1
            now = time.perf_counter()
            if now - start < seconds:
                connections[number].sendall(message)
                left[number] = len(message)
            else:
                waiting -= 1
    return count, now - start


def usage(process):
    """Of a process: minor faults, seconds of the processor."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]), (int(fields[11]) + int(fields[12])) / TICKS


def memory(process):
    """The most memory that it had, in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def one_round(way, nbytes, seconds, connections):
    """Figures of a new server."""
    with subprocess.Popen(
        [sys.executable, __file__, "--serve", way],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        address = ("127.0.0.1", int(server.stdout.readline()))
        made = [socket.create_connection(address) for _ in range(connections)]
        by_number = {one.fileno(): one for one in made}
        poll = select.epoll()
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        message = os.urandom(nbytes)
        exchange(by_number, poll, message, seconds / 4)
        before = usage(server)
        count, lasted = exchange(by_number, poll, message, seconds)
        faults, processor = (b - a for a, b in zip(before, usage(server), strict=True))
        figures = {
            "requests a second": count / lasted,
            "µs of the server's processor a request": 1e6 * processor / count,
            "faults in 1,000 requests": 1000 * faults / count,
            "MiB": memory(server),
        }
        for one in made:
            one.close()
        server.stdin.close()
    return figures


def main():
    """Measure, or serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--serve", metavar="WAY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
    for nbytes in MESSAGES:
        found = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way, every in found.items():
                every.append(one_round(way, nbytes, arguments.seconds, arguments.connections))
        print(f"{arguments.connections:,} connections, messages of {nbytes:,} bytes")
        for way, every in found.items():
            middle = (
                f"{statistics.median(one[name] for one in every):,.1f} {name}" for name in every[0]
            )
            print(f"  {way}: {', '.join(middle)}", flush=True)


if __name__ == "__main__":
    main()
