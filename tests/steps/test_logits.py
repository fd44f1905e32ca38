"""What changes logits on the device, against plain float64: each rule, all together, any batch."""

import random
from functools import partial

import jax
import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.executor.sampling_rows import SamplingArrays, sampling_rows, token_masks
from paged_jax.sampling_params import MAX_LOGIT_BIASES
from paged_jax.scheduling.request import Request, Sequence
from paged_jax.steps.logits import MAX_BIASES, NO_SLOT, change_logits
from paged_jax.steps.sampling import sample
from tests.engine.constraints import Raising, TokensOf
from tests.steps.logit_reference import PROCESSORS, changed_logits

V_MANY = 700
V, H = 70, 24  # a vocabulary that fills no whole word of a mask
EOS = 1
ARRAYS = SamplingArrays(V, tuple(PROCESSORS))

KINDS = [
    {},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": -0.25},
    {"logit_bias": {3: 5.0, 69: -100.0}},
    {"logit_bias": {token: 0.01 * token for token in range(V)}, "frequency_penalty": 1.0},
    {"min_tokens": 6, "stop_token_ids": [9, 20]},
    {"min_tokens": 7, "stop_token_ids": list(range(2, 60)), "logit_bias": {9: 50.0, 61: 2.0}},
    {"min_tokens": 50, "max_tokens": 60, "stop_token_ids": [0, 69]},
    {"logits_processors": "not_again"},
    {"logits_processors": ["by_turns", "not_again"], "repetition_penalty": 0.8},
    {"logits_processors": ["unlike_the_past"], "min_tokens": 9},
]
ALLOWED = [None, {0, 31, 32, 33, 63, 64, 69}, {*range(0, V, 3)}]


def sequences(rng: random.Random) -> list[tuple[Sequence, set[int] | None]]:
    """Of every kind, with and without a constraint; prompts and outputs of any length."""
    seqs = []
    for kind in KINDS:
        for allowed in ALLOWED:
            num_prompt, num_output = rng.randint(1, 10), rng.randint(0, 10)
            tokens = [rng.randrange(V) for _ in range(num_prompt + num_output)]
            params = SamplingParams(temperature=0, **{"max_tokens": 20} | kind)
            request = Request("r", tuple(tokens[:num_prompt]), params, 0.0, 0)
            request.begin(frozenset({EOS}), 20)
            [seq] = request.sequences
            seq.token_ids += tokens[num_prompt:]
            if allowed is not None:
                seq.constraint = Always(allowed)
            seqs.append((seq, allowed))
    return seqs


class Always(TokensOf):
    def restrict(self, output_token_ids, allowed) -> None:
        super().restrict([], allowed)


def arguments(seqs: list[Sequence]):
    """(positions, batch, history) of rows whose tokens lie at slots in another order."""
    slots = [len(seqs) - row if seq.needs_history else NO_SLOT for row, seq in enumerate(seqs)]
    history = np.full((len(seqs) + 1, H), V - 1, np.int32)  # other tokens, which no row has
    for seq, slot in zip(seqs, slots, strict=True):
        if slot != NO_SLOT:
            history[slot, : seq.num_tokens] = seq.token_ids
    batch = ARRAYS.batch(sampling_rows(seqs, len(seqs)), seqs, slots)
    masks, errors = token_masks(seqs, len(seqs), V)
    assert not errors
    batch = jax.tree.map(np.asarray, batch)
    object.__setattr__(batch.rules, "allowed", masks)
    return np.array([seq.num_tokens - 1 for seq in seqs], np.int32), batch, history


processors = tuple(PROCESSORS.values())
jitted_change = jax.jit(partial(change_logits, processors=processors))
jitted_sample = jax.jit(partial(sample, processors=processors, num_logprobs=4))


def change(logits: np.ndarray, seqs: list[Sequence]) -> np.ndarray:
    positions, batch, history = arguments(seqs)
    rules = batch.rules
    return np.asarray(jitted_change(logits, positions, batch.num_prompt_tokens, rules, history))


def random_logits(num_rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (num_rows, V)).astype(np.float32)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_changed_as_in_float64_and_alone_as_in_any_batch(seed):
    rng = random.Random(seed)
    rows = sequences(rng)
    rng.shuffle(rows)
    logits = random_logits(len(rows), seed)
    together = change(logits, [seq for seq, _ in rows])
    for row, (seq, allowed) in enumerate(rows):
        wanted = changed_logits(
            logits[row],
            seq.request.params,
            seq.token_ids[: seq.num_prompt_tokens],
            seq.output_token_ids,
            end_token_ids=seq.end_token_ids,
            allowed=allowed,
        )
        np.testing.assert_allclose(together[row], wanted, rtol=1e-5, atol=1e-5)
        alone = change(logits[row : row + 1], [seq])
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_row_without_rules_keeps_its_logits_bit_for_bit():
    rows = [seq for seq, _ in sequences(random.Random(9))]
    logits = random_logits(len(rows), 9)
    np.testing.assert_array_equal(change(logits, rows)[0], logits[0])


def test_log_probabilities_are_those_of_the_raw_logits():
    """Whatever the rules leave of them."""
    rows = [seq for seq, allowed in sequences(random.Random(3)) if seq.needs_history]
    plain = Request("r", (1,), SamplingParams(logprobs=4), 0.0, 0).sequences
    logits = random_logits(len(rows) + 1, 3)
    positions, batch, history = arguments([*rows, *plain])
    result = jitted_sample(logits, positions, batch, history)
    x = logits.astype(np.float64)
    raw = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    picked = raw[np.arange(len(raw)), result.tokens]
    np.testing.assert_allclose(result.logprobs, picked, rtol=1e-5)
    np.testing.assert_array_equal(result.top_tokens, np.argsort(-x, axis=1)[:, :4])


def test_a_row_that_no_token_is_left_for_is_not_valid_though_its_logits_are_finite():
    def seq(constraint=None, **params) -> Sequence:
        request = Request("r", (1, 2), SamplingParams(temperature=0, **params), 0.0, 0)
        request.begin(frozenset({EOS}), 20)
        request.sequences[0].constraint = constraint
        return request.sequences[0]

    everything = list(range(V))
    rows = [
        (seq(), True),
        (seq(Always(set())), False),
        (seq(Always({9})), True),
        (seq(Always({9}), min_tokens=3, stop_token_ids=[9]), False),
        (seq(Always({2}), logits_processors="not_again"), False),
        (seq(min_tokens=3, stop_token_ids=everything), False),
    ]
    positions, batch, history = arguments([seq for seq, _ in rows])
    result = jitted_sample(np.zeros((len(rows), V), np.float32), positions, batch, history)
    assert result.is_finite.all()
    assert result.is_valid.tolist() == [is_valid for _, is_valid in rows]
    assert result.tokens[2] == 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_256_end_tokens_are_left_out_until_min_tokens(temperature):
    size = 400
    arrays = SamplingArrays(size)
    logits = np.zeros((1, size), np.float32)
    logits[0, :256] = 20.0
    for num_output, ends in [(0, False), (4, False), (5, True), (9, True)]:
        params = SamplingParams(
            temperature=temperature, min_tokens=5, stop_token_ids=range(256), max_tokens=20
        )
        [seq] = Request("r", (1,), params, 0.0, 7).sequences
        seq.token_ids += [300] * num_output
        batch = arrays.batch(sampling_rows([seq], 1), [seq], [NO_SLOT])
        positions, history = np.array([num_output], np.int32), np.zeros((1, 1), np.int32)
        result = jax.jit(partial(sample, num_logprobs=1))(logits, positions, batch, history)
        assert (result.tokens[0] < 256) == ends


def test_a_mask_starts_with_all_tokens_and_no_others():
    class Notes:
        def restrict(self, output_token_ids, allowed) -> None:
            self.bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")

    for vocab_size in (1, 31, 32, 33, 64, 70):
        [seq] = Request("r", (1,), SamplingParams(), 0.0, 0).sequences
        seq.constraint = notes = Notes()
        token_masks([seq], 4, vocab_size)
        assert np.flatnonzero(notes.bits).tolist() == list(range(vocab_size))


def test_a_constraint_that_raises_leaves_the_others_their_masks():
    seqs = [Request("r", (1,), SamplingParams(), 0.0, 0).sequences[0] for _ in range(3)]
    seqs[0].constraint, seqs[2].constraint = Raising(after=0), TokensOf({5})
    masks, errors = token_masks(seqs, 4, V)
    assert errors == {seqs[0].seq_id: "its constraint raised RuntimeError: the grammar is broken"}
    assert masks[2].tolist() == [32, 0, 0]


def test_biases_and_end_tokens_of_a_row_fit_together():
    params = SamplingParams(
        min_tokens=1,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0),
        stop_token_ids=range(MAX_LOGIT_BIASES, MAX_BIASES - 1),
    )
    request = Request("r", (1,), params, 0.0, 0)
    request.begin(frozenset({V_MANY - 1}), 20)
    rows = sampling_rows(request.sequences, 1)
    biases = SamplingArrays(V_MANY).batch(rows, request.sequences, [NO_SLOT]).rules.biases
    assert np.isneginf(biases.values).sum() == MAX_BIASES - MAX_LOGIT_BIASES
    assert (biases.until > 0).all()
