"""JSONL files, datasets, batches and samplers."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import sentencepiece
import torch
from small_models import chatml_tokenizer

from nemo_style_aligner.engine.text.chats import ChatPromptTokens
from nemo_style_aligner.engine.text.jsonl import DataError, read_jsonl, write_jsonl
from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import SFT, PPOActor, RewardTraining
from nemo_style_aligner.trainer.data.datasets import (
    BlendedDataset,
    ComparisonDataset,
    DataPrefix,
    DataSource,
    PromptDataset,
    PromptItem,
    RegressionDataset,
    lengths_of,
    load_data_prefix,
    pad_rows,
)
from nemo_style_aligner.trainer.data.samplers import EpochSampler
from nemo_style_aligner.trainer.data.sft import SFTDataset, SFTFormat, SFTItem
from nemo_style_aligner.trainer.jobs import supervised_setup
from nemo_style_aligner.trainer.jobs.supervised_setup import SupervisedTask, reward_task, sft_task
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.optimizer import Schedule
from nemo_style_aligner.trainer.rl.loop import RLTrainer
from nemo_style_aligner.trainer.rl.rollouts.prompts import PromptSource, build_prompt_sources
from nemo_style_aligner.trainer.rl.settings import RLSettings


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("tokenizer"), "\x00\x11\x12", ends_turns=False)


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# ---- JSONL ------------------------------------------------------------------------------------


def test_read_jsonl_keeps_order_and_places(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "é"}, "", {"text": "b", "n": 1})
    assert [(record.line, record.text("text")) for record in read_jsonl(path)] == [(1, "é"), (3, "b")]


@pytest.mark.parametrize(
    "line, complaint",
    [
        ('{"text": "a"', "not valid JSON: .* at column 13"),  # where the line ends
        ("plain words", "not valid JSON"),
        ('["text"]', "should be an object"),
        ('{"txt": "a"}', "key 'text' is missing .* the keys present are: 'txt'"),
        (
            '{"query": "a", "answer": "b"}',
            "'text' is missing .*'messages'.*'user', 'content': what is in 'query'",
        ),
        ('{"text": 3}', "'text' should be a string, not 3"),
        ('{"text": null}', "'text' should be a string, not null"),
        ('{"text": ""}', "'text' is empty"),
        (r'{"text": "a\ud800"}', r"'text' holds an unpaired surrogate, '\\ud800'"),
        ('{"text": "a", "text": "b"}', "cannot be read: an object has the key 'text' twice"),
        ('{"text": "a", "n": 1' + "0" * 5000 + "}", "cannot be read"),
        ('{"text": "a", "n": ' + "[" * 10**5 + "}", "cannot be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Tokenizer, line: str, complaint: str) -> None:
    path = jsonl(tmp_path / "bad.jsonl", {"text": "fine"}, "", line)
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{complaint}"):
        PromptDataset([path], tokenizer, 10)


def test_a_key_that_is_given_twice_is_found_among_many(tmp_path: Path) -> None:
    keys = ", ".join(f'"k{i}": 0' for i in range(60000))
    (tmp_path / "d").write_text(f'{{{keys}, "k59999": 1}}')
    began = time.process_time()
    with pytest.raises(DataError, match="has the key 'k59999' twice"):
        read_jsonl(tmp_path / "d")
    assert time.process_time() - began < 10  # not minutes


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: no such data file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"empty\.jsonl: the file holds no records"):
        read_jsonl(jsonl(tmp_path / "empty.jsonl", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        read_jsonl(tmp_path / "latin.jsonl")


def test_a_byte_order_mark_is_no_data(tmp_path: Path) -> None:
    for before in (b"", b"\r\n"):
        (tmp_path / "marked.jsonl").write_bytes(b"\xef\xbb\xbf" + before + b'{"text": "a"}\n')
        assert [record.line for record in read_jsonl(tmp_path / "marked.jsonl")] == [1 + bool(before)]


def test_write_jsonl_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    rows = [{"text": "a\nb é"}, {"text": "c"}]
    assert write_jsonl(path, rows) == 2
    assert [dict(record.fields) for record in read_jsonl(path)] == rows
    with pytest.raises(TypeError):
        write_jsonl(path, [{"text": "d"}, {"text": object()}])
    assert len(read_jsonl(path)) == 2 and [p.name for p in path.parent.iterdir()] == ["out.jsonl"]


# ---- prompts ----------------------------------------------------------------------------------


def test_long_prompts_are_dropped_with_one_count(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(
        tmp_path / "p.jsonl", {"text": "123", "answer": "6"}, {"text": "12345"}, {"text": "1234"}, {"text": "6" * 9}
    )
    with caplog.at_level(logging.WARNING):
        prompts = PromptDataset([path], tokenizer, max_prompt_length=4)
    assert [prompt.line["text"] for prompt in (prompts[0], prompts[1])] == ["123", "1234"]
    assert len(prompts) == 2 and prompts.counts["long"] == 2
    assert prompts[0].line["answer"] == "6" and prompts[1].line.keys() == {"text"}
    assert prompts[0].token_ids == tokenizer.text_to_ids("123")
    assert len(caplog.records) == 1 and "dropped 2 of 4 prompts" in caplog.text
    with pytest.raises(IndexError):
        prompts[2]
    with pytest.raises(DataError, match=r"all 4 prompts are longer than 2 tokens \(--max-length\); change the limit"):
        PromptDataset([path], tokenizer, max_prompt_length=2, limited_by="--max-length")


def test_prompts_of_the_actor_leave_room_for_their_bos_token_and_a_response(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokenizer, "bos_id", 9)
    files = {
        name: [str(jsonl(tmp_path / f"{name}.jsonl", *({"text": "a" * n} for n in range(1, longest + 1))))]
        for name, longest in (("train", 11), ("validation", 5))
    }
    cfg = load_defaults("gpt_ppo_actor")
    cfg.model.data.update(seq_length=12, data_prefix=files)
    cfg.model.ppo.length_params.max_length = 4
    cfg.model.ppo.update(num_rollout_samples=2, num_val_samples=3)
    cfg.model.ppo.sampling_params.add_BOS = True
    train, validation = build_prompt_sources(PPOActor.read(cfg), tokenizer)
    assert validation is not None
    assert train.longest + 4 == 12 and (train.batch_size, validation.batch_size) == (2, 3)
    assert [prompt.token_ids for prompt in validation.batch(0)] == [
        [9, *tokenizer.text_to_ids("a" * n)] for n in (1, 2, 3)
    ]
    assert "longer than 8 tokens (model.data.seq_length less model.ppo.length_params.max_length)" in caplog.text
    cfg.model.ppo.num_val_samples = 99
    cfg.model.ppo.sampling_params.add_BOS = False
    cfg.trainer.ppo.trt_llm.max_input_len = 6
    train, validation = build_prompt_sources(PPOActor.read(cfg), tokenizer)
    assert validation is not None and (train.longest, validation.batch_size) == (6, 5)
    assert "longer than 6 tokens (trainer.ppo.trt_llm.max_input_len)" in caplog.text
    cfg.model.ppo.num_rollout_samples = 7
    with pytest.raises(DataError, match=r"prompts 6 can be used, fewer than model\.ppo\.num_rollout_samples=7"):
        build_prompt_sources(PPOActor.read(cfg), tokenizer)


# ---- comparisons ------------------------------------------------------------------------------


def reward_batch(tokenizer: Tokenizer, path: Path, seq_length: int, present: list[int], **model: Any) -> Any:
    """The batch that the reward model's job makes of a file's first examples, filled up where ``present`` is 0."""
    cfg = load_defaults("training_rm")
    cfg.model.data.update(data_prefix={"train": [str(path)]}, seq_length=seq_length)
    cfg.model.merge_with({"global_batch_size": 1, **model})
    task = reward_task(RewardTraining.read(cfg), tokenizer, RewardHeadConfig.from_model_config(cfg.model))
    return batch_of(task, present)


def batch_of(task: SupervisedTask, present: list[int]) -> Any:
    examples = [task.train[number if is_present else 0] for number, is_present in enumerate(present)]
    return task.collate(examples, torch.tensor(present, dtype=torch.float32))


def test_comparisons_are_consecutive_lines(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = jsonl(tmp_path / "a.jsonl", *({"text": t} for t in ["good", "bad", "much too long", "x", "y", "longer"]))
    pairs = ComparisonDataset([a], tokenizer, seq_length=8)
    assert (len(pairs), pairs.counts["long"]) == (2, 1)
    ids = tokenizer.text_to_ids
    assert (pairs[0].chosen_ids, pairs[0].rejected_ids) == (ids("good"), ids("bad"))
    assert (pairs[1].chosen_ids, pairs[1].rejected_ids) == (ids("y"), ids("longer"))
    longest = max(len(ids("y")), len(ids("longer")))
    assert [len(ComparisonDataset([a], tokenizer, length)) for length in (longest - 1, longest)] == [1, 2]
    ended = ComparisonDataset([a], tokenizer, seq_length=8, append_eod=True)
    assert ended[0].rejected_ids == [*ids("bad"), tokenizer.eos_id]
    b = jsonl(tmp_path / "b.jsonl", {"text": "good<|endoftext|>"}, {"text": "bad<|im_end|>"})
    for stops, rejected in (([], "bad<|im_end|><|endoftext|>"), (["<|im_end|>"], "bad<|im_end|>")):
        stop_ids = [tokenizer.token_to_id(stop) for stop in stops]
        monkeypatch.setattr(tokenizer, "generation_config", json.dumps({"eos_token_id": stop_ids}))
        ended = ComparisonDataset([b], tokenizer, seq_length=8, append_eod=True)
        assert (ended[0].chosen_ids, ended[0].rejected_ids) == (ids("good<|endoftext|>"), ids(rejected))

    batch = reward_batch(tokenizer, a, 8, [1, 1, 0])
    assert batch.tokens.shape == (6, 6) and batch.tokens.dtype == batch.lengths.dtype == torch.int64
    assert batch.lengths.tolist() == [4, 3, 1, 6, 4, 3]
    assert batch.tokens[1].tolist() == ids("bad") + [tokenizer.pad_id] * 3
    assert torch.equal(batch.tokens[4:], batch.tokens[:2]) and batch.weights.tolist() == [1, 1, 1, 1, 0, 0]


def test_an_odd_number_of_comparisons_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    even = jsonl(tmp_path / "even.jsonl", {"text": "a"}, {"text": "b"})
    odd = jsonl(tmp_path / "odd.jsonl", {"text": "a"}, {"text": "b"}, {"text": "c"})
    with pytest.raises(DataError, match=r"odd\.jsonl:3: .*odd number"):
        ComparisonDataset([even, odd, odd], tokenizer, 8)
    pairs = jsonl(tmp_path / "pairs.jsonl", {"input": "a", "output": "b"})  # another kind of file, whatever its length
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: there is neither a 'text'.*'input', 'output'.*are for SFT"):
        ComparisonDataset([pairs], tokenizer, 8)


def test_texts_that_are_no_pairs_are_warned_of(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """All begin alike: with the template. Prompts, and pairs of which one line is missing, share no more than that."""
    sums = [(7 * i % 10, 3 * i % 7) for i in range(25)]
    pairs = [{"text": f"What is {a}+{b}? {answer}"} for a, b in sums for answer in (a + b, a - b - 7)]
    right = jsonl(tmp_path / "right.jsonl", *pairs)
    assert len(ComparisonDataset([right], tokenizer, 64)) == 25 and not caplog.text
    prompts = jsonl(tmp_path / "prompts.jsonl", *({"text": f"What is {a}+{b}?"} for a, b in [*sums, (9, 9)]))
    shifted = jsonl(tmp_path / "shifted.jsonl", *pairs[1:-1])
    for wrong in (prompts, shifted):
        caplog.clear()
        ComparisonDataset([wrong], tokenizer, 64)
        assert f"{wrong}: in " in caplog.text and "share no longer a prefix than texts of different" in caplog.text


CHOSEN = {"role": "assistant", "content": "4"}
REJECTED = {"role": "assistant", "content": "5"}
QUESTION = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize(
    "row, good",
    [
        ({"prompt": "2+2? ", "chosen": "4", "rejected": "5"}, "2+2? 4$"),
        ({"chosen": "2+2? 4", "rejected": "2+2? 5"}, "2+2? 4$"),
        ({"prompt": [QUESTION], "chosen": [CHOSEN], "rejected": [REJECTED]}, None),
        ({"prompt": None, "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}, None),
        ({"prompt": "2+2?", "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}, None),
        ({"prompt": "2+2?", "chosen": [CHOSEN], "rejected": [REJECTED]}, None),
        ({"prompt": [QUESTION], "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}, None),
        # Answers that say what the prompt says.
        ({"prompt": "4", "chosen": [CHOSEN], "rejected": [REJECTED]}, "[user\n4]\n[assistant\n4]"),
    ],
)
def test_both_responses_on_a_line(tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], good: str | None) -> None:
    """A chat ends with its template's end of a turn, without the line break behind it, and no other end."""
    good = good or "[user\n2+2?]\n[assistant\n4]"
    path = jsonl(tmp_path / "pairs.jsonl", row, row)
    data = ComparisonDataset([path], tokenizer, 64, append_eod=True)
    assert len(data) == 2
    assert spell(tokenizer, data[0].chosen_ids) == good
    assert spell(tokenizer, data[0].rejected_ids) == "5".join(good.rsplit("4", 1))
    data = ComparisonDataset([path], tokenizer, 64)
    assert spell(tokenizer, data[1].chosen_ids) == good.removesuffix("$")


@pytest.mark.parametrize(
    "row, complaint",
    [
        ({"prompt": "a", "chosen": "b"}, "key 'rejected' is missing"),
        ({"text": "a"}, "key 'chosen' is missing"),
        ({"prompt": [QUESTION], "chosen": "4", "rejected": "5"}, "give both in the same form"),
        ({"chosen": [CHOSEN], "rejected": "5", "prompt": 3}, "'prompt' should be a string, or a list of messages"),
        ({"chosen": ["4"], "rejected": ["5"]}, "'chosen' should be a list of objects, one per turn"),
        ({"chosen": [{"role": "assistant"}], "rejected": [REJECTED]}, "key 'content' is missing"),
        ({"prompt": "2+3?", "chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]}, "'prompt' is none of the"),
    ],
)
def test_bad_lines_of_both_responses_are_named(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], complaint: str
) -> None:
    path = jsonl(tmp_path / "pairs.jsonl", {"chosen": "a", "rejected": "b"}, row)
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{complaint}"):
        ComparisonDataset([path], tokenizer, 64)


def test_chats_of_both_responses_need_a_template_that_has_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = jsonl(tmp_path / "pairs.jsonl", {"chosen": [QUESTION, CHOSEN], "rejected": [QUESTION, REJECTED]})
    without = train_character_tokenizer("ab", tmp_path / "without")
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: this tokenizer has no chat template.* responses are text$"):
        ComparisonDataset([path], without, 64)
    forgetful = with_template(tokenizer, tmp_path / "forgetful", "{{ messages[0].content }}<|im_end|>")
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: .*leaves out the text of turn 2, whose role is 'assistant'"):
        ComparisonDataset([path], forgetful, 64)


def test_an_unknown_character_at_the_end_of_a_chat_does_not_end_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = with_template(tokenizer, tmp_path / "t", "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")
    cafe = {"role": "assistant", "content": "caf\u00e9"}
    path = jsonl(tmp_path / "pairs.jsonl", {"chosen": [QUESTION, cafe], "rejected": [QUESTION, REJECTED]})
    pair = ComparisonDataset([path], plain, 64, append_eod=True)[0]
    assert pair.chosen_ids[-2:] == [plain.unk_id, plain.eos_id] and pair.rejected_ids[-1] == plain.eos_id


# ---- regression -------------------------------------------------------------------------------


def test_regression_labels(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = jsonl(tmp_path / "r.jsonl", {"text": "abc", "label": [1, -100]}, {"text": "d" * 9, "label": [0, 0]},
                 {"text": "e", "label": [0.5, 2]})  # fmt: skip
    data = RegressionDataset([path], tokenizer, seq_length=8)
    assert (len(data), data.counts["long"]) == (2, 1)
    regression: dict[str, Any] = {"reward_model_type": "regression", "regression": {"num_attributes": 2}}
    batch = reward_batch(tokenizer, path, 8, [1, 1, 0], **regression)
    assert batch.labels.tolist() == [[1, -100], [0.5, 2], [-100, -100]] and batch.labels.dtype == torch.float32
    assert batch.lengths.tolist() == [3, 1, 3] and batch.tokens.shape == (3, 3)
    regression["regression"]["loss_mask_val"] = -7
    assert reward_batch(tokenizer, path, 8, [0], **regression).labels.tolist() == [[-7, -7]]
    single = RegressionDataset([jsonl(tmp_path / "s.jsonl", {"text": "a", "label": 3})], tokenizer, 8)
    assert single[0].labels == [3.0]
    with pytest.raises(DataError, match=r"r\.jsonl:1: 'label' has 2 attributes where 1 are expected"):
        RegressionDataset([path], tokenizer, 8, num_attributes=1)


@pytest.mark.parametrize("label", ['"good"', "[]", '[1, "a"]', "true", "[1, true]", "[NaN]", "null", "1" + "0" * 400])
def test_bad_labels_are_named(tmp_path: Path, tokenizer: Tokenizer, label: str) -> None:
    path = jsonl(tmp_path / "r.jsonl", f'{{"text": "a", "label": {label}}}')
    with pytest.raises(DataError, match=r"r\.jsonl:1: 'label' should be"):
        RegressionDataset([path], tokenizer, 8)


def test_the_reward_model_job_ends_texts_and_orders_them_as_its_config_says(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    pairs = jsonl(tmp_path / "c.jsonl", {"text": "good"}, {"text": "bad"})
    labelled = jsonl(tmp_path / "l.jsonl", {"text": "good", "label": 1})
    ids = tokenizer.text_to_ids("good")
    cfg = load_defaults("training_rm")
    cfg.model.global_batch_size = 1
    for append_eod, shuffles in ((False, (True, False)), (True, (False, True))):
        cfg.model.data.update(seq_length=9, append_eod=append_eod)
        cfg.trainer.rm.update(train_random_sampler=shuffles[0], val_random_sampler=shuffles[1])
        for kind, file in (("binary_ranking", pairs), ("regression", labelled)):
            cfg.model.reward_model_type = kind
            cfg.model.data.data_prefix = {"train": [str(file)], "validation": [str(file)]}
            task = reward_task(RewardTraining.read(cfg), tokenizer, RewardHeadConfig())
            assert task.validation is not None
            for item in (task.train[0], task.validation[0]):
                given = item.token_ids if kind == "regression" else item.chosen_ids
                assert given == (ids + [tokenizer.eos_id] if append_eod else ids)
            assert (task.shuffle_train, task.shuffle_validation) == shuffles


# ---- SFT: pairs -------------------------------------------------------------------------------


def sft_format(**changes: Any) -> SFTFormat:
    options: dict[str, Any] = {
        "max_seq_length": 64, "min_seq_length": 1, "prompt_template": "{input} {output}", "label_key": "output",
        "truncation_field": "input", "truncation_method": "right", "add_bos": False, "add_eos": True,
        "add_sep": False, "answer_only_loss": True, "chats_only": False,
    }  # fmt: skip
    return SFTFormat(**(options | changes))


def sft(tmp_path: Path, tokenizer: Tokenizer, *rows: Any, **changes: Any) -> SFTDataset:
    return SFTDataset([jsonl(tmp_path / "sft.jsonl", *rows)], tokenizer, sft_format(**changes))


def spell(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Tokens as text, special ones visible."""
    special = {
        tokenizer.eos_id: "$",
        tokenizer.token_to_id("<|im_start|>"): "[",
        tokenizer.token_to_id("<|im_end|>"): "]",
    }
    return "".join(special[i] if i in special else tokenizer.ids_to_text([i]) for i in ids)


def learnt(tokenizer: Tokenizer, item: SFTItem) -> str:
    """The sample as text, with `_` for tokens that are not learnt."""
    marks = [i if target else None for i, target in zip(item.token_ids, item.targets, strict=True)]
    return "".join("_" if i is None else spell(tokenizer, [i]) for i in marks)


def test_pair_has_loss_on_the_response_and_its_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"input": "User: 6+10?", "output": "16", "category": "sums"}
    item = sft(tmp_path, tokenizer, row)[0]
    assert spell(tokenizer, item.token_ids) == "User: 6+10? 16$"
    assert learnt(tokenizer, item) == "___________ 16$"
    spaced = {"input": " User: 6+10? ", "output": " 16  "}  # NeMo strips spaces, and nothing else
    assert sft(tmp_path, tokenizer, spaced)[0] == item
    assert spell(tokenizer, sft(tmp_path, tokenizer, row | {"output": "16\n"})[0].token_ids).endswith("16\n$")
    assert sum(sft(tmp_path, tokenizer, row, answer_only_loss=False)[0].targets) == 15
    assert spell(tokenizer, sft(tmp_path, tokenizer, row, add_eos=False)[0].token_ids) == "User: 6+10? 16"
    separated = sft(tmp_path, tokenizer, row, add_sep=True)[0]
    assert learnt(tokenizer, separated) == "____________ 16$" and separated.token_ids[11] == 0
    with pytest.raises(TokenizerError, match=r"model.data.\*.add_bos=True"):
        sft(tmp_path, tokenizer, row, add_bos=True)


def test_keys_of_other_names_are_an_error_with_the_options_that_name_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"prompt": "q", "completion": "a"}
    with pytest.raises(DataError, match=r"sft\.jsonl:1: key 'input' is missing.*'prompt', 'completion'") as error:
        sft(tmp_path, tokenizer, row)
    options = dict(re.findall(r"model\.data\.train_ds\.(\w+)=((?<=e=)[^']*(?=')|\w+)", str(error.value)))
    item = sft(tmp_path, tokenizer, row, **options)[0]
    assert spell(tokenizer, item.token_ids) == "q a$"


def test_template_with_several_fields(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"context": "c", "question": "q", "answer": "a"}
    options = {
        "prompt_template": "C: {context} Q: {question}\nA:{answer}",
        "label_key": "answer",
        "truncation_field": "",
    }
    item = sft(tmp_path, tokenizer, row, **options)[0]
    assert spell(tokenizer, item.token_ids) == "C: c Q: q\nA:a$" and learnt(tokenizer, item).lstrip("_") == "a$"
    with pytest.raises(DataError, match=r"sft\.jsonl:1: key 'context' is missing"):
        sft(tmp_path, tokenizer, {"question": "q", "answer": "a"}, **options)


@pytest.mark.parametrize(
    "changes, want",
    [
        ({"max_seq_length": 12}, "abcdefgh XY$"),
        ({"max_seq_length": 8}, "abcd XY$"),
        ({"max_seq_length": 8, "truncation_method": "left"}, "efgh XY$"),
        ({"max_seq_length": 9, "add_sep": True}, "abcd$ XY$"),
        ({"max_seq_length": 8, "truncation_field": "output"}, "abcdefgh"),  # no room for any response: dropped
        ({"max_seq_length": 10, "truncation_field": "output, input"}, "abcdefgh"),  # the same
        ({"max_seq_length": 8, "truncation_field": "output", "answer_only_loss": False}, "abcdefgh"),
        ({"max_seq_length": 11, "truncation_field": ""}, "abcdefgh XY"),  # the response's end is cut
    ],
)
def test_truncation(tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any], want: str) -> None:
    rows = [{"input": "abcdefgh", "output": "XY"}, {"input": "i", "output": "o"}]
    data = sft(tmp_path, tokenizer, *rows, **changes)
    if want == "abcdefgh":
        assert data.counts["dropped"] == 1
    else:
        assert spell(tokenizer, data[0].token_ids) == want and data.counts["dropped"] == 0


@pytest.mark.parametrize("method, want", [("right", "ab XY$"), ("left", "fgh XY$")])
def test_what_is_left_of_a_shortened_field_has_no_spaces_at_its_edges(
    tmp_path: Path, tokenizer: Tokenizer, method: str, want: str
) -> None:
    """Beside the template's own there would be two."""
    row = {"input": "ab def gh" if method == "right" else "ab c fgh", "output": "XY"}
    data = sft(tmp_path, tokenizer, row, max_seq_length=7 if method == "right" else 8, truncation_method=method)
    assert spell(tokenizer, data[0].token_ids) == want


def test_what_is_shortened_is_counted(tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """To 10 tokens: in nothing, the prompt, the response, both, nothing; a chat is left out."""
    pairs = [("ab", "cd"), ("abcdefghij", "cd"), ("ab", "cdefghijkl"), ("a" * 9, "b" * 9), ("a", "")]
    rows = [{"input": prompt, "output": response} for prompt, response in pairs]
    rows.append({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]})
    sft(tmp_path, tokenizer, *rows[:1], max_seq_length=10)
    assert "shortened" not in caplog.text
    data = sft(tmp_path, tokenizer, *rows, max_seq_length=10, truncation_field="input")
    assert (len(data), data.counts["dropped"], data.counts["shortened"]) == (5, 1, 3)
    assert "sft.jsonl: shortened 3 of 6 samples to 10 tokens (max_seq_length, model.encoder_seq_length)" in caplog.text
    assert "truncation_field=input first: 2 of them lost a part of a response" in caplog.text
    caplog.clear()
    data = sft(tmp_path, tokenizer, MESSAGES, max_seq_length=40)  # of two responses the second is cut off
    assert data.counts["shortened"] == 1 and "1 of them lost a part of a response" in caplog.text


@pytest.mark.parametrize("method, want", [("right", "[abcdef]g XY$"), ("left", "abcdef]gh XY$")])
def test_shortened_fields_keep_their_markup(tmp_path: Path, tokenizer: Tokenizer, method: str, want: str) -> None:
    row = {"input": "<|im_start|>abcdef<|im_end|>gh", "output": "XY"}
    (item,) = sft(tmp_path, tokenizer, row, max_seq_length=len(want) - want.count("_"), truncation_method=method)
    assert spell(tokenizer, item.token_ids) == want


def test_short_samples_are_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"input": "a", "output": "b"}, {"input": "abcdef", "output": "b"}]
    data = sft(tmp_path, tokenizer, *rows, min_seq_length=5)
    assert len(data) == data.counts["dropped"] == 1
    options = {"prompt_template": "{output}", "truncation_field": "", "add_eos": False}
    data = sft(tmp_path, tokenizer, {"output": "a"}, {"output": "bc"}, **options)
    assert spell(tokenizer, data[0].token_ids) == "bc" and data.counts["dropped"] == 1  # nothing comes before the "a"


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"prompt_template": "{output} {input}"}, r"should end with \{output\}"),
        ({"prompt_template": "{input} {output} {output}"}, r"should end with \{output\}"),
        ({"label_key": "answer"}, r"should end with \{answer\}"),
        ({"truncation_field": "context"}, "'context' is not in prompt_template"),
    ],
)
def test_bad_formats_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        sft_format(**changes)


@pytest.mark.parametrize("part", ["train_ds", "validation_ds"])
def test_every_key_of_fine_tuning_data_is_heeded(
    part: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SFTFormat] = []

    class Made(tuple):
        written = TextFormat()

    def make(paths: Any, tokenizer: Tokenizer, options: SFTFormat) -> Made:
        made.append(options)
        return Made(SFTItem([1, 2], [0, len(Path(path).name)]) for path in paths)

    monkeypatch.setattr(supervised_setup, "SFTDataset", make)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    files = {name: jsonl(tmp_path / f"{name}.jsonl", {"text": "a"}) for name in ("train_ds", "validation_ds")}
    cfg = load_defaults("gpt_sft")
    for name, file in files.items():
        cfg.model.data[name].file_path = str(file)
    sft_task(SFT.read(cfg), tokenizer)
    markup = {name: f"<{name}>" for name in cfg.model.data.chat_prompt_tokens}
    general = {"answer_only_loss": False, "chats_only": True, "chat_prompt_tokens": ChatPromptTokens(**markup)}
    read = {
        "max_seq_length": 40, "min_seq_length": 3, "prompt_template": "{q}: {a}", "label_key": "a",
        "truncation_field": "q", "truncation_method": "left", "add_bos": True, "add_eos": False, "add_sep": True,
    }  # fmt: skip
    loop = {"shuffle": part == "validation_ds", "global_batch_size": 6, "micro_batch_size": 3}
    section = cfg.model.data[part]
    assert section.keys() == {"file_path", *read, *loop}
    assert not [key for key, value in (read | loop).items() if section[key] == value], "not away from its default"
    section.update(**read, **loop)
    cfg.model.answer_only_loss, cfg.model.data.chat, cfg.model.data.chat_prompt_tokens = False, True, markup
    task = sft_task(SFT.read(cfg), tokenizer)
    at = list(files).index(part)
    assert made[2:][at] == SFTFormat(**read, **general)
    if part == "validation_ds":
        assert made[2] == dataclasses.replace(made[0], **general)
        found = (task.shuffle_validation, task.val_global_batch_size, task.val_micro_batch_size)
    else:
        found = (task.shuffle_train, cfg.model.global_batch_size, cfg.model.micro_batch_size)
    assert found == tuple(loop.values())
    assert [task.train, task.validation] == [(SFTItem([1, 2], [0, len(file.name)]),) for file in files.values()]


def test_sft_batch_mask_is_aligned_with_next_token_prediction(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"input": "ab", "output": "c"}, {"input": "abcd", "output": "efg"}]
    cfg = load_defaults("gpt_sft")
    cfg.model.data.train_ds.file_path = str(jsonl(tmp_path / "sft.jsonl", *rows))
    cfg.model.data.validation_ds.file_path = None
    task = sft_task(SFT.read(cfg), tokenizer)
    batch = batch_of(task, [1, 1, 0])
    assert batch.tokens.shape == (3, 9) and batch.loss_mask.shape == (3, 8)
    assert batch.tokens.dtype == torch.int64 and batch.loss_mask.dtype == torch.float32
    for row, text in enumerate([" c$", " efg$"]):
        predicted = batch.tokens[row, 1:][batch.loss_mask[row] == 1]
        assert spell(tokenizer, predicted.tolist()) == text
    assert torch.all(batch.tokens[0, 5:] == tokenizer.pad_id)
    assert torch.equal(batch.tokens[2], batch.tokens[0]) and not batch.loss_mask[2].any()


# ---- SFT: chats -------------------------------------------------------------------------------

MESSAGES = {
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "u1"},
        {"role": "assistant", "content": "a1"},
        {"role": "user", "content": "u2"},
        {"role": "assistant", "content": "a2"},
    ]
}
CONVERSATIONS = {
    "system": "S",
    "mask": "User",
    "conversations": [
        {"from": "User", "value": "u1"},
        {"from": "Assistant", "value": "a1", "label": None},
        {"from": "User", "value": "u2"},
        {"from": "Assistant", "value": "a2"},
    ],
}
MARKUP = ChatPromptTokens(
    system_turn_start="\x00", turn_start="\x11", label_start="\x12", end_of_turn="\n", end_of_name="\n"
)


@pytest.mark.parametrize("row", [MESSAGES, CONVERSATIONS], ids=["openai", "nemo"])
def test_chat_template_has_loss_on_each_response_and_its_end_token(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any]
) -> None:
    item = sft(tmp_path, tokenizer, row, max_seq_length=200)[0]
    whole = "[system\nS]\n[user\nu1]\n[assistant\na1]\n[user\nu2]\n[assistant\na2]\n"
    assert spell(tokenizer, item.token_ids) == whole
    want = "".join("_" for _ in whole)
    for response in ("a1]", "a2]"):
        at = whole.index(response)
        want = want[:at] + response + want[at + 3 :]
    assert learnt(tokenizer, item) == want


@pytest.mark.parametrize("row", [MESSAGES, CONVERSATIONS], ids=["openai", "nemo"])
def test_nemo_markup_learns_responses_and_where_they_stop(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any]
) -> None:
    item = sft(tmp_path, tokenizer, row, max_seq_length=200, chat_prompt_tokens=MARKUP)[0]
    whole = "\x00System\nS\n\x11User\nu1\n\x11Assistant\na1\n\x11User\nu2\n\x11Assistant\na2\n\x11"
    assert spell(tokenizer, item.token_ids) == whole
    parts = ["\x00System\nS\n\x11User\nu1\n\x11Assistant\n", "User\nu2\n\x11Assistant\n"]
    assert learnt(tokenizer, item) == "_" * len(parts[0]) + "a1\n\x11" + "_" * len(parts[1]) + "a2\n\x11"


@pytest.mark.parametrize("markup, want", [(None, "a1]a2]"), (MARKUP, "a1\n\x11a2\n\x11")], ids=["template", "markup"])
def test_what_follows_the_last_response_is_not_learnt(
    tmp_path: Path, tokenizer: Tokenizer, markup: ChatPromptTokens | None, want: str
) -> None:
    row = {"messages": [*MESSAGES["messages"], {"role": "user", "content": "u3"}]}
    unlearnt = {"messages": [turn | {"weight": 0} for turn in MESSAGES["messages"]]}
    data = sft(tmp_path, tokenizer, row, unlearnt, max_seq_length=200, chat_prompt_tokens=markup)
    assert len(data) == data.counts["dropped"] == 1
    assert spell(tokenizer, data[0].token_ids).endswith("ser\nu3\n" if markup else "ser\nu3]\n")
    assert learnt(tokenizer, data[0]).replace("_", "") == want


def test_a_chat_has_the_tokens_that_its_prompts_have_in_ppo(tmp_path: Path) -> None:
    """sentencepiece puts a space before every text: before the chat's first part only, as in PPO's prompts."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("System\nUser\nhello Assistant\nfine thanks bye\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tiny"), vocab_size=300, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "tiny.model")
    turns = [("User", "hello"), ("Assistant", "fine thanks"), ("User", "hello"), ("Assistant", "bye")]
    row = {"mask": "User", "conversations": [{"from": role, "value": text} for role, text in turns]}
    item = sft(tmp_path, tokenizer, row, max_seq_length=200, chat_prompt_tokens=MARKUP)[0]
    first = "\x00System\n\n\x11User\nhello\n\x11Assistant\n"
    second = f"{first}fine thanks\n\x11User\nhello\n\x11Assistant\n"
    assert item.token_ids == tokenizer.text_to_ids(f"{second}bye\n\x11")
    starts = [len(tokenizer.text_to_ids(prompt)) for prompt in (first, second)]
    assert [i for i in range(1, len(item.targets)) if item.targets[i] > item.targets[i - 1]] == starts


def test_nemo_labels_and_other_masks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {
        "mask": "Bot",
        "conversations": [{"from": "Bot", "value": "b"}, {"from": "Guest", "value": "g", "label": "quality:4"}],
    }
    item = sft(tmp_path, tokenizer, row, chat_prompt_tokens=MARKUP)[0]
    assert spell(tokenizer, item.token_ids) == "\x00System\n\n\x11Bot\nb\n\x11Guest\n\x12quality:4\ng\n\x11"
    assert learnt(tokenizer, item).strip("_") == "g\n\x11"


def test_system_turns_are_told_and_not_learnt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The first of all is the system prompt, as it is under the key ``system``; others are turns like any other."""
    turns = [("System", "S"), ("User", "q"), ("Assistant", "a"), ("System", "T"), ("User", "r"), ("Assistant", "b")]
    conversation = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    messages = {"messages": [{"role": role.lower(), "content": text} for role, text in turns]}
    named = {"system": "S", "conversations": conversation["conversations"][1:]}
    whole = "\x00System\nS\n\x11User\nq\n\x11Assistant\na\n\x11System\nT\n\x11User\nr\n\x11Assistant\nb\n\x11"
    for item in sft(tmp_path, tokenizer, conversation, messages, named, max_seq_length=200, chat_prompt_tokens=MARKUP):
        assert spell(tokenizer, item.token_ids) == whole
        assert learnt(tokenizer, item).replace("_", "") == "a\n\x11b\n\x11"
    for item in sft(tmp_path, tokenizer, conversation, messages, named, max_seq_length=200):
        assert learnt(tokenizer, item).replace("_", "") == "a]b]"


def test_the_masked_speaker_may_be_spelt_as_openai_does(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}]}
    item = sft(tmp_path, tokenizer, row, chat_prompt_tokens=MARKUP)[0]
    assert learnt(tokenizer, item).strip("_") == "a\n\x11"


def test_long_chats_are_cut_at_the_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    short = {"messages": MESSAGES["messages"][1:3]}
    rows = [MESSAGES, {"messages": [{"role": "user", "content": "u" * 80}, {"role": "assistant", "content": "a"}]}]
    data = sft(tmp_path, tokenizer, *rows, short, max_seq_length=40)
    assert (len(data), data.counts["dropped"]) == (2, 1)
    assert len(data[0].token_ids) == 40 and learnt(tokenizer, data[0]).strip("_") == "a1]"


@pytest.mark.parametrize(
    "row, changes, complaint",
    [
        ({"messages": []}, {}, "list of objects"),
        (
            {"conversations": [{"from": "Ann", "value": "q"}, {"from": "gpt", "value": "a"}]},
            {},
            "no turn is from 'User', whose turns are not learnt: set \"mask\" to one of Ann, gpt",
        ),
        ({"mask": None, "conversations": [{"from": "User", "value": "q"}]}, {}, "'mask' should be a string"),
        ({"messages": "hello"}, {}, "'messages' should be a list of turns"),
        ({"messages": [{"role": "user"}]}, {}, "key 'content' is missing"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, {}, "'content' holds an unpaired surrogate"),
        ({"system": "\ud83d", "conversations": []}, {}, "'system' holds an unpaired surrogate"),
        (
            {"conversations": [{"from": "User", "value": "a", "label": "\ud83d"}]},
            {},
            "'label' holds an unpaired surrogate",
        ),
        ({"conversations": [{"from": "User"}]}, {}, "key 'value' is missing"),
        ({"input": "a", "output": "b"}, {"chats_only": True}, "data.chat is on"),
    ],
)
def test_bad_chats_are_named(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=rf"sft\.jsonl:1: .*{complaint}"):
        sft(tmp_path, tokenizer, row, **changes)


# As Qwen3's: tools in the first turn, thoughts and calls in the assistant's, and thoughts left out of earlier ones.
TOOLS_TEMPLATE = """{%- if tools %}[tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}]{% endif %}
{%- for m in messages %}{{ m.role }}:
{%- if m.role == 'assistant' and m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 6}'}}],
}
SUM: list[dict[str, Any]] = [
    {"role": "user", "content": "q"},
    CALL,
    {"role": "tool", "content": "16", "tool_call_id": "1"},
]
THOUGHTFUL: dict[str, Any] = {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def with_template(tokenizer: Tokenizer, folder: Path, template: str) -> Tokenizer:
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def test_calls_tools_and_thoughts_reach_the_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"tools": TOOLS, "messages": [*SUM, THOUGHTFUL]}
    item = sft(tmp_path, with_template(tokenizer, tmp_path / "t", TOOLS_TEMPLATE), row, max_seq_length=200)[0]
    call = '<call>add {"a": 6}]'
    assert (
        spell(tokenizer, item.token_ids) == f"[tools add]user:q]assistant:{call}tool:16]assistant:<think>hm</think>a]"
    )
    assert learnt(tokenizer, item).replace("_", "") == f"{call}<think>hm</think>a]"
    marked = TOOLS_TEMPLATE.replace("<call>", "<|im_start|>")  # a special token, and not the response's end
    item = sft(tmp_path, with_template(tokenizer, tmp_path / "marked", marked), row, max_seq_length=200)[0]
    assert learnt(tokenizer, item).replace("_", "") == '[add {"a": 6}]<think>hm</think>a]'


@pytest.mark.parametrize("content", ["caf\u00e9 au lait", "caf\u00e9", "<|im_start|>a b"])
def test_responses_that_end_with_plain_text_are_learnt_whole(
    tmp_path: Path, tokenizer: Tokenizer, content: str
) -> None:
    """Neither an unknown character nor a special token within a response is its end."""
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    plain = with_template(tokenizer, tmp_path / "t", template + "{% if add_generation_prompt %}assistant:{% endif %}")
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]}
    item = sft(tmp_path, plain, chat)[0]
    start = len(plain.text_to_ids("user:q\nassistant:"))
    assert item.targets == [0] * start + [1] * (len(plain.text_to_ids(content + "\n")) + 1)
    assert item.token_ids[-1] == plain.eos_id  # the template leaves no other token to end with


def test_templates_that_take_no_null_as_content_take_empty_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    strict = TOOLS_TEMPLATE.replace("m.content or ''", "m.content + ''")
    item = sft(tmp_path, with_template(tokenizer, tmp_path / "t", strict), {"messages": SUM[:2]}, max_seq_length=200)[0]
    assert learnt(tokenizer, item).strip("_") == '<call>add {"a": 6}]'


def test_turns_of_weight_0_are_not_learnt_and_nulls_are_not_there(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Also where only the last response can be found, since thoughts are left out of earlier ones."""
    first = THOUGHTFUL | {"content": "b", "weight": 0}
    nulls = {"tool_calls": None, "name": None, "weight": None}
    row: dict[str, Any] = {
        "tools": None,
        "messages": [{**SUM[0], **nulls}, first, SUM[0], {**THOUGHTFUL, **nulls, "tool_calls": []}],
    }
    for template in (TOOLS_TEMPLATE, None):
        chat = tokenizer if template is None else with_template(tokenizer, tmp_path / "t", template)
        messages = [{k: v for k, v in m.items() if k != "reasoning_content" or template} for m in row["messages"]]
        item = sft(tmp_path, chat, row | {"messages": messages}, max_seq_length=200)[0]
        assert learnt(tokenizer, item).replace("_", "") == ("<think>hm</think>a]" if template else "a]")


@pytest.mark.parametrize(
    "messages, record, complaint",
    [
        ([SUM[0], CALL | {"content": ""}], {}, "leaves out 'tool_calls' of turn 2"),
        ([SUM[0], CALL], {}, "leaves out 'tool_calls' of turn 2"),
        ([SUM[0], CALL | {"content": "", "weight": 0}, *SUM[::2], THOUGHTFUL], {}, "leaves out 'tool_calls' of turn 2"),
        ([SUM[0], THOUGHTFUL], {}, "leaves out 'reasoning_content' of turn 2"),
        ([SUM[0], {"role": "assistant", "content": "a"}], {"tools": TOOLS}, "leaves out 'tools'"),
        ([SUM[0], {"role": "assistant", "content": None}], {}, "'content' should be a string"),
        ([SUM[0], {"role": "assistant", "content": "a", "weight": 0.5}], {}, "'weight' should be 0"),
        ([SUM[0], {"role": "assistant", "content": "a", "weight": True}], {}, "'weight' should be 0"),
        ([SUM[0], {"role": "assistant", "content": None, "function_call": {}}], {}, "old form of 'tool_calls'"),
        ([SUM[0], THOUGHTFUL | {"reasoning_content": ["hm"]}], {}, "'reasoning_content' should be a string"),
        ([SUM[0], CALL | {"tool_calls": "add"}], {}, "'tool_calls' should be a list of calls"),
        ([SUM[0], CALL | {"tool_calls": [{"function": {}}]}], {}, "key 'name' is missing"),
        ([SUM[0], CALL | {"tool_calls": [{"function": "add"}]}], {}, "'function' should be an object"),
        ([SUM[0], CALL | {"content": 3}], {}, "'content' should be a string"),
        ([SUM[0], CALL | {"tool_calls": [{"name": "add", "arguments": "{"}]}], {}, "'arguments' of the call of 'add'"),
        ([SUM[0] | {"name": "\ud83d"}, THOUGHTFUL], {}, "'name' holds an unpaired surrogate"),
        ([SUM[0], THOUGHTFUL], {"tools": "add"}, "'tools' should be a list of tools"),
        ([SUM[0], THOUGHTFUL], {"functions": TOOLS}, "old form of 'tools'"),
    ],
)
def test_what_would_be_lost_of_a_chat_is_named(
    tmp_path: Path, tokenizer: Tokenizer, messages: Any, record: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(DataError, match=rf"sft\.jsonl:1: .*{complaint}"):
        sft(tmp_path, tokenizer, {"messages": messages, **record})


@pytest.mark.parametrize(
    "row, key",
    [
        ({"messages": [SUM[0], CALL]}, "'tool_calls'"),
        ({"messages": [SUM[0], THOUGHTFUL]}, "'reasoning_content'"),
        (MESSAGES | {"tools": TOOLS}, "'tools'"),
    ],
)
def test_nemo_markup_has_no_place_for_calls_and_thoughts(
    tmp_path: Path, tokenizer: Tokenizer, row: dict[str, Any], key: str
) -> None:
    with pytest.raises(DataError, match=rf"sft\.jsonl:1: .*have no place for {key}"):
        sft(tmp_path, tokenizer, row, chat_prompt_tokens=MARKUP)


def test_a_template_that_leaves_out_part_of_a_response_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As DeepSeek-R1's, with and without the thoughts' beginning in the generation prompt; Qwen3's are let through."""
    row = {"messages": [SUM[0], {"role": "assistant", "content": "<think>hm</think>\n\na"}]}
    turns = "{% for m in messages %}{{ m.role }}:CONTENT<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:"
    cut = turns.replace("CONTENT", "{{ m.content.split('</think>')[-1] }}")
    with pytest.raises(DataError, match=r"sft\.jsonl:1: .*leaves out part of the response, turn 2"):
        sft(tmp_path, with_template(tokenizer, tmp_path / "cut", cut + "{% endif %}"), row)
    with pytest.raises(DataError, match=r"sft\.jsonl:1: the generation prompt .* ends in '<think>\\n', but turn 2"):
        sft(tmp_path, with_template(tokenizer, tmp_path / "open", cut + "<think>\n{% endif %}"), row)
    spaced = turns.replace("CONTENT", "{{ m.content.replace('<think>', '<think>\n') }}")
    for name, prompt, want in (
        ("spaced", "{% endif %}", "<think>\nhm</think>\n\na]"),
        ("begun", "<think>{{ '\n' }}{% endif %}", "hm</think>\n\na]"),
    ):
        item = sft(tmp_path, with_template(tokenizer, tmp_path / name, spaced + prompt), row)[0]
        assert learnt(tokenizer, item).strip("_") == want


# ---- sources and blends -----------------------------------------------------------------------


def test_data_prefix(tmp_path: Path) -> None:
    a, b = jsonl(tmp_path / "a.jsonl", {"text": "a"}), jsonl(tmp_path / "b.jsonl", {"text": "b"})
    prefix = load_data_prefix({"train": [str(a), str(b)], "validation": str(b), "test": [str(a)]})
    assert prefix.train == DataSource((a, b)) and prefix.validation == DataSource((b,))
    assert load_data_prefix({"train": ["0.3", str(a), 0.7, str(b)]}) == DataPrefix(DataSource((a, b), (0.3, 0.7)), None)
    for without in ({"validation": [a]}, {"train": None}):
        with pytest.raises(DataError, match=r"model\.data\.data_prefix names no training data"):
            load_data_prefix(without)


@pytest.mark.parametrize(
    "value, complaint",
    [
        (None, "data_prefix should be"),
        (["a.jsonl"], "data_prefix should be"),
        ({"train": ["a.jsonl"], "valid": []}, "unknown split 'valid'"),
        ({"train": []}, r"model\.data\.data_prefix\.train names no file"),
        ({"train": {"a.jsonl": 1}}, "give a file, or a list of files"),
        ({"train": [["a.jsonl"]]}, "give a file, or a list of files"),
        ({"validation": "/"}, r"model\.data\.data_prefix\.validation names /: this is a folder"),
        ({"train": ["nowhere.jsonl"]}, r"nowhere\.jsonl: no such data file"),
        ({"train": [0.3, "a.jsonl", "b.jsonl"]}, "weights and files in turn"),
        ({"train": ["a.jsonl", 0.3]}, "weights and files in turn"),
        ({"train": [0.3, 0.4]}, "weights and files in turn"),
        ({"train": [0.3, "a.jsonl", "b.jsonl", "c.jsonl"]}, "weights and files in turn"),
        ({"train": ["a.jsonl", ["b.jsonl"]]}, "give a file, or a list of files"),
        ({"train": [-1, "a.jsonl"]}, "positive"),
        ({"train": [0.3, "a.jsonl", 0, "b.jsonl"]}, "positive"),
        ({"train": [0.3, "a.jsonl", "inf", "b.jsonl"]}, "positive"),
    ],
)
def test_bad_data_prefixes_are_refused(value: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        load_data_prefix(value)


@pytest.mark.parametrize("denying", [{"access": Mock(return_value=False)}, {"stat": Mock(side_effect=PermissionError)}])
def test_data_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denying: Mapping[str, Mock]
) -> None:
    """The file, or the folder that it is in. Root may read all, hence the stand-ins."""
    path = tmp_path / "a.jsonl"
    path.touch()
    with monkeypatch.context() as patch:
        for name, stand_in in denying.items():
            patch.setattr(os, name, stand_in)
        with pytest.raises(DataError, match=r"data_prefix\.train names .*a\.jsonl: this user may not read it"):
            load_data_prefix({"train": [str(path)]})


def test_omegaconf_data_prefix(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    a = jsonl(tmp_path / "a.jsonl", {"text": "a"})
    config = omegaconf.OmegaConf.create({"train": [0.5, str(a), 0.5, str(a)], "validation": [str(a)]})
    assert load_data_prefix(config).train == DataSource((a, a), (0.5, 0.5))


def test_blend_keeps_its_proportions_everywhere(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        blend = BlendedDataset([[f"a{i}" for i in range(90)], [f"b{i}" for i in range(10)]], [1, 3], ["a", "b"])
    assert caplog.messages == ["blend: the first 25 of 90 samples of a are used"]
    assert len(blend) == 100
    names = [blend[i] for i in range(100)]
    for end in range(1, 101):
        assert abs(sum(name[0] == "b" for name in names[:end]) - 0.75 * end) <= 1
    assert [name for name in names if name[0] == "a"] == [f"a{i}" for i in range(25)]
    assert [name for name in names if name[0] == "b"] == [f"b{i % 10}" for i in range(75)]

    files = tuple(jsonl(tmp_path / f"{c}.jsonl", *({"text": f"{c}{i}"} for i in range(4))) for c in "ab")
    joined, _ = DataSource(files).build(lambda paths: PromptDataset(paths, tokenizer, 9))
    assert [joined[i].line["text"] for i in range(len(joined))] == ["a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"]
    mixed, _ = DataSource(files, (0.5, 0.5)).build(lambda paths: PromptDataset(paths, tokenizer, 9))
    assert [mixed[i].line["text"] for i in range(len(mixed))] == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "b3"]


def test_pad_rows() -> None:
    assert pad_rows([[1, 2, 3], [4]], 9).tolist() == [[1, 2, 3], [4, 9, 9]]
    padded = pad_rows([[1.5], []], 0, width=2, dtype=torch.float32)
    assert padded.dtype == torch.float32 and padded.tolist() == [[1.5, 0.0], [0.0, 0.0]]
    assert lengths_of([[1, 2, 3], [4]]).tolist() == [3, 1]


# ---- samplers ---------------------------------------------------------------------------------


def test_each_epoch_has_every_sample_once_in_a_new_order() -> None:
    sampler = EpochSampler(10, 4, seed=1, shuffle=True, drop_last=False)
    epochs = [list(sampler) for _ in range(3)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2] and sampler.batches_per_epoch == 3
    flat = [[index for batch in epoch for index in batch] for epoch in epochs]
    assert all(sorted(order) == list(range(10)) for order in flat)
    assert flat[0] != flat[1] != flat[2]
    assert sampler.epoch == 3 and sampler.consumed_samples == 30


def test_drop_last_and_no_shuffle() -> None:
    sampler = EpochSampler(10, 4, seed=1, shuffle=False, drop_last=True)
    assert list(sampler) == list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled = EpochSampler(10, 4, seed=1, shuffle=True, drop_last=True)
    seen = {index for _ in range(20) for batch in shuffled for index in batch}
    assert seen == set(range(10))  # not always the same two are left out


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("stop", range(1, 9))
def test_resuming_gives_exactly_the_rest(drop_last: bool, stop: int) -> None:
    def stream(sampler: EpochSampler, batches: int) -> list[list[int]]:
        out: list[list[int]] = []
        while len(out) < batches:
            for batch in sampler:
                out.append(batch)
                if len(out) == batches:
                    break
        return out

    whole = stream(EpochSampler(10, 4, 7, shuffle=True, drop_last=drop_last), 9)
    first = EpochSampler(10, 4, 7, shuffle=True, drop_last=drop_last)
    head = stream(first, stop)
    second = EpochSampler(10, 4, 7, shuffle=True, drop_last=drop_last, consumed_samples=first.consumed_samples)
    assert head + stream(second, 9 - stop) == whole


@pytest.mark.parametrize(
    ("batch", "batches", "then", "epoch", "follow"),
    [
        (64, 5, 50, 5, range(50)),
        (40, 11, 50, 5, range(40, 90)),  # 20 samples are left out in each epoch; then none
        (40, 11, 64, 5, range(40, 64)),
        (20, 29, 64, 6, range(64)),  # 80 samples of the sixth epoch, of which there are no more than 64 now
    ],
)
def test_another_batch_size_goes_on_at_the_same_place(
    batch: int, batches: int, then: int, epoch: int, follow: range, caplog: pytest.LogCaptureFixture
) -> None:
    first = EpochSampler(100, batch, 7, shuffle=False, drop_last=True)
    for _ in range(batches):
        next(iter(first))
    second = EpochSampler(100, then, 7, shuffle=False, drop_last=True)
    second.load_state_dict(first.state_dict())
    assert second.epoch == epoch and next(iter(second)) == [*follow]
    shuffled = EpochSampler(100, then, 7, shuffle=True, drop_last=True)
    assert len(shuffled.order(epoch)) == second.samples_per_epoch
    assert not caplog.text
    third = EpochSampler(100, batch, 7, shuffle=False, drop_last=True)
    third.load_state_dict(first.state_dict() | {"num_samples": 3})
    assert "a run on 3 samples, but there are" in caplog.text
    assert third.consumed_samples == first.consumed_samples == batch * batches


def test_ppo_with_another_batch_size_goes_on_at_the_same_prompt_and_ends_with_its_epochs() -> None:
    prompts = [PromptItem([i], {}) for i in range(100)]

    def trainer(batch_size: int, minibatch: int = 10, epochs: int = 1) -> RLTrainer:
        missing: Any = None
        critic: Any = SimpleNamespace(state_dict=dict, load_state_dict=dict)
        cfg = load_defaults("gpt_ppo_actor")
        cfg.trainer.ppo.update(max_epochs=7, max_steps=-1, num_ppo_epochs=epochs)
        cfg.model.global_batch_size = minibatch
        settings = RLSettings.from_config(PPOActor.read(cfg), len(prompts) // batch_size)
        schedule = Schedule(lr=1.0, max_steps=settings.max_steps * (batch_size // minibatch) * epochs)
        actor: Any = SimpleNamespace(model=None, optimizer=SimpleNamespace(schedule=schedule))
        collector: Any = SimpleNamespace(scorer=SimpleNamespace(values=critic))
        return RLTrainer(
            settings, actor, collector, PromptSource(prompts, batch_size, 7, True), missing, missing, missing,
            missing, missing,
        )  # fmt: skip

    first, second = trainer(40), trainer(50)
    assert (first.settings.max_steps, second.settings.max_steps) == (14, 14)
    first.step, first.consumed_samples, first.ppo_optimization_step = 11, 11 * 40, 44
    second.load_state_dict(first.state_dict())
    order = EpochSampler(100, 50, 7, shuffle=True, drop_last=True).order(5)
    assert [prompt.prompt_id for prompt in second.train_prompts.batch(second.consumed_samples)] == order[40:90].tolist()
    # Two steps with the 60 prompts left of the sixth epoch, two of the seventh.
    assert second.epoch == 5 and second.settings.max_steps == 11 + 4
    source, ends, seen = second.train_prompts, [second.consumed_samples], list[int]()
    while ends[-1] < 700:
        seen += [prompt.prompt_id for prompt in source.batch(ends[-1])]
        ends.append(source.after(ends[-1]))
    last = EpochSampler(100, 50, 7, shuffle=True, drop_last=True).order(6)
    assert ends == [540, 590, 600, 650, 700] and seen == [*order[40:], *last]
    assert second.optimizer.schedule.max_steps == 44 + 4 * 5
    third = trainer(40)
    third.load_state_dict(first.state_dict())
    assert third.settings.max_steps == 14 and third.optimizer.schedule.max_steps == 14 * 4
    for changed, updates_left in ((trainer(40, 20), 3 * 2), (trainer(40, 5), 3 * 8), (trainer(40, 10, 2), 3 * 8)):
        changed.load_state_dict(first.state_dict())
        assert changed.settings.max_steps == 14 and changed.optimizer.schedule.max_steps == 44 + updates_left


def test_seed_decides_the_order() -> None:
    orders = [EpochSampler(50, 50, seed, shuffle=True, drop_last=True).order(0).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_too_little_data_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="3 samples do not fill one global batch of 4"):
        EpochSampler(3, 4, 0, shuffle=True, drop_last=True)
    assert list(EpochSampler(3, 4, 0, shuffle=False, drop_last=False)) == [[0, 1, 2]]
    assert list(EpochSampler(1, 1, 0, shuffle=True, drop_last=True)) == [[0]]
    assert list(EpochSampler(1, 4, 0, shuffle=False, drop_last=False)) == [[0]]
