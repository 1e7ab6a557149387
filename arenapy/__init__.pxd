# What `cimport arenapy` gives: docs/c_api.md describes it. No NumPy here, nor in any file below.
from arenapy.abi cimport ARENAPY_ABI
from arenapy.buffer cimport Buffer
from arenapy.bump cimport Bump
from arenapy.bump_calls cimport BumpMark, bump_alloc, bump_free, bump_mark, bump_reset
from arenapy.region cimport Region
