"""What the executor asks of a constraint."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class TokenConstraint(Protocol):
    """Leaves out next tokens of one sequence, by rules that look at its output so far."""

    def restrict(self, output_token_ids: Sequence[int], allowed: np.ndarray) -> None:
        """Clear the bits of the tokens that may not follow `output_token_ids`.

        allowed: `u32[ceil(vocab_size / 32)]`; token t is bit t % 32 of word t // 32. The bits that
            are set on entry are those that other rules allow.

        The outputs of one call continue those of the call before, or are the same.
        """
        ...

    def branch(self) -> "TokenConstraint":
        """The constraint of a sequence that goes on from the same tokens."""
        ...
