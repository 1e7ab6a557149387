"""BlockBatch copies as one: checked before the first, waited for after the last.

What lives here: the list of pairs, and what is said about one of them. What does not: a copy
(copies).

A copy of a few KiB takes the driver less time than waiting for it does: a loop of `copy_from`
without a stream waits after each, `copy_batch` once.
"""
from arenapy.buffer.block cimport Block

from arenapy.cuda.copies cimport CudaMemory, Side, leader, side_of, wait_or_keep
from arenapy.cuda.stream_ref cimport StreamRef


def copy_batch(pairs, stream=None):
    """Copy many things, in their order, on one stream.

    Parameters
    ----------
    pairs : iterable of (target, source)
        Buffers, or what ``Buffer.copy_from`` takes besides: contiguous host buffers, and arrays
        with ``__cuda_array_interface__``. The two of a pair have the same number of bytes, and
        one of them is a Buffer of memory of arenapy.cuda.
    stream : stream, optional
        That does it; what is copied is held until it has, as by ``copy_from``. By default the
        stream of the first pair's memory, and all is done when this returns.

    Raises
    ------
    ValueError
        The sizes of a pair differ, one of it is closed, or neither is memory of arenapy.cuda.
    BufferError
        A target is read-only, or something is not contiguous.
    TypeError
        Something has no memory, or `pairs` are no pairs.
    CudaError
        The driver refused.

    Notes
    -----
    All pairs are checked before the first is copied, and an error names the pair by its index.
    Thread-safety: may be called from any thread; the sources may not be written to, nor the targets
    looked at, until it is done.

    Examples
    --------
    >>> cuda.copy_batch(zip(blocks, arrays))                 # doctest: +SKIP
    """
    cdef list found = [], sides = []
    cdef set joined = set()
    cdef CudaMemory memory = None
    cdef StreamRef s = None
    cdef Side target, source
    cdef Py_ssize_t i = 0
    for pair in pairs:
        try:
            found.append(checked_pair(pair, stream))
        except (BufferError, TypeError, ValueError) as error:
            kind = [one for one in (BufferError, TypeError, ValueError) if isinstance(error, one)]
            raise kind[0](f"pairs[{i}]: {error}") from error
        i += 1
    for target, source, memory in found:
        if s is None:
            s = memory.own_stream() if stream is None else <StreamRef>memory.named(stream)
        sides += [target, source]
        try:
            memory.transfer(target, source, s, stream is None, joined)
        except BaseException:
            if stream is None:               # nothing of it goes on once this has returned
                try:
                    wait_or_keep(s, sides)
                except Exception:
                    pass                     # the first reason counts
            raise
    if s is not None and stream is None:
        wait_or_keep(s, sides)


cdef tuple checked_pair(object pair, object stream):
    """Both sides, and the memory that leads; nothing is changed."""
    cdef Side target, source
    cdef CudaMemory memory
    try:
        to, origin = pair
    except (TypeError, ValueError):
        raise TypeError(f"{pair!r} is no pair; give (target, source)") from None
    memory = memory_of(to)
    if memory is None:
        memory = memory_of(origin)
    if memory is None:
        raise ValueError(
            "neither is a Buffer of memory of arenapy.cuda, whose streams could copy it; use "
            "Buffer.copy_from or NumPy"
        )
    memory = leader(memory, to, origin)
    target, source = side_of(to, True, memory, stream), side_of(origin, False, memory, stream)
    if target.nbytes != source.nbytes:
        raise ValueError(
            f"the target has {target.nbytes} bytes and the source has {source.nbytes}; slice the "
            "larger one"
        )
    return target, source, memory


cdef CudaMemory memory_of(object thing):
    if isinstance(thing, Block) and (<Block>thing).owner is not None:
        if isinstance((<Block>thing).owner.hooks, CudaMemory):
            return <CudaMemory>(<Block>thing).owner.hooks
    return None
