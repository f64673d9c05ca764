"""Compiles the native step for one model shape and one kind of processor, once, and keeps the result on disk."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from nemo_style_aligner.engine.architecture import ENDS, GATE_LIMIT, GATE_SLOPE, LayerFeatures, ModelArchitecture
from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.native.compilation import (
    INCLUDES,
    KERNELS,
    NativeUnavailable,
    compilation_key,
    compile_to,
    compiler_flags,
    find_compiler,
    find_or_compile,
    prepare,
)
from nemo_style_aligner.engine.shard import TensorParallel

_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / name for name in ("step.cpp", "check.cpp", "attention.h", "panels.h", "pairs.h", "sample.h")]
_SOURCES += [INCLUDES / name for name in ("threads.h", "tiles.h", "vectors.h")]
_CHECK_SECONDS = 120.0
_CHECKED_MODEL = ModelArchitecture(
    num_layers=1, hidden_size=384, ffn_hidden_size=512, num_attention_heads=6, num_query_groups=2, vocab_size=256
)


def load_library(shape: EngineShape, kernel: str) -> ctypes.CDLL:
    """The compiled step for ``shape``: from disk, where it was compiled before.

    Raises:
        NativeUnavailable: there is no compiler, it failed, the kernels fail their check, no folder can keep the library
            and execute it, or the system refuses the instructions.
    """
    compiler = find_compiler()
    command = compile_command(compiler, shape, kernel)

    def require_check(folder: Path) -> None:
        _require_check(compiler, shape, kernel, folder)

    check_first = require_check if KERNELS[kernel].checked else None
    library = find_or_compile(command, _SOURCES, check_first)
    prepare(library, kernel)
    return library


def compile_command(compiler: Sequence[str], shape: EngineShape, kernel: str) -> list[str]:
    """Compiler and flags for ``shape``, without source and output."""
    return [*compiler, *compiler_flags(kernel), *(f"-D{name}={value}" for name, value in _macros(shape).items())]


def _require_check(compiler: Sequence[str], shape: EngineShape, kernel: str, folder: Path) -> None:
    """Run `check` on a small model, unless it has passed here before: once per kernel and dtype.

    Raises:
        NativeUnavailable: see `check`.
    """
    checked = dataclasses.replace(shape, architecture=_CHECKED_MODEL, tensor_parallel=TensorParallel())
    command = compile_command(compiler, checked, kernel)
    # One record per Linux release: instructions that one allows, another may refuse.
    record = folder / f"check-{compilation_key(command, _SOURCES)}-{os.uname().release}.passed"
    if not record.exists():
        check(command, folder)
        record.touch()


def check(command: list[str], folder: Path) -> None:
    """Compile ``check.cpp`` into ``folder`` and run it, in a process of its own: an illegal instruction ends only that.

    Raises:
        NativeUnavailable: results are wrong, the program crashed, the system refuses the instructions, or the check
            could not be carried out.
    """
    handle, name = tempfile.mkstemp(dir=folder, prefix="check-", suffix=".tmp")
    os.close(handle)
    program = Path(name)
    try:
        compile_to(command, _FOLDER / "check.cpp", program)
        result = subprocess.run([name], capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"the check of the compiled kernels took more than {_CHECK_SECONDS:.0f} s") from error
    finally:
        program.unlink(missing_ok=True)
    if result.returncode:
        raise NativeUnavailable(
            "the compiled kernels fail their check on this processor "
            f"(status {result.returncode}; {result.stdout.strip()})"
        )


def _macros(shape: EngineShape) -> dict[str, object]:
    a, shard = shape.architecture, shape.shard
    features = (*(field.name for field in dataclasses.fields(LayerFeatures)), *ENDS)
    return {
        **{name.upper(): _macro(getattr(a, name)) for name in features},
        "LAYERS": a.num_layers,
        "HIDDEN": a.hidden_size,
        "HEADS": shard.num_heads,
        "GROUPS": shard.num_groups,
        "HEAD_DIM": a.kv_channels,
        "ROTARY": a.turned_channels,
        "FFN": shard.ffn_size,
        **_expert_macros(a, shard.size),
        "VOCAB_ROWS": shard.vocab_rows,
        "RANKS": shard.size,
        "GATE_SLOPE": repr(GATE_SLOPE),
        "GATE_LIMIT": repr(GATE_LIMIT),
        "EPSILON": repr(a.layernorm_epsilon),
        "SOFTMAX_SCALE": repr(a.attention_scale),
        "STORAGE_F32": int(shape.dtype == torch.float32),
    }


def _expert_macros(a: ModelArchitecture, ranks: int) -> dict[str, object]:
    e = a.experts
    return {
        "EXPERTS": e.number if e else 0,
        "EXPERTS_PER_TOKEN": e.per_token if e else 0,
        "EXPERT_FFN": e.ffn_hidden_size // ranks if e else 0,
        "SHARED_FFN": e.shared_ffn_hidden_size // ranks if e else 0,
        "ROUTER_SIGMOID": int(e is not None and e.scores == "sigmoid"),
        "ROUTER_NORMALIZED": int(e is not None and e.normalized),
        "ROUTER_SCALING": repr(e.scaling if e else 1.0),
    }


def _macro(value: bool | float | str | None) -> object:
    """A feature's value in C++: words are constants there, None is 0."""
    if isinstance(value, str):
        return value.upper().replace("-", "_")
    return repr(value) if isinstance(value, float) else int(value or 0)
