"""Implementations of attention that are measured side by side: paged attention and its baselines.

The baselines read contiguous caches, or are the paged kernels of JAX and of cuDNN. Each has its
inputs in its own layout, which is made before anything is timed.
"""

import dataclasses
import importlib
import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from experiments.kernels.shapes import Arguments, Inputs, Shape, paged
from pallas_kernels import targets
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    Unsupported,
    cache_head_size,
    paged_prefill_attention,
)


class Attention(NamedTuple):
    """An implementation that is ready for a shape. All its variants compute the same.

    prepare: inputs and a seed of the blocks' order -> the arguments of every variant.
    variants: name of the settings -> a function ``(*arguments) -> [B, T, Hq, D]``.
    """

    prepare: Callable[[Inputs, int], Arguments]
    variants: Mapping[str, Callable[..., Array]]


def attention_for(
    name: str, shape: Shape, *, interpret: bool = False, tuning: Any | None = None
) -> Attention:
    """A baseline or an implementation of paged attention, by its name.

    `Unsupported` says why it cannot do the shape here, ValueError that there is no such name.
    """
    if name in BASELINES:
        if shape.queries > 1 and name != "contiguous":
            raise Unsupported(f"{name} is here for decoding, not for {shape.queries} queries")
        return BASELINES[name](shape, interpret)

    def attend(q: Array, k: Array, v: Array, tables: Array, lens: Array) -> Array:
        arguments = (q, k, v, tables, lens, lens - shape.queries)
        options: dict[str, Any] = {"scale": shape.scale, "interpret": interpret, "tuning": tuning}
        return paged_prefill_attention(*arguments, impl=name, **options).out

    width = cache_head_size(name, shape.geometry.head_size)
    return Attention(partial(paged, shape=shape, cache_head_size=width), {"": attend})


def check_name(name: str) -> None:
    """ValueError unless `attention_for` knows the name; a dotted one is a kernel's module."""
    if "." not in name and name not in (*IMPLEMENTATIONS, *BASELINES):
        known = ", ".join((*IMPLEMENTATIONS, *BASELINES))
        raise ValueError(f"unknown attention {name!r}; choose of {known}, or name a module")


def contiguous(shape: Shape, interpret: bool) -> Attention:
    """The kernel body of `mosaic_gpu`, with the same tuning, over caches ``[B, Hk, L, D]``."""
    from pallas_kernels.paged_attention.mosaic_gpu.contiguous import contiguous_attention
    from pallas_kernels.paged_attention.mosaic_gpu.tuning import default_tuning

    call = shape.call(targets.current(), shape.geometry.head_size, interpret=interpret)
    tuning = default_tuning(call)
    options = dataclasses.replace(call.options, tuning=tuning)
    S = shape.block_size
    padding = -shape.blocks_per_row * S % math.lcm(S, tuning.block_kv)  # to whole tiles

    def prepare(inputs: Inputs, seed: int) -> Arguments:
        wider = ((0, 0), (0, 0), (0, padding), (0, 0))
        return inputs.q, jnp.pad(inputs.k, wider), jnp.pad(inputs.v, wider), inputs.context_lens

    def attend(q: Array, k: Array, v: Array, lens: Array) -> Array:
        starts = lens - shape.queries
        return contiguous_attention(q, k, v, lens, starts, options=options, block_size=S).out

    return Attention(prepare, {"": attend})


def two_products(scale: float, q: Array, k: Array, v: Array, context_lens: Array) -> Array:
    """Decode attention of ``q [B, 1, Hq, D]`` over caches ``[B, Hk, L, D]``."""
    B, _, Hq, D = q.shape
    _, Hk, L, _ = k.shape
    grouped = q.reshape(B, Hk, Hq // Hk, D)
    used = jnp.arange(L) < context_lens[:, None]
    # Keys first: XLA's CPU products are faster so.
    scores = jnp.einsum("bhld,bhgd->bhlg", k, grouped, preferred_element_type=jnp.float32)
    scores = jnp.where(used[:, None, None], scale * scores.swapaxes(2, 3), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bhgl,bhld->bhgd", weights, v).reshape(q.shape)


def xla_contiguous(shape: Shape, interpret: bool) -> Attention:
    """Two plain products over caches ``[B, Hk, L, D]``."""
    return Attention(lambda inputs, seed: inputs, {"": partial(two_products, shape.scale)})


def jax_paged(shape: Shape, interpret: bool) -> Attention:
    """JAX's own paged attention (Pallas Triton), with its default of 16 splits and with fewer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        kernel = _imported("jax.experimental.pallas.ops.gpu.paged_attention").paged_attention
    D, M = shape.geometry.head_size, shape.blocks_per_row
    if D & (D - 1) or shape.block_size & (shape.block_size - 1):
        raise Unsupported("JAX's kernel wants powers of two for head size and block size")

    def prepare(inputs: Inputs, seed: int) -> Arguments:
        q, k, v, tables, lens = paged(inputs, seed, shape=shape, cache_head_size=D)
        return q[:, 0] * shape.scale, k.swapaxes(0, 1), v.swapaxes(0, 1), tables, lens

    def attend(*arguments: Array, num_splits: int) -> Array:
        # As many blocks at a time as divide a split, up to the kernel's default of 8.
        splits = {"k_splits": num_splits, "pages_per_compute_block": math.gcd(M // num_splits, 8)}
        out: Array = kernel(*arguments, interpret=interpret, **splits)
        return out[:, None]

    counts = [count for count in (16, 4, 1) if M % count == 0]
    return Attention(prepare, {f"{n} splits": partial(attend, num_splits=n) for n in counts})


def cudnn_paged(shape: Shape, interpret: bool) -> Attention:
    """cuDNN's paged attention, as JAX calls it; it takes our layout as it is."""
    cudnn = _cudnn()
    D = shape.geometry.head_size

    def prepare(inputs: Inputs, seed: int) -> Arguments:
        q, k, v, tables, lens = paged(inputs, seed, shape=shape, cache_head_size=D)
        return q.swapaxes(1, 2), k, v, tables[:, None, :, None], lens

    def attend(q: Array, k: Array, v: Array, tables: Array, lens: Array) -> Array:
        arguments = (q, k, v, jnp.ones_like(lens), lens, tables, tables)
        padding = {"mask_type": cudnn.MaskType.PADDING, "qkv_layout": "BNTH"}
        return cudnn.paged_attention(*arguments, scale=shape.scale, **padding).swapaxes(1, 2)

    return Attention(prepare, {"": attend})


def cudnn_contiguous(shape: Shape, interpret: bool) -> Attention:
    """cuDNN's attention over contiguous caches, through `jax.nn.dot_product_attention`."""
    _cudnn()

    def prepare(inputs: Inputs, seed: int) -> Arguments:
        return inputs._replace(k=inputs.k.swapaxes(1, 2), v=inputs.v.swapaxes(1, 2))

    def attend(q: Array, k: Array, v: Array, lens: Array) -> Array:
        return jax.nn.dot_product_attention(
            *(q, k, v),
            query_seq_lengths=jnp.ones_like(lens),
            key_value_seq_lengths=lens,
            implementation="cudnn",
        )

    return Attention(prepare, {"": attend})


# These read caches [B, Hk, L, D]: no block size matters to them.
CONTIGUOUS = ("contiguous", "xla_contiguous", "cudnn_contiguous")

BASELINES: dict[str, Callable[[Shape, bool], Attention]] = {
    function.__name__: function
    for function in (contiguous, xla_contiguous, cudnn_contiguous, jax_paged, cudnn_paged)
}


def _cudnn() -> Any:
    """JAX's private module of cuDNN attention; `Unsupported` where there is no cuDNN."""
    module = _imported("jax._src.cudnn.fused_attention_stablehlo")
    try:
        module.check_cudnn_version()
    except RuntimeError as error:
        raise Unsupported(f"no cuDNN here: {error}") from error
    return module


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unsupported(f"JAX {jax.__version__} no longer has {module}") from error
