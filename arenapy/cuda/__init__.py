"""CUDA. Importing this needs neither a GPU nor cuda-python; the first use raises `Unavailable`
without them, and says what to install.
"""

from arenapy.cuda.device import DeviceMemory, device_heap_limit, devices, memory_info
from arenapy.cuda.errors import CudaError, Unavailable

__all__ = [
    "CudaError",
    "DeviceMemory",
    "Unavailable",
    "device_heap_limit",
    "devices",
    "memory_info",
]
