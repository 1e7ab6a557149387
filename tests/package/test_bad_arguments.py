"""Every argument of the public calls x odd values: one is taken, or refused in words of ours.

A refusal is a TypeError, ValueError or BufferError that names the value or its type, or an error
of the machine. It is never what a conversion to C says (OverflowError), nor what the code behind
it ran into (AttributeError, IndexError, KeyError).
"""

import numpy as np
import pytest
from cuda_support import a_gpu

import arenapy
from arenapy import cuda, trace

MIB = 1 << 20
MIXED = (-(2**63) - 1, -1, 2**63 - 1, 2**63, 2**64, 10**400, 1.5, float("nan"), True, "", "a",
         "a\0b", b"x", [], (), (1, 2), {}, object(), int)  # fmt: skip
#: Of the machine, or of Python's way to open a file: they name what they are about.
OF_THE_MACHINE = (arenapy.OutOfMemory, OSError, cuda.CudaError, cuda.Unavailable)


def call(function, /, **right):
    return function, right


def sized(source, **options):
    return source(**options).region(MIB)


def host_calls(folder):
    """{call: (function, arguments that are right)}"""
    path = folder / "file"
    path.write_bytes(bytes(8192))
    pool, arena, slab = arenapy.Pool(8 * MIB), arenapy.Bump(8 * MIB), arenapy.Slab(4096, 16)
    block = pool.alloc(1024)
    region = arenapy.Host().region(8192)
    recorded = trace.synthetic(1, 100)
    saved = folder / "saved.trace"
    recorded.save(saved)
    calls = {
        "Bump": call(arenapy.Bump, nbytes=MIB, source=None, max_bytes=None),
        "Slab": call(arenapy.Slab, item_size=64, count=4, source=None, align=64, max_count=None),
        "Pool": call(
            arenapy.Pool,
            max_bytes=MIB,
            source=None,
            initial_bytes=0,
            trim_after=None,
            on_oom=None,
            rounding="step",
            stream=None,
        ),
        "Host": call(
            lambda **k: sized(arenapy.Host, **k),
            huge_pages="auto",
            prefault=True,
            lock=False,
            numa_node=None,
            guard=False,
            fork=None,
            threads=None,
            grow=False,
        ),
        "Shared": call(lambda **k: sized(arenapy.Shared, **k), name="a", huge_pages=None),
        "File": call(lambda **k: arenapy.File(**k).region(), path=path, mode="r+"),
        "Existing": call(
            lambda **k: arenapy.Existing(**k).region(), obj=bytearray(4096), readonly=False
        ),
        "File.region": call(lambda nbytes: arenapy.File(path, "r").region(nbytes), nbytes=4096),
        "Region.buffer": call(region.buffer, offset=0, nbytes=16),
        "size_class": call(arenapy.size_class, nbytes=1),
        "slab.alloc": call(slab.alloc, nbytes=64, align=64, stream=None),
        "arena.reset": call(arenapy.Bump(MIB).reset, mark=None, stream=None),
        "pool.prewarm": call(pool.prewarm, counts={64: 1}),
        "pool.prewarm, a size": call(lambda size: pool.prewarm({size: 1}), size=64),
        "pool.prewarm, a count": call(lambda count: pool.prewarm({64: count}), count=1),
        "slab.alloc_many": call(slab.alloc_many, n_or_sizes=2),
        "handles": call(arenapy.handles, array=np.arange(3)),
        "measure": call(lambda one: arenapy.measure(one).__enter__(), one=pool),
        "numpy_memory": call(
            lambda **k: arenapy.numpy_memory(**k).__enter__().__exit__(None, None, None),
            pool=pool,
            on_full="system",
            threads=False,
            libc=None,
        ),
        "block.view": call(block.view, shape=(4,), dtype="f4"),
        "block.array": call(block.array, shape=(4,), dtype="f4"),
        "block.copy_from": call(block.copy_from, source=bytes(1024), stream=None),
        "block.copy_to": call(block.copy_to, target=bytearray(1024), stream=None),
        "block.fill": call(block.fill, value=1, stream=None),
        "block.grow": call(lambda nbytes: pool.alloc(64).grow(nbytes), nbytes=128),
        "block[i]": call(lambda i: block[i], i=slice(0, 3)),
        "trace.load": call(trace.load, path=str(saved)),
        "Trace": call(trace.Trace, events=recorded.events, kind="a"),
        "Trace.save": call(recorded.save, path=str(saved)),
        "synthetic": call(trace.synthetic, seed=1, allocations=10, live_bytes=1 << 30),
        "Phase": call(
            lambda **k: trace.synthetic(1, 10, phases=[trace.Phase(**k)]), smallest=64, largest=100
        ),
        "Recorder": call(trace.Recorder, path="a", kind="a", sites=0),
        "record": call(
            lambda **k: trace.record(**k).__enter__().stop(),
            allocator=pool,
            path=str(folder / "recorded.trace"),
            sites=0,
        ),
    }
    for name, one in (("pool", pool), ("arena", arena), ("slab", slab)):
        calls |= {
            f"{name}.empty": call(one.empty, shape=3, dtype="f4", order="C"),
            f"{name}.zeros": call(one.zeros, shape=3, dtype="f4", order="C"),
            f"{name}.copy": call(one.copy, array_like=[1, 2]),
            f"{name}.struct_of_arrays": call(one.struct_of_arrays, fields={"x": "f4"}, n=3),
            f"{name}.alloc_many, a size": call(lambda n, a=one: a.alloc_many([1, n]), n=3),
        }
    for name, one in (("pool", pool), ("arena", arena)):
        calls |= {
            f"{name}.alloc": call(one.alloc, nbytes=64, align=64, stream=None),
            f"{name}.alloc_many": call(one.alloc_many, sizes=[1, 2]),
            f"{name}.grow": call(lambda nbytes, a=one: a.grow(a.alloc(64), nbytes), nbytes=128),
            f"{name}.grow, a buffer": call(lambda b, a=one: a.grow(b, 10), b=one.alloc(10)),
            f"{name}.trim": call(one.trim, keep_bytes=0),
        }
    return calls


def cuda_calls():
    pool, managed = arenapy.Pool(8 * MIB, cuda.Device()), arenapy.Pool(8 * MIB, cuda.Managed())
    block, page, stream = pool.alloc(4096), managed.alloc(8192), cuda.Stream()
    arena, slab = cuda.KernelArena(MIB), cuda.KernelSlab(64, 64)
    pools = cuda.Devices(max_bytes=8 * MIB)
    return {
        "Pool(stream)": call(arenapy.Pool, max_bytes=MIB, source=cuda.Device(), stream=stream),
        "alloc": call(pool.alloc, nbytes=64, align=64, stream=stream),
        "empty": call(pool.empty, shape=3, dtype="f4", order="C"),
        "copy": call(pool.copy, array_like=[1, 2]),
        "copy_from": call(block.copy_from, source=bytes(4096), stream=stream),
        "copy_to": call(block.copy_to, target=bytearray(4096), stream=stream),
        "fill": call(block.fill, value=1, stream=stream),
        "record_stream": call(block.record_stream, stream=stream),
        "Stream": call(cuda.Stream, device_id=0),
        "advise": call(cuda.advise, buffer=page, advice="read_mostly", device_id=0),
        "prefetch": call(cuda.prefetch, buffer=page, device_id=0, stream=stream),
        "asbuffer": call(cuda.asbuffer, obj=block, stream=stream),
        "from_dlpack": call(cuda.from_dlpack, obj=block, stream=stream),
        "copy_batch": call(cuda.copy_batch, pairs=[(block, bytes(4096))], stream=stream),
        "copy_batch, a pair": call(lambda pair: cuda.copy_batch([pair]), pair=(block, bytes(4096))),
        "copy_batch, a side": call(lambda side: cuda.copy_batch([(block, side)]), side=bytes(4096)),
        "memory_info": call(cuda.memory_info, device_id=0),
        "device_heap_limit": call(cuda.device_heap_limit, nbytes=MIB, device_id=0),
        "Devices": call(cuda.Devices, devices=[0], max_bytes=MIB),
        "devices.alloc": call(pools.alloc, nbytes=64, align=64, device=0, stream=None),
        "chunks": call(
            lambda **k: list(cuda.chunks(**k)),
            source=np.arange(1000.0),
            chunk_bytes=4096,
            dtype="f8",
            depth=2,
            device_id=0,
        ),
        "Device": call(lambda **k: sized(cuda.Device, **k), ordinal=0, grow=False),
        "DriverPool": call(lambda **k: sized(cuda.DriverPool, **k), ordinal=0, release_threshold=0),
        "Managed": call(lambda **k: sized(cuda.Managed, **k), ordinal=0, oversubscribe=False),
        "Pinned": call(
            lambda **k: sized(cuda.Pinned, **k),
            huge_pages=None,
            threads=None,
            portable=True,
            mapped=True,
            max_ram_fraction=0.25,
        ),
        "KernelArena": call(cuda.KernelArena, nbytes=MIB, source=None),
        "KernelSlab": call(cuda.KernelSlab, nbytes=64, count=64, source=None),
        "KernelArena.buffer": call(
            arena.buffer, address=arena.address + 256, nbytes=16, stream=stream
        ),
        "KernelArena.used": call(arena.used, stream=stream),
        "KernelSlab.in_use": call(slab.in_use, stream=stream),
        "KernelSlab.reset": call(slab.reset, stream=stream),
    }


def wrong(error, value, argument):
    """Why this is not how a value is refused, or None."""
    if isinstance(error, OF_THE_MACHINE):
        return None
    if not isinstance(error, (TypeError, ValueError, BufferError)):
        return f"{type(error).__name__}: {error}"
    simple = type(value) in (int, float) or value == "a"
    named = str(value) in str(error) or type(value).__name__ in str(error)
    if simple and not named and argument != "array_like":  # whose items NumPy reads
        return f"the message names neither the value nor its type: {error}"
    return None


def swept(calls):
    """What went wrong, a line each."""
    found = []
    for name, (function, right) in calls.items():
        function(**{k: np.str_(v) if isinstance(v, str) else v for k, v in right.items()})
        for argument in right:
            of_a_device = argument in ("ordinal", "device_id", "device")
            for value in (*MIXED, 2**31) if of_a_device else MIXED:
                try:
                    function(**{**right, argument: value})
                except Exception as error:
                    why = wrong(error, value, argument)
                    if why:
                        found.append(f"{name}({argument}={value!r:.30}) {why:.200}")
    return found


@pytest.mark.filterwarnings("ignore")
def test_host_calls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for files whose names are odd values
    found = swept(host_calls(tmp_path))
    assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore")
def test_cuda_calls():
    with a_gpu(leaks=True) as driver:
        found = swept(cuda_calls())
        driver.errors.clear()  # a number that is no stream is asked for
    assert not found, "\n".join(found)
