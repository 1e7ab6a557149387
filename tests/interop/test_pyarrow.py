"""pyarrow over Buffers, and Buffers over its memory: where nothing is copied, and where it is."""

import gc
import io
import multiprocessing as mp

import numpy as np
import pytest

import arenapy
from arenapy import Bump, Existing, File, Pool, Shared

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table_of(n):
    texts = pa.array([None if i % 7 == 0 else str(i) for i in range(n)])
    return pa.table(
        {
            "number": np.arange(n),
            "text": texts,
            "category": texts.dictionary_encode(),
            "list": pa.array([[i, i + 1] for i in range(n)]),
        }
    )


def stream_of(table, options=None):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=300)
    return sink.getvalue()


def put(allocator, table, options=None):
    stream = stream_of(table, options)
    block = allocator.alloc(stream.size)
    memoryview(block)[:] = memoryview(stream).cast("B")
    return block


def buffers(table):
    return [b for column in table.columns for c in column.chunks for b in all_of(c) if b]


def all_of(array):
    found = list(array.buffers())
    return found + (all_of(array.dictionary) if pa.types.is_dictionary(array.type) else [])


def inside(table, block):
    end = block.address + block.nbytes
    places = [block.address <= b.address <= b.address + b.size <= end for b in buffers(table)]
    assert places
    return all(places)


@pytest.mark.parametrize("source", [arenapy.Host(), Shared()])
def test_a_buffer_is_an_arrow_buffer(source):
    pool = Pool(source=source)
    block = pool.alloc(5000)
    seen = pa.py_buffer(block)
    assert (seen.address, seen.size, seen.is_mutable) == (block.address, 5000, True)
    part = seen.slice(100, 200)
    del seen
    with pytest.raises(BufferError, match="live exports"):
        block.release()
    address = block.address
    del block
    gc.collect()
    assert pool.stats().active_allocations == 1
    others = [pool.alloc(5000) for _ in range(20)]
    assert address not in {one.address for one in others}
    assert part.size == 200
    del part, others
    gc.collect()
    assert pool.stats().active_allocations == 0
    pool.check()


def test_a_reset_leaves_arrows_bytes_alone():
    arena = Bump(1 << 16)
    with arena.scope():
        block = put(arena, pa.table({"n": range(100)}))
        table = pa.ipc.open_stream(block).read_all()
        del block
    arena.alloc(arena.stats().largest_free_extent, 1).fill(255)
    assert table["n"].to_pylist() == list(range(100))
    arena.check()


def test_an_array_is_an_arrow_array():
    pool = Pool()
    x = pool.copy(np.arange(1000.0))
    address = x.__array_interface__["data"][0]
    array = pa.array(x)
    assert array.buffers()[1].address == address
    del x
    gc.collect()
    back = array.to_numpy(zero_copy_only=True)
    assert back.__array_interface__["data"][0] == address and (back == np.arange(1000)).all()
    del array, back
    gc.collect()
    assert pool.stats().active_allocations == 0


def test_an_arrow_buffer_is_a_buffer():
    arrow = pa.py_buffer(b"0123456789" * 10)
    block = Existing(arrow, readonly=True).region(arrow.size).buffer()
    assert block.address == arrow.address and block.readonly
    del arrow
    gc.collect()
    assert bytes(block) == b"0123456789" * 10
    with pytest.raises(BufferError, match="read-only"):
        Existing(pa.py_buffer(b"0123456789"))


def test_an_arena_in_an_arrow_buffer():
    before = pa.total_allocated_bytes()
    arrow = pa.allocate_buffer(1 << 16)
    arena = Bump(arrow.size, Existing(arrow))
    x = arena.zeros(100)
    assert arrow.address <= x.__array_interface__["data"][0] < arrow.address + arrow.size
    del arrow, arena
    gc.collect()
    x[:] = 1
    assert pa.total_allocated_bytes() >= before + (1 << 16)
    del x
    gc.collect()
    assert pa.total_allocated_bytes() == before


@pytest.mark.parametrize("source", [arenapy.Host(), Shared()])
def test_a_table_lies_in_a_block(source):
    table = table_of(1000)
    pool = Pool(source=source)
    block = put(pool, table)
    before = pa.total_allocated_bytes()
    again = pa.ipc.open_stream(block).read_all()
    assert pa.total_allocated_bytes() == before
    assert again.equals(table) and inside(again, block)
    assert not any(b.is_mutable for b in buffers(again) if b.parent is None)
    del block
    gc.collect()
    assert again.equals(table) and pool.stats().active_allocations == 1


def test_a_compressed_stream_is_copied():
    table = table_of(1000)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    block = put(Pool(), table, options)
    before = pa.total_allocated_bytes()
    again = pa.ipc.open_stream(block).read_all()
    assert again.equals(table)
    assert pa.total_allocated_bytes() > before and not inside(again, block)


def test_a_stream_of_a_file(tmp_path):
    table = table_of(1000)
    path = tmp_path / "stream"
    path.write_bytes(stream_of(table))
    nbytes = path.stat().st_size
    read = Pool().alloc(nbytes)
    with path.open("rb") as file:
        assert file.readinto(read) == nbytes
    mapped = File(path).region(nbytes).buffer()
    for block in (read, mapped):
        again = pa.ipc.open_stream(block).read_all()
        assert again.equals(table) and inside(again, block)


def test_parquet_is_decoded_into_arrows_memory():
    table = table_of(5000)
    file = io.BytesIO()
    pq.write_table(table, file)
    block = Pool().alloc(file.tell())
    memoryview(block)[:] = file.getvalue()
    before = pa.total_allocated_bytes()
    again = pq.read_table(pa.BufferReader(block))
    assert again.equals(table)
    assert pa.total_allocated_bytes() >= before + table["number"].nbytes
    assert not inside(again, block)


def test_arrow_takes_no_memory_pool_from_python():
    """If this fails, Arrow has learnt to: then docs/arrow.md is to say how."""
    with pytest.raises(TypeError, match="Do not call MemoryPool's constructor"):
        pa.MemoryPool()
    with pytest.raises(TypeError, match="constructor"):
        type("Ours", (pa.MemoryPool,), {})()


def read_and_answer(pipe):
    block = pipe.recv()
    before = pa.total_allocated_bytes()
    table = pa.ipc.open_stream(block).read_all()
    allocated = pa.total_allocated_bytes() - before
    pipe.send((allocated, inside(table, block), table.equals(table_of(1000))))
    del block
    pipe.recv()
    pipe.send(table.equals(table_of(1000)))  # after the sender has dropped it


@pytest.mark.full
def test_another_process_maps_a_table():
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=read_and_answer, args=(theirs,), daemon=True)
    process.start()
    pool = Pool(source=Shared())
    block = put(pool, table_of(1000))
    nbytes = block.nbytes
    pipe.send(block)
    assert pipe.recv() == (0, True, True)
    del block
    gc.collect()
    assert pool.stats().pending_bytes >= nbytes
    others = [pool.alloc(nbytes) for _ in range(5)]
    for other in others:
        other.fill(255)
    pipe.send("go on")
    assert pipe.recv() is True
    process.join()
    pool.stats()
    assert pool.stats().pending_bytes == 0
    pool.check()
