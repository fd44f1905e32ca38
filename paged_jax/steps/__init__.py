"""The jitted steps over the paged KV cache: forward passes, sampling, attention, the cache."""
