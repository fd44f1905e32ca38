"""The five systems that the paper compares. They differ in memory and batching alone."""

from dataclasses import dataclass

from experiments.paper.setups import Deployment
from paged_jax.simulation.cost_model import CostModel, RooflineCost
from paged_jax.simulation.run import SystemConfig

# The paper names no limit of running sequences: memory is what it compares.
MAX_NUM_SEQS = 1024


@dataclass(frozen=True)
class System:
    """`label` is what the paper calls it."""

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


def chosen_systems(names: list[str]) -> list[System]:
    """Systems by name, in their own order; ValueError names those there are."""
    if not names or (unknown := [name for name in names if name not in SYSTEMS]):
        raise ValueError(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return [system for name, system in SYSTEMS.items() if name in names]
