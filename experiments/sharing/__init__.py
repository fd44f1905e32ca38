"""Parts of the experiments on sharing: what they ask, what they simulate, what they measure."""
