"""Allocator: what Bump, Slab and Pool have in common.

What lives here: everything that can be said with `block`, the one thing that differs. Arrays
are such a thing: an array is a block, held from birth, with an ndarray over it.
"""
cimport cython
from libc.string cimport memset

from collections.abc import Mapping

import numpy as np

from arenapy.buffer cimport Buffer
from arenapy.mark cimport Mark
from arenapy.ndarray cimport Spec, parse, wrap
from arenapy.region cimport Region

cdef enum:
    NOGIL_BYTES = 1 << 18    # clearing this much and more runs without the GIL


@cython.auto_pickle(False)
cdef class Allocator:
    """The base of all allocators. Not to be made: use Bump."""

    def __cinit__(self, *args, **kwargs):
        if type(self) is Allocator:
            raise TypeError("Allocator is the base of allocators; make a Bump")

    cdef Buffer block(self, Py_ssize_t n, Py_ssize_t align, bint held):
        raise NotImplementedError(type(self).__name__)

    cdef Mark enter(self):
        raise NotImplementedError(type(self).__name__)

    cdef int leave(self, Mark mark, bint failed) except -1:
        raise NotImplementedError(type(self).__name__)

    def empty(self, shape, dtype="f8", order="C"):
        """An uninitialized ndarray in this allocator's memory, 64-byte aligned.

        While the array, or a view of it, is alive, its bytes are held.

        Parameters
        ----------
        shape : int or tuple of int
            Lengths.
        dtype : dtype-like
            Any NumPy dtype without Python objects.
        order : {"C", "F"}
            Memory order.

        Returns
        -------
        numpy.ndarray

        Raises
        ------
        ValueError
            For a negative or overflowing shape, or another order.
        TypeError
            For a dtype that holds Python objects.
        OutOfMemory
            If the allocator cannot serve it; nothing has changed then.
        """
        cdef Spec spec
        descr = parse(shape, dtype, order, &spec)
        return wrap(self.block(spec.nbytes, HOST_ALIGN, True), descr, &spec)

    def zeros(self, shape, dtype="f8", order="C"):
        """Like :meth:`empty`, but zero, on recycled memory too."""
        cdef Spec spec
        cdef Buffer b
        cdef char* ptr
        descr = parse(shape, dtype, order, &spec)
        b = self.block(spec.nbytes, HOST_ALIGN, True)
        ptr = b.ptr
        if spec.nbytes >= NOGIL_BYTES:
            with nogil:
                memset(ptr, 0, spec.nbytes)
        else:
            memset(ptr, 0, spec.nbytes)
        return wrap(b, descr, &spec)

    def copy(self, array_like):
        """A copy of an array (or anything ``numpy.asarray`` takes) in this allocator's memory.

        The memory order is kept if it is Fortran's, and is C's otherwise.
        """
        source = np.asarray(array_like)
        order = "F" if source.flags.f_contiguous and not source.flags.c_contiguous else "C"
        target = self.empty(source.shape, source.dtype, order)
        target[...] = source
        return target

    def struct_of_arrays(self, fields, n):
        """One array a field, in one block: the layout that loops over single fields want.

        Each array starts on a cache line of its own.

        Parameters
        ----------
        fields : mapping of str to dtype-like
            Names and types.
        n : int
            Length of every array.

        Returns
        -------
        dict of str to numpy.ndarray
            In the order of `fields`. The block is held while any of them is alive.
        """
        cdef Spec spec
        cdef size_t total = 0
        cdef Buffer b
        layout = []
        if not isinstance(fields, Mapping):
            raise TypeError(f"fields={fields!r} is not a mapping of names to dtypes")
        if not fields:
            raise ValueError("fields is empty: name at least one, like {'x': 'f4'}")
        for name, dtype in fields.items():
            descr = parse(n, dtype, "C", &spec)
            layout.append((name, descr, total))
            total += (<size_t>spec.nbytes + HOST_ALIGN - 1) & ~<size_t>(HOST_ALIGN - 1)
            if total > (<size_t>-1) >> 1:
                raise ValueError(f"n={n} records overflow: no address space holds them")
        # A byte more than needed where all is empty: NumPy takes no offset into nothing.
        b = self.block(<Py_ssize_t>max(total, 1), HOST_ALIGN, True)
        bytes_ = b.array()
        arrays = {}
        for name, descr, start in layout:
            arrays[name] = np.ndarray(n, descr, bytes_, start)
        return arrays


cdef Region make_region(object source, Py_ssize_t n):
    make = getattr(source, "region", None)
    if not callable(make) or isinstance(source, type):
        raise TypeError(
            f"source={source!r} has no region(nbytes) method; give a source, like arenapy.Host()"
        )
    region = make(n)
    if not isinstance(region, Region):
        raise TypeError(
            f"{source!r}.region({n}) returned {region!r}, which is not an arenapy.Region; "
            "sources make one with Region.from_address"
        )
    if (<Region>region).size < <size_t>n:
        raise ValueError(f"{source!r}.region({n}) gave only {region.nbytes} bytes")
    return <Region>region
