"""Makes golden_losses.json: what TRL's trainers make of given log-probs and advantages. TRL is needed for this alone.

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    trl/bin/python tests/data/make_golden_losses.py

The trainers are TRL's own, built with a tiny model whose log-probs are replaced by given ones, in float64.
"""

import json
import math
import tempfile
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LENGTHS = [6, 1, 4, 3]
CLIP_LOW, CLIP_HIGH, DUAL_CLIP, RATIO_CAP, KL_COEF = 0.2, 0.28, 1.5, 1.2, 0.05
PPO = {"epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH}
GRPO_CASES = {
    "ppo token_mean": PPO | {"loss_type": "dapo"},
    "ppo sequence_mean": PPO | {"loss_type": "grpo"},
    "ppo sequence_sum": PPO | {"loss_type": "dr_grpo"},
    "ppo dual clip": PPO | {"loss_type": "dapo", "delta": DUAL_CLIP},
    "ppo kl": PPO | {"loss_type": "grpo", "beta": KL_COEF, "use_bias_correction_kl": False},
    "gspo sequence_mean": PPO | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo token_mean": PPO | {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    "cispo token_mean": {"loss_type": "cispo", "epsilon_high": RATIO_CAP},
}


def inputs() -> dict[str, torch.Tensor]:
    """Per token [sequences, the longest length], with ratios on both sides of all bounds."""
    shape = (len(LENGTHS), max(LENGTHS))
    i = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    old = -1.5 - torch.sin(i)
    return {
        "logprobs": old + 0.6 * torch.cos(2 * i),
        "old_logprobs": old,
        "reference_logprobs": old + 0.3 * torch.sin(5 * i),
        "advantages": 1.5 * torch.cos(0.7 * i + 1),
    }


def losses(trainer_class: type, config: type, folder: str, given: dict[str, torch.Tensor], **options: object) -> dict:
    """What a trainer computes: the loss, its gradient by the log-probs, and what it reports."""
    logprobs = given["logprobs"].clone().requires_grad_()
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double()

    class Given(trainer_class):  # type: ignore[misc, valid-type]
        def _get_per_token_logps_and_entropies(self, *_: object, **__: object) -> tuple:
            return logprobs, torch.zeros_like(logprobs), None

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"[end]": 0}, "[end]")), eos_token="[end]")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=1, eos_token_id=0, pad_token_id=0, **sizes)).save_pretrained(folder)
    trainer = Given(
        model=LlamaForCausalLM.from_pretrained(folder),  # whose reference TRL loads from there, too
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(
            output_dir=folder, use_cpu=True, bf16=False, report_to="none", num_generations=2,
            per_device_train_batch_size=2, max_completion_length=max(LENGTHS), **{"beta": 0.0} | options,
        ),
        train_dataset=Dataset.from_list([{"prompt": "[end]"}]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.eval()  # training would divide by the accumulated micro batches, of which there is one
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": given["advantages"],
        "old_per_token_logps": given["old_logprobs"],
        "old_logps": (given["old_logprobs"] * mask).sum(1),
        "ref_per_token_logps": given["reference_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    reported = {name: values[-1] for name, values in trainer._metrics["eval"].items()}
    found = {"loss": loss.item(), "gradient": logprobs.grad[mask != 0].tolist()}
    names = {"clip_ratio/region_mean": "clipped", "kl": "kl"}
    return found | {ours: reported[theirs] for theirs, ours in names.items() if theirs in reported}


def main() -> None:
    """Write the file beside this one."""
    given = inputs()
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            name: losses(trl.GRPOTrainer, trl.GRPOConfig, folder, given, **options)
            for name, options in GRPO_CASES.items()
        }
        # On-policy, so that nothing is clipped: RLOO's sequence ratio has the gradient of REINFORCE.
        on_policy = given | {"old_logprobs": given["logprobs"], "advantages": given["advantages"][:, 0]}
        cases["reinforce sequence_sum"] = losses(trl.RLOOTrainer, trl.RLOOConfig, folder, on_policy)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    golden = {
        "note": f"TRL {trl.__version__}, by make_golden_losses.py; flat, sequence after sequence",
        "lengths": LENGTHS,
        "constant_length": max(LENGTHS),
        "clip_low": CLIP_LOW,
        "clip_high": CLIP_HIGH,
        "dual_clip": DUAL_CLIP,
        "ratio_cap": RATIO_CAP,
        "kl_coef": KL_COEF,
        "inputs": {name: x[mask].tolist() for name, x in given.items()},
        "cases": cases,
    }
    Path(__file__).with_name("golden_losses.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
