"""CUDA. Importing this needs neither a GPU nor cuda-python; the first use raises `Unavailable`
without them, and says what to install.
"""

from arenapy.cuda.bandwidth import Bandwidth, CopySpeed, bandwidth
from arenapy.cuda.copies import advise, copy_batch, prefetch
from arenapy.cuda.device import DeviceMemory, device_heap_limit, devices, memory_info
from arenapy.cuda.device_pools import Devices
from arenapy.cuda.errors import CudaError, Unavailable
from arenapy.cuda.foreign import asbuffer, from_dlpack
from arenapy.cuda.kernel_memory import KernelArena, KernelSlab, include_dir
from arenapy.cuda.resource import memory_resource
from arenapy.cuda.sources import Device, DriverPool, Managed, Pinned
from arenapy.cuda.staging import chunks
from arenapy.cuda.stream import Event, Stream

__all__ = [
    "Bandwidth",
    "CopySpeed",
    "CudaError",
    "Device",
    "DeviceMemory",
    "Devices",
    "DriverPool",
    "Event",
    "KernelArena",
    "KernelSlab",
    "Managed",
    "Pinned",
    "Stream",
    "Unavailable",
    "advise",
    "asbuffer",
    "bandwidth",
    "chunks",
    "copy_batch",
    "device_heap_limit",
    "devices",
    "from_dlpack",
    "include_dir",
    "memory_info",
    "memory_resource",
    "prefetch",
]
