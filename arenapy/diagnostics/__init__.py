"""Who called, and what happened: call sites, traces, the ledger of debug mode."""
