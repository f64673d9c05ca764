"""Functions in files of the user's, which a config or a command line names: rewards, estimators, losses."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, trusted_path
from nemo_style_aligner.wording import some_of


class UserCodeError(UserError, ValueError):
    """A function of the user's cannot be loaded; the message says why."""


def load_function(named: str, what: str, takes: Sequence[str], may_take: Sequence[str] = ()) -> Callable[..., Any]:
    """Load the function that ``FILE.py:NAME`` names. The file is executed; it may import modules that lie beside it.

    A file is executed once in a process, however many of its functions are loaded.

    Args:
        named: the file and the function in it.
        what: where it is named, for messages: a config key or a command line's option.
        takes: what it is called with, for messages; a callable object that is no function is not checked.
        may_take: what it is also called with, by name, if it has a parameter of that name.

    Raises:
        UserCodeError: there is no such file or function, everybody may write to it, the file raises an error, or the
            function takes something else.
    """
    path, _, name = named.rpartition(":")
    file = Path(path)
    if file.suffix != ".py" or not name:
        raise UserCodeError(f"{what}={named}: give a file and a function in it, FILE.py:NAME")
    if not file.is_file():
        raise UserCodeError(f"{what}={named}: {file}: no such file")
    module = _load_module(file.resolve(), what)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if _is_own(value, module) and not key.startswith("_")]
        own.sort(key=lambda key: -difflib.SequenceMatcher(None, key, name).ratio())
        raise UserCodeError(f"{what}={named}: {file} has no function {name}; it has {some_of(own) or 'none'}")
    require_arguments(function, takes, f"{what}={named}", may_take)
    return function


def _is_own(value: object, module: ModuleType) -> bool:
    """Whether a module defines a callable itself, perhaps in a wrapper such as an `Estimator`, and imports it not."""
    return callable(value) and getattr(getattr(value, "function", value), "__module__", None) == module.__name__


def require_arguments(
    function: Callable[..., Any], takes: Sequence[str], what: str, may_take: Sequence[str] = ()
) -> None:
    """Make sure that a function can be called so; ``what`` it is, for the message. Raises `UserCodeError`."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C code that does not say
        return
    try:
        signature.bind(*takes, **{name: name for name in may_take if has_parameter(function, name)})
    except TypeError as error:
        called = ", ".join([*takes, *may_take])
        raise UserCodeError(f"{what} takes {signature}, but is called with ({called}): {error}") from error


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Whether a function says that it has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _load_module(file: Path, what: str) -> ModuleType:
    name = f"user_code_{file.stem}_{zlib.crc32(bytes(file)):x}"
    if name in sys.modules:
        return sys.modules[name]
    _require_closed(file, what)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # by its suffix it is Python
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError(f"{what}: {file} cannot be loaded: {describe(error)}") from error
    return module


def _require_closed(file: Path, what: str) -> None:
    """Make sure that not everybody can change the file, or what it imports from its folder."""
    try:
        for path in (file, file.parent):
            if trusted_path(path).stat().st_mode & 0o002:
                raise UntrustedPathError(f"everybody may write to {path}")
    except UntrustedPathError as error:
        raise UserCodeError(f"{what}: {file} would be executed, but {error}: move it to a folder of its own") from error


def describe(error: BaseException) -> str:
    """What the user's code raised, and where, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(_text_of(error).split())}{where}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - the user's code as well
        return f"its text cannot be had, for {type(another).__name__}"
