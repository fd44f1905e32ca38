"""Parts of the experiments that put the simulator beside the real engine."""
