"""What is minimised where a student learns what a teacher thought likely: the divergence over stored top-k logits.

At each position the teacher's k most likely tokens are known, with their logits. Both models' distributions are those
of these tokens alone, renormalised, as in NeMo-Aligner: what the student gives to all other tokens is not counted.
"""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner.kinds import DistillationLoss
from nemo_style_aligner.trainer.models.pipeline import LossResult, Scoring
from nemo_style_aligner.trainer.models.supervised_losses import Objective


@dataclasses.dataclass
class DistillationBatch:
    """Texts, and what the teacher thought of them.

    Attributes:
        tokens: int64 [n, s].
        loss_mask: fp32 [n, s-1], 1 where predicting the next token counts.
        candidates: int32 [n, s-1, k], the teacher's most likely next tokens; any where the mask is 0.
        teacher_logits: fp32 [n, s-1, k], up to a constant of each position.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    candidates: torch.Tensor
    teacher_logits: torch.Tensor


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, loss: DistillationLoss) -> torch.Tensor:
    """The divergence at each position, fp32 [...]: fwd_kl ``KL(teacher || student)``, bwd_kl with its sides exchanged.

    Args:
        student, teacher: logits of the same k tokens, fp32 [..., k], each up to a constant of the position.
    """
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    p, q = (teacher, student) if loss == "fwd_kl" else (student, teacher)
    return (p.exp() * (p - q)).sum(-1)


def distillation_objective(
    kd_loss: DistillationLoss,
    *,
    kd_loss_weight: float,
    sft_loss_weight: float,
    logits_scale: float,
    target_logits_scale: float,
) -> Objective:
    """The divergence from the teacher and the cross-entropy of the text; items are tokens.

    The arguments are the keys of ``model.knowledge_distillation``. Reports ``kd_loss``, ``sft_loss`` and ``agreement``:
    how often the teacher's first choice is, among its k, the student's, too.
    """

    def loss(logprobs: torch.Tensor, batch: DistillationBatch) -> LossResult:
        student, teacher = logprobs[..., 1:], target_logits_scale * batch.teacher_logits
        divergence, sft = distillation_loss(student, teacher, kd_loss), -logprobs[..., 0]
        agreement = student.argmax(-1) == teacher.argmax(-1)
        sums_of = {"kd_loss": divergence, "sft_loss": sft, "agreement": agreement}
        total, mask = kd_loss_weight * divergence + sft_loss_weight * sft, batch.loss_mask
        return (total * mask).sum(), mask.sum(), {name: (x * mask).sum() for name, x in sums_of.items()}

    return Objective(loss, lambda batch: batch.loss_mask != 0, Scoring(1 / logits_scale, candidates=True))
