"""Streams of a GPU for a `StreamMachine`: work is done by kernels that take their time.

Who comes before whom is not known here (`ordered` says yes): what the machine finds are bytes that
are not what was written. Kernels begin late, for whoever has the memory too early to be seen.
"""

from helpers import peek, poke
from real_gpu import done, handle_of

from arenapy.testing.timeline import HOST

SLOW = 100  # microseconds that a kernel waits before it writes, or reads
WORD = 4


class RealStreams:
    """`streams`: what the allocator is given."""

    def __init__(self, gpu, streams):
        self.gpu, self.streams = gpu, tuple(streams)
        self.handles = [stream_handle(one) for one in self.streams]
        self.events = []
        self.found = []

    def write(self, stream, known, serial):
        if stream == HOST:
            poke(known.start, known.nbytes, known.fill)
            return None
        words = known.nbytes // WORD * WORD
        self.gpu.write_slowly(self.handles[stream], known.start, words, word(known.fill), SLOW)
        return self.record(stream)

    def check(self, stream, known, serial):
        words = known.nbytes // WORD * WORD
        if stream == HOST:
            if peek(known.start, words) != bytes([known.fill]) * words:
                self.found.append(f"the host reads block {serial} otherwise than it was written")
            return None
        self.gpu.wait(self.handles[stream], SLOW)
        self.gpu.count_wrong(self.handles[stream], known.start, words, word(known.fill))
        return self.record(stream)

    def record(self, stream):
        event = done(self.gpu.driver.cuEventCreate(2))
        self.events.append(event)
        done(self.gpu.driver.cuEventRecord(event, self.handles[stream]))
        return event

    def wait(self, stream, work):
        if work is None:
            return
        if stream == HOST:
            done(self.gpu.driver.cuEventSynchronize(work))
        else:
            done(self.gpu.driver.cuStreamWaitEvent(self.handles[stream], work, 0))

    def ordered(self, before, after):
        return True

    def progress(self, which):
        """One stream's work, now and then; else the GPU goes on by itself."""
        if which == 0:
            self.finish(0)

    def finish(self, stream):
        if stream != HOST:
            done(self.gpu.driver.cuStreamSynchronize(self.handles[stream]))

    def finish_all(self):
        wrong = self.gpu.how_many_wrong()
        if wrong:
            self.gpu.forget_wrong()
            self.found.append(f"{wrong} words are read otherwise than they were written")

    def wrong(self):
        return self.found

    def close(self):
        self.finish_all()
        while self.events:
            done(self.gpu.driver.cuEventDestroy(self.events.pop()))


def stream_handle(stream):
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    return int(getattr(stream, "ptr", None) or handle_of(stream))


def word(byte):
    return byte * 0x01010101
