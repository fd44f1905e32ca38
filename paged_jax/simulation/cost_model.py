"""How long an iteration takes: a roofline for a described GPU and model.

Kernels run one after another, and each takes as long as the slower of its memory traffic and its
arithmetic. Decodes and prefill chunks of an iteration go through the model in two passes, as this
framework's executor and the paper's system run them, so that both read the weights. A pass is

    matrices    max(weight bytes / bandwidth, 2 x weights x tokens / FLOP/s)
    attention   decoding: KV bytes / bandwidth; prefill: max of that and 4 x pairs x width / FLOP/s
    activations what every kernel of a layer reads and writes beside weights and KV, / bandwidth
    head        as matrices, for the rows that are sampled
    launches    kernels x launch time
    collectives two all-reduces a layer where the model is split among GPUs (tensor parallelism:
                weights, KV and arithmetic are divided evenly)

and an iteration adds copies of blocks, swaps over PCIe, and the time of the framework on the host.

Beyond data sheets the model assumes the factors below. They come from measurements of kernels and
of engines' hosts by others. None was fitted to a figure of the paper that experiments compare with,
except `block_overhead_slots`.
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

from paged_jax.scheduling.batch import ScheduledBatch
from paged_jax.simulation.setups import GPU, ModelShape


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts of one iteration's batch.

    A decode attends to all tokens of its sequence, including the token that it computes; a chunk of
    a prompt attends to the tokens before it and, causally, to its own.
    """

    num_decodes: int
    decode_context: int  # KV slots that all decodes together attend to
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
        """KV slots that the chunks attend to, including their own."""
        return sum(start + tokens for start, tokens in self.prefills)


class CostModel(Protocol):
    """Predicts the time of an iteration."""

    def step_s(self, work: StepWork) -> float:
        """Seconds from one iteration's start to the next one's; never negative."""

    def swap_s(self, num_blocks: int, block_size: int) -> float:
        """The part of these seconds that moves blocks between the device and the host's memory."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a data sheet's figure that is reached.

    memory: copies and reductions on A100s reach 88 to 90 % (NVIDIA's developer forum, "Trouble to
        reach peak bandwidth of A100", 2025; GTC talks quoted there).
    matrices: cuBLAS reaches 80 to 90 % on large matrices (Dao 2023, FlashAttention-2, section 1);
        prompts of a few hundred tokens fill its tiles less well.
    attention: FlashAttention, of the paper's year, reached 25 to 40 % in prefill (same source).
    host: pinned memory over PCIe 4.0 x16 moves about 25 of 32 GB/s.
    link: NCCL's ring all-reduce on NVLink reaches about 230 of an A100's 300 GB/s.
    """

    memory: float = 0.9
    matrices: float = 0.7
    attention: float = 0.33
    host: float = 0.78
    link: float = 0.77

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"efficiency {name} must be in (0, 1], got {getattr(self, name)}")


@dataclass(frozen=True)
class RooflineCost:
    """The cost model of this module's docstring. Times in seconds.

    iteration_overhead_s, sequence_overhead_s: the host's time for an iteration, and for each
        sequence in it, while the device waits. Of vLLM's time for Llama-3-8B on an H100 the GPU had
        38 % in mid-2024, the scheduler 29 % and the API server in the same process 33 % (its blog
        on v0.6.0): about 10 ms for a hundred sequences, and it was Python in 2023 as well. How much
        of it grows with the sequences is assumed.
    block_overhead_slots: the time that a block costs an attention kernel beyond its slots, in slots
        read. The paper's kernel took 20 to 26 % longer than a contiguous one at 16 slots a block
        (its Figure 18a): 3.7 slots. The model assumes the same for any block size.
    collective_latency_s: the latency of a small all-reduce (NCCL, 4 to 8 GPUs of a node).
    swap_copy_s: the time of each copy that a swap issues, beside its bytes.
    swap_copies_per_block: None: a key and a value copy in each layer, as the paper's system.
    """

    gpu: GPU
    model: ModelShape
    num_gpus: int = 1
    efficiency: Efficiency = Efficiency()
    iteration_overhead_s: float = 5e-3
    sequence_overhead_s: float = 1e-4
    block_overhead_slots: float = 3.7
    kernels_per_layer: int = 12  # norms, matrices, KV write, attention, activation, residuals
    collective_latency_s: float = 20e-6
    swap_copy_s: float = 5e-6
    swap_copies_per_block: int | None = None

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.model.num_kv_heads % self.num_gpus:
            raise ValueError(
                f"{self.model.name} has {self.model.num_kv_heads} KV heads, which {self.num_gpus} "
                "GPUs cannot share evenly"
            )
        for name in ("iteration_overhead_s", "sequence_overhead_s", "block_overhead_slots"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def contiguous(self) -> Self:
        """The same model for contiguous caches."""
        return replace(self, block_overhead_slots=0.0)

    def step_s(self, work: StepWork) -> float:
        return sum(self.parts(work).values())

    def parts(self, work: StepWork) -> dict[str, float]:
        """Seconds of each part of the iteration."""
        parts = dict.fromkeys(
            ("matrices", "attention", "activations", "head", "launches", "collectives"), 0.0
        )
        if work.num_decodes:
            attention = self._kv_s(work.decode_context, work)
            self._add_pass(parts, work.num_decodes, work.num_decodes, attention)
        if work.prefills:
            flops = self.gpu.flops * self.efficiency.attention * self.num_gpus
            pair_flops = 4 * self.model.num_layers * self.model.attention_size
            attention = max(
                self._kv_s(work.prefill_context, work), pair_flops * work.prefill_pairs / flops
            )
            self._add_pass(parts, work.num_prefill_tokens, work.num_first_samples, attention)
        block_bytes = self.model.kv_bytes_per_token * work.block_size / self.num_gpus
        # A copy reads and writes.
        parts["copies"] = 2 * work.num_copied_blocks * block_bytes / self._bandwidth
        parts["swaps"] = self.swap_s(work.num_swapped_blocks, work.block_size)
        num_seqs = work.num_decodes + len(work.prefills)
        parts["host"] = self.iteration_overhead_s + num_seqs * self.sequence_overhead_s
        return parts

    def swap_s(self, num_blocks: int, block_size: int) -> float:
        per_block = self.swap_copies_per_block
        num_copies = num_blocks * (2 * self.model.num_layers if per_block is None else per_block)
        num_bytes = num_blocks * block_size * self.model.kv_bytes_per_token / self.num_gpus
        bandwidth = self.gpu.host_bandwidth * self.efficiency.host
        return num_copies * self.swap_copy_s + num_bytes / bandwidth

    @property
    def _bandwidth(self) -> float:
        return self.gpu.memory_bandwidth * self.efficiency.memory

    def _kv_s(self, num_slots: int, work: StepWork) -> float:
        """Seconds to read the keys and values of `num_slots` slots."""
        num_read = num_slots * (1 + self.block_overhead_slots / work.block_size)
        return num_read * self.model.kv_bytes_per_token / (self._bandwidth * self.num_gpus)

    def _matrices_s(self, num_weights: int, num_tokens: int) -> float:
        num_bytes = num_weights * self.model.bytes_per_value
        flops = self.gpu.flops * self.efficiency.matrices
        read_s = num_bytes / self._bandwidth
        compute_s = 2 * num_weights * num_tokens / flops
        return max(read_s, compute_s) / self.num_gpus

    def _add_pass(
        self, parts: dict[str, float], num_tokens: int, num_rows: int, attention_s: float
    ) -> None:
        """Add the time of one pass of `num_tokens` through the model, sampled in `num_rows`."""
        model = self.model
        parts["matrices"] += self._matrices_s(
            model.num_layers * model.num_layer_weights, num_tokens
        )
        parts["attention"] += attention_s
        token_bytes = model.num_layers * self._activation_values * model.bytes_per_value
        parts["activations"] += num_tokens * token_bytes / (self._bandwidth * self.num_gpus)
        if num_rows:
            parts["head"] += self._matrices_s(model.num_head_weights, num_rows)
        num_kernels = self.kernels_per_layer * model.num_layers
        parts["launches"] += num_kernels * self.gpu.kernel_launch_s
        if self.num_gpus > 1:
            num_bytes = num_tokens * model.hidden_size * model.bytes_per_value
            ring = 2 * (self.num_gpus - 1) / self.num_gpus * num_bytes
            ring_s = ring / (self.gpu.link_bandwidth * self.efficiency.link)
            parts["collectives"] += 2 * model.num_layers * (self.collective_latency_s + ring_s)

    @property
    def _activation_values(self) -> int:
        """Values of one token that the kernels of a layer read and write beside weights and KV."""
        model = self.model
        hidden, wide = model.hidden_size, (1 + model.is_gated) * model.intermediate_size
        norms_and_residuals = 2 * 2 * hidden + 2 * 3 * hidden
        attention = 2 * hidden + 4 * model.attention_size + 2 * model.kv_size
        mlp = 2 * hidden + 2 * wide + 2 * model.intermediate_size
        return norms_and_residuals + attention + mlp
