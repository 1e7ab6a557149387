"""Streams of the simulated driver for a `StreamMachine`: arenapy.cuda attacked without a GPU."""

import ctypes

from cuda_machine import NON_BLOCKING, Wrapped
from helpers import peek, poke
from simulated_gpu import behind

from arenapy.testing.ranges import windows
from arenapy.testing.timeline import HOST


class DriverStreams:
    """What is queued runs when a machine says so; see `arenapy.testing.Streams`."""

    def __init__(self, driver, count=3):
        self.driver = driver
        self.handles = [
            driver.got("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING) for _ in range(count)
        ]
        self.streams = tuple(Wrapped(handle) for handle in self.handles)
        self.found = []
        driver.errors.clear()  # of an example that failed

    def write(self, stream, known, serial):
        start, nbytes, fill = known.start, known.nbytes, known.fill

        def run():
            for offset, length in windows(nbytes):
                poke(start + offset, length, fill)

        return self.launch(stream, start, nbytes, run)

    def check(self, stream, known, serial):
        start, nbytes, fill = known.start, known.nbytes, known.fill

        def run():
            seen = b"".join(peek(start + offset, length) for offset, length in windows(nbytes))
            if seen != bytes([fill]) * len(seen):
                self.found.append(f"block {serial} is read otherwise than it was written")

        return self.launch(stream, start, nbytes, run)

    def launch(self, stream, start, nbytes, run):
        """The operation; None: the host did it at once."""
        if stream == HOST:
            run()
            return None
        self.driver.launch(self.handles[stream], run, [(start, nbytes)])
        return self.driver.stream(self.handles[stream]).tail

    def wait(self, stream, work):
        if work is None:
            return
        with self.driver.exclusive():
            if stream == HOST:
                self.driver.wait([work])
            else:
                self.driver.submit(self.driver.stream(self.handles[stream]), "a wait", needs=[work])

    def ordered(self, before, after):
        if before is None or before.done:
            return True
        return after is not None and before in behind([after])

    def progress(self, which):
        self.driver.step(which)

    def finish(self, stream):
        if stream != HOST:
            self.driver.call("cuStreamSynchronize", self.handles[stream])

    def finish_all(self):
        self.driver.drain()

    def wrong(self):
        return self.found + self.driver.errors

    def close(self):
        self.driver.drain()
