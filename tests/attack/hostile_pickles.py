"""Pickles that execute something where pickle itself reads them, and checkpoints with such pickles in them."""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, Manifest, describe_files


def text(value: str) -> bytes:
    """The opcode that puts text on the stack."""
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def class_of(module: str, name: str) -> bytes:
    """The opcode that looks a name up."""
    return f"c{module}\n{name}\n".encode()


def set_on_class(module: str, name: str, attribute: str, value: bytes) -> bytes:
    """Opcodes that set an attribute of a class: what BUILD does with the second half of a pair."""
    return class_of(module, name) + b"N}" + text(attribute) + value + b"s\x86b0"


def hostile_pickles(canary: Path) -> dict[str, bytes]:
    """How -> a pickle that makes a file, by every opcode that can call something."""
    command = f"touch {canary}"
    argument, system = text(command) + b"\x85", class_of("os", "system")
    copyreg.add_extension("posix", "system", 240)  # may be done again
    by_path = b"\x80\x04\x8c\x02os\x8c\x06system\x93" + argument + b"R."
    dotted = b"\x80\x04" + text("torch.serialization") + text("os.system") + b"\x93" + argument + b"R."
    get, member = class_of("builtins", "getattr"), class_of("torch.distributed.checkpoint.planner", "WriteItemType")
    return {
        "REDUCE": b"\x80\x02" + system + argument + b"R.",
        "REDUCE, text": b"cos\nsystem\n(S'" + command.encode() + b"'\ntR.",
        "STACK_GLOBAL": by_path,
        "STACK_GLOBAL, dotted": dotted,
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(" + system + text(command) + b"o.",
        "NEWOBJ": b"\x80\x02" + system + argument + b"\x81.",
        "NEWOBJ_EX": b"\x80\x04" + system + argument + b"}\x92.",
        "EXT1": b"\x80\x02\x82\xf0" + argument + b"R.",
        "EXT2": b"\x80\x02\x83\xf0\x00" + argument + b"R.",
        "EXT4": b"\x80\x02\x84\xf0\x00\x00\x00" + argument + b"R.",
        "PERSID": b"Pos.system\n.",
        "BINPERSID": text(command) + b"Q.",
        "eval": class_of("builtins", "eval") + text(f"__import__('os').system({command!r})") + b"\x85R.",
        "torch.load": class_of("torch", "load") + text("/dev/null") + b"\x85R.",
        "getattr": get + member + text("__init__") + b"\x86R" + argument + b"R.",
        "getattr, twice": get + get + member + text("__class__") + b"\x86R" + text("x") + b"\x86R.",
        "a method of pathlib": set_on_class("pathlib", "PosixPath", "is_symlink", class_of("torch", "Size")) + b"N.",
        "of its later module": set_on_class("pathlib._local", "PosixPath", "exists", class_of("torch", "Size")) + b"N.",
        "a class's bases": set_on_class("torch", "Size", "__bases__", b")") + b"N.",
        "BUILD on a list": b"]N}" + text("x") + b"Ns\x86b.",
        "BUILD on a name": class_of("torch", "Size") + b"}b.",
        "BUILD, twice": class_of("torch", "Size") + b")\x85R}b}b.",
        "a call of a result": class_of("torch", "Size") + b")\x85R)R.",
        "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1) + b"x.",
        "NEXT_BUFFER": b"\x80\x05\x97.",
    }  # fmt: skip


def enumeration_attack(real: bytes, key: str, file: str, length: int) -> bytes:
    """``.metadata`` in which an entry is a tensor's to those who look at its shape, and bytes to torch's planner.

    A class of an allowed name is given two bases; one of its members, which calling it looks up, stands for the
    tensor. Whoever lets torch plan with it has it unpickle all of ``file``.
    """
    metadata: Metadata = pickle.loads(real)
    entry = metadata.state_dict_metadata[key]

    class Member:
        def __reduce__(self) -> tuple[Any, ...]:
            return WriteItemType, (1,), dict(vars(entry))

    metadata.state_dict_metadata[key] = Member()  # type: ignore[assignment]
    metadata.storage_data |= {MetadataIndex(key): _StorageInfo(file, 0, length)}
    module = "torch.distributed.checkpoint.metadata"
    bases = class_of(module, "TensorStorageMetadata") + class_of(module, "BytesStorageMetadata") + b"\x86"
    attack = set_on_class("torch.distributed.checkpoint.planner", "WriteItemType", "__bases__", bases)
    return b"\x80\x02" + attack + pickle.dumps(metadata, 2)[2:]


def torch_file(value: Any, content: bytes | None = None) -> bytes:
    """What ``torch.save`` writes of ``value``, with another pickle in it where ``content`` is one."""
    whole = io.BytesIO()
    torch.save(value, whole)
    if content is None:
        return whole.getvalue()
    changed = io.BytesIO()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(changed, "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return changed.getvalue()


def sign(checkpoint: Path) -> None:
    """Write the manifest anew: an attacker can, too."""
    manifest = Manifest.read(checkpoint)
    (checkpoint / MANIFEST).unlink()
    files = describe_files(checkpoint)
    Manifest(manifest.sequence, manifest.step, manifest.value, files, None, manifest.monitor).write(checkpoint)
