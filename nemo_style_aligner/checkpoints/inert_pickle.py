"""Pickles read as data: no class, function or other object of this process can be reached from the file.

Python's own interpreter of pickles looks names up in a table of known ones. For each it gets a class that was made for
this file alone (`StandIn`), whose instances note what they are made and filled with. Other names are refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, ClassVar

from nemo_style_aligner.checkpoints.file_source import DamagedCheckpointError
from nemo_style_aligner.errors import UserError

MAX_BYTES = 64 << 20
"""Size of the largest pickle that is read: a tensor's chunk takes some hundreds of bytes."""


class UnsafeCheckpointError(UserError, ValueError):
    """A pickle in a checkpoint refers to something that has no place in a checkpoint."""


class StandIn:
    """What stands in the place of an object.

    Attributes:
        arguments: that would have made it.
        state: what it would have been filled with; if that is a dictionary, its items are attributes as well.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            vars(self).update(state)


def is_a(value: Any, name: str) -> bool:
    """Whether ``value`` stands in the place of what the name, such as ``torch.Size``, would have made."""
    return isinstance(value, StandIn) and type(value).__name__ == name


def read_pickle(content: bytes, what: str, table: Mapping[str, Any]) -> Any:
    """The value in a pickle, of plain values and of instances of `StandIn`.

    It may refer to itself, and to one part from many places: walk it along known fields only.

    Args:
        what: the file, for messages.
        table: all names that may occur, such as ``torch.Size``, and what they stand for; None: a class of stand-ins.

    Raises:
        UnsafeCheckpointError: another name.
        DamagedCheckpointError: not a whole pickle, or too large a one.
    """
    if len(content) > MAX_BYTES:
        raise DamagedCheckpointError(f"{what} is larger than {MAX_BYTES >> 20} MiB, which no checkpoint needs")
    try:
        return _Unpickler(content, what, table).load()
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # opcodes make Python raise anything
        raise DamagedCheckpointError(f"{what} is damaged: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """What an error says, without anything that could break a line or move a terminal's cursor."""
    return ascii(str(error) if type(error) is ValueError else repr(error))[1:-1][:200]


# Of objects that some package has registered, which are not looked up by name; and of memory of any size.
_REFUSED = (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER)


class _Unpickler(pickle._Unpickler):
    """The interpreter in Python: that in C gives a memo as much memory as the file says."""

    dispatch: ClassVar = {code: do for code, do in pickle._Unpickler.dispatch.items() if bytes([code]) not in _REFUSED}

    def __init__(self, content: bytes, what: str, table: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False)
        self._what = what
        self._table = {name: type(name, (StandIn,), {}) if to is None else to for name, to in table.items()}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        if (found := self._table.get(f"{module}.{name}")) is None:
            raise UnsafeCheckpointError(
                f"{self._what} refers to {ascii(f'{module}.{name}')[1:-1][:100]}, which a checkpoint has no use for: "
                "do not load it unless you trust its origin, and then convert it with megatron-core first"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        """A reference to something beside the pickle, such as a tensor's bytes: as it is."""
        return pid
