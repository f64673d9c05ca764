"""Strict stand-ins for ``tensorrt_llm``, made from recorded signatures.

A call that the recorded signature would refuse raises TypeError, an attribute that was not recorded AttributeError,
and every call is noted. What a stand-in answers is up to the test. A stand-in test is not a run of TensorRT-LLM.

usage: python trtllm_standins.py SITE_PACKAGES
compares the recorded signatures with an installed or unpacked TensorRT-LLM, without importing it.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = Path(__file__).parent / "data" / "trtllm_signatures.json"

Answer = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a stand-in: the symbol and its arguments by name (of methods, ``self`` included)."""

    symbol: str
    arguments: dict[str, Any]


def load_symbols() -> dict[str, dict[str, Any]]:
    """The recorded symbols."""
    symbols: dict[str, dict[str, Any]] = json.loads(MANIFEST.read_text())["symbols"]
    return symbols


def signature_of(definition: str) -> inspect.Signature:
    """The signature that a ``def`` line means. Defaults are constants."""
    function = ast.parse(definition if definition.rstrip().endswith("pass") else f"{definition}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    a, kind = function.args, inspect.Parameter
    found: list[inspect.Parameter] = []
    positional = [*a.posonlyargs, *a.args]
    defaults: list[Any] = [kind.empty] * (len(positional) - len(a.defaults))
    defaults += [ast.literal_eval(default) for default in a.defaults]
    for argument, default in zip(positional, defaults, strict=True):
        how = kind.POSITIONAL_ONLY if argument in a.posonlyargs else kind.POSITIONAL_OR_KEYWORD
        found.append(kind(argument.arg, how, default=default))
    if a.vararg:
        found.append(kind(a.vararg.arg, kind.VAR_POSITIONAL))
    for argument, expression in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        default = kind.empty if expression is None else ast.literal_eval(expression)
        found.append(kind(argument.arg, kind.KEYWORD_ONLY, default=default))
    if a.kwarg:
        found.append(kind(a.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found)


class Standins:
    """Modules made from the manifest.

    Attributes:
        calls: every call, in order.
        modules: by name, to be put into ``sys.modules``.
    """

    def __init__(self, answers: Mapping[str, Answer] | None = None) -> None:
        """``answers``: what symbols return, called with the arguments by name (``self`` is ``instance``); else None."""
        self.calls: list[Call] = []
        self.modules: dict[str, types.ModuleType] = {}
        self._answers = dict(answers or {})
        symbols = load_symbols()
        unknown = self._answers.keys() - symbols.keys()
        if unknown:
            raise KeyError(f"answers for symbols that are not recorded: {sorted(unknown)}")
        for symbol, entry in sorted(symbols.items(), key=lambda item: item[0].count(".", item[0].index(":"))):
            self._add(symbol, entry)

    def named(self, symbol: str) -> list[dict[str, Any]]:
        """The arguments of all calls of ``symbol``."""
        return [call.arguments for call in self.calls if call.symbol == symbol]

    def _add(self, symbol: str, entry: dict[str, Any]) -> None:
        module_name, name = symbol.split(":")
        module = self._module(module_name)
        if "members" in entry:
            setattr(module, name, enum.Enum(name, entry["members"], type=None))
        elif "." in name:
            class_name, method = name.split(".")
            if not hasattr(module, class_name):
                setattr(module, class_name, type(class_name, (), {}))
            setattr(getattr(module, class_name), method, self._bound(symbol, entry))
        elif "self" in signature_of(entry["def"]).parameters:
            setattr(module, name, self._class(symbol, name, entry))
        else:
            setattr(module, name, self._function(symbol, entry))

    def _class(self, symbol: str, name: str, entry: dict[str, Any]) -> type:
        """A class whose constructor keeps its arguments as attributes; pydantic-like where ``fields`` are recorded."""
        initialise = self._function(symbol, entry)

        def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:
            initialise(instance, *args, **kwargs)
            bound = _bind(entry, (instance, *args), kwargs)
            bound.pop("self")
            for key, value in bound.items():
                object.__setattr__(instance, key, value)

        body: dict[str, Any] = {"__init__": __init__}
        if "fields" in entry:

            def __setattr__(instance: Any, key: str, value: Any) -> None:
                if key not in entry["fields"]:
                    raise AttributeError(f"{name} has no field {key!r}")
                object.__setattr__(instance, key, value)

            body["__setattr__"] = __setattr__
        return type(name, (), body)

    def _bound(self, symbol: str, entry: dict[str, Any]) -> Any:
        function = self._function(symbol, entry)
        return {"classmethod": classmethod, "staticmethod": staticmethod}.get(entry.get("binding", ""), _same)(function)

    def _function(self, symbol: str, entry: dict[str, Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = _bind(entry, args, kwargs)
            self.calls.append(Call(symbol, arguments))
            answer = self._answers.get(symbol)
            if answer is None:
                return None
            return answer(**{"instance" if name == "self" else name: value for name, value in arguments.items()})

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return call_async if entry.get("async") else call

    def _module(self, name: str) -> types.ModuleType:
        if name not in self.modules:
            module = types.ModuleType(name)
            module.__path__ = []
            self.modules[name] = module
            if "." in name:
                parent, own = name.rsplit(".", 1)
                setattr(self._module(parent), own, module)
        return self.modules[name]


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _bind(entry: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name. Those in ``**kwargs`` must fit the signature that is recorded for them."""
    bound = signature_of(entry["def"]).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            rest = arguments.pop(name, {})
            if "kwargs" in entry:
                expected = signature_of(entry["kwargs"])
                allowed = {key for key, p in expected.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
                unexpected = rest.keys() - allowed
                if unexpected:
                    raise TypeError(f"unexpected keyword arguments {sorted(unexpected)}")
                required = {k for k, p in expected.parameters.items() if p.default is p.empty and k in allowed}
                missing = required - {"self"} - rest.keys()
                if missing:
                    raise TypeError(f"missing keyword arguments {sorted(missing)}")
            arguments |= rest
    return arguments


# ---- comparing with a real installation ----------------------------------------------------------


def differences(site_packages: Path) -> list[str]:
    """What an installed or unpacked TensorRT-LLM has that differs from the recorded signatures."""
    found = []
    for symbol, entry in load_symbols().items():
        if "def" not in entry:
            continue
        real = _real_parameters(site_packages, *symbol.split(":"))
        recorded = list(signature_of(entry["def"]).parameters)
        if real is None:
            found.append(f"{symbol}: not found (it may be re-exported: look where it is defined)")
        elif real != recorded:
            found.append(f"{symbol}: recorded {recorded}, there {real}")
    return found


def _real_parameters(root: Path, module: str, qualified: str) -> list[str] | None:
    base = root / module.replace(".", "/")
    file = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    node: Any = ast.parse(file.read_text()) if file else None
    for part in qualified.split("."):
        node = next((child for child in getattr(node, "body", []) if getattr(child, "name", None) == part), None)
    if isinstance(node, ast.ClassDef):
        node = next((child for child in node.body if getattr(child, "name", None) == "__init__"), None)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    a = node.args
    rest = [argument.arg for argument in (a.vararg,) if argument]
    return (
        [p.arg for p in (*a.posonlyargs, *a.args)]
        + rest
        + [p.arg for p in (*a.kwonlyargs, *([a.kwarg] if a.kwarg else []))]
    )


if __name__ == "__main__":
    report = differences(Path(sys.argv[1]))
    print("\n".join(report) or "no differences")
    sys.exit(1 if report else 0)
