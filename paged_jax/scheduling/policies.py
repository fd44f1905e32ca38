"""Policies: the order in which requests are served. Each is a small class, found by its name.

    @register("longest_prompt_first")
    class LongestPromptFirst(Policy):
        def key(self, request):
            return -len(request.prompt_token_ids)

The scheduler asks for a request's key once, when the request is added. No request starves if only
finitely many requests can ever come to stand before it. That holds where the key is a date to be
served by: the time of arrival, plus something bounded. This is ageing: with each second, a new
request arrives a second later, and so a waiting one gains on it. (The example's policy has no such
key, and starves short prompts.)

Running requests are not stopped for one that comes to stand before them: it is the next to be
admitted, and the last to be preempted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any

from paged_jax.scheduling.request import PolicyKey, Request


class Policy(ABC):
    """Ranks requests, and says when the scheduler may admit some.

    If `admits_batches`, all requests that fit are admitted at once, however many iterations their
    prefill takes; otherwise as many as an iteration can begin to prefill.
    """

    admits_batches = False

    @abstractmethod
    def key(self, request: Request) -> PolicyKey:
        """The lower, the sooner; among equal keys, the request added first comes first."""

    def may_admit(self, num_running: int) -> bool:
        """Asked before an iteration admits requests, while `num_running` sequences run.

        Sequences of a request that runs already need no permission.
        """
        return True


def key_of(policy: Policy, request: Request) -> tuple[float, ...]:
    """The policy's key for a request, as a tuple; ValueError for a key that cannot be sorted by."""
    key: Any = policy.key(request)  # a user's policy may return anything
    numbers: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(number, Real) and not math.isnan(number) for number in numbers):
        raise ValueError(
            f"request {request.request_id!r}: policy {type(policy).__name__} gives it the key "
            f"{key!r}; keys are numbers, or tuples of numbers"
        )
    return numbers


POLICIES: dict[str, Callable[[], Policy]] = {}


def register[P: Policy](name: str) -> Callable[[type[P]], type[P]]:
    """Register a policy under a name; ValueError if the name is taken."""

    def add(policy: type[P]) -> type[P]:
        if name in POLICIES:
            raise ValueError(f"policy {name!r} is there already; choose another name")
        POLICIES[name] = policy
        return policy

    return add


def make_policy(policy: str | Policy) -> Policy:
    """The policy of that name; ValueError, with all names, if there is none."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown; choose one of {', '.join(POLICIES)}")
    return POLICIES[policy]()


@register("fcfs")
class FirstComeFirstServed(Policy):
    """In the order in which requests are added."""

    def key(self, request: Request) -> PolicyKey:
        return 0.0


@register("priority")
class Priority(Policy):
    """By priority, where each level is worth `ageing_s` seconds of waiting.

    A request whose priority is lower by k overtakes another only if it arrives within
    k * `ageing_s` seconds after it.
    """

    def __init__(self, ageing_s: float = 60.0):
        if not 0 <= ageing_s < float("inf"):
            raise ValueError(f"ageing_s must be at least 0 seconds and finite, got {ageing_s}")
        self.ageing_s = ageing_s

    def key(self, request: Request) -> PolicyKey:
        return request.arrival_time + request.priority * self.ageing_s


@register("shortest_prompt_first")
class ShortestPromptFirst(Policy):
    """Short prompts first, where each token is worth `token_s` seconds of waiting."""

    def __init__(self, token_s: float = 0.05):
        if not 0 <= token_s < float("inf"):
            raise ValueError(f"token_s must be at least 0 seconds and finite, got {token_s}")
        self.token_s = token_s

    def key(self, request: Request) -> PolicyKey:
        return request.arrival_time + len(request.prompt_token_ids) * self.token_s


@register("static")
class StaticBatching(FirstComeFirstServed):
    """Request-level batching, as in FasterTransformer and the other systems before ORCA.

    When nothing runs, as many waiting requests as fit form a batch, in the order of their addition.
    No request joins until the whole batch has ended.
    """

    admits_batches = True

    def may_admit(self, num_running: int) -> bool:
        return num_running == 0
