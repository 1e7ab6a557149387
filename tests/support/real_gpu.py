"""A real GPU: kernels, launched by cuda-bindings alone, that show who wrote which memory when.

`write_slowly` waits on the device before it writes, so that whoever gets the memory too early has
time to be overwritten. `count_wrong` counts the words that are not what they should be.
"""

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
import threading

import numpy as np

from arenapy import cuda

# As many queues of the device as there can be, before it is used: streams that share one wait for
# one another, also for one that is held.
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
os.environ.setdefault(CONNECTIONS, "32")

PATIENCE = 60  # seconds that a stream is held at most
CYCLES = 1_800  # of a GPU's clock, about a microsecond

HEAD = ".version 7.0\n.target sm_70\n.address_size 64\n"

#: Each thread takes every so-manieth word, whose address is in %d8.
KERNEL = """
.visible .entry {name}(
    .param .u64 start, .param .u64 words, .param .u32 value, .param .u64 {last})
{{
    .reg .pred %p<3>;
    .reg .u32 %r<6>;
    .reg .u64 %d<10>;
    ld.param.u64 %d1, [start];
    ld.param.u64 %d2, [words];
    ld.param.u32 %r1, [value];
{first}    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    mov.u32 %r4, %nctaid.x;
    mul.lo.u32 %r3, %r3, %r4;
    cvt.u64.u32 %d6, %r2;
    cvt.u64.u32 %d7, %r3;
NEXT:
    setp.ge.u64 %p2, %d6, %d2;
    @%p2 bra DONE;
    shl.b64 %d8, %d6, 2;
    add.u64 %d8, %d1, %d8;
{each}    add.u64 %d6, %d6, %d7;
    bra NEXT;
DONE:
    ret;
}}
"""
WAIT = """\
    ld.param.u64 %d3, [cycles];
    mov.u64 %d4, %clock64;
WAIT:
    mov.u64 %d5, %clock64;
    sub.u64 %d5, %d5, %d4;
    setp.lt.u64 %p1, %d5, %d3;
    @%p1 bra WAIT;
"""
COUNT = """\
    ld.volatile.u32 %r5, [%d8];
    setp.ne.u32 %p1, %r5, %r1;
    @%p1 red.add.u32 [%d3], 1;
"""
ADD = """\
    ld.u32 %r5, [%d8];
    add.u32 %r5, %r5, %r1;
    st.u32 [%d8], %r5;
"""
KERNELS = "".join(
    [HEAD]
    + [
        KERNEL.format(name=name, last=last, first=first, each=each)
        for name, last, first, each in (
            ("write_slowly", "cycles", WAIT, "    st.u32 [%d8], %r1;\n"),
            ("count_wrong", "counter", "    ld.param.u64 %d3, [counter];\n", COUNT),
            ("add_to", "unused", "", ADD),
        )
    ]
).encode()


@functools.cache
def why_none():
    """Why there is no GPU to test on; None if there is one."""
    try:
        devices = cuda.devices()
    except cuda.Unavailable as error:
        return f"needs a GPU: {error}"
    return None if devices else "needs a GPU: the driver shows none"


def need_gpu(count=1):
    reason = why_none()
    if reason is None and len(cuda.devices()) < count:
        reason = f"needs {count} GPUs"
    if reason is not None:
        import pytest  # which benchmarks, that use the rest, may not have

        pytest.skip(reason)


def done(result):
    """The values of a call of cuda-bindings."""
    from cuda.bindings import driver

    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else values


class Gpu:
    """A device whose primary context is current while this is in use."""

    def __init__(self, ordinal=0):
        from cuda.bindings import driver

        self.driver = driver
        self.ordinal = ordinal

    def __enter__(self):
        cu = self.driver
        done(cu.cuInit(0))
        device = done(cu.cuDeviceGet(self.ordinal))
        self.context = done(cu.cuDevicePrimaryCtxRetain(device))
        done(cu.cuCtxPushCurrent(self.context))
        module = done(cu.cuModuleLoadData(KERNELS + b"\0"))
        for name in ("write_slowly", "count_wrong", "add_to"):
            setattr(self, f"_{name}", done(cu.cuModuleGetFunction(module, name.encode())))
        self.wrong = done(cu.cuMemAlloc(4))
        self.forget_wrong()
        # Of the host, which opens it without a stream: another stream may share a queue of the
        # device with the one that is held, and never come to it.
        self.gate = int(done(cu.cuMemHostAlloc(4, cu.CU_MEMHOSTALLOC_DEVICEMAP)))
        self.gate_on_device = done(cu.cuMemHostGetDevicePointer(self.gate, 0))
        self.held, self.impatient = 0, None
        self.open_until(0)
        return self

    def __exit__(self, *error):
        self.let_go()
        done(self.driver.cuCtxSynchronize())
        done(self.driver.cuMemFree(self.wrong))
        done(self.driver.cuMemFreeHost(self.gate))
        done(self.driver.cuCtxPopCurrent())

    def open_until(self, number):
        ctypes.c_uint32.from_address(self.gate).value = number

    def launch(self, function, stream, address, nbytes, value, last, blocks):
        values = (address, nbytes // 4, value % 2**32, last)
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        handle = handle_of(stream)
        done(self.driver.cuLaunchKernel(
            function, blocks, 1, 1, 256, 1, 1, 0, handle, (values, types), 0,
        ))  # fmt: skip

    def write_slowly(self, stream, address, nbytes, value, microseconds=0, blocks=8):
        cycles = microseconds * CYCLES
        self.launch(self._write_slowly, stream, address, nbytes, value, cycles, blocks)

    def wait(self, stream, microseconds):
        """Let the stream do nothing for a while."""
        self.write_slowly(stream, 0, 0, 0, microseconds, 1)

    def count_wrong(self, stream, address, nbytes, value, blocks=8):
        counter = int(self.wrong)
        self.launch(self._count_wrong, stream, address, nbytes, value, counter, blocks)

    def add_to(self, stream, address, nbytes, value, blocks=8):
        self.launch(self._add_to, stream, address, nbytes, value, 0, blocks)

    def hold(self, stream):
        """Keep a stream from what is queued on it from now on, until `let_go`.

        Which needs no luck, and no host of a certain speed; but nothing may wait for the stream.
        Should something do so all the same, it goes on after PATIENCE, and the test finds out.
        """
        self.held += 1
        until = self.driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        gate = self.gate_on_device
        done(self.driver.cuStreamWaitValue32(handle_of(stream), gate, self.held, until))
        self.stop_waiting()
        self.impatient = threading.Timer(PATIENCE, self.open_until, [self.held])
        self.impatient.daemon = True
        self.impatient.start()

    def let_go(self):
        self.stop_waiting()
        self.open_until(self.held)

    def stop_waiting(self):
        if self.impatient is not None:
            self.impatient.cancel()
            self.impatient.join()
            self.impatient = None

    def how_many_wrong(self):
        """Words that were found wrong by now, everywhere."""
        done(self.driver.cuCtxSynchronize())
        found = np.zeros(1, np.uint32)
        done(self.driver.cuMemcpyDtoH(found.ctypes.data, self.wrong, 4))
        return int(found[0])

    def forget_wrong(self):
        done(self.driver.cuMemsetD32(self.wrong, 0, 1))

    def stream(self, blocking=False):
        """A handle of the driver's; an int."""
        return int(done(self.driver.cuStreamCreate(0 if blocking else 1)))

    def synchronize(self, stream=None):
        if stream is None:
            done(self.driver.cuCtxSynchronize())
        else:
            done(self.driver.cuStreamSynchronize(handle_of(stream)))


@contextlib.contextmanager
def two_gpus():
    """Both, of which the first one is current."""
    need_gpu(2)
    with Gpu(1) as second, Gpu(0) as first:
        yield first, second


@contextlib.contextmanager
def current_in(gpu):
    done(gpu.driver.cuCtxPushCurrent(gpu.context))
    yield
    done(gpu.driver.cuCtxPopCurrent())


def output_of(code):
    """What a program of its own prints, whose allocator may be the whole program's."""
    few = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=240, check=False, env=few,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "arenapy:" not in ran.stderr, ran.stderr
    return ran.stdout.strip()


def judge(gpu, safe):
    """With the safety off there has to be corruption, or the test could not fail."""
    wrong = gpu.how_many_wrong()
    assert wrong == 0 if safe else wrong > 0


def handle_of(stream):
    return int(getattr(stream, "handle", stream))


def content(buffer, dtype=np.uint8):
    """What a Buffer holds, by a copy."""
    found = np.empty(buffer.nbytes // np.dtype(dtype).itemsize, dtype)
    buffer.copy_to(found)
    return found
