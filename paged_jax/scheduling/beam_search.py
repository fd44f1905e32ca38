"""Beam search over log-probabilities: Hugging Face's `generate(num_beams=k, do_sample=False)`.

The search finds the same hypotheses, in the same order, with the same scores as transformers 5
from the same log-probabilities: float32 arithmetic in the same order makes them equal to the last
bit. It runs in lockstep: the model is asked for the likeliest next tokens of all beams at once.

Hugging Face ranks the continuations of all beams and looks at the best `(1 + end tokens) * k`. The
continuations among the first k that end are finished hypotheses, and the first k that do not end
are the next beams. Neither can come from below a beam's own best `k + end tokens`, so each beam
supplies no more candidates than that.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

EarlyStopping = bool | Literal["never"]


class Branch(NamedTuple):
    """A beam of the next step: beam `parent` of this step, continued by `token`."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation."""

    token_ids: list[int]  # the generated tokens, the end token included
    score: float  # cumulative_logprob / length ** length_penalty
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]


class _Path(NamedTuple):
    """The tokens of a beam from its last to its first; beams share their common beginning."""

    previous: "_Path | None"
    token: int


class _Finished(NamedTuple):
    score: np.float32
    cumulative_logprob: np.float32
    path: _Path
    ended: bool  # by an end token


class BeamSearch:
    """The state of one request's search: its beams and the best finished hypotheses.

    After the prompt there is one beam, from the first step on there are `beam_width`. Scores are
    log-probabilities divided by `length ** length_penalty`, where the length counts generated
    tokens, the end token too. With `beam_width` finished hypotheses, the search stops

    | `early_stopping` | when                                                                     |
    |------------------|--------------------------------------------------------------------------|
    | True             | at once                                                                  |
    | False            | the best beam scores no better than the worst hypothesis, though a       |
    |                  | longer continuation may yet score better                                 |
    | "never"          | no continuation of the best beam can score better, even the longest one  |
    |                  | where the penalty favours length                                         |

    Ties, whose order Hugging Face leaves to an unstable sort, go to the earlier hypothesis, then
    to the lower beam, then to the earlier candidate of its row.
    """

    def __init__(
        self,
        beam_width: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        end_token_ids: Collection[int],
        num_prompt_tokens: int,
        max_num_tokens: int,
    ):
        """`max_num_tokens` counts the prompt, as `num_prompt_tokens` does."""
        self._beam_width = beam_width
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._end_token_ids = frozenset(end_token_ids)
        self._max_length = max_num_tokens - num_prompt_tokens
        if beam_width < 1 or self._max_length < 1:
            raise ValueError(
                f"beam search needs a beam_width of at least 1, got {beam_width}, and room for a "
                f"token: {num_prompt_tokens} prompt tokens of at most {max_num_tokens} in all"
            )
        largest = np.finfo(np.float32).max
        if abs(length_penalty) * math.log(self._max_length) >= math.log(largest):
            raise ValueError(
                f"length_penalty {length_penalty}: {self._max_length} tokens to the power of it "
                f"is beyond float32"
            )
        self.num_tokens = 0  # tokens that each beam has generated: the steps taken
        self.is_done = False
        self._paths: list[_Path | None] = [None]
        self._scores = np.zeros(1, np.float32)  # of the beams: sums of log-probabilities
        self._finished: list[_Finished] = []  # best first

    @property
    def num_candidates(self) -> int:
        """How many of its likeliest next tokens each beam has to supply."""
        return self._beam_width + len(self._end_token_ids)

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The finished hypotheses, best first: `beam_width` of them when the search is done."""
        return [
            Hypothesis(
                _tokens(finished.path),
                float(finished.score),
                float(finished.cumulative_logprob),
                "stop" if finished.ended else "length",
            )
            for finished in self._finished
        ]

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Branch]:
        """Take one step; the next beams, best first, or none of them when the search is done.

        `candidates` has a row for each beam, in the order of the branches returned last; after the
        prompt it has one row. A row holds (token, log-probability), likeliest first, for
        `num_candidates` tokens or the whole vocabulary. A beam that no branch names as its parent
        is dead. ValueError, and nothing changes, for NaN and for a vocabulary in which k beams
        cannot continue.
        """
        if self.is_done:
            raise ValueError("the search is done")
        if len(candidates) != len(self._paths):
            raise ValueError(f"{len(candidates)} rows of candidates for {len(self._paths)} beams")
        length = self.num_tokens + 1
        at_limit = length == self._max_length
        branches, scores, ending = self._rank(candidates, at_limit)
        finished = self._with(ending, length)
        if len(finished if at_limit else branches) < self._beam_width:
            raise ValueError(
                f"too few candidates for {self._beam_width} beams: {len(candidates[0])} a beam, "
                f"{len(self._end_token_ids)} of them may be end tokens"
            )
        self.num_tokens = length
        self._finished = finished
        self._paths = [_Path(self._paths[parent], token) for parent, token in branches]
        self._scores = np.array(scores, np.float32)
        self.is_done = at_limit or self._should_stop()
        if self.is_done:
            self._paths = []
            return []
        return branches

    def _rank(
        self, candidates: Sequence[Sequence[tuple[int, float]]], at_limit: bool
    ) -> tuple[list[Branch], list[np.float32], list[tuple[Branch, np.float32]]]:
        """(the k best branches that go on, their scores, the branches of the k best that end)."""
        k = self._beam_width
        tokens = [token for row in candidates for token, _ in row]
        beams = [beam for beam, row in enumerate(candidates) for _ in row]
        scores = np.array([logprob for row in candidates for _, logprob in row], np.float32)
        scores += self._scores[beams]
        if np.isnan(scores).any():
            raise ValueError("a log-probability is NaN")
        branches: list[Branch] = []
        branch_scores: list[np.float32] = []
        ending: list[tuple[Branch, np.float32]] = []
        for rank, at in enumerate(np.argsort(-scores, kind="stable").tolist()):
            branch = Branch(beams[at], tokens[at])
            if at_limit or branch.token in self._end_token_ids:
                if rank < k:
                    ending.append((branch, scores[at]))
            else:
                branches.append(branch)
                branch_scores.append(scores[at])
            if len(branches) == k or (at_limit and len(ending) == k):
                break
        return branches, branch_scores, ending

    def _with(self, ending: list[tuple[Branch, np.float32]], length: int) -> list[_Finished]:
        """The k best of the finished hypotheses and `ending`."""
        if not ending:
            return self._finished
        divisor = self._divisor(length)
        new = [
            _Finished(
                score / divisor,
                score,
                _Path(self._paths[branch.parent], branch.token),
                branch.token in self._end_token_ids,
            )
            for branch, score in ending
        ]
        ranked = sorted(self._finished + new, key=lambda finished: -finished.score)
        return ranked[: self._beam_width]

    def _should_stop(self) -> bool:
        if len(self._finished) < self._beam_width:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        best = self._scores[0] / self._divisor(self._max_length if longest else self.num_tokens)
        return bool(best <= self._finished[-1].score)

    def _divisor(self, length: int) -> np.float32:
        return np.float32(float(length) ** self._length_penalty)


def _tokens(path: _Path | None) -> list[int]:
    tokens = []
    while path is not None:
        tokens.append(path.token)
        path = path.previous
    return tokens[::-1]
