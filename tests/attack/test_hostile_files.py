"""Files that somebody else made to harm who reads them: each ends in one clean error, soon and in bounded memory.

Or, where the file is harmless once it is read as plain data, in what it says as text.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import itertools
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from job_processes import Job, environment, script
from omegaconf import OmegaConf
from small_models import SHAPE

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.jsonl import DataError, read_jsonl
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.engine.weights.huggingface import HuggingFaceCheckpoint, write_checkpoint
from nemo_style_aligner.engine.weights.huggingface_config import read_architecture
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.guard.file_source import open_source
from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, DamagedCheckpointError, Manifest
from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
    archive_identity,
    load_nemo_config,
    load_nemo_tokenizer,
    save_nemo,
)
from nemo_style_aligner.trainer.config.job_config import plain_config
from nemo_style_aligner.trainer.config.schema import Critic
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.restore import open_base_model

SECRET = "only-the-environment-knows-this"
VARIABLE = "SECRET_OF_A_HOSTILE_FILES_VICTIM"
READS_SECRET = f"${{oc.env:{VARIABLE}}}"
SOON = 20.0  # seconds of computing; most take less than one
PATIENCE = 240.0  # seconds, for processes on a machine that has much else to do
MEMORY = 12 << 20  # KiB of addresses for a script, of which torch takes most


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < SOON


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A small model as an archive, unpacked and without checksums, and as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_character_tokenizer("abcdefghij 0123456789", folder / "tokenizer")
    architecture = ModelArchitecture(**SHAPE | {"vocab_size": tokenizer.vocab_size})
    with single_process():
        model = build_model(architecture, {}, torch.float32, trainable=False)
        config = architecture.to_nemo_config() | {"encoder_seq_length": 64}
        save_nemo(folder / "model.tar", model, config, tokenizer)
        shutil.unpack_archive(folder / "model.tar", folder / "model.nemo", filter="data")
        write_checkpoint(folder / "hf", architecture, export_weights(model), tokenizer_dir=folder / "tokenizer")
        (folder / "model.nemo" / "checksums.json").unlink()  # as in those that NeMo writes
        yield folder / "model.nemo", folder / "hf"


def copy_of(source: Path, target: Path, **changed: str | bytes | None) -> Path:
    """A directory with other contents of some files; the names have ``__`` for the dot. None: without it."""
    shutil.copytree(source, target)
    for name, content in changed.items():
        file = target / name.replace("__", ".")
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    return target


def with_config(archive: Path, target: Path, **changed: Any) -> Path:
    config = yaml.safe_load((archive / "model_config.yaml").read_text()) | changed
    return copy_of(archive, target, model_config__yaml=yaml.safe_dump(config))


# ---- configs: interpolations --------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 5))
def test_text_is_text_in_a_config_however_it_is_read(length: int) -> None:
    for letters in itertools.product(r"\${}a", repeat=length):
        text = "".join(letters)
        config = plain_config({"a": text, "b": {"c": [text]}})
        assert config.a == config.b.c[0] == text
        assert OmegaConf.to_container(config, resolve=True) == {"a": text, "b": {"c": [text]}}


def test_an_archives_interpolations_are_text_in_jobs(
    model: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    hostile = {"note": READS_SECRET, "deep": [{"x": f"\\{READS_SECRET}"}], "regression": {"y": "${.z}", "z": "w"}}
    archive = with_config(model[0], tmp_path / "model.nemo", **hostile)
    given = OmegaConf.create({"model": {"mine": "${trainer.precision}"}, "trainer": {"precision": 32}})
    job = Critic.read(given)
    for _ in range(2):  # the second on top of what the first has merged
        base, job = open_base_model(str(archive), job)
        assert job.get("model.note") == base.config["note"] == READS_SECRET and base.config["mine"] == 32
        read = job.model_given()
        assert isinstance(read, dict) and {key: read[key] for key in hostile} == hostile


def load_architecture(archive: Path) -> ModelArchitecture:
    config = load_nemo_config(archive)
    RewardHeadConfig.from_model_config(config)
    return ModelArchitecture.from_nemo_config(config)


# ---- configs: YAML and JSON ---------------------------------------------------------------------


def laughs(item: str, levels: int = 30) -> str:
    lines = [f"a{i}: &a{i} {item.format(i - 1)}" for i in range(1, levels)]
    return "a0: &a0 {x: 1}\n" + "\n".join(lines)


YAML = {
    "aliases in lists": laughs("[*a{0}, *a{0}, *a{0}]"),
    "merged mappings": laughs("{{<<: [*a{0}, *a{0}, *a{0}]}}"),
    "an alias of itself": "a: &a [*a]",
    "deep lists": "a: " + "[" * 100_000,
    "deep mappings": "{a: " * 5000,
    "deep lists in lines": "- " * 5000,
    "base 60": "a: 1" + ":59" * 80_000,
    "hexadecimal": "a: 0x" + "f" * 200_000,
    "large": "a: " + "b" * 10_000_000,
    "many": "[" + "a," * 100_000 + "]",
    "objects": "a: !!python/object/apply:os.system [touch HOSTILE]",
    "bytes": "a: !!binary aGVsbG8=",
    "no key": "? [a]\n: b",
    "null key": "~: b",
    "no mapping": "[a, b]",
    "bad number": "a: !!int b",
    "nothing": "\0",
}


@pytest.mark.parametrize("name", YAML)
def test_hostile_yaml_is_refused(model: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    archive = copy_of(model[0], tmp_path / "model.nemo", model_config__yaml=YAML[name])
    with pytest.raises(ValueError, match=r"model\.nemo: model_config\.yaml (has|is)") as refused:
        load_nemo_config(archive)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)


def test_aliases_as_safe_dump_writes_them_are_read(model: tuple[Path, Path], tmp_path: Path) -> None:
    shared = {"a": [1, 2]}
    archive = with_config(model[0], tmp_path / "model.nemo", one=shared, two=[shared, shared], day="2024-01-01")
    assert "&id001" in (archive / "model_config.yaml").read_text()
    config = load_nemo_config(archive)
    assert config["one"] == shared and config["two"] == [shared, shared] and config["day"] == "2024-01-01"


@pytest.mark.parametrize(
    "changed",
    [
        {"num_layers": 10**8},
        {"num_layers": 10**90},
        {"num_layers": float("inf")},
        {"num_layers": 2.5},
        {"num_layers": [2]},
        {"num_layers": True},
        {"num_layers": READS_SECRET},
        {"num_layers": "${.num_attention_heads}"},
        {"max_position_embeddings": 10**12},
        {"kv_channels": 10**9},
        {"hidden_size": {"a": 1}},
        {"bias": "no"},
        {"activation": ["gelu"]},
        {"rotary_percentage": 1e308},
        {"layernorm_epsilon": []},
        {"reward_model_type": "regression", "regression": {"num_attributes": 10**10}},
        {"reward_model_type": "regression", "regression": 5},
        {"reward_model_type": "regression", "regression": {"attribute_weights": [[]]}},
        {"reward_standardization": {"enable": True, "mean": [], "std": 1}},
    ],
    ids=str,
)
def test_configs_of_absurd_models_are_refused(
    model: tuple[Path, Path], tmp_path: Path, changed: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=str(list(changed)[-1])):
        load_architecture(with_config(model[0], tmp_path / "model.nemo", **changed))


def test_a_tokenizer_section_that_is_none_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    archive = with_config(model[0], tmp_path / "model.nemo", tokenizer=["tokenizer"])
    for file in (archive / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(TokenizerError, match="is no section"):
        load_nemo_tokenizer(archive)


DEEP = "[" * 100_000 + "]" * 100_000


def test_deep_json_is_refused_wherever_it_is_read(model: tuple[Path, Path], tmp_path: Path) -> None:
    nested = "[" * 300 + "]" * 300  # which Python itself reads, but not what handles it then
    for number, text in enumerate((DEEP, nested)):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(DamagedCheckpointError, match="within each other"):
            Manifest.read(tmp_path)
        for name in ("tokenizer_config__json", "generation_config__json"):
            folder = copy_of(model[0] / "tokenizer", tmp_path / f"{name}{number}", **{name: text})
            with pytest.raises(TokenizerError, match="within each other"):
                _ = load_tokenizer(folder).stop_ids
        for name, read in (
            ("config__json", read_architecture),
            ("model__safetensors__index__json", HuggingFaceCheckpoint),
        ):
            folder = copy_of(model[1], tmp_path / f"{name}{number}", **{name: text})
            with pytest.raises(ValueError, match="within each other"):
                read(folder)
        (tmp_path / "data.jsonl").write_text(f'{{"text": "a"}}\n{{"text": {text}}}\n')
        with pytest.raises(DataError, match=r"data\.jsonl:2: .*within each other"):
            read_jsonl(tmp_path / "data.jsonl")


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "data.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(DataError, match=r"data\.jsonl:1: the line has more than"):
        read_jsonl(tmp_path / "data.jsonl")


# ---- archives -----------------------------------------------------------------------------------


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def header(kind: bytes, size: bytes) -> bytes:
    """A tar's header of a file "a" with a size that nothing follows."""
    block = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


CONFIG = member("model_config.yaml", b"num_layers: 2\n")
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
TARS: dict[str, tuple[Callable[[], bytes], str]] = {
    "sparse": (lambda: packed(CONFIG, member("x", b"1\n0\n0\n".ljust(512, b"\0"), pax_headers=SPARSE)), "sparse"),
    "sparse, of old": (lambda: header(tarfile.GNUTYPE_SPARSE, b"00000000000\0") + bytes(1024), "sparse"),
    "a map of holes": (
        lambda: packed(CONFIG, member("x", b"90000000\n" + b"0\n" * (1 << 20), pax_headers=SPARSE)),
        "sparse",
    ),
    "two of a name": (lambda: packed(CONFIG, member("./model_config.yaml", b"num_layers: 3\n")), "two files"),
    "many": (lambda: packed(*(member(f"f{i}") for i in range(17_000))), "headers have more"),
    "a size below 0": (lambda: header(tarfile.REGTYPE, b"\xff" * 11 + b"\x00"), "the end is missing"),
    "a size without limit": (lambda: header(tarfile.REGTYPE, b"\x80" + b"\x7f" * 11) + bytes(1024), "at most"),
    "a name without limit": (lambda: header(tarfile.GNUTYPE_LONGNAME, b"77777777777\0") + bytes(1024), "headers have"),
    "compressed zeros": (
        lambda: gzip.compress(packed(CONFIG, member("zeros", bytes(200 << 20))), 1),
        "at most",
    ),
    "compressed names": (
        lambda: gzip.compress(header(tarfile.XHDTYPE, b"%011o\0" % (64 << 20)) + bytes(64 << 20), 1),
        "headers have",
    ),
    "cut when compressed": (lambda: gzip.compress(packed(CONFIG))[:80], "cut short"),
    "no tar": (lambda: b"\x1f\x8b" + bytes(100), "is not a readable tar file"),
}


@pytest.mark.parametrize("name", TARS)
def test_hostile_tars_are_refused(tmp_path: Path, name: str) -> None:
    make, message = TARS[name]
    (tmp_path / "model.nemo").write_bytes(make())
    for read in (load_nemo_config, archive_identity):
        with pytest.raises(ValueError, match=rf"model\.nemo.*{message}") as refused:
            read(tmp_path / "model.nemo")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_only_regular_files_inside_are_reached(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    outside = tmp_path / "secret"
    outside.write_text(SECRET)
    unreachable = [
        member("link", type=tarfile.SYMTYPE, linkname=str(outside)),
        member("hard", type=tarfile.LNKTYPE, linkname=str(outside)),
        member("device", type=tarfile.CHRTYPE, devmajor=1, devminor=5),
        member("pipe", type=tarfile.FIFOTYPE),
        member("../up", b"x"),
        member("/absolute", b"x"),
    ]
    (tmp_path / "model.nemo").write_bytes(compress(packed(CONFIG, *unreachable)))
    with open_source(tmp_path / "model.nemo") as source:
        assert source.names() == ["model_config.yaml"]
        for info, _ in unreachable:
            with pytest.raises((FileNotFoundError, ValueError), match=r"has no file|leads out"):
                source.open(info.name)
    assert load_nemo_config(tmp_path / "model.nemo")["num_layers"] == 2


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.nemo")
    with pytest.raises(ValueError, match="neither a file nor a directory"):
        load_nemo_config(tmp_path / "model.nemo")


def test_a_large_file_in_place_of_a_small_one_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    archive = copy_of(model[0], tmp_path / "model.nemo")
    (archive / "tokenizer" / "large.bin").touch()
    for name in ("model_config.yaml", "tokenizer/large.bin"):
        os.truncate(archive / name, 1 << 40)  # takes no room on the disk
    with pytest.raises(ValueError, match="more than the"):
        load_nemo_config(archive)
    with pytest.raises(ValueError, match="more than the"):
        load_nemo_tokenizer(archive)


# ---- Hugging Face directories -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/etc/passwd", "../hf/model.safetensors", "a/../../x", "", 5, ["a"], None])
def test_an_index_names_files_beside_it_only(model: tuple[Path, Path], tmp_path: Path, name: Any) -> None:
    index = json.dumps({"weight_map": {"model.embed_tokens.weight": name}})
    folder = copy_of(model[1], tmp_path / "hf", model__safetensors__index__json=index)
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        HuggingFaceCheckpoint(folder)


def safetensors(content: str, size: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content) if size is None else size) + content.encode() + data


def tensor(shape: list[int], end: int, dtype: str = "F32") -> str:
    return json.dumps({"lm_head.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}})


@pytest.mark.parametrize(
    "content",
    [
        safetensors("{}", 1 << 62),
        safetensors("{}", 90 << 20),
        safetensors("[" * 100_000),
        safetensors(tensor([2], 1 << 62), data=bytes(8)),
        safetensors(tensor([1 << 62, 1 << 62], 8), data=bytes(8)),
        safetensors(tensor([3], 8), data=bytes(8)),
        safetensors(tensor([2], 8, "OBJECT"), data=bytes(8)),
        safetensors(tensor([2], -8), data=bytes(8)),
        b"\x80\x04N.",
        b"",
    ],
)
def test_hostile_headers_of_safetensors_are_refused(model: tuple[Path, Path], tmp_path: Path, content: bytes) -> None:
    folder = copy_of(model[1], tmp_path / "hf", model__safetensors=content)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        HuggingFaceCheckpoint(folder).shapes()


def test_a_tensor_in_two_files_is_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    """Which of them the index names does not matter."""
    weights = (model[1] / "model.safetensors").read_bytes()
    index = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    files = {"one__safetensors": weights, "two__safetensors": weights, "model__safetensors__index__json": index}
    with pytest.raises(ValueError, match="has two tensors"):
        HuggingFaceCheckpoint(copy_of(model[1], tmp_path / "hf", model__safetensors=None, **files))


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": 10**8},
        {"num_hidden_layers": 5000},
        {"num_labels": 10**9},
        {"num_attention_heads": -4},
        {"num_hidden_layers": "${oc.env:HOME}"},
        {"max_position_embeddings": 10**15},
        {"hidden_size": [1]},
        {"rope_parameters": 5},
        {"torch_dtype": "no dtype"},
        {"quantization_config": [1]},
        {"id2label": "x"},
    ],
    ids=str,
)
def test_hugging_face_configs_of_absurd_models_are_refused(
    model: tuple[Path, Path], tmp_path: Path, changed: dict[str, Any]
) -> None:
    config = json.loads((model[1] / "config.json").read_text()) | changed
    folder = copy_of(model[1], tmp_path / "hf", config__json=json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: "):
        read_architecture(folder)


def test_code_in_a_directory_is_not_executed(model: tuple[Path, Path], tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'EXECUTED')!r}, 'w')\nclass Own: pass\n"
    auto_map = {"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}}
    changed: dict[str, str | bytes | None] = {
        name.replace(".", "__"): json.dumps(json.loads((model[1] / name).read_text()) | auto_map)
        for name in ("config.json", "tokenizer_config.json")
    }
    folder = copy_of(model[1], tmp_path / "hf", own__py=code, **changed)
    assert read_architecture(folder).num_layers == 2 and load_tokenizer(folder).eos_id >= 0
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError):
        load_tokenizer(folder)
    assert not (tmp_path / "EXECUTED").exists()


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("tokenizer_config.json", "model_max_length", [1]),
        ("tokenizer_config.json", "added_tokens_decoder", {"0": 5}),
        ("tokenizer_config.json", "padding_side", 5),
        ("generation_config.json", "eos_token_id", float("inf")),
        ("generation_config.json", "eos_token_id", [[]]),
        ("tokenizer.json", "model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}),
        ("tokenizer.json", "added_tokens", [{"id": 1 << 70}]),
    ],
)
def test_tokenizers_with_nonsense_in_them_are_refused(
    model: tuple[Path, Path], tmp_path: Path, name: str, key: str, value: Any
) -> None:
    file = model[1] / name
    content = (json.loads(file.read_text()) if file.exists() else {}) | {key: value}
    folder = copy_of(model[1], tmp_path / "hf", **{name.replace(".", "__"): json.dumps(content)})
    with pytest.raises(TokenizerError):
        _ = load_tokenizer(folder).stop_ids


def steps(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps), "decoders": list(steps)}


def replaced(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLED, PUT_BEFORE = replaced("aa", String="a"), {"type": "Prepend", "prepend": "a"}
LENGTHENING = {
    "doubling": steps(*[DOUBLED] * 22),
    "nested": steps(*[steps(*[DOUBLED] * 11)] * 2),
    "long": replaced("a" * 10**6, String="a"),
    "by an expression": steps(*[replaced("aa", Regex="a")] * 22),
    "of a property": steps(*[replaced("aa", Regex=r"\p{L}")] * 22),
    "between letters": steps(*[replaced("a", Regex="(?=a)")] * 22),
    "before": steps(*[PUT_BEFORE, DOUBLED] * 22),
    "table": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"a" * 10**6).decode()},
}


@pytest.mark.parametrize("kind", LENGTHENING)
def test_tokenizers_that_lengthen_texts_without_end_are_refused(
    model: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    content = json.loads((model[1] / "tokenizer.json").read_text())
    for section in ("normalizer", "decoder")[: 1 if kind in ("before", "table") else 2]:
        hostile = json.dumps(content | {section: LENGTHENING[kind]})
        folder = copy_of(model[1], tmp_path / section, tokenizer__json=hostile)
        with pytest.raises(TokenizerError, match=f"its {section} may make a text .* times as long"):
            load_tokenizer(folder)


@pytest.mark.parametrize(
    "normalizer", [steps(PUT_BEFORE, replaced("_", String=" ")), steps(*[replaced(" ", Regex=r"\p{Z}{2,}")] * 40)]
)
def test_tokenizers_that_put_a_character_for_others_are_read(
    model: tuple[Path, Path], tmp_path: Path, normalizer: dict[str, Any]
) -> None:
    content = json.loads((model[1] / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    assert load_tokenizer(copy_of(model[1], tmp_path / "hf", tokenizer__json=json.dumps(content))).text_to_ids("a b")


def test_an_expression_that_gives_up_is_an_error_of_one_line(model: tuple[Path, Path], tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    content = json.loads((model[1] / "tokenizer.json").read_text()) | {"pre_tokenizer": split}
    tokenizer = load_tokenizer(copy_of(model[1], tmp_path / "hf", tokenizer__json=json.dumps(content)))
    with pytest.raises(TokenizerError, match="cannot encode or decode a text: Onig") as refused:
        tokenizer.text_to_ids("a" * 40 + "c")
    assert "\n" not in str(refused.value)


# ---- chat templates -----------------------------------------------------------------------------

HUNGRY = {
    "product": "{{ 'a' * 10 ** 9 }}",
    "list": "{{ [0] * 10 ** 9 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "padding": "{{ 'a'|center(10 ** 9) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "range": "{% for i in range(10 ** 9) %}a{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "text": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "escape": "{{ messages.__class__.__mro__ }}",
    "error": "{{ raise_exception('a' * 10 ** 7) }}",
}
KINDS = "".join(f"{{% if messages[0].content == '{kind}' %}}{source}{{% endif %}}" for kind, source in HUNGRY.items())


def with_template(model: tuple[Path, Path], target: Path, template: str) -> Tokenizer:
    return load_tokenizer(copy_of(model[1], target, chat_template__jinja=template))


def test_templates_that_want_too_much_are_refused(model: tuple[Path, Path], tmp_path: Path) -> None:
    tokenizer = with_template(model, tmp_path / "hf", KINDS + "{{ messages[0].content }}")
    for kind in HUNGRY:
        with pytest.raises(TokenizerError, match="chat template refuses") as refused:
            tokenizer.apply_chat_template([{"role": "user", "content": kind}])
        assert len(str(refused.value)) < 2000
        assert tokenizer.apply_chat_template([{"role": "user", "content": "others"}]) == "others"


def test_an_endless_template_ends(model: tuple[Path, Path], tmp_path: Path) -> None:
    loop = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
    tokenizer = with_template(model, tmp_path / "hf", loop)
    for limit in (PATIENCE, 1.0):  # the second time it is known
        start = time.monotonic()
        with pytest.raises(TokenizerError, match="more than 5 s of computing"):
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
        assert time.monotonic() - start < limit


def test_a_template_does_not_see_the_environment_and_does_not_outlive_the_job(
    model: tuple[Path, Path], tmp_path: Path
) -> None:
    copy_of(model[1], tmp_path / "hf", chat_template__jinja="{{ messages[0].content }}")
    code = (
        "import os, subprocess, sys; from nemo_style_aligner.engine.text.tokenizer import load_tokenizer\n"
        "t = load_tokenizer(sys.argv[1]); t.apply_chat_template([{'role': 'user', 'content': 'a'}])\n"
        "print(subprocess.check_output(['pgrep', '-P', str(os.getpid()), '-f', '_serve'], text=True).split()[0])\n"
        "sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working directory')")
    job = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.path.remove(''); " + code, str(tmp_path / "hf")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment() | {VARIABLE: SECRET},
    )
    assert job.stdout is not None
    child = Path("/proc", job.stdout.readline().strip())
    with contextlib.suppress(OSError):  # it may have ended already
        assert SECRET.encode() not in (child / "environ").read_bytes()
    assert job.wait(PATIENCE) == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE
    while child.exists() and b"_serve" in (child / "cmdline").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or b"_serve" not in (child / "cmdline").read_bytes()


# ---- through the scripts ------------------------------------------------------------------------


def limited(command: list[str], log: Path) -> Job:
    """A script with bounded memory, in whose environment there is a secret."""
    os.environ[VARIABLE] = SECRET
    try:
        return Job(["bash", "-c", f'ulimit -v {MEMORY}; exec "$@"', "bash", *command], log)
    finally:
        del os.environ[VARIABLE]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_scripts_given_hostile_files(model: tuple[Path, Path], tmp_path: Path) -> None:
    archive, hf = model
    chats = tmp_path / "chats.jsonl"
    message = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]}
    chats.write_text((json.dumps(message) + "\n") * 4)
    texts = tmp_path / "texts.jsonl"
    texts.write_text((json.dumps({"input": "ab", "output": "cd"}) + "\n") * 4)
    index = json.dumps({"weight_map": {"a": "/etc/passwd"}})
    copy_of(hf, tmp_path / "index", model__safetensors__index__json=index)
    copy_of(archive, tmp_path / "bomb.nemo", model_config__yaml=YAML["merged mappings"])
    endless = copy_of(archive, tmp_path / "endless.nemo")
    (endless / "tokenizer" / "chat_template.jinja").write_text("{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4)
    curious = with_config(archive, tmp_path / "curious.nemo", note=READS_SECRET, hf_model_type=READS_SECRET)

    def sft(base: Path, data: Path, log_dir: Path) -> list[str]:
        return script(
            "train_gpt_sft.py",
            f"model.restore_from_path={base}",
            f"exp_manager.explicit_log_dir={log_dir}",
            f"model.data.train_ds.file_path={data}",
            f"model.data.validation_ds.file_path={data}",
            "trainer.precision=32",
            "trainer.sft.max_steps=1",
            "model.data.train_ds.global_batch_size=2",
            "model.data.train_ds.micro_batch_size=2",
        )

    refused = {
        "convert_hf_to_nemo": (
            script("convert_hf_to_nemo.py", f"--input-dir={tmp_path / 'index'}", f"--output={tmp_path / 'out.nemo'}"),
            "/etc/passwd is not the name of a file beside it",
        ),
        "convert_nemo_to_hf": (
            script("convert_nemo_to_hf.py", f"--input={tmp_path / 'bomb.nemo'}", f"--output-dir={tmp_path / 'out'}"),
            "more than 20,000 values",
        ),
        "endless": (sft(endless, chats, tmp_path / "endless"), "more than 5 s of computing"),
    }
    jobs = {name: limited(command, tmp_path / f"{name}.log") for name, (command, _) in refused.items()}
    jobs["curious"] = limited(sft(curious, texts, tmp_path / "curious"), tmp_path / "curious.log")
    try:
        for name, (_, message) in refused.items():
            assert jobs[name].wait(PATIENCE) in (1, 2), jobs[name].describe()
            output = jobs[name].output()
            assert message in output and "Traceback" not in output, output
        jobs["curious"].check(PATIENCE)
    finally:
        for job in jobs.values():
            job.kill()
    written = [file for file in (tmp_path / "curious").rglob("*") if file.is_file()]
    assert not [file for file in [*written, *tmp_path.glob("*.log")] if SECRET.encode() in file.read_bytes()]
    logged = yaml.safe_load((tmp_path / "curious" / "hyperparameters.yaml").read_text())
    assert logged["model"]["note"] == READS_SECRET
    (next_archive,) = (tmp_path / "curious").rglob("*.nemo")
    assert load_nemo_config(next_archive)["note"] == READS_SECRET
    assert not (tmp_path / "out.nemo").exists() and not (tmp_path / "out").exists()
