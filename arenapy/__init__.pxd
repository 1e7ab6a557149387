# For `cimport arenapy`, which docs/c_api.md describes. No NumPy here, nor in any file below.
from arenapy.base.abi cimport ARENAPY_ABI
from arenapy.buffer.buffer cimport Buffer
from arenapy.bump.bump cimport Bump, BumpMark, bump_alloc, bump_free, bump_mark, bump_reset
from arenapy.pool.pool cimport Pool
from arenapy.pool.c_api cimport pool_alloc, pool_free, pool_usable_size
from arenapy.memory.region cimport Region
from arenapy.slab.slab cimport Slab, slab_alloc, slab_free
