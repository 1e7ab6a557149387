"""Every public callable says what it takes and shows how it is used, and what it shows runs.

A callable of the public modules is a function, a class, or a method of such a class that has no
underscore. Examples run here, those of arenapy.cuda and arenapy.interop.hip on a simulated driver;
Sphinx runs those that stand in the pages.
"""

import contextlib
import doctest
import gc
import importlib
import importlib.util
import inspect
import re

import numpy as np
import pytest
from cuda_support import a_gpu
from simulated_hip import simulated_hip

import arenapy
from arenapy import cuda

MODULES = ("arenapy", "arenapy.stats", "arenapy.debug", "arenapy.plot", "arenapy.trace",
           "arenapy.cuda")  # fmt: skip
#: Those whose functions and classes are public, but not all methods.
NAMES_ONLY = ("arenapy.testing", "arenapy.testing.asv", "arenapy.testing.attack",
              "arenapy.testing.crashes",
              *[f"arenapy.interop.{one}" for one in (
                  "cupy", "dask", "hip", "numba", "numba_kernels", "rmm", "torch")])  # fmt: skip


def methods(kind):
    """Those that users call, with the class that defines each."""
    for name in dir(kind):
        owner = next(one for one in kind.__mro__ if name in vars(one))
        value = inspect.getattr_static(kind, name)
        if name.startswith("_") or isinstance(value, property) or inspect.isdatadescriptor(value):
            continue
        if not owner.__module__.startswith("arenapy") or not callable(getattr(kind, name)):
            continue
        if not (inspect.getdoc(getattr(kind, name)) or "").startswith("Internal:"):
            yield owner, name


def public(owner):
    """The name of a class, under the package that has it."""
    package = "arenapy.cuda" if owner.__module__.startswith("arenapy.cuda") else "arenapy"
    return f"{package}.{owner.__qualname__}"


def callables():
    """{name: callable}, each once: a method under the class that defines it."""
    found = {}
    for module in (*MODULES, *NAMES_ONLY):
        for name in importlib.import_module(module).__all__:
            value = getattr(importlib.import_module(module), name)
            if not callable(value) or not getattr(value, "__module__", "").startswith("arenapy"):
                continue
            if any(value is other for other in found.values()):
                continue
            found[f"{module}.{name}"] = value
            if module in NAMES_ONLY:
                continue
            for owner, method in methods(value) if isinstance(value, type) else ():
                found.setdefault(f"{public(owner)}.{method}", getattr(owner, method))
    return found


CALLABLES = callables()


def takes(value):
    """The names of the parameters that a user gives."""
    names = list(inspect.signature(value).parameters)
    return [name for name in names if name not in ("self", "cls")]


def sections(value):
    return re.findall(r"^(\w+)\n---+$", inspect.getdoc(value) or "", re.MULTILINE)


def test_there_are_callables():
    assert {"arenapy.Pool", "arenapy.Pool.trim", "arenapy.Allocator.zeros"} <= CALLABLES.keys()
    assert {"arenapy.cuda.chunks", "arenapy.trace.load"} <= CALLABLES.keys()
    assert len(CALLABLES) > 100


def is_made_by_users(kind):
    """Not so an exception, what lists its attributes alone, and what refuses to be called."""
    if issubclass(kind, BaseException) or "Attributes" in sections(kind):
        return False
    try:
        inspect.signature(kind)
    except ValueError:  # sealed: no signature
        with pytest.raises(TypeError, match=r"made by|is the base of"):
            kind()
        return False
    return True


@pytest.mark.parametrize("name", CALLABLES)
def test_it_says_what_it_takes_and_shows_it(name):
    value = CALLABLES[name]
    assert "Examples" in sections(value)
    skips = "+SKIP" in inspect.getdoc(value)
    needs = name == "arenapy.cuda.memory_resource" or (
        name.startswith("arenapy.interop.") and not name.startswith("arenapy.interop.hip.")
    )
    assert skips == needs, "another library"
    if isinstance(value, type) and not is_made_by_users(value):
        return
    names = takes(value)
    assert not {"args", "kwargs"} & {*names}, "not the real signature"
    assert "Parameters" in sections(value) or not names


@pytest.mark.parametrize("name", CALLABLES)
def test_its_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(CALLABLES[name]) or ""
    if "plot" in name and not importlib.util.find_spec("matplotlib"):
        pytest.skip("needs matplotlib")
    test = doctest.DocTestParser().get_doctest(
        text, {"arenapy": arenapy, "np": np, "cuda": cuda}, name, None, None
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said = []
    with (
        a_gpu(leaks=True) if "cuda." in text else contextlib.nullcontext(),
        simulated_hip(leaks=True) if "interop.hip." in name else contextlib.nullcontext(),
    ):
        runner.run(test, out=said.append)
        gc.collect()
    assert not runner.failures, "".join(said)
