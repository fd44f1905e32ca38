"""Where the KV slots went: the categories of the paper's Figure 2."""

from dataclasses import dataclass


@dataclass(slots=True)
class SharingStats:
    """Counts since the memory manager was made; a preempted sequence counts anew on its return."""

    queried_tokens: int = 0  # tokens of admitted sequences, looked up in the prefix cache
    hit_tokens: int = 0  # tokens of these that were found: neither computed nor stored again
    evictions: int = 0  # cached blocks given up for new contents
    forks: int = 0
    copies: int = 0  # blocks copied because one sequence wrote a block that others held as well

    @property
    def hit_rate(self) -> float:
        """The fraction of looked-up tokens that were found; 0 if none was looked up."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """A snapshot in slots; one slot holds the keys and values of one token.

    The first five fields split the pool: a slot that several sequences share counts once. `cached`
    and `shared` say more about these slots and are no part of the total.
    """

    token_states: int  # slots of computed tokens: the only useful ones
    reserved: int  # slots for tokens that are certain to come but not computed yet
    internal: int  # allocated slots for which no token is known to come
    external: int  # free slots in holes too small to be handed out
    free: int
    cached: int = 0  # free slots that keep a prefix for later until they are needed
    shared: int = 0  # slots that sequences would hold besides if each had all its blocks alone

    @property
    def total(self) -> int:
        """Every slot of the pool; the null block has none."""
        return self.token_states + self.reserved + self.internal + self.external + self.free

    def shares(self) -> dict[str, float]:
        """Each of the five categories' fraction of the total, by name; they sum to 1."""
        names = ("token_states", "reserved", "internal", "external", "free")
        return {name: getattr(self, name) / self.total for name in names}
