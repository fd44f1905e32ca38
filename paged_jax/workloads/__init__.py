"""Workloads: traces, conversations, prompts and length distributions, as requests."""

from paged_jax.workloads.arrivals import (
    arrive_as_traced,
    arrive_at_once,
    arrive_gamma,
    arrive_poisson,
    speedup_to,
)
from paged_jax.workloads.build import ARRIVALS, KINDS, build_workload
from paged_jax.workloads.csv_traces import read_azure, read_burstgpt
from paged_jax.workloads.lengths import (
    NAMED_LENGTHS,
    PUBLISHED_LENGTHS,
    SERVED_LENGTHS,
    Lengths,
    LogNormal,
    Uniform,
    length_requests,
)
from paged_jax.workloads.mooncake import MooncakeRow, mooncake_requests, read_mooncake
from paged_jax.workloads.overflow import limit_lengths
from paged_jax.workloads.prompts import prompt_requests, read_prompts
from paged_jax.workloads.request import TracedRequest, VocabRange, WorkloadRequest, traced_requests
from paged_jax.workloads.sharegpt import (
    Exchange,
    find_packaged_sharegpt,
    read_conversations,
    read_sharegpt,
    sharegpt_requests,
)
from paged_jax.workloads.sharegpt_lengths import sharegpt_length_requests, sharegpt_lengths

__all__ = [
    "ARRIVALS",
    "KINDS",
    "NAMED_LENGTHS",
    "PUBLISHED_LENGTHS",
    "SERVED_LENGTHS",
    "Exchange",
    "Lengths",
    "LogNormal",
    "MooncakeRow",
    "TracedRequest",
    "Uniform",
    "VocabRange",
    "WorkloadRequest",
    "arrive_as_traced",
    "arrive_at_once",
    "arrive_gamma",
    "arrive_poisson",
    "build_workload",
    "find_packaged_sharegpt",
    "length_requests",
    "limit_lengths",
    "mooncake_requests",
    "prompt_requests",
    "read_azure",
    "read_burstgpt",
    "read_conversations",
    "read_mooncake",
    "read_prompts",
    "read_sharegpt",
    "sharegpt_length_requests",
    "sharegpt_lengths",
    "sharegpt_requests",
    "speedup_to",
    "traced_requests",
]
