"""What a serving system is made of beside its model: scheduler, memory, and their options."""

from dataclasses import dataclass

from paged_jax.config import EngineConfig, PreemptionMode
from paged_jax.memory.policies import make_memory
from paged_jax.scheduling.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class SystemConfig(EngineConfig):
    """A system to simulate: an engine's options, with vLLM's defaults at the paper's time.

    `num_slots`: KV slots (tokens) of its memory, which has as many whole blocks as fit in them; it
        counts, and not `num_blocks`.
    `prefill_sizes`: token counts that an executor pads prefill steps to; none if it pads nothing.
    """

    num_slots: int
    prefill_sizes: tuple[int, ...] = ()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    max_model_len: int = 2048
    preemption_mode: PreemptionMode = "recompute"
    swap_space_blocks: int = 0
    enable_prefix_caching: bool = False

    def scheduler(self) -> Scheduler:
        """An idle scheduler over empty memory; ValueError for what no system can be."""
        memory = make_memory(
            self.memory_policy,
            1 + self.num_slots // self.block_size,
            self.block_size,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            num_swap_blocks=self.swap_space_blocks,
        )
        return Scheduler(memory, self, eos_token_ids=(), prefill_sizes=self.prefill_sizes)
