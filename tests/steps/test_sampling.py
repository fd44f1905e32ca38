"""On-device sampling against a plain float64 reference: which tokens, how often, and from what."""

from functools import partial

import jax
import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_rows
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.steps.logits import NO_SLOT
from paged_jax.steps.sampling import sample

V = 40
NUM_PROMPT, NUM_OUTPUT = 5, 6
TOKENS = [3, 3, 7, 9, 11, 20, 7, 20, 20, 21, 39]  # a prompt of five, then six outputs
DRAWS = 4096

jitted_sample = jax.jit(partial(sample, num_logprobs=4))


def sequence(params: SamplingParams, seed: int = 0, tokens=TOKENS, num_prompt=NUM_PROMPT):
    """A running sequence that is about to sample its next token."""
    seq = Request("r", tuple(tokens[:num_prompt]), params, 0.0, seed).sequences[0]
    seq.token_ids += tokens[num_prompt:]
    return seq


def sample_rows(logits: np.ndarray, seqs: list[Sequence]):
    """One token for each sequence from logits [len(seqs), V]."""
    history = np.zeros((len(seqs), 16), np.int32)
    for row, seq in enumerate(seqs):
        history[row, : seq.num_tokens] = seq.token_ids
    positions = np.array([seq.num_tokens - 1 for seq in seqs], np.int32)
    rows = sampling_rows(seqs, len(seqs))
    batch = SamplingArrays(V).batch(rows, seqs, range(len(seqs)))
    return jitted_sample(np.asarray(logits, np.float32), positions, batch, history)


def draw(logits: np.ndarray, params: SamplingParams, **of_sequence) -> np.ndarray:
    """How often each token comes in `DRAWS` draws of different seeds."""
    seqs = [sequence(params, seed, **of_sequence) for seed in range(DRAWS)]
    tokens = sample_rows(np.tile(logits, (DRAWS, 1)), seqs).tokens
    return np.bincount(tokens, minlength=V)


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What `draw` should follow: sort, add up, cut, in float64."""
    x = np.asarray(logits, np.float64).copy()
    outputs = TOKENS[NUM_PROMPT:]
    for token in set(TOKENS):
        penalty = params.repetition_penalty
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(outputs):
        x[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    x /= params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[::-1][params.top_k - 1]] = 0
    p /= p.sum()
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        num_kept = 1 + np.flatnonzero(np.cumsum(descending) >= params.top_p)[0]
        p[p < descending[num_kept - 1]] = 0
    return p / p.sum()


def assert_follows(counts: np.ndarray, p: np.ndarray) -> None:
    """Nothing outside the support; frequencies within what chance explains (chi-squared)."""
    assert not counts[p == 0].any(), f"drawn, but left out: {np.flatnonzero((p == 0) & counts)}"
    often = p * DRAWS >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(p[often], p[~often].sum()) * DRAWS
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom) + 5, f"{statistic=}, {freedom=}"


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, V).astype(np.float32)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": V},
        {"top_k": 10 * V},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 1e-6},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
    ],
    ids=str,
)
def test_draws_follow_each_parameter(params):
    params = SamplingParams(**params)
    logits = random_logits(1)
    assert_follows(draw(logits, params), probabilities(logits, params))


@pytest.mark.parametrize("seed", range(12))
def test_draws_follow_all_parameters_together(seed):
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        temperature=rng.uniform(0.3, 2.5),
        top_k=int(rng.integers(2, V)),
        top_p=rng.uniform(0.2, 0.99),
        min_p=rng.choice([0.0, 0.01, 0.1]),
        repetition_penalty=rng.uniform(0.7, 1.5),
        presence_penalty=rng.uniform(-1, 1),
        frequency_penalty=rng.uniform(-1, 1),
    )
    logits = random_logits(100 + seed)
    assert_follows(draw(logits, params), probabilities(logits, params))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, 4),  # 3, then three equal ones of which the second is one
        ({"top_k": 4}, 4),
        ({"top_k": 5}, 6),
        ({"top_p": 0.3}, 1),
        ({"top_p": 0.6}, 4),
        ({"min_p": 0.36}, 4),
        ({"top_k": 5, "top_p": 0.85}, 4),
    ],
    ids=str,
)
def test_tokens_that_tie_with_the_last_one_kept_are_kept(params, kept):
    logits = np.full(V, -np.inf)
    logits[[30, 2, 17, 5, 8, 12]] = [3, 2, 2, 2, 1, 1]
    counts = draw(logits, SamplingParams(**params))
    assert set(np.flatnonzero(counts)) == set([30, 2, 17, 5, 8, 12][:kept])


@pytest.mark.parametrize("top_k", [2, 3, 4, 5])
def test_logits_that_differ_in_their_last_bits_are_told_apart(top_k):
    logits = np.full(V, -np.inf)
    logits[0] = 3
    logits[1:9] = 1.7 - np.arange(8) * 2.0**-22  # steps of two units in the last place
    counts = draw(logits, SamplingParams(top_k=top_k))
    assert set(np.flatnonzero(counts)) == set(range(top_k))


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_equal_logits_are_drawn_alike(params):
    logits = np.zeros(V)
    p = np.full(V, 1 / V)
    assert_follows(draw(logits, SamplingParams(**params)), p)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "top_k": 30, "min_p": 0.001}], ids=str)
@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
def test_large_logits_overflow_nothing(params, scale):
    logits = np.linspace(-1, 1, V) * scale
    assert draw(logits, SamplingParams(**params))[-1] == DRAWS
    assert draw(-logits, SamplingParams(**params))[0] == DRAWS


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "top_k": 30, "min_p": 0.001}], ids=str)
def test_tokens_of_logit_minus_infinity_never_come(params):
    logits = np.full(V, -np.inf)
    logits[[4, 6]] = [0.0, -0.5]
    params = SamplingParams(**params)
    counts = draw(logits, params)
    assert set(np.flatnonzero(counts)) == {4, 6}
    assert_follows(counts, probabilities(logits, params))


def test_greedy_takes_the_largest_after_penalties():
    logits = random_logits(2)
    logits[[20, 39, 0]] = [5.0, 4.9, 4.8]  # 20 came three times, 39 once
    for params, token in [
        ({}, 20),
        ({"frequency_penalty": 0.08}, 39),
        ({"presence_penalty": 1.0}, 0),
        ({"repetition_penalty": 1.1}, 0),
        ({"top_k": 1, "top_p": 0.1, "min_p": 0.5}, 20),
    ]:
        seqs = [sequence(SamplingParams(temperature=0, **params))]
        assert sample_rows(logits[None], seqs).tokens.tolist() == [token]


def test_repetition_penalty_counts_the_prompt_and_the_others_do_not():
    logits = np.zeros(V)
    logits[[11, 0]] = [2.0, 1.9]  # 11 stands in the prompt alone
    for params, token in [
        ({"repetition_penalty": 1.2}, 0),
        ({"presence_penalty": 2.0}, 11),
        ({"frequency_penalty": 2.0}, 11),
    ]:
        seqs = [sequence(SamplingParams(temperature=0, **params))]
        assert sample_rows(logits[None], seqs).tokens.tolist() == [token]


KINDS = [
    {"temperature": 0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.1, "temperature": 2.0},
    {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"presence_penalty": 1.0, "top_p": 0.9, "logprobs": 3},
    {"min_tokens": 9, "stop_token_ids": [20], "temperature": 0},
]


def test_a_row_s_token_depends_on_nothing_but_the_row():
    """Alone, in any row, next to requests of any kind."""
    rng = np.random.default_rng(4)
    rows = [
        (random_logits(i), sequence(SamplingParams(**kind), seed=50 + i))
        for i, kind in enumerate(KINDS)
    ]
    alone = [sample_rows(logits[None], [seq]).tokens.tolist()[0] for logits, seq in rows]
    for _ in range(20):
        picks = rng.permutation(len(rows)) if _ % 2 else rng.integers(0, len(rows), len(rows))
        logits = np.stack([rows[i][0] for i in picks])
        tokens = sample_rows(logits, [rows[i][1] for i in picks]).tokens.tolist()
        assert tokens == [alone[i] for i in picks]


def test_a_draw_depends_on_the_seed_and_the_index_of_the_token_alone():
    logits, params = np.zeros(V), SamplingParams()

    def token(seed, num_prompt, num_output):
        tokens = list(range(num_prompt + num_output))
        seq = sequence(params, seed, tokens, num_prompt)
        return sample_rows(logits[None], [seq]).tokens.tolist()[0]

    assert [token(s, 5, 3) for s in range(8)] == [token(s, 2, 3) for s in range(8)]
    assert len({token(s, 5, 3) for s in range(30)}) > 10
    assert len({token(0, 2, index) for index in range(14)}) > 5


def test_the_sequences_of_a_request_draw_apart():
    """So do requests of neighbouring seeds."""
    seqs = [
        seq
        for seed in range(4)
        for seq in Request("r", (1,), SamplingParams(n=4), 0.0, seed).sequences
    ]
    tokens = sample_rows(np.zeros((16, V)), seqs).tokens.tolist()
    assert len(set(tokens)) > 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_are_left_out_until_min_tokens(temperature):
    """Six tokens are out: with min_tokens 6 the next may end it, with 7 not yet."""
    logits = np.zeros(V)
    logits[[8, 20]] = 30.0
    for min_tokens, ends in [(0, True), (6, True), (7, False), (50, False)]:
        params = SamplingParams(
            temperature=temperature, min_tokens=min_tokens, stop_token_ids=[20, 8], max_tokens=50
        )
        tokens = set(np.flatnonzero(draw(logits, params)))
        assert tokens <= {8, 20} if ends else not tokens & {8, 20}


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    kinds = [kind | {"logprobs": 4} for kind in KINDS]
    seqs = [sequence(SamplingParams(**kind), seed=i) for i, kind in enumerate(kinds)]
    logits = np.stack([random_logits(i) for i in range(len(seqs))])
    result = sample_rows(logits, seqs)
    x = logits.astype(np.float64)
    wanted = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    rows = np.arange(len(seqs))
    np.testing.assert_allclose(result.logprobs, wanted[rows, result.tokens], rtol=1e-5)
    order = np.argsort(-x, axis=1)[:, :4]
    np.testing.assert_array_equal(result.top_tokens, order)
    np.testing.assert_allclose(
        result.top_logprobs, np.take_along_axis(wanted, order, axis=1), rtol=1e-5
    )


def test_logprobs_of_an_unlikely_token_are_exact():
    logits = np.zeros((1, V), np.float32)
    logits[0, 5] = 200.0
    params = SamplingParams(temperature=0, logprobs=1, min_tokens=9, stop_token_ids=[5])
    result = sample_rows(logits, [sequence(params)])
    assert result.tokens.tolist() == [0]
    np.testing.assert_allclose(result.logprobs, [-200.0], rtol=1e-6)


def test_logprobs_that_nobody_wants_are_zero():
    result = sample_rows(np.zeros((1, V)), [sequence(SamplingParams())])
    assert not result.logprobs.any()
    assert not result.top_logprobs.any()


def test_a_vocabulary_smaller_than_the_reported_logprobs():
    params = SamplingParams(temperature=0, logprobs=20)
    seqs = [sequence(params, tokens=[1, 2, 0], num_prompt=2)]
    batch = SamplingArrays(3).batch(sampling_rows(seqs, 1), seqs, [NO_SLOT])
    logits = np.array([[0.0, 2.0, 1.0]], np.float32)
    history = np.zeros((1, 8), np.int32)
    result = sample(logits, np.array([2], np.int32), batch, history, num_logprobs=20)
    assert result.top_tokens.tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
def test_one_bad_logit_marks_its_row_and_no_other(bad):
    for i, kind in enumerate(KINDS):
        seqs = [sequence(SamplingParams(**kind)) for _ in range(V + 2)]
        logits = np.tile(random_logits(i), (len(seqs), 1))
        logits[-2, 3] = -np.inf  # a token that never comes is no error
        np.fill_diagonal(logits[:V], bad)  # each token in its turn, those that come too early too
        is_finite = sample_rows(logits, seqs).is_finite
        assert not is_finite[:V].any()
        assert is_finite[V:].all()


def test_a_row_without_any_token_is_not_finite():
    logits = np.stack([np.full(V, -np.inf), np.zeros(V)])
    seqs = [sequence(SamplingParams())] * 2
    assert sample_rows(logits, seqs).is_finite.tolist() == [False, True]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_bad_row_changes_no_other(kind):
    seqs = [sequence(SamplingParams(**kind), seed) for seed in range(4)]
    logits = np.stack([random_logits(i) for i in range(4)])
    wanted = sample_rows(logits, seqs).tokens.tolist()
    logits[2] = np.nan
    tokens = sample_rows(logits, seqs).tokens.tolist()
    assert tokens[:2] + tokens[3:] == wanted[:2] + wanted[3:]
