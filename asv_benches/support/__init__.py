"""Parts of the benchmarks: rounds, worker processes, loops in C, results files."""
