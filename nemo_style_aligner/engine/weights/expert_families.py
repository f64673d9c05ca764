"""How Hugging Face's model families describe their experts: keys of ``config.json``, and tensors' names in files.

Within this project all have the names of Qwen3-MoE's files: ``mlp.gate``, ``mlp.experts.3.up_proj``. Files that have
experts in tensors of all of a layer's: see `stacked_experts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from nemo_style_aligner.engine.architecture import GATE_LIMIT, GATE_SLOPE, Experts, ModelArchitecture


class ExpertFamily(Protocol):
    """What one family has of its own."""

    stored: Mapping[str, str]
    """Modules of a layer -> their names in files, where these differ; ``{}`` stands for an expert's number."""

    is_stacked: bool
    """Whether files have each layer's experts in tensors of all of them."""

    def read(self, config: Mapping[str, Any]) -> tuple[Experts, tuple[int, ...]]:
        """The experts that a config describes, and the layers (0-based) that have an MLP instead."""

    def write(self, a: ModelArchitecture) -> dict[str, Any]:
        """What a config says of the experts of ``a``; `read` gives them back, or the family cannot express them."""


class Qwen3Moe:
    """Every n-th layer may have experts, and layers may be named that have none."""

    stored: Mapping[str, str] = {}
    is_stacked = False

    def read(self, config: Mapping[str, Any]) -> tuple[Experts, tuple[int, ...]]:
        """See `ExpertFamily`."""
        step, without = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
        layers = range(config["num_hidden_layers"])
        dense = tuple(i for i in layers if i in without or (i + 1) % step)
        return (
            Experts(
                number=_number(config),
                per_token=config["num_experts_per_tok"],
                ffn_hidden_size=config["moe_intermediate_size"],
                normalized=bool(config["norm_topk_prob"]),
            ),
            dense,
        )

    def write(self, a: ModelArchitecture) -> dict[str, Any]:
        """See `ExpertFamily`."""
        assert a.experts is not None
        return {
            "num_experts": a.experts.number,
            "num_experts_per_tok": a.experts.per_token,
            "moe_intermediate_size": a.experts.ffn_hidden_size,
            "norm_topk_prob": a.experts.normalized,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(a.dense_layers),
        }


class Mixtral:
    """Experts in every layer, and no other size of an MLP than theirs."""

    stored: Mapping[str, str] = {
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
        "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
    }
    is_stacked = False

    def read(self, config: Mapping[str, Any]) -> tuple[Experts, tuple[int, ...]]:
        """See `ExpertFamily`."""
        return (
            Experts(
                number=_number(config),
                per_token=config["num_experts_per_tok"],
                ffn_hidden_size=config["intermediate_size"],
            ),
            (),
        )

    def write(self, a: ModelArchitecture) -> dict[str, Any]:
        """See `ExpertFamily`."""
        assert a.experts is not None
        return {
            "num_local_experts": a.experts.number,
            "num_experts_per_tok": a.experts.per_token,
            "intermediate_size": a.experts.ffn_hidden_size,
        }


class Glm4Moe:
    """The first layers have an MLP. Layers behind the last, which predict further tokens, are left out of files."""

    stored: Mapping[str, str] = {}
    is_stacked = False

    def read(self, config: Mapping[str, Any]) -> tuple[Experts, tuple[int, ...]]:
        """See `ExpertFamily`."""
        groups = {key: config[key] for key in ("n_group", "topk_group") if config[key] not in (None, 1)}
        if groups:
            raise ValueError(f"{groups}: experts in groups, of which some are chosen first, are not supported")
        size = config["moe_intermediate_size"]
        return (
            Experts(
                number=config["n_routed_experts"],
                per_token=config["num_experts_per_tok"],
                ffn_hidden_size=size,
                scores="sigmoid",
                normalized=bool(config["norm_topk_prob"]),
                scaling=float(config["routed_scaling_factor"]),
                has_bias=True,
                shared_ffn_hidden_size=size * config["n_shared_experts"],
            ),
            tuple(range(min(config["first_k_dense_replace"], config["num_hidden_layers"]))),
        )

    def write(self, a: ModelArchitecture) -> dict[str, Any]:
        """See `ExpertFamily`."""
        assert a.experts is not None
        return {
            "n_routed_experts": a.experts.number,
            "num_experts_per_tok": a.experts.per_token,
            "moe_intermediate_size": a.experts.ffn_hidden_size,
            "n_shared_experts": a.experts.shared_ffn_hidden_size // a.experts.ffn_hidden_size,
            "routed_scaling_factor": a.experts.scaling,
            "norm_topk_prob": a.experts.normalized,
            "first_k_dense_replace": len(a.dense_layers),
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }


class GptOss(Mixtral):
    """As Mixtral, but for an activation that has two constants, and for the files."""

    stored: Mapping[str, str] = {"mlp.gate": "mlp.router"}
    is_stacked = True
    _CONSTANTS: ClassVar[dict[str, float]] = {"swiglu_alpha": GATE_SLOPE, "swiglu_limit": GATE_LIMIT}

    def read(self, config: Mapping[str, Any]) -> tuple[Experts, tuple[int, ...]]:
        """See `ExpertFamily`. Versions of transformers that have not all of these keys take the same constants."""
        others = {key: config[key] for key, known in self._CONSTANTS.items() if config.get(key, known) != known}
        if others:
            raise ValueError(f"{others}: only an activation with {dict(self._CONSTANTS)} is supported")
        return super().read(config)

    def write(self, a: ModelArchitecture) -> dict[str, Any]:
        """See `ExpertFamily`."""
        return super().write(a) | self._CONSTANTS


EXPERT_FAMILIES: Mapping[str, ExpertFamily] = {
    "qwen3_moe": Qwen3Moe(),
    "mixtral": Mixtral(),
    "glm4_moe": Glm4Moe(),
    "gpt_oss": GptOss(),
}
"""By ``model_type``."""


def can_express(family: str, a: ModelArchitecture) -> bool:
    """Whether configs of a family can describe which experts ``a`` has, or that it has none."""
    if a.experts is None or family not in EXPERT_FAMILIES:
        return a.experts is None and family not in EXPERT_FAMILIES
    known = EXPERT_FAMILIES[family]
    config = {"num_hidden_layers": a.num_layers, "intermediate_size": a.ffn_hidden_size, **known.write(a)}
    return known.read(config) == (a.experts, a.dense_layers)


def stored_name(family: str, name: str) -> str:
    """A tensor's name in a family's files."""
    known = EXPERT_FAMILIES.get(family)
    return _renamed(name, known.stored) if known is not None else name


def own_name(name: str) -> str:
    """The name within this project of a tensor of a file of any family."""
    for known in EXPERT_FAMILIES.values():
        name = _renamed(name, {theirs: ours for ours, theirs in known.stored.items()})
    return name


_MODULE = re.compile(r"(model\.layers\.\d+\.)(.+)\.(weight|bias)")


def _renamed(name: str, names: Mapping[str, str]) -> str:
    parts = _MODULE.fullmatch(name) if names else None
    if parts is None:
        return name
    module = parts[2]
    number = next((word for word in module.split(".") if word.isdigit()), "")
    renamed = names.get(module.replace(f".{number}.", ".{}.") if number else module, module)
    return f"{parts[1]}{renamed.format(number)}.{parts[3]}"


def _number(config: Mapping[str, Any]) -> int:
    """Of experts; transformers 5 calls them so in every family, older versions do not."""
    return int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"])
