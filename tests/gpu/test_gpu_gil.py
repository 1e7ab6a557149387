"""On a real GPU: the one call that is made with the GIL waits for nobody who wants it."""

import ctypes
import threading
import time

from real_gpu import Gpu, done

from arenapy import Pool, cuda

MIB = 1 << 20
SECONDS = 0.3


class Napping:
    """A C function that needs the GIL, over and over, for a while."""

    def __init__(self):
        self.began, self.ended = threading.Event(), threading.Event()
        self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.nap)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def nap(self, _):
        self.began.set()
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            time.sleep(0.001)  # lets go of the GIL and wants it back
        self.ended.set()


def allocate_while(napping, streams):
    """How often blocks for streams were had meanwhile."""
    pool = Pool(64 * MIB, cuda.Device())
    for stream in streams:
        pool.alloc(MIB, stream=stream).release(stream)
    assert napping.began.wait(10)
    n = 0
    while not napping.ended.is_set():
        for stream in streams:
            pool.alloc(MIB, stream=stream)
        n += 1
    return n


def test_a_host_function_that_needs_the_gil(gpu):
    """It runs on a thread of the driver; the stream that waits for it is asked all the time."""
    stream, other = cuda.Stream(), cuda.Stream()
    napping = Napping()
    done(gpu.driver.cuLaunchHostFunc(stream.handle, gpu.driver.CUhostFn(napping.address), 0))
    assert allocate_while(napping, [stream, other]) > 100
    gpu.synchronize()


def test_a_destructor_of_a_graphs_object_that_needs_the_gil(gpu):
    """It runs while a thread destroys a graph."""
    cu = gpu.driver
    napping = Napping()
    graph = done(cu.cuGraphCreate(0))
    flags = cu.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    thing = done(cu.cuUserObjectCreate(0, cu.CUhostFn(napping.address), 1, flags))
    done(cu.cuGraphRetainUserObject(graph, thing, 1, 1))

    def destroy():
        with Gpu():
            done(cu.cuGraphDestroy(graph))

    thread = threading.Thread(target=destroy)
    thread.start()
    assert allocate_while(napping, [cuda.Stream()]) > 100
    thread.join()


def test_a_thread_that_synchronizes(gpu):
    """The whole context waits for a kernel, and the driver's locks are whose they are then."""
    stream = cuda.Stream()
    napping = Napping()

    def synchronize():
        done(gpu.driver.cuCtxPushCurrent(gpu.context))  # a Gpu() would load kernels meanwhile
        napping.began.set()
        try:
            gpu.synchronize()
        finally:
            napping.ended.set()  # or the other thread would go on for ever
        done(gpu.driver.cuCtxPopCurrent())

    gpu.write_slowly(stream, 0, 0, 0, 300_000, 1)

    thread = threading.Thread(target=synchronize)
    thread.start()
    assert allocate_while(napping, [stream]) > 100
    thread.join()
