# The number of the C interface, and the check that a caller was compiled for it.
#
# Inline functions bake struct layouts into their callers. When a layout or the meaning of a C call
# changes, the number goes up by one, here and in abi.pyx. Nobody calls _compiled_for: Cython
# imports whatever an inline function of a cimported .pxd refers to when the importing module is
# initialized, so a module compiled for another number fails to import, with the name as the reason,
# and the check costs nothing afterwards.
cdef enum:
    ARENAPY_ABI = 25

cdef void built_for_arenapy_abi_25() noexcept nogil

cdef inline void _compiled_for() noexcept nogil:
    built_for_arenapy_abi_25()
