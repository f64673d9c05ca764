"""Pickles read as data: no class, function or other object of this process can be reached from the file.

`pickletools` splits a pickle into opcodes and executes none. Here a small machine carries out those that checkpoints
have. Where pickle would look up a class, this one puts down its name (`Name`); where pickle would call or fill
something, it notes the name and the arguments (`Record`). What comes out has no behaviour. Names and opcodes that the
format does not have are refused, and so is what is too large.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable, Set
from typing import Any

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.errors import UserError

MAX_BYTES = 64 << 20
"""Size of the largest pickle that is read."""

# A tensor's chunk takes 60 to 80: this suffices for 100,000 chunks, and takes seconds and 1 GiB of memory at most.
_MAX_OPCODES = 1 << 23

PERSISTENT_ID = "persistent id"
"""Name of the `Record` of a reference to something beside the pickle, such as a tensor's bytes."""

_GETATTR = "builtins.getattr"  # Python 3.11.0 to 3.11.3 pickle members of enumerations by it


class UnsafeCheckpointError(UserError, ValueError):
    """A pickle in a checkpoint refers to something that has no place in a checkpoint."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False, slots=True)
class Name:
    """The name of a class, function or constant, such as ``torch.float32``. Nothing has been looked up."""

    text: str


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Record:
    """What pickle would have made by calling ``name`` with ``arguments``, and filled with ``state``."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """A dictionary's items. Nothing is hashed, so that no keys can be chosen to make that slow."""


def items(value: Any) -> dict[str, Any]:
    """The dictionary that `Pairs` are.

    Raises:
        ValueError: another value, or keys that are not strings, or not all different.
    """
    if type(value) is not Pairs or not all(type(key) is str for key, _ in value):
        raise ValueError("a dictionary with names is expected")
    if len(found := dict(value)) < len(value):
        raise ValueError("a dictionary has a name twice")
    return found


def read_pickle(content: bytes, what: str, names: Set[str], enumerations: Set[str] = frozenset()) -> Any:
    """The value in a pickle: None, bool, int, float, str, tuples, lists (also for sets), `Pairs`, `Record`, `Name`.

    It may refer to itself, and to one part from many places: walk it along known fields only.

    Args:
        what: the file, for messages.
        names: all that may occur, such as ``torch.Size``; `PERSISTENT_ID` allows references.
        enumerations: those of ``names`` whose members ``getattr`` may name.

    Raises:
        UnsafeCheckpointError: another name, or an opcode that checkpoints do not have.
        DamagedCheckpointError: not a whole pickle, or too large a one.
    """
    if len(content) > MAX_BYTES:
        raise DamagedCheckpointError(f"{what} is larger than {MAX_BYTES >> 20} MiB, which no checkpoint needs")
    machine = _Machine(what, names, enumerations)
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number == _MAX_OPCODES:
                raise ValueError(f"it has more than {_MAX_OPCODES:,} opcodes")
            machine.carry_out(opcode.name, argument)
        return machine.result()
    except UnsafeCheckpointError:
        raise
    except (ValueError, IndexError) as error:
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error says, without anything that could break a line or move a terminal's cursor."""
    return ascii(str(error))[1:-1][:200]


class _Machine:
    """Pickle's stack, marks and memo. A pickle that asks for more than is there causes ValueError or IndexError."""

    def __init__(self, what: str, names: Set[str], enumerations: Set[str]) -> None:
        self._what, self._names, self._enumerations = what, names, enumerations
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []

    def carry_out(self, opcode: str, argument: Any) -> None:
        """Carry out one opcode."""
        if opcode in _VALUES:
            self._stack.append(argument)
        elif (action := _ACTIONS.get(opcode)) is not None:
            action(self, argument)
        elif (make := _NEW.get(opcode)) is not None:
            self._stack.append(make())
        elif (number := _TUPLES.get(opcode)) is not None:
            self._stack.append(tuple(self._last(number)))
        elif opcode not in _NOTHING:
            raise self._unsafe(f"the opcode {opcode}")

    def result(self) -> Any:
        """The value that is left at the end."""
        (value,) = self._stack
        return value

    def _unsafe(self, name: str) -> UnsafeCheckpointError:
        shown = ascii(name)[1:-1][:100]
        return UnsafeCheckpointError(
            f"{self._what} refers to {shown}, which a checkpoint has no use for: do not load it unless you trust its "
            "origin, and then convert it with megatron-core first"
        )

    def _mark(self, _: Any) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def _last(self, number: int) -> list[Any]:
        if len(self._stack) < number:
            raise ValueError("the stack is empty")
        found = self._stack[-number:]
        del self._stack[-number:]
        return found

    def _tuple(self, _: Any) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _list(self, _: Any) -> None:
        self._stack.append(self._since_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("something is appended to what is no list")
        self._stack[-1].extend(values)

    def _update(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not Pairs or len(values) % 2:
            raise ValueError("a key is set in what is no dictionary")
        self._stack[-1].extend(zip(values[::2], values[1::2], strict=True))

    def _put(self, index: int | None) -> None:
        if index not in (None, len(self._memo)):  # as pickle counts them
            raise ValueError(f"the memo has no place {index}")
        self._memo.append(self._stack[-1])

    def _get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def _global(self, argument: str) -> None:
        self._name(argument.replace(" ", ".", 1))

    def _stack_global(self, _: Any) -> None:
        module, name = self._last(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is not text")
        self._name(f"{module}.{name}")

    def _name(self, text: str) -> None:
        if text not in self._names:
            raise self._unsafe(text)
        self._stack.append(Name(text))

    def _record(self, _: Any) -> None:
        function, arguments = self._last(2)
        if type(function) is not Name or type(arguments) is not tuple:
            raise ValueError("something is called that is no name")
        if function.text == _GETATTR and not self._is_member(arguments):
            raise self._unsafe(_GETATTR)
        self._stack.append(Record(function.text, arguments))

    def _is_member(self, arguments: tuple[Any, ...]) -> bool:
        return type(arguments[0]) is Name and arguments[0].text in self._enumerations

    def _build(self, _: Any) -> None:
        record, state = self._last(2)
        if type(record) is not Record or record.state is not None:
            raise self._unsafe("the opcode BUILD on what it has not made")
        record.state = state
        self._stack.append(record)

    def _persistent(self, _: Any) -> None:
        (reference,) = self._last(1)
        if PERSISTENT_ID not in self._names or type(reference) is not tuple:
            raise self._unsafe("a persistent id")
        self._stack.append(Record(PERSISTENT_ID, reference))


# Opcodes whose arguments are values; those that make one; those that make a tuple of so many.
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"})
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_SET": list,
    "EMPTY_DICT": Pairs,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = frozenset({"PROTO", "FRAME", "STOP"})
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "TUPLE": _Machine._tuple,
    "FROZENSET": _Machine._list,
    "APPEND": lambda machine, _: machine._extend(machine._last(1)),
    "APPENDS": lambda machine, _: machine._extend(machine._since_mark()),
    "ADDITEMS": lambda machine, _: machine._extend(machine._since_mark()),
    "SETITEM": lambda machine, _: machine._update(machine._last(2)),
    "SETITEMS": lambda machine, _: machine._update(machine._since_mark()),
    "MEMOIZE": _Machine._put,
    "BINPUT": _Machine._put,
    "LONG_BINPUT": _Machine._put,
    "BINGET": _Machine._get,
    "LONG_BINGET": _Machine._get,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._record,
    "NEWOBJ": _Machine._record,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}
