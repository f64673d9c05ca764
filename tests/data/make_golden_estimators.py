"""Makes golden_estimators.json: the advantages that TRL's trainers compute from given rewards. Nothing else needs TRL.

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0
    trl/bin/python tests/data/make_golden_estimators.py

Each trainer makes one real step, on the CPU, with a tiny random model; only the rewards are given.
"""

import json
import tempfile
from pathlib import Path

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GROUP = 4
# None: nobody could score the sample. In order: an ordinary group, equal rewards, one missing, a single one, none.
REWARDS = [
    *(1.0, -0.5, 2.25, 0.125),
    *(0.1, 0.1, 0.1, 0.1),
    *(3.0, None, -1.0, 0.7),
    *(None, 0.4, None, None),
    *(None, None, None, None),
    *(10.0, 10.0, 11.0, 10.0),
]
WORDS = ["[end]", "[unknown]", *"abcdefgh"]


def given_rewards(completions: list[str], **_: object) -> list[float | None]:
    """In place of a reward function: the same rewards whatever the completions."""
    return REWARDS[: len(completions)]


def advantages(trainer: type, config: type, folder: str, **options: object) -> list[float]:
    """One step of a trainer; the advantages that it computed."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, "[unknown]")),
        eos_token="[end]",
        unk_token="[unknown]",
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), eos_token_id=0, pad_token_id=0, **sizes))
    seen: list[torch.Tensor] = []

    class Recording(trainer):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> dict[str, torch.Tensor]:
            outputs = super()._generate_and_score_completions(inputs)
            seen.append(outputs["advantages"])
            return outputs

    arguments = config(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=1,
        num_generations=GROUP,
        per_device_train_batch_size=len(REWARDS),
        max_completion_length=4,
        shuffle_dataset=False,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        **options,
    )
    prompts = Dataset.from_list([{"prompt": letter} for letter in "abcdef"])
    Recording(
        model=model, reward_funcs=given_rewards, args=arguments, train_dataset=prompts, processing_class=tokenizer
    ).train()
    assert len(seen) == 1
    return seen[0].tolist()


def main() -> None:
    """Write the file beside this one."""
    with tempfile.TemporaryDirectory() as folder:
        golden = {
            "note": f"TRL {trl.__version__}, by make_golden_estimators.py; null is a reward that is missing",
            "group": GROUP,
            "rewards": REWARDS,
            "grpo": advantages(trl.GRPOTrainer, trl.GRPOConfig, folder, scale_rewards="group"),
            "step_scaled": advantages(trl.GRPOTrainer, trl.GRPOConfig, folder, scale_rewards="batch"),
            "dr_grpo": advantages(trl.GRPOTrainer, trl.GRPOConfig, folder, scale_rewards="none"),
            "rloo": advantages(trl.RLOOTrainer, trl.RLOOConfig, folder, normalize_advantages=False),
        }
    Path(__file__).with_name("golden_estimators.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
