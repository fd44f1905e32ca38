"""GPUs and models described in numbers: what a step reads, computes and keeps of a model."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU. Bytes, and bytes or floating-point operations per second."""

    name: str
    memory_bytes: int
    memory_bandwidth: float  # to its own memory
    flops: float  # dense matrix products of 16-bit values
    host_bandwidth: float  # PCIe, each direction
    link_bandwidth: float  # NVLink to the other GPUs of its node, each direction
    # From one kernel's end to the next one's start where launches are queued. Empty kernels run
    # back to back take 2 to 5 us each; data sheets do not say.
    kernel_launch_s: float = 4e-6


_GIB = 2**30

# Data sheets of the SXM modules: NVIDIA A100 (2021), H100 (2022), H200 (2024) and HGX B200 (2024,
# an eighth of the board's figures). FLOP/s are without sparsity, half of the printed figures. The
# sheets' GB of memory are GiB, some hundred MiB of which the driver takes; 180 of a B200's 192 are
# usable. PCIe 4.0 x16 carries 32 GB/s each way, 5.0 64 GB/s; NVLink is sold as the sum of both
# directions.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("A100-40GB", 40 * _GIB, 1.555e12, 312e12, 32e9, 300e9),
        GPU("A100-80GB", 80 * _GIB, 2.039e12, 312e12, 32e9, 300e9),
        GPU("H100", 80 * _GIB, 3.35e12, 989e12, 64e9, 450e9),
        GPU("H200", 141 * _GIB, 4.8e12, 989e12, 64e9, 450e9),
        GPU("B200", 180 * _GIB, 8.0e12, 2250e12, 64e9, 900e9),
    )
}


def find_gpu(name: str) -> GPU:
    """The described GPU of this name; ValueError names the known GPUs."""
    return _find(name, GPUS, "description of GPU")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. Counts of values unless the name says otherwise."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int  # tokens
    is_gated: bool  # gate, up and down; otherwise up and down
    has_tied_embeddings: bool
    num_positions: int = 0  # of a learned position embedding
    has_biases: bool = False  # on every matrix, and on the norms
    bytes_per_value: int = 2  # of weights and of KV

    @property
    def attention_size(self) -> int:
        """Values of one token's query, all heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of one token's key in one layer; its value takes as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """A KV slot: keys and values of one token in all layers."""
        return 2 * self.num_layers * self.kv_size * self.bytes_per_value

    @property
    def num_layer_weights(self) -> int:
        """Values in the matrices of one layer."""
        attention = self.hidden_size * (2 * self.attention_size + 2 * self.kv_size)
        return attention + (2 + self.is_gated) * self.hidden_size * self.intermediate_size

    @property
    def num_head_weights(self) -> int:
        """Values in the matrix that makes logits of the last hidden state."""
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        norms = (1 + self.has_biases) * self.hidden_size
        per_layer = self.num_layer_weights + 2 * norms
        if self.has_biases:
            per_layer += self.attention_size + 2 * self.kv_size
            per_layer += 2 * self.hidden_size + (1 + self.is_gated) * self.intermediate_size
        embeddings = (2 - self.has_tied_embeddings) * self.num_head_weights
        positions = self.num_positions * self.hidden_size
        return self.num_layers * per_layer + norms + embeddings + positions

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.bytes_per_value


def _opt(name: str, num_layers: int, num_heads: int, head_dim: int = 128) -> ModelShape:
    """Zhang et al. 2022, table 1: an MLP four times as wide, two more positions than tokens."""
    hidden = num_heads * head_dim
    return ModelShape(
        name,
        num_layers,
        num_heads,
        num_heads,
        head_dim,
        hidden,
        4 * hidden,
        vocab_size=50_272,
        max_model_len=2048,
        is_gated=False,
        has_tied_embeddings=True,
        num_positions=2050,
        has_biases=True,
    )


def _llama(
    name: str,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    max_model_len: int,
    *,
    head_dim: int = 128,
    has_tied_embeddings: bool = False,
) -> ModelShape:
    return ModelShape(
        name,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        num_heads * head_dim,
        intermediate_size,
        vocab_size,
        max_model_len,
        is_gated=True,
        has_tied_embeddings=has_tied_embeddings,
    )


# LLaMA: Touvron et al. 2023, table 2; Llama 3: Grattafiori et al. 2024, table 3; SmolLM2: its
# config.json. The paper (Kwon et al., table 1) rounds OPT-13B, 66B and 175B to 26, 132 and 346 GB.
MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        _opt("OPT-13B", 40, 40),
        _opt("OPT-66B", 64, 72),
        _opt("OPT-175B", 96, 96),
        _llama("LLaMA-7B", 32, 32, 32, 11_008, 32_000, 2048),
        _llama("LLaMA-13B", 40, 40, 40, 13_824, 32_000, 2048),
        _llama("Llama-3-8B", 32, 32, 8, 14_336, 128_256, 8192),
        _llama("Llama-3-70B", 80, 64, 8, 28_672, 128_256, 8192),
        _llama("SmolLM2-135M", 30, 9, 3, 1536, 49_152, 8192, head_dim=64, has_tied_embeddings=True),
    )
}


def find_model_shape(name: str) -> ModelShape:
    """The described model of this name; ValueError names the known models."""
    return _find(name, MODEL_SHAPES, "shape of model")


def _find[Setup](name: str, known: Mapping[str, Setup], what: str) -> Setup:
    for each, setup in known.items():
        if each.lower() == name.lower():
            return setup
    raise ValueError(f"no {what} {name!r}; there are {', '.join(known)}")
