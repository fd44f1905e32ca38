"""What the ops' entries take: arrays of any kind, indices of any integer type, nothing at all."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import block_copy
from pallas_kernels.arguments import as_array, as_indices
from pallas_kernels.kv_write import write_kv
from pallas_kernels.lab.cases import AttentionCase, make_case
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    AttentionOptions,
    Unsupported,
    paged_attention,
    paged_prefill_attention,
)
from pallas_kernels.paged_attention.mosaic_gpu.contiguous import contiguous_attention

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
every_implementation = pytest.mark.parametrize("impl", ["auto", *IMPLEMENTATIONS])


def attend(*arrays, impl: str, **options):
    """A kernel is interpreted; without it "auto" is what it is on this device."""
    options = {"scale": 0.1, "impl": impl, "interpret": impl != "auto"} | options
    return paged_prefill_attention(*arrays, **options)


def small_case(dtype=ml_dtypes.bfloat16, **shape) -> AttentionCase:
    """Its unused table entries are those of narrow types too."""
    shape = {"block_size": 16, "max_blocks": 3, "head_dim": 64} | shape
    case = make_case(np.random.default_rng(0), [5, 0, 40], dtype=dtype, **shape)
    return case._replace(tables=np.clip(case.tables, 0, 100))


@every_implementation
def test_attention_takes_what_jax_makes_an_array_of(impl):
    case = small_case(query_starts=[4, 0, 39])
    wanted = attend(*map(jnp.asarray, case), impl=impl)
    floats, indices = case[:3], case[3:]
    for arguments in (
        case,
        (*floats, *(x.tolist() for x in indices)),
        (*map(list, floats), *map(list, map(jnp.asarray, indices))),
        (*map(jnp.asarray, floats), *(x.astype(np.uint64) for x in indices)),
    ):
        for x, y in zip(attend(*arguments, impl=impl), wanted, strict=True):
            assert isinstance(x, jax.Array)
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_tables_and_lengths_may_be_of_any_integer_type(dtype):
    q, k_cache, v_cache, *rows = small_case(query_starts=[4, 0, 39])
    wanted = attend(q, k_cache, v_cache, *rows, impl="reference")
    narrow = [x.astype(dtype) for x in rows]
    decoded = paged_attention(q[:, 0], k_cache, v_cache, *narrow[:2], scale=0.1)
    np.testing.assert_allclose(*(np.float32(x) for x in (decoded, wanted.out[:, 0])), atol=0.02)
    if jax.dtypes.canonicalize_dtype(dtype) == dtype:  # 64 bits need jax_enable_x64
        jitted = jax.jit(partial(attend, impl="reference"))
        np.testing.assert_array_equal(jitted(q, k_cache, v_cache, *narrow).out, wanted.out)


REFUSED = [  # JAX's own attention on a CPU, and what tensor cores do not multiply
    ("gather_sdpa", "float16"),
    ("mosaic_gpu", "float32"),
    ("mosaic_gpu_wgmma", "float32"),
]


@every_implementation
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_statistics_are_strongly_typed_float32_and_the_output_is_as_q(impl, dtype):
    case = [jnp.asarray(x) for x in small_case(dtype=jnp.dtype(dtype))]
    case[:3] = (jnp.full(x.shape, 1.0).astype(dtype) for x in case[:3])
    try:
        result = jax.eval_shape(partial(attend, impl=impl), *case)
    except Unsupported:
        assert (impl, dtype) in REFUSED
        return
    assert [x.dtype for x in result] == [dtype, "float32", "float32"]
    assert not any(x.weak_type for x in result)


def test_a_weakly_typed_query_has_a_strongly_typed_result():
    *floats, tables, lens, starts = small_case(np.float32)
    weak = [jnp.full(x.shape, 1.0) for x in floats]
    assert all(x.weak_type for x in weak)
    assert not any(x.weak_type for x in attend(*weak, tables, lens, starts, impl="xla"))


@every_implementation
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_no_rows_no_queries_and_no_blocks_give_a_result_of_their_shape(impl, transform):
    q, k_cache, v_cache, tables, lens, starts = small_case(num_queries=2)
    call = transform(partial(attend, impl=impl))
    for name, arguments in {
        "rows": (q[:0], k_cache, v_cache, tables[:0], lens[:0], starts[:0]),
        "queries": (q[:, :0], k_cache, v_cache, tables, lens, starts),
        "blocks": (q, k_cache, v_cache, tables[:, :0], lens * 0, starts * 0),
    }.items():
        out, top, lse = call(*arguments)
        assert out.shape == arguments[0].shape, name
        assert out.dtype == q.dtype
        assert top.shape == lse.shape == out.shape[:3]
        assert top.dtype == lse.dtype == np.float32
        assert not np.any(np.float32(out))
        assert np.all(np.isneginf(lse))


def test_decoding_no_rows_may_be_asked_for_with_empty_lists():
    q, k_cache, v_cache, *_ = small_case()
    out, top, lse = paged_attention(
        q[:0, 0], k_cache, v_cache, np.zeros((0, 3), int), [], scale=1, return_residuals=True
    )
    assert (out.shape, top.shape, lse.shape) == ((0, 4, 64), (0, 4), (0, 4))


def test_contiguous_attention_takes_lists_and_no_rows():
    case = small_case()
    k = np.ones((3, 2, 64, 64), case.q.dtype)
    options = AttentionOptions(0.1, interpret=True)
    wanted = contiguous_attention(case.q, k, k, [5, 0, 40], [4, -1, 39], options=options)
    lens, starts = np.array([5, 0, 40], np.uint8), jnp.array([4, -1, 39], jnp.int8)
    actual = contiguous_attention(list(case.q), k, k, lens, starts, options=options)
    for x, y in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    assert contiguous_attention(case.q[:0], k[:0], k[:0], [], [], options=options).lse.size == 0
    with pytest.raises(
        ValueError, match=r"context_lens\[2\] is 65, above 64: .* room for 64 tokens"
    ):
        contiguous_attention(case.q, k, k, [5, 0, 65], starts, options=options)
    with pytest.raises(ValueError, match=r"k \(2, 2, 64, 64\) must have the 3 rows"):
        contiguous_attention(case.q, k[:2], k[:2], lens, starts, options=options)


def test_a_number_beyond_int32_does_not_wrap_around_to_one_that_exists():
    for beyond in (
        [2**32 + 1],
        np.array([2**32 + 1]),
        np.array([2**63 + 1], np.uint64),
        [np.int64(2**32 + 1)],
        jnp.array([2**31 + 1], jnp.uint32),
    ):
        assert as_indices("x", beyond, "[N]").tolist() == [2**31 - 1]
    assert as_indices("x", [-(2**32) + 1], "[N]").tolist() == [-(2**31)]
    jitted = jax.jit(lambda x: as_indices("x", x, "[N]"))
    assert jitted(jnp.array([2**31 + 1, 7], jnp.uint32)).tolist() == [2**31 - 1, 7]
    with jax.enable_x64(True):
        wide = jnp.array([2**32 + 1, 7])
    for convert in (as_indices, jax.jit(as_indices, static_argnums=(0, 2))):
        assert convert("x", wide, "[N]").tolist() == [2**31 - 1, 7]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0], r"x must be integers, got float64\[1\]"),
        (np.zeros(0, np.float32), r"x must be integers, got float32\[0\]"),
        (jnp.array([True]), r"x must be integers, got bool\[1\]"),
        ([2**80], r"x must be integers, got object\[1\]"),
        (None, r"x must be integers, got object"),
        ([[1], [1, 2]], "x is no array of numbers: .*inhomogeneous"),
        ([[1]], r"x must have 1 axes \[N\], got shape \(1, 1\)"),
    ],
    ids=str,
)
def test_what_are_no_indices_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        as_indices("x", x, "[N]")


@pytest.mark.parametrize("x", [None, "abc", [[1], [1, 2]], np.array(["a"]), object()])
def test_what_is_no_array_is_refused_in_one_line(x):
    with pytest.raises(ValueError, match=r"^x is no array of numbers: .+$"):
        as_array("x", x, "[N]")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("context_lens", [5, 0, 49], r"context_lens\[2\] is 49, above 48: .* 48 tokens"),
        ("context_lens", [5, -1, 4], r"context_lens\[1\] is -1, below 0"),
        ("context_lens", [5, 0, 2**40], r"context_lens\[2\] is 2147483647 or more"),
        ("query_starts", [4, 49, 0], r"query_starts\[1\] is 49, above 48"),
        ("tables", [[1, 99, 0]] * 3, r"block_tables\[2, 1\] is 99, above 11: .* 12 blocks"),
        ("tables", [[-1, 0, 0]] * 3, r"block_tables\[0, 0\] is -1, below 0"),
    ],
)
def test_values_out_of_range_are_refused_where_the_host_knows_them(name, value, message):
    case = small_case()
    with pytest.raises(ValueError, match=message):
        attend(*case._replace(**{name: value}), impl="xla")


@pytest.mark.parametrize("impl", ["reference", "xla", "gather_sdpa"])
def test_a_context_that_outgrows_its_table_ends_with_it(impl):
    """On a device it is not looked at; a loop over it must end all the same."""
    case = small_case(np.float32)._replace(tables=np.arange(1, 10).reshape(3, 3))
    case = AttentionCase(*(np.nan_to_num(x) for x in case[:3]), *case[3:])
    full = attend(*case._replace(context_lens=np.full(3, 48)), impl=impl)
    outgrown = attend(*case._replace(context_lens=jnp.full(3, 2**31 + 5, jnp.uint32)), impl=impl)
    np.testing.assert_array_equal(outgrown.out, full.out)


@pytest.mark.parametrize("impl", ["auto", "reference", "triton", "mosaic_gpu"])
@pytest.mark.parametrize("name", ["scale", "soft_cap", "sliding_window", "interpret"])
def test_a_traced_option_is_refused_in_one_line(impl, name):
    case = small_case()
    with pytest.raises(ValueError, match=rf"^{name} must be static, got a traced value; .+"):
        jax.jit(lambda value: attend(*case, impl=impl, **{name: value}))(1)


def test_options_of_numpy_and_of_jax_are_those_of_python():
    options = AttentionOptions(
        np.float32(0.5), jnp.float32(2), np.int64(7), np.True_, jnp.array(False)
    )
    assert options == AttentionOptions(0.5, 2.0, 7, interpret=True)
    assert hash(options) == hash(AttentionOptions(0.5, 2.0, 7, interpret=True))
    case = small_case()
    out = attend(*case, impl="reference", scale=np.float64(0.1)).out
    np.testing.assert_array_equal(out, attend(*case, impl="reference").out)


CACHES = [np.random.default_rng(i).standard_normal((5, 2, 4, 8), np.float32) for i in range(2)]
every_move = pytest.mark.parametrize("impl", ["reference", "xla", "mosaic_gpu"])


@every_move
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.ndarray.tolist, jnp.int16], ids=str)
def test_moves_take_what_jax_makes_an_array_of(impl, kind):
    options = {"impl": impl, "interpret": True}
    new, slots = np.ones((2, 2, 8)), np.array([5, 13])
    for cache in write_kv(*CACHES, new.tolist(), new, kind(slots), **options):
        np.testing.assert_array_equal(cache[[1, 3], :, [1, 1]], new)
    stacked = np.stack(CACHES)
    staged = block_copy.read_blocks(stacked, kind(np.array([4, 2])), **options)
    np.testing.assert_array_equal(staged, stacked[:, [4, 2]].swapaxes(0, 1))
    copied = block_copy.copy_blocks(CACHES, kind(np.array([4])), kind(np.array([1])), **options)
    written = block_copy.write_blocks(CACHES, np.asarray(staged), kind(np.array([1, 3])), **options)
    for i, cache in enumerate(CACHES):
        np.testing.assert_array_equal(copied[i][1], cache[4])
        np.testing.assert_array_equal(written[i][1], cache[4])


@every_move
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_nothing_to_move_leaves_the_caches_as_they_are(impl, transform):
    none = np.zeros(0, np.int64)
    options = {"impl": impl, "interpret": True}
    write, copy, read, write_back = (
        transform(partial(f, **options))
        for f in (
            write_kv,
            block_copy.copy_blocks,
            block_copy.read_blocks,
            block_copy.write_blocks,
        )
    )
    no_rows = np.zeros((0, 2, 8), np.float32)
    staged = read(CACHES, none)
    assert staged.shape == (0, 2, 2, 4, 8)
    assert staged.dtype == np.float32
    for after in (
        write(*CACHES, no_rows, no_rows, none),
        copy(CACHES, none, none),
        write_back(CACHES, staged, none),
    ):
        for x, y in zip(after, CACHES, strict=True):
            np.testing.assert_array_equal(x, y)


def test_moves_out_of_the_caches_are_refused_where_the_host_knows_the_numbers():
    new = np.ones((2, 2, 8), np.float32)
    with pytest.raises(ValueError, match=r"slots\[1\] is 20, above 19: .* 5 blocks of 4"):
        write_kv(*CACHES, new, new, [1, 20])
    with pytest.raises(ValueError, match=r"targets\[0\] is -1, below 0: .* 5 blocks"):
        block_copy.copy_blocks(CACHES, [1], [-1])
