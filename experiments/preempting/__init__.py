"""What `experiments.preemption` is made of."""
