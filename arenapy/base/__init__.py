"""What knows nothing of memory: atomics, locks, sizes, sets of intervals, classes, text."""
