"""Beam search from log-probabilities alone: Hugging Face's results, a dense reference, and bounds.

The searches of Hugging Face are recorded by scripts/record_goldens.py.
"""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_jax.scheduling.beam_search import BeamSearch, Branch, Hypothesis
from tests.models.hf_parity import GOLDENS, read_goldens


def new_search(*, beam_width=2, length_penalty=1.0, early_stopping=False, ends=(), max_tokens=8):
    return BeamSearch(beam_width, length_penalty, early_stopping, ends, 5, 5 + max_tokens)


def likeliest(logprobs, num):
    """Rows of (token, log-probability) of f32[rows, V], likeliest first, then lowest token."""
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :num]
    return [
        [(token, float(row[token])) for token in tokens.tolist()]
        for row, tokens in zip(logprobs, order, strict=True)
    ]


def run(search, logprobs_after):
    """Search to the end, asking for the log-probabilities f32[V] after generated tokens."""
    beams = [()]
    while not search.is_done:
        logprobs = np.stack([logprobs_after(beam) for beam in beams])
        branches = search.advance(likeliest(logprobs, search.num_candidates))
        beams = [(*beams[branch.parent], branch.token) for branch in branches]
    assert not beams
    return search.hypotheses


def recorded_search(case):
    num_prompt = len(case["prompt_ids"])
    return BeamSearch(
        case["beam_width"],
        case["length_penalty"],
        case["early_stopping"],
        case["end_token_ids"],
        num_prompt,
        num_prompt + case["max_tokens"],
    )


def assert_exactly(hypotheses, case):
    assert [hypothesis.token_ids for hypothesis in hypotheses] == case["sequences"], case
    assert [hypothesis.score for hypothesis in hypotheses] == case["scores"], case
    for hypothesis in hypotheses:
        ended = hypothesis.token_ids[-1] in case["end_token_ids"]
        assert hypothesis.finish_reason == ("stop" if ended else "length")


def test_searches_in_tables_are_those_of_hugging_face_to_the_last_bit():
    goldens = read_goldens(GOLDENS / "beams_tables.npz")
    cases = json.loads(str(goldens["cases"]))
    assert len(cases) > 200
    for case in cases:
        table = goldens["logprobs"][case["table"]]

        def row_after(generated, table=table, prompt=case["prompt_ids"]):
            row = 0
            for token in (*prompt, *generated):
                row = (7 * row + token + 1) % len(table)
            return table[row]

        assert_exactly(run(recorded_search(case), row_after), case)


def test_the_tiny_models_recorded_steps_lead_where_hugging_face_went():
    goldens = read_goldens(GOLDENS / "beams_tiny_lm.npz")
    cases = json.loads(str(goldens["cases"]))
    traced = [int(name.removeprefix("tokens_")) for name in goldens if name.startswith("tokens_")]
    assert traced
    for number in traced:
        search = recorded_search(cases[number])
        tokens, logprobs = goldens[f"tokens_{number}"], goldens[f"logprobs_{number}"]
        for step in range(len(tokens)):
            rows = 1 if step == 0 else cases[number]["beam_width"]
            search.advance(
                [
                    list(zip(tokens[step, row].tolist(), logprobs[step, row].tolist(), strict=True))
                    for row in range(rows)
                ]
            )
        assert search.is_done
        assert_exactly(search.hypotheses, cases[number])


def dense_reference(
    logprobs_after, *, beam_width, length_penalty, early_stopping, ends, max_tokens
):
    """[(tokens, score)]: Hugging Face's steps as they are, over all tokens of `beam_width` beams at
    all times, with -1e9 for what does not exist; sorts are stable."""
    k, nothing = beam_width, np.float32(-1e9)
    running = [((), np.float32(0))] + [((), nothing)] * (k - 1)
    finished = [((), nothing, False)] * k
    for length in range(1, max_tokens + 1):
        continued = [
            ((*tokens, token), np.float32(score + logprob))
            for tokens, score in running
            for token, logprob in enumerate(logprobs_after(tokens))
        ]
        best = sorted(continued, key=lambda x: -x[1])[: max(2, 1 + len(ends)) * k]
        ending = [tokens[-1] in ends or length == max_tokens for tokens, _ in best]
        going_on = [
            (tokens, score + nothing if ends_here else score)
            for (tokens, score), ends_here in zip(best, ending, strict=True)
        ]
        running = sorted(going_on, key=lambda x: -x[1])[:k]
        divisor = np.float32(length**length_penalty)
        for rank, (tokens, score) in enumerate(best):
            counts = ending[rank] and rank < k
            finished.append((tokens, score / divisor if counts else nothing, counts))
        finished = sorted(finished, key=lambda x: -x[1])[:k]
        all_finished = all(is_finished for *_, is_finished in finished)
        hopeful = early_stopping == "never" and length_penalty > 0
        best_possible = running[0][1] / np.float32(
            (max_tokens if hopeful else length) ** length_penalty
        )
        if all(ending) or (
            all_finished and (early_stopping is True or not best_possible > finished[-1][1])
        ):
            break
    return [(list(tokens), float(score)) for tokens, score, _ in finished]


def tied_logprobs(seed, vocab_size):
    """After any tokens, a row of few different values, which float32 adds exactly."""

    def after(tokens):
        rng = random.Random(f"{seed} {tokens}")
        return np.array([-rng.randint(1, 12) / 8 for _ in range(vocab_size)], np.float32)

    return after


def continuous_logprobs(seed, vocab_size):
    def after(tokens):
        rng = random.Random(f"{seed} {tokens}")
        logits = np.array([rng.gauss(0, 2) for _ in range(vocab_size)], np.float32)
        return logits - np.logaddexp.reduce(logits)

    return after


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    distribution=st.sampled_from([tied_logprobs, continuous_logprobs]),
    beam_width=st.integers(1, 5),
    num_ends=st.integers(0, 3),
    spare_tokens=st.integers(0, 6),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0, 0.5]),
    early_stopping=st.sampled_from([False, True, "never"]),
    max_tokens=st.integers(1, 9),
)
def test_searches_are_those_of_a_dense_reference(
    seed, distribution, beam_width, num_ends, spare_tokens, **parameters
):
    logprobs_after = distribution(seed, beam_width + num_ends + spare_tokens)
    parameters |= {"beam_width": beam_width, "ends": range(num_ends)}
    hypotheses = run(new_search(**parameters), logprobs_after)
    expected = dense_reference(logprobs_after, **parameters)
    assert [(found.token_ids, found.score) for found in hypotheses] == expected
    for found in hypotheses:
        steps = [logprobs_after(tuple(found.token_ids[:i])) for i in range(len(found.token_ids))]
        total = sum(row[token] for row, token in zip(steps, found.token_ids, strict=True))
        assert found.cumulative_logprob == pytest.approx(total, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), vocab_size=st.integers(2, 6))
def test_a_search_that_prunes_nothing_finds_the_best_of_all_sequences(seed, vocab_size):
    logprobs_after = continuous_logprobs(seed, vocab_size)
    hypotheses = run(new_search(beam_width=vocab_size, max_tokens=2), logprobs_after)
    ranked = sorted(
        itertools.product(range(vocab_size), repeat=2),
        key=lambda pair: -(logprobs_after(())[pair[0]] + logprobs_after(pair[:1])[pair[1]]),
    )
    assert [tuple(found.token_ids) for found in hypotheses] == ranked[:vocab_size]


def test_the_first_step_branches_the_prompt_and_later_ones_name_parents():
    search = new_search(beam_width=3, max_tokens=3)
    assert search.num_candidates == 3
    branches = search.advance([[(4, -1.0), (7, -2.0), (2, -3.0)]])
    assert branches == [Branch(0, 4), Branch(0, 7), Branch(0, 2)]
    branches = search.advance(
        [
            [(1, -5.0), (2, -6.0), (3, -7.0)],
            [(5, -0.5), (6, -1.0), (7, -9.0)],
            [(8, -1.5), (9, -8.0), (1, -9.0)],
        ]
    )
    assert branches == [Branch(1, 5), Branch(1, 6), Branch(2, 8)]  # beam 0 is dead
    assert not search.is_done
    assert search.hypotheses == []


def test_the_last_step_has_no_branches_and_all_hypotheses():
    search = new_search(beam_width=2, length_penalty=2.0, ends=[9], max_tokens=2)
    search.advance([[(1, -1.0), (2, -2.0), (9, -8.0)]])
    assert search.advance([[(9, -1.0), (3, -1.5), (4, -9.0)], [(5, -5.0)] * 3]) == []
    assert search.is_done
    assert search.hypotheses == [
        Hypothesis([1, 9], -0.5, -2.0, "stop"),
        Hypothesis([1, 3], -0.625, -2.5, "length"),
    ]
    with pytest.raises(ValueError, match="done"):
        search.advance([[(1, -1.0), (2, -2.0)]] * 2)


def test_an_end_token_beyond_the_best_k_ends_nothing():
    search = new_search(beam_width=2, ends=[9])
    assert search.advance([[(1, -1.0), (2, -2.0), (9, -2.5)]]) == [Branch(0, 1), Branch(0, 2)]
    assert search.hypotheses == []


def test_beams_that_end_make_room_for_the_next_best():
    search = new_search(beam_width=2, ends=[8, 9])
    assert search.num_candidates == 4
    branches = search.advance([[(8, -1.0), (9, -1.5), (3, -2.0), (4, -9.0)]])
    assert branches == []  # both hypotheses are better than what could follow
    assert [found.token_ids for found in search.hypotheses] == [[8], [9]]

    search = new_search(beam_width=2, ends=[8, 9])
    branches = search.advance([[(8, -1.0), (1, -1.5), (9, -2.0), (4, -3.0)]])
    assert branches == [Branch(0, 1), Branch(0, 4)]
    assert [found.token_ids for found in search.hypotheses] == [[8]]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "stops"),
    [
        (True, 1.0, True),  # two are finished
        (False, 1.0, False),  # -2.2 / 2 is better than the worst, -1.5
        (False, 0.0, True),
        ("never", 0.0, True),
        ("never", 1.0, False),
    ],
)
def test_the_modes_stop_at_different_times(early_stopping, length_penalty, stops):
    search = new_search(
        beam_width=2, early_stopping=early_stopping, length_penalty=length_penalty, ends=[9]
    )
    search.advance([[(9, -1.5), (1, -1.6), (2, -1.7)]])
    search.advance([[(9, -0.5), (3, -0.6), (4, -0.7)], [(5, -6.0), (6, -7.0), (9, -8.0)]])
    assert search.is_done == stops


def test_never_hopes_for_the_longest_continuation_where_false_gives_up():
    candidates = [
        [[(9, -0.1), (1, -3.0), (2, -3.1)]],
        [[(9, -0.1), (3, -0.2), (4, -7.0)], [(5, -0.2), (6, -7.0), (9, -8.0)]],
    ]
    done = {}
    for early_stopping in (False, "never"):
        search = new_search(beam_width=2, early_stopping=early_stopping, ends=[9], max_tokens=9)
        for rows in candidates:
            search.advance(rows)
        done[early_stopping] = search.is_done
    assert done == {False: True, "never": False}


def test_never_compares_the_current_length_where_the_penalty_is_against_length():
    search = new_search(beam_width=2, length_penalty=-1.0, early_stopping="never", ends=[9])
    search.advance([[(9, -1.0), (1, -1.2), (2, -1.3)]])
    search.advance([[(3, -0.1), (9, -0.3), (4, -7.0)], [(5, -6.0), (6, -7.0), (9, -8.0)]])
    assert [found.score for found in search.hypotheses] == pytest.approx([-1.0, -3.0])
    assert not search.is_done  # the best beam: -1.3 * 2


def test_ties_go_to_the_lower_beam_then_to_the_first_in_the_row():
    search = new_search(beam_width=2)
    assert search.advance([[(4, -1.0), (7, -1.0)]]) == [Branch(0, 4), Branch(0, 7)]
    rows = [[(6, -2.0), (8, -2.0)], [(1, -2.0), (2, -2.0)]]
    assert search.advance(rows) == [Branch(0, 6), Branch(0, 8)]


def test_ties_of_hypotheses_go_to_the_earlier_one():
    search = new_search(beam_width=1, length_penalty=0.0, early_stopping="never", ends=[9])
    search.advance([[(9, -1.0), (3, -1.0)]])
    assert search.is_done
    assert search.hypotheses[0].token_ids == [9]


def test_impossible_tokens_are_chosen_last():
    search = new_search(beam_width=2, max_tokens=2)
    search.advance([[(4, -1.0), (7, -2.0)]])
    search.advance([[(6, -0.5), (1, -np.inf)], [(6, -0.25), (2, -np.inf)]])
    assert [found.token_ids for found in search.hypotheses] == [[4, 6], [7, 6]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[(1, -1.0), (2, float("nan")), (9, -3.0)]] * 2, "NaN"),
        ([[(1, -1.0), (2, -2.0), (9, -3.0)]], "1 rows of candidates for 2 beams"),
        ([[(9, -1.0)]] * 2, "too few candidates for 2 beams: 1 a beam, 1 of them may be end"),
    ],
)
def test_a_refused_step_changes_nothing(rows, message):
    search = new_search(ends=[9])
    first = [[(4, -1.0), (7, -2.0), (9, -3.0)]]
    search.advance(first)
    with pytest.raises(ValueError, match=message):
        search.advance(rows)
    other = new_search(ends=[9])
    other.advance(first)
    rows = [[(1, -1.0), (2, -2.0), (9, -3.0)], [(9, -0.5), (3, -0.7), (2, -0.8)]]
    assert search.advance(rows) == other.advance(rows)
    assert search.hypotheses == other.hypotheses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, "beam_width of at least 1, got 0"),
        ({"max_tokens": 0}, "5 prompt tokens of at most 5"),
        ({"length_penalty": 60.0}, r"length_penalty 60.0: 8 tokens .* beyond float32"),
        ({"length_penalty": -60.0}, r"length_penalty -60.0: 8 tokens .* beyond float32"),
    ],
)
def test_searches_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        new_search(**arguments)
