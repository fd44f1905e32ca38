"""Which track of a timeline each request is drawn on: few tracks, and no two requests overlap."""

from bisect import insort


class Lanes:
    """Numbers lanes from 0; a request takes the lowest that has been free since its arrival."""

    def __init__(self) -> None:
        self.num_lanes = 0
        self._free: list[tuple[int, int]] = []  # (lane, time from which it is free), by lane

    def take(self, time: int) -> int:
        """A lane on which nothing has been drawn after `time`."""
        for index, (lane, free_from) in enumerate(self._free):
            if free_from <= time:
                del self._free[index]
                return lane
        self.num_lanes += 1
        return self.num_lanes - 1

    def give_back(self, lane: int, time: int) -> None:
        """What was drawn on the lane ends at `time`."""
        insort(self._free, (lane, time))
