"""What benchmarks are made of: rounds, worker processes, loops in C, results files."""
