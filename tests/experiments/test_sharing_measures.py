"""What the experiments on sharing are made of."""

import numpy as np
import pytest

from experiments.costs.prefix_hit_rate import Prompt, replay, replay_trace, textbook_hits
from experiments.lib.fake_devices import BatchRecorder, BranchingDevice
from experiments.lib.paired import in_turn, ratio_spread
from experiments.paper.fig15_memory_sharing import (
    beams_apart,
    num_tokens_apart,
    saved_fraction,
    simulate,
    with_sharegpt_text,
)
from experiments.paper.fig16_shared_prefix import prefix_tokens, questions
from experiments.paper.fig17_conversations import (
    Turn,
    Window,
    chat,
    draw_conversations,
)
from paged_jax.memory.usage import MemoryUsage
from paged_jax.sampling_params import SamplingParams
from paged_jax.simulation.executor import Branching
from paged_jax.simulation.run import SystemConfig
from paged_jax.workloads import (
    MooncakeRow,
    VocabRange,
    WorkloadRequest,
    mooncake_requests,
    read_conversations,
)

SYSTEM = SystemConfig(
    num_slots=256, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64
)


def usage(used: int, shared: int) -> MemoryUsage:
    return MemoryUsage(used, 0, 0, 0, 100 - used, shared=shared)


# Memory saved


def test_savings_are_blocks_saved_over_blocks_without_sharing():
    assert saved_fraction([usage(20, 5)]) == pytest.approx(5 / 25)
    assert saved_fraction([usage(0, 0), usage(20, 5), usage(60, 15)]) == pytest.approx(20 / 100)
    with pytest.raises(ValueError, match="no memory was used"):
        saved_fraction([usage(0, 0)])


def simulated(params: SamplingParams, *, num_prompt: int, num_output: int) -> list[MemoryUsage]:
    request = WorkloadRequest(tuple(range(num_prompt)), num_output)
    scheduler = SYSTEM.scheduler()
    return simulate([request], params, scheduler, BranchingDevice(scheduler.memory, seed=0))


def test_samples_save_the_full_blocks_of_their_prompt():
    usages = simulated(SamplingParams(n=3), num_prompt=9, num_output=2)
    # While the prompt is computed there is one table of 3 blocks; then three, of which two blocks
    # are common and each third is a sample's own.
    assert [step.shared // 4 for step in usages] == [0, 4]
    assert saved_fraction(usages) == pytest.approx(4 / (3 + 5 + 4))


def test_samples_of_a_short_prompt_save_nothing():
    assert saved_fraction(simulated(SamplingParams(n=3), num_prompt=3, num_output=9)) == 0


def test_simulated_beams_save_more_than_samples():
    lengths = {"num_prompt": 9, "num_output": 40}
    samples = saved_fraction(simulated(SamplingParams(n=4), **lengths))
    beams = saved_fraction(simulated(SamplingParams(beam_width=4, temperature=0), **lengths))
    assert 0 < samples < beams < 0.75


@pytest.mark.parametrize(
    ("beams", "apart"),
    [
        ([[1, 2, 3], [1, 2, 3]], 0),
        ([[1, 2, 3], [1, 2, 4]], 1),
        ([[1, 2, 3], [1, 2, 4], [1, 5, 3]], 2),
        ([[1], [2]], 1),
    ],
)
def test_beams_are_apart_since_their_last_common_token(beams, apart):
    assert num_tokens_apart(beams) == apart


def test_an_recorder_sees_each_step_of_a_search_and_changes_nothing():
    params = SamplingParams(beam_width=3, temperature=0)
    request = WorkloadRequest((1, 2, 3), 6)
    scheduler = SYSTEM.scheduler()
    recorder = BatchRecorder(BranchingDevice(scheduler.memory, seed=0), beams_apart)
    assert simulate([request], params, scheduler, recorder) == simulated(
        params, num_prompt=3, num_output=6
    )
    assert 1 <= np.mean(recorder.take()) <= 5
    assert recorder.take() == []


def test_candidates_are_ranked_log_probabilities_alike_between_beams_of_a_search():
    branching = Branching()
    rows = branching.draw(np.random.default_rng(0), [i // 2 for i in range(20_000)], 6)
    assert rows.shape == (20_000, 6)
    assert (np.diff(rows, axis=1) <= 0).all()
    assert (np.exp(rows).sum(axis=1) < 1).all()
    likeliest = np.log(np.expm1(-np.minimum(rows[:, 0], -1e-9)))  # minus the log-odds
    one, other = likeliest[0::2], likeliest[1::2]
    assert np.corrcoef(one, other)[0, 1] == pytest.approx(branching.correlation, abs=0.05)
    assert np.corrcoef(one[:-1], other[1:])[0, 1] == pytest.approx(0, abs=0.05)


# Hit rate


def test_15_shared_tokens_are_3_blocks_of_4_and_none_of_16():
    assert textbook_hits(4) == 12
    assert textbook_hits(16) == 0
    assert textbook_hits(1) == 15


def test_a_pool_too_small_gives_up_the_end_of_what_was_asked_first():
    prompts = [Prompt.of(range(8)), Prompt.of(range(100, 108)), Prompt.of(range(9))]
    assert replay(prompts, 100, 4).hit_tokens == [0, 0, 8]
    small = replay(prompts, 3, 4)
    assert small.hit_tokens == [0, 0, 4]  # the end goes before the beginning
    assert small.evictions > 0
    assert replay([*prompts, Prompt.of(range(13))], 3, 4).too_long == 1


@pytest.mark.parametrize("block_size", [16, 48, 512, 768, 1024])
@pytest.mark.parametrize("pool_tokens", [None, 12_000])
def test_a_number_for_many_tokens_finds_what_the_tokens_would(block_size, pool_tokens):
    rng = np.random.default_rng(block_size)
    rows = []
    for _ in range(40):
        hash_ids = [int(rng.integers(2))]
        while len(hash_ids) < 6:  # chains that part at random
            hash_ids.append(3 * hash_ids[-1] + int(rng.integers(3)))
        rows.append(MooncakeRow(0.0, int(rng.integers(5 * 512 + 1, 6 * 512)), 1, tuple(hash_ids)))
    run = replay_trace(rows, block_size, pool_tokens)
    prompts = [
        Prompt.of(request.prompt_token_ids)
        for request in mooncake_requests(rows, vocab=VocabRange(0, 10**9), seed=0)
    ]
    usable = sum(-(-len(tokens) // block_size) for tokens, _ in prompts)
    whole = replay(prompts, pool_tokens // block_size if pool_tokens else usable, block_size)
    assert run == whole
    assert any(run.hit_tokens)


# Requests


def test_translation_prompts_begin_alike_and_differ_after(tiny_model):
    def encode(text: str) -> list[int]:
        return tiny_model.tokenizer.encode(text, add_special_tokens=False)

    prefix = prefix_tokens(encode, 5000)
    assert len(prefix) == 5000
    assert prefix_tokens(encode, 80) == prefix[:80]
    asked = questions(encode, 50, seed=3)
    assert asked == questions(encode, 50, seed=3)
    assert len(set(map(tuple, asked))) > 40


def test_texts_fill_the_lengths_drawn_each_with_one_of_its_own(tmp_path, tiny_model):
    path = tmp_path / "sharegpt.json"
    texts = ("a" * 5, "b" * 40, "c" * 20)
    turns = [
        f'{{"conversations": [{{"from": "human", "value": "{text}"}}, '
        f'{{"from": "gpt", "value": "ok"}}]}}'
        for text in texts
    ]
    path.write_text(f"[{', '.join(turns)}]")

    def fill(*lengths: int) -> list[WorkloadRequest]:
        requests = [WorkloadRequest((0,) * length, 7) for length in lengths]
        return with_sharegpt_text(requests, tiny_model.tokenizer.encode, trace=path, seed=0)

    filled = fill(30, 15, 4)
    assert [request.num_prompt_tokens for request in filled] == [30, 15, 4]
    decoded = [tiny_model.tokenizer.decode(request.prompt_token_ids) for request in filled]
    assert [text.strip()[-1] for text in decoded] == ["b", "c", "a"]
    assert all(request.max_tokens == 7 for request in filled)
    with pytest.raises(ValueError, match="no ShareGPT conversation is left with 30 tokens"):
        fill(30, 30)


def test_conversations_keep_prompts_that_were_answered(tmp_path, tiny_model):
    path = tmp_path / "sharegpt.json"
    path.write_text(
        '[{"conversations": [{"from": "gpt", "value": "go on"}, {"from": "human", "value": "Hi"},'
        '{"from": "gpt", "value": "Hello"}, {"from": "human", "value": " "},'
        '{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."},'
        '{"from": "human", "value": "Oh"}]}, {"conversations": []}]'
    )
    conversations, _ = read_conversations(path)
    [exchanges] = conversations
    assert exchanges == [("Hi", "Hello"), ("Why?", "Because.")]
    limits = {"min_turns": 2, "max_turns": 5, "max_reply_tokens": 6, "seed": 0}
    [turns] = draw_conversations(conversations, tiny_model.tokenizer, 1, **limits)
    decode = tiny_model.tokenizer.decode
    assert [decode(turn.token_ids) for turn in turns] == [
        "user: Hi\nassistant: ",
        "\nuser: Why?\nassistant: ",
    ]
    assert [turn.num_reply_tokens for turn in turns] == [5, 6]
    with pytest.raises(ValueError, match="only 1 conversations have 2 turns or more, 2 are needed"):
        draw_conversations(conversations, tiny_model.tokenizer, 2, **limits)


# Chats


@pytest.mark.parametrize(
    ("step", "starts"), [(1, [0, 0, 1, 2, 40]), (8, [0, 0, 8, 8, 40]), (100, [0, 0, 100, 100, 100])]
)
def test_a_window_holds_the_end_of_a_conversation(step, starts):
    window = Window(100, step)
    assert [window.start(count) for count in (1, 100, 101, 102, 140)] == starts
    for step_too_large in (0, 101):
        with pytest.raises(ValueError, match="must be between 1 and 100"):
            Window(100, step_too_large)


def test_turns_follow_each_other_and_find_those_before(engine_with):
    engine = engine_with(enable_prefix_caching=True)
    questions = [[Turn([65 + i] * 40, 9), Turn([75 + i] * 10, 5)] for i in range(3)]
    seen = []
    run = chat(engine, questions, num_users=2, window=Window(400), salt="a", on_turn=seen.append)
    assert run.turns == seen
    assert sorted((turn.conversation, turn.turn) for turn in seen) == [
        (conversation, turn) for conversation in range(3) for turn in range(2)
    ]
    for turn in seen:
        assert turn.num_prompt_tokens == (40 if turn.turn == 0 else 59)
        # 48 of the 49 tokens before the second question, of which the last is not computed.
        assert turn.num_cached_tokens == (0 if turn.turn == 0 else 48)
        assert 0 < turn.first_token_s <= turn.last_token_s <= run.wall_s
    for history, (first, second) in zip(run.histories, questions, strict=True):
        assert len(history) == 64
        assert history[:40] == first.token_ids
        assert history[49:59] == second.token_ids


def test_a_cut_prompt_is_the_end_of_the_history(engine_with):
    engine = engine_with(enable_prefix_caching=True)
    turns = [Turn(list(range(100, 140)), 4), Turn(list(range(20)), 4)]
    run = chat(engine, [turns], num_users=1, window=Window(50), salt="b")
    assert [(turn.num_prompt_tokens, turn.is_cut) for turn in run.turns] == [
        (40, False),
        (50, True),
    ]
    assert run.turns[1].num_cached_tokens == 0


# Pairs


def test_each_round_has_both_and_the_first_alternates():
    assert list(in_turn(("a", "b"), 3)) == [
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
    ]


def test_ratios_are_those_of_rounds():
    assert ratio_spread([2, 30, 8], [1, 10, 2]) == pytest.approx((2.5, 3, 3.5))
