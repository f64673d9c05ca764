"""megatron-core's optimizer from the ``model.optim`` section, and the learning-rate schedule."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import get_standard_config_overrides as weight_decay_overrides

from nemo_style_aligner.engine.parallel.groups import all_reduce_sums, device
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models.fused_adam import use_fused_adam_where_megatron_has_none
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.nonfinite import STOP, SkipCounter
from nemo_style_aligner.trainer.models.offload import AdamOffload

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate as a pure function of the number of updates made: nothing to save or restore.

    NeMo's ``CosineAnnealing``: linear warm-up over ``warmup_steps``, cosine from ``lr`` to ``min_lr`` over
    ``max_steps - warmup_steps - constant_steps``, then ``min_lr``. ``constant`` keeps ``lr`` after the warm-up.
    The warm-up of a cosine with ``constant_steps`` begins at 0, any other one a step later, as in NeMo.

    Attributes:
        is_given_length: whether ``max_steps`` is from the config, not the run's number of updates.
    """

    lr: float
    min_lr: float = 0.0
    warmup_steps: int = 0
    constant_steps: int = 0
    max_steps: int = 0
    name: str = "CosineAnnealing"
    is_given_length: bool = False

    def __post_init__(self) -> None:
        if self.name not in ("CosineAnnealing", "constant"):
            raise ValueError(f"model.optim.sched.name={self.name!r}: choose CosineAnnealing or constant")
        if self.name != "constant" and self.min_lr > self.lr:
            raise ValueError(f"model.optim.sched.min_lr={self.min_lr} is above model.optim.lr={self.lr}")

    @classmethod
    def from_config(cls, optim: schema.Optimizer, max_steps: int) -> Schedule:
        """That of ``model.optim``; ``max_steps``, the job's number of updates, applies where the section gives none."""
        sched = optim.sched
        if sched is None:
            return cls(optim.lr, max_steps=max_steps, name="constant")
        return cls(
            lr=optim.lr,
            min_lr=sched.min_lr or 0.0,
            warmup_steps=sched.warmup_steps or 0,
            constant_steps=sched.constant_steps or 0,
            max_steps=max_steps if sched.max_steps is None else sched.max_steps,
            name=str(sched.name),
            is_given_length=sched.max_steps is not None,
        )

    def ending_with_run(self, updates: int) -> Schedule:
        """The schedule of a run with this many updates; the same one if the config gives its length."""
        return self if self.is_given_length else dataclasses.replace(self, max_steps=updates)

    def __call__(self, step: int) -> float:
        """The learning rate of update number ``step``, counted from 0."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            begins_at_0 = self.constant_steps > 0 and self.name != "constant"
            return self.lr * (step + 1 - begins_at_0) / (self.warmup_steps + 1 - begins_at_0)
        if self.name == "constant":
            return self.lr
        decay_steps = self.max_steps - self.warmup_steps - self.constant_steps
        progress = step - self.warmup_steps
        if progress >= decay_steps:
            return self.min_lr
        return self.min_lr + 0.5 * (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress / decay_steps))

    def warn_if_nothing_decays(self) -> None:
        """Warn on rank 0 if the run is too short for the schedule: all its updates after the warm-up are at min_lr."""
        warmup = self.warmup_steps + 1 if self.warmup_steps > 0 else 0  # the update after it has the full rate
        is_short = warmup < self.max_steps <= self.warmup_steps + self.constant_steps
        if self.name == "CosineAnnealing" and is_short and self.min_lr < self.lr and dist.get_rank() == 0:
            logger.warning(
                "model.optim.sched: of %d updates, all after the first %d run at min_lr=%g; constant_steps=%d leaves "
                "none for the decay from lr=%g. Lower constant_steps, to 0 for instance",
                self.max_steps,
                warmup,
                self.min_lr,
                self.constant_steps,
                self.lr,
            )


class Optimizer:
    """megatron-core's (distributed) Adam, or plain SGD, with gradient clipping and the schedule.

    Weights of one dimension (norms and biases) do not decay.

    Args:
        offload: let `offload_states` free the device of Adam's states and gradients (``offload_adam_states``); no
            effect on a CPU.

    Attributes:
        step_count: updates made so far; those that were skipped do not count.
        skips: counts the updates that were skipped for NaN or Inf.
    """

    def __init__(
        self,
        model: MegatronModel,
        optim: schema.Optimizer,
        schedule: Schedule,
        clip_grad: float,
        nonfinite: schema.Updates = STOP,
        offload: bool = False,
    ) -> None:
        use_fused_adam_where_megatron_has_none()
        self.model = model
        config = OptimizerConfig(
            optimizer="sgd" if optim.name == "sgd" else "adam",
            sgd_momentum=0.0,  # as NeMo's
            lr=schedule.lr,
            min_lr=0.0,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            clip_grad=clip_grad,
            use_distributed_optimizer=self._ddp.ddp_config.use_distributed_optimizer,
        )
        self.schedule = schedule
        self.step_count = 0
        self.skips = SkipCounter(nonfinite)
        self.clip_grad = config.clip_grad
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            config, [model.module], config_overrides=weight_decay_overrides(config)
        )
        for group in self.megatron.param_groups:
            # megatron leaves this to its own scheduler: norms and biases have wd_mult 0.
            group["weight_decay"] = optim.weight_decay * group.get("wd_mult", 1.0)
        self._offload: AdamOffload | None = None
        if offload and device().type != "cpu":  # on a CPU they are in host memory anyway
            self._offload = AdamOffload(self.parts(), model.module)

    @property
    def learning_rate(self) -> float:
        """The rate the next update will use."""
        return self.schedule(self.step_count)

    def zero_grad(self) -> None:
        """Clear the gradient buffers; call before each training step."""
        if self._offload is not None:
            self._ddp.restore_grad_buffers(synchronize=False)  # the stream orders it before what follows
        self._ddp.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, loss: float, origin: str, num_items: float = 1.0) -> dict[str, float]:
        """Clip, update, advance the schedule; or skip the update, where loss or gradients hold NaN or Inf. Collective.

        A skipped update leaves weights, Adam's state, ``step_count`` and with it the schedule as they were. So does a
        batch without items, from which Adam's momentum alone would move the weights.

        Args:
            loss: the batch's loss, the same on every rank.
            origin: the samples the gradients are from, for the log.
            num_items: how many items (tokens, pairs or labels) the loss is the mean of, over all ranks.

        Returns:
            ``grad_norm`` (before clipping; left out if nothing was applied), ``lr``, and ``skipped_updates`` so far.

        Raises:
            NonFiniteError: loss or gradients hold NaN or Inf, and the run does not skip such updates, or too many in a
                row. Nothing was applied.
        """
        if self._offload is not None:
            self._offload.bring_back()
        lr = self.learning_rate
        found_inf = self.megatron.prepare_grads()
        norm = self.megatron.get_grad_norm()
        grad_norm = float(norm) if norm is not None else 0.0
        is_bad = found_inf or not math.isfinite(grad_norm) or not math.isfinite(loss)
        if all_reduce_sums({"bad": float(is_bad)}, dist.group.WORLD)["bad"]:  # all ranks do the same, come what may
            self.skips.skip(f"update {self.step_count + 1}: loss {loss}, gradient norm {grad_norm}", origin)
            return {"lr": lr, "skipped_updates": float(self.skips.total)}
        if not num_items:
            return {"lr": lr, "skipped_updates": float(self.skips.total)}
        for group in self.megatron.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
        self._clip(grad_norm)
        self.megatron.step_with_ready_grads()
        self.step_count += 1
        self.skips.applied()
        return {"grad_norm": grad_norm, "lr": lr, "skipped_updates": float(self.skips.total)}

    def _clip(self, grad_norm: float) -> None:
        """Clip the prepared gradients in place, with the same bits as megatron-core's own ``step``.

        Without a kernel of apex's or Transformer Engine's, megatron-core's function would copy each gradient.
        """
        factor = self.clip_grad / (grad_norm + 1e-6)
        if self.clip_grad <= 0.0 or factor >= 1.0:
            return
        for inner in self.parts():
            if gradients := [p.grad for p in inner.get_parameters() if p.grad is not None]:
                torch._foreach_mul_(gradients, factor)

    def parts(self) -> list[MegatronOptimizer]:
        """megatron-core's optimizers that hold parameters of this rank."""
        chained = self.megatron.chained_optimizers if isinstance(self.megatron, ChainedOptimizer) else [self.megatron]
        return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]

    @property
    def _ddp(self) -> DistributedDataParallel:
        """megatron-core's DDP, whose buffers hold the gradients."""
        return cast(DistributedDataParallel, self.model.module)

    def offload_states(self) -> None:
        """Move Adam's states to host memory until the next `step`, if the config asks for it.

        Gradients are dropped, and the memory of their buffers is given back until the next `zero_grad`. Nothing may
        read them in between.
        """
        if self._offload is None or self._offload.is_away:
            return
        self.megatron.zero_grad()  # main weights must not hold on to gradients on the device
        self._ddp.offload_grad_buffers(empty_cache=False)
        self._offload.offload()
