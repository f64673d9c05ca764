"""Run with the software devices: how often micro batches make the program wait for its GPU. Prints ``never``.

Whatever a pass waits for at its beginning and end, more micro batches must not add to it: between two of them the GPU
would run out of work.
"""

import torch
from software_tensors import Transfers

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models import pipeline
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.critic import Critic, RewardModel, ValueBatch
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts

SHAPE = ModelArchitecture(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=53,
    max_position_embeddings=128,
)  # fmt: skip
OPTIM = {"name": "distributed_fused_adam", "lr": 1e-2, "weight_decay": 0.0}
ADAM = schema.Optimizer(**OPTIM)
ROWS, WIDTH = 12, 9

waits: list[int] = []
run_schedule = pipeline._run_schedule


def counted(*args: object, **options: object) -> object:
    """megatron-core's schedule, with what it and all micro batches waited for."""
    before = Transfers.num_waits
    reports = run_schedule(*args, **options)
    waits.append(Transfers.num_waits - before)
    return reports


pipeline._run_schedule = counted
ids = torch.randint(0, 53, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
lengths = torch.arange(ROWS) % 5 + 4
ones = (torch.arange(WIDTH - 1)[None, :] < lengths[:, None] - 1).float()


def passes(rows: int) -> list[int]:
    """The waits of every kind of pass, in micro batches of ``rows`` sequences."""
    waits.clear()
    options = {"training_batching": MicroBatching(rows), "forward_batching": MicroBatching(rows)}
    model = build_model(SHAPE, {"optim": OPTIM}, torch.bfloat16)
    optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0)
    loss = LossSettings("gspo", aggregation="sequence_mean", kl_coef=0.1, entropy_bonus=0.01)
    actor = Actor(model, optimizer, None, **options, temperature=0.7, loss=loss)
    flat = torch.ones(int((lengths - 2).sum()))
    columns = {"old_logprobs": -flat, "reference_logprobs": -flat, "advantages": flat, "importance_weights": flat}
    tokens = torch.cat([row[:length] for row, length in zip(ids, lengths, strict=True)]).int()
    batch = RaggedBatch(tokens, lengths, after_prompts(lengths, torch.full((ROWS,), 2)), columns, lengths > 0)
    actor.logprobs(batch)
    actor.update(batch)

    head = RewardHeadConfig(num_attributes=2, merge_attributes=True, pooling="average")
    model = build_model(SHAPE, {"optim": OPTIM}, torch.bfloat16, head=head)
    optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0)
    critic = Critic(model, optimizer, head, **options, global_batch_size=ROWS, loss_clip=0.2)
    critic.values(ids, lengths)
    critic.train(ValueBatch(ids, ones, ones, ones))
    RewardModel(model, head, MicroBatching(rows)).rewards(ids, lengths)
    return list(waits)


with single_process():
    passes(ROWS)  # what is checked once per process is waited for
    few, many = passes(ROWS // 2), passes(2)
    print(few, many)
    assert few == many and len(many) == 5
print("never")
