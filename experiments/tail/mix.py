"""Long prompts among short requests that decode."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paged_jax.workloads import WorkloadRequest
from paged_jax.workloads.synthetic import VocabRange, random_token_ids


@dataclass(frozen=True)
class Mix:
    """Every `long_every`-th request has a long prompt; lengths in tokens."""

    num_requests: int
    long_every: int
    long_prompt: int
    long_output: int
    short_prompt: int  # mean; from half to one and a half of it, uniformly; likewise for outputs
    short_output: int

    @property
    def max_len(self) -> int:
        """The longest prompt and output together."""
        longest_short = 3 * (self.short_prompt + self.short_output) // 2
        return max(self.long_prompt + self.long_output, longest_short)

    def requests(self, vocab: VocabRange, seed: int) -> list[WorkloadRequest]:
        """Random tokens, no two prompts alike; all of fixed lengths, there at the start."""
        rng = np.random.default_rng(seed)
        found = []
        for index in range(self.num_requests):
            if index % self.long_every == self.long_every // 2:
                num_prompt, num_output = self.long_prompt, self.long_output
            else:
                num_prompt = _around(rng, self.short_prompt)
                num_output = _around(rng, self.short_output)
            prompt = tuple(random_token_ids(rng, num_prompt, vocab))
            found.append(WorkloadRequest(prompt, num_output))
        return found

    def num_long(self, requests: Sequence[WorkloadRequest]) -> int:
        return sum(request.num_prompt_tokens == self.long_prompt for request in requests)


def _around(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(max(1, mean // 2), max(1, 3 * mean // 2) + 1))
