"""Threads that take turns at calls of the simulated driver, in an order that a test draws.

One thread runs at a time. Before each of its driver calls it may have to let another one go on
first, which then runs as far as its own next call: so whatever a program does between two calls of
the driver, another one may do there, the same each time. Only a thread that waits for something
else than its turn (a lock that another one has) is left behind, after MOMENT.
"""

import itertools
import threading

MOMENT = 0.005  # seconds


class Turns:
    """`order`: before each driver call, over and over: how many threads on the next turn is."""

    def __init__(self, driver, order, device=0):
        self.driver, self.device = driver, device
        self.order = itertools.cycle(order)
        self.changed = threading.Condition()
        self.waiting = []  # threads, the one whose turn it is first
        self.errors = []

    def run(self, *programs):
        """Each in a thread of its own, until all have ended; raise what one of them raised."""
        threads = [threading.Thread(target=self._body, args=(one,)) for one in programs]
        self.waiting = list(threads)
        self.driver.before_call = self._before_call
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        self.driver.before_call = None
        if self.errors:
            raise self.errors[0]

    def _body(self, program):
        try:
            with self.driver.on(self.device):
                self._await_turn()
                program()
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self.changed:
                self.waiting.remove(threading.current_thread())
                self.changed.notify_all()

    def _before_call(self, name):
        if threading.current_thread() not in self.waiting:  # the test's own, or it has ended
            return
        with self.changed:
            further = next(self.order) % len(self.waiting)
            self.waiting = self.waiting[further:] + self.waiting[:further]
            self.changed.notify_all()
        if further:
            self._await_turn()

    def _await_turn(self):
        me = threading.current_thread()
        with self.changed:
            while self.waiting[0] is not me:
                before = list(self.waiting)
                if not self.changed.wait(MOMENT) and self.waiting == before:
                    self.waiting.append(self.waiting.pop(0))  # it waits for one of us, perhaps
                    self.changed.notify_all()
