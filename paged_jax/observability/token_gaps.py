"""The time between tokens, of all sequences at little cost for each."""

from paged_jax.scheduling.request import Request, Sequence


class TokenGaps:
    """Remembers when each sequence, or beam search, got its last token.

    Most iterations sample for those of the one before, which therefore have the same gap.
    """

    def __init__(self) -> None:
        self._sampled: list[Sequence] = []  # by the last iteration
        self._owners: dict[Sequence | Request, None] = {}  # of its tokens; a search has many beams
        self._sampled_s = 0.0
        self._last_s: dict[Sequence | Request, float] = {}  # of those it passed over

    def after(self, sampled: list[Sequence], now_s: float) -> list[tuple[float, int]]:
        """(seconds since the token before, how many have it); first tokens have none before."""
        before_s, before = self._sampled_s, self._owners
        self._sampled_s = now_s
        gaps: list[tuple[float, int]] = []
        num_same = len(before)
        if sampled != self._sampled:
            owners: dict[Sequence | Request, None] = {
                seq.request if seq.is_beam else seq: None for seq in sampled
            }
            for owner in before.keys() - owners.keys():
                if not owner.is_finished:
                    self._last_s[owner] = before_s
            new = owners.keys() - before.keys()
            num_same = len(owners) - len(new)
            times = [self._last_s.pop(owner, None) for owner in new]
            gaps = [(now_s - time, 1) for time in times if time is not None]
            self._sampled, self._owners = sampled, owners
        if num_same:
            gaps.append((now_s - before_s, num_same))
        return gaps

    def forget(self, request: Request) -> None:
        """A request has ended."""
        owners: list[Sequence | Request] = [request, *request.sequences]
        for owner in owners:
            self._last_s.pop(owner, None)
