"""What the tests of this folder have in common: no garbage of other tests is collected in them."""

import gc

import pytest


@pytest.fixture(autouse=True)
def only_our_garbage():
    """Other tests' garbage would give memory back, and run Python code, in the middle of a test.

    What is mapped and closed is noted here, and a signal that strikes the callback of a weak
    reference is lost, since Python prints what such a callback raises.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
