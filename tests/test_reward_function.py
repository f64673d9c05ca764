"""A Python function as the reward model: the script as users start it, asked by the project's client and by others."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from job_processes import SCRIPTS, Job, script, wait_until_ready
from served_critic import infer_body, outputs, reward_client, tensor

from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.guard.http_client import ClientLimits, RequestRefusedError
from nemo_style_aligner.guard.secret import find_secret
from nemo_style_aligner.trainer.data.datasets import lengths_of, pad_rows
from nemo_style_aligner.trainer.services.score_client import PromptsOfSequences, SequencesToScore
from nemo_style_aligner.trainer.telemetry import log_lines

pytestmark = pytest.mark.timeout(180)

FUNCTIONS = """
from beside import SCALE

def reward(prompt, response, line, step=0):
    if response == "0":
        return 1 / int(response)
    if response == "9":
        return float("nan")
    if response == "99":
        raise SystemExit("enough")
    assert line["text"] == prompt
    reward = SCALE * line.get("weight", 1) * (response == line["answer"])
    return reward + step / 100 if step else reward

not_a_function = 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("function")
    train_character_tokenizer("0123456789+=#", folder / "tokenizer")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "beside.py").write_text("SCALE = 2\n")
    return folder


def command(folder: Path, *arguments: str, function: str = "functions.py:reward") -> list[str]:
    return script(
        "serve_reward_function.py",
        *("--function", str(folder / function), "--tokenizer", str(folder / "tokenizer")),
        *arguments,
    )


@contextlib.contextmanager
def serving(command: list[str], log: Path) -> Iterator[tuple[Job, int]]:
    port = free_port()
    job = Job([*command, "--port", str(port)], log)
    try:
        wait_until_ready(job, port)
        yield job, port
    finally:
        job.kill()


def ask(port: int, tokenizer: Tokenizer, texts: list[tuple[dict, str]], token: str = "") -> requests.Response:
    """Ask as another client would, about these lines with these responses."""
    rows = [tokenizer.text_to_ids(line["text"] + response) for line, response in texts]
    lengths = [[len(tokenizer.text_to_ids(line["text"]))] for line, _ in texts]
    body = infer_body(pad_rows(rows, 0).numpy(), [len(row) for row in rows])
    lines = {"name": "lines", "datatype": "BYTES", "shape": [len(rows), 1], "data": [json.dumps(x) for x, _ in texts]}
    body["inputs"] += [lines, tensor("prompt_lengths", lengths)]
    url = f"http://127.0.0.1:{port}/v2/models/reward_model/infer"
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)


def of(lines: list[dict], *lengths: int) -> PromptsOfSequences:
    return PromptsOfSequences(lines, torch.tensor(lengths), torch.zeros(len(lengths)))


def test_a_function_scores_with_the_prompts_own_answers_and_its_errors_reach_the_client(folder: Path) -> None:
    token = find_secret().value
    tokenizer = train_character_tokenizer("0123456789+=#", folder / "again")
    limits = ClientLimits(total_s=30.0, internal_errors=1, first_backoff_s=0.01)
    one, two, odd = {"text": "1+1=", "answer": "2"}, {"text": "2+2=", "answer": "4", "weight": 0.5}, "\u00e9\ud800"
    lines = [one, one | {"answer": "10", "note": odd}, {"text": "1+1=2", "answer": "+0"}, two, two]
    responses = ["2", "10", "+0", "4#5", "3"]
    ids = [[*tokenizer.text_to_ids(x["text"] + y), tokenizer.eos_id] for x, y in zip(lines, responses, strict=True)]
    with (
        serving(command(folder, "--threads", "2", "--end-strings", "#"), folder / "service.log") as (job, port),
        reward_client(port, token=token, limits=limits) as client,
    ):
        tokens, lengths = pad_rows(ids, 0), lengths_of(ids)
        client.wait_until_ready(30, sequences=SequencesToScore(20, tokenizer.vocab_size, tokenizer.fingerprint()))
        with pytest.raises(ValueError, match="its tokenizer gives other token ids"):
            client.wait_until_ready(30, sequences=SequencesToScore(20, tokenizer.vocab_size, "another"))
        # Twice the line's weight where it is right; "#" ends a response.
        scores = client.infer_async(tokens, lengths, of(lines, 4, 4, 5, 4, 4)).result(60)
        assert scores["rewards"].tolist() == [2.0, 2.0, 2.0, 1.0, 0.0]
        stepped = PromptsOfSequences(lines[:2], torch.tensor([4, 4]), torch.tensor([3, 50]))
        scores = client.infer_async(tokens[:2], lengths[:2], stepped).result(60)
        assert scores["rewards"].tolist() == pytest.approx([2.03, 2.5])
        with pytest.raises(RequestRefusedError, match=rf"{port}/v2/.*sequence 0 of .* returned '', .* prompt '2\+2='"):
            failing = of([two | {"answer": 0, "weight": "x"}], 4)
            client.infer_async(tokens[3:4, :4], torch.tensor([4]), failing).result(60)

        for response, message in (
            ("0", r"functions.py:reward raised ZeroDivisionError: .*functions.py:6\) for the prompt '2\+2=' "),
            ("9", r"functions.py:reward returned nan, .*for the prompt '2\+2=' with the response '9'"),
            ("99", r"functions.py:reward raised SystemExit: enough"),
        ):
            answer = ask(port, tokenizer, [(one, "2"), (two, response)], token)
            assert answer.status_code == 500
            assert re.search(rf"sequence 1 of the request: .*{message}", answer.json()["error"])
        assert ask(port, tokenizer, [(one, "2")]).status_code == 401
        assert outputs(ask(port, tokenizer, [(one, "2")], token))["rewards"].tolist() == [[2.0]]  # it goes on

        url, headers = f"http://127.0.0.1:{port}/v2/models/reward_model/infer", {"Authorization": f"Bearer {token}"}
        row = infer_body(np.array(ids[:1]), [6])
        for more, message in (
            ([], "'lines' is missing"),
            ([("lines", "BYTES", ['{"text": "1+1="}'])], "'prompt_lengths' is missing"),
            ([("lines", "BYTES", ["{"]), ("prompt_lengths", "INT64", [4])], "row 0 is not JSON"),
            ([("lines", "BYTES", ['{"a": 1}']), ("prompt_lengths", "INT64", [4])], "whose 'text' is the prompt"),
            ([("lines", "BYTES", ['{"text": ""}']), ("prompt_lengths", "INT64", [7])], "must be from 1 to"),
        ):
            inputs = [{"name": n, "datatype": kind, "shape": [1, 1], "data": data} for n, kind, data in more]
            answer = requests.post(url, json={"inputs": row["inputs"] + inputs}, headers=headers, timeout=30)
            assert answer.status_code == 400 and message in answer.json()["error"], answer.text
        assert job.stop() == 0
    log = job.output()
    assert "Traceback" in log and "return 1 / int(response)" in log


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("functions.py", r"give a file and a function in it"),
        ("nowhere.py:reward", r"nowhere.py: no such file"),
        ("functions.py:rewards", r"functions.py has no function rewards; it has reward$"),
        ("functions.py:not_a_function", r"has no function not_a_function"),
        ("broken.py:reward", r"broken.py cannot be loaded: NameError: .*broken.py:2\)"),
        ("script.py:reward", r"script.py cannot be loaded: SystemExit: .*script.py:2\)"),
    ],
)
def test_mistakes_are_errors_at_the_start(
    function: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "broken.py").write_text("\nreward = rewrad\n")
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")
    arguments = {"--function": folder / function, "--tokenizer": folder / "tokenizer"}
    words = (str(word) for pair in arguments.items() for word in pair)
    monkeypatch.setattr(sys, "argv", ["serve_reward_function.py", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(log_lines, "configure_logging", lambda **_: None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / "serve_reward_function.py"), run_name="__main__")
    assert end.value.code == 2 and re.search(rf"error: .*{message}", capsys.readouterr().err, re.MULTILINE)
