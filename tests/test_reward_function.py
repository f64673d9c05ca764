"""A Python function as the reward model: the script as users start it, asked by the project's client and by others."""

from __future__ import annotations

import contextlib
import json
import math
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import torch
from job_processes import ROOT, SCRIPTS, Job, script, wait_until_ready
from served_critic import CountingBackend, critic_client, infer_body, outputs, serve

from nemo_style_aligner.algorithms.reward_function import PromptLines, open_tokenizer
from nemo_style_aligner.data.datasets import lengths_of, pad_rows
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.data.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.parallel.machine import free_port
from nemo_style_aligner.servers.client import CriticClient, PromptsOfSequences, SequencesToScore
from nemo_style_aligner.servers.endpoints import ModelLimits, critic_endpoints
from nemo_style_aligner.servers.http_client import ClientLimits, RequestRefusedError
from nemo_style_aligner.servers.secret import find_secret
from nemo_style_aligner.telemetry import log_lines

pytestmark = pytest.mark.timeout(180)

TRAIN = [{"text": "1+1=", "answer": "2"}, {"text": "2+2=", "answer": "4", "weight": 0.5}]
VALID = [{"text": "1+1=", "answer": "2"}, {"text": "2+2=3+", "answer": "1"}]
FUNCTIONS = """
from beside import SCALE

def reward(prompt, response, line):
    if response == "0":
        return 1 / int(response)
    if response == "9":
        return float("nan")
    if response == "99":
        raise SystemExit("enough")
    assert line["text"] == prompt
    return SCALE * line.get("weight", 1) * (response == line["answer"])

not_a_function = 1
"""


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("function")
    train_character_tokenizer("0123456789+=#", folder / "tokenizer")
    write_lines(folder / "train.jsonl", TRAIN)
    write_lines(folder / "valid.jsonl", VALID)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "beside.py").write_text("SCALE = 2\n")
    return folder


def command(
    folder: Path, *arguments: str, function: str = "functions.py:reward", with_prompts: bool = True
) -> list[str]:
    prompts = ["--prompts", *(str(folder / name) for name in ("train.jsonl", "valid.jsonl"))]
    return script(
        "serve_reward_function.py",
        *("--function", str(folder / function), "--tokenizer", str(folder / "tokenizer")),
        *(prompts if with_prompts else ()),
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


def score(client: CriticClient, tokenizer: Tokenizer, *texts: str) -> list[float]:
    rows = [[*tokenizer.text_to_ids(text), tokenizer.eos_id] for text in texts]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return client.infer_async(tokens, torch.tensor([len(row) for row in rows])).result(60).rewards.tolist()


def test_a_function_scores_with_the_prompts_own_answers_and_its_errors_reach_the_client(folder: Path) -> None:
    token = find_secret().value
    tokenizer = train_character_tokenizer("0123456789+=#", folder / "again")
    limits = ClientLimits(total_s=30.0, internal_errors=1, first_backoff_s=0.01)
    critic = critic_endpoints(ModelLimits(), combined=False)
    with (
        serving(command(folder, "--threads", "2", "--end-strings", "#"), folder / "service.log") as (job, port),
        serve(CountingBackend(), endpoints=critic, http={"token": token}) as values,
        critic_client(values.number, combined=False, reward_port=port, token=token, limits=limits) as client,
    ):
        client.wait_until_ready(30, sequences=SequencesToScore(20, tokenizer.vocab_size, tokenizer.fingerprint()))
        with pytest.raises(ValueError, match="its tokenizer gives other token ids"):
            client.wait_until_ready(30, sequences=SequencesToScore(20, tokenizer.vocab_size, "another"))
        texts = ["1+1=2", "1+1=3", "2+2=4", "2+2=4#5", "2+2=3+1", "2+2=3"]
        # Twice the line's weight where it is right; "#" ends a response, and 2+2=3+ is a prompt of its own.
        assert score(client, tokenizer, *texts) == [2.0, 0.0, 1.0, 1.0, 2.0, 0.0]

        train = re.escape(str(folder / "train.jsonl"))
        for response, message in (
            ("0", rf"functions.py:reward raised ZeroDivisionError: .*functions.py:6\) for the prompt of {train}:2 "),
            ("9", rf"functions.py:reward returned nan, .*for the prompt of {train}:2 with the response '9'"),
            ("99", r"functions.py:reward raised SystemExit: enough"),
        ):
            with pytest.raises(RequestRefusedError, match=rf"{port}/v2/.*sequence 1 of the request: .*{message}"):
                score(client, tokenizer, "1+1=2", f"2+2={response}")
        with pytest.raises(RequestRefusedError, match=r"none of the 3 prompts of .*train.jsonl, .*--add-bos"):
            score(client, tokenizer, "3+3=6")
        assert score(client, tokenizer, "1+1=2") == [2.0]  # the service goes on

        url = f"http://127.0.0.1:{port}/v2/models/reward_model/infer"
        ids = tokenizer.text_to_ids("1+1=2")
        body = infer_body(np.array([ids]), [len(ids)])
        assert requests.post(url, json=body, timeout=30).status_code == 401
        headers = {"Authorization": f"Bearer {token}"}
        assert outputs(requests.post(url, json=body, headers=headers, timeout=30))["rewards"].tolist() == [[2.0]]
        sentences = {"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": ["2+2=4"]}
        answer = requests.post(url, json={"inputs": [sentences]}, headers=headers, timeout=30)
        assert outputs(answer)["rewards"].tolist() == [[1.0]]
        assert job.stop() == 0
    log = job.output()
    assert "Traceback" in log and "return 1 / int(response)" in log
    # 1+1= in both files is one prompt, and 2+2= begins another.
    assert re.search(r"WARNING .*: 1 prompts are prefixes of others \(.*train.jsonl:2 of .*valid.jsonl:2\)", log)


def test_the_prompts_lines_come_with_the_request(folder: Path) -> None:
    """Lines that look-up by tokens would confuse: one prompt with two answers, one that begins another's response."""
    token = find_secret().value
    tokenizer = train_character_tokenizer("0123456789+=#", folder / "once more")
    limits = ClientLimits(total_s=30.0, internal_errors=1, first_backoff_s=0.01)
    lines = [
        {"text": "1+1=", "answer": "2"},
        {"text": "1+1=", "answer": "10", "note": "\u00e9\ud800"},  # as JSON may spell it
        {"text": "1+1=2", "answer": "+0"},
    ]
    ids = [tokenizer.text_to_ids(text) for text in ("1+1=2", "1+1=10", "1+1=2+0")]
    prompts = PromptsOfSequences(lines, torch.tensor([4, 4, 5]))
    tokens, lengths = pad_rows(ids, 0), lengths_of(ids)
    started = command(folder, with_prompts=False)
    critic = critic_endpoints(ModelLimits(), combined=False)
    with (
        serving(started, folder / "lines.log") as (job, port),
        serve(CountingBackend(), endpoints=critic, http={"token": token}) as values,
        critic_client(values.number, combined=False, reward_port=port, token=token, limits=limits) as client,
    ):
        with pytest.raises(RequestRefusedError, match="start this service with --prompts"):  # metadata not yet read
            client.infer_async(tokens, lengths, prompts).result(60)
        client.wait_until_ready(30)
        assert client.infer_async(tokens, lengths, prompts).result(60).rewards.tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(
            RequestRefusedError, match=r"sequence 0 of .* returned '', .* for the prompt '2\+2=' with the"
        ):
            failing = PromptsOfSequences([{"text": "2+2=", "answer": 0, "weight": "x"}], torch.tensor([4]))
            client.infer_async(tokens[:1, :4], torch.tensor([4]), failing).result(60)

        url, headers = f"http://127.0.0.1:{port}/v2/models/reward_model/infer", {"Authorization": f"Bearer {token}"}
        row = infer_body(np.array(ids[:1]), [5])
        for more, message in (
            ([], "start this service with --prompts"),
            ([("lines", "BYTES", ['{"text": "1+1="}'])], "needed together"),
            ([("lines", "BYTES", ["{"]), ("prompt_lengths", "INT64", [4])], "row 0 is not JSON"),
            ([("lines", "BYTES", ['{"a": 1}']), ("prompt_lengths", "INT64", [4])], "whose 'text' is the prompt"),
            ([("lines", "BYTES", ['{"text": ""}']), ("prompt_lengths", "INT64", [6])], "must be from 1 to"),
        ):
            inputs = [{"name": n, "datatype": kind, "shape": [1, 1], "data": data} for n, kind, data in more]
            answer = requests.post(url, json={"inputs": row["inputs"] + inputs}, headers=headers, timeout=30)
            assert answer.status_code == 400 and message in answer.json()["error"], answer.text
        assert job.stop() == 0


def test_the_function_in_the_documentation_works(folder: Path) -> None:
    documentation = (ROOT / "docs" / "service.md").read_text()
    (source,) = re.findall(r"```python\n(# my_rewards.py\n.*?)```", documentation, re.DOTALL)
    (folder / "my_rewards.py").write_text(source)
    started = command(folder, "--token", "none", function="my_rewards.py:reward")
    with serving(started, folder / "docs.log") as (job, port):
        sentences = {"name": "sentences", "datatype": "BYTES", "shape": [2, 1], "data": ["2+2=4", "2+2=55"]}
        url = f"http://127.0.0.1:{port}/v2/models/reward_model/infer"
        rewards = outputs(requests.post(url, json={"inputs": [sentences]}, timeout=30))["rewards"]
        assert job.stop(number=signal.SIGINT) == 0
    assert all(math.isclose(*pair, abs_tol=1e-6) for pair in zip(rewards[:, 0], [0.999, -0.002], strict=True))


@pytest.mark.parametrize(
    ("function", "lines", "message"),
    [
        ("functions.py", [], r"give a file and a function in it"),
        ("nowhere.py:reward", [], r"nowhere.py: no such file"),
        ("functions.py:rewards", [], r"functions.py has no function rewards; it has reward$"),
        ("functions.py:not_a_function", [], r"has no function not_a_function"),
        ("broken.py:reward", [], r"broken.py cannot be loaded: NameError: .*broken.py:2\)"),
        ("script.py:reward", [], r"script.py cannot be loaded: SystemExit: .*script.py:2\)"),
        (
            "functions.py:reward",
            [TRAIN[0], {"text": "1+1=", "answer": "3"}],
            r"again.jsonl:2: the prompt is the same as that of .*again.jsonl:1, but the lines differ",
        ),
    ],
)
def test_mistakes_are_errors_at_the_start(
    function: str,
    lines: list[dict],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "broken.py").write_text("\nreward = rewrad\n")
    (folder / "script.py").write_text("import sys\nsys.exit(0)\n")
    prompts = write_lines(tmp_path / "again.jsonl", lines)
    arguments = {"--function": folder / function, "--tokenizer": folder / "tokenizer", "--prompts": prompts}
    words = (str(word) for pair in arguments.items() for word in pair)
    monkeypatch.setattr(sys, "argv", ["serve_reward_function.py", *words])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(log_lines, "configure_logging", lambda **_: None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / "serve_reward_function.py"), run_name="__main__")
    assert end.value.code == 2 and re.search(rf"error: .*{message}", capsys.readouterr().err, re.MULTILINE)


def test_the_bos_token_is_before_each_prompt_where_the_actor_puts_it(folder: Path) -> None:
    tokenizer = open_tokenizer(folder / "tokenizer")
    tokenizer.bos_id = 1
    lines = PromptLines([folder / "train.jsonl"], tokenizer, add_bos=True)
    record, length = lines.find(np.array([1, *tokenizer.text_to_ids("2+2=4")]))
    assert (record.line, length) == (2, 5)
