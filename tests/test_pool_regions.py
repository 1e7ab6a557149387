"""A Pool over regions of which none begins on a page, asked for by two threads at once."""

import threading

import pytest
from sources import Regions
from support import PAGE

from arenapy import Pool

MIB = 1 << 20


class InBetween(Regions):
    """Lets somebody else do something while the first region is being made."""

    between = None

    def region(self, nbytes):
        region = super().region(nbytes)
        if self.between is not None:
            between, self.between = self.between, None
            thread = threading.Thread(target=between)
            thread.start()
            thread.join()
        return region


@pytest.mark.parametrize("skew", [1, 64, PAGE - 1])
def test_another_thread_learns_first_that_they_need_a_page_more(skew):
    """This one's region was asked for without it: it has to ask again."""
    source, theirs = InBetween(skew=skew), []
    pool = Pool(64 * MIB, source)
    source.between = lambda: theirs.append(pool.alloc(4 * MIB))
    mine = pool.alloc(4 * MIB)
    assert mine.nbytes == theirs[0].nbytes == 4 * MIB
    mine.fill(1)
    theirs[0].fill(2)
    assert set(bytes(mine)) == {1}
    pool.check()
    calls = source.calls
    other = pool.alloc(4 * MIB)
    assert source.calls == calls + 1, "by now they are all asked for with it"
    del other
