"""Records of callers and events: call sites, traces, the ledger of debug mode."""
