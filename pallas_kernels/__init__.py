"""Paged attention kernels. Imports JAX alone, never the framework around it."""
