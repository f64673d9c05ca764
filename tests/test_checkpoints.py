"""Checkpoints: archives at any layout, exact resumes, and nothing lost to kills, damage or a full disk."""

from __future__ import annotations

import enum
import errno
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from omegaconf import OmegaConf
from small_models import SHAPE
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from nemo_style_aligner import durable
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel import agreement
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.tokenizer import TokenizerError
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import NonFiniteError, NotWrittenError, UnreadableError
from nemo_style_aligner.guard.file_source import (
    ArchiveError,
    DamagedCheckpointError,
    DirectorySource,
    MissingFileError,
    open_source,
)
from nemo_style_aligner.trainer.checkpoints import background, manifest, nemo_archive, optimizer_state, sharded_writing
from nemo_style_aligner.trainer.checkpoints.directory import (
    TRAINER_STATE,
    CheckpointDirectory,
    checkpoint_name,
    put_aside,
    staging_of,
)
from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, Manifest
from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
    archive_identity,
    load_nemo_config,
    load_nemo_tokenizer,
    nemo_tokenizer_dir,
)
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.sharded_index import UnsafeCheckpointError
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import (
    CheckpointMismatchError,
    Part,
    load_sharded_tensors,
    stored_shapes,
)
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.loading import ConfigError, load_defaults
from nemo_style_aligner.trainer.config.schema import Data, ExpManager, Updates
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.run_settings import digests_of_data, job_of, settings_of_run
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.telemetry.metrics import HYPERPARAMETERS_FILE, MetricsLogger
from nemo_style_aligner.trainer.training.run_control import RunControl

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def multirank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all scenarios of multirank_checkpoints.py, run once."""
    folder = tmp_path_factory.mktemp("checkpoints")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    script = [sys.executable, str(ROOT / "tests" / "multirank_checkpoints.py"), str(folder)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((folder / "results.json").read_text())
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    assert not errors, f"{errors}\n{done.stderr[-4000:]}"
    return results


def difference(a: list[list[float]], b: list[list[float]]) -> float:
    return float((torch.tensor(a) - torch.tensor(b)).abs().max())


# ---- archives -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", pytest.param("untied", marks=pytest.mark.long)])
def test_an_archive_gives_the_same_model_at_any_layout(multirank: dict[str, Any], kind: str) -> None:
    results = multirank["archives"]
    written = results[f"{kind} written"]
    assert difference(results[f"{kind} tp2 pp2"], written) < 2e-6
    assert difference(results[f"{kind} pp2 bf16"], written) < 1e-2
    # From one rank to TP2 x PP2, unpacked, with another padding of the vocabulary, and back.
    assert results[f"{kind} from directory"] == written


def test_a_reward_model_starts_from_a_language_model(multirank: dict[str, Any]) -> None:
    results = multirank["reward_model"]
    assert results["head kept"] == ["rm_head.weight", "rm_head.bias"]
    assert results["body loaded"]
    assert difference(results["tp2 pp2"], results["rewards"]) < 2e-6


def test_an_archive_that_does_not_fit_is_refused_by_name(multirank: dict[str, Any]) -> None:
    results = multirank["reward_model"]
    assert "has a reward head" in results["language model from reward model"]
    assert "linear_fc1.weight: checkpoint [2, 96, 32], model [2, 128, 32]" in results["other width"]
    assert "64 embeddings" in results["more tokens"]


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, "no room")


def test_the_tokenizer_travels_in_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_character_tokenizer("abc 123", tmp_path / "tokenizer")
    config = yaml.safe_dump({"tokenizer": {"library": "huggingface"}})
    with tarfile.open(tmp_path / "own.nemo", "w") as tar:
        _add(tar, "model_config.yaml", config.encode())
        tar.add(tmp_path / "tokenizer", "tokenizer")
    loaded = load_nemo_tokenizer(tmp_path / "own.nemo")
    assert loaded.text_to_ids("a1 c") == tokenizer.text_to_ids("a1 c")
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").is_file()
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", _no_room)
        with pytest.raises(NotWrittenError, match=r"tokenizer.json cannot be written \(no room\): .*TMPDIR"):
            load_nemo_tokenizer(tmp_path / "own.nemo")
    monkeypatch.setattr(tempfile, "mkdtemp", _no_room)  # Python found no folder that it can write to
    with pytest.raises(NotWrittenError, match=r"own.nemo cannot be unpacked \(no room\): .*TMPDIR"):
        load_nemo_tokenizer(tmp_path / "own.nemo")


def test_a_tokenizer_that_nemo_put_in_is_found(tmp_path: Path) -> None:
    config = {"num_layers": 2, "tokenizer": {"library": "sentencepiece", "model": "nemo:ab12_tokenizer.model"}}
    with tarfile.open(tmp_path / "foreign.nemo", "w") as tar:
        _add(tar, "./model_config.yaml", yaml.safe_dump(config).encode())
        _add(tar, "./ab12_tokenizer.model", b"pieces")
    assert load_nemo_config(tmp_path / "foreign.nemo")["num_layers"] == 2
    with nemo_tokenizer_dir(tmp_path / "foreign.nemo") as path:
        assert path.name == "ab12_tokenizer.model"
        assert path.read_bytes() == b"pieces"
    assert not path.exists()


def test_what_nemos_converters_leave_out_is_found(tmp_path: Path) -> None:
    """The size of the vocabulary is the tokenizer's, and that may be a folder outside of the archive."""
    tokenizer = train_character_tokenizer("abc 123", tmp_path / "tokenizer")
    config = {"num_layers": 2, "tokenizer": {"library": "huggingface", "type": str(tmp_path / "tokenizer")}}
    with tarfile.open(tmp_path / "foreign.nemo", "w") as tar:
        _add(tar, "model_config.yaml", yaml.safe_dump(config).encode())
    assert load_nemo_config(tmp_path / "foreign.nemo") == config | {"vocab_size": tokenizer.vocab_size}
    shutil.rmtree(tmp_path / "tokenizer")
    assert load_nemo_config(tmp_path / "foreign.nemo") == config


def test_what_nemos_converters_put_in_is_not_taken_for_a_tokenizer(tmp_path: Path) -> None:
    """Qwen2's have its vocab.json, without merges, beside the name of what it was made of."""
    tokenizer = train_character_tokenizer("abc 123", tmp_path / "tokenizer")

    def archive(files: dict[str, str], **section: object) -> Path:
        path = tmp_path / "foreign.nemo"
        with tarfile.open(path, "w") as tar:
            _add(tar, "model_config.yaml", yaml.safe_dump({"num_layers": 2, "tokenizer": section}).encode())
            for name, content in files.items():
                _add(tar, name, content.encode())
        return path

    vocabulary = {"ab_vocab.json": '{"a": 0, "b": 1}', "ab_merges.txt": ""}
    found = archive(vocabulary, library="huggingface", model="nemo:ab_vocab.json", type=str(tmp_path / "tokenizer"))
    assert load_nemo_tokenizer(found).text_to_ids("a1") == tokenizer.text_to_ids("a1")
    nowhere = archive(vocabulary, library="huggingface", model="nemo:ab_vocab.json", type="Qwen/Qwen2-7B")
    with pytest.raises(FileNotFoundError, match=r"names Qwen/Qwen2-7B, which is no directory.*tar -xf"):
        load_nemo_tokenizer(nowhere)
    whole = {"ab_tokenizer.json": (tmp_path / "tokenizer" / "tokenizer.json").read_text()}
    with pytest.raises(TokenizerError, match="end-of-sequence"):  # it is one, but names no special tokens
        load_nemo_tokenizer(archive(whole, library="huggingface", model="nemo:ab_tokenizer.json"))
    broken = {"ab_tokenizer.json": '{"model": {"type": "BPE"}, "added_tokens": []}'}
    with pytest.raises(TokenizerError, match="transformers cannot load this tokenizer"):
        load_nemo_tokenizer(archive(broken, library="huggingface", model="nemo:ab_tokenizer.json"))
    with pytest.raises(TokenizerError, match="library tiktoken are not supported; unpack it"):
        load_nemo_tokenizer(archive({"ab_vocab.json": "[]"}, library="tiktoken", model="nemo:ab_vocab.json"))
    with pytest.raises(TokenizerError, match="library megatron GPT2BPETokenizer are not supported"):
        load_nemo_tokenizer(
            archive(vocabulary, library="megatron", type="GPT2BPETokenizer", vocab_file="nemo:ab_vocab.json")
        )
    more = {"special_tokens": None, "additional_special_tokens": ["<extra_id_1>"]}
    with pytest.raises(TokenizerError, match=r"tokenizer\.additional_special_tokens=\['<extra_id_1>'\].*unpack it"):
        load_nemo_tokenizer(archive({"ab.model": ""}, library="sentencepiece", model="nemo:ab.model", **more))


def test_an_archive_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "model_config.yaml").write_text("num_layers: 2\n")
    with pytest.raises(MissingFileError, match="has no tokenizer"), nemo_tokenizer_dir(tmp_path):
        pass
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=f"the tokenizer of {tmp_path} cannot be used"):
        load_nemo_tokenizer(tmp_path)


def test_an_archive_that_lacks_its_metadata_or_has_odd_checksums_says_so(tmp_path: Path) -> None:
    with open_source(tmp_path) as source:
        with pytest.raises(MissingFileError, match=rf"{tmp_path} has no file model_weights/\.metadata"):
            stored_shapes(source, "model_weights")
        for content in ("[1, 2]", '{"model_config.yaml": 3}', "{"):
            (tmp_path / "checksums.json").write_text(content)
            with pytest.raises(DamagedCheckpointError, match=rf"{tmp_path}: checksums.json cannot be read"):
                nemo_archive._stored_checksums(source)


def test_what_is_no_archive_is_told_which_script_makes_one_of_it(tmp_path: Path) -> None:
    checkpoint, hugging_face = tmp_path / "step=20-last", tmp_path / "llama"
    for file in (checkpoint / MANIFEST, checkpoint / "state" / ".metadata", hugging_face / "config.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    for read in (load_nemo_config, load_nemo_tokenizer):
        with pytest.raises(ArchiveError, match=r"step=20-last is a training checkpoint.*nsa convert"):
            read(checkpoint)
        with pytest.raises(ArchiveError, match=r"llama is a Hugging Face directory.*nsa convert"):
            read(hugging_face)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + bytes(2000))
    with pytest.raises(ArchiveError, match=r"is a GGUF file.*nsa convert"):
        load_nemo_config(gguf)
    with pytest.raises(FileNotFoundError, match=r"`hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M`"):
        load_nemo_config(Path("HuggingFaceTB/SmolLM2-135M"))
    with pytest.raises(FileNotFoundError, match=r"^there is no checkpoint at models/sft\.nemo$"):
        load_nemo_config(Path("models/sft.nemo"))


def test_an_archives_identity_is_its_contents_whatever_its_form(tmp_path: Path) -> None:
    def identity(checksums: str | None, weights: bytes = b"weights", as_tar: bool = False) -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        files = {"model_config.yaml": b"num_layers: 2", "model_weights/0.distcp": weights}
        if checksums is not None:
            files["checksums.json"] = checksums.encode()
        for name, content in files.items():
            path = folder / "directory.nemo" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if not as_tar:
            return archive_identity(folder / "directory.nemo")
        with tarfile.open(folder / "tar.nemo", "w") as tar:
            for name, content in reversed(files.items()):
                _add(tar, f"./{name}", content)
        return archive_identity(folder / "tar.nemo")

    def sums(weights: str, number: str = "0") -> str:
        return json.dumps({f: {"bytes": 1, "sha256": h} for f, h in (("0.distcp", weights), (".metadata", number))})

    # torch writes a random number beside the weights: an archive that is made again is the same.
    assert identity(sums("a")) == identity(sums("a", "1"), as_tar=True) != identity(sums("b"))
    # Others' archives have no checksums: names, sizes and first bytes have to do.
    assert identity(None) == identity(None, as_tar=True) != identity(None, b"WEIGHTS")
    assert identity(None) != identity(None, b"weights of another size")
    with pytest.raises(FileNotFoundError):
        archive_identity(tmp_path / "nowhere.nemo")


# ---- foreign files --------------------------------------------------------------------------


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def test_nothing_outside_an_archive_can_be_reached(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with tarfile.open(tmp_path / "evil.nemo", "w") as tar:
        _add(tar, "../escaped", b"out")
        _add(tar, "/tmp/escaped", b"out")
        _add(tar, "tokenizer/../../escaped", b"out")
        link = tarfile.TarInfo("tokenizer/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        tar.addfile(link)
        _add(tar, "tokenizer/fine", b"fine")
    with open_source(tmp_path / "evil.nemo") as source:
        assert source.names() == ["tokenizer/fine"]
        with pytest.raises(FileNotFoundError):
            source.open("tokenizer/link")
        with pytest.raises(ValueError, match="leads out"):
            source.open("../escaped")
    directory = tmp_path / "directory.nemo"
    directory.mkdir()
    (directory / "model_config.yaml").symlink_to(tmp_path / "secret")
    with pytest.raises(FileNotFoundError, match=r"is a symbolic link, which is not followed: copy .*cp -rL"):
        load_nemo_config(directory)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("secret")
    (directory / "tokenizer").symlink_to(tmp_path / "outside")
    with open_source(directory) as source, pytest.raises(FileNotFoundError, match=r"tokenizer is a symbolic link"):
        source.open("tokenizer/file")


def test_metadata_that_would_execute_something_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    (tmp_path / "model_weights").mkdir()
    (tmp_path / "model_weights" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with open_source(tmp_path) as source, pytest.raises(UnsafeCheckpointError, match="system"):
        stored_shapes(source, "model_weights")
    assert not (tmp_path / "executed").exists()


def test_metadata_written_by_python_3_11_2_can_be_read(tmp_path: Path) -> None:
    """Debian 12's. It pickles members of enumerations by ``getattr``, which may give nothing else."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (torch.Size, "__init_subclass__")

    def write(content: Any) -> None:
        with (tmp_path / "model_weights" / ".metadata").open("wb") as file:
            Pickler(file).dump(content)

    (tmp_path / "model_weights").mkdir()
    (tmp_path / "model_weights" / "__0_0.distcp").write_bytes(bytes(100))
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2, 3]), chunks)
    place = {MetadataIndex("model.weight", (0, 0)): _StorageInfo("__0_0.distcp", 0, 100)}
    with open_source(tmp_path) as source:
        write(Metadata({"model.weight": tensor}, storage_data=place))
        assert b"getattr" in (tmp_path / "model_weights" / ".metadata").read_bytes()
        assert stored_shapes(source, "model_weights") == {"model.weight": (2, 3)}
        write(Evil())
        with pytest.raises(DamagedCheckpointError):
            stored_shapes(source, "model_weights")


@pytest.mark.parametrize(
    ("files", "problem", "remedy"),
    [
        (("model_weights/model.a.weight/.zarray", "model_weights/common.pt"), "zarr", "dist_ckpt_format=torch_dist"),
        (("model_weights.ckpt",), "model_weights.ckpt is not a megatron-core", "convert_gpt_nemo_to_mcore.py"),
        (("mp_rank_00/model_weights.ckpt",), "mp_rank_00/.* is not a megatron-core", "convert_gpt_nemo_to_mcore.py"),
        (("tp_rank_00_pp_rank_000/model_weights.ckpt",), "is not a megatron-core", "convert_gpt_nemo_to_mcore.py"),
        (("model_config.yaml",), "has no file model_weights/.metadata", ""),
    ],
)
def test_other_formats_of_nemo_are_named(tmp_path: Path, files: tuple[str, ...], problem: str, remedy: str) -> None:
    with tarfile.open(tmp_path / "foreign.nemo", "w") as tar:
        for name in files:
            _add(tar, f"./{name}", b"content")
    expected = pytest.raises((ValueError, FileNotFoundError), match=rf"foreign\.nemo.*{problem}.*{remedy}")
    with open_source(tmp_path / "foreign.nemo") as source, expected:
        stored_shapes(source, "model_weights")


def test_a_truncated_archive_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "cut.nemo").write_bytes(b"not a tar file" * 100)
    with pytest.raises(ValueError, match=r"cut\.nemo is not a readable tar file: [^:;\n]+; it may be cut short$"):
        load_nemo_config(tmp_path / "cut.nemo")


# ---- training checkpoints -------------------------------------------------------------------

EXACT = ["fp32 distributed dp2", "bf16 distributed tp2", "bf16 distributed reward dp2"]
EXACT_IF_LONG = ("bf16 distributed pp2 tied", "fp32 plain", "bf16 sgd dp2", "bf16 plain reward")


def of_long_runs(*names: str) -> list[Any]:
    """Cases that multirank_checkpoints.py has with TEST_LONG=1 alone."""
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.mark.parametrize("job", [*EXACT, *of_long_runs(*EXACT_IF_LONG)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(multirank: dict[str, Any], job: str) -> None:
    result = multirank["exact_resume"][job]
    assert result["resumed"][0] == result["straight"][0]  # losses
    assert result["resumed"][1] == result["straight"][1]  # weights, main weights, moments, random streams
    assert result["state"] == {"step": 3, "sampler": {"epoch": 1, "position": 7}}


def test_any_run_of_elements_is_a_few_boxes() -> None:
    for shape in ((), (7,), (3, 4), (1, 3, 4), (2, 3, 2, 2)):
        whole = torch.arange(math.prod(shape)).view(shape)
        for start in range(whole.numel() + 1):
            for stop in range(start, whole.numel() + 1):
                found = list(optimizer_state.boxes(shape, start, stop))
                slices = [tuple(slice(o, o + s) for o, s in zip(*box, strict=True)) for box in found]
                values = [value for box in slices for value in whole[box].reshape(-1).tolist()]
                assert values == list(range(start, stop)) and len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("job", ["dp2", "pp2 dp2 tied", *of_long_runs("tp2 dp2")])
def test_data_parallel_ranks_share_out_what_they_write(multirank: dict[str, Any], job: str) -> None:
    """Evenly; checkpoints that the first rank wrote alone, which hold the same tensors, are read too."""
    result = multirank["shared_out"][job]
    ranks = result["written"]
    stages = (ranks[:2], ranks[2:]) if job.startswith("pp2") else (ranks,)
    for stage in stages:
        for written in zip(*stage, strict=True):  # of the optimizer, of everything
            assert max(written) < 1.2 * min(written), written
    assert result["same"]


def test_saving_does_not_change_the_run(multirank: dict[str, Any]) -> None:
    results = multirank["exact_resume"]
    assert results["without a save"] == results[EXACT[0]]["straight"][1]


def test_training_goes_on_at_another_layout(multirank: dict[str, Any]) -> None:
    results = multirank["layout_change"]
    for layout in results.keys() & {"dp2", "and back", "plain", "tp2"}:
        assert results[layout] == pytest.approx(results["same layout"], rel=1e-6), layout


def test_ranks_have_the_same_weights_in_fp32_from_a_checkpoint_in_bf16(multirank: dict[str, Any]) -> None:
    """Each has the part of its own optimizer exactly, the model's tensors are rounded."""
    assert multirank["layout_change"]["difference in fp32"] == 0.0


def test_a_save_killed_at_any_instant_loses_nothing(multirank: dict[str, Any]) -> None:
    result = multirank["killed"]
    first, second = [1, result["first"]], [2, result["second"]]
    found = [[step, fingerprint] for step, fingerprint, _, _ in result["outcomes"]]
    assert len(found) > 6
    # Each finds the previous checkpoint or, once it was renamed into place, the new one; whole in both cases.
    published = found.index(second)
    assert found == [first] * published + [second] * (len(found) - published)
    assert any(name.endswith(".unfinished") for _, _, left, _ in result["outcomes"] for name in left)
    assert not any(name.endswith(".unfinished") for _, _, _, names in result["outcomes"] for name in names)


def test_a_checkpoint_is_written_while_training_goes_on(multirank: dict[str, Any]) -> None:
    """Of the state at the save, not of what training has made of it since; under the name only when it is whole."""
    result = multirank["behind"]["written"]
    assert result["meanwhile"] == ["megatron_gpt-step=1-last", "megatron_gpt-step=2-last.unfinished"]
    assert (result["noticed before the end"], result["noticed"]) == (0, 1)
    assert result["whole before the archive"] == ["megatron_gpt-step=1", "megatron_gpt-step=2-last"]
    assert result["afterwards"] == ["megatron_gpt-step=1", "megatron_gpt-step=2-last", "megatron_gpt.nemo"]
    assert result["archive is of then"]
    assert result["resumed"] == result["expected"] != result["trained on"]


def test_only_one_checkpoint_is_written_at_a_time(multirank: dict[str, Any]) -> None:
    result = multirank["behind"]["two"]
    assert result["order"] == [2, 3]
    assert result["names"] == ["megatron_gpt-step=2", "megatron_gpt-step=3-last"]


def test_a_wait_for_the_critics_checkpoint_is_progress_while_all_ranks_are_there(multirank: dict[str, Any]) -> None:
    assert multirank["behind"]["each poll is progress"]


def test_a_write_that_fails_behind_training_is_an_error_on_all_ranks(multirank: dict[str, Any]) -> None:
    errors, names = multirank["behind"]["failed"]
    assert len(errors) == 2 and all("step=4-last failed" in error for error in errors), errors
    assert "File too large" in errors[0]
    assert names == ["megatron_gpt-step=2", "megatron_gpt-step=3-last"]


def test_a_job_that_fails_still_finishes_its_checkpoint(multirank: dict[str, Any]) -> None:
    assert multirank["behind"]["last chance"] == ["ZeroDivisionError", "megatron_gpt-step=5-last"]


def test_an_archive_that_is_not_written_leaves_the_checkpoint_whole(multirank: dict[str, Any]) -> None:
    """And nothing that is logged or raised says otherwise."""
    given_up, failed, raised, newest = multirank["behind"]["no archive"]
    assert given_up == "an archive was given up: it was not complete after 0 s"
    assert failed.startswith("an archive was not written: writing the archive ")
    for error in (failed, raised):
        assert error.endswith("megatron_gpt.nemo failed: no room. The checkpoints are intact")
    assert newest == "megatron_gpt-step=7-last"


def test_without_memory_for_a_copy_or_without_the_wish_saves_block(multirank: dict[str, Any]) -> None:
    assert multirank["behind"]["blocking"] == {"no memory": [0.0, True], "async_save=False": [0.0, True]}


def test_any_damaged_file_is_found_and_the_previous_checkpoint_used(multirank: dict[str, Any]) -> None:
    outcomes = multirank["damaged"]["outcomes"]
    assert len(outcomes) > 8
    for case, (by_name, step, names) in outcomes.items():
        assert by_name.startswith("DamagedCheckpointError"), case
        assert step == 1, case
        assert names == ["megatron_gpt-step=1", "megatron_gpt-step=2-last.damaged"], case
    # A damaged one takes nobody's place: the one that was used is still there after the next save.
    assert multirank["damaged"]["after another save"] == [
        "megatron_gpt-step=1",
        "megatron_gpt-step=2-last.damaged",
        "megatron_gpt-step=3-last",
    ]


@pytest.mark.parametrize("job", ["bf16 distributed dp2", "fp32 distributed", *of_long_runs("bf16 plain reward")])
def test_adam_states_that_move_between_updates_change_nothing(multirank: dict[str, Any], job: str) -> None:
    """Trained, saved and resumed bit for bit the same, without memory for gradients in between.

    The model's weights stay, also as their own main weights.
    """
    result = multirank["offloaded"][job]
    here, away = result["runs"]
    assert away == here
    assert result["moved"][0] == {"moments": 0, "main weights": 0, "weights": 0, "gradients": 0, "orphans": 0}
    main_weights = 0 if job == "fp32 distributed" else result["moved"][1]["main weights"]
    moved = {"moments": 1, "main weights": main_weights, "weights": 0, "gradients": 1, "orphans": 0}
    assert result["moved"][1] == moved
    assert main_weights == 0 or main_weights > 0.8  # the fp32 head of a bf16 model is its own main weight


@pytest.mark.parametrize("job", ["bf16 distributed tp2", *of_long_runs("fp32 plain pp2", "fp32 distributed dp2")])
def test_updates_with_nan_leave_no_trace_on_any_rank(multirank: dict[str, Any], job: str) -> None:
    result = multirank["nonfinite"]["jobs"][job]
    assert result["with NaN"][:2] == result["clean"][:2]  # losses, weights, moments, random streams: bit for bit
    assert (result["clean"][2], result["with NaN"][2]) == ([4, 0], [4, 2])  # updates made and skipped


def test_updates_skipped_in_a_row_are_counted_across_a_restart(tmp_path: Path) -> None:
    with single_process(seed=1):
        model = build_model(ModelArchitecture(**SHAPE), {}, torch.float32)
        before, after = (
            Optimizer(
                model,
                schema.Optimizer(weight_decay=0.0),
                Schedule(lr=1.0, name="constant"),
                1.0,
                Updates(on_nonfinite="skip", max_consecutive_skips=2),
            )
            for _ in range(2)
        )
        for _ in range(2):
            before.skips.skip("an update", "a batch")
        manager = CheckpointManager(tmp_path, CheckpointSettings())
        manager.save(model, before, {"step": 1}, {})
        manager.finish()
        CheckpointManager(tmp_path, CheckpointSettings()).resume(model, after)
        with pytest.raises(NonFiniteError, match="3 updates in a row, more than max_consecutive_skips=2"):
            after.skips.skip("an update", "a batch")


def test_a_run_is_continued_by_its_own_kind_of_job_and_with_its_own_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = ("gpt_sft", "training_rm", "gpt_ppo_actor", "gpt_ppo_critic")
    settings = {job: settings_of_run(load_defaults(job)) for job in jobs}
    assert len({job_of(settings[job]) for job in jobs}) == 4 and job_of({}) is None

    def run(job: str, model: MegatronModel, digests: Mapping[str, str] = MappingProxyType({})) -> Run:
        manager = CheckpointManager(tmp_path, CheckpointSettings(), run_settings={**settings[job], **digests})
        return Run(tmp_path, model.layout, MetricsLogger(tmp_path), RunControl(), manager)

    with single_process(seed=1):
        model, other = (build_model(ModelArchitecture(**SHAPE | {"num_layers": n}), {}, torch.float32) for n in (2, 3))
        optimizer = Optimizer(model, schema.Optimizer(weight_decay=0.0), Schedule(lr=1.0, name="constant"), 1.0)
        manager = run("training_rm", model).checkpoints
        manager.save(model, optimizer, {"step": 1}, {})
        manager.finish()
        trainer, config = Mock(), Mock(given=OmegaConf.create({"job": "rm"}))
        with pytest.raises(ConfigError, match="is a checkpoint of a reward model job, and this is a critic job: give"):
            run("gpt_ppo_critic", model).resume(Mock(given={"job": "critic"}), model, optimizer, trainer)
        with pytest.raises(CheckpointMismatchError, match=r"another exp_manager\.explicit_log_dir"):
            run("training_rm", other).resume(config, other, optimizer, trainer)
        # The file there describes the checkpoints.
        assert not trainer.load_state_dict.called and not (tmp_path / HYPERPARAMETERS_FILE).exists()
        run("training_rm", model).resume(config, model, optimizer, trainer)
        assert trainer.load_state_dict.call_args.args[0]["step"] == 1
        assert (tmp_path / HYPERPARAMETERS_FILE).read_text() == "job: rm\n"
        base = {"base archive": "/a.nemo", "fingerprint of the base archive": "1", "fingerprint of the tokenizer": "2"}
        first = run("training_rm", model, base).checkpoints
        first.save(model, optimizer, {"step": 1}, {})
        first.finish()
        run("training_rm", model, base | {"base archive": "/moved.nemo"}).resume(config, model, optimizer, trainer)
        assert "moved" not in caplog.text
        for changes, what in (({}, "has other"), ({"fingerprint of the tokenizer": "4"}, "has another tokenizer and")):
            other_base = base | {"base archive": "/b.nemo", "fingerprint of the base archive": "3"} | changes
            with pytest.raises(ConfigError, match=rf"began with /a\.nemo \(fingerprint 1\); /b\.nemo .* {what}"):
                run("training_rm", model, other_base).resume(config, model, optimizer, trainer)
        file = tmp_path / "train.jsonl"
        data = Data(data_prefix={"train": [str(file)]}, seq_length=8)
        for step, contents in enumerate(("a", "a", "b"), 2):
            assert "SHA-256" not in caplog.text
            file.write_text(contents)
            again = run("training_rm", model, digests_of_data(data))
            again.resume(config, model, optimizer, trainer)
            again.checkpoints.save(model, optimizer, {"step": step}, {})
            again.checkpoints.finish()
        assert f"differ from those of its checkpoint: SHA-256 of {file}=" in caplog.text


def test_nan_is_never_written_into_a_checkpoint(multirank: dict[str, Any]) -> None:
    error, names = multirank["nonfinite"]["saving NaN"]
    assert "step 2 is not saved: NaN or Inf in model." in error  # rank 1 has it, rank 0 says it
    assert names == ["megatron_gpt-step=1-last"]


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's archive writer, which fails once more while it closes the file, reports that."""

    def fail(*_: Any) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail)
    with pytest.raises(OSError, match="No space left on device"):
        sharded_writing._Writer(tmp_path, 10**18).write_data(None, None)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        sharded_writing._Writer(tmp_path, 0).write_data(None, None)


def test_what_the_system_says_about_a_file_is_told(tmp_path: Path) -> None:
    """Of a limit of size here, with the disk far from full; of a quota it is the same."""
    tensors = [Part("tensor", (2**20,), (0,), torch.ones(2**20))]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    said = re.escape(f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}: '{tmp_path}'")
    with single_process(), pytest.raises(agreement.OtherRankError, match=said):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        try:
            sharded_writing.write_tensors(tensors, tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_the_previous_checkpoint(multirank: dict[str, Any]) -> None:
    result = multirank["full_disk"]
    before, without_folder, without_name, during = result["errors"]
    assert "does not fit" in before
    assert re.match(r"step 4 was not saved: .*Input/output error.* start again", without_folder)
    assert re.match(r"saving the checkpoint .*step=4-last failed: .*Input/output error.* start again", without_name)
    assert "rank 1" in during and "File too large" in during
    assert result["names"] == ["megatron_gpt-step=1-last"]


def test_a_disk_that_is_really_full(multirank: dict[str, Any]) -> None:
    result = multirank["full_disk"]["tmpfs"]
    if result is None:
        pytest.skip("NOT TESTED: only root can mount a disk that is full")
    (before, *left_before), (during, *left_during) = result["outcomes"]
    assert f"a checkpoint of {result['size']:,} bytes does not fit" in before and "bytes are free at" in before
    assert "No space left on device" in during and f"It needs a little more than {result['size']:,} bytes" in during
    for error in (before, during):
        assert result["directory"] in error
    # The first checkpoint alone is left, and is what the job goes on from; with room again, saving works again.
    assert left_before == left_during == [["megatron_gpt-step=1-last"], True]
    assert result["with room again"] == ["megatron_gpt-step=1", "megatron_gpt-step=2-last"]


def test_older_checkpoints_stay_until_the_new_one_was_read_back(multirank: dict[str, Any]) -> None:
    error, names = multirank["not_trusted"]["bad disk"]
    assert "__0_0.distcp: its contents have changed" in error and "what was read back from disk" in error
    assert names == ["megatron_gpt-step=1-last"]


def test_with_nothing_but_damaged_checkpoints_a_job_does_not_start_over(multirank: dict[str, Any]) -> None:
    results = multirank["not_trusted"]
    error, names = results["all damaged"]
    assert len(names) == 2 and all(name.endswith(".damaged") for name in names)
    for text in (error, results["again"]):
        assert text.startswith("DamagedCheckpointError: every checkpoint in") and "resume_if_exists=False" in text
        assert all(name in text for name in names)
    assert results["told not to resume"] is None


def test_archives_that_were_cut_or_changed_are_refused_by_name(multirank: dict[str, Any]) -> None:
    results = multirank["not_trusted"]
    for case in ("cut in the weights", "cut between files"):
        assert "model.nemo is not a readable tar file" in results[case] and "cut short" in results[case], results[case]
    assert "model.nemo is damaged" in results["flipped"]
    assert "__0_0.distcp: its contents have changed" in results["flipped"]


def test_the_best_and_the_newest_are_kept(multirank: dict[str, Any]) -> None:
    # Monitored values 0.5, 0.1, 0.9, NaN, 0.4.
    names = {case: [int(n[7]) for n in names] for case, names in multirank["pruning"].items()}
    assert names == {
        "top 2 min": [2, 5],
        "top 1 max": [3, 5],
        "none": [5],
        "none but two": [4, 5],
        "all": [1, 2, 3, 4, 5],
        "unmonitored": [3, 4, 5],
        "another monitor": [3, 4],
    }
    for kept in multirank["pruning"].values():
        assert [name.endswith("-last") for name in kept] == [False] * (len(kept) - 1) + [True]


def test_resume_keys_of_exp_manager(multirank: dict[str, Any]) -> None:
    results = multirank["resuming"]
    assert results["nothing, ignored"] is None
    assert results["nothing, not ignored"].startswith("NoCheckpointError")
    assert results["newest"]["step"] == 3
    assert results["off"] is None
    assert results["explicit"]["step"] == 1
    assert results["back, steps"] == [1, 2, 3, 2, 2]
    assert results["lost its last"] == [7, 2]
    assert results["explicit, wrong"].startswith("NoCheckpointError")
    assert "saved without an optimizer" in results["no optimizer"]


def test_the_end_of_training_writes_the_best_model_that_is_whole(multirank: dict[str, Any]) -> None:
    results = multirank["resuming"]
    assert results["names"] == ["m--val_loss=0.100-step=1", "m--val_loss=0.700-step=3-last", "megatron_gpt.nemo"]
    # Of 0.3, 0.1, 0.2, 0.9 and one that was not measured; then of those without the best, which has lost a bit.
    assert results["exported"] == {"top 1": 0, "all kept": 1, "damaged": 2}
    assert results["model kept"]
    assert results["put aside"] == ["m--val_loss=0.100-step=2.damaged"]
    # Each of five archives has a tokenizer written for it, without a folder for temporary files.
    assert results["tokenizers"] == [5, 0]


def test_deleting_what_is_pruned_may_fail_or_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a file that another machine has open: the save is done, and nothing half deleted keeps its name."""
    settings = CheckpointSettings(save_top_k=1, save_last_n=1, filename="{step}")
    files = CheckpointDirectory(tmp_path, settings)

    def save(step: int) -> None:
        target, _ = files.prepare({"step": step}, 0)
        Manifest(step, step, None, {}).write(staging_of(target))
        files.publish(target, ())

    def refuse(path: Path) -> None:
        (path / MANIFEST).unlink()
        raise OSError(errno.EBUSY, "Device or resource busy", ".nfs01")

    save(1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        save(2)
        assert [entry.path.name for entry in files.entries()] == ["step=2-last"]
        assert sorted(os.listdir(tmp_path)) == ["step=1-last.unfinished", "step=2-last"]
        save(1)  # as a run that has gone back: the name is not free yet
    assert "Device or resource busy" in caplog.text and not files.damaged()
    save(3)
    assert os.listdir(tmp_path) == ["step=3-last"]


def test_what_is_protected_outlives_one_save_and_damage_keeps_its_name(tmp_path: Path) -> None:
    files = CheckpointDirectory(tmp_path, CheckpointSettings(save_top_k=0, save_last_n=1, filename="{step}"))

    def save(step: int, *protected: Path) -> Path:
        target, sequence = files.prepare({"step": step}, 0)
        Manifest(sequence, step, None, {}).write(staging_of(target))
        files.publish(target, protected)
        return target

    first = save(7)
    assert [save(5, first), files.entries()[0].path] == [tmp_path / "step=5-last"] * 2  # of a run that has gone back
    assert sorted(os.listdir(tmp_path)) == ["step=5-last", "step=7"]
    put_aside(save(6), ["a bit"])
    assert save(6).name == "step=6-v1-last"
    assert sorted(os.listdir(tmp_path)) == ["step=6-last.damaged", "step=6-v1-last"]
    state = tmp_path / "step=6-v1-last" / TRAINER_STATE
    assert files.trainer_states() == {}  # it is missing, and without it nobody can go on from there
    for content, found in (("{", {}), ("{}", {}), ('{"trainer": {"step": 6}}', {state.parent: {"step": 6}})):
        state.write_text(content)
        assert files.trainer_states() == found


def test_a_rename_that_cannot_be_synced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been renamed is there: it must not be called missing."""
    (tmp_path / "new").write_text("new")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=rf"whole and has its name.*\(Input/output error\): '{tmp_path / 'name'}'"):
        durable.publish(tmp_path / "new", tmp_path / "name")
    assert (tmp_path / "name").read_text() == "new"


def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again, and then it is an error; the checkpoint keeps its name. With a file missing, it is damaged."""
    whole = tmp_path / "step=1-last"
    (whole / "state").mkdir(parents=True)
    (whole / "state" / "data").write_text("weights")
    (whole / TRAINER_STATE).write_text('{"trainer": {}}')
    troubles = [errno.EMFILE, errno.ESTALE]

    def in_trouble(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Path, *arguments: Any, **options: Any) -> Any:
            if (path.name, call.__name__) == failing and troubles:
                raise OSError(troubles.pop(0), "trouble")
            return call(path, *arguments, **options)

        return called

    monkeypatch.setattr(manifest, "_READ_PAUSES", (0.0, 0.0))
    with single_process():
        manager = CheckpointManager(tmp_path, CheckpointSettings())
        Manifest(1, 1, None, manifest.describe_files(whole)).write(whole)
        for call in (Path.open, Path.iterdir, Path.is_dir):
            monkeypatch.setattr(Path, call.__name__, in_trouble(call))
        readers: dict[tuple[str, str], Callable[[], Any]] = {
            ("data", "open"): manager.latest,
            (MANIFEST, "open"): manager.latest,
            (TRAINER_STATE, "open"): lambda: next(iter(manager.trainer_states()), None),
            (tmp_path.name, "iterdir"): manager.latest,
            ("state", "is_dir"): manager.latest,
        }
        for failing, read in readers.items():
            troubles[:] = [errno.EMFILE, errno.ESTALE]
            assert read() == whole and not troubles
            troubles[:] = [errno.EIO, errno.ETIMEDOUT, errno.EIO]
            named = tmp_path if failing[1] == "iterdir" else f"{whole}.*"
            with pytest.raises(UnreadableError, match=rf"\[Errno {errno.EIO}\] trouble: '{named}'"):
                read()
            assert os.listdir(tmp_path) == [whole.name]
        (whole / "state" / "data").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
            with pytest.raises(NotWrittenError, match=rf"{whole}, which is damaged, cannot be put aside: .*denied"):
                manager.latest()
        assert manager.latest() is None
    assert os.listdir(tmp_path) == [f"{whole.name}.damaged"]


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_tensors_that_cannot_be_read_now_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """As they are when the checksums are computed: the disk may fail later, too."""

    def tensors(value: float) -> list[Part]:
        return [Part("key", (4,), (0,), torch.full((4,), value))]

    def open_in_trouble(source: DirectorySource, name: str) -> IO[bytes]:
        if name == f"state/{file}" and troubles:
            raise OSError(troubles.pop(), "trouble")
        return opened(source, name)

    opened, troubles = DirectorySource.open, [errno.EIO]
    monkeypatch.setattr(DirectorySource, "open", open_in_trouble)
    monkeypatch.setattr(manifest, "_READ_PAUSES", (0.0,))
    (tmp_path / "state").mkdir()
    with single_process(), open_source(tmp_path) as source:
        sharded_writing.write_tensors(tensors(2.0), tmp_path / "state")
        read = tensors(0.0)
        load_sharded_tensors(read, source, "state")
        assert not troubles and read[0].data.tolist() == [2.0] * 4
        troubles[:] = 2 * [errno.EIO]
        with pytest.raises((UnreadableError, DamagedCheckpointError), match=rf"\[Errno {errno.EIO}\] trouble"):
            load_sharded_tensors(read, source, "state")


@pytest.mark.parametrize("file", [TRAINER_STATE, "random/00000.json"])
def test_what_a_job_resumes_with_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The files that are read after the checksums were compared may be out of reach for the moment, too."""
    troubles: list[int] = []
    opened = Path.open

    def open_in_trouble(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == Path(file).name and troubles:
            raise OSError(troubles.pop(), "trouble")
        return opened(path, *arguments, **options)

    with single_process():
        model = build_model(ModelArchitecture(**SHAPE), {}, torch.float32)
        manager = CheckpointManager(tmp_path, CheckpointSettings())
        manager.save(model, None, {"step": 1}, {})
        manager.finish()
        monkeypatch.setattr(manifest, "_READ_PAUSES", (0.0,))
        monkeypatch.setattr(Path, "open", open_in_trouble)
        checked = manager.latest()
        troubles[:] = [errno.EIO]
        assert manager.load(checked, model, None) == {"step": 1} and not troubles
        troubles[:] = 2 * [errno.EIO]
        with pytest.raises(UnreadableError, match=rf"\[Errno {errno.EIO}\] trouble: '{checked / file}'"):
            manager.load(checked, model, None)


def test_a_manifest_that_was_changed_is_damaged(tmp_path: Path) -> None:
    """What it says is no less part of the checkpoint than its files: here which one is the best."""
    Manifest(12, 1, 0.25, {}).write(tmp_path)
    file = tmp_path / MANIFEST
    file.write_text(file.read_text().replace("0.25", "0.75"))
    with pytest.raises(DamagedCheckpointError, match=rf"{file} is damaged"):
        Manifest.read(tmp_path)


def test_a_manifest_with_keys_of_a_later_version_is_told(tmp_path: Path) -> None:
    Manifest(12, 1, 0.25, {}).write(tmp_path)
    file = tmp_path / MANIFEST
    content = json.loads(file.read_text()) | {"compression": "zstd"}
    del content["sha256"]
    file.write_text(json.dumps(content | {"sha256": manifest._checksum(content)}))
    with pytest.raises(DamagedCheckpointError, match=rf"{file} is of another version: .*compression"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("lost", ["state", MANIFEST])
def test_a_checkpoint_that_has_lost_its_state_is_missed(tmp_path: Path, lost: str) -> None:
    """The job does not start from the beginning as if there had never been one."""
    whole = tmp_path / "step=1-last"
    (whole / "state").mkdir(parents=True)
    (whole / "state" / "data").write_text("weights")
    (tmp_path / "model.nemo" / "model_weights").mkdir(parents=True)  # no checkpoint
    nothing: Any = None
    with single_process():
        Manifest(1, 1, None, manifest.describe_files(whole)).write(whole)
        shutil.rmtree(whole / lost) if lost == "state" else (whole / lost).unlink()
        with pytest.raises(DamagedCheckpointError, match=r"every checkpoint in .* is damaged"):
            CheckpointManager(tmp_path, CheckpointSettings()).resume(nothing, nothing)
    assert sorted(os.listdir(tmp_path)) == ["model.nemo", f"{whole.name}.damaged"]


def test_no_rank_waits_in_a_collective_for_what_another_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive may be one file that one rank reads, for longer than a collective may take: they agree to go on."""

    class Slow(DirectorySource):
        def open(self, name: str) -> IO[bytes]:
            assert enough.wait(300)
            return super().open(name)

    def attempts(action: Callable[[], Any], group: Any = None) -> list[Any]:
        answers.append(on_every_rank(action, group))
        if len(answers) == 3:
            enough.set()
        return answers[-1]

    (tmp_path / "file").write_text("content")
    enough, on_every_rank = threading.Event(), agreement.on_every_rank
    answers: list[Any] = []
    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "on_every_rank", attempts)
    with single_process():
        expected = {"file": manifest.describe_file(tmp_path / "file")}
        assert manifest.find_changes(Slow(tmp_path), expected) == []
        assert answers[:3] == [[False]] * 3 and answers[-2] == [True]
        (tmp_path / "file").unlink()
        assert "No such file" in manifest.find_changes(Slow(tmp_path), expected)[0]
        (tmp_path / "file").mkdir()
        monkeypatch.setattr(Slow, "open", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            manifest.find_changes(Slow(tmp_path), expected)


def test_ranks_wait_for_slow_disks_longer_than_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every tensor that is written says to the watchdog that the job gets on."""
    limits, groups, steps = [], [], []

    def make_group(timeout: timedelta) -> Any:
        limits.append(timeout)
        return torch.distributed.group.WORLD

    monkeypatch.setattr(background, "background_group", make_group)
    monkeypatch.setattr(sharded_writing.activity, "progress", lambda: steps.append(1))
    tensors = [Part(f"tensor {n}", (5,), (0,), torch.ones(5)) for n in range(7)]
    with single_process():
        writer = background.BackgroundWriter()
        for in_background in (False, True):
            writer.run(lambda group, _: groups.append(group), 0.0, lambda _: None, in_background=in_background)
            writer.finish()
        sharded_writing.write_tensors(tensors, tmp_path)
        assert groups == [torch.distributed.group.WORLD] * 2
    assert len(limits) == 1 and limits[0] >= timedelta(hours=2)
    assert len(steps) == len(tensors)


def test_checkpoint_names_are_lightnings() -> None:
    template = "megatron_gpt--{val_loss:.3f}-{step}-{consumed_samples}-{epoch}"
    values = {"val_loss": 0.12345, "step": 7, "consumed_samples": 64.0}
    expected = "megatron_gpt--val_loss=0.123-step=7-consumed_samples=64-epoch=none"
    assert checkpoint_name(template, values) == expected
    assert checkpoint_name("a-{val/loss}", {"val/loss": 0.5}) == "a-val_loss=0.5"
    assert checkpoint_name("{validation_loss:.1f}", {"val_loss": 2.0}) == "validation_loss=2.0"
    assert checkpoint_name("a--{None:.3f}-{step}-{None}", {"step": 7}) == "a--step=7-"  # of monitor=null
    with pytest.raises(ValueError, match="step"):
        checkpoint_name("{step:q}", {"step": 1})


def test_settings_are_read_from_exp_manager() -> None:
    config = OmegaConf.create(
        """
        name: megatron_gpt_ppo_actor
        resume_if_exists: true
        resume_ignore_no_checkpoint: false
        resume_from_checkpoint: null
        checkpoint_callback_params:
          monitor: val_rewards
          save_top_k: 1
          mode: max
          filename: 'megatron_gpt--{${.monitor}:.3f}-{step}'
          model_parallel_size: 4
        """
    )
    settings = CheckpointSettings.from_config(ExpManager.among(OmegaConf.to_container(config, resolve=True)))
    assert settings.filename == "megatron_gpt--{val_rewards:.3f}-{step}"
    assert (settings.monitor, settings.mode, settings.nemo_name) == ("val_rewards", "max", "megatron_gpt_ppo_actor")
    assert not settings.resume_ignore_no_checkpoint
    with pytest.raises(ValueError, match="save_best_model=True with save_top_k=0"):
        CheckpointSettings.from_config(
            ExpManager(checkpoint_callback_params={"save_best_model": True, "save_top_k": 0})
        )
