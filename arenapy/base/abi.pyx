"""The number of the C interface; abi.pxd says what it is for."""

ABI = ARENAPY_ABI


cdef void built_for_arenapy_abi_25() noexcept nogil:
    pass
