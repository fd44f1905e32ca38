"""What an iteration has to do, as far as its time depends on it."""

from dataclasses import dataclass
from typing import Self

from paged_jax.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts of one iteration's batch.

    A decode attends to all of its sequence's tokens, the one that it computes included; a chunk of
    a prompt to those before it and, causally, to itself.
    """

    num_decodes: int
    decode_context: int  # KV slots that the decodes attend to, all together
    prefills: tuple[tuple[int, int], ...]  # (start, tokens) of each chunk
    num_first_samples: int  # tokens sampled after prompts that are complete
    block_size: int
    num_copied_blocks: int = 0
    num_swapped_blocks: int = 0  # out to host memory, and in

    @classmethod
    def of(cls, batch: ScheduledBatch, block_size: int) -> Self:
        num_decodes = len(batch.decodes)
        return cls(
            num_decodes=num_decodes,
            decode_context=sum([len(seq.token_ids) for seq in batch.decodes]),
            prefills=tuple((chunk.start, chunk.num_tokens) for chunk in batch.prefills),
            num_first_samples=batch.num_samples - num_decodes if batch.prefills else 0,
            block_size=block_size,
            num_copied_blocks=len(batch.copies),
            num_swapped_blocks=len(batch.swap_outs) + len(batch.swap_ins),
        )

    @property
    def num_prefill_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefills)

    @property
    def prefill_pairs(self) -> int:
        """(query, key) pairs of the chunks' attention."""
        return sum(n * start + n * (n + 1) // 2 for start, n in self.prefills)

    @property
    def prefill_context(self) -> int:
        """KV slots that the chunks attend to, their own included."""
        return sum(start + tokens for start, tokens in self.prefills)
