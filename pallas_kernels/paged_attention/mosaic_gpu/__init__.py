"""Paged attention in Pallas Mosaic GPU: one kernel body, several ways to copy and multiply."""
