"""The parts of `experiments.compare`: two engines, their outputs side by side, paired ratios."""
