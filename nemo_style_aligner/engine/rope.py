"""Rotary position embeddings (arXiv:2104.09864): the frequencies, and how they are scaled to reach further.

`inverse_frequencies` is the only place where frequencies are computed: for training, the engine and exports.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # functions import it when they need it: it takes seconds, and a config needs none of it

logger = logging.getLogger(__name__)

_LLAMA3_FACTOR, _LLAMA3_POSITIONS = 8.0, 8192  # NeMo's and Megatron-Core's defaults, Llama 3.1's

# The keys of each type, Hugging Face's names.
_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
    "longrope": (*("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),),
}
_OTHER_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a rotary embedding are scaled. Fields are Hugging Face's keys; a type reads its own.

    - ``linear``: all are divided by ``factor`` (arXiv:2306.15595).
    - ``llama3``: the slow ones are, the fast ones not, with a transition between (Llama 3.1).
    - ``yarn``: likewise, by rotations within the original length; cosines and sines are multiplied by
      ``attention_factor`` (arXiv:2309.00071).
    - ``longrope``: each is divided by its own factor: ``short_factor``, in sequences longer than the original length
      ``long_factor`` (arXiv:2402.13753); ``attention_factor`` as in ``yarn``. Where both lists are equal, these are
      just factors by frequency.
    - ``dynamic``: unscaled, in sequences longer than the original length with a base that grows with them.

    Attributes:
        original_max_position_embeddings: the length that the model was trained with first.
        attention_factor: None: the type's own formula of ``factor``.
    """

    rope_type: str
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in _KEYS:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported: choose default, {', '.join(_KEYS)}")
        for key in set(_KEYS[self.rope_type]) - {"truncate"}:
            value = getattr(self, key)
            numbers = value if isinstance(value, tuple) else () if value is None else (value,)
            if not all(0 < number < math.inf for number in numbers) or value == ():
                raise ValueError(f"{key} of rope_type {self.rope_type!r} must be above 0, got {value}")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} of rope_type 'llama3' must be below high_freq_factor="
                f"{self.high_freq_factor}"
            )

    @classmethod
    def by_frequency(cls, factors: Sequence[float], positions: int) -> RopeScaling:
        """Each frequency, from the fastest on, divided by its own factor, whatever the length of a sequence."""
        each = tuple(map(float, factors))
        return cls("longrope", 1.0, positions, attention_factor=1.0, short_factor=each, long_factor=each)

    @property
    def limit(self) -> int | None:
        """The longest sequence in which a token's rotation does not depend on the tokens after it; None: any.

        Beyond it a prefix would be computed anew as a response grows: neither training nor generation can do that.
        """
        depends = self.rope_type == "dynamic" or self.short_factor != self.long_factor
        return self.original_max_position_embeddings if depends else None

    # ---- Hugging Face and NeMo ----------------------------------------------------------------

    @classmethod
    def from_mapping(cls, rope: Mapping[str, Any]) -> RopeScaling | None:
        """From Hugging Face's ``rope_parameters`` or ``rope_scaling``, with all that the type needs; None: unscaled.

        Raises:
            ValueError: a type or a value with which nothing can be computed.
        """
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type == "default":
            return None
        if rope_type == "su":  # its first name
            rope_type = "longrope"
        known = _KEYS.get(rope_type, ())
        given = {key: rope[key] for key in known if rope.get(key) is not None}
        ignored = {key: value for key, value in rope.items() if key not in (*known, *_OTHER_KEYS)}
        if known and ignored:
            named = ", ".join(f"{key}={value}" for key, value in ignored.items())
            logger.warning("rope scaling of type %s: %s changes nothing, here and in transformers", rope_type, named)
        for key in ("short_factor", "long_factor"):
            if key in given:
                given[key] = tuple(map(float, given[key]))
        above, below = rope.get("mscale"), rope.get("mscale_all_dim")
        if rope_type == "yarn" and "attention_factor" not in given and above and below:
            factor = float(given.get("factor", 1.0))
            given["attention_factor"] = _mscale(factor, above) / _mscale(factor, below)
        return cls(rope_type, **given)

    def to_mapping(self) -> dict[str, Any]:
        """Hugging Face's ``rope_scaling``: what `from_mapping` reads."""
        values = {key: getattr(self, key) for key in _KEYS[self.rope_type] if getattr(self, key) is not None}
        lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
        return {"rope_type": self.rope_type, **values, **lists}

    @classmethod
    def from_nemo_config(cls, cfg: Mapping[str, Any]) -> RopeScaling | None:
        """From the keys of NeMo's ``model_config.yaml``, and ``rope_scaling`` where these have no words for it.

        Raises:
            ValueError: as `from_mapping`, or several scalings are given.
        """
        given: dict[str, RopeScaling | None] = {}
        if cfg.get("scale_positional_embedding"):
            given["scale_positional_embedding"] = cls(
                "llama3",
                float(cfg.get("scale_factor") or _LLAMA3_FACTOR),
                int(cfg.get("old_context_len") or _LLAMA3_POSITIONS),
                float(cfg.get("low_freq_factor") or cls.low_freq_factor),
                float(cfg.get("high_freq_factor") or cls.high_freq_factor),
            )
        if (factor := cfg.get("seq_len_interpolation_factor")) not in (None, 1):
            given["seq_len_interpolation_factor"] = cls("linear", float(factor))
        if (rope := cfg.get("rope_scaling")) is not None:
            if not isinstance(rope, Mapping):
                raise ValueError(f"rope_scaling={rope!r}: must be a section with Hugging Face's keys")
            given["rope_scaling"] = cls.from_mapping(rope)
        if len(given) > 1:
            # NeMo 2.0's and 2.1's converter of Llama 3.1 sets the first two.
            raise ValueError(
                f"{' and '.join(f'model.{key}={cfg[key]}' for key in given)}: a rotary embedding is scaled in one way "
                "only. If the checkpoint was trained with Llama 3.1's frequency scaling alone "
                "(scale_positional_embedding), set model.seq_len_interpolation_factor=1 in a job, or "
                "seq_len_interpolation_factor: 1 in the archive's model_config.yaml for the conversion"
            )
        return next(iter(given.values()), None)

    def to_nemo_config(self) -> dict[str, Any]:
        """The keys that `from_nemo_config` reads."""
        if self.rope_type == "linear":
            return {"seq_len_interpolation_factor": self.factor}
        if self.rope_type != "llama3":
            return {"rope_scaling": self.to_mapping()}
        config: dict[str, Any] = {"scale_positional_embedding": True, "scale_factor": self.factor}
        others = {
            "old_context_len": (self.original_max_position_embeddings, _LLAMA3_POSITIONS),
            "low_freq_factor": (self.low_freq_factor, RopeScaling.low_freq_factor),
            "high_freq_factor": (self.high_freq_factor, RopeScaling.high_freq_factor),
        }
        return config | {key: value for key, (value, default) in others.items() if value != default}


def inverse_frequencies(base: float, channels: int, scaling: RopeScaling | None) -> tuple[torch.Tensor, float]:
    """Radians per position by which each pair of channels is turned, and the factor of cosines and sines.

    In fp32, operation by operation as in transformers.

    Args:
        base: the rotary base, transformers' ``rope_theta``.
        channels: of a head that are rotated (`ModelArchitecture.rotary_size`), r.
        scaling: None: unscaled.

    Returns:
        fp32 [ceil(r / 2)], from the fastest on, on the CPU; and the attention factor, 1.0 for most.
    """
    import torch

    waves = base ** (torch.arange(0, channels, 2, dtype=torch.int64).float() / channels)
    frequencies = 1.0 / waves
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.rope_type == "yarn":
        factor = _mscale(scaling.factor) if scaling.attention_factor is None else scaling.attention_factor
        return _yarn(waves, base, channels, scaling), factor
    return 1.0 / (torch.tensor(scaling.short_factor) * waves), _longrope_attention_factor(scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    low, high, context = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    slowed = frequencies / scaling.factor
    between = (1 - smooth) * slowed + smooth * frequencies
    fast_ones_kept = frequencies.where(wavelengths < context / high, between)
    return slowed.where(wavelengths > context / low, fast_ones_kept)


def _yarn(waves: torch.Tensor, base: float, channels: int, scaling: RopeScaling) -> torch.Tensor:
    import torch

    def channel_of(rotations: float) -> float:
        """The pair of channels that turns so often within the original length."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return channels * math.log(turns) / (2 * math.log(base))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(len(waves), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
