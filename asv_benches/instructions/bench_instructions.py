"""Instructions of one operation over commits, beside its peers: what no busy machine blurs.

All counts of a commit come from one run under callgrind (counts.py). Repeated, they differ by
0.2 % at most, so that a regression of 2 % is seen.

What this does not show: time. See the same names in bench_latency, bench_export and bench_c.
"""

from asv_benches.instructions import counts as instructions
from asv_benches.support.rounds import named, version


def setup_cache():
    """{way: instructions}; what was not counted is not in it."""
    if reason := instructions.can_count():
        return {"": reason}
    return instructions.count().found


setup_cache.timeout = 1200


def counted(name, group):
    """An asv class of that name: a graph with a line for each way of a group."""

    def setup(self, counts, way):
        if way not in counts:
            raise NotImplementedError(counts.get("", "not here, or not in this commit"))

    @named(f"Instructions of {group.title}", "instructions", version=version(group.ways))
    def track_instructions(self, counts, way):
        """Look it up."""
        return round(counts[way], 2)

    return type(
        name,
        (),
        {
            "__doc__": f"asv: instructions of {group.title}.",
            "params": tuple(group.ways),
            "param_names": ("way",),
            "setup": setup,
            "track_instructions": track_instructions,
        },
    )


# Not those of a simulated driver: it is that of the tests here, and not of the commit's. Nor what
# looks at all of a pool: regressions.py compares it, and the results of earlier commits lack it.
NOT_SHOWN = ("Stream", "Whole")
ASV = {name: group for name, group in instructions.GROUPS.items() if name not in NOT_SHOWN}
globals().update({name: counted(name, group) for name, group in ASV.items()})
