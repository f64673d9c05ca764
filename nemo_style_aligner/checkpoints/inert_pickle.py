"""Pickles read as data: no class, function or other object of this process can be reached from the file.

A small machine carries out the opcodes that checkpoints have. Where pickle would look up a class, it puts down the
name (`Name`); where pickle would call or fill something, it notes the name and the arguments (`Record`). What comes out
has no behaviour. Names and opcodes that the format does not have are refused, and so is what is too large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import pickletools
import struct
from collections.abc import Callable, Iterator, Set
from typing import Any

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.errors import UserError

MAX_BYTES = 64 << 20
"""Size of the largest pickle that is read."""

# A tensor's chunk takes 60 to 80: enough for 100,000 chunks. The worst such pickle takes seconds and 1 GiB of memory.
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
    try:
        with _no_collections():
            return _Machine(content, what, names, enumerations).run()
    except UnsafeCheckpointError:
        raise
    except (ValueError, IndexError, struct.error) as error:
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Millions of new objects would make Python look for garbage again and again, for most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def one_line(error: Exception) -> str:
    """What an error says, without anything that could break a line or move a terminal's cursor."""
    return ascii(str(error))[1:-1][:200]


class _Machine:
    """Pickle's stack, marks and memo. Who asks for more than is there causes ValueError, IndexError or struct.error."""

    def __init__(self, content: bytes, what: str, names: Set[str], enumerations: Set[str]) -> None:
        self._content, self._what, self._names, self._enumerations = content, what, names, enumerations
        self.position = 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self._marks: list[int] = []

    def run(self) -> Any:
        """Carry out all opcodes; the value that is left."""
        for _ in range(_MAX_OPCODES):
            opcode = self._content[self.position]
            self.position += 1
            if opcode == _STOP:
                (value,) = self.stack
                return value
            if (action := _ACTIONS.get(opcode)) is None:
                raise self._refused(opcode)
            action(self)
        raise ValueError(f"it has more than {_MAX_OPCODES:,} opcodes")

    def _refused(self, opcode: int) -> ValueError:
        name = next((known.name for known in pickletools.opcodes if ord(known.code) == opcode), None)
        return ValueError(f"there is no opcode {opcode}") if name is None else self.unsafe(f"the opcode {name}")

    def unsafe(self, name: str) -> UnsafeCheckpointError:
        """The error that there is something in the pickle that does not belong there."""
        shown = ascii(name)[1:-1][:100]
        return UnsafeCheckpointError(
            f"{self._what} refers to {shown}, which a checkpoint has no use for: do not load it unless you trust its "
            "origin, and then convert it with megatron-core first"
        )

    # ---- what follows an opcode -----------------------------------------------------------------

    def number(self, form: struct.Struct) -> Any:
        """A number of fixed size."""
        start = self.position
        self.position += form.size
        return form.unpack_from(self._content, start)[0]

    def piece(self, length_form: struct.Struct) -> bytes:
        """Bytes that come after their number."""
        length = self.number(length_form)
        start = self.position
        self.position += length
        if self.position > len(self._content):
            raise ValueError("it is cut short")
        return self._content[start : self.position]

    def line(self) -> str:
        """Text up to the end of a line."""
        start = self.position
        end = self._content.index(b"\n", start)
        self.position = end + 1
        return self._content[start:end].decode()

    # ---- the stack ------------------------------------------------------------------------------

    def mark(self) -> None:
        """Remember the height of the stack."""
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        """Take what has come onto the stack since the last mark."""
        return self.last(len(self.stack) - self._marks.pop())

    def last(self, number: int) -> list[Any]:
        """Take the last values from the stack."""
        if not 0 <= number <= len(self.stack):
            raise ValueError("too little is on the stack")
        start = len(self.stack) - number
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def extend(self, values: list[Any]) -> None:
        """Append to the list on the stack."""
        if type(self.stack[-1]) is not list:
            raise ValueError("something is appended to what is no list")
        self.stack[-1].extend(values)

    def update(self, values: list[Any]) -> None:
        """Add keys and values, in turn, to the dictionary on the stack."""
        if type(self.stack[-1]) is not Pairs:
            raise ValueError("a key is set in what is no dictionary")
        self.stack[-1].extend(zip(values[::2], values[1::2], strict=True))

    def put(self, index: int) -> None:
        """Remember what is on the stack, under numbers that count up, as pickle's do."""
        if index != len(self.memo):
            raise ValueError(f"the memo has no place {index}")
        self.memo.append(self.stack[-1])

    # ---- what pickle would look up, call and fill -----------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        """Put down a name."""
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is not text")
        if (text := f"{module}.{name}") not in self._names:
            raise self.unsafe(text)
        self.stack.append(Name(text))

    def record(self) -> None:
        """Note what would be called, and with which arguments."""
        function, arguments = self.last(2)
        if type(function) is not Name or type(arguments) is not tuple:
            raise ValueError("something is called that is no name")
        if function.text == _GETATTR and not self._is_member(arguments):
            raise self.unsafe(_GETATTR)
        self.stack.append(Record(function.text, arguments))

    def _is_member(self, arguments: tuple[Any, ...]) -> bool:
        return type(arguments[0]) is Name and arguments[0].text in self._enumerations

    def build(self) -> None:
        """Note what would be put into what would have been called."""
        record, state = self.last(2)
        if type(record) is not Record or record.state is not None:
            raise self.unsafe("the opcode BUILD on what it has not made")
        record.state = state
        self.stack.append(record)

    def persistent(self) -> None:
        """Note a reference to something beside the pickle."""
        (reference,) = self.last(1)
        if PERSISTENT_ID not in self._names or type(reference) is not tuple:
            raise self.unsafe("a persistent id")
        self.stack.append(Record(PERSISTENT_ID, reference))


_BYTE, _SHORT, _INT, _SIGNED = (struct.Struct(form) for form in ("<B", "<H", "<I", "<i"))
_LONG, _FLOAT = struct.Struct("<Q"), struct.Struct(">d")

_BY_NAME: dict[str, Callable[[_Machine], object]] = {
    "PROTO": lambda m: m.number(_BYTE),
    "FRAME": lambda m: m.number(_LONG),
    "NONE": lambda m: m.stack.append(None),
    "NEWTRUE": lambda m: m.stack.append(True),
    "NEWFALSE": lambda m: m.stack.append(False),
    "BININT1": lambda m: m.stack.append(m.number(_BYTE)),
    "BININT2": lambda m: m.stack.append(m.number(_SHORT)),
    "BININT": lambda m: m.stack.append(m.number(_SIGNED)),
    "LONG1": lambda m: m.stack.append(int.from_bytes(m.piece(_BYTE), "little", signed=True)),
    "BINFLOAT": lambda m: m.stack.append(m.number(_FLOAT)),
    "SHORT_BINUNICODE": lambda m: m.stack.append(m.piece(_BYTE).decode()),
    "BINUNICODE": lambda m: m.stack.append(m.piece(_INT).decode()),
    "EMPTY_TUPLE": lambda m: m.stack.append(()),
    "EMPTY_LIST": lambda m: m.stack.append([]),
    "EMPTY_SET": lambda m: m.stack.append([]),
    "EMPTY_DICT": lambda m: m.stack.append(Pairs()),
    "MARK": _Machine.mark,
    "TUPLE": lambda m: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m: m.stack.append(tuple(m.last(1))),
    "TUPLE2": lambda m: m.stack.append(tuple(m.last(2))),
    "TUPLE3": lambda m: m.stack.append(tuple(m.last(3))),
    "FROZENSET": lambda m: m.stack.append(m.since_mark()),
    "APPEND": lambda m: m.extend(m.last(1)),
    "APPENDS": lambda m: m.extend(m.since_mark()),
    "ADDITEMS": lambda m: m.extend(m.since_mark()),
    "SETITEM": lambda m: m.update(m.last(2)),
    "SETITEMS": lambda m: m.update(m.since_mark()),
    "MEMOIZE": lambda m: m.memo.append(m.stack[-1]),
    "BINPUT": lambda m: m.put(m.number(_BYTE)),
    "LONG_BINPUT": lambda m: m.put(m.number(_INT)),
    "BINGET": lambda m: m.stack.append(m.memo[m.number(_BYTE)]),
    "LONG_BINGET": lambda m: m.stack.append(m.memo[m.number(_INT)]),
    "GLOBAL": lambda m: m.name(m.line(), m.line()),
    "STACK_GLOBAL": lambda m: m.name(*m.last(2)),
    "REDUCE": _Machine.record,
    "NEWOBJ": _Machine.record,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
_ACTIONS = {ord(opcode.code): _BY_NAME[opcode.name] for opcode in pickletools.opcodes if opcode.name in _BY_NAME}
_STOP = ord(".")
