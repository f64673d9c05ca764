"""Compiles this project's C++ for this machine's processor, once, and keeps the result on disk."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

import torch

from nemo_style_aligner.engine.parallel.machine import processor_features, processor_model
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, cache_folder, private_folder, unless_planted

logger = logging.getLogger(__name__)

INCLUDES = Path(__file__).parent
"""Headers that all libraries share."""

_VERSION_SECONDS = 60.0
_COMPILE_SECONDS = 600.0
_WAIT_SECONDS = 4 * _COMPILE_SECONDS  # the check is compiled and run first, and the library compiled twice at most


FMA, DOT, AMX = range(3)
"""How a kernel multiplies; ``vectors.h`` says what the names mean."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute products, and what it requires of processor and compiler.

    Attributes:
        number: KERNEL_* in ``vectors.h``: `FMA`, `DOT` or `AMX`.
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
    def bf16_activations(self) -> bool:
        """Whether activations are rounded to bf16 for products with weights; else they are fp32."""
        return self.number != FMA

    @property
    def checked(self) -> bool:
        """Whether compiled code is checked before its first use: that of all kernels beyond AVX2."""
        return self.lanes > 8 and not self.emulated


_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_NEEDS_AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")

KERNELS = {
    "amx": Kernel(
        AMX,
        16,
        (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        (*_NEEDS_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    ),
    "avx512-bf16": Kernel(DOT, 16, (*_AVX512, "-mavx512bf16"), (*_NEEDS_AVX512, "avx512_bf16")),
    "avx512": Kernel(FMA, 16, _AVX512, _NEEDS_AVX512),
    "avx2": Kernel(FMA, 8, _AVX2, ("avx2", "fma")),
    "amx-emulated": Kernel(AMX, 16, (*_AVX2, "-O1"), ("avx2", "fma"), emulated=True),
    "avx512-bf16-emulated": Kernel(DOT, 16, (*_AVX2, "-O1"), ("avx2", "fma"), emulated=True),
}
"""Best first; the emulated ones are never chosen automatically."""


class NativeUnavailable(RuntimeError):
    """Code cannot be compiled or run on this machine; the message says why and what to do."""


class NothingCompiles(NativeUnavailable):
    """That is so whichever kernel the code is for: there is no compiler, or no folder for what it makes."""


def usable_kernels(dtype: torch.dtype) -> list[str]:
    """Names of the kernels that this processor can run, best first; those with bf16 activations for bf16 only."""
    features = processor_features()
    names = [name for name, kernel in KERNELS.items() if not kernel.emulated and features.issuperset(kernel.needs)]
    return names if dtype == torch.bfloat16 else [name for name in names if not KERNELS[name].bf16_activations]


def find_compiler() -> list[str]:
    """The C++ compiler: ``CXX``, which may have arguments (``ccache g++``), or g++.

    Raises:
        NothingCompiles: there is none.
    """
    name, *arguments = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    compiler = shutil.which(name)
    if compiler is None:
        raise NothingCompiles(
            f"no C++ compiler found ({name}): install g++ (or set CXX) for code that is several times faster"
        )
    return [compiler, *arguments]


def compiler_flags(kernel: str) -> list[str]:
    """Compiler flags for ``kernel``, without source and output."""
    chosen = KERNELS[kernel]
    macros = {"KERNEL": chosen.number, "LANES": chosen.lanes, "EMULATE": int(chosen.emulated)}
    flags = ["-std=c++17", "-O2", "-fno-math-errno", "-Wno-psabi", "-pthread", f"-I{INCLUDES}", *chosen.flags]
    return [*flags, *(f"-D{name}={value}" for name, value in macros.items())]


def find_or_compile(
    command: list[str], sources: Sequence[Path], check: Callable[[Path], None] | None = None
) -> ctypes.CDLL:
    """The library that ``command`` makes of the first source; loaded from disk if it was compiled before.

    Args:
        command: compiler and flags, without source and output.
        sources: all that the result depends on: what is compiled, then what it includes.
        check: called with the cache folder before the library is compiled; may raise NativeUnavailable.

    Raises:
        NativeUnavailable: the compiler failed.
        NothingCompiles: it does not run at all, or no folder can keep the library and execute it.
    """
    folder = _cache_folder()
    path = folder / f"{sources[0].stem}-{compilation_key(command, sources)}.so"
    try:
        return _find_or_compile(command, sources[0], path, check)
    except OSError as error:
        raise NothingCompiles(
            f"{folder} cannot be used ({error}): set NEMO_STYLE_ALIGNER_CACHE to a folder of your own on a "
            "local disk, or CXX to a compiler no newer than this Python's C++ library"
        ) from error


def ahead(load: Callable[[], object]) -> None:
    """Begin in a thread to load, and first to compile, what this process will need once it has read its model.

    Who needs it calls ``load`` as well: that waits for what is left of the work, and tells what is wrong.
    """

    def begin() -> None:
        with contextlib.suppress(NativeUnavailable):
            load()

    threading.Thread(target=begin, name="compiling ahead", daemon=True).start()


def prepare(library: ctypes.CDLL, kernel: str) -> None:
    """Ask the system for the instructions of ``kernel``, before the library's first function is called.

    Raises:
        NativeUnavailable: it refuses them.
    """
    if error := library.prepare():
        too_small = "a thread's alternate signal stack is too small for their registers"
        hint = too_small if error == errno.ENOSPC else "Linux 5.16 or newer has them"
        raise NativeUnavailable(f"the system refused the {kernel} instructions ({os.strerror(error)}): {hint}")


def _find_or_compile(command: list[str], source: Path, path: Path, check: Callable[[Path], None] | None) -> ctypes.CDLL:
    """Load the library at ``path``; compile it first if there is none, or none that can be loaded."""
    library = _open(path)
    if library is not None:
        return library
    with open(path.with_suffix(".lock"), "w", opener=unless_planted) as lock:
        _wait_for(lock)  # of several ranks one compiles
        library = _open(path)
        if library is not None:
            return library
        if path.exists():
            logger.warning("%s is damaged or cannot be loaded: compiling it again", path)
        logger.info("compiling %s, once on this machine: up to a minute", source.name)
        started = time.monotonic()
        if check is not None:
            check(path.parent)
        command = [*command, "-fPIC", "-shared"]
        compile_to(command, source, path)
        if _open(path) is None:  # its C++ library may be newer than the one that Python has loaded
            with contextlib.suppress(NativeUnavailable):
                compile_to([*command, "-static-libstdc++", "-static-libgcc"], source, path)
        logger.info("compiled %s in %.1f s: %s", source.name, time.monotonic() - started, path)
    return _load(path)


def _open(path: Path) -> ctypes.CDLL | None:
    """Load ``path``; None if there is no file, it is somebody else's, or the system cannot load it."""
    try:
        return _load(path)
    except OSError:
        return None


def _load(path: Path) -> ctypes.CDLL:
    """Load a library of this user's, in whose folder nobody else can change anything. Raises OSError."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "it is somebody else's, or others may write to it", str(path))
    return ctypes.CDLL(str(path))


def compilation_key(command: list[str], sources: Sequence[Path]) -> str:
    """Hash of all the result depends on: command (without this package's path), compiler, processor and sources."""
    digest = hashlib.sha256("\0".join(command).replace(str(INCLUDES), "").encode())
    try:
        compiler = itertools.takewhile(lambda part: not part.startswith("-"), command)
        version = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, check=False, timeout=_VERSION_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NothingCompiles(f"{command[0]} --version took more than {_VERSION_SECONDS:.0f} s") from error
    if version.returncode:
        raise NothingCompiles(f"{command[0]} --version fails ({version.stderr.strip()}): set CXX to a C++ compiler")
    digest.update(version.stdout.encode())
    # Machines may share a home folder: a check's outcome on one processor says nothing about another.
    digest.update(processor_model().encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _cache_folder() -> Path:
    """This user's folder for compiled code, where nobody else can have put any: what lies in it is executed."""
    advice = "set NEMO_STYLE_ALIGNER_CACHE to a folder that only you and root can change, as those above it"
    try:
        folder = cache_folder("native")
        private_folder(folder, strict=True)
    except RuntimeError as error:  # no HOME, and the user is not in the password database
        raise NothingCompiles(f"there is no home folder for compiled code: {advice}") from error
    except UntrustedPathError as error:
        raise NothingCompiles(f"code in {folder} would be executed, but {error}; or {advice}") from error
    except OSError as error:
        raise NothingCompiles(f"cannot create {folder} ({error}): {advice}") from error
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:  # else each rank in turn would compile what none can load
        raise NothingCompiles(
            f"{folder} is mounted noexec, and the code in it is executed: "
            "set NEMO_STYLE_ALIGNER_CACHE to a folder on another file system"
        )
    return folder


def _wait_for(lock: TextIO) -> None:
    """Take the file lock within the time for which its holder may need it."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise NativeUnavailable("another process has been compiling the same code for too long") from None
            time.sleep(0.2)


def compile_to(command: list[str], source: Path, path: Path) -> None:
    """Compile to a temporary file and rename it to ``path``, so that a file there is always complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        result = subprocess.run(
            [*command, str(source), "-o", name],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if "error" in line][:5]
            raise NativeUnavailable(
                f"{command[0]} failed on {source.name}: " + "; ".join(errors or [result.stderr[-500:]])
            )
        os.chmod(name, 0o700)
        with open(name, "rb") as file:
            os.fsync(file.fileno())  # else a crash of the machine could leave the name with half of the content
        os.replace(name, path)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took more than {_COMPILE_SECONDS:.0f} s") from error
    finally:
        Path(name).unlink(missing_ok=True)
