"""torch.cuda as on a machine with a device, as far as `arenapy.interop.torch.collate` uses it."""

import os
import threading

import torch


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        pass

    def synchronize(self):
        self.device.copied.wait()


class Device:
    """Copies last until the test says otherwise. `patch` is `setattr`, or a function like it."""

    event = Event

    def __init__(self, patch):
        self.copied = threading.Event()
        self.copied.set()
        process = os.getpid()
        patch(torch.cuda, "is_available", lambda: True)
        patch(torch.cuda, "is_initialized", lambda: os.getpid() == process)
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch(torch.cuda, "cudart", lambda: self)
        patch(torch.cuda, "Event", lambda blocking: self.event(self))

    def cudaHostRegister(self, address, nbytes, flags):
        return 0

    def cudaHostUnregister(self, address):
        return 0
