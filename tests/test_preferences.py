"""DPO and KTO: losses and gradients against plain torch, the same at every layout, kept references, kinds of lines."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from job_processes import ROOT, run
from multirank_preferences import LAYOUTS, make_files, report, trainer_for, weights_of
from small_models import CHATML

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.jsonl import DataError, write_jsonl
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.weights.huggingface import write_checkpoint
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_tokenizer
from nemo_style_aligner.trainer.config.schema import DPO
from nemo_style_aligner.trainer.data.datasets import JudgedDataset, MismatchedDataset, PreferenceDataset, PreferenceItem
from nemo_style_aligner.trainer.models.preference_losses import preference_loss
from nemo_style_aligner.trainer.training.reference import ReferenceError
from nemo_style_aligner.trainer.training.supervised import SupervisedTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SETTINGS = {"add_bos": None, "append_eod": False, "seq_length": 64}


def long(case: str) -> Any:
    """A case that is left out unless it is asked for."""
    return pytest.param(case, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of `make_files`, and process groups of this process."""
    folder = tmp_path_factory.mktemp("preferences")
    with single_process(seed=3):
        make_files(folder)
        yield folder


# ---- numbers ------------------------------------------------------------------------------------


def hugging_face(trainer: SupervisedTrainer, folder: Path) -> Any:
    """The policy as it is now, as transformers has it."""
    write_checkpoint(folder, trainer.model.architecture, iter(weights_of(trainer).items()))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprob(model: Any, ids: list[int], prompt: int) -> torch.Tensor:
    """Of a response's tokens, one sequence at a time."""
    logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(-1, torch.tensor(ids[1:])[:, None])[prompt - 1 :, 0]


def expected_dpo(items: list[PreferenceItem], policy: Any, reference: Any, kind: str, mean: bool) -> torch.Tensor:
    """With beta 0.3, an SFT term of weight 0.2, and rewards scaled by 0.5."""
    losses = []
    for item in items:
        of_policy = [logprob(policy, ids, n) for ids, n in zip(item.token_ids, item.prompt_lengths, strict=True)]
        with torch.no_grad():
            of_reference = [
                logprob(reference, ids, n) for ids, n in zip(item.token_ids, item.prompt_lengths, strict=True)
            ]
        if mean:
            chosen, rejected = (p.mean() - r.mean() for p, r in zip(of_policy, of_reference, strict=True))
        else:
            chosen, rejected = (p.sum() - r.sum() for p, r in zip(of_policy, of_reference, strict=True))
        gap, p = 0.5 * (item.labels[0] - item.labels[1]), 0.3 * (chosen - rejected)
        given, own = torch.tensor(gap).sigmoid(), p.sigmoid()
        loss = {
            "dpo": -own.log(),
            "ipo": (chosen - rejected - 1 / 0.6) ** 2,
            "rpo_sq": (p - gap) ** 2,
            "rpo_bwd_kl": given * (given / own).log() + (1 - given) * ((1 - given) / (1 - own)).log(),
            "rpo_fwd_kl": own * (own / given).log() + (1 - own) * ((1 - own) / (1 - given)).log(),
        }[kind]
        losses.append(loss - 0.2 * (of_policy[0].mean() if mean else of_policy[0].sum()))
    return torch.stack(losses).mean()


def expected_kto(items: list[PreferenceItem], policy: Any, reference: Any) -> torch.Tensor:
    """With beta 0.3 and weights 1.5 and 0.5, as in TRL's `KTOTrainer`."""
    ratios = [
        [
            logprob(policy, ids, n).sum() - logprob(reference, ids, n).sum().detach()
            for ids, n in zip(item.token_ids, item.prompt_lengths, strict=True)
        ]
        for item in items
    ]
    kl = torch.stack([mismatched for _, mismatched in ratios]).mean().clamp(min=0).detach()
    losses = []
    for item, (ratio, _) in zip(items, ratios, strict=True):
        good = item.labels[0] == 1
        losses.append((1.5 if good else 0.5) * (1 - (0.3 * (ratio - kl if good else kl - ratio)).sigmoid()))
    assert kl > 0
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", ["dpo", long("ipo mean"), long("rpo_sq"), "rpo_bwd_kl", long("rpo_fwd_kl"), "kto"])
def test_losses_and_gradients_are_those_of_plain_torch(kind: str, files: Path, tmp_path: Path) -> None:
    """On the weights after a first update, so that policy and reference differ. Plain SGD shows the gradients."""
    method = "kto" if kind == "kto" else "dpo"
    section, mean, loss = f"model.{method}", "mean" in kind, kind.split()[0]
    keys = [f"{section}.ref_policy_kl_penalty=0.3", "model.micro_batch_size=2"]
    if method == "kto":
        keys += [f"{section}.desirable_loss_weight=1.5", f"{section}.undesirable_loss_weight=0.5"]
    else:
        keys += [
            f"{section}.preference_loss={loss}",
            f"{section}.gt_reward_scale=0.5",
            f"{section}.sft_loss_weight=0.2",
        ]
        keys += [f"{section}.preference_average_log_probs={mean}"]
    trainer = trainer_for(method, files, tmp_path / "log", *keys)
    reference = hugging_face(trainer, tmp_path / "reference")
    trainer.update(range(6))
    before = weights_of(trainer)
    policy = hugging_face(trainer, tmp_path / "policy")
    items = [trainer.train_data[index] for index in range(6, 12)]
    if method == "kto":
        expected = expected_kto(items, policy, reference)
    else:
        expected = expected_dpo(items, policy, reference, loss, mean)
    expected.backward()
    metrics = trainer.update(range(6, 12))
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)
    after = weights_of(trainer)
    for name, parameter in policy.named_parameters():
        gradient = (before[name] - after[name]) / 0.1
        assert (gradient - parameter.grad).abs().max() < 2e-4 * parameter.grad.abs().max() + 2e-5, name


def test_with_adapters_the_reference_is_the_base_model(files: Path, tmp_path: Path) -> None:
    keys = ["model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4"]
    trainer = trainer_for("dpo", files, tmp_path / "log", *keys)
    first, second = trainer.update(range(6)), trainer.update(range(6))
    assert first["preference_loss"] == pytest.approx(math.log(2), abs=1e-6) and first["rewards_margin"] == 0
    assert second["preference_loss"] < first["preference_loss"] and second["rewards_margin"] > 0


def test_far_margins_stay_finite() -> None:
    margins = torch.tensor([-1e4, -50.0, 50.0, 1e4])
    for loss in ("dpo", "rpo_bwd_kl", "rpo_fwd_kl"):
        values = preference_loss(
            margins, 0 * margins, torch.ones(4), DPO(ref_policy_kl_penalty=0.5, preference_loss=loss)
        )
        assert values.isfinite().all() and (values >= 0).all(), loss


@pytest.fixture(scope="module")
def at_layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    run([sys.executable, str(ROOT / "tests" / "multirank_preferences.py"), str(folder)], folder / "ranks.log", 200)
    return folder


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for update, (one, other) in enumerate(
        zip([*got["updates"], got["validation"]], [*expected["updates"], expected["validation"]], strict=True)
    ):
        ignored = {"padding_efficiency", "dp_balance", "consumed_samples"}
        if update == 0:  # the policy is the reference, and all margins are 0 up to rounding
            ignored.add("accuracy")
        assert {k: v for k, v in one.items() if k not in ignored} == pytest.approx(
            {k: v for k, v in other.items() if k not in ignored}, rel=2e-4, abs=2e-5
        )
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(got["weights"][name], tensor, atol=2e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_numbers_are_the_same_at_every_layout(method: str, at_layouts: Path) -> None:
    results = {name: torch.load(at_layouts / f"{method}_{name}.pt") for name in LAYOUTS}
    for result in results.values():
        assert_same(result, results["one"])
    margins = results["one"]["validation"]["rewards_margin"]
    assert margins > 0 and results["one"]["updates"][1]["loss"] != results["one"]["updates"][0]["loss"]


@pytest.mark.parametrize("method", ["dpo", long("kto")])
def test_numbers_do_not_depend_on_micro_batches_or_on_who_keeps_the_reference(
    method: str, files: Path, tmp_path: Path
) -> None:
    keys = {
        "plain": [],
        "micro batch, swap": ["model.micro_batch_size=4", f"model.{method}.reference_policy_placement=swap"],
        "kept": [f"model.{method}.reference_logprobs_dir={tmp_path / 'kept'}", "model.max_tokens_per_micro_batch=40"],
    }
    keys["kept before"] = keys["kept"]
    results = {name: report(trainer_for(method, files, tmp_path / name, *given)) for name, given in keys.items()}
    for result in results.values():
        assert_same(result, results["plain"])
    for name, tensor in results["kept"]["weights"].items():
        assert torch.equal(results["kept before"]["weights"][name], tensor)
    assert len(list((tmp_path / "kept").glob("reference_logprobs_*.npy"))) == 1  # both splits are the same file


def test_a_kept_reference_goes_on_where_it_was_and_is_of_one_model_and_data(files: Path, tmp_path: Path) -> None:
    keys = [f"model.dpo.reference_logprobs_dir={tmp_path / 'kept'}"]
    trainer_for("dpo", files, tmp_path / "first", *keys)
    (path,) = (tmp_path / "kept").iterdir()
    whole = np.load(path)
    assert np.isfinite(whole).all() and (whole < 0).all()
    np.save(path, np.where(np.arange(12)[:, None] < 5, whole + 1, np.nan).astype(np.float32))
    trainer = trainer_for("dpo", files, tmp_path / "second", *keys)
    now = np.load(path)
    np.testing.assert_allclose(now[:5], whole[:5] + 1)  # what is there is believed
    np.testing.assert_allclose(now[5:], whole[5:], rtol=1e-6)
    assert trainer.train_data[3].reference == pytest.approx(tuple(now[3]))
    trainer_for("dpo", files, tmp_path / "third", *keys, "model.data.append_eod=False")  # other tokens
    assert len(list((tmp_path / "kept").iterdir())) == 2
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ReferenceError, match=r"reference_logprobs_\w+\.npy is damaged .*: remove it"):
        trainer_for("dpo", files, tmp_path / "fourth", *keys)


def straight_and_resumed(
    method: str, files: Path, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights after four steps, and after two and two more in a job resumed from their checkpoint."""
    params = "exp_manager.checkpoint_callback_params"
    keys = [
        *("model.optim.name=distributed_fused_adam", "model.optim.lr=1e-2", "model.hidden_dropout=0.1"),
        *(f"trainer.{method}.{key}" for key in ("max_epochs=2", "save_interval=2", "val_check_interval=0")),
        *(f"{params}.{key}" for key in ("save_top_k=-1", "monitor=null", "save_nemo_on_train_end=False")),
        f"{params}.filename=at-{{step}}",
    ]
    straight = trainer_for(method, files, folder / "straight", *keys)
    straight.fit()
    straight.checkpoints.finish()
    middle = folder / "straight" / "checkpoints" / "at-step=2"
    resumed = trainer_for(method, files, folder / "resumed", *keys, f"exp_manager.resume_from_checkpoint={middle}")
    assert (straight.step, resumed.step) == (4, 2)
    resumed.fit()
    resumed.checkpoints.finish()
    return weights_of(straight), weights_of(resumed)


@pytest.mark.parametrize("method", [long("dpo"), "kto"])
def test_a_resumed_run_is_as_if_never_stopped(method: str, files: Path, tmp_path: Path) -> None:
    straight, resumed = straight_and_resumed(method, files, tmp_path)
    assert [name for name, tensor in resumed.items() if not torch.equal(tensor, straight[name])] == []


# ---- lines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(files: Path) -> Tokenizer:
    return load_nemo_tokenizer(files / "base.nemo")


def pairs(folder: Path, tokenizer: Tokenizer, *lines: dict[str, Any], **settings: Any) -> list[PreferenceItem]:
    write_jsonl(folder / "lines.jsonl", lines)
    dataset = PreferenceDataset([folder / "lines.jsonl"], tokenizer, SETTINGS | settings, (1.0, 0.0))
    return [dataset[index] for index in range(len(dataset))]


def test_a_pair_is_the_same_in_each_form(files: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    trl = {"prompt": "Q a:", "chosen": " bc", "rejected": " de"}
    aligner = {"prompt": "Q a:", "chosen_response": " bc", "rejected_response": " de"}
    rewarded = aligner | {"chosen_reward": 3, "rejected_reward": -0.5}
    (first,) = pairs(tmp_path, tokenizer, trl)
    assert pairs(tmp_path, tokenizer, aligner, rewarded)[0] == first
    assert pairs(tmp_path, tokenizer, rewarded)[0].labels == (3.0, -0.5)
    assert first.prompt_lengths == (4, 4) and first.labels == (1.0, 0.0)
    assert [tokenizer.ids_to_text(ids[4:]) for ids in first.token_ids] == [" bc", " de"]
    # Where the line does not say, what both share is the prompt.
    (consecutive,) = pairs(tmp_path, tokenizer, {"text": "Q a: bc"}, {"text": "Q a: de"})
    assert consecutive.token_ids == first.token_ids and consecutive.prompt_lengths == (5, 5)
    (prefix,) = pairs(tmp_path, tokenizer, {"chosen": "Q a: bc", "rejected": "Q a: b"})
    assert prefix.prompt_lengths == (5, 5)  # each has a token to learn


def test_pairs_that_are_none_are_told(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = {"prompt": "Q a:", "chosen": " bc", "rejected": " de"}
    pairs(tmp_path, tokenizer, pair, pair | {"chosen": "Q a: bc"})
    assert not caplog.records
    pairs(tmp_path, tokenizer, pair, pair | {"chosen": "Q a: bc", "rejected": "Q a: de"})
    assert "in 1 of 2 pairs, both responses begin with the 'prompt', which is then in the text twice" in caplog.text
    tokenizer.chat_template = CHATML
    asked, other = [[{"role": "user", "content": c}] for c in "ab"]
    answers = [{"role": "assistant", "content": c} for c in "cd"]
    pairs(tmp_path, tokenizer, {"chosen": [*asked, answers[0]], "rejected": [*other, answers[1]]})
    tokenizer.chat_template = None
    assert "in 1 of 1 pairs, the chosen and the rejected response are to different prompts" in caplog.text


PAIR = {"prompt": "Q a:", "chosen": " bc", "rejected": " de"}
ASKED, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("lines", "kept", "message"),
    [
        ([PAIR, PAIR | {"chosen": ""}], 1, "dropped 1 of 2 pairs: with an empty response"),
        ([PAIR, PAIR | {"chosen": " "}], 2, "1 responses are empty: leave their lines out"),
        ([PAIR, PAIR | {"prompt": None}], 2, "1 of 2 pairs do not say where their responses begin"),
        ([PAIR | {"chosen_reward": 3, "rejected_reward": 1}, PAIR], 2, "in 1 of 2 pairs, a reward is missing"),
        ([PAIR | {"chosen_reward": 3}], 1, "in 1 of 1 pairs, a reward is missing"),
        ([PAIR | {"chosen_reward": 1, "rejected_reward": 3}], 1, "the rejected response has the larger reward"),
        ([PAIR | {"context": "zz"}], 1, "lines have 'context' (1 of them), which the text does not have"),
    ],
)
def test_what_changes_on_its_way_in_is_told(
    lines: list[dict[str, Any]],
    kept: int,
    message: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(pairs(tmp_path, tokenizer, *lines)) == kept
    assert message in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (PAIR | {"rejected": [ANSWER]}, "'chosen' and 'rejected' should both be texts"),
        (PAIR | {"chosen_response": "x", "rejected_response": "y"}, "'chosen' and 'chosen_response' may be different"),
        ({"prompt": [ASKED, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]}, "would be a second answer"),
        ({"system": "SYS", "chosen": "SYS b", "rejected": "c"}, "'system' is no part of the text"),
        (PAIR | {"chosen_reward": 10**400}, "'chosen_reward' should be a finite number, not 1000"),
        (PAIR | {"chosen": "", "rejected": "x"}, "all 1 pairs are with an empty response"),
    ],
)
def test_pairs_that_cannot_be_meant_are_refused(
    line: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        pairs(tmp_path, tokenizer, line)


def test_examples_for_fine_tuning_are_no_pairs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Which two turns of strangers would be: the error names the form. Two answers to one question are a pair."""
    tokenizer.chat_template = CHATML
    ask, answer = (lambda c: {"role": "user", "content": c}), (lambda c: {"role": "assistant", "content": c})
    asked = [{"messages": [ask(q), answer(q * 2)]} for q in "abcd"]
    alpaca = [{"instruction": q, "input": "", "output": q * 2} for q in "abcd"]
    for lines in (asked, asked[:2], alpaca):
        with pytest.raises(DataError, match=r"no two lines have the same prompt.*'prompt', 'chosen', 'rejected'"):
            pairs(tmp_path, tokenizer, *lines)
    better = [asked[0], {"messages": [ask("a"), answer("b")]}]
    assert len(pairs(tmp_path, tokenizer, *better, *asked[2:])) == 2
    tokenizer.chat_template = None


def test_conversations_are_rendered_by_the_template(files: Path, tmp_path: Path) -> None:
    tokenizer = load_nemo_tokenizer(files / "base.nemo")
    tokenizer.chat_template = CHATML
    question, good, bad = (
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("assistant", "c")]
    )
    trl = {"prompt": [question], "chosen": [good], "rejected": [bad]}
    whole = {"chosen": [question, good], "rejected": [question, bad]}
    aligner = {"prompt": [question], "chosen_response": good, "rejected_response": bad}
    (first,) = pairs(tmp_path, tokenizer, trl)
    for line in (whole, aligner):
        assert pairs(tmp_path, tokenizer, line) == [first], line
    judged = {"prompt": [question], "completion": [bad], "label": False}
    write_jsonl(tmp_path / "judged.jsonl", [judged])
    item = JudgedDataset([tmp_path / "judged.jsonl"], tokenizer, SETTINGS)[0]
    assert (item.token_ids, item.prompt_length) == (first.token_ids[1], first.prompt_lengths[1])
    asked = tokenizer.ids_to_text(first.token_ids[0][: first.prompt_lengths[0]], keep_special=True)
    assert "a" in asked and "b" not in asked


def test_judged_responses_and_their_mismatches(files: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    trl = [{"prompt": f"Q {c}:", "completion": f" {c}{c}", "label": c < "c"} for c in "abcde"]
    aligner = [
        {
            "prompt": line["prompt"],
            "response": line["completion"],
            "preference": "chosen" if line["label"] else "rejected",
        }
        for line in trl
    ]
    read = []
    for lines in (trl, aligner):
        write_jsonl(tmp_path / "lines.jsonl", lines)
        data = JudgedDataset([tmp_path / "lines.jsonl"], tokenizer, SETTINGS)
        read.append([data[index] for index in range(5)])
    assert read[0] == read[1] and [item.is_good for item in read[0]] == [True, True, False, False, False]
    mismatched = MismatchedDataset(data, seed=1, seq_length=6)
    texts = [tokenizer.ids_to_text(mismatched[index].token_ids[1]) for index in range(5)]
    for line, text in zip(trl, texts, strict=True):
        assert text.startswith(line["prompt"]) and len(text) == 6 and line["completion"][:2] != text[4:]
    assert len({text[4:] for text in texts}) == 5  # each response once
    several = [dataclasses.replace(data[n % 3], token_ids=[9, n % 3, 50 + n], prompt_length=2) for n in range(9)]
    for seed in range(20):  # several responses to each prompt: the other one is another prompt's
        mismatched = MismatchedDataset(several, seed=seed, seq_length=6)
        others = [mismatched[index].token_ids[1][-1] - 50 for index in range(9)]
        assert all(n % 3 != other % 3 for n, other in enumerate(others)) and len(set(others)) > 3
    for one_prompt in ([data[0]], [data[0], data[0]]):
        with pytest.raises(DataError, match="KTO needs two responses at least, to different prompts"):
            MismatchedDataset(one_prompt, seed=1, seq_length=6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": 1}, "'label': true or false}; 'label' is 1"),
        ({"prompt": "a", "response": "b", "preference": "good"}, "'preference' is 'good'"),
        ({"prompt": "", "completion": "b", "label": True}, "'prompt' is missing or empty"),
        ({"prompt": "a", "label": True}, "key 'completion' is missing"),
        ({"prompt": "a", "completion": "b", "response": "c", "label": True}, "may be different ones: remove one"),
        ({"prompt": "a", "completion": "", "label": True}, "all 1 responses are with an empty response"),
    ],
)
def test_judged_lines_that_say_something_else_are_refused(
    line: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "lines.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=r"lines.jsonl:(1:)? ") as raised:
        JudgedDataset([tmp_path / "lines.jsonl"], tokenizer, SETTINGS)
    assert message in str(raised.value)


def test_a_reward_that_is_no_number_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for reward, message in (("high", "a number"), (math.nan, "a finite number"), (math.inf, "a finite number")):
        with pytest.raises(DataError, match=f"'chosen_reward' should be {message}"):
            pairs(tmp_path, tokenizer, {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_reward": reward})
    assert math.isfinite(pairs(tmp_path, tokenizer, {"prompt": "a", "chosen": "b", "rejected": "c"})[0].labels[0])
