"""The kernel lab's scripts: checks, latency, tuning."""
