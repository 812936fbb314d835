"""A typed, CPU-only client for a running LMCache multiprocess server."""
