"""People's own files, as they are: every form gives the rows that JSON lines give, or says where it is wrong."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner

from nemo_style_aligner.engine.text.chats import form_of, read_conversation
from nemo_style_aligner.engine.text.encoding import batches
from nemo_style_aligner.engine.text.jsonl import DataError, Record, read_jsonl, write_jsonl
from nemo_style_aligner.tools.cli.main import nsa
from nemo_style_aligner.trainer.data.datasets import load_data_prefix

ROWS = [
    {"question": "1+1?", "answer": "2"},
    {"question": 'a "quoted", long\nquestion äß ☃', "answer": "1,5"},
    {"question": "", "answer": " "},
]


def as_array(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("\ufeff" + json.dumps(rows, indent=2))


def as_csv(path: Path, rows: Sequence[Mapping[str, Any]], delimiter: str = ",") -> None:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    quoted = [delimiter.join('"' + cell.replace('"', '""') + '"' for cell in line) for line in lines]
    path.write_text("\r\n".join(quoted) + "\r\n", newline="")


def as_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def as_dataset(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """What ``datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)`` writes, as far as it is read."""
    path.mkdir(parents=True)
    names = []
    for shard, part in enumerate((rows[:1], rows[1:])):
        names.append(f"data-{shard:05}-of-00002.arrow")
        table = pyarrow.Table.from_pylist(list(part))
        with pyarrow.OSFile(str(path / names[-1]), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")


def packed(path: Path) -> None:
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    as_array(tmp_path / "a.json", ROWS)
    as_csv(tmp_path / "a.csv", ROWS)
    as_csv(tmp_path / "a.tsv", ROWS, "\t")
    as_parquet(tmp_path / "a.parquet", ROWS)
    as_dataset(tmp_path / "saved" / "train", ROWS)
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv"):
        packed(tmp_path / name)
    paths = [path for path in sorted(tmp_path.iterdir()) if path.is_file()] + [tmp_path / "saved" / "train"]
    assert len(paths) == 10
    for path in paths:
        assert [dict(record.fields) for record in read_jsonl(path)] == ROWS, path
        assert load_data_prefix({"train": str(path)}).train.paths == (path,)
    assert [record.line for record in read_jsonl(tmp_path / "a.json")] == [2, 6, 10]
    assert [record.line for record in read_jsonl(tmp_path / "a.csv.gz")] == [2, 3, 5]  # the second has two lines
    assert [record.line for record in read_jsonl(tmp_path / "a.parquet")] == [1, 2, 3]
    (first, second) = batches([tmp_path / "saved" / "train"], 2)
    assert (first.first, second.start, len(second.lines)) == (first.lines[0], 2, 1)


def test_lists_and_numbers_stay_what_they_are(tmp_path: Path) -> None:
    """Parquet has types; of a table without, cells of such columns are JSON. All others are text, ``007`` as well."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    as_parquet(tmp_path / "a.parquet", [{"messages": messages, "label": 0.5}, {"messages": messages, "label": None}])
    (first, second) = read_jsonl(tmp_path / "a.parquet")
    assert first.fields == {"messages": messages, "label": 0.5} and second.fields["label"] is None
    as_csv(tmp_path / "a.csv", [{"messages": json.dumps(messages), "label": "true", "answer": "007", "answers": "[1]"}])
    (row,) = read_jsonl(tmp_path / "a.csv")
    assert row.fields == {"messages": messages, "label": True, "answer": "007", "answers": "[1]"}


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("a.json", '[\n{"a": 1},\n{"a": ]', r"a\.json:3: not valid JSON: Expecting value at column 7"),
        ("a.json", '[{"a": 1}\n{"a": 2}]', r"a\.json:2: not valid JSON: Expecting ',' at column 1"),
        ("a.json", '[{"a": 1},]', r"a\.json:1: not valid JSON: .* at column 1[01]"),
        ("a.json", '[{"a": 1}', r"a\.json:1: not valid JSON: Expecting ',' at column 10"),
        ("a.json", '[{"a": 1}]\n{"a": 2}', r"a\.json:2: not valid JSON: Extra data after the array at column 1"),
        ("a.json", '[{"a": 1},\n\n 5]', r"a\.json:3: should be an object .* not 5"),
        ("a.json", '[\n{"a": 1, "a": 2}]', r"a\.json:2: .* has the key 'a' twice"),
        ("a.json", "[]", r"a\.json: the file holds no records"),
        ("a.json", "[" * 9000 + "]" * 9000, r"a\.json:1: nested too deeply"),
        ("a.json", b'[{"a": "x"},\n{"a": "\xe9"}]', r"a\.json:2: not UTF-8"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"a\.csv:3: 3 cells, where the header has 2"),
        ("a.csv", "a,b\n1\n", r"a\.csv:2: 1 cells, where the header has 2"),
        ("a.csv", "a,a\n1,2\n", r"a\.csv:1: the header names the columns; 'a' is none, or there twice"),
        ("a.csv", 'a,b\n1,"2" 3\n', r"a\.csv:2: not valid CSV"),
        ("a.csv", 'a,b\n1,2\n3,"4\n', r"a\.csv:3: not valid CSV"),
        ("a.csv", b"a,b\n1,\xe9\n", r"a\.csv:\d: not UTF-8"),
        ("a.csv", "a,b\n", r"a\.csv: the file holds no records"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n", mtime=0)[:-9], r"a\.csv\.gz: damaged"),
        ("a.parquet", "PAR1 it is not", r"a\.parquet: damaged after row 0"),
        ("a.jsonl", '{"a": 1}\n[{"a": 1}]', r"a\.jsonl:2: should be an object"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, name: str, content: str | bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=complaint):
        read_jsonl(tmp_path / name)


def test_what_no_text_can_hold_is_refused(tmp_path: Path) -> None:
    as_parquet(tmp_path / "a.parquet", [{"text": "a", "image": None}, {"text": "b", "image": b"png"}])
    with pytest.raises(DataError, match=r"a\.parquet:2: 'image' holds bytes, which is no text"):
        read_jsonl(tmp_path / "a.parquet")


def test_folders_that_are_no_file_are_told_apart(tmp_path: Path) -> None:
    as_dataset(tmp_path / "all" / "train", ROWS)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=rf"holds splits: name one of {tmp_path}/all/train"):
        load_data_prefix({"train": str(tmp_path / "all")})
    (tmp_path / "hub").mkdir()
    as_parquet(tmp_path / "hub" / "train-0.parquet", ROWS)
    with pytest.raises(DataError, match=r"this is a folder: name its files, such as .*train-0\.parquet"):
        load_data_prefix({"train": str(tmp_path / "hub")})
    state = tmp_path / "all" / "train" / "state.json"
    for change, complaint in (
        ({"_indices_files": [{"filename": "i"}]}, "save what flatten_indices"),
        ({"_data_files": [{"filename": "../../secret.arrow"}]}, "names '../../secret.arrow', which is no file of this"),
        ({"_data_files": 3}, "is not what Dataset.save_to_disk writes"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "damaged after row 0"),
    ):
        state.write_text(json.dumps({"_data_files": [], **change}))
        with pytest.raises(DataError, match=complaint):
            read_jsonl(tmp_path / "all" / "train")


def record(**fields: Any) -> Record:
    return Record(Path("a.jsonl"), 1, fields)


def test_forms_of_others_are_read_and_named() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    asked = record(messages=[{"role": "user", "content": parts}])
    assert [turn.content for turn in read_conversation(asked).turns] == ["1+1?"] and form_of(
        asked
    ) == "OpenAI's messages"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(DataError, match="parts of the types text, image_url: only parts of the type text"):
        read_conversation(record(messages=[{"role": "user", "content": [parts[0], image]}]))
    question = record(question="1+1?", answer="#### 2")
    said = [(turn.kind, turn.content) for turn in read_conversation(question).turns]
    assert said == [("user", "1+1?"), ("assistant", "#### 2")] and form_of(question) == "question and answer"
    assert len(read_conversation(record(question="1+1?", answer=["2", "two"]), as_prompt=True).turns) == 1
    with pytest.raises(DataError, match="'choices' would not be asked: put it into 'question'"):
        read_conversation(record(question="1+1?", choices=["1", "2"], answer="2"))
    for fields, form in (
        ({"conversations": [{"from": "human", "value": "a"}]}, "ShareGPT's conversations"),
        ({"conversations": [{"from": "User", "value": "a"}], "mask": "User"}, "NeMo's conversations"),
        ({"instruction": "a", "output": "b"}, "Alpaca's instruction, input and output"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "prompt, chosen and rejected, as TRL has them"),
        ({"input": "a", "output": "b", "question": "c"}, "pairs of input and output"),
        ({"b": 1, "a": 2}, "keys a, b"),
    ):
        assert form_of(record(**fields)) == form


def converted(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(nsa, ["data", "convert", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output or str(result.exception)


def test_rows_are_converted_and_keys_renamed(tmp_path: Path) -> None:
    as_csv(tmp_path / "a.csv", ROWS)
    told = converted(tmp_path / "a.csv", tmp_path / "b.jsonl", "--map", "question=text", "--map", "answer=solution")
    assert re.search(r"b\.jsonl: 3 lines\n  3: texts\n", told)
    written = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert written == [{"text": row["question"], "solution": row["answer"]} for row in ROWS]
    assert "is there already" in converted(tmp_path / "a.csv", tmp_path / "b.jsonl", status=2)
    assert "say OLD=NEW" in converted(tmp_path / "a.csv", tmp_path / "c.jsonl", "--map", "question", status=2)
    result = CliRunner().invoke(
        nsa, ["data", "convert", str(tmp_path / "a.csv"), str(tmp_path / "c.jsonl"), "--map", "x=y"]
    )
    assert re.search(r"a\.csv:2: --map x=y: the keys are 'question', 'answer'", str(result.exception))
    assert not (tmp_path / "c.jsonl").exists()
