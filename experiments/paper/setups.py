"""The models, GPUs and systems that the paper compares (Kwon et al., table 1 and section 6.1)."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields

from paged_jax.memory.sizing import room_for_kv
from paged_jax.models.config import ModelConfig
from paged_jax.simulation.cost_model import CostModel, RooflineCost
from paged_jax.simulation.run import SystemConfig
from paged_jax.simulation.setups import GPU, ModelShape, find_gpu, find_model_shape

GIB = 2**30
# The paper names no limit of running sequences: memory is what it compares.
MAX_NUM_SEQS = 1024

# Models on GPUs


def shape_of(config: ModelConfig, bytes_per_value: int) -> ModelShape:
    """A Llama-family model as the cost model sees it."""
    names = {field.name for field in fields(ModelShape)} & {field.name for field in fields(config)}
    return ModelShape(
        **{name: getattr(config, name) for name in names},
        max_model_len=config.max_position_embeddings,
        is_gated=True,
        has_tied_embeddings=config.tie_word_embeddings,
        bytes_per_value=bytes_per_value,
    )


@dataclass(frozen=True)
class Deployment:
    """A model on GPUs, and the KV slots that they hold beside it."""

    model: ModelShape
    gpu: GPU
    num_gpus: int
    num_slots: int

    @property
    def name(self) -> str:
        return f"{self.model.name}, {self.num_gpus} x {self.gpu.name}"

    @property
    def memory_bytes(self) -> int:
        return self.num_gpus * self.gpu.memory_bytes


@dataclass(frozen=True)
class Setup(Deployment):
    """A row of table 1, of which `kv_gib` and `paper_num_slots` are as the paper prints them.

    share: of the GPUs' memory, for weights and KV; taken as a property of the kind of GPU. It is
        that of the first row with that GPU, by the row's own figures; the others follow. OPT-66B's
        own would be too small: its row says 21 GB, in which 9.6K slots fit, and 9.7K slots, which
        take 21.3 GiB. The 21.35 GiB that follow from OPT-13B's row agree with both.
    kv_bytes: what weights leave of that share.
    kv_gib: its memory for KV, which the paper calls GB and rounds to whole ones.
    """

    share: float
    kv_bytes: int
    kv_gib: int
    paper_num_slots: int


def _table_1(*rows: tuple[str, str, int, int, int]) -> Iterator[Setup]:
    """rows: model, kind of GPU, GPUs, `kv_gib` and `paper_num_slots`."""
    shares: dict[GPU, float] = {}
    for model_name, gpu_name, num_gpus, kv_gib, paper_num_slots in rows:
        model, gpu = find_model_shape(model_name), find_gpu(gpu_name)
        memory_bytes = num_gpus * gpu.memory_bytes
        share = shares.setdefault(gpu, (model.weight_bytes + kv_gib * GIB) / memory_bytes)
        kv_bytes = room_for_kv(memory_bytes, model.weight_bytes, share=share)
        num_slots = kv_bytes // model.kv_bytes_per_token
        yield Setup(model, gpu, num_gpus, num_slots, share, kv_bytes, kv_gib, paper_num_slots)


SETUPS = {
    setup.model.name: setup
    for setup in _table_1(
        ("OPT-13B", "A100-40GB", 1, 12, 15_700),
        ("OPT-66B", "A100-40GB", 4, 21, 9_700),
        ("OPT-175B", "A100-80GB", 8, 264, 60_100),
    )
}
OPT_13B = SETUPS["OPT-13B"]  # most of the paper's figures are of it

# Systems, which differ in memory and batching alone


@dataclass(frozen=True)
class System:
    """`label` is the paper's name of the system."""

    name: str
    label: str
    memory_policy: str
    scheduling_policy: str = "fcfs"

    def config(
        self, deployment: Deployment, block_size: int, *, enable_prefix_caching: bool = False
    ) -> SystemConfig:
        return SystemConfig(
            num_slots=deployment.num_slots,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=deployment.model.max_model_len,
            memory_policy=self.memory_policy,
            scheduling_policy=self.scheduling_policy,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
        )

    def cost(self, deployment: Deployment) -> CostModel:
        """Step times; contiguous systems have contiguous attention kernels."""
        cost = RooflineCost(deployment.gpu, deployment.model, deployment.num_gpus)
        return cost if self.memory_policy == "paged" else cost.contiguous


SYSTEMS = {
    system.name: system
    for system in (
        System("faster_transformer", "FasterTransformer", "orca_max", "static"),
        System("orca_max", "Orca (Max)", "orca_max"),
        System("orca_pow2", "Orca (Pow2)", "orca_pow2"),
        System("orca_oracle", "Orca (Oracle)", "orca_oracle"),
        System("paged", "vLLM", "paged"),
    )
}
ORCA = ("orca_max", "orca_pow2", "orca_oracle")


def chosen_systems(names: Collection[str]) -> list[System]:
    """The systems of these names, in the order of `SYSTEMS`."""
    return [system for name, system in SYSTEMS.items() if name in names]
