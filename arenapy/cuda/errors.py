"""The exceptions of CUDA."""


class Unavailable(RuntimeError):
    """CUDA is not available: no driver, no device, or no cuda-python. The message says which.

    Examples
    --------
    >>> from arenapy import cuda
    >>> try:
    ...     gpus = cuda.devices()
    ... except cuda.Unavailable:
    ...     gpus = []
    """


class CudaError(RuntimeError):
    """The CUDA driver refused a call.

    Attributes
    ----------
    result : int
        The driver's ``CUresult``.
    name : str
        Its name, such as ``"CUDA_ERROR_INVALID_VALUE"``.

    Examples
    --------
    >>> from arenapy import cuda
    >>> stream = cuda.Stream()
    >>> try:
    ...     stream.synchronize()
    ... except cuda.CudaError as error:      # a kernel failed, say
    ...     print(error.name)
    """

    def __init__(self, message: str, result: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.result = result
        self.name = name

    def __reduce__(self) -> tuple[type["CudaError"], tuple[str, int, str]]:
        return type(self), (self.args[0], self.result, self.name)
