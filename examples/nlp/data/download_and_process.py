"""Make reward model and PPO data from Anthropic's HH dataset (huggingface.co/datasets/Anthropic/hh-rlhf).

    python download_and_process.py                      # from the Hugging Face hub
    python download_and_process.py --source FOLDER      # from FOLDER/**/{train,test}.jsonl.gz

writes {train,test}_comparisons.jsonl, for the reward model, and {train,test}_prompts.jsonl, for PPO.

Dialogues become "User: ...\\n\\nAssistant: ...". A comparison is a pair of dialogues that differ in
their last answers only, the chosen one first; a prompt is a dialogue up to that answer. Other pairs
(turns out of order, different prompts, equal answers) are left out and counted.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import zlib
from collections import Counter
from pathlib import Path

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.data.jsonl import DataError, Record, write_jsonl

REPOSITORY = "Anthropic/hh-rlhf"
SUBSETS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
SPLITS = ("train", "test")
TURN = re.compile(r"\n\n(Human|Assistant): ?")


def local_files(source: Path, split: str) -> list[Path]:
    files = sorted(source.glob(f"**/{split}.jsonl.gz"))
    # Red-team attempts are another kind of data, kept beside the preferences in the same repository.
    files = [file for file in files if file.parent.name != "red-team-attempts"]
    if not files:
        raise DataError(f"{source}: no {split}.jsonl.gz in it or in a folder below it")
    return files


def download(folder: Path | None) -> Path:
    """Fetch the dataset's files from the hub; returns the folder that has them."""
    # Imported here, because only downloads need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [f"{subset}/{split}.jsonl.gz" for subset in SUBSETS for split in SPLITS]
    try:
        return Path(snapshot_download(REPOSITORY, repo_type="dataset", allow_patterns=patterns, cache_dir=folder))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"cannot download {REPOSITORY} from the Hugging Face hub ({type(error).__name__}). Where there is no "
            f"network, copy its files */{{train,test}}.jsonl.gz over and give their folder as --source"
        ) from error


def read_gzip(path: Path) -> list[Record]:
    """All records of a gzipped JSONL file."""
    records: list[Record] = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                fields = json.loads(line)
                if not isinstance(fields, dict):
                    raise DataError(f"{path}:{number}: should be an object with 'chosen' and 'rejected'")
                records.append(Record(path, number, fields))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{len(records) + 1}: not valid JSON: {error.msg}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: damaged after line {len(records)}: {error}") from error
    return records


def convert(dialogue: str) -> tuple[str, str] | None:
    """Convert a dialogue to (prompt, answer); None unless Human and Assistant take turns and each says something.

    The prompt ends with "Assistant:", the answer begins with a space.
    """
    before, *parts = TURN.split(dialogue)
    speakers, texts = parts[::2], [text.strip() for text in parts[1::2]]
    in_turn = speakers == ["Human", "Assistant"] * (len(speakers) // 2)
    if before.strip() or not parts or not in_turn or not all(texts):
        return None
    names = {"Human": "User", "Assistant": "Assistant"}
    turns = [f"{names[speaker]}: {text}" for speaker, text in zip(speakers, texts, strict=True)]
    return "\n\n".join([*turns[:-1], "Assistant:"]), f" {texts[-1]}"


def process(files: list[Path]) -> tuple[list[dict], list[dict], Counter[str]]:
    """Convert files to (comparison lines, prompt lines, number of pairs left out by reason)."""
    comparisons: list[dict] = []
    prompts: dict[str, None] = {}  # an ordered set: several comparisons can share a prompt
    left_out: Counter[str] = Counter()
    for file in files:
        for record in read_gzip(file):
            chosen, rejected = convert(record.text("chosen")), convert(record.text("rejected"))
            if chosen is None or rejected is None:
                left_out["turns out of order or empty"] += 1
            elif chosen[0] != rejected[0]:
                left_out["different prompts"] += 1
            elif chosen[1] == rejected[1]:
                left_out["equal answers"] += 1
            else:
                comparisons += [{"text": chosen[0] + chosen[1]}, {"text": rejected[0] + rejected[1]}]
                prompts[chosen[0]] = None
    return comparisons, [{"text": prompt} for prompt in prompts], left_out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--source", type=Path, help="folder with */train.jsonl.gz and */test.jsonl.gz")
    parser.add_argument(
        "--output", type=output_folder_argument, default=Path("."), help="folder to write into (default: here)"
    )
    parser.add_argument("--cache", type=Path, help="folder for downloads (default: the hub's cache)")
    options = parser.parse_args(arguments)
    source = options.source or download(options.cache)
    for split in SPLITS:
        comparisons, prompts, left_out = process(local_files(source, split))
        print(f"{split}: {len(comparisons) // 2} comparisons, {len(prompts)} prompts; left out: {dict(left_out)}")
        write_jsonl(options.output / f"{split}_comparisons.jsonl", comparisons)
        write_jsonl(options.output / f"{split}_prompts.jsonl", prompts)


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
