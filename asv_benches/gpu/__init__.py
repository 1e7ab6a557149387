"""Memory of a GPU: blocks, copies and replays, beside CuPy, RMM, torch and the driver."""
