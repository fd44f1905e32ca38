"""What `experiments.tail_latency` is made of."""
