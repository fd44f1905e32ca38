"""Beam searches of Hugging Face, for scripts/record_goldens.py.

A golden file holds `cases`, a JSON list of prompts, parameters, and the resulting sequences and
scores; `logprobs`, where models are tables; and for a few cases of the trained tiny model the
log-probabilities that each step saw, of the tokens that can matter.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput

SEED = 3
# Noise on log-probabilities: more than other ways of computing them differ by; to break ties.
TEXT_NOISE, TABLE_NOISE, TRIALS = 1e-4, 1e-6, 3
TABLES, TABLE_ROWS, TABLE_VOCAB, CASES_A_TABLE = 20, 41, 12, 15
TABLE_STRIDE = 7  # tests/scheduling/test_beam_search.py walks the tables in the same way
PENALTIES = (1.0, 0.0, 2.0, -1.0)
EARLY_STOPPING: tuple[bool | str, ...] = (False, True, "never")


class BeamCase(TypedDict):
    """The parameters of a search. Without end tokens all sequences have `max_tokens`."""

    prompt_ids: list[int]
    beam_width: int
    length_penalty: float
    early_stopping: bool | str
    end_token_ids: list[int]
    max_tokens: int


class BeamResult(TypedDict):
    sequences: list[list[int]]  # generated tokens, best first, end token included
    scores: list[float]


class TableConfig(transformers.PretrainedConfig):
    model_type = "table"


class TableModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    """Its logits are a row of a table f32[R, V]; all tokens so far decide which."""

    config_class = TableConfig

    def __init__(self, table: torch.Tensor):
        super().__init__(TableConfig(vocab_size=table.shape[1]))
        self.table = torch.nn.Parameter(table)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        row = torch.zeros(len(input_ids), dtype=torch.long)
        for tokens in input_ids.unbind(1):
            row = (TABLE_STRIDE * row + tokens + 1) % TABLE_ROWS
        return CausalLMOutput(logits=self.table[row][:, None])


def table_cases() -> dict[str, Any]:
    """The arrays of a golden file; `table` is the number of a case's table."""
    rng = np.random.default_rng(SEED)
    recorded: list[dict[str, Any]] = []
    logprobs = []
    for number in range(TABLES):
        logits = rng.normal(0, rng.uniform(0.3, 2.0), (TABLE_ROWS, TABLE_VOCAB))
        logits[:, :3] += rng.uniform(-2, 2)  # the end tokens of the cases
        model = TableModel(torch.tensor(logits, dtype=torch.float32))
        logprobs.append(model.table.log_softmax(-1).numpy())
        for _ in range(CASES_A_TABLE):
            case = BeamCase(
                prompt_ids=rng.integers(3, TABLE_VOCAB, 2).tolist(),
                beam_width=int(rng.integers(2, 9)),
                length_penalty=float(rng.choice([*PENALTIES, 0.6])),
                early_stopping=EARLY_STOPPING[rng.integers(3)],
                end_token_ids=list(range(rng.integers(4))),
                max_tokens=int(rng.integers(1, 20)),
            )
            result, _ = search(model, case)
            if is_stable(model, case, result, TABLE_NOISE):
                recorded.append({"table": number, **case, **result})
    print(f"{len(recorded)} of {TABLES * CASES_A_TABLE} searches in tables kept", flush=True)
    return {"cases": json.dumps(recorded), "logprobs": np.stack(logprobs)}


def text_cases(
    prompts: list[list[int]],
    *,
    cases_a_prompt: int,
    beam_widths: Sequence[int],
    end_token_ids: Sequence[list[int]],
    max_tokens: tuple[int, int],
) -> Iterator[BeamCase]:
    """Each prompt with several parameters; penalties and modes take turns."""
    rng = np.random.default_rng(SEED)
    for number in range(len(prompts) * cases_a_prompt):
        yield BeamCase(
            prompt_ids=prompts[number // cases_a_prompt],
            beam_width=int(rng.choice(beam_widths)),
            length_penalty=PENALTIES[number % len(PENALTIES)],
            early_stopping=EARLY_STOPPING[number % len(EARLY_STOPPING)],
            end_token_ids=end_token_ids[int(rng.integers(len(end_token_ids)))],
            max_tokens=int(rng.integers(*max_tokens)),
        )


def record(model: Any, cases: Iterator[BeamCase], num_traced: int) -> dict[str, Any]:
    """The arrays of a golden file."""
    recorded: list[dict[str, Any]] = []
    traces: dict[str, np.ndarray] = {}
    for case in cases:
        result, steps = search(model, case)
        ends = case["end_token_ids"]
        num_ended = sum(tokens[-1] in ends for tokens in result["sequences"])
        stable = is_stable(model, case, result, TEXT_NOISE)
        print(f"{len(recorded)}: {stable=}, {num_ended=}, {case | {'prompt_ids': ...}}", flush=True)
        if not stable:
            continue
        if num_ended > 0 and len(traces) < 2 * num_traced:
            top = case["beam_width"] + len(ends)
            traces[f"tokens_{len(recorded)}"] = np.argsort(-steps, kind="stable")[..., :top]
            traces[f"logprobs_{len(recorded)}"] = -np.sort(-steps)[..., :top]
        recorded.append({**case, **result})
    return {"cases": json.dumps(recorded)} | traces


def is_stable(model: Any, case: BeamCase, result: BeamResult, noise: float) -> bool:
    """Whether neither noise nor ties decide the case, so that any way of computing must agree."""
    if len(set(result["scores"])) < len(result["scores"]):
        return False
    trials = [search(model, case, noise)[0] for _ in range(TRIALS)]
    return all(trial["sequences"] == result["sequences"] for trial in trials)


class Noise(transformers.LogitsProcessor):
    def __init__(self, deviation: float):
        self.deviation = deviation

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.deviation * torch.randn_like(scores)


def search(model: Any, case: BeamCase, noise: float = 0.0) -> tuple[BeamResult, np.ndarray]:
    """(the result, the log-probabilities f32[steps, k, V] that the steps saw)."""
    # It replaces the model's own: values of that one would stand in for options left out here.
    model.generation_config = transformers.GenerationConfig(
        num_beams=case["beam_width"],
        num_return_sequences=case["beam_width"],
        do_sample=False,
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
        eos_token_id=case["end_token_ids"] or None,
        pad_token_id=0,
        max_new_tokens=case["max_tokens"],
        return_dict_in_generate=True,
        output_scores=True,
        use_cache=not isinstance(model, TableModel),
    )
    prompt = torch.tensor([case["prompt_ids"]])
    processors = [Noise(noise)] if noise else []
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), logits_processor=processors
    )
    generated = output.sequences[:, prompt.shape[1] :].tolist()
    lengths = (output.beam_indices >= 0).sum(-1).tolist()
    result = BeamResult(
        sequences=[tokens[:length] for tokens, length in zip(generated, lengths, strict=True)],
        scores=output.sequences_scores.tolist(),
    )
    return result, torch.stack(output.scores).numpy()
