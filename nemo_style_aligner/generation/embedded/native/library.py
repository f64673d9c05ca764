"""Compiles the native step for one model shape and one kind of processor, once, and keeps the result on disk."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.embedded.step import EngineShape
from nemo_style_aligner.generation.shard import TensorParallel

logger = logging.getLogger(__name__)

_SOURCES = ("step.cpp", "check.cpp", "attention.h", "panels.h", "sample.h", "threads.h", "vectors.h")
_VERSION_SECONDS = 60.0
_COMPILE_SECONDS = 600.0
_CHECK_SECONDS = 120.0
# How `check.cpp` ends where the kernels cannot be used. Anything else, as SIGKILL for want of memory, may pass.
_CHECK_VERDICTS = (1, 2, -signal.SIGILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE)
_CHECKED_MODEL = ModelArchitecture(
    num_layers=1, hidden_size=384, ffn_hidden_size=512, num_attention_heads=6, num_query_groups=2, vocab_size=256
)
_ACTIVATIONS = {"silu": 0, "gelu": 1, "squared-relu": 2}
_NORMS = {"rmsnorm": 0, "layernorm": 1, "layernorm1p": 2}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute products, and what it asks of processor and compiler.

    Attributes:
        number: KERNEL_* in ``step.cpp``.
        lanes: floats per vector.
        emulated: instructions that the processor may lack are replaced by plain C++: slow, for tests.
        flags: for the compiler.
        needs: processor flags, as /proc/cpuinfo names them.
    """

    number: int
    lanes: int
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    emulated: bool = False

    @property
    def checked(self) -> bool:
        """Whether `check` runs before first use: for all that go beyond AVX2."""
        return self.lanes > 8 and not self.emulated


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_NEEDS_AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")

KERNELS = {
    "amx": Kernel(
        2,
        16,
        (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        (*_NEEDS_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
    "avx512-bf16": Kernel(1, 16, (*_AVX512, "-mavx512bf16"), (*_NEEDS_AVX512, "avx512_bf16")),
    "avx512": Kernel(0, 16, _AVX512, _NEEDS_AVX512),
    "avx2": Kernel(0, 8, _AVX2, ("avx2", "fma")),
    "amx-emulated": Kernel(2, 16, (*_AVX2, "-O1"), ("avx2", "fma"), emulated=True),
    "avx512-bf16-emulated": Kernel(1, 16, (*_AVX2, "-O1"), ("avx2", "fma"), emulated=True),
}
"""Best first; the emulated ones are never chosen by themselves."""


class NativeUnavailable(RuntimeError):
    """The native step cannot be built or run on this machine; the message says why and what to do."""


class CheckFailed(NativeUnavailable):
    """The compiled kernels compute wrong numbers, die of what they execute or are refused: it will be so again."""


def usable_kernels(dtype: torch.dtype) -> list[str]:
    """Names of the kernels that this processor has, best first."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    except (OSError, IndexError):
        return []
    names = [name for name, kernel in KERNELS.items() if not kernel.emulated and flags.issuperset(kernel.needs)]
    return names if dtype == torch.bfloat16 else [name for name in names if KERNELS[name].number == 0]


def load_library(shape: EngineShape, kernel: str) -> tuple[ctypes.CDLL, bool]:
    """The compiled step for ``shape``, and whether it had to be compiled (else it was found on disk).

    Raises:
        NativeUnavailable: there is no compiler, it failed, what it made does not compute what it should, or there is no
            folder to keep it in and to execute it from.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found: install g++ (or set CXX) to generate several times faster")
    command = compile_command(compiler, shape, kernel)
    folder = _cache_folder()
    try:
        library, compiled = _find_or_compile(command, folder / f"step-{_key(command)}.so", shape, kernel)
    except OSError as error:
        raise NativeUnavailable(
            f"{folder} cannot be used ({error}): set NEMO_STYLE_ALIGNER_CACHE to a folder on a disk of this machine "
            "that can be written and executed from"
        ) from error
    if library.step_prepare():
        raise NativeUnavailable(
            f"the operating system refused the {kernel} instructions (Linux 5.16 or newer has them)"
        )
    return library, compiled


def _find_or_compile(command: list[str], path: Path, shape: EngineShape, kernel: str) -> tuple[ctypes.CDLL, bool]:
    """What lies at ``path``, or what is put there now because there is nothing, or nothing that can be loaded."""
    library = _open(path)
    if library is not None:
        return library, False
    with open(path.with_suffix(".lock"), "w") as lock:
        _wait_for(lock)  # of several ranks one compiles
        library = _open(path)
        if library is not None:
            return library, False
        if path.exists():
            logger.warning("%s is damaged, or may not be executed: it is compiled again", path)
        started = time.monotonic()
        if KERNELS[kernel].checked:
            _require_check(command[0], shape, kernel, path.parent)
        _compile([*command, "-fPIC", "-shared"], "step.cpp", path)
        logger.info("compiled the native generation step in %.1f s: %s", time.monotonic() - started, path)
    return ctypes.CDLL(str(path)), True


def _open(path: Path) -> ctypes.CDLL | None:
    """None where there is nothing that the system would load."""
    try:
        return ctypes.CDLL(str(path)) if path.exists() else None
    except OSError:
        return None


def compile_command(compiler: str, shape: EngineShape, kernel: str) -> list[str]:
    """Compiler and flags for ``shape``, without source and output."""
    flags = ["-std=c++17", "-O2", "-fno-math-errno", "-Wno-psabi", "-pthread", *KERNELS[kernel].flags]
    return [compiler, *flags, *(f"-D{name}={value}" for name, value in _macros(shape, kernel).items())]


def _require_check(compiler: str, shape: EngineShape, kernel: str, folder: Path) -> None:
    """Run `check` unless it is on record: once per kernel, dtype and weight format, on a small model of its own.

    Raises:
        NativeUnavailable: it fails, or did; the message names the record, which may be deleted to try again. There is
            none where the check could not be made.
    """
    command = compile_command(
        compiler, dataclasses.replace(shape, architecture=_CHECKED_MODEL, tensor_parallel=TensorParallel()), kernel
    )
    record = folder / f"check-{_key(command)}.txt"
    if not record.exists():
        try:
            check(command, folder)
            outcome = "passed"
        except CheckFailed as error:
            outcome = str(error)
        written = folder / f"check-{os.getpid()}.tmp"  # a rank that compiles another shape may look for the record now
        written.write_text(outcome)
        os.replace(written, record)
    if record.read_text() != "passed":
        raise NativeUnavailable(f"{record.read_text()} (from {record}: delete it to check again)")


def check(command: list[str], folder: Path) -> None:
    """Compile ``check.cpp`` into ``folder`` and run it, in a process of its own: an illegal instruction ends only that.

    Raises:
        CheckFailed: products or attention are wrong, or the program died of them.
        NativeUnavailable: it could not be compiled, or did not get to the end.
    """
    program = folder / f"check-{os.getpid()}"
    try:
        _compile(command, "check.cpp", program)
        result = subprocess.run([str(program)], capture_output=True, text=True, timeout=_CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"the check of the compiled kernels took more than {_CHECK_SECONDS:.0f} s") from error
    finally:
        program.unlink(missing_ok=True)
    if result.returncode in _CHECK_VERDICTS:
        raise CheckFailed(
            "the compiled kernels fail their check on this processor "
            f"(status {result.returncode}; {result.stdout.strip()})"
        )
    if result.returncode:
        raise NativeUnavailable(f"the check of the compiled kernels was cut short (status {result.returncode})")


def _macros(shape: EngineShape, kernel: str) -> dict[str, object]:
    a, shard = shape.architecture, shape.shard
    return {
        "LAYERS": a.num_layers,
        "HIDDEN": a.hidden_size,
        "HEADS": shard.num_heads,
        "GROUPS": shard.num_groups,
        "HEAD_DIM": a.kv_channels,
        "ROTARY": (int(a.kv_channels * a.rotary_percentage) + 1) // 2 * 2,  # as many frequencies as Megatron has
        "FFN": shard.ffn_size,
        "VOCAB_ROWS": shard.vocab_rows,
        "RANKS": shard.size,
        "NORM": _NORMS[a.normalization],
        "EPSILON": repr(a.layernorm_epsilon),
        "ACTIVATION": _ACTIVATIONS[a.activation],
        "GATED": int(a.gated),
        "QK_NORM": int(a.qk_layernorm),
        "SUM_RANKS": int(shard.size > 1),
        "STORAGE_F32": int(shape.dtype == torch.float32),
        "STORAGE_INT8": int(shape.weight_format == "int8"),
        "KERNEL": KERNELS[kernel].number,
        "LANES": KERNELS[kernel].lanes,
        "EMULATE": int(KERNELS[kernel].emulated),
    }


def _key(command: list[str]) -> str:
    """Of everything the result depends on: shape, dtype and processor (in the command), compiler, sources."""
    digest = hashlib.sha256("\0".join(command).encode())
    try:
        version = subprocess.run(
            [command[0], "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} --version took more than {_VERSION_SECONDS:.0f} s") from error
    if version.returncode:
        raise NativeUnavailable(f"{command[0]} --version fails ({version.stderr.strip()}): set CXX to a C++ compiler")
    digest.update(version.stdout.encode())
    for source in _SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    return digest.hexdigest()[:32]


def _cache_folder() -> Path:
    """This user's folder for compiled steps, writable by nobody else: what lies in it is executed."""
    root = os.environ.get("NEMO_STYLE_ALIGNER_CACHE") or os.environ.get("XDG_CACHE_HOME")
    folder = Path(root or os.path.expanduser("~/.cache")) / "nemo_style_aligner" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise NativeUnavailable(f"{folder} cannot be made ({error}): set NEMO_STYLE_ALIGNER_CACHE") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NativeUnavailable(
            f"{folder} belongs to or can be written by another user, and what lies there is executed: "
            "chmod it to 700, or set NEMO_STYLE_ALIGNER_CACHE to a folder of your own"
        )
    return folder


def _wait_for(lock: object) -> None:
    """Take the file lock within the time a compilation may take."""
    deadline = time.monotonic() + _COMPILE_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NativeUnavailable("another process has been compiling the native step for too long") from None
            time.sleep(0.2)


def _compile(command: list[str], source: str, path: Path) -> None:
    """Compile beside ``path`` and rename: what lies there is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, str(Path(__file__).parent / source), "-o", name],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line][:5]
            raise NativeUnavailable(f"{command[0]} failed on {source}: " + "; ".join(errors or [result.stderr[-500:]]))
        os.chmod(name, 0o700)
        with open(name, "rb") as file:
            os.fsync(file.fileno())  # or a crash of the machine could leave the name and half of the content
        os.replace(name, path)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took more than {_COMPILE_SECONDS:.0f} s") from error
    finally:
        Path(name).unlink(missing_ok=True)
