"""What a test knows of a `Slab` without asking it: strides, counts, growth, what must be served."""

from dataclasses import replace

from helpers import PAGE, round_up
from holding import HoldingMachine
from hypothesis import event
from hypothesis import strategies as st
from machines import DEFAULT_ALIGN
from sources import Adjacent, Regions

import arenapy


class SlabModel(HoldingMachine):
    """The Slab of section 7.

    Items are `stride` bytes apart. When all are live, a slab of as many items as all before is
    added, at most up to `max_count`; `trim` gives back slabs without a live item but the first.
    """

    sizes = st.runner().flatmap(
        lambda m: st.sampled_from(
            [0, 1, m.item_size // 2, m.item_size - 1, m.item_size, m.item_size + 1, m.stride + 1]
        )
    )
    alignments = st.sampled_from([None, None, 1, 2, 8, 64, 128, PAGE, 2 << 20])
    configs = st.fixed_dictionaries(
        {
            "item_size": st.one_of(st.integers(1, 200), st.sampled_from([PAGE, 5000, 64, 1])),
            "count": st.one_of(st.integers(1, 5), st.integers(1, 70)),
            "align": st.sampled_from([None, None, 1, 8, 16, 64, 256, PAGE]),
            "room": st.none() | st.integers(0, 70),
            "skew": st.sampled_from([0, 0, 64, 1]),
            "adjacent": st.sampled_from([None, None, "up", "down"]),
            "fail_on": st.sets(st.integers(2, 4), max_size=2),
        }
    )

    # Hooks -----------------------------------------------------------------------------------

    def make(self, item_size, count, align, room, skew, adjacent, fail_on, debug=False):
        if adjacent:
            self.source = Adjacent(upwards=adjacent == "up", fail_on=fail_on)
        else:
            self.source = Regions(skew, fail_on)
        self.item_size, self.first = item_size, count
        self.align = DEFAULT_ALIGN if align is None else align
        self.stride = round_up(item_size, self.align)
        self.max_count = count if room is None else count + room
        self.capacity = count
        limit = None if room is None else self.max_count
        slab = arenapy.Slab(item_size, count, self.source, align, limit, debug=debug)
        assert (slab.item_size, slab.stride, slab.capacity) == (item_size, self.stride, count)
        self.items = {slab.regions[0].address: count}  # of each region
        return slab

    def size_of(self, nbytes):
        return self.stride

    def snapshot(self):
        stats, *rest = super().snapshot()
        return replace(stats, metadata_bytes=0), *rest  # tables do not shrink when a source fails

    # The model -------------------------------------------------------------------------------

    def room(self):
        """Items that can be served if the source does not fail."""
        return self.max_count - self.tally.active

    def grow_for(self, count):
        """What the capacity becomes when `count` more items are wanted."""
        new = [r.address for r in self.allocator.regions if r.address not in self.items]
        while self.capacity < self.tally.active + count:
            more = min(self.capacity, self.max_count - self.capacity)
            self.items[new.pop(0)] = more
            self.capacity += more
            event("a further slab")
        assert not new, "a region that no item was wanted of"

    def grew_less(self):
        """The source failed on the way: what is new has fewer items, or is in several slabs."""
        starts = [info.address for info in self.allocator.blocks()]
        for region in self.allocator.regions:
            inside = range(region.address, region.address + region.nbytes)
            self.items.setdefault(region.address, sum(start in inside for start in starts))
        self.capacity = self.allocator.capacity

    def ask(self, call, count):
        """`call()` allocates `count` items; its result, or None if it was rightly refused."""
        before, failures, calls = self.snapshot(), self.source.failures, self.source.calls
        free = self.capacity - self.tally.active
        try:
            result = call()
        except MemoryError as error:
            event("refused")
            failed = self.source.failures > failures
            assert failed or count > self.room(), f"refused {count} with {self.room()} free"
            assert count > free, f"refused {count} with {free} free: {error}"
            assert self.snapshot() == before, "a refused request changed something"
            return None
        assert count <= self.room(), f"served {count} with {self.room()} free"
        if self.source.failures > failures:  # then it may have taken less
            least = self.tally.active + count
            assert least <= self.allocator.capacity <= 2 * max(self.capacity, least)
            self.grew_less()
        else:
            self.grow_for(count)
        assert (self.source.calls > calls) == (count > free), "the source is for growth"
        return result

    def fits(self, nbytes, align):
        """Whether `nbytes` at `align` are an item; None: only if it happens to lie well."""
        if nbytes > self.item_size:
            return False
        return True if align is None or self.align % align == 0 else None

    def request(self, nbytes, align):
        fits = self.fits(nbytes, align)
        if fits is False:
            with self.refused(ValueError):
                self.allocate(self.allocator, nbytes, align)
            return None
        if fits is None:
            before = self.snapshot()
            try:
                handle = self.ask(lambda: self.allocate(self.allocator, nbytes, align), 1)
            except ValueError:
                event("an alignment that items do not have")
                assert self.snapshot() == before
                return None
        else:
            handle = self.ask(lambda: self.allocate(self.allocator, nbytes, align), 1)
        if handle is None:
            return None
        if fits:
            self.check_reuse(handle.address, self.stride)
        self.last_freed = None
        return self.admit(handle, nbytes, self.align if align is None else align)

    def request_array(self, call, nbytes):
        if nbytes > self.item_size or self.align % DEFAULT_ALIGN:
            # Arrays are 64-byte aligned: in packed items, some are and some are not.
            if nbytes > self.item_size:
                with self.refused(ValueError):
                    call()
            return None
        self.last_freed = None
        return self.ask(call, 1)

    # Invariants ------------------------------------------------------------------------------

    def look(self):
        super().look()
        stats, slab = self.allocator.stats(), self.allocator
        assert stats.capacity == slab.capacity == self.capacity
        assert slab.count == self.tally.active <= self.capacity
        assert (stats.item_size, stats.stride) == (self.item_size, self.stride)
        assert stats.reserved_bytes == sum(region.nbytes for region in slab.regions)
        assert stats.idle_bytes == (self.capacity - self.tally.active) * self.stride
        parts = (stats.allocated_bytes, stats.pending_bytes, stats.idle_bytes, stats.padding_bytes)
        assert sum(parts) == stats.reserved_bytes and min(parts) >= 0
        assert self.capacity * self.stride == stats.reserved_bytes - stats.padding_bytes
        base = {
            r.address: min((b.start for b in self.in_region(r)), default=0) for r in slab.regions
        }
        for region in slab.regions:
            for block in self.in_region(region):
                assert (block.start - base[region.address]) % self.stride == 0, "off the stride"

    def in_region(self, region):
        end = region.address + region.nbytes
        return [block for block in self.mine() if region.address <= block.start < end]
