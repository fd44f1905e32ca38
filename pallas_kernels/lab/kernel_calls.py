"""The Pallas kernels in a module that JAX has lowered for CUDA.

What this file knows of JAX's insides, the same in 0.11.2 and 0.12: the two custom calls, their
configuration, and that a Mosaic kernel is in there as bytecode with one `gpu.launch`.
"""

import io
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.interpreters import mlir
from jax.stages import Lowered
from jaxlib.mlir import ir
from jaxlib.mosaic.python import mosaic_gpu

_MOSAIC = "mosaic_gpu_v2"
_TRITON = "__gpu$xla.gpu.triton"
_CONFIG = "mhlo.backend_config"


@dataclass(frozen=True)
class KernelCall:
    """One kernel as it is launched. Sizes in bytes."""

    name: str
    backend: str  # "mosaic" or "triton"
    grid: tuple[int, int, int]
    dynamic_shared_memory: int | None  # None: known only when it is compiled (Triton)


def find(lowered: Lowered) -> tuple[KernelCall, ...]:
    """The calls of kernels, in the order of the text."""
    return tuple(map(_read, _calls(lowered)))


def rename(lowered: Lowered, prefix: str) -> tuple[str, ...]:
    """Rename the kernels of `find`, in place, to `prefix` + their index; returns the names."""
    names = {f"{prefix}{index}": call for index, call in enumerate(_calls(lowered))}
    for name, call in names.items():
        _rename(call, name)
    return tuple(names)


def _calls(lowered: Lowered) -> list[Any]:
    module: Any = lowered.compiler_ir()
    return [
        operation
        for operation in _walk(module.operation)
        if operation.name == "stablehlo.custom_call" and _target(operation) in (_MOSAIC, _TRITON)
    ]


def _walk(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _walk(inner.operation)


def _target(operation: Any) -> str:
    return str(ir.StringAttr(operation.attributes["call_target_name"]).value)


def _config(operation: Any) -> dict[str, Any]:
    config = ir.DictAttr(operation.attributes[_CONFIG])
    return {config[i].name: config[i].attr for i in range(len(config))}


def _read(operation: Any) -> KernelCall:
    config = _config(operation)
    if _target(operation) == _TRITON:
        x, y, z = (ir.IntegerAttr(config[f"grid_{axis}"]).value for axis in "xyz")
        return KernelCall(ir.StringAttr(config["name"]).value, "triton", (x, y, z), None)
    kernel = _mosaic_module(config)
    # There is one. To look on, at the thousands of operations within, would take seconds.
    launch = next(op for op in _walk(kernel.operation) if op.name.endswith("gpu.launch"))
    # A token to wait for, grid, threads, perhaps clusters, shared memory.
    _, x, y, z, *_, shared_memory = launch.operands
    name = ir.StringAttr(kernel.operation.attributes["sym_name"]).value
    grid = (_constant(x), _constant(y), _constant(z))
    return KernelCall(name, "mosaic", grid, _constant(shared_memory))


def _constant(value: Any) -> int:
    operation = value.owner.operation if hasattr(value.owner, "operation") else value.owner
    return int(ir.IntegerAttr(operation.attributes["value"]).value)


def _mosaic_module(config: dict[str, Any]) -> ir.Module:
    """The kernel's module, parsed from its versioned bytecode."""
    context = mlir.make_ir_context()
    mosaic_gpu.register_dialect(context)
    context.load_all_available_dialects()
    context.allow_unregistered_dialects = True
    with context:
        return ir.Module.parse(ir.StringAttr(config["module"]).value_bytes)


def _triton_module(config: dict[str, Any]) -> ir.Module:
    from jaxlib.triton import dialect  # a later JAX has no Triton

    context = mlir.make_ir_context()
    dialect.register_dialect(context)
    with context:
        return ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)


def _rename(operation: Any, name: str) -> None:
    config = _config(operation)
    if _target(operation) == _TRITON:
        module, key = _triton_module(config), "ir"
        with module.context:
            [function] = [op for op in _walk(module.operation) if op.name == "tt.func"]
            function.attributes["sym_name"] = ir.StringAttr.get(name)
        with operation.context:
            config["name"] = ir.StringAttr.get(name)
    else:
        module, key = _mosaic_module(config), "module"
        with module.context:
            module.operation.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)
        with operation.context:
            config["kernel_hash"] = ir.StringAttr.get(secrets.token_bytes(32))
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode, desired_version=0)
    with operation.context:
        config[key] = ir.StringAttr.get(bytecode.getvalue())
        operation.attributes[_CONFIG] = ir.DictAttr.get(config)
