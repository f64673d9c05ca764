"""Adapters: what they compute and learn, in every layout, in files, and in jobs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from conftest import Artefacts
from job_processes import ROOT, run, script, stored_weights
from multirank_lora import ADAM, ALPHA, ARCHITECTURE, DROPPING, LAYOUTS, LR, OPTIM, PEFT, RANK, UPDATES, batch
from safetensors.torch import save_file
from small_models import TensorSource
from trained_models import ARCHITECTURES, logprobs, make_actor, policy_batch, tokens

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.weights.huggingface_config import hf_config
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights, lendable_weights
from nemo_style_aligner.guard.file_source import DamagedCheckpointError
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_config, load_nemo_tokenizer
from nemo_style_aligner.trainer.models.adapter_files import adapter_kind, read_adapter
from nemo_style_aligner.trainer.models.conversion import (
    adapter_to_nemo,
    adapter_to_peft,
    checkpoint_to_nemo,
    nemo_to_hf,
)
from nemo_style_aligner.trainer.models.critic import Critic, RewardModel, ValueBatch
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import keep_passes
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")

Result = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What multirank_lora.py leaves."""
    folder = tmp_path_factory.mktemp("lora")
    run([sys.executable, str(ROOT / "tests" / "multirank_lora.py"), str(folder)], folder / "ranks.log", 240)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Result:
    """The same updates by Hugging Face's Llama with W + alpha / rank * B A in the place of W, and torch's AdamW."""
    start = torch.load(folder / "start.pt")
    config = transformers.LlamaConfig(**hf_config(ARCHITECTURE, torch.float32))
    llama = transformers.LlamaForCausalLM(config).requires_grad_(False)
    llama.load_state_dict(start["weights"], strict=False)
    llama.tie_weights()
    trained = {name: tensor.clone().requires_grad_() for name, tensor in start["adapters"].items()}
    optimizer = torch.optim.AdamW(trained.values(), LR, (0.9, 0.98), 1e-8, weight_decay=0.1)
    modules = sorted({name.rsplit(".", 2)[0] for name in trained})

    def weights() -> dict[str, torch.Tensor]:
        return start["weights"] | {
            f"{module}.weight": start["weights"][f"{module}.weight"]
            + ALPHA / RANK * trained[f"{module}.lora_B.weight"] @ trained[f"{module}.lora_A.weight"]
            for module in modules
        }

    def logprobs() -> torch.Tensor:
        logits = torch.func.functional_call(llama, weights(), (data.tokens,)).logits
        return logits[:, :-1].log_softmax(-1).gather(-1, data.tokens[:, 1:, None])[..., 0]

    data = batch()
    results: Result = {}
    for number in range(UPDATES):
        loss = -(logprobs() * data.loss_mask).sum() / data.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        results[f"update {number}"] = {"loss": loss.item(), "grad_norm": norm.item()}
    with torch.no_grad():
        results |= {"logprobs": logprobs(), "weights": weights()}
    results["adapters"] = {name: tensor.detach() for name, tensor in trained.items()}
    results["trained"] = sum(tensor.numel() for tensor in trained.values())
    return results


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.long] * layout.is_long, id=layout.name) for layout in LAYOUTS],
)
def test_updates_equal_an_independent_model_s_in_every_layout(folder: Path, expected: Result, layout: Any) -> None:
    found = torch.load(folder / f"{layout.name}.pt")
    if ("peft", DROPPING) in layout.options:  # other numbers, but the same on all ranks, which multirank_lora.py sees
        assert all(found[key]["loss"] != expected[key]["loss"] for key in ("update 0", "update 1"))
        return
    for number in range(UPDATES):
        for name, value in expected[f"update {number}"].items():
            assert found[f"update {number}"][name] == pytest.approx(value, rel=1e-5), (number, name)
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=1e-4, atol=1e-5)
    for name, tensor in found["weights"].items():
        torch.testing.assert_close(tensor, expected["weights"][name], rtol=1e-4, atol=2e-5, msg=name)
    assert found["adapters"].keys() == expected["adapters"].keys()
    for name, tensor in found["adapters"].items():
        torch.testing.assert_close(tensor, expected["adapters"][name], rtol=1e-4, atol=2e-5, msg=name)
    # Nothing but adapters has gradients: each rank's share, and what fills up a buffer.
    assert found["trained"] <= found["buffers"] <= found["trained"] + 64 * found["tensors"] + 1024
    share = expected["trained"] / (layout.tp * layout.pp)
    assert share <= found["trained"] < 1.5 * layout.tp * share


# ---- one rank -----------------------------------------------------------------------------------


def test_the_reference_is_the_model_without_adapters_whatever_is_kept() -> None:
    # As many rows as passes with and without gradients compute together: products of others are rounded otherwise.
    ids, plain = tokens(2), build_model(ARCHITECTURE, {}, torch.float32, trainable=False)
    options = {"optim": OPTIM, "peft": {**PEFT, "lora_tuning": PEFT["lora_tuning"] | {"row_init_method": "zero"}}}
    weights = []
    for keep in ("always", "never"):
        model = build_model(ARCHITECTURE, options, torch.float32)
        import_weights(model, TensorSource(dict(export_weights(plain))))
        frozen = FrozenWeights(model, "swap", lambda: plain)
        actor = make_actor(model, frozen)
        keep_passes(model, frozen, cast(Any, keep), len(ids))
        assert (model.kept_passes is None) == (keep == "never")
        for number in range(3):
            batch = policy_batch(ids)
            own = batch.columns["old_logprobs"] = actor.logprobs(batch, is_trained=True)
            expected = logprobs(plain, ids).flatten()
            assert torch.equal(actor.reference_logprobs(batch), expected)
            assert torch.equal(own, expected) == (number == 0)
            actor.update(batch)
        weights.append(dict(export_weights(model)))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_reward_model_beside_a_critic_with_adapters() -> None:
    head = RewardHeadConfig(dtype=torch.float32)
    model = build_model(ARCHITECTURE, {"optim": OPTIM, "peft": PEFT}, torch.bfloat16, head=head)
    frozen = FrozenWeights(model, "auto", lambda: model)
    critic = Critic(
        model, Optimizer(model, ADAM, Schedule(lr=LR, name="constant"), 1.0), head, training_batching=MicroBatching(2),
        global_batch_size=5, forward_batching=MicroBatching(2), loss_clip=0.0,
    )  # fmt: skip
    rewards, ids, lengths = RewardModel(frozen, head, MicroBatching(2)), tokens(), torch.full((5,), 12)
    before, values = rewards.rewards(ids, lengths), None
    rewards.leave(to_change=True)
    for _ in range(3):
        values, last = critic.values(ids, lengths), values
        assert last is None or not torch.equal(values, last)
        critic.train(ValueBatch(ids, torch.ones(5, 11), values, torch.ones(5, 11)))
        assert torch.equal(rewards.rewards(ids, lengths), before)
        rewards.leave(to_change=True)
    assert not any(parameter.requires_grad for weight in model.adapters for parameter in (weight,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_give_what_the_adapters_give(dtype: torch.dtype) -> None:
    """Also beside what is optional: biases, norms of heads, plain MLPs; and no refit reads what is viewed instead."""
    for architecture in ARCHITECTURES.values():
        model = build_model(architecture, {"optim": OPTIM, "peft": PEFT}, dtype)
        merged = build_model(architecture, {}, dtype, trainable=False)
        import_weights(merged, TensorSource(dict(export_weights(model))))
        gap = (logprobs(model, tokens()) - logprobs(merged, tokens())).abs()
        assert gap.mean() < (1e-5 if dtype == torch.float32 else 0.1), architecture
        adapted = {name for adapter in model.adapters.values() for name in adapter.names}
        lent = {name for names in lendable_weights(model, 0, 1) for name in names}
        assert adapted and not {f"{name}.weight" for name in adapted} & lent
        assert lent >= {"model.embed_tokens.weight", "model.norm.weight"}


# ---- jobs ---------------------------------------------------------------------------------------

TUNING = (
    "model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]",
    "model.peft.lora_tuning.adapter_dim=4", "model.peft.lora_tuning.alpha=8", "model.optim.sched.name=constant",
)  # fmt: skip


@pytest.fixture(scope="module")
def sft(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an SFT job with adapters: ``log``, ``adapter.nemo`` and, merged from it, ``merged.nemo``."""
    folder = tmp_path_factory.mktemp("sft")
    run(script("train_gpt_sft.py", *sft_flags(artefacts, folder / "log"), "model.peft.archive=adapter"), folder / "run")
    shutil.copy(archive_of(folder / "log"), folder / "adapter.nemo")
    adapter_to_nemo(folder / "adapter.nemo", folder / "merged.nemo", torch.float32, base=artefacts.base)
    return folder


def sft_flags(artefacts: Artefacts, log_dir: Path) -> list[str]:
    return [*artefacts.sft_flags(log_dir), *TUNING, "model.peft.lora_tuning.adapter_dropout=0.1"]


def archive_of(log_dir: Path) -> Path:
    return next((log_dir / "checkpoints").glob("*.nemo"))


def same_weights(one: Path, other: Path) -> bool:
    found, expected = stored_weights(one), stored_weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_job_saves_adapters_alone(sft: Path, artefacts: Artefacts, caplog: pytest.LogCaptureFixture) -> None:
    merged, base = stored_weights(sft / "merged.nemo"), stored_weights(artefacts.base)
    assert merged.keys() == base.keys() and sum(not torch.equal(merged[key], base[key]) for key in base) == 4
    newest = max((sft / "log" / "checkpoints").glob("*-last"))
    checkpoint_to_nemo(newest, sft / "again.nemo")
    assert same_weights(sft / "again.nemo", sft / "merged.nemo")
    # What the texts were like that it was trained on is told by the adapter, not by the base.
    formats = [load_nemo_tokenizer(sft / name).format for name in ("merged.nemo", "again.nemo")]
    assert formats[0] == formats[1] != load_nemo_tokenizer(artefacts.base).format

    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.rglob("*.distcp"))

    assert size(newest) < 0.6 * size(max((artefacts.sft_log / "checkpoints").glob("*-last")))  # rank 4 of 32
    assert "fingerprint" not in caplog.text
    adapter_to_nemo(newest, sft / "wrong.nemo", torch.float32, base=artefacts.sft)
    assert f"that of {artefacts.sft} is" in caplog.text and "is it the same model?" in caplog.text
    content = bytearray((sft / "adapter.nemo").read_bytes())
    with tarfile.open(sft / "adapter.nemo") as tar:
        file = next(member for member in tar if member.name.endswith(".distcp"))
    content[file.offset_data + file.size // 2] ^= 1
    (sft / "damaged.nemo").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"damaged\.nemo is damaged"):
        adapter_to_nemo(sft / "damaged.nemo", sft / "none.nemo", torch.float32, base=artefacts.base)


@pytest.mark.long
def test_a_resumed_job_equals_an_undisturbed_one(sft: Path, artefacts: Artefacts, tmp_path: Path) -> None:
    for others in (["trainer.sft.max_steps=2"], []):
        run(script("train_gpt_sft.py", *sft_flags(artefacts, tmp_path / "log"), *others), tmp_path / "run")
    assert same_weights(archive_of(tmp_path / "log"), sft / "merged.nemo")


@pytest.mark.long
def test_engine_and_reference_of_a_job_with_adapters(artefacts: Artefacts, tmp_path: Path) -> None:
    prompts = artefacts.data("train_prompts")
    (tmp_path / "rewards.py").write_text("def length(prompt, response, line):\n    return len(response)\n")
    flags = [
        f"pretrained_checkpoint.restore_from_path={artefacts.sft}", *TUNING,
        f"model.data.data_prefix={{train: [{prompts}], validation: [{prompts}], test: [{prompts}]}}",
        f"exp_manager.explicit_log_dir={tmp_path / 'grpo'}", "trainer.precision=32", "trainer.devices=2",
        "model.tensor_model_parallel_size=2", "model.sequence_parallel=True", "trainer.ppo.estimator=grpo",
        f"trainer.ppo.rewards=[{{source: '{tmp_path}/rewards.py:length'}}]", "trainer.ppo.num_rollouts_per_prompt=4",
        "trainer.ppo.max_steps=3", "trainer.ppo.val_check_interval=0", "trainer.ppo.initial_policy_kl_penalty=0.1",
        "model.ppo.num_rollout_samples=4", "model.ppo.rollout_micro_batch_size=4", "model.encoder_seq_length=64",
        "model.ppo.length_params.max_length=8", "model.global_batch_size=16", "model.optim.lr=3e-2",
    ]  # fmt: skip
    run(script("train_gpt_ppo_actor.py", *flags), tmp_path / "run")
    metrics = read_metrics(tmp_path / "grpo")
    gaps = [value for _, value in metrics["train_rollouts/engine_logprob_gap_max"]]
    assert len(gaps) == 3 and max(gaps) < 1e-4  # the engine has what the trainer computes with
    divergence = [value for _, value in metrics["train_rollouts/init_policy_kl"]]
    assert abs(divergence[0]) < 1e-6 and divergence[-1] > 1e-3  # the reference is the model without adapters


def test_adapters_in_and_out_of_peft(sft: Path, artefacts: Artefacts) -> None:
    peft = pytest.importorskip("peft", reason="NOT TESTED: needs pip install peft")
    adapter_to_peft(sft / "adapter.nemo", sft / "peft", torch.float32, base=artefacts.base)
    for archive, folder in ((artefacts.base, sft / "hf"), (sft / "merged.nemo", sft / "hf-merged")):
        nemo_to_hf(archive, folder, torch.float32)
    load, tokens = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(2, 22)[None]
    adapted = peft.PeftModel.from_pretrained(load(sft / "hf"), sft / "peft")
    with torch.no_grad():
        expected = load(sft / "hf-merged")(tokens).logits
        torch.testing.assert_close(adapted(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    # What PEFT made itself, of two of the three matrices that are one here, in other layers than all.
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    own = peft.get_peft_model(load(sft / "hf"), config)
    for name, parameter in own.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    own.save_pretrained(sft / "own")
    adapter_to_nemo(sft / "own", sft / "own.nemo", torch.float32, base=artefacts.base)
    nemo_to_hf(sft / "own.nemo", sft / "own-hf", torch.float32)
    with torch.no_grad():
        expected = own(tokens).logits
        torch.testing.assert_close(load(sft / "own-hf")(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "is_whole"),
    [
        ({"layers_to_transform": [1]}, True),
        ({"layers_to_transform": 1}, True),
        ({"target_modules": ["1.self_attn.q_proj"]}, True),
        ({}, False),
        ({"layers_to_transform": [0, 1]}, False),
        ({"target_modules": ".*q_proj"}, False),
        ({"target_modules": "all-linear"}, False),
    ],
)
def test_a_peft_file_that_has_lost_a_layer_is_refused(
    config: dict[str, Any], is_whole: bool, artefacts: Artefacts, tmp_path: Path
) -> None:
    """Layers that its config does not have are none that are lost."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain | config))
    architecture = ModelArchitecture.from_nemo_config(load_nemo_config(artefacts.base))
    rows, columns = architecture.num_attention_heads * architecture.kv_channels, architecture.hidden_size
    shapes = {A_OF_Q: (4, columns), B_OF_Q: (rows, 4)}
    tensors = {name.replace(".0.", ".1."): torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with contextlib.nullcontext() if is_whole else pytest.raises(ValueError, match=r"lacks model\.layers\.0\..*q_proj"):
        adapter_to_nemo(tmp_path, tmp_path / "merged.nemo", torch.float32, base=artefacts.base)
    assert (tmp_path / "merged.nemo").exists() == is_whole


A_OF_Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B_OF_Q = A_OF_Q.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights=pissa is not supported: merge it into its model with"),
        ({"use_rslora": True}, {}, "use_rslora=True is not supported"),
        ({"r": 0}, {}, "r=0: the rank should be a whole number above 0"),
        ({"r": "4"}, {}, "r=4: the rank should be a whole number"),
        ({"lora_alpha": 0}, {}, "lora_alpha=0: it should be a number above 0"),
        ({"lora_alpha": math.nan}, {}, "lora_alpha=nan: it should be"),
        ({"lora_alpha": 10**400}, {}, f"lora_alpha={10**39}: it should be"),
        ({}, {B_OF_Q: None}, "lacks model.layers.0.self_attn.q_proj.lora_B.weight: write or copy it again"),
        ({}, {A_OF_Q: None}, "lacks model.layers.0.self_attn.q_proj.lora_A.weight"),
        ({"target_modules": ["q_proj", "k_proj"]}, {}, "lacks k_proj"),
        ({}, {A_OF_Q: None, B_OF_Q: None}, "lacks q_proj"),
        ({"target_modules": "all-linear"}, {A_OF_Q: None, B_OF_Q: None}, "holds no adapters"),
        ({}, {A_OF_Q: torch.full((4, 8), math.nan)}, "has NaN, Inf or integers in model.layers.0"),
        ({}, {A_OF_Q: torch.ones(4, 8, dtype=torch.int32)}, "has NaN, Inf or integers in"),
        ({"r": 8}, {}, "has another rank than r=8 in model.layers.0.self_attn.q_proj.lora_A.weight"),
        ({}, {"base_model.model.lm_head.weight": torch.ones(8, 8)}, "lm_head.weight, which is no adapter of a linear"),
    ],
)
def test_adapters_that_would_add_something_else_are_refused(
    config: dict[str, Any], tensors: dict[str, torch.Tensor | None], problem: str, tmp_path: Path
) -> None:
    """None stands for a tensor that is missing."""
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(plain | config))
    whole: dict[str, Any] = {A_OF_Q: torch.ones(4, 8), B_OF_Q: torch.ones(8, 4)} | tensors
    save_file({k: tensor for k, tensor in whole.items() if tensor is not None}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_adapter(adapter_kind(tmp_path))


def test_adapters_that_are_no_file_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="is no regular file"):
        read_adapter(adapter_kind(tmp_path))
