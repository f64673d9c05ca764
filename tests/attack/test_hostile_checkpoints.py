"""Checkpoints and archives made to execute something, to lie, or to take all time and memory."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from job_processes import environment, script
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from small_models import SHAPE
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from attack.conftest import ROUNDS
from attack.hostile_pickles import enumeration_attack, hostile_pickles, sign, torch_file
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError, open_source
from nemo_style_aligner.trainer.checkpoints import sharded_writing
from nemo_style_aligner.trainer.checkpoints.nemo_archive import require_weights, save_nemo
from nemo_style_aligner.trainer.checkpoints.random_states import (
    encoded_random_states,
    load_random_states,
    random_states,
)
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.sharded_index import UnsafeCheckpointError
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import Part, load_sharded_tensors, part_of, stored_shapes
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.telemetry.metrics import HYPERPARAMETERS_FILE

pytestmark = pytest.mark.usefixtures("one_rank", "one_thread")

KEY = "model.decoder.final_layernorm.weight"
SHAPES = {"wide": (6, 4), "scalar": (), "flat": (5,)}


@dataclasses.dataclass(frozen=True)
class Victims:
    """What is changed by attackers: an archive, unpacked, and a training checkpoint that started from it."""

    archive: Path
    checkpoint: Path


@pytest.fixture(scope="module")
def originals(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Victims:
    folder = tmp_path_factory.mktemp("originals")
    characters = "".join(map(chr, range(48, 98)))
    tokenizer = train_character_tokenizer(characters, folder / "tokenizer")
    architecture = dataclasses.replace(ModelArchitecture(**SHAPE), vocab_size=tokenizer.vocab_size)
    model = build_model(architecture, {}, torch.float32)
    config = architecture.to_nemo_config() | {"encoder_seq_length": 64}
    save_nemo(folder / "base.tar", model, config, tokenizer)
    shutil.unpack_archive(folder / "base.tar", folder / "base.nemo", filter="data")
    manager = CheckpointManager(folder / "log" / "checkpoints", CheckpointSettings())
    manager.save(model, None, {"step": 1}, {})
    manager.finish()
    job = {"model": config | {"restore_from_path": str(folder / "base.nemo")}, "trainer": {"precision": 32}}
    (folder / "log" / HYPERPARAMETERS_FILE).write_text(yaml.safe_dump(job))
    latest = manager.latest()
    assert latest is not None
    return Victims(folder / "base.nemo", latest)


@pytest.fixture
def victims(originals: Victims, tmp_path: Path) -> Victims:
    """Copies to be changed."""
    shutil.copytree(originals.archive, tmp_path / "evil.nemo")
    log = originals.checkpoint.parents[1]
    shutil.copytree(log, tmp_path / "log")
    return Victims(tmp_path / "evil.nemo", tmp_path / "log" / originals.checkpoint.relative_to(log))


def sharded(fill: float = 0.0) -> dict[str, ShardedTensor]:
    return {
        name: ShardedTensor.from_rank_offsets(name, torch.full(shape, fill) + torch.rand(shape) * fill)
        for name, shape in SHAPES.items()
    }


@pytest.fixture(scope="module")
def written(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    (folder / "state").mkdir()
    write(sharded(1.0), folder / "state")
    return folder


def write(tensors: dict[str, ShardedTensor], folder: Path) -> None:
    sharded_writing.write_tensors([part_of(tensor) for tensor in tensors.values()], folder)


@pytest.fixture
def small(written: Path, tmp_path: Path) -> Path:
    """A checkpoint of three tensors of numbers from 1 to 2, in ``state``, to be changed."""
    shutil.copytree(written, tmp_path / "small")
    return tmp_path / "small"


def load(folder: Path) -> dict[str, Part]:
    parts = {name: part_of(tensor) for name, tensor in sharded().items()}
    with open_source(folder) as source:
        load_sharded_tensors(list(parts.values()), source, "state")
    return parts


def refused(action: Callable[[], object], kinds: Any = UserError, match: str = ".") -> str:
    """The message, one printable line, of the error that ``action`` ends with."""
    with pytest.raises(kinds, match=match) as caught:
        action()
    message = str(caught.value)
    assert message.isprintable() and len(message) < 1000, message
    return message


# ---- nothing runs -------------------------------------------------------------------------------


def test_no_pickle_in_a_checkpoint_runs_anything(
    small: Path, tmp_path: Path, attack_count: Callable[..., None]
) -> None:
    """Neither in the index, nor in a tensor's bytes."""
    canary, metadata = tmp_path / "canary", small / "state" / ".metadata"
    real = metadata.read_bytes()
    attacks = hostile_pickles(canary)
    with pytest.raises(pickle.UnpicklingError, match="persistent"):  # a sample: pickle itself executes them
        pickle.loads(attacks["PERSID"])
    for how in ("REDUCE", "INST", "OBJ", "EXT1", "STACK_GLOBAL, dotted"):
        pickle.loads(attacks[how])
        assert canary.exists(), how
        canary.unlink()
    for content in attacks.values():
        metadata.write_bytes(content)
        refused(lambda: load(small), (UnsafeCheckpointError, DamagedCheckpointError))
        metadata.write_bytes(real)
        _replace_chunk(small, "wide", torch_file(torch.ones(6, 4), content))
        refused(lambda: load(small), (UnsafeCheckpointError, DamagedCheckpointError))
        metadata.write_bytes(real)
    assert not canary.exists()
    attack_count("pickles that execute something", tried=2 * len(attacks), refused=2 * len(attacks))


def _replace_chunk(folder: Path, key: str, content: bytes) -> None:
    """Put other bytes in the place of a tensor's."""
    state = folder / "state"
    metadata: Metadata = pickle.loads((state / ".metadata").read_bytes())
    (state / "evil").write_bytes(content)
    place = next(place for place in metadata.storage_data if place.fqn == key)
    metadata.storage_data[place] = _StorageInfo("evil", 0, len(content))
    (state / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.long
def test_no_script_that_users_start_runs_anything(
    victims: Victims, tmp_path: Path, attack_count: Callable[..., None]
) -> None:
    """An entry that is a tensor's and bytes at once, with right checksums, and a file for torch to unpickle."""
    canary = tmp_path / "canary"
    evil = torch_file({}, hostile_pickles(canary)["REDUCE"])
    torch.load(io.BytesIO(evil), weights_only=False)
    assert canary.exists()  # this is what must not happen below
    canary.unlink()
    for state in (victims.archive / "model_weights", victims.checkpoint / "state"):
        (state / "evil").write_bytes(evil)
        real = (state / ".metadata").read_bytes()
        (state / ".metadata").write_bytes(enumeration_attack(real, KEY, "evil", len(evil)))
    (victims.archive / "checksums.json").unlink()
    sign(victims.checkpoint)
    commands = {
        "convert_nemo_to_hf.py": [f"--input={victims.archive}", f"--output-dir={tmp_path / 'hf'}"],
        "convert_checkpoint_to_nemo.py": [f"--input={victims.checkpoint}", f"--output={tmp_path / 'out.nemo'}"],
        "serve_ppo_critic.py": [
            f"pretrained_checkpoint.restore_from_path={victims.archive}",
            f"exp_manager.explicit_log_dir={tmp_path / 'critic'}",
            "trainer.ppo.combine_rm_and_critic_server=False",
            "trainer.precision=32",
        ],
    }
    jobs = {
        name: subprocess.Popen(
            script(name, *arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, arguments in commands.items()
    }
    for name, job in jobs.items():
        output, _ = job.communicate(timeout=120)
        assert ".metadata is damaged" in output and job.returncode in (1, 2), (name, output)
        assert "Traceback" not in output, (name, output)
    assert not canary.exists()
    attack_count("scripts with hostile files", tried=len(jobs), refused=len(jobs))


# ---- lies ---------------------------------------------------------------------------------------


def _change_metadata(change: Callable[[Metadata], object]) -> Callable[[Path], object]:
    def apply(state: Path) -> None:
        metadata = pickle.loads((state / ".metadata").read_bytes())
        change(metadata)
        (state / ".metadata").write_bytes(pickle.dumps(metadata))

    return apply


def _entry(metadata: Metadata, key: str = "wide") -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def _boxes(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Path], object]:
    """Other chunks, each in a place of its own in a file that is long enough."""

    def change(metadata: Metadata) -> None:
        entry = _entry(metadata)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        entry.chunks[:] = chunks
        for number, chunk in enumerate(chunks):
            index = MetadataIndex("wide", chunk.offsets)
            metadata.storage_data[index] = _StorageInfo("long", 1000 * number, 1000)

    def apply(state: Path) -> None:
        (state / "long").write_bytes(bytes(1000 * len(boxes)))
        _change_metadata(change)(state)

    return apply


def _place(**changes: Any) -> Callable[[Path], object]:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "wide":
                vars(info).update(changes)

    return _change_metadata(change)


def _bytes(content: bytes) -> Callable[[Path], object]:
    return lambda state: _replace_chunk(state.parent, "wide", content)


def _with_wider_rows(content: bytes) -> bytes:
    """The same tensor with rows that are 200 numbers apart."""
    strides = b"K\x04K\x01\x86"
    assert content.count(strides) == 1
    return content.replace(strides, b"K\xc8K\x01\x86")


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _stack(metadata: Metadata) -> None:
    """All tensors in the bytes of one."""
    first = next(iter(metadata.storage_data.values()))
    for index in metadata.storage_data:
        metadata.storage_data[index] = first


LIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no chunks": (_boxes(), "do not cover"),
    "a gap": (_boxes(((0, 0), (3, 4)), ((4, 0), (2, 4))), "do not cover"),
    "an overlap": (_boxes(((0, 0), (4, 4)), ((3, 0), (3, 4))), "do not cover"),
    "a pinwheel with a hole": (
        _boxes(((0, 0), (2, 3)), ((0, 3), (4, 1)), ((4, 1), (2, 3)), ((2, 0), (4, 1))),
        "do not cover",
    ),
    "a chunk outside": (_boxes(((0, 0), (6, 4)), ((6, 0), (1, 4))), "do not cover"),
    "one dimension too many": (_boxes(((0, 0, 0), (6, 4, 1))), "other dimensions"),
    "one dimension too few": (_boxes(((0,), (24,))), "other dimensions"),
    "10^8 layers": (_change_metadata(lambda m: setattr(_entry(m), "size", torch.Size((10**8, 4)))), "do not cover"),
    "10^15 numbers": (_boxes(((0, 0), (10**8, 10**7))), "do not cover"),
    "10^15 numbers of a tensor": (
        _change_metadata(
            lambda m: (
                setattr(_entry(m), "size", torch.Size((10**8, 10**7))),
                setattr(_entry(m).chunks[0], "sizes", torch.Size((10**8, 10**7))),
            )
        ),
        "fewer bytes than",
    ),
    "a negative size": (_change_metadata(lambda m: setattr(_entry(m), "size", torch.Size((-6, 4)))), "out of range"),
    "a size of text": (_change_metadata(lambda m: setattr(_entry(m), "size", "ab")), "damaged"),
    "a size of many": (_change_metadata(lambda m: setattr(_entry(m), "size", torch.Size((1,) * 99))), "do not cover"),
    "chunks of text": (_change_metadata(lambda m: setattr(_entry(m), "chunks", "ab")), "damaged"),
    "no state": (_change_metadata(lambda m: setattr(m, "state_dict_metadata", None)), "damaged"),
    "no places": (_change_metadata(lambda m: setattr(m, "storage_data", {})), "damaged"),
    "a name with an escape": (
        _change_metadata(lambda m: m.state_dict_metadata.update({"a\x1b[2J\nb": _entry(m)})),
        "no plain text",
    ),
    "a file outside": (_place(relative_path="../../../etc/passwd"), "leads out"),
    "an absolute file": (_place(relative_path="/etc/passwd"), "leads out"),
    "a file that is not there": (_place(relative_path="nowhere"), "has no file"),
    "a later end": (_place(length=10**6), "more bytes of"),
    "a later start": (_place(offset=10**15), "out of range"),
    "a negative start": (_place(offset=-5), "out of range"),
    "a huge start": (_place(offset=1 << 200), "out of range"),
    "an earlier end": (_place(length=90), "fewer bytes than"),
    "a start in the middle": (_place(offset=7, length=1200), "damaged"),
    "an encoding": (_place(transform_descriptors=["evil"]), "encoded"),
    "one place for all": (_change_metadata(_stack), "damaged|not what"),
    "another dtype": (
        _change_metadata(lambda m: setattr(_entry(m).properties, "dtype", torch.int16)),
        "not what the index says",
    ),
    "another dtype in the file": (_bytes(torch_file(torch.ones(6, 4).int())), "not what the index says"),
    "another shape in the file": (_bytes(torch_file(torch.ones(4, 6))), "not what the index says"),
    "no tensor in the file": (_bytes(torch_file("text" * 99)), "a tensor is expected"),
    "a list in the file": (_bytes(torch_file([torch.ones(6, 4)])), "a tensor is expected"),
    "zeros in the file": (_bytes(bytes(2000)), "damaged"),
    "a view beyond its bytes": (_bytes(_with_wider_rows(torch_file(torch.ones(6, 4)))), "damaged"),
    "big-endian numbers": (_bytes(torch_file(torch.ones(6, 4)).replace(b"little", b"big\0\0\0")), "damaged"),
    "a link": (lambda state: _link(state / "__0_0.distcp"), "symbolic link"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_an_index_says_is_checked(small: Path, lie: str, attack_count: Callable[..., None]) -> None:
    assert load(small)["wide"].data.min() >= 1.0
    make, message = LIES[lie]
    make(small / "state")
    started = time.monotonic()
    refused(lambda: load(small), match=message)
    assert time.monotonic() - started < 10.0
    attack_count("lies in an index", tried=1, refused=1)


@pytest.mark.parametrize("sizes", [(10**8, 32), (2, 10**9)], ids=["layers", "width"])
def test_a_config_of_a_model_that_the_archive_cannot_hold_is_refused_at_once(
    originals: Victims, sizes: tuple[int, int], attack_count: Callable[..., None]
) -> None:
    shape = SHAPE | dict(zip(("num_layers", "hidden_size"), sizes, strict=True))
    with pytest.raises(ValueError, match=r"num_layers must be at most|its config describes a model of"):
        require_weights(originals.archive, ModelArchitecture(**shape))
    attack_count("configs of absurd models", tried=1, refused=1)


# ---- time and memory ----------------------------------------------------------------------------

BOMBS = {
    "a list in itself": b"]\x94h\x00a.",
    "lists of lists, 2^200 in all": b"]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(200)) + b".",
    "tuples in tuples": b")" + b"\x85" * 1_000_000 + b".",
    "calls in calls": b"ctorch\nSize\n\x94" + b"h\x00" * 1_000_000 + b")" + b"R\x85" * 1_000_000 + b".",
    "dictionaries": b"}" * 9_000_000 + b".",
    "marks": b"(" * 1_000_000 + b".",
    "a long text": b"X\xff\xff\xff\xffabc.",
    "a long number": b"\x8b\xff\xff\xff\x7fabc.",
    "a far memo": b"Nr\xff\xff\xff\xff.",
    "no end": b"N",
    "two values": b"NN.",
    "no value": b".",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_ends_in_seconds_and_bounded_memory(small: Path, bomb: str, attack_count: Callable[..., None]) -> None:
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (small / "state" / ".metadata").write_bytes(b"\x80\x04" + BOMBS[bomb])
    refused(lambda: load(small), (UnsafeCheckpointError, DamagedCheckpointError))
    assert time.process_time() - started < 30.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20  # KiB
    attack_count("bombs", tried=1, refused=1)


def test_a_file_that_is_one_big_hole_is_not_read(small: Path, attack_count: Callable[..., None]) -> None:
    with (small / "state" / ".metadata").open("wb") as file:
        file.truncate(1 << 40)
    refused(lambda: load(small), DamagedCheckpointError, "larger than")
    attack_count("bombs", tried=1, refused=1)


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_file_cut_at_any_byte_is_refused(small: Path, tmp_path: Path, attack_count: Callable[..., None]) -> None:
    metadata, states = small / "state" / ".metadata", tmp_path / "states.json"
    tried = 0
    with open_source(small) as source:
        for end in range(len(real := metadata.read_bytes())):
            metadata.write_bytes(real[:end])
            refused(lambda: stored_shapes(source, "state"), DamagedCheckpointError)
            tried += 1
    metadata.write_bytes(real)
    data = small / "state" / "__0_0.distcp"
    whole, lengths = data.read_bytes(), [info.length for info in pickle.loads(real).storage_data.values()]
    for end in range(0, len(whole), 31):
        data.write_bytes(whole[:end])
        refused(lambda: load(small), DamagedCheckpointError)
        tried += 1
    data.write_bytes(whole)
    for end in range(0, max(lengths), 7):  # the index says that it is so short
        _replace_chunk(small, "wide", torch_file(torch.ones(6, 4))[:end])
        refused(lambda: load(small), DamagedCheckpointError)
        metadata.write_bytes(real)
        tried += 1
    saved = encoded_random_states()
    for end in range(0, len(saved), 161):
        states.write_text(saved[:end])
        refused(lambda: load_random_states(states), DamagedCheckpointError)
        tried += 1
    attack_count("files cut short", tried=tried, refused=tried)


@pytest.mark.long
def test_changed_bytes_are_refused_or_change_nothing_but_numbers(
    small: Path, tmp_path: Path, attack_count: Callable[..., None]
) -> None:
    """Any error is a user's. What loads has the shapes and dtypes of the model, in all of its elements."""
    generator = random.Random(3)
    metadata, data, states = small / "state" / ".metadata", small / "state" / "__0_0.distcp", tmp_path / "states.json"
    states.write_text(encoded_random_states())
    contents = {path: path.read_bytes() for path in (metadata, data, states)}
    count = errors = 0
    for _ in range(500 * ROUNDS):
        for path, content in contents.items():
            path.write_bytes(_changed(content, generator))
            try:
                load_random_states(states) if path == states else _assert_loaded(load(small))
            except UserError as error:
                assert str(error).isprintable(), error
                errors += 1
            count += 1
            path.write_bytes(content)
    attack_count("changed bytes", tried=count, refused=errors)


def _changed(content: bytes, generator: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(generator.choice((1, 1, 2, 8))):
        place = generator.randrange(len(changed))
        kind = generator.randrange(4)
        if kind == 0:
            changed[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            changed[place] = generator.randrange(256)
        elif kind == 2:
            del changed[place : place + generator.randrange(1, 9)]
        else:
            changed[place:place] = generator.randbytes(generator.randrange(1, 9))
    return bytes(changed)


def _assert_loaded(tensors: dict[str, Any]) -> None:
    for name, shape in SHAPES.items():
        assert tensors[name].data.shape == shape and tensors[name].data.dtype == torch.float32


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["numpy"].__setitem__(1, 625),  # NumPy would read behind its key
        lambda state: state["numpy"].__setitem__(1, -1),
        lambda state: state["numpy"][0].pop(),
        lambda state: state.update(python=(3, ["%1000000000d"] * 625, None)),  # Python would format it
        lambda state: state.update(python=(3, [1] * 624, None)),
        lambda state: state.update(torch=[0] * 3),
        lambda state: state.update(torch="none"),
        lambda state: state.pop("tensor_parallel"),
    ],
)
def test_random_states_are_checked(tmp_path: Path, change: Callable[[Any], object]) -> None:
    state = random_states()
    change(state)
    (tmp_path / "states.json").write_text(json.dumps(state))
    refused(lambda: load_random_states(tmp_path / "states.json"), DamagedCheckpointError, "states of random")


# ---- what is whole still loads ------------------------------------------------------------------


def test_megatron_core_reads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    """Ours by its `dist_checkpointing`, and its own, in two files and with objects beside the tensors."""
    ours, theirs = tmp_path / "ours" / "state", tmp_path / "theirs" / "state"
    for folder in (ours, theirs):
        folder.mkdir(parents=True)
    tensors = sharded(1.0)
    write(tensors, ours)
    read = dist_checkpointing.load(sharded(), str(ours))
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor.data)
    objects = {"common": {"step": 3, "when": np.float64(1.0)}}
    dist_checkpointing.save(tensors | objects, str(theirs))
    for name, tensor in load(theirs.parent).items():
        assert torch.equal(tensor.data, tensors[name].data)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_that_pickle_has_written_for_years_is_read(small: Path, protocol: int) -> None:
    metadata = small / "state" / ".metadata"
    metadata.write_bytes(pickle.dumps(pickle.loads(metadata.read_bytes()), protocol))
    assert load(small)["flat"].data.min() >= 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_tensors_of_other_dtypes_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(8.0).view(2, 4)
    (tmp_path / "state").mkdir()
    sharded_writing.write_tensors([Part("key", (2, 4), (0, 0), values.to(dtype))], tmp_path / "state")
    read = Part("key", (2, 4), (0, 0), torch.zeros(2, 4))
    with open_source(tmp_path) as source:
        load_sharded_tensors([read], source, "state")
        assert stored_shapes(source, "state") == {"key": (2, 4)}
    assert torch.equal(read.data, values)
