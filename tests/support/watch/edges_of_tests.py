"""A plugin of pytest: what each test costs, and which edges it reaches, whatever its parameters.

Also whether the order of steps matters in it: it started threads, or ran a state machine.
"""

import ctypes
import importlib
import resource
import threading
import time

import numpy as np
import pytest
import sitecustomize
from hypothesis.stateful import RuleBasedStateMachine


class Watch:
    def __init__(self):
        for module, _, _ in sitecustomize.table().values():
            importlib.import_module(f"arenapy.{module.replace('/', '.')}")
        self.counters = sitecustomize.counters()
        self.tests = {}
        self.begun = 0  # threads and machines
        self.count(threading.Thread, "start")
        self.count(RuleBasedStateMachine, "__init__")

    def count(self, kind, name):
        method = getattr(kind, name)

        def counted(*arguments, **options):
            self.begun += 1
            return method(*arguments, **options)

        setattr(kind, name, counted)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        for _, address, count in self.counters:
            ctypes.memset(address, 0, count)
        begun, start = self.begun, processor_seconds()
        result = yield
        spent = processor_seconds() - start
        name = item.nodeid.partition("[")[0]
        before, order, edges = self.tests.get(name, (0, False, {}))
        for module, content in sitecustomize.reached(self.counters).items():
            here = np.frombuffer(content, "u1") != 0
            if here.any():
                edges[module] = here | edges.get(module, False)
        self.tests[name] = before + spent, order or self.begun > begun, edges
        return result

    def pytest_sessionfinish(self):
        sitecustomize.write(self.tests)


def processor_seconds():
    """Of this process and its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config):
    if not config.getoption("numprocesses") or hasattr(config, "workerinput"):
        config.pluginmanager.register(Watch())
