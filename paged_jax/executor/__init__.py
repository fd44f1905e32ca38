"""Runs what the scheduler decides: static-shaped arrays in, sampled tokens out."""
