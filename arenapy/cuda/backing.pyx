"""Backing: what regions of CUDA memory are made of.

What lives here: getting memory from the driver, and giving it back when the region is gone. What
does not: options and their checks (source), who uses the memory (ordering).

A Backing ends without the GIL, and not at all once the interpreter ends or in a forked child: the
driver then frees what there is, or nobody may. Errors at an end are not reported.
"""
cimport cython
from cpython.ref cimport Py_INCREF
from libc.errno cimport errno
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

import os
from collections import deque
from functools import partial

from arenapy.base.atomic cimport arenapy_add, arenapy_cas, arenapy_load, arenapy_sub
from arenapy.base.unseen cimport unseen_list
from arenapy.buffer.block cimport StreamHooks
from arenapy.linux.vm cimport Descriptor, vm_keep_leases, vm_unmap
from arenapy.memory.region cimport Backing, Region
from arenapy.cuda.copies cimport CudaMemory, new_memory
from arenapy.cuda.driver cimport (
    OUT_OF_MEMORY, SUCCESS, Location, callable_, checked, driver, enter, forget, generation, leave,
    need, primary,
)
from arenapy.cuda.stream_ref cimport (
    StreamRef, current_device, is_done, known_in, made_stream, relax, restore_capture_mode,
    stream_of,
)
from arenapy.cuda.fence cimport PATIENCE, Fence, late_work_of, look, synchronize
from arenapy.base.sealed cimport seal

from arenapy.cuda.driver import device_count
from arenapy.cuda.errors import CudaError
from arenapy.errors import OutOfMemory
from arenapy.base.text import format_bytes
from arenapy.linux.limits import memory_info as host_memory


cdef enum:
    PAGE = 4096
    DEVICE_LINE = 256
    ATTACH_GLOBAL = 1                # CU_MEM_ATTACH_GLOBAL
    REGISTER_PORTABLE = 1            # CU_MEMHOSTREGISTER_PORTABLE
    REGISTER_MAPPED = 2              # CU_MEMHOSTREGISTER_DEVICEMAP
    CONCURRENT_MANAGED_ACCESS = 89   # CU_DEVICE_ATTRIBUTE_*
    SAME_POINTER = 91                # CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    RELEASE_THRESHOLD = 4            # CU_MEMPOOL_ATTR_*
    ALLOCATION_PINNED = 1            # CU_MEM_ALLOCATION_TYPE_PINNED
    ON_DEVICE = 1                    # CU_MEM_LOCATION_TYPE_DEVICE
    READ_WRITE = 3                   # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    VIRTUAL_MEMORY = 102             # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    HANDLES_ARE_DESCRIPTORS = 103    # ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    RDMA_WITH_VIRTUAL_MEMORY = 110   # ..._GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    AS_DESCRIPTOR = 1                # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    MAX_ACCESS = 64                  # devices that may access memory that grows
    SPREAD = 4                       # addresses, in units of the memory that may lie there
    LEGACY = 1                       # the legacy default stream
    NON_BLOCKING = 1                 # CU_STREAM_NON_BLOCKING

# A CUmemPoolProps.
cdef struct PoolProps:
    int allocation_type
    int handle_types
    Location location
    void* security_attributes
    size_t max_size
    unsigned short usage
    unsigned char[54] reserved

# A CUmemAllocationProp.
cdef struct AllocationProps:
    int allocation_type
    int handle_types
    Location location
    void* win32_metadata
    unsigned char compression
    unsigned char gpu_direct_rdma
    unsigned short usage
    unsigned char[4] reserved

# A CUmemAccessDesc.
cdef struct Access:
    Location location
    int flags

cdef uint64_t registered = 0         # bytes that are pinned now; atomic


cdef int attribute(int which, int device_id) except? -1:
    cdef int value = 0, device = 0, result
    with nogil:
        result = driver.cuDeviceGet(&device, device_id)
        if result == SUCCESS:
            result = driver.cuDeviceGetAttribute(&value, which, device)
    checked(result, "cuDeviceGetAttribute")
    return value


cdef Region region_of(
    uint64_t address, size_t nbytes, Backing backing, CudaMemory memory, Py_ssize_t page_size
):
    cdef Region region = Region.from_address(
        address, nbytes, kind=memory.kind, owner=backing, device_id=memory.device_id,
        host_accessible=memory.host_accessible, device_accessible=memory.device_accessible,
        page_size=page_size, fork="skip",
    )
    region.hooks = memory.bound(None)
    return region


cdef object out_of_memory(size_t nbytes, int ordinal, str what):
    from arenapy.cuda.device import driver_memory
    name, free_bytes, total_bytes = driver_memory(ordinal)
    return OutOfMemory(
        f"{what} of {format_bytes(nbytes)} on device {ordinal} ({name}) failed: "
        f"{format_bytes(free_bytes)} of {format_bytes(total_bytes)} are free; ask for "
        "less, or end what else uses the device"
    )


# ---- device and managed memory -----------------------------------------------------------

@cython.final
cdef class DeviceBacking(Backing):
    """Memory of cuMemAlloc or cuMemAllocManaged. Internal."""

    cdef void* context
    cdef int generation
    cdef uint64_t address

    def __dealloc__(self):
        cdef int mode
        if self.address and callable_(self.generation):
            with nogil:
                if relax(self.context, &mode) == SUCCESS:
                    forget(driver.cuMemFree(self.address))
                    restore_capture_mode(&mode)


seal(DeviceBacking)


cdef DeviceBacking device_backing(int ordinal, size_t nbytes, bint managed):
    cdef DeviceBacking backing = DeviceBacking.__new__(DeviceBacking)
    cdef void* context = primary(ordinal)
    cdef uint64_t address = 0
    cdef int result, mode
    make_room()
    with nogil:
        result = relax(context, &mode)
        if result == SUCCESS:
            if managed:
                result = driver.cuMemAllocManaged(&address, nbytes, ATTACH_GLOBAL)
            else:
                result = driver.cuMemAlloc(&address, nbytes)
            restore_capture_mode(&mode)
    if result == OUT_OF_MEMORY:
        raise out_of_memory(nbytes, ordinal, "cuMemAllocManaged" if managed else "cuMemAlloc")
    checked(result, "cuMemAllocManaged" if managed else "cuMemAlloc")
    backing.context, backing.address, backing.generation = context, address, generation
    return backing


def device_memory(int ordinal):
    """The hooks of a device's memory; the driver is not asked."""
    return new_memory("device", ordinal, False, True, DEVICE_LINE)


def device_region(StreamHooks memory, size_t nbytes):
    """A region of cuMemAlloc."""
    cdef DeviceBacking backing = device_backing(memory.device_id, nbytes, False)
    return region_of(backing.address, nbytes, backing, <CudaMemory>memory, DEVICE_PAGE)


def managed_memory(int ordinal):
    """The hooks of managed memory; asks whether the host may look while the device works."""
    need()
    primary(ordinal)
    return new_memory(
        "managed", ordinal, attribute(CONCURRENT_MANAGED_ACCESS, ordinal) != 0, True, DEVICE_LINE)


def managed_region(StreamHooks memory, size_t nbytes):
    """A region of cuMemAllocManaged."""
    cdef DeviceBacking backing = device_backing(memory.device_id, nbytes, True)
    return region_of(backing.address, nbytes, backing, <CudaMemory>memory, DEVICE_PAGE)


# ---- device memory of another library ----------------------------------------------------

# The collector does not see who lent it, and so does not take that one apart before.
@cython.final
@cython.no_gc
cdef class LentBacking(Backing):
    """Memory that goes back to whoever lent it, when the device has done its work. Internal."""

    cdef DeviceBacking last          # the driver waits for every stream when this is freed
    cdef object give_back            # None: there is nothing yet

    def __dealloc__(self):
        cdef void* context
        cdef int result
        if self.give_back is None:
            return
        if not callable_(self.last.generation):
            Py_INCREF(self.give_back)        # its library may be as unable to free as we are
            return
        context = self.last.context
        self.last = None
        with nogil:
            result = enter(context)
        try:
            self.give_back()
        finally:
            if result == SUCCESS:
                with nogil:
                    leave()


seal(LentBacking)


def lent_region(StreamHooks memory, size_t nbytes, object borrow, object give_back, object check):
    """A region at the address that `borrow(nbytes)` returns; `give_back(address, nbytes)` ends it.

    The address may be free in the order of the legacy stream only, in which both are called, with
    the device current. `check(address)` may refuse it. `give_back` is noted
    here, between whose lines no signal's exception can come.
    """
    cdef LentBacking backing = LentBacking.__new__(LentBacking)
    cdef void* context = primary(memory.device_id)
    cdef StreamRef legacy = stream_of(LEGACY, memory.device_id)
    # A whole page: the driver was seen to wait for the streams when less is freed, too, but that
    # is its choice.
    backing.last = device_backing(memory.device_id, DEVICE_PAGE, False)
    with nogil:
        result = enter(context)
    checked(result, "cuCtxPushCurrent")
    try:
        address = borrow(nbytes)
        backing.give_back = partial(give_back, address, nbytes)
    finally:
        with nogil:
            leave()
    check(address)
    synchronize(legacy)                      # from here on it is every stream's
    return region_of(address, nbytes, backing, <CudaMemory>memory, DEVICE_PAGE)


# ---- device memory that grows in place ---------------------------------------------------
# One range of addresses, whose pages get memory one by one (the driver's virtual memory calls).
#
# Each page is an allocation of its own, since the driver unmaps only what was mapped in one piece.
# Its handle is released once it is mapped: from then on the mapping keeps the memory.
#
# cuMemUnmap waits for nobody, unlike cuMemFree. So whoever takes memory away waits first: for the
# stream in whose order the memory is free; or, at the end of a range, for all streams. For this end
# each range has a page of cuMemAlloc, since the device may be full by then: cuMemFree waits.
#
# Each page can be exported to another process as a descriptor. There, the pages of one block are
# mapped side by side in a range of their own, which ends in the same way, and keeps the lease of
# the block until then. These ranges, of which there may be many small ones, share one page of
# cuMemAlloc on a device. Whoever has freed it allocates it again for the others.
#
# To make pages exportable costs nothing if nobody exports them: on an H100, creating and mapping
# one took 38.5 us without and 38.9 us with it (medians of 19 rounds; their quartiles overlap).

@cython.final
cdef class LastPage:
    """The page of cuMemAlloc of all ranges of received memory on a device. Internal."""

    cdef void* context
    cdef uint64_t address                # atomic; 0: there is none now
    cdef uint64_t users                  # atomic: ranges that are going to need it

    cdef int make(self) except -1:
        """Before a range is used. It may be taken away at once by the end of another one."""
        cdef uint64_t address = 0
        cdef int result, mode
        if arenapy_load(&self.address):
            return 0
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuMemAlloc(&address, DEVICE_PAGE)
                restore_capture_mode(&mode)
        checked(result, "cuMemAlloc")
        self.put(address)
        return 0

    cdef uint64_t take(self) noexcept:
        cdef uint64_t address = arenapy_load(&self.address)
        while address and not arenapy_cas(&self.address, &address, 0):
            pass
        return address

    cdef void put(self, uint64_t address) noexcept:
        """Keep it, if somebody is going to need it and has none."""
        cdef uint64_t none = 0
        cdef int mode
        if address and not (
                arenapy_load(&self.users) and arenapy_cas(&self.address, &none, address)):
            with nogil:
                if relax(self.context, &mode) == SUCCESS:
                    forget(driver.cuMemFree(address))
                    restore_capture_mode(&mode)


seal(LastPage)

cdef dict last_pages = {}                # by generation and context


@cython.final
cdef class Addresses:
    """A reserved range, and which of its pages have memory. Internal."""

    cdef void* context
    cdef int generation
    cdef uint64_t address                # 0: nothing is reserved
    cdef size_t pages
    cdef char* mapped                    # of each page: does it have memory?
    cdef uint64_t last                   # the page of cuMemAlloc, from the first memory on
    cdef LastPage received               # of received memory: where that page is; else None
    cdef bint exportable
    cdef size_t lease                    # of another process's memory: a page that keeps it, or 0

    def __dealloc__(self):
        free(self.mapped)

    cdef int fill(self, size_t first, size_t pages, const AllocationProps* props,
                  const int* files, const Access* access, size_t n_access) noexcept nogil:
        """Give pages memory: all of them, or none. Their context is current.

        It is new memory, or (`files` is not NULL) what another process has exported.
        """
        cdef size_t i
        cdef uint64_t handle = 0, none = 0, last = 0
        cdef int result = SUCCESS
        if files == NULL and arenapy_load(&self.last) == 0:
            result = driver.cuMemAlloc(&last, DEVICE_PAGE)
            if result != SUCCESS:
                return result
            if not arenapy_cas(&self.last, &none, last):     # another thread was faster
                forget(driver.cuMemFree(last))
        for i in range(first, first + pages):
            if self.mapped[i]:               # it could not be unmapped before
                continue
            if files == NULL:
                result = driver.cuMemCreate(&handle, DEVICE_PAGE, props, 0)
            else:
                result = driver.cuMemImportFromShareableHandle(
                    &handle, <void*><uintptr_t>files[i], AS_DESCRIPTOR)
            if result != SUCCESS:
                break
            result = driver.cuMemMap(self.address + i * DEVICE_PAGE, DEVICE_PAGE, 0, handle, 0)
            self.mapped[i] = result == SUCCESS
            forget(driver.cuMemRelease(handle))
            if result != SUCCESS:
                break
        if result == SUCCESS:
            result = driver.cuMemSetAccess(
                self.address + first * DEVICE_PAGE, pages * DEVICE_PAGE, access, n_access)
        if result != SUCCESS:
            self.empty(first, pages)
        return result

    cdef int empty(self, size_t first, size_t pages) noexcept nogil:
        """Take the memory of pages away, of as many as the driver lets go of."""
        cdef size_t i
        cdef int result, worst = SUCCESS
        for i in range(first, first + pages):
            if self.mapped[i]:
                result = driver.cuMemUnmap(self.address + i * DEVICE_PAGE, DEVICE_PAGE)
                self.mapped[i] = result != SUCCESS
                if result != SUCCESS:
                    forget(result)
                    worst = result
        return worst

    cdef int exported(self, size_t page, int* file) noexcept nogil:
        """A new descriptor of a page's memory. Its context is current."""
        cdef uint64_t handle = 0
        cdef int result = driver.cuMemRetainAllocationHandle(
            &handle, <void*>(self.address + page * DEVICE_PAGE))
        if result == SUCCESS:
            result = driver.cuMemExportToShareableHandle(file, handle, AS_DESCRIPTOR, 0)
            forget(driver.cuMemRelease(handle))
        return result

    cdef bint end(self) noexcept:
        """Give all of it back when every stream has done its work. False: not now."""
        cdef uint64_t last = 0
        cdef int result, mode
        if self.address == 0 or self.generation != generation:
            self.end_lease()                 # there is another driver, and nothing of that one
            return True
        if not callable_(self.generation):
            return False
        if self.received is not None and self.last == 0:
            self.last = self.received.take()
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                if self.last == 0 and self.received is not None:
                    result = driver.cuMemAlloc(&self.last, DEVICE_PAGE)
                if result == SUCCESS and self.last:
                    result = driver.cuMemFree(self.last)
                if result == SUCCESS:
                    self.last = 0
                    result = self.empty(0, self.pages)
                    if self.received is not None and driver.cuMemAlloc(&last, DEVICE_PAGE):
                        last = 0             # the others get one when they end
                if result == SUCCESS:
                    result = driver.cuMemAddressFree(
                        self.address, self.pages * DEVICE_PAGE)
                restore_capture_mode(&mode)
            forget(result)
        if self.received is not None:
            arenapy_sub(&self.received.users, result == SUCCESS)
            self.received.put(last)
        if result == SUCCESS:
            self.address = 0
            self.end_lease()
        return result == SUCCESS

    cdef void end_lease(self) noexcept nogil:
        if self.lease:
            vm_unmap(self.lease, PAGE)
        self.lease = 0


seal(Addresses)

cdef object unended = deque()        # Addresses whose end has failed


cdef int end_what_left() except -1:
    """Each is one thread's at a time."""
    cdef Addresses one
    for _ in range(len(unended)):
        try:
            one = <Addresses>unended.popleft()
        except IndexError:
            break
        if not one.end():
            unended.append(one)
    return 0


@cython.final
@cython.no_gc_clear
cdef class GrownBacking(Backing):
    """Memory that grows in place. Internal."""

    cdef Addresses addresses

    def __dealloc__(self):
        if not self.addresses.end() and callable_(self.addresses.generation):
            unended.append(self.addresses)


seal(GrownBacking)


@cython.final
cdef class DeviceReservation:
    """A region of a device that gets its memory by the page. Internal; see memory.Reservation."""

    cdef Addresses addresses
    cdef AllocationProps props
    cdef Access[MAX_ACCESS] access
    cdef size_t n_access
    cdef int ordinal
    cdef readonly Region region
    cdef readonly size_t nbytes
    cdef readonly size_t page_size

    cdef size_t first_page(self, size_t offset, size_t nbytes) except? 0:
        if (offset | nbytes) % DEVICE_PAGE or nbytes == 0 or (
                offset > self.nbytes or nbytes > self.nbytes - offset):
            raise ValueError(
                f"offset={offset}, nbytes={nbytes}: need a part of {self.nbytes} bytes, in "
                f"multiples of {DEVICE_PAGE}"
            )
        if self.region.gone:
            raise ValueError(f"{self.region!r} is closed; reserve again")
        return offset // DEVICE_PAGE

    def commit(self, size_t offset, size_t nbytes):
        """Give a part its memory. If that fails, the part has none."""
        cdef size_t first = self.first_page(offset, nbytes)
        cdef size_t pages = nbytes // DEVICE_PAGE
        cdef Addresses a = self.addresses
        cdef int result, mode
        need()
        if unended:
            end_what_left()
        make_room()
        with nogil:
            result = relax(a.context, &mode)
            if result == SUCCESS:
                result = a.fill(first, pages, &self.props, NULL, self.access, self.n_access)
                restore_capture_mode(&mode)
        if result == OUT_OF_MEMORY:
            raise out_of_memory(nbytes, self.ordinal, "cuMemCreate")
        checked(result, "cuMemCreate or cuMemMap")

    def decommit(self, size_t offset, size_t nbytes, StreamRef stream not None):
        """Take the memory of a part away once `stream`, in whose order it is free, is done.

        Raises
        ------
        CudaError, OutOfMemory
            Nobody can wait for the stream now. The part keeps its memory.
        """
        cdef size_t first = self.first_page(offset, nbytes)
        cdef size_t pages = nbytes // DEVICE_PAGE
        cdef Addresses a = self.addresses
        cdef Fence fence
        cdef int result, mode
        need()
        fence = late_work_of(stream, False)
        if fence is None or not fence.wait(None):
            raise CudaError(f"{stream!r} may be captured into a graph, so no code can wait for it")
        with nogil:
            result = relax(a.context, &mode)
            if result == SUCCESS:
                a.empty(first, pages)
                restore_capture_mode(&mode)
        checked(result, "cuCtxPushCurrent")


seal(DeviceReservation)


cdef GrownBacking reserved(int ordinal, size_t size, AllocationProps* props, str remedy):
    """So many bytes of addresses, a multiple of DEVICE_PAGE; and what their pages are to be."""
    cdef Addresses a = Addresses.__new__(Addresses)
    cdef GrownBacking backing = GrownBacking.__new__(GrownBacking)
    cdef void* context = primary(ordinal)
    cdef size_t granule = 0
    cdef uint64_t address = 0
    cdef int result, mode
    if not attribute(VIRTUAL_MEMORY, ordinal):
        raise ValueError(
            f"grow=True: device {ordinal} cannot map memory by the page; leave grow out")
    if unended:
        end_what_left()
    memset(props, 0, sizeof(props[0]))
    a.exportable = attribute(HANDLES_ARE_DESCRIPTORS, ordinal) != 0
    props.allocation_type = ALLOCATION_PINNED
    props.handle_types = AS_DESCRIPTOR if a.exportable else 0
    props.location.type = ON_DEVICE
    props.location.id = ordinal
    props.gpu_direct_rdma = attribute(RDMA_WITH_VIRTUAL_MEMORY, ordinal) != 0
    a.pages = size // DEVICE_PAGE
    a.mapped = <char*>calloc(a.pages, 1)
    if a.mapped == NULL:
        raise MemoryError("no memory for the bookkeeping of a reservation")
    a.context, a.generation = context, generation
    backing.addresses = a
    with nogil:
        result = relax(context, &mode)
        if result == SUCCESS:
            result = driver.cuMemGetAllocationGranularity(&granule, props, 0)
            if result == SUCCESS and granule and DEVICE_PAGE % granule == 0:
                result = driver.cuMemAddressReserve(&address, size, DEVICE_PAGE, 0, 0)
            restore_capture_mode(&mode)
    if result == OUT_OF_MEMORY:
        raise OutOfMemory(
            f"cuMemAddressReserve of {format_bytes(size)} on device {ordinal} failed: there are "
            f"too few addresses left; {remedy}"
        )
    checked(result, "cuMemAddressReserve")
    if address == 0:
        raise ValueError(
            f"grow=True: device {ordinal} maps memory by {granule} bytes, of which {DEVICE_PAGE} "
            "is no multiple; leave grow out"
        )
    a.address = address
    return backing


cdef size_t allowed(int ordinal, Access* access) except? 0:
    """Which devices may access memory of a device: how many they are."""
    cdef size_t n = 0
    cdef int result, other, can
    for other in range(min(<int>device_count(), <int>MAX_ACCESS)):
        can = other == ordinal
        with nogil:
            result = SUCCESS if can else driver.cuDeviceCanAccessPeer(&can, other, ordinal)
        checked(result, "cuDeviceCanAccessPeer")
        if can:
            access[n].location.type = ON_DEVICE
            access[n].location.id = other
            access[n].flags = READ_WRITE
            n += 1
    return n


def reserve_device(StreamHooks memory, size_t nbytes):
    """Addresses on a device for at least so many bytes of memory, wherever those lie among them.

    Free memory is given back where it lies, and taken again where there is room for a large block.
    So there are more addresses than memory.
    """
    cdef DeviceReservation self = DeviceReservation.__new__(DeviceReservation)
    cdef size_t size = -(-nbytes // DEVICE_PAGE) * DEVICE_PAGE * SPREAD
    cdef GrownBacking backing = reserved(
        memory.device_id, size, &self.props, "give a smaller max_bytes, or leave grow out")
    self.n_access = allowed(memory.device_id, self.access)
    self.addresses, self.ordinal = backing.addresses, memory.device_id
    self.nbytes, self.page_size = size, DEVICE_PAGE
    self.region = region_of(
        self.addresses.address, size, backing, <CudaMemory>memory, DEVICE_PAGE)
    return self


# ---- pages of it in other processes ------------------------------------------------------

cdef list exported_pages(Region region, size_t offset, size_t nbytes):
    """Descriptors of the pages that have these bytes of a region; None: they cannot be exported."""
    cdef Addresses a
    cdef Descriptor file
    cdef list files = []
    cdef size_t page
    cdef int result, mode, number
    if not isinstance(region.owner, GrownBacking):
        return None
    a = (<GrownBacking>region.owner).addresses
    if not a.exportable or a.lease:          # what was received is its sender's to send
        return None
    for page in range(offset // DEVICE_PAGE, (offset + nbytes - 1) // DEVICE_PAGE + 1):
        file = Descriptor.__new__(Descriptor)    # before there is anything to own
        number = -1
        with nogil:
            result = relax(a.context, &mode)
            if result == SUCCESS:
                result = a.exported(page, &number)
                restore_capture_mode(&mode)
        checked(result, "cuMemExportToShareableHandle")
        file.own(number)
        os.set_inheritable(number, False)
        files.append(file)
    return files


cdef LastPage last_page(Addresses a):
    """For a range that is going to use it."""
    cdef LastPage last = last_pages.setdefault(
        (generation, <uintptr_t>a.context), LastPage.__new__(LastPage))
    last.context = a.context
    arenapy_add(&last.users, 1)
    try:
        last.make()
    except BaseException:
        arenapy_sub(&last.users, 1)
        raise
    return last


cdef Region imported_region(
    CudaMemory memory, list files, Descriptor lease, size_t skip, size_t nbytes, bint readonly
):
    """A region of pages of another process: so many bytes, `skip` bytes from their beginning."""
    cdef AllocationProps props
    cdef Access[MAX_ACCESS] access
    cdef size_t i, n_access, pages = len(files)
    cdef GrownBacking backing = reserved(
        memory.device_id, pages * DEVICE_PAGE, &props, "drop blocks that were received")
    cdef Addresses a = backing.addresses
    cdef Region region
    cdef int result, mode
    cdef int* numbers
    n_access = allowed(memory.device_id, access)
    a.received = last_page(a)
    a.lease = <size_t>vm_keep_leases(lease.file.fd, PAGE)
    if a.lease == 0:
        raise OutOfMemory(f"no mapping for the lease of {nbytes} bytes: {os.strerror(errno)}")
    numbers = <int*>malloc(pages * sizeof(int))
    if numbers == NULL:
        raise MemoryError("no memory for the pages of a message")
    for i in range(pages):
        numbers[i] = (<Descriptor>files[i]).file.fd
    with nogil:
        result = relax(a.context, &mode)
        if result == SUCCESS:
            result = a.fill(0, pages, NULL, numbers, access, n_access)
            restore_capture_mode(&mode)
    free(numbers)
    if result == OUT_OF_MEMORY:
        raise out_of_memory(nbytes, memory.device_id, "cuMemImportFromShareableHandle")
    checked(result, "cuMemImportFromShareableHandle or cuMemMap")
    region = region_of(a.address + skip, nbytes, backing, memory, DEVICE_PAGE)
    region.shared, region.readonly = True, readonly
    return region


# ---- pinned memory -----------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class PinnedBacking(Backing):
    """A region of the host, registered. Internal."""

    cdef Region host
    cdef void* context
    cdef int generation
    cdef size_t counted              # in `registered`, from before it is pinned

    def __dealloc__(self):
        cdef char* start
        cdef int result, mode
        arenapy_sub(&registered, self.counted)
        if self.context != NULL and callable_(self.generation):
            start = self.host.ptr
            with nogil:
                result = relax(self.context, &mode)
                if result == SUCCESS:
                    result = driver.cuMemHostUnregister(start)
                    restore_capture_mode(&mode)
                forget(result)
            if not is_done(result):
                # It stays, for the driver would use its old pages for what is mapped there next.
                Py_INCREF(self.host)


seal(PinnedBacking)


def pinned_memory(bint mapped):
    """The hooks of pinned memory; the driver is not asked."""
    return new_memory("pinned", -1, True, mapped, 64)


cdef int count(PinnedBacking backing, size_t nbytes, double fraction) except -1:
    """Refuse to pin more of the machine's memory than that part."""
    cdef size_t before = arenapy_add(&registered, nbytes - backing.counted) - backing.counted
    backing.counted = nbytes
    total = host_memory().total
    if before + nbytes > fraction * total:
        raise OutOfMemory(
            f"pinning {format_bytes(nbytes)} more than the {format_bytes(before)} that are "
            f"pinned now would be above max_ram_fraction={fraction} of {format_bytes(total)}: "
            "pinned memory is lost to all other programs. Ask for less, or pass a larger fraction"
        )


def pinned_region(
    StreamHooks memory, object source, size_t nbytes, double fraction, bint portable, bint mapped
):
    """A region of `source`, a Host, for copies at full speed."""
    cdef PinnedBacking backing = PinnedBacking.__new__(PinnedBacking)
    cdef int device = current_device()
    cdef void* context = primary(device)
    cdef Region host
    cdef char* start
    cdef unsigned int flags = portable * REGISTER_PORTABLE + mapped * REGISTER_MAPPED
    cdef int result, mode
    if mapped and not attribute(SAME_POINTER, device):
        raise ValueError(
            "mapped=True: this device cannot access host memory at the host's addresses; pass "
            "mapped=False, and copy"
        )
    make_room()
    count(backing, nbytes, fraction)         # before its pages are touched
    host = source.region(nbytes)
    nbytes, start = host.size, host.ptr
    count(backing, nbytes, fraction)
    with nogil:
        result = relax(context, &mode)
        if result == SUCCESS:
            result = driver.cuMemHostRegister(start, nbytes, flags)
            restore_capture_mode(&mode)
    checked(result, "cuMemHostRegister")
    backing.host, backing.context, backing.generation = host, context, generation
    return region_of(<uint64_t>start, nbytes, backing, <CudaMemory>memory, host.page_size)


def pinned_bytes():
    """Bytes of the host's memory that arenapy has pinned now."""
    return arenapy_load(&registered)


# ---- the driver's pool -------------------------------------------------------------------

cdef object leaving = deque()        # Leaving, roughly the oldest first


@cython.final
cdef class Leaving:
    """Memory that was given back, and what has to be over before the driver may free it. Internal.

    Unlike cuMemFree, the driver waits for nobody here, and cuCtxSynchronize would make captures
    invalid. So its pool's stream waits for what each stream had to do when it was given back.
    """

    cdef DriverPoolHandle pool           # which is there to the last
    cdef uint64_t address
    cdef list streams                    # or None, where there is a fence
    cdef list fences                    # of each stream, or None: it is still to be made
    cdef int looks                       # how often that was tried when memory was needed

    cdef bint freed(self, bint needed) except -1:
        """Free it, if that can be now."""
        cdef Py_ssize_t i
        cdef void* context = self.pool.context
        cdef void* handle = self.pool.stream.handle
        cdef uint64_t address = self.address
        cdef int result
        for i in range(len(self.streams)):
            if self.fences[i] is None:
                self.fences[i] = late_work_of(
                    <StreamRef>self.streams[i], needed and self.looks >= PATIENCE)
        self.looks += needed
        if None in self.fences:
            return False
        for fence in self.fences:
            if not (<Fence>fence).wait(self.pool.stream):
                return False
        with nogil:
            result = enter(context)
            if result == SUCCESS:
                result = driver.cuMemFreeAsync(address, handle)
                leave()
        checked(result, "cuMemFreeAsync")
        return True


seal(Leaving)


cdef void free_what_left(bint needed) noexcept:
    """Each is one thread's at a time, and back on the list before that thread goes on."""
    cdef Leaving one
    for _ in range(len(leaving)):
        try:
            one = <Leaving>leaving.popleft()
        except IndexError:
            break
        try:
            if one.pool.generation != generation or one.freed(needed):
                continue
        except Exception:
            pass                             # later, perhaps
        leaving.append(one)


cdef void make_room() noexcept:
    """Free what streams are done with, for memory is needed."""
    free_what_left(True)
    look(True, True)


@cython.final
@cython.no_gc_clear                  # the end of a region needs it
cdef class DriverPoolHandle:
    """A memory pool of the driver, and a stream to ask it on. Internal."""

    cdef void* context
    cdef int generation
    cdef void* pool
    cdef StreamRef stream
    cdef readonly int ordinal

    def __cinit__(self, int ordinal, threshold):
        cdef PoolProps props
        cdef void* context = primary(ordinal)
        cdef uint64_t most = <uint64_t>-1 if threshold is None else threshold
        cdef int result, mode
        self.stream = made_stream(context, ordinal, NON_BLOCKING)
        self.stream.serves = True
        memset(&props, 0, sizeof(props))
        props.allocation_type = ALLOCATION_PINNED
        props.location.type = ON_DEVICE
        props.location.id = ordinal
        with nogil:
            result = relax(context, &mode)
            if result == SUCCESS:
                result = driver.cuMemPoolCreate(&self.pool, &props)
                if result == SUCCESS:
                    result = driver.cuMemPoolSetAttribute(self.pool, RELEASE_THRESHOLD, &most)
                restore_capture_mode(&mode)
        self.context, self.ordinal, self.generation = context, ordinal, generation
        checked(result, "cuMemPoolCreate")
        self.let_others_reach_it()

    cdef int let_others_reach_it(self) except -1:
        """Streams of other devices copy memory of a pool only if they may reach it."""
        cdef Access access
        cdef int ours = self.ordinal, other, can, result, mode
        access.flags = READ_WRITE
        access.location.type = ON_DEVICE
        for other in range(device_count()):
            can = 0
            access.location.id = other
            with nogil:
                result = driver.cuDeviceCanAccessPeer(&can, other, ours) if other != ours else 0
                if result == SUCCESS and can:
                    result = relax(self.context, &mode)
                    if result == SUCCESS:
                        result = driver.cuMemPoolSetAccess(self.pool, &access, 1)
                        restore_capture_mode(&mode)
            checked(result, "cuMemPoolSetAccess")
        return 0

    def __dealloc__(self):
        cdef int mode
        if self.pool != NULL and callable_(self.generation):
            with nogil:
                if relax(self.context, &mode) == SUCCESS:
                    forget(driver.cuMemPoolDestroy(self.pool))
                    restore_capture_mode(&mode)

    cdef void give_back(self, uint64_t address, list earlier) noexcept:
        cdef Leaving one = Leaving.__new__(Leaving)
        cdef StreamRef _legacy = stream_of(LEGACY, self.ordinal)    # now it is known
        one.pool, one.address = self, address
        one.streams = [
            use for use in known_in(self.context) if not (<StreamRef>use).serves]
        one.fences = [None] * len(one.streams)
        for use in earlier:
            one.streams.append(use if isinstance(use, StreamRef) else None)
            one.fences.append(use if isinstance(use, Fence) else None)
        leaving.append(one)
        free_what_left(False)

    def trim_to(self, size_t nbytes):
        """Let the driver give back what is beyond so many bytes."""
        cdef int result, mode
        need()
        free_what_left(False)
        synchronize(self.stream)             # it is free only then
        with nogil:
            result = relax(self.context, &mode)
            if result == SUCCESS:
                result = driver.cuMemPoolTrimTo(self.pool, nbytes)
                restore_capture_mode(&mode)
        checked(result, "cuMemPoolTrimTo")


@cython.final
@cython.no_gc_clear
cdef class PooledBacking(Backing):
    """Memory of cuMemAllocFromPoolAsync. Internal."""

    cdef DriverPoolHandle pool
    cdef int generation
    cdef uint64_t address
    cdef list earlier                # Ordering.earlier of the region

    def __dealloc__(self):
        if self.address and callable_(self.generation):
            self.pool.give_back(self.address, self.earlier)


seal(PooledBacking)


def pooled_region(StreamHooks memory, DriverPoolHandle pool not None, size_t nbytes):
    """A region of the driver's pool."""
    cdef PooledBacking backing = PooledBacking.__new__(PooledBacking)
    cdef void* stream = pool.stream.handle
    cdef uint64_t address = 0
    cdef int result, mode
    cdef Region region
    need()
    make_room()
    with nogil:
        result = relax(pool.context, &mode)
        if result == SUCCESS:
            result = driver.cuMemAllocFromPoolAsync(&address, nbytes, pool.pool, stream)
            if result == SUCCESS:            # from here on it is every stream's
                result = driver.cuStreamSynchronize(stream)
            restore_capture_mode(&mode)
    backing.pool, backing.address, backing.generation = pool, address, generation
    backing.earlier = unseen_list()
    if result == OUT_OF_MEMORY:
        raise out_of_memory(nbytes, pool.ordinal, "cuMemAllocFromPoolAsync")
    checked(result, "cuMemAllocFromPoolAsync")
    region = region_of(address, nbytes, backing, <CudaMemory>memory, DEVICE_PAGE)
    (<CudaMemory>region.hooks).earlier = backing.earlier
    return region
