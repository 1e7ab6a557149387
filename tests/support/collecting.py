"""What the garbage collector does to the objects of a cycle, in an order that a test chooses."""

import ctypes
import gc

TP_CLEAR = object.__basicsize__ + 8 * 22  # where a type has a pointer to its function of this name
clearing = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)


def function_of(kind):
    return ctypes.c_void_p.from_address(id(kind) + TP_CLEAR).value


class Frame:
    """Any object of a user's program."""


def garbage(make):
    """Of what `make` returns, in a cycle, all that the collector would take apart."""
    gc.collect()  # what others left
    frame = Frame()
    frame.itself, frame.thing = frame, make()
    del frame
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        found = gc.garbage[:]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return [thing for thing in found if function_of(type(thing)) and type(thing) is not Frame]


def collect_from(make, which):
    """Let the collector begin with one of these objects, by its number; how many there are."""
    things = garbage(make)
    many = len(things)
    if which < many:
        clearing(function_of(type(things[which])))(things[which])
    things.clear()
    gc.collect()
    return many
