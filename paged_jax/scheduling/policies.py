"""In which order requests are served: one small class a policy, found by its name.

    @register("longest_prompt_first")
    class LongestPromptFirst(Policy):
        def key(self, request):
            return -len(request.prompt_token_ids)

A request's key is asked for once, when it is added. Nobody starves if only finitely many requests
can ever come to stand before any given one. So it is where the key is a date to be served by: the
time of arrival, plus something bounded. That is ageing: what a waiting request gains on a new one
with each second is the new one's later arrival. (The policy of the example starves short prompts.)

Requests that run are not stopped for one that goes first: it is the next to be admitted, and the
last to be preempted.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any

from paged_jax.scheduling.request import PolicyKey, Request


class Policy(ABC):
    """Ranks requests, and says when the scheduler may admit any.

    `admits_batches`: whether all that fit are admitted at once, however many iterations it takes
    to prefill them; otherwise as many as an iteration can begin to prefill.
    """

    admits_batches = False

    @abstractmethod
    def key(self, request: Request) -> PolicyKey:
        """The lower, the sooner; among equal keys, those added first come first."""

    def may_admit(self, num_running: int) -> bool:
        """Asked before an iteration admits requests, while `num_running` sequences run.

        Sequences of a request that runs already need no permission.
        """
        return True


def key_of(policy: Policy, request: Request) -> tuple[float, ...]:
    """The policy's key for a request, as a tuple; ValueError for what nothing can be sorted by."""
    key: Any = policy.key(request)  # a policy is anybody's
    numbers: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(number, Real) and not math.isnan(number) for number in numbers):
        raise ValueError(
            f"request {request.request_id!r}: policy {type(policy).__name__} gives it the key "
            f"{key!r}; keys are numbers, or tuples of numbers"
        )
    return numbers


POLICIES: dict[str, Callable[[], Policy]] = {}


def register[P: Policy](name: str) -> Callable[[type[P]], type[P]]:
    """Make a policy known under a name; ValueError if it is taken."""

    def add(policy: type[P]) -> type[P]:
        if name in POLICIES:
            raise ValueError(f"policy {name!r} is there already; choose another name")
        POLICIES[name] = policy
        return policy

    return add


def make_policy(policy: str | Policy) -> Policy:
    """The policy of that name; ValueError, naming those there are, if it is unknown."""
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

    A request is overtaken by those of a priority lower by k only if they arrive within
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
    """Short prompts first, where a token more is worth `token_s` seconds of waiting."""

    def __init__(self, token_s: float = 0.05):
        if not 0 <= token_s < float("inf"):
            raise ValueError(f"token_s must be at least 0 seconds and finite, got {token_s}")
        self.token_s = token_s

    def key(self, request: Request) -> PolicyKey:
        return request.arrival_time + len(request.prompt_token_ids) * self.token_s


@register("static")
class StaticBatching(FirstComeFirstServed):
    """Request-level batching, as in FasterTransformer and all that came before ORCA.

    When nothing runs, a batch is formed of as many waiting requests as fit, in the order of their
    addition; nobody joins until all of it has ended.
    """

    admits_batches = True

    def may_admit(self, num_running: int) -> bool:
        return num_running == 0
