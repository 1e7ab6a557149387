"""The computations of the demo. Nothing here knows about time, and nothing about arenas.

A `Job` does one iteration at a time in two spellings of the same arithmetic: ``plain()`` is NumPy
as anybody writes it, and ``placed(empty)`` takes the memory of each temporary from ``empty(shape,
dtype)``. Both do the same operations in the same order on as many arrays, so that the memory is the
only difference. Where NumPy itself writes into an operand that nobody else can see (it does from
256 KiB on: temporary elision), the placed spelling does too.

The arrays of an iteration die when it returns, except the ones returned, which die when the caller
drops them. This is what makes a scope around an iteration free: at its end nothing is left to keep.
"""

import importlib.resources
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Digits", "Job", "Network", "Temporaries", "Workload", "load_digits"]

ELEMENTS_A_BLOCK = 32_000_000
MAX_ITERATIONS = 1000

Array = NDArray[Any]
Empty = Callable[[tuple[int, ...], str], Array]


class Job(Protocol):
    """A computation that goes on, one iteration a call; both spellings advance it alike."""

    def plain(self) -> tuple[Array, ...]:
        """Do the next iteration in ordinary NumPy and return what it computed."""

    def placed(self, empty: Empty) -> tuple[Array, ...]:
        """Do the next iteration with every temporary in memory from `empty`."""


class Workload(Protocol):
    """A named source of jobs that all start alike."""

    @property
    def name(self) -> str:
        """Its name in the tables."""

    @property
    def iterations(self) -> int:
        """How many iterations make a block worth timing, about 0.1 s of plain NumPy."""

    def start(self) -> Job:
        """Return a job at its beginning."""


class Temporaries:
    """``c = a*b + a - b/2`` on N x N float32: the classic loop of temporaries."""

    def __init__(self, n: int) -> None:
        self.name = f"N = {n}"
        self.iterations = min(max(1, ELEMENTS_A_BLOCK // n**2), MAX_ITERATIONS)
        random = np.random.default_rng(n)
        self._a = random.random((n, n), "f4")
        self._b = random.random((n, n), "f4")

    @staticmethod
    def array_bytes(n: int) -> int:
        """Return the bytes of one of its arrays."""
        return n * n * np.dtype("f4").itemsize

    def start(self) -> "Temporaries":
        return self  # no state: every iteration is the same

    def plain(self) -> tuple[Array, ...]:
        a, b = self._a, self._b
        return (a * b + a - b / 2,)

    def placed(self, empty: Empty) -> tuple[Array, ...]:
        a, b = self._a, self._b
        c = np.multiply(a, b, out=empty(a.shape, "f4"))
        np.add(c, a, out=c)  # NumPy elides this temporary and the last one
        half = np.divide(b, 2, out=empty(b.shape, "f4"))
        return (np.subtract(c, half, out=c),)


def load_digits() -> tuple[Array, Array]:
    """Return the handwritten digits: (1797, 64) float32 in 0 to 1, and (1797,) labels.

    ``digits.md`` names the authors, the source and the licence.
    """
    packed = importlib.resources.files(__package__) / "digits.csv.gz"
    with importlib.resources.as_file(packed) as path:
        table = np.loadtxt(path, delimiter=",", dtype="f4")
    return np.ascontiguousarray(table[:, :64]) / 16, table[:, 64].astype("i8")


class Digits:
    """Training a small network on the handwritten digits; an iteration is one mini-batch."""

    name = "digits network"
    iterations = 150  # ten times all training images
    train = 1500
    classes = 10

    def __init__(self) -> None:
        images, labels = load_digits()
        self.images, self.test_images = images[: self.train], images[self.train :]
        self.targets = np.eye(self.classes, dtype="f4")[labels[: self.train]]
        self.test_labels = labels[self.train :]

    def start(self) -> "Network":
        return Network(self)


class Network:
    """64 inputs, 512 tanh units, 10 softmax outputs, gradient descent; the seed is fixed."""

    hidden = 512
    batch = 100
    rate = 0.5

    def __init__(self, data: Digits) -> None:
        self._data = data
        self._next = 0
        random = np.random.default_rng(1998)
        inputs = data.images.shape[1]
        self.w1 = random.standard_normal((inputs, self.hidden), "f4") / np.float32(inputs**0.5)
        self.b1 = np.zeros(self.hidden, "f4")
        self.w2 = random.standard_normal((self.hidden, data.classes), "f4") * np.float32(0.01)
        self.b2 = np.zeros(data.classes, "f4")

    def _batch(self) -> tuple[Array, Array]:
        start = self._next
        self._next = (start + self.batch) % len(self._data.images)
        return (self._data.images[start : start + self.batch],
                self._data.targets[start : start + self.batch])  # fmt: skip

    def accuracy(self) -> float:
        """Return the share of the test images, never trained on, that it gets right."""
        hidden = np.tanh(self._data.test_images @ self.w1 + self.b1)
        answers = np.argmax(hidden @ self.w2 + self.b2, axis=1)
        return float(np.mean(answers == self._data.test_labels))

    def plain(self) -> tuple[Array, ...]:
        x, y = self._batch()
        w1, b1, w2, b2, rate = self.w1, self.b1, self.w2, self.b2, self.rate

        h = np.tanh(x @ w1 + b1)
        z = h @ w2 + b2
        e = np.exp(z - z.max(axis=1, keepdims=True))
        p = e / e.sum(axis=1, keepdims=True)

        d2 = (p - y) / len(x)
        d1 = (d2 @ w2.T) * (1 - h * h)
        w1 -= rate * (x.T @ d1)
        b1 -= rate * d1.sum(axis=0)
        w2 -= rate * (h.T @ d2)
        b2 -= rate * d2.sum(axis=0)
        return w1, b1, w2, b2, p

    def placed(self, empty: Empty) -> tuple[Array, ...]:
        x, y = self._batch()
        w1, b1, w2, b2, rate = self.w1, self.b1, self.w2, self.b2, self.rate
        rows, hidden, classes = len(x), len(b1), len(b2)

        def new(*shape: int) -> Array:
            return empty(shape, "f4")

        xw = np.matmul(x, w1, out=new(rows, hidden))
        h = np.tanh(np.add(xw, b1, out=new(rows, hidden)), out=new(rows, hidden))
        hw = np.matmul(h, w2, out=new(rows, classes))
        z = np.add(hw, b2, out=new(rows, classes))
        top = z.max(axis=1, keepdims=True, out=new(rows, 1))
        e = np.exp(np.subtract(z, top, out=new(rows, classes)), out=new(rows, classes))
        total = e.sum(axis=1, keepdims=True, out=new(rows, 1))
        p = np.divide(e, total, out=new(rows, classes))

        wrong = np.subtract(p, y, out=new(rows, classes))
        d2 = np.divide(wrong, rows, out=new(rows, classes))
        back = np.matmul(d2, w2.T, out=new(rows, hidden))
        square = np.multiply(h, h, out=new(rows, hidden))
        slope = np.subtract(1, square, out=new(rows, hidden))
        d1 = np.multiply(back, slope, out=new(rows, hidden))
        g1 = np.matmul(x.T, d1, out=new(*w1.shape))
        w1 -= np.multiply(rate, g1, out=new(*w1.shape))
        s1 = d1.sum(axis=0, out=new(hidden))
        b1 -= np.multiply(rate, s1, out=new(hidden))
        g2 = np.matmul(h.T, d2, out=new(*w2.shape))
        w2 -= np.multiply(rate, g2, out=new(*w2.shape))
        s2 = d2.sum(axis=0, out=new(classes))
        b2 -= np.multiply(rate, s2, out=new(classes))
        return w1, b1, w2, b2, p
