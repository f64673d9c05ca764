"""Triton's interpreter multiplies bf16 as if they were whole numbers; with this it does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def multiply_bf16() -> None:
    """Have the interpreter multiply bf16 as GPUs do: exactly, with sums in fp32."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def wide(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
