"""Kernels in C++, compiled by NVRTC and launched by cuda-bindings."""

import ctypes

from real_gpu import done

from arenapy import cuda

THREADS = 256  # of a block


class Kernels:
    """The kernels of a source, by name. The device's primary context is current."""

    def __init__(self, source, folder=None):
        from cuda.bindings import driver, nvrtc

        self.driver = driver
        device = done(driver.cuCtxGetDevice())
        capability = [
            done(driver.cuDeviceGetAttribute(one, device))
            for one in (
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        ]
        options = [
            f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(),
            f"-I{folder or cuda.include_dir()}".encode(),
        ]
        error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
        (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * max(2, size)  # of one byte, it would be every b" " of the program
        nvrtc.nvrtcGetProgramLog(program, log)
        assert int(error) == int(failed) == 0, log.decode()
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        self.module = done(driver.cuModuleLoadData(cubin))
        self.functions = {}

    def launch(self, name, threads, *values, stream=0):
        """Values: ints, each of 64 bits in the kernel."""
        if name not in self.functions:
            found = done(self.driver.cuModuleGetFunction(self.module, name.encode()))
            self.functions[name] = found
        function = self.functions[name]
        types = (ctypes.c_uint64,) * len(values)
        blocks = -(-threads // THREADS)
        handle = int(getattr(stream, "handle", stream))
        done(self.driver.cuLaunchKernel(
            function, blocks, 1, 1, THREADS, 1, 1, 0, handle, (values, types), 0,
        ))  # fmt: skip
