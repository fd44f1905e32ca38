"""All experiments in one go: what runs, what it shows of the paper, and the report."""
