"""Workloads: traces, conversations, prompts and length distributions, as requests."""

from paged_jax.workloads.arrivals import (
    arrive_as_traced,
    arrive_at_once,
    arrive_gamma,
    arrive_poisson,
    speedup_to,
)
from paged_jax.workloads.azure import AzureRow, azure_requests, read_azure
from paged_jax.workloads.build import ARRIVALS, KINDS, build_workload
from paged_jax.workloads.burstgpt import BurstGPTRow, burstgpt_requests, read_burstgpt
from paged_jax.workloads.lengths import (
    NAMED_LENGTHS,
    PUBLISHED_LENGTHS,
    SERVED_LENGTHS,
    Lengths,
    LogNormal,
    Uniform,
    length_requests,
)
from paged_jax.workloads.limits import LimitReport, limit_lengths
from paged_jax.workloads.mooncake import MooncakeRow, mooncake_requests, read_mooncake
from paged_jax.workloads.prompts import prompt_requests, read_prompts
from paged_jax.workloads.request import VocabRange, WorkloadRequest
from paged_jax.workloads.sharegpt import (
    ShareGPTReport,
    find_packaged_sharegpt,
    read_sharegpt,
    sharegpt_requests,
)
from paged_jax.workloads.sharegpt_lengths import (
    LengthTable,
    sharegpt_length_requests,
    sharegpt_lengths,
)

__all__ = [
    "ARRIVALS",
    "KINDS",
    "NAMED_LENGTHS",
    "PUBLISHED_LENGTHS",
    "SERVED_LENGTHS",
    "AzureRow",
    "BurstGPTRow",
    "LengthTable",
    "Lengths",
    "LimitReport",
    "LogNormal",
    "MooncakeRow",
    "ShareGPTReport",
    "Uniform",
    "VocabRange",
    "WorkloadRequest",
    "arrive_as_traced",
    "arrive_at_once",
    "arrive_gamma",
    "arrive_poisson",
    "azure_requests",
    "build_workload",
    "burstgpt_requests",
    "find_packaged_sharegpt",
    "length_requests",
    "limit_lengths",
    "mooncake_requests",
    "prompt_requests",
    "read_azure",
    "read_burstgpt",
    "read_mooncake",
    "read_prompts",
    "read_sharegpt",
    "sharegpt_length_requests",
    "sharegpt_lengths",
    "sharegpt_requests",
    "speedup_to",
]
