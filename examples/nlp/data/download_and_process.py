"""Make SFT, reward model and PPO data from Anthropic's HH dataset (huggingface.co/datasets/Anthropic/hh-rlhf).

    python download_and_process.py --output data                    # from the Hugging Face hub
    python download_and_process.py --output data --source FOLDER    # from FOLDER/**/{train,test}.jsonl[.gz]

writes into --output, for each of the splits that is there:

    SPLIT_sft.jsonl            the chosen answers, as demonstrations
    SPLIT_comparisons.jsonl    {"text"} twice: a dialogue with the chosen last answer, then with the rejected one
    SPLIT_prompts.jsonl        {"text"}: a dialogue up to that answer

Texts are "User: ...\\n\\nAssistant: ...", or what the chat template of --tokenizer makes of a dialogue. Pairs whose
turns are out of order, whose prompts differ, or whose answers are equal are left out and counted.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dialogues import DialogueStyle

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.engine.text.jsonl import DataError, read_jsonl, write_jsonl
from nemo_style_aligner.engine.text.tokenizer import TokenizerError, tokenizer_argument

REPOSITORY = "Anthropic/hh-rlhf"
SUBSETS = ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled")
SPLITS = ("train", "test")
TURN = re.compile(r"\n\n(Human|Assistant): ?")


def local_files(source: Path, split: str) -> list[Path]:
    """The files of a split in ``source`` and the folders below it; of one that is there twice, the unzipped one."""
    files = {
        file.parent: file for name in (f"{split}.jsonl.gz", f"{split}.jsonl") for file in source.glob(f"**/{name}")
    }
    # Red-team attempts are another kind of data, kept beside the preferences in the same repository.
    return sorted(file for folder, file in files.items() if folder.name != "red-team-attempts")


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


def convert(dialogue: str) -> tuple[list[str], str] | None:
    """The turns of a dialogue and its last answer; None unless Human and Assistant take turns, none of them empty."""
    before, *parts = TURN.split(dialogue)
    speakers, texts = parts[::2], [text.strip() for text in parts[1::2]]
    in_turn = speakers == ["Human", "Assistant"] * (len(speakers) // 2)
    if before.strip() or not parts or not in_turn or not all(texts):
        return None
    return texts[:-1], texts[-1]


def process(files: Sequence[Path], style: DialogueStyle) -> tuple[dict[str, list[dict[str, Any]]], Counter[str]]:
    """The lines to write, by kind, and the number of pairs left out, by reason."""
    comparisons: list[dict[str, Any]] = []
    prompts: dict[str, None] = {}  # an ordered set: several comparisons can share a prompt
    demonstrations: dict[tuple[str, str], dict[str, Any]] = {}  # and several pairs a chosen answer
    left_out: Counter[str] = Counter()
    for record in (record for file in files for record in read_jsonl(file)):
        chosen, rejected = convert(record.text("chosen")), convert(record.text("rejected"))
        if chosen is None or rejected is None:
            left_out["turns out of order or empty"] += 1
        elif chosen[0] != rejected[0]:
            left_out["different prompts"] += 1
        elif chosen[1] == rejected[1]:
            left_out["equal answers"] += 1
        else:
            comparisons += [{"text": style.text(*chosen)}, {"text": style.text(*rejected)}]
            prompt = style.prompt(chosen[0])
            prompts[prompt] = None
            demonstrations[prompt, chosen[1]] = style.demonstration(*chosen)
    lines = {
        "sft": list(demonstrations.values()),
        "comparisons": comparisons,
        "prompts": [{"text": prompt} for prompt in prompts],
    }
    return lines, left_out


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--source", type=Path, help="folder with train.jsonl.gz and test.jsonl.gz, or folders of them")
    parser.add_argument(
        "--output", type=output_folder_argument, default=Path("."), help="folder to write into (default: here)"
    )
    parser.add_argument(
        "--tokenizer", type=tokenizer_argument, metavar="DIR", help="use this tokenizer's chat template"
    )
    parser.add_argument("--cache", type=Path, help="folder for downloads (default: the hub's cache)")
    options = parser.parse_args(arguments)
    source = options.source or download(options.cache)
    style = DialogueStyle(options.tokenizer, separator="\n\n")
    files = {split: found for split in SPLITS if (found := local_files(source, split))}
    if not files:
        raise DataError(f"{source}: no train.jsonl.gz, test.jsonl.gz, train.jsonl or test.jsonl in it or below it")
    # All is read before anything is written.
    for split, (lines, left_out) in {split: process(found, style) for split, found in files.items()}.items():
        for kind, rows in lines.items():
            print(f"{split}_{kind}.jsonl: {write_jsonl(options.output / f'{split}_{kind}.jsonl', rows)} lines")
        print(f"{split}: pairs left out: {dict(left_out) or 'none'}")
    for split in set(SPLITS) - files.keys():
        print(f"{source} has no {split}.jsonl.gz and no {split}.jsonl: no {split} files were written")


if __name__ == "__main__":
    try:
        main()
    except (DataError, TokenizerError) as error:
        raise SystemExit(f"error: {error}") from error
