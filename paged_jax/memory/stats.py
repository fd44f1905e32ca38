"""What sharing has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class SharingStats:
    """Counts since the memory manager was made; preempted sequences count anew when they return."""

    queried_tokens: int = 0  # of sequences admitted, looked up in the prefix cache
    hit_tokens: int = 0  # of these, found: neither computed nor stored again
    evictions: int = 0  # cached blocks given up for new contents
    forks: int = 0
    copies: int = 0  # blocks copied because one sequence wrote what others held as well

    @property
    def hit_rate(self) -> float:
        """Fraction of the tokens looked up that were found; 0 if none was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0
