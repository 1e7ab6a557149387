"""Programs that a `Pool` must survive: sizes, limits, hooks, sources that fail, housekeeping."""

from exporting import LIVE, UNSURE
from helpers import PAGE, peek
from holding import HoldingMachine
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from machines import choice, drawn, needs, step
from pool_model import PoolModel
from pool_rules import BOUNDS, COARSE, KIB, MIB, interesting_sizes
from sources import GRANULE, IN_PLACE, Granules

import arenapy

KEEP = st.one_of(st.just(0), st.integers(0, 200 * KIB), st.integers(0, 8 * MIB))
LARGE = st.sampled_from(interesting_sizes(3 * MIB)).filter(lambda nbytes: nbytes > 32 * KIB)


class PoolMachine(PoolModel):
    """The rules; the model has the invariants."""

    # Rules: allocating -------------------------------------------------------------------------

    @rule(nbytes=st.sampled_from([-1, -(2**63), 2**63, 2**64 - 1, 2**64, 2**200]))
    @step
    def alloc_impossible_size(self, nbytes):
        with self.refused(ValueError):
            self.allocator.alloc(nbytes)

    @rule(nbytes=st.integers(2**50, 2**63 - 1))
    @step
    def alloc_more_than_there_is(self, nbytes):
        self.source.failing = True
        failures = self.source.failures
        before, kind = self.allocator.stats(), self.hook_kind
        self.hook_kind = kind and "refuses"
        self.hooked = False
        try:
            self.allocator.alloc(nbytes)
        except (MemoryError, ValueError) as error:  # near the top its block overflows
            assert str(nbytes) in str(error) or self.source.failures > failures
        else:
            raise AssertionError(f"served {nbytes} bytes")
        finally:
            self.source.failing, self.hook_kind = False, kind
        self.last_freed = None
        self.nothing_handed_out(before)

    @rule(
        nbytes=drawn("sizes"), align=st.sampled_from([None, 1, 64]), order=st.permutations(range(3))
    )
    @step
    def free_and_take_again(self, nbytes, align, order):
        """The commonest pair of calls: a block goes, and the next one is of its size."""
        serials = [self.request(nbytes, align) for _ in order[1:]]
        if None not in serials and all(serial in self.live for serial in serials):
            for index in order:
                if index < len(serials):
                    self.drop_everything(serials[index], False)
            again = self.request(nbytes, None)
            assert again is not None, "refused what had just been given back"

    @needs("sizes_asked")
    @rule(index=choice("sizes_asked"), count=st.integers(1, 4))
    @step
    def alloc_of_a_size_asked_before(self, index, count):
        for _ in range(count):
            self.request(self.sizes_asked[index], None)

    @rule(nbytes=st.integers(MIB // 2, 3 * MIB))
    @step
    def alloc_much(self, nbytes):
        """So that there are several regions, some of which touch."""
        self.request(nbytes, None)

    @rule(sizes=st.runner().flatmap(lambda m: st.lists(m.sizes, max_size=6)))
    @step
    def alloc_many(self, sizes):
        peak, allocated = self.tally.peak, self.tally.allocated
        peaks = [one.peak for one in self.by_class]
        blocks = self.ask(lambda: self.allocator.alloc_many(sizes), sizes)
        self.last_freed = None
        if blocks is None:
            return
        assert [block.nbytes for block in blocks] == sizes
        hooked, sizes = self.hooked, list(sizes)
        while blocks:
            self.admit(blocks[0], sizes.pop(0), None)
            del blocks[0]
        if hooked:  # part of them may have been there when the hook gave blocks back
            stats = self.allocator.stats()
            most = max(peak, allocated + self.tally.allocated)
            assert self.tally.peak <= stats.peak_bytes <= most
            self.tally.peak = stats.peak_bytes
            for one, tally, then in zip(stats.classes, self.by_class, peaks, strict=True):
                assert one.peak_bytes >= max(tally.peak, then)
                tally.peak = one.peak_bytes

    @rule(sizes=st.lists(st.sampled_from([8, 0, 5000, 100_000]), max_size=3))
    @step
    def alloc_many_with_an_impossible_one(self, sizes):
        with self.refused(ValueError):
            self.allocator.alloc_many([*sizes, -1])

    # Rules: growing ----------------------------------------------------------------------------

    @needs("live")
    @rule(serial=choice("live"), more=st.integers(0, 300) | st.integers(1, 8 * PAGE) | KEEP)
    @step
    def grow(self, serial, more):
        self.grow_block(serial, more)

    @rule(sizes=st.tuples(LARGE, LARGE).map(sorted), below=st.booleans())
    @step
    def grow_a_large_block(self, sizes, below):
        """Into what another one has left, or behind which there is one."""
        nbytes, more = sizes[0], sizes[1] - sizes[0]
        serials = [self.request(nbytes, None) for _ in range(2)]
        if None not in serials and all(serial in self.live for serial in serials):
            self.drop_everything(serials[1 - below], False)
            self.grow_block(serials[below], more)

    def grow_block(self, serial, more):
        block = self.live[serial]
        if block.root is None or block.released or block.orphan or self.hook_kind == "frees":
            return
        nbytes, before, owned = block.nbytes + more, self.allocator.stats(), self.listed(block)
        self.last_freed = None
        self.hook_calls.clear()
        try:
            grown = block.root.grow(nbytes)
        except (BufferError, *self.refusals) as error:
            self.hooked = bool(self.hook_calls)
            assert block.root.nbytes == block.nbytes and not block.root.closed
            assert block.has(LIVE) or block.has(UNSURE) or not isinstance(error, BufferError)
            self.nothing_handed_out(before)
            return
        assert grown.nbytes == nbytes
        if grown is block.root:
            event("grown in place")
            assert grown.address == block.start
            self.grew(block, nbytes, owned)
        else:
            event("grown by moving")
            assert not block.has(LIVE), "moved away from under an export"
            assert block.start + nbytes > owned.address + owned.nbytes, "moved without need"
            for offset, length in self.windows(block.nbytes):
                seen = peek(grown.address + offset, length)
                assert seen == bytes([block.fill]) * length, "contents lost"
            self.admit(grown, nbytes, block.align)
            if block.exported:
                block.released, block.handles[:] = True, [block.root]
            else:
                self.gone(serial)
            self.last_freed = None

    def listed(self, block):
        """What the pool says of its block."""
        return max(
            (info for info in self.allocator.blocks() if info.address <= block.start),
            key=lambda info: info.address,
        )

    def grew(self, block, nbytes, before):
        """In place: within its bytes, or as if it had been given back and taken again."""
        after = self.listed(block)
        assert after.address == before.address and after.nbytes >= before.nbytes
        assert block.start + nbytes <= after.address + after.nbytes, "grown past its bytes"
        block.nbytes = nbytes
        if after.nbytes > before.nbytes:
            self.went_back(block)
            block.size, block.asked, block.size_class = after.nbytes, *2 * [after.size_class]
            HoldingMachine.took(self, block)
            one = self.by_class[block.size_class]
            one.total += 1
            one.active += 1
            one.took(block.size)
        self.write(block)

    # Rules: housekeeping -----------------------------------------------------------------------

    @rule(keep=KEEP)
    @step
    def trim(self, keep):
        before = self.allocator.stats()
        with self.only_bookkeeping():
            freed = self.allocator.trim(keep)
        self.freed_elsewhere = self.freed_elsewhere and keep > 0
        after = self.allocator.stats()
        assert freed == before.reserved_bytes - after.reserved_bytes
        assert freed == before.idle_bytes - after.idle_bytes >= 0
        assert after.idle_bytes >= min(keep, before.idle_bytes), "more was given back than asked"
        if keep == 0:
            self.only_needed_regions_are_left()
        if freed:
            event("trimmed")

    @rule()
    @step
    def defragment(self):
        before = self.allocator.stats()
        with self.only_bookkeeping():
            done = self.allocator.defragment()
        after = self.allocator.stats()
        assert done.bytes == before.reserved_bytes - after.reserved_bytes >= 0
        assert done.milliseconds >= 0
        self.only_needed_regions_are_left()

    def only_needed_regions_are_left(self):
        for region in self.allocator.regions if self.counting else ():
            ends = region.address, region.address + region.nbytes
            used = any(ends[0] <= block.start < ends[1] for block in self.mine())
            assert used, f"{region} has nothing live in it, and was not given back"
        if not self.mine():
            stats = self.allocator.stats()
            assert stats.reserved_bytes == stats.largest_free_block == 0
            assert not (self.counting and stats.regions)

    @rule(
        counts=st.dictionaries(
            st.sampled_from(interesting_sizes(512 * KIB)), st.integers(0, 4), max_size=3
        )
    )
    @step
    def prewarm(self, counts):
        before, failures = self.allocator.stats(), self.source.failures
        wanted = [size for size, count in counts.items() for _ in range(count)]
        serve = self.must_serve(wanted)
        self.hook_calls.clear()
        peaks = [one.peak for one in self.by_class]
        kind, self.hook_kind = self.hook_kind, self.hook_kind and "refuses"
        try:
            self.allocator.prewarm(counts)
        except MemoryError as error:
            assert self.source.failures > failures or not serve, f"prewarm was refused: {error}"
            self.last_freed, self.hooked = None, False
            self.nothing_handed_out(before, len(wanted))
            return
        finally:
            self.hook_kind = kind
        self.last_freed = None
        after = self.allocator.stats()
        for name in ("total_allocations", "pool_hits", "active_allocations", "peak_bytes"):
            assert getattr(after, name) == getattr(before, name), f"prewarm changed {name}"
        assert [one.peak_bytes for one in after.classes] == peaks
        calls = self.source.calls
        for size in wanted:
            assert self.request(size, None) is not None, "refused what was prewarmed"
        assert self.source.calls == calls, "the source was asked for what was prewarmed"
        assert self.allocator.stats().pool_misses == before.pool_misses

    @rule()
    @step
    def reset_peak(self):
        self.allocator.reset_peak()
        for tally in (self.tally, *self.by_class):
            tally.peak = tally.allocated

    @rule(failing=st.booleans())
    @step
    def let_the_source_fail(self, failing):
        self.source.failing = failing

    # Invariants --------------------------------------------------------------------------------

    @invariant()
    def regions_that_were_given_back_are_gone(self):
        if self.allocator is None or not self.counting:
            return
        there = sum(self.source.sizes.values())
        held = sum(region.nbytes for region in self.allocator.regions)
        assert there >= held
        if len(self.live) == len(self.mine()):
            assert there == held, "a region that the pool does not have is still mapped"


class BigPoolMachine(PoolMachine):
    """The upper classes, in address space that is never touched but for samples."""

    most_bytes = BOUNDS[-1] + 2 * COARSE
    sizes = st.sampled_from(interesting_sizes(most_bytes)).filter(lambda n: n > MIB) | st.integers(
        0, most_bytes
    )
    configs = st.fixed_dictionaries(
        {
            "rounding": st.sampled_from(["step", "class"]),
            "initial_bytes": st.sampled_from([0, 0, 100 * MIB]),
            "skew": st.sampled_from([0, 1]),
            "adjacent": st.none(),
            "room": st.none() | st.sampled_from([64 * MIB, 1 << 30]),
            "fail_on": st.just(set()),
            "hook": st.sampled_from([None, "frees"]),
        }
    )


class HostPoolMachine(PoolMachine):
    """Address space reserved at once, and pages that come and go in it."""

    counting = False
    configs = st.fixed_dictionaries(
        {
            "rounding": st.sampled_from(["step", "class"]),
            "initial_bytes": st.sampled_from([0, 0, 1, 64 * KIB, 2 * MIB]),
            "room": st.none() | st.sampled_from([0, PAGE, 64 * KIB, MIB, 5 * MIB]),
            "source": st.sampled_from(IN_PLACE),
            "hook": st.sampled_from([None, "frees", "refuses"]),
        }
    )

    def make(self, source, **config):
        super().make(**config, skew=0, adjacent=None, fail_on=set())
        hook = self.on_oom if self.hook_kind else None
        return arenapy.Pool(
            self.max_bytes, source, config["initial_bytes"], None, hook, self.rounding
        )

    def pinned_bytes(self):
        """Where live blocks lie in the address space may leave no room between them."""
        return self.max_bytes if self.mine() else 0


class GranulesPoolMachine(HostPoolMachine):
    """Pages that come and go some at a time, as on a device."""

    def make(self, source, **config):
        PoolMachine.make(self, **config, skew=0, adjacent=None, fail_on=set())
        if self.max_bytes is not None:
            self.max_bytes = max(self.max_bytes, GRANULE)  # else there is never any memory
        hook = self.on_oom if self.hook_kind else None
        return arenapy.Pool(
            self.max_bytes, Granules(), config["initial_bytes"], None, hook, self.rounding
        )


class DebugPoolMachine(PoolMachine):
    """The same with freed memory filled and checked: no correct program is accused."""

    sizes = st.integers(0, 600) | st.integers(0, 12 * PAGE)

    def make(self, **config):
        return super().make(**config, debug=True)
