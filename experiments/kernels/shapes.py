"""Shapes of attention to measure, their random inputs, and the output that they must have."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention import AttentionOptions, Call
from pallas_kernels.targets import Target

Arguments = tuple[Any, ...]  # of an implementation of attention


class Geometry(NamedTuple):
    """Heads of a model's attention."""

    heads: int
    kv_heads: int
    head_size: int

    def __str__(self) -> str:
        names = (name for name, geometry in GEOMETRIES.items() if geometry == self)
        return next(names, "/".join(map(str, self)))


GEOMETRIES = {
    "llama3-8b": Geometry(32, 8, 128),
    "opt-13b": Geometry(40, 40, 128),
    "smollm2": Geometry(9, 3, 64),
}
GEOMETRY_HELP = f"Heads of attention: {', '.join(GEOMETRIES)}, or query heads/KV heads/head size."
DTYPES = ("float32", "bfloat16", "float16")


def parse_geometry(text: str) -> Geometry:
    """A name, or query heads/KV heads/head size; ValueError for anything else."""
    if text in GEOMETRIES:
        return GEOMETRIES[text]
    parts, names = text.split("/"), ", ".join(GEOMETRIES)
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        forms = f"{names}, or query heads/KV heads/head size such as 32/8/128"
        raise ValueError(f"a geometry is one of {forms}; got {text!r}")
    geometry = Geometry(*map(int, parts))
    if geometry.heads % geometry.kv_heads:
        raise ValueError(f"{text}: query heads must be a multiple of KV heads")
    return geometry


@dataclass(frozen=True)
class Shape:
    """A batch of sequences of equal length, each with its queries at its end: one in decoding."""

    geometry: Geometry
    batch: int
    context: int  # tokens
    block_size: int
    dtype: str
    queries: int = 1

    def __post_init__(self) -> None:
        if self.queries > self.context:
            raise ValueError(f"{self.queries} queries do not fit into {self.context} tokens")

    @property
    def blocks_per_row(self) -> int:
        return -(-self.context // self.block_size)

    @property
    def scale(self) -> float:
        return float(self.geometry.head_size**-0.5)

    @property
    def kv_bytes(self) -> int:
        """What attention cannot do without reading: each key and each value of the contexts."""
        width = self.geometry.kv_heads * self.geometry.head_size * jnp.dtype(self.dtype).itemsize
        return 2 * self.batch * self.context * width

    def call(self, target: Target | None, cache_head_size: int, **options: Any) -> Call:
        """The call of paged attention; `options` are those of `AttentionOptions`."""
        Hq, Hk, _ = self.geometry
        return Call(
            *(self.batch, self.queries, Hq, Hk, cache_head_size, self.block_size),
            *(self.batch * self.blocks_per_row, self.blocks_per_row, jnp.dtype(self.dtype)),
            *(AttentionOptions(self.scale, **options), target),
        )

    def __str__(self) -> str:
        queries = f", {self.queries} queries" if self.queries > 1 else ""
        rows = f"{self.geometry}, batch {self.batch}, context {self.context}{queries}"
        return f"{rows}, block {self.block_size}, {self.dtype}"


class Inputs(NamedTuple):
    """Contiguous caches; L is the context rounded up to whole blocks. All slots hold numbers."""

    q: Array  # [B, T, Hq, D]
    k: Array  # [B, Hk, L, D]
    v: Array  # [B, Hk, L, D]
    context_lens: Array  # i32[B]


@partial(jax.jit, static_argnames="shape")
def random_inputs(shape: Shape, seed: int) -> Inputs:
    """Normal numbers, made on the device row by row, which takes little memory beside them."""
    Hq, Hk, D = shape.geometry
    L = shape.blocks_per_row * shape.block_size

    sizes = ((shape.queries, Hq, D), (Hk, L, D), (Hk, L, D))

    def row(key: Array) -> list[Array]:
        keys = jax.random.split(key, 3)
        return list(map(partial(jax.random.normal, dtype=shape.dtype), keys, sizes))

    # The devices' own generator is the fastest.
    rows = jax.random.split(jax.random.key(seed, impl="rbg"), shape.batch)
    q, k, v = jax.lax.map(row, rows)
    return Inputs(q, k, v, jnp.full(shape.batch, shape.context, jnp.int32))


@partial(jax.jit, static_argnames=("shape", "cache_head_size"))
def paged(inputs: Inputs, seed: int, *, shape: Shape, cache_head_size: int) -> tuple[Array, ...]:
    """The inputs in blocks: q, k and v ``[P, Hk, S, D]``, tables ``i32[B, M]``, context lengths.

    The blocks of all rows are mixed, and every block belongs to a row. Lanes past the head size are
    zero, as in an engine.
    """
    _, Hk, D = shape.geometry
    B, M, S = shape.batch, shape.blocks_per_row, shape.block_size
    order = jax.random.permutation(jax.random.key(seed), B * M).astype(jnp.int32)

    def scatter(x: Array) -> Array:
        blocks = x.reshape(B, Hk, M, S, D).swapaxes(1, 2).reshape(B * M, Hk, S, D)
        padding = ((0, 0), (0, 0), (0, 0), (0, cache_head_size - D))
        return jnp.pad(blocks[jnp.argsort(order)], padding)

    q, k, v, context_lens = inputs
    return q, scatter(k), scatter(v), order.reshape(B, M), context_lens


@jax.jit
def wanted(inputs: Inputs) -> Array:
    """f32[B, T, Hq, D]: attention in float32, row by row, products at the highest precision."""
    T, L = inputs.q.shape[1], inputs.k.shape[2]

    def row(inputs: Inputs) -> Array:
        q, k, v = (x.astype(jnp.float32) for x in inputs[:3])
        positions = inputs.context_lens - T + jnp.arange(T)
        seen = jnp.arange(L) <= positions[:, None]  # [T, L]
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        with jax.default_matmul_precision("highest"):
            return jax.nn.dot_product_attention(q, k, v, mask=seen[None], implementation="xla")

    return jax.lax.map(row, inputs)


def relative_error(out: Array, wanted: Array) -> float:
    """Norm of the difference over the norm of what is wanted; NaN if either has a NaN."""
    difference = out.astype(jnp.float32) - wanted
    return float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(wanted.ravel()))
