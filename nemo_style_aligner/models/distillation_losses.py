"""What is minimised where a student learns what a teacher thought likely: the divergence over stored top-k logits.

At each position the teacher's k most likely tokens are known, with their logits. Both models' distributions are those
of these tokens alone, renormalised, as in NeMo-Aligner: what the student gives to all other tokens is not counted.
"""

from __future__ import annotations

import dataclasses

import torch

from nemo_style_aligner.config.schema import DistillationLoss
from nemo_style_aligner.models.pipeline import LossResult, Scoring
from nemo_style_aligner.models.supervised_losses import Objective


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


@dataclasses.dataclass(frozen=True)
class DistillationSettings:
    """What is minimised; config keys of ``model.knowledge_distillation`` in brackets.

    Attributes:
        loss: which divergence [kd_loss].
        loss_weight, sft_weight: of the divergence, and of the text's own negative log-probs [kd_loss_weight,
            sft_loss_weight].
        scale, teacher_scale: of the student's logits, in both losses, and of the teacher's [logits_scale,
            target_logits_scale].
    """

    loss: DistillationLoss = "fwd_kl"
    loss_weight: float = 1.0
    sft_weight: float = 0.0
    scale: float = 1.0
    teacher_scale: float = 1.0


def distillation_loss(student: torch.Tensor, teacher: torch.Tensor, loss: DistillationLoss) -> torch.Tensor:
    """The divergence at each position, fp32 [...]: fwd_kl ``KL(teacher || student)``, bwd_kl with its sides exchanged.

    Args:
        student, teacher: logits of the same k tokens, fp32 [..., k], each up to a constant of the position.
    """
    student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    p, q = (teacher, student) if loss == "fwd_kl" else (student, teacher)
    return (p.exp() * (p - q)).sum(-1)


def distillation_objective(settings: DistillationSettings) -> Objective:
    """The divergence from the teacher and the cross-entropy of the text; items are tokens.

    Reports ``kd_loss``, ``sft_loss`` and ``agreement``: how often the teacher's first choice is, among its k, the
    student's, too.
    """

    def loss(logprobs: torch.Tensor, batch: DistillationBatch) -> LossResult:
        mask, of_candidates = batch.loss_mask, logprobs[..., 1:]
        teacher = settings.teacher_scale * batch.teacher_logits
        divergence, sft = distillation_loss(of_candidates, teacher, settings.loss), -logprobs[..., 0]
        sums_of = {
            "kd_loss": divergence,
            "sft_loss": sft,
            "agreement": of_candidates.argmax(-1) == teacher.argmax(-1),
        }
        total = settings.loss_weight * divergence + settings.sft_weight * sft
        return (total * mask).sum(), mask.sum(), {name: (x * mask).sum() for name, x in sums_of.items()}

    return Objective(loss, lambda batch: batch.loss_mask != 0, Scoring(1 / settings.scale, candidates=True))
