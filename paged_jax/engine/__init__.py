"""The engine: its public API, the loop, delivery to callers, pipelining and recovery."""
