"""The interface of ``step.cpp``: its structures, field by field, and its context."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

Pointer = ctypes.c_void_p


class Layer(ctypes.Structure):
    """One layer's weights and pages."""

    _fields_ = [
        *[(name, Pointer) for name in ("qkv", "output", "fc1", "fc2")],
        *[(name, Pointer) for name in ("qkv_bias", "output_bias", "fc1_bias", "fc2_bias")],
        *[(name, Pointer) for name in ("input_norm", "input_norm_bias", "mlp_norm", "mlp_norm_bias")],
        *[(name, Pointer) for name in ("attention_out_norm", "attention_out_norm_bias")],
        *[(name, Pointer) for name in ("mlp_out_norm", "mlp_out_norm_bias")],
        *[(name, Pointer) for name in ("query_norm", "key_norm", "cosines", "sines", "keys", "values", "sinks")],
        *[(name, Pointer) for name in ("router", "expert_fc1", "expert_fc2")],
        *[(name, Pointer) for name in ("router_bias", "expert_fc1_bias", "expert_fc2_bias", "choice_bias")],
        ("window", ctypes.c_int32),
    ]


class Model(ctypes.Structure):
    """All of a model, and the buffers of a pass."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        *[(name, Pointer) for name in ("final_norm", "final_norm_bias")],
        ("head", Pointer),
        *[(name, Pointer) for name in ("embedding", "hidden", "qkv", "partial", "logits")],
        *[(name, Pointer) for name in ("normed", "queries", "attended", "inner")],
        *[(name, Pointer) for name in ("routing", "gathered", "expert_inner")],
        ("max_length", ctypes.c_int32),
        ("vocab_start", ctypes.c_int32),
    ]


class Pass(ctypes.Structure):
    """The tokens of a pass; see `StepInput`."""

    _fields_ = [
        *[(name, Pointer) for name in ("token_ids", "positions", "slots", "segments", "output_rows", "block_table")],
        ("routes", Pointer),
        *[(name, ctypes.c_int32) for name in ("num_tokens", "num_segments", "num_outputs", "pages_per_sequence")],
    ]


class PackArguments(ctypes.Structure):
    """One tensor that `step_pack` packs, and where to."""

    _fields_ = [
        *[(name, Pointer) for name in ("data", "source")],
        *[(name, ctypes.c_int64) for name in ("source_stride", "run_stride")],
        *[
            (name, ctypes.c_int32)
            for name in ("run_rows", "source_is_f32", "rows", "columns", "padded_columns", "first_row", "half")
        ],
    ]


class SampleArguments(ctypes.Structure):
    """What `step_sample` chooses from."""

    _fields_ = [
        *[(name, Pointer) for name in ("logits", "keys", "positions", "suppress", "stop_ids")],
        *[(name, Pointer) for name in ("allowed", "tokens", "logprobs")],
        *[(name, ctypes.c_int64) for name in ("stride", "allowed_stride")],
        *[(name, ctypes.c_int32) for name in ("rows", "vocab", "limit", "num_stop_ids", "greedy")],
        ("temperature", ctypes.c_float),
    ]


class Context:
    """What the library keeps between calls: a model's addresses and a team of threads."""

    def __init__(self, library: ctypes.CDLL, model: Model, num_threads: int) -> None:
        library.step_create.restype = Pointer
        self._library = library
        pointer = library.step_create(ctypes.byref(model), num_threads)
        if pointer is None:
            raise MemoryError(f"the native step could not allocate memory for {num_threads} threads")
        self._pointer = Pointer(pointer)
        self._pid = os.getpid()
        weakref.finalize(self, _destroy, library, self._pointer, self._pid)

    def call(self, function: str, arguments: ctypes.Structure | ctypes.Array[Any], *more: int) -> None:
        """Call ``function`` of the library with the context and a structure, or an array of them.

        Raises:
            RuntimeError: this process was forked from the one that made the context, and lacks its threads.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("the native step was built in another process: build the engine after forking")
        getattr(self._library, function)(self._pointer, ctypes.byref(arguments), *more)


def _destroy(library: ctypes.CDLL, pointer: Pointer, pid: int) -> None:
    if os.getpid() == pid:
        library.step_destroy(pointer)
