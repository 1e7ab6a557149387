"""What a test knows of a `Pool` without asking it: sizes, counts, what must be served.

What the contract leaves open is bounded, not copied: an alignment above 64 may cost padding, and
how much the pool takes from its source at a time is its own affair. A request must be served if
the source does not fail and its block would fit beside the regions that have live blocks, because
all the others can be given back; it must be refused if its block does not fit beside the live ones.
"""

from helpers import PAGE, round_up
from holding import HoldingMachine, Tally
from hypothesis import event
from hypothesis import strategies as st
from machines import DEFAULT_ALIGN
from pool_rules import CLASSES, KIB, MIB, block_of, class_of, interesting_sizes
from sources import Adjacent, Regions

import arenapy

SPAN = 32 * KIB  # up to here blocks share pages, so that a free page does not serve any size
COMMON = (None, 1, 64)  # alignments that cost nothing
GROWTH = 2 * MIB  # of a region
SLACK = 8 * SPAN  # what a request up to SPAN may take from the source at most: eight slots
COUNTED = ("total_allocations", "pool_hits", "pool_misses", "splits", "active_allocations")
SUMMED = (*COUNTED, "allocated_bytes", "pending_bytes", "idle_bytes", "reserved_bytes")


class HookError(Exception):
    """What an `on_oom` hook of the tests raises."""


class PoolModel(HoldingMachine):
    """The Pool of section 8: its arithmetic, and what must hold after every step."""

    refusals = (MemoryError, HookError)
    counting = True  # the source says when it is asked
    sizes = st.one_of(
        st.sampled_from(interesting_sizes(3 * MIB)),
        st.sampled_from(interesting_sizes(16 * KIB)),
        st.integers(0, 600),
        st.integers(0, 12 * PAGE),
        st.integers(0, 3 * MIB),
    )
    configs = st.fixed_dictionaries(
        {
            "rounding": st.sampled_from(["step", "class"]),
            "initial_bytes": st.sampled_from([0, 0, 1, PAGE, 64 * KIB, 2 * MIB, 3 * MIB + 100]),
            "skew": st.sampled_from([0, 0, 64, 1]),
            "adjacent": st.sampled_from([None, None, "up", "down"]),
            "room": st.none() | st.sampled_from([0, PAGE, 64 * KIB, MIB, 5 * MIB]),
            "fail_on": st.sets(st.integers(1, 6), max_size=3),
            "hook": st.sampled_from([None, None, "frees", "refuses", "raises", "lies"]),
        }
    )

    # Hooks -----------------------------------------------------------------------------------

    def __init__(self):
        super().__init__()
        self.sizes_asked = []
        self.freed_elsewhere = False  # may another thread's cache have a block above SPAN?

    def gone(self, serial, other_thread=False):
        block = super().gone(serial, other_thread)
        self.freed_elsewhere = self.freed_elsewhere or (other_thread and block.size > SPAN)
        return block

    def make(self, rounding, initial_bytes, skew, adjacent, room, fail_on, hook, debug=False):
        if adjacent:
            self.source = Adjacent(upwards=adjacent == "up")
        else:
            self.source = Regions(skew)
        # What a region that does not begin on a page loses at its ends.
        self.cut = 2 * PAGE if skew and not adjacent else 0
        self.rounding = rounding
        self.max_bytes = None
        if room is not None:
            self.max_bytes = round_up(max(initial_bytes + room, PAGE), PAGE) + self.cut
        self.by_class = [Tally() for _ in range(CLASSES)]
        self.hook_kind, self.hook_calls, self.lies = hook, [], 0
        pool = arenapy.Pool(
            self.max_bytes,
            self.source,
            initial_bytes,
            on_oom=self.on_oom if hook else None,
            rounding=rounding,
            debug=debug,
        )
        self.source.fail_on = {self.source.calls + number for number in fail_on}
        return pool

    def on_oom(self, nbytes):
        """The pool's hook; see `hook_kind`."""
        self.hook_calls.append(nbytes)
        event(f"on_oom {self.hook_kind}")
        if self.hook_kind == "raises":
            raise HookError("planned")
        if self.hook_kind == "lies":
            self.lies += 1
            return self.lies % 3 != 0
        mine = sorted(serial for serial, block in self.live.items() if not block.orphan)
        if self.hook_kind == "refuses" or not mine:
            return False
        self.drop_everything(mine[0], False)
        return True

    def size_of(self, nbytes):
        return block_of(nbytes, self.rounding)

    # The model -------------------------------------------------------------------------------

    def admit(self, handle, nbytes, align, start=None):
        self.align = DEFAULT_ALIGN if align is None else align
        return super().admit(handle, nbytes, align, start)

    def took(self, block):
        block.asked = block.size_class = class_of(block.nbytes)
        block.align = self.align
        if self.align > DEFAULT_ALIGN:
            block.plain = False
            self.padded(block)
        assert class_of(block.size) == block.size_class, "every block lies in one class"
        super().took(block)
        asked = self.by_class[block.asked]
        asked.total += 1
        asked.active += 1
        self.by_class[block.size_class].took(block.size)

    def padded(self, block):
        """How large a block of a large alignment is, the pool says itself, within bounds."""
        (info,) = [
            info
            for info in self.allocator.blocks()
            if info.address <= block.start < info.address + info.nbytes
        ]
        most = self.size_of(block.nbytes + self.align)
        assert block.size <= info.nbytes <= most, f"{info} for {block.nbytes} at {self.align}"
        block.size, block.size_class = info.nbytes, class_of(info.nbytes)
        counted = [one.total_allocations for one in self.allocator.stats().classes]
        more = [index for index in range(CLASSES) if counted[index] > self.by_class[index].total]
        block.asked = more[0]
        assert class_of(block.nbytes) <= block.asked <= block.size_class

    def went_back(self, block):
        super().went_back(block)
        self.by_class[block.asked].active -= 1
        self.by_class[block.size_class].allocated -= block.size

    def same_block(self, start, other, size):
        """Where in its first page a large block begins, the pool may choose anew each time."""
        return start // PAGE == other // PAGE if size > SPAN else start == other

    def pinned_bytes(self):
        """Of the regions that cannot be given back, because something in them is live."""
        starts = [block.start for block in self.mine()]
        return sum(
            region.nbytes
            for region in self.allocator.regions
            if any(region.address <= start < region.address + region.nbytes for start in starts)
        )

    def must_serve(self, sizes, align=None):
        """Whether a request has to be served, if the source does not fail."""
        if self.max_bytes is None:
            return True
        if len(sizes) > 1:  # each may come to lie in a region that was idle, or leave a rest unused
            need = self.allocator.stats().reserved_bytes + len(sizes) * GROWTH
        else:
            need = self.pinned_bytes()
        for nbytes in sizes:
            size = self.size_of(nbytes)
            need += self.cut + max(size, SLACK if size <= SPAN else 0)
            need += 0 if align in COMMON else 2 * align
        return need <= self.max_bytes

    def must_hit(self, nbytes, align, stats):
        """Whether a request has to be served from what is free."""
        last, size = self.last_freed, self.size_of(nbytes)
        # A pool that grows leaves other threads up to 8 MiB each (docs/pool.md).
        if align not in COMMON or (self.freed_elsewhere and size > SPAN):
            return False
        return (last is not None and last[1] == size) or SPAN < size <= stats.largest_free_block

    def must_refuse(self, sizes):
        if self.max_bytes is None:
            return False
        return self.tally.allocated + sum(map(self.size_of, sizes)) > self.max_bytes

    def nothing_handed_out(self, before, count=1):
        """After `count` requests were refused: free memory may have come or gone, and no more."""
        after = self.allocator.stats()
        kept = [*COUNTED, "pending_bytes"]
        if not self.hooked:
            kept += ["allocated_bytes", "peak_bytes"]
        else:
            kept.remove("active_allocations")
        for name in kept:
            assert getattr(after, name) == getattr(before, name), f"{name} after a refusal"
        # Of several, the first ones may have been served, and their memory be kept as idle.
        assert count > 1 or after.reserved_bytes <= before.reserved_bytes
        for one, then in zip(after.classes, before.classes, strict=True):
            for name in kept:
                assert getattr(one, name) == getattr(then, name), f"{name} of {one.index}"

    def ask(self, call, sizes, align=None):
        """`call()` allocates blocks of `sizes`; served or refused, the model knows what is right.

        Its result, or None if it was rightly refused.
        """
        before, calls, failures = self.allocator.stats(), self.source.calls, self.source.failures
        refuse = self.must_refuse(sizes) and self.hook_kind != "frees"
        serve = self.must_serve(sizes, align)
        hit = len(sizes) == 1 and self.must_hit(sizes[0], align, before)
        self.hook_calls.clear()
        try:
            result = call()
        except self.refusals as error:
            event("refused")
            self.hooked = bool(self.hook_calls)
            assert self.hooked or not isinstance(error, HookError)
            assert not hit, f"refused {sizes} at {align}, which was free: {error}"
            failed = self.source.failures > failures
            pinned = self.pinned_bytes()
            assert failed or not serve, f"refused {sizes} at {align}, {pinned} pinned: {error}"
            assert self.hooked == (self.hook_kind is not None), "the hook was not asked"
            self.last_freed = None
            self.nothing_handed_out(before, len(sizes))
            return None
        assert not refuse, f"served {sizes} where {self.max_bytes} bytes are all"
        self.hooked = bool(self.hook_calls)
        after = self.allocator.stats()
        hits, misses = after.pool_hits - before.pool_hits, after.pool_misses - before.pool_misses
        assert hits + misses == len(sizes)
        self.splits_are_hits(after.splits - before.splits, hits)
        if self.counting:
            called = self.source.calls > calls
            assert called or not misses, "a miss asks the source"
        else:
            called = after.reserved_bytes > before.reserved_bytes
        if not self.hooked and self.source.failures == failures:
            assert misses or not called, "a hit does not ask the source"
        if hit:
            assert not called and hits == 1, "this was free, and the source was asked"
            event("a sure hit")
        if before.reserved_bytes == 0 and sizes:
            assert misses, "something came out of nothing"
        event("miss" if misses else "hit")
        return result

    def request(self, nbytes, align):
        if nbytes not in self.sizes_asked[-8:]:
            self.sizes_asked = [*self.sizes_asked[-7:], nbytes]
        handle = self.ask(lambda: self.allocate(self.allocator, nbytes, align), [nbytes], align)
        if handle is None:
            return None
        if not self.hooked and align in COMMON:
            self.check_reuse(handle.address, self.size_of(nbytes))
        self.last_freed = None
        return self.admit(handle, nbytes, align)

    def request_array(self, call, nbytes):
        array = self.ask(call, [nbytes])
        self.last_freed = None
        return array

    # Invariants ------------------------------------------------------------------------------

    def look(self):
        super().look()
        stats = self.allocator.stats()
        reserved = sum(region.nbytes for region in self.allocator.regions)
        assert stats.reserved_bytes <= reserved
        if self.counting and not self.cut:
            assert stats.reserved_bytes == reserved, "some of what was taken is nowhere"
        assert self.max_bytes is None or stats.reserved_bytes <= self.max_bytes
        self.shares_are_what_they_say(stats)
        for one, tally in zip(stats.classes, self.by_class, strict=True):
            assert one.total_allocations == tally.total, one.index
            assert one.active_allocations == tally.active, one.index
            assert one.allocated_bytes == tally.allocated, one.index
            assert one.peak_bytes == tally.peak, one.index
            self.shares_are_what_they_say(one)
        for name in SUMMED:
            total = sum(getattr(one, name) for one in stats.classes)
            assert total == getattr(stats, name), f"{name} of the classes do not add up"
        largest = max(one.largest_free_block for one in stats.classes)
        assert largest == stats.largest_free_block

    def shares_are_what_they_say(self, stats):
        assert stats.pool_hits + stats.pool_misses == stats.total_allocations
        parts = stats.allocated_bytes + stats.pending_bytes + stats.idle_bytes
        assert parts == stats.reserved_bytes
        self.splits_are_hits(stats.splits, stats.pool_hits)
        total, free, largest = stats.total_allocations, stats.idle_bytes, stats.largest_free_block
        assert stats.hit_rate == (stats.pool_hits / total if total else 0.0)
        self.largest_is_free(largest, free)
        assert stats.fragmentation == (1 - largest / free if free else 0.0)

    def splits_are_hits(self, splits, hits):
        assert 0 <= splits <= hits, "a split is a kind of hit"

    def largest_is_free(self, largest, free):
        assert largest <= free and (largest > 0) == (free > 0)

    def listed_as(self, info, block):
        assert info.size_class == block.size_class

    def blocks_are_listed(self):
        super().blocks_are_listed()
        idle = {}
        for info in self.allocator.blocks():
            assert info.size_class == class_of(info.nbytes), info
            if info.state == "idle":
                idle[info.size_class] = idle.get(info.size_class, 0) + info.nbytes
        for one in self.allocator.stats().classes:
            assert one.idle_bytes == idle.get(one.index, 0), f"idle bytes of class {one.index}"
