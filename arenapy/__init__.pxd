# What `cimport arenapy` gives: docs/c_api.md describes it. No NumPy here, nor in any file below.
from arenapy.abi cimport ARENAPY_ABI
from arenapy.buffer cimport Buffer
from arenapy.bump cimport Bump
from arenapy.bump_calls cimport BumpMark, bump_alloc, bump_free, bump_mark, bump_reset
from arenapy.pool cimport Pool
from arenapy.pool_calls cimport pool_alloc, pool_free, pool_usable_size
from arenapy.region cimport Region
from arenapy.slab cimport Slab
from arenapy.slab_calls cimport slab_alloc, slab_free
