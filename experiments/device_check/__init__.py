"""The parts of `experiments.gpu_check`: what it runs in which order, what is left on disk."""
