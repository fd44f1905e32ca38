"""What a serving system is made of beside its model: scheduler, memory, and their limits."""

from dataclasses import dataclass

from paged_jax.memory.policies import make_memory
from paged_jax.scheduling.preemption import PreemptionMode
from paged_jax.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class SystemConfig:
    """A system to simulate; names as in `paged_jax.Engine`, defaults as vLLM's at the paper's time.

    `num_slots`: KV slots (tokens) of its memory, which is as many whole blocks as fit in them.
    `prefill_sizes`: what an executor fills prefill steps up to; none where it has no need to.
    """

    num_slots: int
    memory_policy: str = "paged"
    scheduling_policy: str = "fcfs"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    max_model_len: int = 2048
    max_prefill_seqs: int = 16
    prefill_sizes: tuple[int, ...] = ()
    enable_chunked_prefill: bool = True
    target_inter_token_s: float | None = None
    max_num_waiting: int | None = None
    preemption_mode: PreemptionMode = "recompute"
    swap_space_blocks: int = 0
    enable_prefix_caching: bool = False
    watermark: float = 0.01

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
        return Scheduler(
            memory,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_prefill_seqs=self.max_prefill_seqs,
            eos_token_ids=(),
            watermark=self.watermark,
            prefill_sizes=self.prefill_sizes,
            enable_prefix_caching=self.enable_prefix_caching,
            policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode,
            enable_chunked_prefill=self.enable_chunked_prefill,
            target_inter_token_s=self.target_inter_token_s,
            max_num_waiting=self.max_num_waiting,
        )
