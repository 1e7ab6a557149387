"""Round trips of arrays between two processes: handles, beside SharedMemory and pickling.

One process makes an array and writes it, the other gets it, reads a number of every page, drops it,
and answers. Ways and sizes take turns, so a slow phase of the machine hits all of them.

What this does not show: several receivers at once, and what killed processes leave behind (a
segment of SharedMemory has a name, and stays).
"""

import argparse
import multiprocessing
import socket
import statistics
import sys
import time
from multiprocessing import connection, shared_memory

import numpy as np

import arenapy

SIZES = (4 << 10, 64 << 10, 1 << 20, 64 << 20)
SECONDS = 0.02  # of one way in one round, at least one round trip
SEND, PIPE, KEPT, NEW, PICKLE = WAYS = (
    "arenapy.send",
    "Pipe, array of Shared",
    "SharedMemory, kept",
    "SharedMemory, new",
    "Pipe, pickled",
)


def answer(sock, pipe):
    """Receive each way until there is no more."""
    sock = connection.Connection(sock.detach())
    while (way := pipe.recv()) is not None:
        if way == SEND:
            array = arenapy.receive(sock)
        elif way in (KEPT, NEW):
            name, nbytes = pipe.recv()
            segment = shared_memory.SharedMemory(name)
            array = np.frombuffer(segment.buf, "u1", nbytes)
        else:
            array = pipe.recv()
        found = int(array[::4096].sum())
        del array
        if way in (KEPT, NEW):
            segment.close()
        pipe.send(found)


class Sender:
    """Messages of one size."""

    def __init__(self, nbytes, sock, pipe):
        self.nbytes, self.sock, self.pipe = nbytes, sock, pipe
        self.pool = arenapy.Pool(source=arenapy.Shared())
        self.kept = self.segment()

    def segment(self):
        return shared_memory.SharedMemory(create=True, size=self.nbytes)

    def array(self, way, segment):
        if way in (SEND, PIPE):
            array = self.pool.empty(self.nbytes, "u1")
        elif segment:
            array = np.frombuffer(segment.buf, "u1", self.nbytes)
        else:
            array = np.empty(self.nbytes, "u1")
        array[:] = 1
        return array

    def __call__(self, way):
        """One round trip."""
        segment = self.kept if way == KEPT else self.segment() if way == NEW else None
        array = self.array(way, segment)
        self.pipe.send(way)
        if way == SEND:
            arenapy.send(self.sock, array)
        elif segment:
            self.pipe.send((segment.name, self.nbytes))
        else:
            self.pipe.send(array)
        assert self.pipe.recv() == self.nbytes >> 12
        del array
        if way == NEW:
            segment.close()
            segment.unlink()

    def close(self):
        """Leave no segment behind."""
        self.kept.close()
        self.kept.unlink()


def timed(sender, way):
    """Seconds of a round trip."""
    done, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < SECONDS or not done:
        sender(way)
        done += 1
    return passed / done


def main(argv):
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(argv).rounds
    context = multiprocessing.get_context("spawn")
    sock, theirs = socket.socketpair()
    pipe, other = context.Pipe()
    process = context.Process(target=answer, args=(theirs, other), daemon=True)
    process.start()
    theirs.close()
    other.close()
    print(f"{'bytes':>10}  {'way':22} {'us a round trip':>16} {'as a multiple of send':>22}")
    for nbytes in SIZES:
        sender = Sender(nbytes, sock, pipe)
        for way in WAYS:
            sender(way)
        times = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                times[way].append(timed(sender, way))
        for way in WAYS:
            pairs = zip(times[way], times[SEND], strict=True)
            ratio = statistics.median(mine / ours for mine, ours in pairs)
            micros = statistics.median(times[way]) * 1e6
            print(f"{nbytes:10}  {way:22} {micros:16.1f} {ratio:22.2f}")
        sender.close()
    pipe.send(None)
    process.join()
    sock.close()


if __name__ == "__main__":
    main(sys.argv[1:])
