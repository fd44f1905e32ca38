"""Trains a byte-level Llama of a million parameters, in a minute and a half on two CPU cores.

    python scripts/train_tiny_lm.py --out_dir=out/tiny_lm

The text ships with Python: the prose of the language reference that the interpreter carries for
`help()` (`pydoc_data.topics`), a paragraph a document, and the names of Unicode's first characters
("é: Latin small letter e with acute."), which are short, so that the model often ends by itself,
and hold UTF-8 of more than one byte. The same Python release, seed and machine give the same model.

Expect a loss that falls from 5.6 to about 1.2 nats per byte on held-out documents. --out_dir gets a
Hugging Face directory (config.json, model.safetensors in bfloat16, the byte tokenizer),
training.json with the curve, and loss.png. tests/fixtures/tiny_lm is such a directory: to train it
anew, write there and record the goldens again (scripts/record_goldens.py).
"""

import hashlib
import json
import platform
import random
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from tqdm import tqdm

from experiments.lib import figures, reporting
from experiments.lib.experiment import run
from experiments.lib.options import Options, option
from paged_jax.loading import build_byte_tokenizer, load_model
from paged_jax.loading.hf_directory import write_hf_weights
from paged_jax.models.config import ModelConfig
from paged_jax.models.params import Params, bind, flatten, init_params, nest, num_parameters
from paged_jax.steps.attention import causal_attention


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    steps: int = option(400, "The optimiser takes so many steps.", quick=40, least=10)
    out_dir: str = option("out/tiny_lm", "Folder for the model and its curve.")


BOS, EOS, PAD = 256, 257, 258
HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "bfloat16",
}
GENERATION_CONFIG = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}

TOKENS_PER_STEP = 1024
# (sequence length, share of the steps): short rows are cheap and teach most, the long ones at the
# end make every position up to max_position_embeddings a trained one.
PHASES = ((256, 0.78), (512, 0.2), (1024, 0.02))
# Muon learns in one step what takes AdamW several. It takes the layers' matrices; AdamW, inside it,
# takes the embedding and the norms.
PEAK_LEARNING_RATE = 0.02
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.05
LAST_CHARACTER = 0x600  # of those whose names are learnt
VALIDATION_SHARE = 0.05
VALIDATION_LENGTH = 512
NUM_POINTS = 10  # of the curve


@dataclass(frozen=True)
class Point:
    """One point of the curve."""

    step: int
    length: int  # tokens per sequence
    train_loss: float  # nats per byte, mean since the last point
    validation_loss: float  # nats per byte
    seconds: float  # since the start


def main(config: Config) -> None:
    out_dir = Path(config.out_dir)
    model = ModelConfig.from_hf(HF_CONFIG)
    documents = collect_documents(config.seed)
    num_held_out = round(len(documents) * VALIDATION_SHARE)
    validation, training = encode(documents[:num_held_out]), encode(documents[num_held_out:])
    print(
        f"{num_parameters(model):,} parameters; {len(documents):,} documents, "
        f"{len(training):,} tokens to learn from, {len(validation):,} held out"
    )
    params, curve = train(model, training, validation, num_steps=config.steps, seed=config.seed)

    write_model(out_dir, model, params)
    reloaded = nest(load_model(str(out_dir)).weights)
    final_loss = float(evaluate(model, reloaded, windows(validation)))
    report(config, documents, curve, final_loss)


def collect_documents(seed: int) -> list[str]:
    """Paragraphs and character names, each once, shuffled."""
    paragraphs = [
        " ".join(paragraph.split())
        for topic in sorted(topics)
        for paragraph in topics[topic].split("\n\n")
        if is_prose(paragraph)
    ]
    names = [
        f"{chr(code)}: {unicodedata.name(chr(code)).capitalize()}."
        for code in range(LAST_CHARACTER)
        if unicodedata.name(chr(code), "") and not unicodedata.combining(chr(code))
    ]
    documents = list(dict.fromkeys(paragraphs + names))
    random.Random(seed).shuffle(documents)
    return documents


def is_prose(paragraph: str) -> bool:
    """Neither a heading nor code, a table or a grammar rule."""
    text = paragraph.strip()
    return len(text) >= 40 and text[0].isupper() and text.endswith(".") and "::=" not in text


def encode(documents: list[str]) -> np.ndarray:
    """i32[N]: the bytes of all documents, each between bos and eos."""
    tokens = [token for text in documents for token in (BOS, *text.encode(), EOS)]
    return np.array(tokens, np.int32)


def batches(tokens: np.ndarray, num_steps: int, seed: int) -> Iterator[np.ndarray]:
    """i32[rows, length + 1], `TOKENS_PER_STEP` to predict in each.

    Rows start with a document, as prompts do: half of them with its bos, half with its first byte.
    """
    rng = np.random.default_rng(seed)
    starts = np.flatnonzero(tokens == BOS)
    ends = np.cumsum([share for _, share in PHASES])
    for step in range(num_steps):
        length = PHASES[int(np.searchsorted(ends, (step + 0.5) / num_steps))][0]
        num_rows = TOKENS_PER_STEP // length
        rows = rng.choice(starts[starts < len(tokens) - length - 1], num_rows)
        rows += rng.integers(0, 2, num_rows)
        yield tokens[rows[:, None] + np.arange(length + 1)]


def windows(tokens: np.ndarray) -> np.ndarray:
    """i32[rows, length + 1]: the tokens from end to end."""
    starts = np.arange(0, len(tokens) - VALIDATION_LENGTH, VALIDATION_LENGTH)
    rows: np.ndarray = tokens[starts[:, None] + np.arange(VALIDATION_LENGTH + 1)]
    return rows


def mean_loss(config: ModelConfig, params: Params, tokens: Array) -> Array:
    """Cross entropy in nats per token of i32[rows, length + 1]."""
    model = bind(config, params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    no_state = [None] * config.num_layers
    hidden, _ = model(inputs, positions, causal_attention, no_state, config.head_dim**-0.5)
    losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)
    return losses.mean()


evaluate = jax.jit(mean_loss, static_argnums=0)


def train(
    config: ModelConfig, training: np.ndarray, validation: np.ndarray, *, num_steps: int, seed: int
) -> tuple[Params, list[Point]]:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=PEAK_LEARNING_RATE,
        warmup_steps=min(WARMUP_STEPS, num_steps // 5),
        decay_steps=num_steps,
        end_value=PEAK_LEARNING_RATE / 50,
    )
    optimizer = optax.contrib.muon(schedule, adam_b2=0.98, weight_decay=WEIGHT_DECAY)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Params, state: Any, tokens: Array) -> tuple[Params, Any, Array]:
        loss, gradients = jax.value_and_grad(partial(mean_loss, config))(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = init_params(config, seed)
    state = optimizer.init(params)
    held_out = windows(validation)
    point_steps = set(np.linspace(0, num_steps, NUM_POINTS + 1).round().astype(int)[1:])
    curve: list[Point] = []
    losses: list[float] = []  # since the last point
    start = time.perf_counter()
    progress = tqdm(batches(training, num_steps, seed), total=num_steps, unit="step")
    for step, tokens in enumerate(progress, 1):
        params, state, loss = update(params, state, tokens)
        losses.append(float(loss))
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
        if step == 1 or step in point_steps:
            curve.append(
                Point(
                    step=step,
                    length=tokens.shape[1] - 1,
                    train_loss=float(np.mean(losses)),
                    validation_loss=float(evaluate(config, params, held_out)),
                    seconds=time.perf_counter() - start,
                )
            )
            losses.clear()
    return params, curve


def write_model(out_dir: Path, config: ModelConfig, params: Params) -> None:
    (out_dir / "config.json").write_text(json.dumps(HF_CONFIG, indent=2) + "\n")
    (out_dir / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=2) + "\n")
    write_hf_weights(out_dir, config, flatten(params), HF_CONFIG["dtype"])
    tokenizer = build_byte_tokenizer()
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out_dir)


def report(config: Config, documents: list[str], curve: list[Point], final_loss: float) -> None:
    columns = ("step", "length", "training loss", "validation loss", "seconds")
    rows = [tuple(asdict(point).values()) for point in curve]
    reporting.print_table("Loss in nats per byte", columns, rows)
    print(f"validation loss of the model as saved (bfloat16): {final_loss:.3f}")
    reporting.write_json(
        config.out_dir,
        "training.json",
        {
            "seed": config.seed,
            "steps": config.steps,
            "tokens_per_step": TOKENS_PER_STEP,
            "python": platform.python_version(),
            "text_sha256": hashlib.sha256("\0".join(documents).encode()).hexdigest(),
            "final_validation_loss": final_loss,
            "curve": curve,
        },
    )
    plot(config.out_dir, curve)


def plot(out_dir: str, curve: list[Point]) -> None:
    figure, panels = figures.panels(size=(6, 3.6))
    axes = panels[0, 0]
    steps = [point.step for point in curve]
    axes.plot(steps, [point.train_loss for point in curve], marker="o", label="training")
    axes.plot(steps, [point.validation_loss for point in curve], marker="s", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figures.save(figure, out_dir, "loss.png")


if __name__ == "__main__":
    run(main, Config)
