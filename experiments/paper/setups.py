"""The models and GPUs of the paper (Kwon et al., table 1), and how many KV slots they had."""

from dataclasses import dataclass

from paged_jax.memory.sizing import room_for_kv
from paged_jax.simulation.setups import GPU, ModelShape, find_gpu, find_model_shape

GIB = 2**30


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


@dataclass(frozen=True)
class Setup:
    """A row of table 1. `kv_gib`: its memory for KV, which it calls GB and rounds to whole ones."""

    model_name: str
    gpu_name: str
    num_gpus: int
    kv_gib: int
    paper_num_slots: int  # what the paper makes of it, as printed
    trace_s: int  # length of the traces served (section 6.1)

    @property
    def model(self) -> ModelShape:
        return find_model_shape(self.model_name)

    @property
    def gpu(self) -> GPU:
        return find_gpu(self.gpu_name)

    @property
    def memory_bytes(self) -> int:
        return self.num_gpus * self.gpu.memory_bytes

    @property
    def table_share(self) -> float:
        """Share of the GPUs' memory that weights and KV take, by the row's own figures."""
        return (self.model.weight_bytes + self.kv_gib * GIB) / self.memory_bytes

    @property
    def share(self) -> float:
        """Share of the GPUs' memory for weights and KV, taken as a property of the kind of GPU.

        It is the `table_share` of the first row with that GPU; the others follow from it. Of
        OPT-66B's row it would come out too small: it says 21 GB, in which 9.6K slots fit, and 9.7K
        slots, which take 21.3 GiB. The 21.35 GiB that follow from OPT-13B's row agree with both.
        """
        return next(s for s in SETUPS.values() if s.gpu_name == self.gpu_name).table_share

    @property
    def kv_bytes(self) -> int:
        """Memory for KV: what weights leave of that share."""
        return room_for_kv(self.memory_bytes, self.model.weight_bytes, share=self.share)

    @property
    def num_slots(self) -> int:
        return self.kv_bytes // self.model.kv_bytes_per_token

    @property
    def deployment(self) -> Deployment:
        return Deployment(self.model, self.gpu, self.num_gpus, self.num_slots)


SETUPS = {
    setup.model_name: setup
    for setup in (
        Setup("OPT-13B", "A100-40GB", 1, 12, 15_700, 3600),
        Setup("OPT-66B", "A100-40GB", 4, 21, 9_700, 3600),
        Setup("OPT-175B", "A100-80GB", 8, 264, 60_100, 900),
    )
}


def find_setup(model_name: str) -> Setup:
    """The paper's set-up of this model; ValueError names those there are."""
    if model_name not in SETUPS:
        raise ValueError(f"the paper has no set-up of {model_name!r}; it has {', '.join(SETUPS)}")
    return SETUPS[model_name]
