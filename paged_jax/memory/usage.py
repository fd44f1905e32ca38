"""Where the KV slots went: the categories of the paper's Figure 2."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """A snapshot in slots (one slot holds the keys and values of one token)."""

    token_states: int  # computed tokens: the only useful share
    reserved: int  # held for tokens that are certain to come but not computed yet
    internal: int  # allocated, and no token is known to come
    external: int  # free, yet in holes too small to be handed out
    free: int

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
