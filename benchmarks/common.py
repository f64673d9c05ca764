"""What the benchmarks share: shapes of models, arguments, tables, JSON, and how fast this machine can be at best."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.parallel.machine import available_cores, computes_in_bf16, processor_features
from nemo_style_aligner.trainer.models.packed_weights import constant_weights, weight_product
from nemo_style_aligner.trainer.models.products import product

SHAPES = {
    "tiny": ModelArchitecture(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=512,
        max_position_embeddings=1024,
        tied_embeddings=True,
    ),
    "moe": ModelArchitecture(  # 0.4 billion parameters, of which a token has 0.1
        num_layers=12,
        hidden_size=512,
        ffn_hidden_size=1024,
        num_attention_heads=8,
        num_query_groups=2,
        vocab_size=24576,
        experts=Experts(number=64, per_token=8, ffn_hidden_size=256),
        qk_layernorm=True,
        family="qwen3_moe",
        tied_embeddings=True,
    ),
    "30m": ModelArchitecture(
        num_layers=12,
        hidden_size=384,
        ffn_hidden_size=1024,
        num_attention_heads=6,
        num_query_groups=2,
        vocab_size=24576,
        tied_embeddings=True,
    ),
    "135m": ModelArchitecture(
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=64,
        vocab_size=49152,
        tied_embeddings=True,
    ),
    "360m": ModelArchitecture(
        num_layers=32,
        hidden_size=960,
        ffn_hidden_size=2560,
        num_attention_heads=16,
        num_query_groups=4,
        kv_channels=64,
        vocab_size=49152,
        tied_embeddings=True,
    ),
    "smollm2-135m": ModelArchitecture(
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=9,
        num_query_groups=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tied_embeddings=True,
        rotary_base=100000.0,
    ),
    "qwen2-0.5b": ModelArchitecture(
        num_layers=24,
        hidden_size=896,
        ffn_hidden_size=4864,
        num_attention_heads=14,
        num_query_groups=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        layernorm_epsilon=1e-6,
        qkv_bias=True,
        tied_embeddings=True,
        rotary_base=1000000.0,
        family="qwen2",
    ),
    "llama-0.5b": ModelArchitecture(
        num_layers=16,
        hidden_size=1536,
        ffn_hidden_size=5376,
        num_attention_heads=24,
        num_query_groups=8,
        vocab_size=32768,
        max_position_embeddings=8192,
        tied_embeddings=True,
        rotary_base=500000.0,
    ),
    "llama-1b": ModelArchitecture(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        tied_embeddings=True,
        rotary_base=500000.0,
    ),
}
"""Shapes by name. "smollm2-135m", "qwen2-0.5b" and "llama-1b" are those of SmolLM2, Qwen2 and Llama 3.2; "135m" and
"360m" are SmolLM2's with an even number of heads, which tensor parallelism can split; "llama-0.5b" is a Llama between
the last two."""


# ---- what goes in -------------------------------------------------------------------------------


PRECISIONS = ("bf16", "32")


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: whole numbers of at least ``minimum``."""

    def whole_number(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text}: give at least {minimum}")
        return number

    return whole_number


positive_int = at_least(1)


def positive_float(text: str) -> float:
    """An argparse type: a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


class Bounds(argparse.Action):
    """An argparse action: two positive numbers, the smallest and the largest, refused in the wrong order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, nargs=2, type=positive_int, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        low, high = values
        if low > high:
            raise argparse.ArgumentError(self, f"{low} {high}: give the smaller number first")
        setattr(namespace, self.dest, values)


# ---- what comes out -----------------------------------------------------------------------------


@contextlib.contextmanager
def work_folder(place: Path | None) -> Iterator[Path]:
    """A new folder in ``place``, which is made if need be (None: the system's temporary folder), deleted at the end."""
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark_", dir=place) as name:
        yield Path(name)


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns, the first left-aligned and the others right-aligned."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
    print(flush=True)


def json_path(text: str) -> Path:
    """An argparse type for ``--json``: refused, before anything is measured, if the file cannot be written."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: give the name of a file in a folder of yours")
    return path


def plot_path(text: str) -> Path:
    """An argparse type for ``--plot``: refused, before anything is measured, if the plot cannot be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install -e '.[bench]'")
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    path = json_path(text)
    if path.suffix.lower().removeprefix(".") not in ("", *endings):
        raise argparse.ArgumentTypeError(f"{text}: the name must end with one of {', '.join(endings)}")
    return path


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Write a benchmark's figures and the machine they were taken on to the file of ``--json``, if there is one."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of some rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def next_answer(answers: Any, processes: Iterable[BaseProcess], seconds: float) -> Any:
    """The next of what ``processes`` put in the queue ``answers``.

    Raises:
        SystemExit: a process has failed, or there is no answer within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(queue.Empty):
            return answers.get(timeout=1)
        if any(process.exitcode for process in processes):
            raise SystemExit("a process that measures has failed")
        if time.monotonic() > deadline:
            raise SystemExit(f"a process that measures has not answered within {seconds:g} s")


def in_seconds(steps: Sequence[float]) -> str:
    """Seconds of some steps, for a line of progress."""
    return " ".join(f"{seconds:.2f}" for seconds in steps) + " s"


def machine() -> dict[str, Any]:
    """What figures depend on: processor, cores, device, load, versions."""
    flags = processor_features()
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "matrix_instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "load_at_the_end": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **versions("torch", "transformers")},
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of packages; those that are not installed are left out."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def default_precision() -> str:
    """``trainer.precision`` that torch computes fastest in here: "bf16", or "32" where bf16 is emulated."""
    return "bf16" if torch.cuda.is_available() or computes_in_bf16() else "32"


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor()


def long_tailed(count: int, bounds: Sequence[int], draw: random.Random) -> list[int]:
    """Log-normal lengths around the geometric mean of the bounds, both of which occur: most are short, few are long."""
    low, high = bounds
    middle = low * (high / low) ** 0.5
    lengths = [round(min(high, max(low, draw.lognormvariate(0, 0.9) * middle))) for _ in range(count)]
    lengths[0], lengths[-1] = high, low
    draw.shuffle(lengths)
    return lengths


# ---- the floor ----------------------------------------------------------------------------------

_TRIES = 4
_TRY_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class MachineRates:
    """What the machine does at best, measured.

    Attributes:
        memory: bytes per second, reading far more than the caches hold, on all threads.
        gemm: floating-point operations per second of square matrix products, by dtype.
    """

    memory: float
    gemm: dict[str, float]

    @property
    def best_gemm(self) -> float:
        """The rate in the faster dtype: where bf16 is emulated, an engine may compute in fp32."""
        return max(self.gemm.values())

    def gemm_of(self, dtype: str) -> float:
        """The best rate for matrices of ``dtype``; bfloat16 may be multiplied in float32, too, which is exact."""
        return self.best_gemm if dtype == "bfloat16" else self.gemm[dtype]


def best_rates(a: MachineRates, b: MachineRates) -> MachineRates:
    """The better of two measurements: something else may have run during one of them."""
    return MachineRates(max(a.memory, b.memory), {dtype: max(rate, b.gemm[dtype]) for dtype, rate in a.gemm.items()})


def measure_rates(device: torch.device, buffer_bytes: int) -> MachineRates:
    """Measure `MachineRates`, each as the best of several tries and ways."""
    numbers = torch.ones(buffer_bytes // 4, device=device)
    matrix, vector = numbers[: len(numbers) // 4096 * 4096].view(-1, 4096), torch.ones(4096, device=device)
    ways = (numbers.sum, functools.partial(torch.mv, matrix, vector))
    memory = max(numbers.numel() * 4 / best_seconds(way, device) for way in ways)
    del numbers, matrix, ways
    dtypes = (torch.bfloat16, torch.float32)
    return MachineRates(memory, {str(d).removeprefix("torch."): measure_gemm(device, d) for d in dtypes})


def measure_gemm(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of products of square matrices: the best library, size and try."""
    rate = 0.0
    for size in (512, 1024, 2048) if device.type == "cpu" else (4096, 8192):
        operations = 2 * size**3
        if rate and operations / rate > _TRY_SECONDS:
            break  # emulated bf16 can be a hundred times slower
        # Random: a GPU multiplies ones with less power, hence faster than anything real.
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        # Torch's library, and what our training passes use on this processor, with weights that are packed already.
        with constant_weights(_TRIES):
            for multiply in (torch.nn.functional.linear, product, functools.partial(weight_product, transposed=True)):
                rate = max(rate, operations / best_seconds(functools.partial(multiply, a, b), device))
    return rate


def best_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Shortest time of some tries after a warm-up; a slow action gets fewer tries, and its warm-up counts."""
    best, total = float("inf"), 0.0
    for attempt in range(_TRIES + 1):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        total += seconds
        if attempt or seconds > _TRY_SECONDS:
            best = min(best, seconds)
        if total > _TRIES * _TRY_SECONDS:
            break
    return best


@dataclasses.dataclass(frozen=True)
class Floor:
    """The shortest time in which this machine could generate some responses, and the bytes that decoding reads."""

    prefill_seconds: float
    decode_seconds: float
    decode_bytes: float

    @property
    def seconds(self) -> float:
        """The time of both."""
        return self.prefill_seconds + self.decode_seconds


def generation_floor(
    architecture: ModelArchitecture,
    prompt_lengths: Sequence[int],
    new_lengths: Sequence[int],
    rates: MachineRates,
    dtype: str = "bfloat16",
    computed: Sequence[int] | None = None,
) -> Floor:
    """The floor of generating all of these responses at the same time with weights and KV cache in ``dtype``.

    ``computed``: lengths of those prompts that are computed, where several responses share one; default: all.

    Each pass takes the time to read the weights (of experts those that tokens have, if all are equally likely) and the
    KV cache of the responses under way, or the time of its arithmetic at the rate of square matrix products, whichever
    is longer. Sampling, norms and all else are free.
    """
    a, itemsize = architecture, 2 if dtype == "bfloat16" else 4
    head, body = a.output_parameters, a.active_layer_parameters
    kv_numbers = 2 * a.num_layers * a.num_query_groups * a.kv_channels

    def pass_cost(num_tokens: int, num_outputs: int, num_pairs: float, kv_tokens: int) -> tuple[float, float]:
        operations = 2 * body * num_tokens + 2 * head * num_outputs
        operations += a.num_layers * a.pair_operations * num_pairs
        num_bytes = itemsize * (a.layer_parameters_read(num_tokens) + head + kv_numbers * kv_tokens)
        return max(num_bytes / rates.memory, operations / rates.gemm_of(dtype)), num_bytes

    computed = prompt_lengths if computed is None else computed
    pairs = sum(n * (n + 1) / 2 for n in computed)
    prefill, _ = pass_cost(sum(computed), len(computed), pairs, 0)  # gives the first token of each
    decode_seconds = decode_bytes = 0.0
    for step in range(1, max(new_lengths)):
        active = [p + step for p, n in zip(prompt_lengths, new_lengths, strict=True) if n > step]
        seconds, num_bytes = pass_cost(len(active), len(active), sum(active), sum(active))
        decode_seconds += seconds
        decode_bytes += num_bytes
    return Floor(prefill, decode_seconds, decode_bytes)
