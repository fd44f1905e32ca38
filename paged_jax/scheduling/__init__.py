"""Who computes what in each iteration: requests, batches and the scheduler. No jax."""
