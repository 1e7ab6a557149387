"""Parts that know nothing of memory: atomics, locks, sizes, sets of intervals, classes, text."""
