"""Programs that a `Slab` must survive: growth, trims, limits, sources that fail, threads."""

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machines import step
from slab_model import SlabModel


class SlabMachine(SlabModel):
    """The rules; the model has the invariants."""

    @rule(nbytes=st.sampled_from([-1, -(2**63), 2**63 - 1, 2**63, 2**64, 2**200]))
    @step
    def alloc_impossible_size(self, nbytes):
        with self.refused(ValueError):
            self.allocator.alloc(nbytes)

    @rule()
    @step
    def alloc_an_item(self):
        self.take_an_item()

    def take_an_item(self):
        """Without arguments: a whole item."""
        handle = self.ask(self.allocator.alloc, 1)
        if handle is not None:
            self.check_reuse(handle.address, self.stride)
            self.admit(handle, self.item_size, self.align)

    @rule(count=st.integers(0, 8) | st.integers(0, 80))
    @step
    def alloc_many(self, count):
        blocks = self.ask(lambda: self.allocator.alloc_many(count), count)
        self.last_freed = None
        if blocks is not None:
            assert len(blocks) == count
            while blocks:
                self.admit(blocks[0], self.item_size, self.align)
                del blocks[0]

    @rule(shares=st.lists(st.integers(0, 4), max_size=6))
    @step
    def alloc_many_sizes(self, shares):
        sizes = [self.item_size * share // 4 for share in shares]
        blocks = self.ask(lambda: self.allocator.alloc_many(sizes), len(sizes))
        self.last_freed = None
        if blocks is not None:
            assert [block.nbytes for block in blocks] == sizes
            while blocks:
                self.admit(blocks[0], sizes.pop(0), self.align)
                del blocks[0]

    @rule(count=st.integers(0, 3), bad=st.sampled_from(["negative", "too large"]))
    @step
    def alloc_many_with_an_impossible_one(self, count, bad):
        last = -1 if bad == "negative" else self.item_size + 1
        with self.refused(ValueError):
            self.allocator.alloc_many([1] * count + [last])

    @rule()
    @step
    def fill_up(self):
        """All that the slabs have, and then one more."""
        for _ in range(self.capacity - self.tally.active):
            self.admit(self.ask(self.allocator.alloc, 1), self.item_size, self.align)
        event("full")
        self.last_freed = None
        self.take_an_item()

    @rule()
    @step
    def trim(self):
        before = self.allocator.stats()
        with self.only_bookkeeping():
            freed = self.allocator.trim()
        after = self.allocator.stats()
        assert freed == before.reserved_bytes - after.reserved_bytes >= 0
        assert after.capacity >= self.first and len(self.allocator.regions) == after.regions
        for region in self.allocator.regions[1:]:
            assert self.in_region(region), f"{region} has no live item, and was not given back"
        left = {region.address for region in self.allocator.regions}
        self.items = {address: n for address, n in self.items.items() if address in left}
        self.capacity = sum(self.items.values())
        if not self.mine():
            assert after.capacity == self.first and after.regions == 1
        if freed:
            event("trimmed")


class DebugSlabMachine(SlabMachine):
    """The same with freed memory filled and checked: no correct program is accused."""

    def make(self, **config):
        return super().make(**config, debug=True)
