"""The programs of docs/examples run as they stand, and compute what plain NumPy does.

The one for a GPU runs on the simulated driver, with as much of CuPy as it uses. On a GPU,
tests/gpu/test_gpu_docs.py runs it.
"""

import contextlib
import ctypes
import gc
import re
import runpy
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from cuda_support import a_gpu

import arenapy

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))

#: The end of what each prints.
PRINTED = {
    "image_pipeline": r"007\.npy: \d+\.\d% edges; \d+ arrays, \d\d? page faults\n<Pool host .*>\n",
    "simulation": r"100 steps of 400 particles .*\n400 allocations, \d\d? page faults; <Bump .*>\n",
    "request_server": r"1000 requests, at most 64 KiB in use: <Slab .* 0 live>\n",
    "training_input": r"9\d\.\d% of the rows are on the right side\n",
    "shared_arrays": r"21\.\d\d% of the points are in the set\n([ .:=+*#%@-]{64}\n){15}",
}


def loaded(name):
    """The names of a program that is not run."""
    return types.SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def test_each_is_short_and_shown():
    pages = (EXAMPLES.parent / "examples.md").read_text()
    assert re.findall(r"^```\{literalinclude\} examples/(\w+)\.py$", pages, re.M) == NAMES
    assert {*PRINTED, "out_of_core_gpu", "kernel_rows", "kernel_table"} == {*NAMES}
    for name in NAMES:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80, name


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.full
def test_it_runs_as_it_stands(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(PRINTED[name] + r"\Z", done.stdout), done.stdout
    assert not [*tmp_path.iterdir()]


def test_a_mean_of_tiles_and_edges(tmp_path):
    program = loaded("image_pipeline")
    image = np.zeros((17, 24, 3), "u1")
    image[:, 12:] = 200
    small = program.thumbnail(image, 4)
    assert (small == image[2:16:4, 2::4]).all()
    steep = program.edges(image[..., 0].astype("f4"))
    assert (steep > 0).sum(axis=1).tolist() == [2] * 17
    assert (program.blurred(np.full((5, 6), 9.0)) == 9).all()


def test_thumbnails_are_no_images_of_the_next_run(tmp_path, capsys):
    program = loaded("image_pipeline")
    program.make_images(tmp_path, count=2, height=48, width=64)
    for _ in range(2):
        program.main(tmp_path)
        images = re.findall(r"^(.*): .* edges", capsys.readouterr().out, re.M)
        assert images == ["000.npy", "001.npy"]
    made = np.load(tmp_path / "thumbnails/001.npy")
    image = np.load(tmp_path / "001.npy")
    assert (made == program.thumbnail(image, 8)).all()


def test_a_step_is_that_of_a_direct_sum():
    program = loaded("simulation")
    arena = arenapy.Bump(1 << 20, strict=True)  # which no array may outlive its scope in
    cloud = program.particles(arena, 30)
    before = {name: field.copy() for name, field in cloud.items()}
    program.step(cloud, arena, 0.0)
    used = arena.used
    with arena.scope():
        program.accelerate(cloud, arena, 0.5)
    assert arena.used == used
    for i in range(30):
        dx, dy = before["x"] - before["x"][i], before["y"] - before["y"][i]
        pull = before["mass"] / (dx**2 + dy**2 + program.SOFT**2) ** 1.5
        assert cloud["vx"][i] == pytest.approx(0.5 * (dx * pull).sum())
        assert cloud["vy"][i] == pytest.approx(0.5 * (dy * pull).sum())


@contextlib.contextmanager
def asking(server):
    with (
        socket.create_connection(server.server_address) as connection,
        connection.makefile("rwb") as stream,
    ):
        yield stream


def test_the_server_sorts_and_refuses():
    program = loaded("request_server")
    with program.socketserver.ThreadingTCPServer(("127.0.0.1", 0), program.Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with asking(server) as stream:
                for n in (0, 1, 5, 16 << 10):
                    row = np.random.default_rng(n).random(n, "f4")
                    assert (program.ask(stream, row) == np.sort(row)).all()
                with pytest.raises(ConnectionError):
                    program.ask(stream, np.zeros((16 << 10) + 1, "f4"))
            taken = program.requests.alloc_many(32)
            with asking(server) as stream, pytest.raises(ConnectionError):
                program.ask(stream, np.zeros(3, "f4"))
            del taken
        finally:
            server.shutdown()
    assert program.requests.count == 0


def test_each_epoch_has_all_rows_once():
    program = loaded("training_input")
    data = np.arange(1000 * 2, dtype="f4").reshape(1000, 2)
    firsts = [batch[:, 0].copy() for batch in program.batches(data, 2)]
    assert len(firsts) == 6 and {len(first) for first in firsts} == {program.ROWS}
    for epoch in (firsts[:3], firsts[3:]):
        assert len(np.unique(np.concatenate(epoch))) == 3 * program.ROWS
    assert (firsts[0] != firsts[3]).any()


def test_bands_make_the_picture():
    program = loaded("shared_arrays")
    picture = np.full((program.HEIGHT, program.WIDTH), 7, "u2")
    for first in range(0, program.HEIGHT, program.BAND):
        program.compute(picture[first : first + program.BAND], first)
    y, x = 100, 200
    point = complex(
        np.linspace(program.LEFT, program.RIGHT, program.WIDTH)[x],
        np.linspace(program.TOP, program.BOTTOM, program.HEIGHT)[y],
    )
    z, count = 0j, 0
    while abs(z) <= 2 and count < program.MOST:
        z, count = z * z + point, count + 1
    assert picture[y, x] == count
    assert f"{(picture == program.MOST).mean():.2%}".startswith("21.")


class Lazy:
    """A number on the device: it is there once the kernels before it have run."""

    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return Lazy(lambda: self.value() + number(other))

    def __radd__(self, other):
        return Lazy(lambda: other + self.value())

    def __float__(self):
        return float(self.value())


def number(value):
    return value.value() if isinstance(value, Lazy) else value


def fake_cupy(driver):
    """Kernels, each queued on the legacy stream, that read a chunk when they run."""

    class Array:
        def __init__(self, chunk):
            self.fields = chunk.__cuda_array_interface__
            (self.size,) = self.fields["shape"]

        def reduce(self, function):
            found = []
            address, nbytes = self.fields["data"][0], 4 * self.size

            def kernel():
                values = np.frombuffer(ctypes.string_at(address, nbytes), self.fields["typestr"])
                found.append(function(values))

            driver.launch(1, kernel, [(address, nbytes)])

            def value():
                driver.drain()
                return found[0]

            return Lazy(value)

        def sum(self, dtype):
            return self.reduce(lambda values: values.sum(dtype=dtype))

        def max(self):
            return self.reduce(np.max)

    class Square:
        def __init__(self, array, dtype):
            self.array, self.dtype = array, dtype

        def sum(self):
            return self.array.reduce(lambda values: np.square(values, dtype=self.dtype).sum())

    module = types.ModuleType("cupy")
    module.asarray, module.square = Array, Square
    module.maximum = lambda a, b: Lazy(lambda: max(number(a), number(b)))
    return module


@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_the_reduction_on_the_simulated_driver(n, tmp_path, monkeypatch):
    values = np.random.default_rng(3).standard_normal(n, "f4") * 2 - 5
    path = tmp_path / "data.f4"
    values.tofile(path)
    with a_gpu() as driver:
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(driver))
        program = loaded("out_of_core_gpu")
        found = program.moments(str(path), 4096)
        gc.collect()
    assert found[0] == n
    assert found[1:] == pytest.approx(
        (values.mean(dtype="f8"), values.std(dtype="f8"), values.max()), abs=1e-6
    )
