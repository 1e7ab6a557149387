"""CUDA. Importing this needs neither a GPU nor cuda-python; the first use raises `Unavailable`
without them, and says what to install.
"""

from arenapy.cuda.device import DeviceMemory, device_heap_limit, devices, memory_info
from arenapy.cuda.errors import CudaError, Unavailable
from arenapy.cuda.exchange import asbuffer, from_dlpack
from arenapy.cuda.source import Device, DriverPool, Managed, Pinned

__all__ = [
    "CudaError",
    "Device",
    "DeviceMemory",
    "DriverPool",
    "Managed",
    "Pinned",
    "Unavailable",
    "asbuffer",
    "device_heap_limit",
    "devices",
    "from_dlpack",
    "memory_info",
]
