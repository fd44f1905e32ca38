"""Beam search in the engine: whole groups, their blocks, and what they are refused for.

tests/models/test_beam_parity.py compares them with Hugging Face's.
"""

from collections import Counter

import numpy as np
import pytest

from paged_jax import SamplingParams
from paged_jax.scheduling import scheduler as loop
from paged_jax.scheduling.beam_search import BeamSearch
from tests.engine.dense_model import dense_logits
from tests.engine.mixed_requests import BOS, TEXT

PROMPT = [BOS, *TEXT[7000:].encode()[:41]]
EOS = 257


def num_used(engine) -> int:
    memory = engine.core.scheduler.memory
    return memory.num_total_blocks - memory.num_free_blocks


def search(engine, prompt=PROMPT, **params):
    [output] = engine.generate(prompt, SamplingParams(**params), progress=False)
    return output


def hypotheses(output) -> list[tuple]:
    return [(out.token_ids, out.finish_reason) for out in output.outputs]


@pytest.fixture(scope="module")
def dense_search(tiny_model):
    """The same search over a plain forward pass of each beam; (hypotheses, all parents)."""
    logits = dense_logits(tiny_model)

    def run(prompt, beam_width, max_tokens, **options):
        reference = BeamSearch(
            beam_width,
            options.get("length_penalty", 1.0),
            options.get("early_stopping", False),
            {EOS},
            len(prompt),
            len(prompt) + max_tokens,
        )
        sequences, parents = [list(prompt)], []
        while not reference.is_done:
            rows = np.stack([logits(tokens)[-1].astype(np.float64) for tokens in sequences])
            rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
            order = np.argsort(-rows, axis=-1, kind="stable")[:, : reference.num_candidates]
            branches = reference.advance(
                [
                    [(token, float(row[token])) for token in tokens.tolist()]
                    for row, tokens in zip(rows, order, strict=True)
                ]
            )
            parents.append([branch.parent for branch in branches])
            sequences = [[*sequences[parent], token] for parent, token in branches]
        return reference.hypotheses, parents

    return run


@pytest.mark.parametrize(
    "block_size",
    [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(16, marks=pytest.mark.slow)],
)
def test_beams_whose_parents_change_places_are_those_of_a_forward_pass(
    engine_with, dense_search, block_size
):
    """Between samples of the same prompt, in a pool that evicts and preempts."""
    engine = engine_with(block_size=block_size, num_blocks=224 // block_size)
    wanted, parents = dense_search(PROMPT, 4, 30)
    moved = [step for step in parents if len(step) == 4 and step != sorted(step)]
    assert moved, "a later beam continues an earlier one's parent"
    assert any(len(set(step)) < 4 for step in parents), "and one dies"
    params = SamplingParams(beam_width=4, n=4, max_tokens=30)
    others = SamplingParams(n=2, seed=3, max_tokens=40, ignore_eos=True)
    outputs = engine.generate(
        [PROMPT, PROMPT, PROMPT[:30], PROMPT], [others, params, others, params], progress=False
    )
    for output in outputs[1::2]:
        assert hypotheses(output) == [(h.token_ids, h.finish_reason) for h in wanted]
        for out, hypothesis in zip(output.outputs, wanted, strict=True):
            assert out.score == pytest.approx(hypothesis.score, abs=1e-4)
            assert out.cumulative_logprob == pytest.approx(hypothesis.cumulative_logprob, abs=2e-3)


@pytest.mark.parametrize(
    "options", [{"early_stopping": True}, {"early_stopping": "never", "length_penalty": 0.5}]
)
def test_penalty_and_stopping_reach_the_search(engine, dense_search, options):
    wanted, _ = dense_search(PROMPT, 3, 20, **options)
    output = search(engine, beam_width=3, n=3, max_tokens=20, **options)
    assert hypotheses(output) == [(h.token_ids, h.finish_reason) for h in wanted]


def test_one_beam_is_greedy(engine):
    greedy = search(engine, temperature=0, max_tokens=20, ignore_eos=True)
    beam = search(engine, beam_width=1, max_tokens=20, ignore_eos=True)
    assert hypotheses(beam) == hypotheses(greedy)


def test_a_cached_prompt_is_found_and_changes_nothing(engine):
    params = {"beam_width": 4, "n": 2, "max_tokens": 20, "cache_salt": "beams"}
    first, again = search(engine, **params), search(engine, **params)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert hypotheses(again) == hypotheses(first)


def test_beams_share_what_they_have_in_common_and_the_dead_hold_nothing(engine, monkeypatch):
    """At each step: blocks of distinct beginnings only, one copy at most for each divergence."""
    num_forks = 0
    advance = loop.advance_beams

    def counting(request, memory):
        nonlocal num_forks
        before = memory.stats.forks
        old = advance(request, memory)
        num_forks += memory.stats.forks - before
        children = Counter(tuple(seq.token_ids[:-1]) for seq in request.sequences)
        if not request.beam_search.is_done:
            diverged = sum(count - 1 for count in children.values())
            assert memory.stats.forks - before == diverged
        return old

    monkeypatch.setattr(loop, "advance_beams", counting)
    copies = engine.sharing_stats.copies
    name = engine.add_request(None, PROMPT, SamplingParams(beam_width=4, max_tokens=60))
    memory, num_shared = engine.core.scheduler.memory, 0
    while engine.has_work:
        engine.step()
        live = engine.core.scheduler.queues.decoding
        if len(live) != 4:
            continue
        tables = [memory.block_table(seq.seq_id) for seq in live]
        assert num_used(engine) == len(set().union(*tables))
        contents = {}
        for seq, table in zip(live, tables, strict=True):
            for i, block in enumerate(table[: seq.num_computed_tokens // 16]):
                contents.setdefault(block, set()).add(tuple(seq.token_ids[: 16 * (i + 1)]))
        assert all(len(beginnings) == 1 for beginnings in contents.values())
        assert all(table[:2] == tables[0][:2] for table in tables), "the prompt's full blocks"
        num_shared += sum(map(len, tables)) - len(set().union(*tables))
        memory.check_invariants()
    assert num_shared > 60 * 6
    assert 0 < engine.sharing_stats.copies - copies <= num_forks
    assert num_used(engine) == 0
    assert name not in engine._delivery


def test_an_abort_gives_back_all_beams_and_returns_what_they_are(engine):
    params = SamplingParams(beam_width=4, n=2, max_tokens=50, ignore_eos=True, cache_salt="aborted")
    name = engine.add_request(None, PROMPT, params)
    for _ in range(10):  # two of them for the prompt
        engine.step()
    assert engine.core.scheduler.num_running == 4
    output = engine.abort(name)
    assert [out.finish_reason for out in output.outputs] == ["abort"] * 2
    assert len({len(out.token_ids) for out in output.outputs}) == 1
    assert len(output.outputs[0].token_ids) == 9
    assert num_used(engine) == 0


def test_an_abort_before_the_prompt_is_computed(engine):
    params = SamplingParams(beam_width=4, n=3, max_tokens=5, cache_salt="early")
    name = engine.add_request(None, PROMPT, params)
    engine.step()
    output = engine.abort(name)
    assert [(out.token_ids, out.finish_reason) for out in output.outputs] == [([], "abort")]


def test_more_beams_than_the_engine_or_its_pool_can_run_are_refused(engine_with):
    engine = engine_with(block_size=16, num_blocks=14)
    name = engine.add_request(None, PROMPT, SamplingParams(temperature=0, max_tokens=30))
    engine.step()
    with pytest.raises(ValueError, match="beam_width 5 is more than max_num_seqs 4"):
        engine.add_request(None, PROMPT, SamplingParams(beam_width=5))
    # 7 blocks a beam, of which the prompt's 2 full ones are shared.
    message = "max_tokens 60 in 4 beams can need 22 blocks of 16 slots, the pool has 14"
    with pytest.raises(ValueError, match=message):
        engine.add_request(None, PROMPT, SamplingParams(beam_width=4, max_tokens=60))
    while engine.has_work:
        outputs = engine.step()
    assert outputs[0].request_id == name
    assert len(outputs[0].outputs[0].token_ids) == 30


def test_the_largest_search_that_fits_alone_finishes(engine_with):
    """2 shared blocks and 4 times 3 others: the whole pool."""
    engine = engine_with(block_size=16, num_blocks=14)
    params = SamplingParams(beam_width=4, n=4, max_tokens=39, ignore_eos=True)
    before = engine.core.scheduler.counters.num_preemptions
    [output] = engine.generate(PROMPT, params, progress=False)
    assert engine.core.scheduler.counters.num_preemptions == before
    assert [len(out.token_ids) for out in output.outputs] == [39] * 4


def test_more_end_tokens_than_a_step_has_candidates_for_are_refused(engine):
    message = "beam_width 4 and 18 end tokens .* are more than the 20 candidates of a step"
    with pytest.raises(ValueError, match=message):
        search(engine, beam_width=4, stop_token_ids=list(range(65, 82)))
