"""``nsa eval``: against transformers on the same weights, and against formulas written otherwise."""

from __future__ import annotations

import itertools
import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from job_processes import SCRIPTS

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.jsonl import read_jsonl, write_jsonl
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.cli.main import nsa
from nemo_style_aligner.tools.evaluation.measures import mean, pass_at_k, share, win_rate
from nemo_style_aligner.trainer.models.files import convert
from nemo_style_aligner.trainer.models.restore import BaseModel
from nemo_style_aligner.wording import distinct_names

# As process_gsm8k.py writes it, beside the lines of make_arithmetic.py.
GSM8K = {"text": "User: How many?\nAssistant:", "answer": "1800", "answer_extraction": "after ####"}
WORKED = " 2 times 900.\n#### 1,800"


class Models:
    """A policy that has learnt its prompts by heart, what it was before, a reward model, all in two formats."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        train_character_tokenizer([chr(c) for c in range(32, 127)] + ["\n"], folder / "tokenizer")
        self.tokenizer: Tokenizer = load_tokenizer(folder / "tokenizer")
        self.prompts = folder / "data" / "prompts.jsonl"
        arguments = ["--output", str(folder / "data"), "--max-operand=3", "--test-questions=6"]
        runpy.run_path(str(SCRIPTS.parent / "data" / "make_arithmetic.py"))["main"](arguments)
        lines = [dict(record.fields) for record in read_jsonl(folder / "data" / "test_prompts.jsonl")]
        write_jsonl(self.prompts, [*lines, GSM8K])
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=self.tokenizer.vocab_size, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.1,
        )  # fmt: skip
        self.hf: dict[str, Any] = {name: transformers.LlamaForCausalLM(config) for name in ("base", "policy")}
        self.hf["policy"].load_state_dict(self.hf["base"].state_dict())
        learnt = [(line["text"], " " + line["answer"]) for line in lines] + [(GSM8K["text"], WORKED)]
        self._learn([(self.ids(prompt), [*self.ids(answer), self.tokenizer.eos_id]) for prompt, answer in learnt])
        config.num_labels, config.pad_token_id = 1, self.tokenizer.eos_id
        self.hf["rm"] = transformers.LlamaForSequenceClassification(config)
        with single_process():
            for name, model in self.hf.items():
                model.eval().save_pretrained(folder / name)
                for file in (folder / "tokenizer").iterdir():
                    (folder / name / file.name).write_bytes(file.read_bytes())
                convert(folder / name, folder / f"{name}.nemo", True, "32")

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.nemo"

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.texts_to_ids([text])[0])

    def _learn(self, rows: list[tuple[list[int], list[int]]]) -> None:
        width = max(len(prompt + answer) for prompt, answer in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        labels = torch.full((len(rows), width), -100)
        for row, (prompt, answer) in enumerate(rows):
            tokens[row, : len(prompt + answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt + answer)] = torch.tensor(answer)
        optimizer = torch.optim.Adam(self.hf["policy"].parameters(), lr=1e-2)
        for _ in range(100):
            loss = self.hf["policy"](input_ids=tokens, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert loss < 0.03

    @torch.no_grad()
    def logprob(self, name: str, ids: list[int], given: int, temperature: float = 1.0) -> float:
        logits = self.hf[name](torch.tensor([ids])).logits[0, given - 1 : -1].double() / temperature
        return float(logits.log_softmax(-1).gather(1, torch.tensor(ids[given:])[:, None]).sum())

    @torch.no_grad()
    def reward(self, ids: list[int]) -> float:
        """Of the last token, whatever it is; transformers would look for padding."""
        hidden = self.hf["rm"].model(torch.tensor([ids])).last_hidden_state
        return float(self.hf["rm"].score(hidden[0, -1]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("evaluated"))


def said(*arguments: object, status: int = 0) -> str:
    result = CliRunner(catch_exceptions=False).invoke(nsa, ["eval", *map(str, arguments), "--precision=32"])
    assert result.exit_code == status, result.output
    return result.output


def test_a_policy_beside_what_it_began_as(models: Models, tmp_path: Path) -> None:
    """Right answers of the project's data count as right; rewards, KL and perplexity are those of transformers."""
    output, sheet, texts = tmp_path / "new" / "results.json", tmp_path / "sheet.html", tmp_path / "texts.jsonl"
    write_jsonl(texts, [{"text": "User: What is"}, {"text": "Answer 12"}, {"text": "no"}])
    arguments = (
        models.path("policy"), "--against", models.path("base"), "--prompts", models.prompts, "--texts", texts,
        "--reward-model", models.path("rm"), "--samples", 4, "-k", 2, "-k", 4, "--temperature", 0.7,
        "--max-length", 30, "--output", output,
    )  # fmt: skip
    out = said(*arguments, "--sheet", sheet)
    results = json.loads(output.read_text())
    other, change = results["others"][str(models.path("base"))], results["others"]["change"]
    ours, theirs, changed = results["summary"], other["summary"], change["summary"]
    rows = results["responses"]
    assert ours["num_prompts"] == ours["num_with_answer"] and ours["num_responses"] == len(rows) == 4 * len(
        read_jsonl(models.prompts)
    )
    assert ours["accuracy"] > 0.9 and theirs["accuracy"] < 0.1 and ours["ended"] > 0.9
    assert "1,800" in {row.get("given_answer") for row in rows if row["answer"] == "1800" and row["is_right"]}
    assert ours["pass@2"] >= ours["accuracy"] and ours["pass@4"] >= ours["pass@2"]
    assert changed["accuracy"] == pytest.approx(ours["accuracy"] - theirs["accuracy"])
    assert changed["length"] == pytest.approx(ours["length"] - theirs["length"]) and changed["length"] < -5
    low, high = change["intervals"]["length"]
    assert low < changed["length"] < high

    checked = 0
    for row in rows:
        prompt = models.ids(row["prompt"])
        ids = prompt + models.ids(row["response"]) + [models.tokenizer.eos_id] * row["ended"]
        if len(ids) == len(prompt) + row["num_response_tokens"]:  # nothing special was said
            ratio = [models.logprob(name, ids, len(prompt), 0.7) for name in ("policy", "base")]
            assert row["kl"] == pytest.approx(ratio[0] - ratio[1], abs=1e-3)
            assert row["reward"] == pytest.approx(models.reward(ids), abs=1e-4)
            checked += 1
    assert checked > len(rows) / 2
    total, tokens = sum(row["kl"] for row in rows), sum(row["num_response_tokens"] for row in rows)
    assert changed["kl_per_response"] == pytest.approx(total / len(rows)) and changed["kl_per_token"] > 0.5
    assert changed["kl_per_token"] == pytest.approx(total / tokens)
    wins = [
        (a["reward"] > b["reward"]) + (a["reward"] == b["reward"]) / 2
        for n in range(0, len(rows), 4)
        for a, b in itertools.product(rows[n : n + 4], other["responses"][n : n + 4])
    ]
    assert changed["win_rate"] == pytest.approx(sum(wins) / len(wins))

    ids = [models.ids(record.fields["text"]) for record in read_jsonl(texts)]
    size = sum(len(text) - 1 for text in ids)
    for name, summary in (("policy", ours), ("base", theirs)):
        expected = math.exp(-sum(models.logprob(name, text, 1) for text in ids) / size)
        assert summary["perplexity"] == pytest.approx(expected, rel=1e-3) and summary["num_texts"] == 3
    assert changed["perplexity_ratio"] == pytest.approx(ours["perplexity"] / theirs["perplexity"], rel=1e-3)

    assert re.search(r"^ +policy.* base.* change$", out, re.M), out
    assert re.search(rf"^win_rate +{changed['win_rate']:.4g}  \(", out, re.M), out
    page = sheet.read_text()
    columns = re.findall(r'<th scope="col">(.*?)</th>', page)
    cells = dict(re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page))
    assert columns == ["policy", "base", "change"] and page.count(str(models.path("policy"))) == 1
    texts_of = re.findall(r"<td>(.*?)</td>", cells["accuracy"])
    assert [text.split()[0] for text in texts_of] == [
        f"{summary['accuracy']:.4g}" for summary in (ours, theirs, changed)
    ]
    assert re.findall(r"<td>(.*?)</td>", cells["win_rate"])[:2] == ["", ""]
    assert all(f"<h3>{heading}</h3>" in page for heading in ("Worst", "Most changed", "Furthest away"))
    # The same seed, the same responses, also of Hugging Face directories.
    folders = {models.path(name): models.folder / name for name in models.hf}
    of_folders = [folders.get(argument, argument) for argument in arguments[:-1]]
    said(*of_folders, tmp_path / "again.json", "--sheet", tmp_path / "sheet.jsonl", "--limit", 2)
    again = json.loads((tmp_path / "again.json").read_text())["responses"]
    assert [(row["response"], row["reward"]) for row in again] == [(row["response"], row["reward"]) for row in rows[:8]]
    first = json.loads((tmp_path / "sheet.jsonl").read_text().splitlines()[0])
    assert first["section"] == "Worst" and [answer["label"] for answer in first["answers"]] == [
        "policy",
        "base",
    ]


ENVIRONMENT = """
async def episode(policy, line):
    first = await policy.reply()
    if line["answer"] == "1800":
        raise LookupError("no such tool")
    last = await policy.sample("\\n" + line["text"])
    return {"reward": len(last.text), "same": float(first.text == last.text)}
"""


def test_episodes_are_measured_and_shown(models: Models, tmp_path: Path) -> None:
    """By `nsa eval` and, one after another, by `nsa data show`."""
    (file := tmp_path / "env.py").write_text(ENVIRONMENT)
    output, sheet, named = tmp_path / "results.json", tmp_path / "sheet.html", f"{file}:episode"
    which = ("--prompts", models.prompts, "--environment", named, "--max-length", 60, "--output", output)
    out = said(models.path("policy"), *which, "--sheet", sheet, "--against", models.path("base"))
    results = json.loads(output.read_text())
    rows, summary = results["responses"], results["summary"]
    *rest, failed = rows
    assert "no such tool" in failed["problem"] and "reward" not in failed and failed["replies"] == 1
    for row in rest:
        (_, first), (who, told), (_, last) = row["turns"]
        assert who == "environment" and told == "\n" + row["prompt"] and row["replies"] == 2
        assert last.removesuffix("<|endoftext|>") == row["response"]
        assert row["reward"] == len(row["response"]) and row["parts"] == {"same": float(first == last)}
        assert row["num_response_tokens"] == len(models.tokenizer.text_to_ids(row["response"])) + 1 + len(
            models.tokenizer.text_to_ids(first.removesuffix("<|endoftext|>"))
        ) + first.endswith("<|endoftext|>") - (not last.endswith("<|endoftext|>"))
    assert summary["failed"] == pytest.approx(1 / len(rows)) and summary["replies"] == 2 - 1 / len(rows)
    assert summary["reward/same"] == pytest.approx(np.mean([row["parts"]["same"] for row in rest]))
    assert "reward/same" in out and "kl_per_token" not in out
    page = sheet.read_text()
    assert '<span class="told"' in page and "no such tool" in page

    arguments = ["data", "show", models.prompts, "--model", models.path("policy"), "--environment", named]
    arguments += ["--line", len(rows) - 1, "--count", 2, "--tokens", "model.ppo.length_params.max_length=60"]
    shown = CliRunner(catch_exceptions=False).invoke(nsa, list(map(str, arguments)))
    assert shown.exit_code == 0, shown.output
    told = re.escape(rest[-1]["prompt"])
    assert re.search(rf"episode, 2 replies, \d+ tokens sampled, \d+ inserted.*\n{told}⟦[^⟧]*⟧\n{told}⟦", shown.output)
    assert re.search(r"the last reply ended; returned: \{'reward': \d+.0, 'same': [01].0\}", shown.output)
    assert "episode, 1 reply, " in shown.output and "raised LookupError: no such tool" in shown.output


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/r/actor/checkpoints/ppo.nemo", "/r/sft/checkpoints/sft.nemo"], ["ppo", "sft"]),
        (["/r/run 1/checkpoints/ppo.nemo", "/r/run 2/checkpoints/ppo.nemo"], ["run 1", "run 2"]),
        (["/a/b/ppo.nemo", "/b/ppo.nemo"], ["a", "/"]),
        (["/a/ppo.nemo"], ["ppo"]),
    ],
)
def test_models_are_called_what_tells_them_apart(paths: list[str], names: list[str]) -> None:
    assert distinct_names(list(map(Path, paths))) == names


def test_a_model_does_not_differ_from_itself(models: Models, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    (tmp_path / "same.nemo").write_bytes(models.path("base").read_bytes())
    said(models.path("base"), "--against", tmp_path / "same.nemo", "--prompts", models.prompts, "--output", output,
         "--reward-model", models.path("rm"), "--limit", 5, "--max-length", 8)  # fmt: skip
    changed = json.loads(output.read_text())["others"]["change"]
    assert changed["summary"] == {
        "accuracy": 0, "reward": 0, "length": 0, "ended": 0, "win_rate": 0.5, "kl_per_response": 0, "kl_per_token": 0
    }  # fmt: skip
    said(models.path("base"), "--against", models.path("policy"), "--prompts", models.prompts, "--greedy",
         "--output", output, "--max-length", 8)  # fmt: skip
    assert "kl_per_token" not in json.loads(output.read_text())["others"]["change"]["summary"]  # they are no samples


def test_a_reward_model_by_category(models: Models, tmp_path: Path) -> None:
    pairs, output = tmp_path / "pairs.jsonl", tmp_path / "results.json"
    lines = [
        {"prompt": f"Q{n}:", "chosen": f" {n * 7}", "rejected": f" {n * 5 + 1}!", "subset": ("chat", "code")[n % 2]}
        for n in range(12)
    ]
    write_jsonl(pairs, lines)
    out = said(models.path("rm"), "--comparisons", pairs, "--category", "subset", "--output", output,
               "--sheet", tmp_path / "sheet.html")  # fmt: skip
    results = json.loads(output.read_text())
    rewards = [
        [models.reward(models.ids(line["prompt"] + line[key])) for key in ("chosen", "rejected")] for line in lines
    ]
    judged = [[row["reward_chosen"], row["reward_rejected"]] for row in results["responses"]]
    assert np.allclose(judged, rewards, atol=1e-4)
    right = [good > bad for good, bad in rewards]
    assert results["summary"]["accuracy"] == pytest.approx(np.mean(right)) and results["measured"] == "all"
    for start, name in enumerate(("chat", "code")):
        summary = results["others"][f"subset={name}"]["summary"]
        assert summary["accuracy"] == pytest.approx(np.mean(right[start::2])) and summary["num_pairs"] == 6
    page = (tmp_path / "sheet.html").read_text()
    assert re.search(r"^ +num_pairs +accuracy +margin$", out, re.M) and re.search(r"^subset=code +\d", out, re.M), out
    assert "Worst judged" in page
    assert re.findall(r'<th scope="row">(.*?)</th>', page) == ["all", "subset=chat", "subset=code"]
    # The good text before the bad one: the category is the good one's.
    write_jsonl(pairs, [{"text": "Q: 1", "subset": "a"}, {"text": "Q: 2"}])
    assert "subset=a " in said(models.path("rm"), "--comparisons", pairs, "--category", "subset")


def test_mistakes_are_told_before_a_model_is_loaded(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseModel, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    unlabelled, pairs, output = tmp_path / "unlabelled.jsonl", tmp_path / "pairs.jsonl", tmp_path / "results.json"
    write_jsonl(unlabelled, [{"text": "a", "answer": "1"}, {"text": "b", "answr": "2"}])
    write_jsonl(pairs, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    other = tmp_path / "other"
    train_character_tokenizer("abc", other)
    config = transformers.LlamaConfig(
        vocab_size=load_tokenizer(other).vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(other)
    with single_process():
        convert(other, tmp_path / "other.nemo", True, "32")
    policy, rm = models.path("policy"), models.path("rm")
    for arguments, told in (
        ((policy, "--prompts", unlabelled, "-k", 1), f"{unlabelled}:2: key 'answer' is missing"),
        ((policy, "--prompts", unlabelled, "--against", tmp_path / "other.nemo"), "has a different tokenizer from"),
        ((policy, "--prompts", unlabelled, "--reward-model", tmp_path / "other.nemo"), "Give a reward model that"),
        ((policy, "--prompts", unlabelled, "--reward-model", policy), "has no reward head"),
        ((policy, "--prompts", unlabelled, "--max-length", 128), "lower --max-length"),
        ((policy, "--prompts", unlabelled, "--temperature", "inf"), "temperature must lie in"),
        ((rm, "--prompts", unlabelled), "is a reward model or critic, which generates no text"),
        ((policy, "--comparisons", pairs), "has no reward head"),
        ((rm, "--comparisons", pairs, "--category", "subset"), f"{pairs}:1: key 'subset' is missing"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            said(*arguments, "--output", output)
    for arguments, told in (
        ((policy,), "say what to measure by"),
        ((policy, "--prompts", unlabelled, "-k", 2), "-k 2 needs at least as many --samples, not 1"),
        ((policy, "--prompts", unlabelled, "--greedy", "--samples", 2), "--greedy gives the same response each time"),
        ((policy, "--prompts", unlabelled, "--category", "x"), "--category needs --comparisons"),
        ((policy, "--prompts", unlabelled, "--against", policy), "--against is MODEL itself"),
        ((rm, "--comparisons", pairs, "--against", policy), "--comparisons is for a reward model"),
        ((policy, "--texts", pairs, "--sheet", output), "--sheet needs --prompts or --comparisons"),
        ((policy, "--prompts", unlabelled, "--output", "/dev/null/x.json"), "/dev/null is not a folder"),
        (("org/name", "--prompts", unlabelled), "org/name does not exist; nothing is downloaded"),
    ):
        assert told in said(*arguments, status=2)
    assert not output.exists()


def test_the_script_is_the_same(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own names; ``--end-strings`` takes several, which are no part of responses."""
    results: list[dict[str, Any]] = []
    for ends in ([], ["--end-strings", "2", " t"]):
        output = tmp_path / f"results{len(ends)}.json"
        arguments = ["--model", models.path("policy"), *ends, "--prompts", models.prompts, "--output", output,
                     "--precision=32", "--greedy", "--max-length=30"]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["evaluate_gpt.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / "evaluate_gpt.py"), run_name="__main__")
        assert not ended.value.code
        results.append(json.loads(output.read_text()))
    whole, cut = results
    assert whole["summary"]["accuracy"] == 1.0 and whole["responses"][-1]["response"] == WORKED
    assert whole["intervals"]["accuracy"][0] < 0.9  # few prompts, however right
    for before, after in zip(whole["responses"], cut["responses"], strict=True):
        assert after["response"] == re.split("2| t", before["response"])[0]


@pytest.mark.long
def test_answers_that_are_mathematically_right(models: Models, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.json"
    write_jsonl(prompts, [GSM8K | {"answer": "2 \\cdot 900"}])
    accuracy = []
    for flags in ((), ("--math",)):
        said(models.path("policy"), "--prompts", prompts, "--greedy", "--max-length=30", "--output", output, *flags)
        accuracy.append(json.loads(output.read_text())["summary"]["accuracy"])
    assert accuracy == [0.0, 1.0]
    write_jsonl(prompts, [GSM8K | {"answer": "$"}])
    with pytest.raises(UserError, match=r"prompts.jsonl:1: the right answer '\$' cannot be read as mathematics"):
        said(models.path("policy"), "--prompts", prompts, "--math")


def test_the_formulas() -> None:
    for n, c in itertools.product(range(1, 7), range(7)):
        for k in range(1, n + 1) if c <= n else ():
            drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(one) for one in drawn]))
    assert pass_at_k(2000, 1, 100) == pytest.approx(0.05)
    assert win_rate([1.0, 3.0], [1.0, 2.0]) == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    for values in ([1.0] * 5, [0.0] * 3, [1, 0, 0, 1, 1, 1, 1]):  # bounds at which the value is 1.96 deviations away
        measure, n = share(values), len(values)
        assert measure.low is not None and measure.high is not None and 0 <= measure.low < measure.high <= 1
        for bound in {measure.low, measure.high} - {0.0, 1.0}:
            assert abs(measure.value - bound) == pytest.approx(1.96 * math.sqrt(bound * (1 - bound) / n), abs=1e-4)
    values = np.random.default_rng(1).normal(3, 2, 400)
    measure, error = mean(values), 1.96 * values.std() / 20
    assert measure.value == pytest.approx(values.mean()) and mean([2.0]) == (2.0, None, None)
    assert [measure.low, measure.high] == pytest.approx([measure.value - error, measure.value + error], abs=0.03)
    assert mean([1.0, 4.0], [1.0, 9.0]).value == 0.5
