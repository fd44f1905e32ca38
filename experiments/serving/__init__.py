"""The parts of `experiments.serve`: replay of a workload, its figures, its timeline."""
