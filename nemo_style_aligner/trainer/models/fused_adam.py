"""Adam with the interface of apex's and Transformer Engine's FusedAdam, on torch's fused kernels.

megatron-core falls back to ``torch.optim.AdamW`` where neither library is installed. That one keeps its
step in a tensor per parameter, which megatron's distributed optimizer can neither save nor load
(after a resume all parameters share one step tensor). This one keeps an int in the parameter group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980) or, with ``adam_w_mode``, AdamW (arXiv:1711.05101)."""

    # Without torch's decorator, which hides these methods from its compiler and imports the compiler for that: a second
    # or two in every process, for nothing.
    add_param_group = torch.optim.Optimizer.add_param_group.__wrapped__  # type: ignore[attr-defined]
    zero_grad = torch.optim.Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
    state_dict = torch.optim.Optimizer.state_dict.__wrapped__  # type: ignore[attr-defined]
    load_state_dict = torch.optim.Optimizer.load_state_dict.__wrapped__  # type: ignore[attr-defined]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,  # apex's tuning switches have no meaning here
    ) -> None:
        if not bias_correction:
            raise ValueError("FusedAdam without bias correction is not implemented")
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Update every parameter that has a gradient. ``grad_scaler`` is accepted for the interface's sake."""
        loss = closure() if closure else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        # The kernel wants one step tensor per parameter, on its device, already incremented.
        steps = [torch.full((), float(group["step"]), device=p.device) for p in params]
        update(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


def use_fused_adam_where_megatron_has_none() -> None:
    """Give megatron-core this Adam where it found neither Transformer Engine's nor apex's.

    Raises:
        ImportError: this version of megatron-core keeps its optimizer somewhere else.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    for module, names in (
        (optimizer, ("Adam", "USING_PYTORCH_OPTIMIZER")),
        (distributed, ("HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER")),
    ):
        for name in names:
            if not hasattr(module, name):
                raise ImportError(f"{module.__name__} has no {name}: install megatron-core==0.16.1")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed.Adam = FusedAdam
        distributed.HAVE_APEX_OR_TE = True
        distributed.USING_APEX_OPTIMIZER = True
