"""Where the KV slots went: the categories of the paper's Figure 2."""

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


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """A snapshot in slots (one slot holds the keys and values of one token).

    The first five split the pool: a slot that several sequences share counts once. `cached` and
    `shared` tell more about them and are no part of the total.
    """

    token_states: int  # computed tokens: the only useful share
    reserved: int  # held for tokens that are certain to come but not computed yet
    internal: int  # allocated, and no token is known to come
    external: int  # free, yet in holes too small to be handed out
    free: int
    cached: int = 0  # of the free ones, those that keep a prefix for later until they are needed
    shared: int = 0  # slots that sequences would hold besides if each had all its blocks alone

    @property
    def total(self) -> int:
        """Every slot of the pool; the null block has none."""
        return self.token_states + self.reserved + self.internal + self.external + self.free

    def shares(self) -> dict[str, float]:
        """Each category's fraction of the total, by name; they sum to 1."""
        total = self.total
        return {
            "token_states": self.token_states / total,
            "reserved": self.reserved / total,
            "internal": self.internal / total,
            "external": self.external / total,
            "free": self.free / total,
        }
