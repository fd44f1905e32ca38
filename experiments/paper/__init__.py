"""What the experiments that redo the paper's figures share: set-ups, systems, simulated runs."""
