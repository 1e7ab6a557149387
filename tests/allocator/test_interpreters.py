"""The same promises whatever the interpreter was told, and a clear word in a second one."""

import pytest

pytestmark = [pytest.mark.sampled, pytest.mark.no_sanitizer]

TOUR = """
    import gc, os, pickle, sys
    import numpy as np
    import arenapy
    from arenapy import Bump, Existing, Host, Pool, Shared, Slab
    from arenapy.bump import check as bump_check

    kept = []
    for source in (Host, Shared, lambda: Existing(bytearray(1 << 20))):
        for make in (lambda s: Bump(1 << 18, s), lambda s: Slab(4096, 16, s),
                     lambda s: Pool(1 << 20, s, 1 << 18), lambda s: Bump(1 << 18, s, debug=True),
                     lambda s: Slab(4096, 16, s, debug=True)):
            one = make(source())
            block = one.alloc(1000)
            block.fill(7)
            array = np.asarray(block)
            shared = np.from_dlpack(block.view((-1,), "u1"))
            copy = pickle.loads(pickle.dumps(block))
            other = one.zeros(100)
            inner = None
            if isinstance(one, Bump):
                with one.scope():
                    one.alloc(5)
                    inner = one.empty(20)
                one.reset()
            sevens = bytes([7]) * 1000
            if not sevens == array.tobytes() == shared.tobytes() == bytes(copy):
                sys.exit("what somebody sees has changed")
            if other.any():
                sys.exit("zeros are not zero")
            one.check()
            if not one.debug:                # it reports what is live at exit
                kept.append((array, shared, other, copy, one if len(kept) % 2 else None))
            del array, shared, other, copy, block, inner, one
    with arenapy.numpy_memory(Pool()):
        kept.append(np.arange(1 << 16) * 2)
    try:
        bump_check._verify_figures([], [1, 0, 0, 0, 0, 0])
    except AssertionError:
        pass
    else:
        sys.exit("check() does not check")
    watched = Pool(debug=True)
    block = watched.alloc(100)
    address = block.address
    block.release()
    import ctypes
    ctypes.memset(address, 1, 10)
    try:
        watched.check()
    except arenapy.MemoryCorruption:
        pass
    else:
        sys.exit("debug mode does not see a write to free memory")
    if os.fork() == 0:
        kept[0][0][:] = 1
        os._exit(0)
    if os.wait()[1] or kept[0][0][0] != 7:
        sys.exit("a child's copy is not its own")
    cycle = [kept]
    cycle.append(cycle)
"""

MODES = {
    "-O": (["-O"], {}),
    "-OO": (["-OO"], {}),
    "-X dev": (["-X", "dev"], {}),
    "debug malloc": ([], {"PYTHONMALLOC": "debug"}),
    "malloc": ([], {"PYTHONMALLOC": "malloc"}),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_tour(mode, run_script):
    flags, env = MODES[mode]
    run_script(TOUR, flags=flags, env=env)


def test_testing_says_that_it_needs_assert(run_script):
    run_script(
        """
        try:
            import arenapy.testing
        except ImportError as error:
            assert_left_out = "without -O" in str(error)
        if not assert_left_out:
            raise SystemExit("it would find nothing")
        """,
        flags=["-O"],
    )


SECOND = """
    import sys
    try:
        import _interpreters as interpreters                # 3.13 and later
        run = interpreters.exec
    except ImportError:
        import _xxsubinterpreters as interpreters
        run = interpreters.run_string
    code = '''if True:
        try:
            import arenapy
        except ImportError as error:
            if "main interpreter only" not in str(error):
                raise
            if "numpy" in sys.modules:
                raise SystemError("NumPy is loaded here, and nowhere else from now on")
        else:
            raise SystemError("it was imported")
    '''
    code = "import sys\\n" + code

    def second():
        number = interpreters.create()
        if run(number, code) is not None:
            sys.exit("it was not refused, or not by its name")
        interpreters.destroy(number)
"""


@pytest.mark.parametrize("order", ["first", "between", "twice", "in a thread", "at exit"])
def test_a_second_interpreter(order, run_script):
    """It is refused, and the main one has all that it had, and all that it wants."""
    use = """
    import arenapy
    arena = arenapy.Bump(1 << 16)
    array = arena.zeros(100)
    """
    after = """
    array += 1
    arena.check()
    assert array.sum() == 100
    """
    thread = (
        "\n    import threading\n    t = threading.Thread(target=second)\n    t.start(); t.join()\n"
    )
    call = "\n    second()\n"
    script = {
        "first": call + use,
        "between": use + call,
        "twice": call + use + call + call,
        "in a thread": use + thread,
        "at exit": use + "\n    import atexit\n    atexit.register(second)\n",
    }[order]
    run_script(SECOND + script + after)
