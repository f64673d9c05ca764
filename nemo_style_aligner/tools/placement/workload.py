"""What a run computes on: models by name or file, and lengths of prompts and responses."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.placement.costs import Sample


def _shape(layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int) -> ModelArchitecture:
    return ModelArchitecture(layers, hidden, ffn, heads, groups, vocab, max_position_embeddings=131072)


def _mixture(shape: ModelArchitecture, experts: int, size: int) -> ModelArchitecture:
    """Of Qwen3's."""
    of_8 = Experts(number=experts, per_token=8, ffn_hidden_size=size)
    return dataclasses.replace(shape, kv_channels=128, qk_layernorm=True, experts=of_8, family="qwen3_moe")


def _gpt_oss(layers: int, experts: int) -> ModelArchitecture:
    shape = ModelArchitecture(layers, 2880, 2880, 64, 8, 201088, 64, max_position_embeddings=131072, bias=True)
    return dataclasses.replace(
        shape,
        clamped_swiglu=True,
        attention_sinks=True,
        sliding_window=128,
        windowed_layers=tuple(range(0, layers, 2)),
        rotary_base=150000.0,
        rope_scaling=RopeScaling("yarn", 32.0, 4096, truncate=False),
        experts=Experts(number=experts, per_token=4, ffn_hidden_size=2880),
        family="gpt_oss",
    )


MODELS = {
    "1b": dataclasses.replace(_shape(16, 2048, 8192, 32, 8, 128256), tied_embeddings=True),  # Llama 3.2
    "7b": dataclasses.replace(_shape(28, 3584, 18944, 28, 4, 152064), qkv_bias=True),  # Qwen2.5
    "8b": _shape(32, 4096, 14336, 32, 8, 128256),  # Llama 3.1, as the next two
    "70b": _shape(80, 8192, 28672, 64, 8, 128256),
    "405b": _shape(126, 16384, 53248, 128, 8, 128256),
    "14b": dataclasses.replace(_shape(48, 5120, 13824, 40, 8, 152064), qkv_bias=True),  # Qwen2.5, as the next
    "qwen3-30b-a3b": _mixture(_shape(48, 2048, 6144, 32, 4, 151936), 128, 768),
    "qwen3-235b-a22b": _mixture(_shape(94, 4096, 12288, 64, 4, 151936), 128, 1536),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "32b": dataclasses.replace(_shape(64, 5120, 27648, 40, 8, 152064), qkv_bias=True),
}


def find_model(name: str) -> ModelArchitecture:
    """The shape of a model: a name of `MODELS`, a .nemo archive, or a Hugging Face folder.

    Raises:
        UserError: it is none of these.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"{name}: no such model: give {', '.join(MODELS)}, a .nemo archive or a Hugging Face folder")
    from nemo_style_aligner.engine.weights.huggingface_config import read_architecture
    from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_config  # which takes seconds

    try:
        if (path / "config.json").is_file():
            return read_architecture(path)
        return ModelArchitecture.from_nemo_config(load_nemo_config(path))
    except (ValueError, OSError) as error:
        raise UserError(f"{name}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: log-normal, cut off at ``most``, so that their mean is ``mean``; or ``given`` ones.

    A ``sigma`` of 0 makes all lengths the mean.
    """

    mean: float
    sigma: float = 0.0
    most: int = 0
    given: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str, option: str = "lengths") -> Lengths:
        """Read ``512``, ``lognormal:mean=330,sigma=1,max=2048``, or the name of a JSONL file: see `_of_file`.

        Raises:
            UserError: it is none of these; ``option`` says where it was given.
        """
        if text.isdecimal() and int(text) > 0:
            return cls(float(text), 0.0, int(text))
        number = r"(\d+(?:\.\d+)?)"
        if found := re.fullmatch(rf"lognormal:mean={number},sigma={number},max=(\d+)", text):
            mean, sigma, most = float(found[1]), float(found[2]), int(found[3])
            if not 1 <= mean <= most:
                raise UserError(f"{option} {text}: the mean must be at least 1 and at most the maximum")
            return cls(mean, sigma, most)
        if Path(text).is_file():
            return cls._of_file(Path(text))
        raise UserError(
            f"{option} {text!r}: there is no such file, and it is no number and not lognormal:mean=M,sigma=S,max=N; "
            "give one of these, the file with a length in each line"
        )

    @classmethod
    def _of_file(cls, path: Path) -> Lengths:
        """One whole number per line, or in the field ``length``."""
        lengths = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                value = value["length"] if isinstance(value, dict) else value
            except (ValueError, KeyError):
                value = None
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{path}:{number}: give a whole number of tokens above 0, or one in the field `length`")
            lengths.append(value)
        if not lengths:
            raise UserError(f"{path} has no lengths")
        return cls(sum(lengths) / len(lengths), 0.0, max(lengths), tuple(lengths))

    def draw(self, count: int, source: random.Random) -> list[int]:
        """Draw some lengths."""
        if self.given:
            return source.choices(self.given, k=count)
        if not self.sigma:
            return [round(self.mean)] * count
        mu = self._mu()
        return [min(self.most, max(1, round(source.lognormvariate(mu, self.sigma)))) for _ in range(count)]

    def _mu(self) -> float:
        """Mean of the logarithms at which the mean of min(length, most) is ``mean``; bisection."""

        def cut_mean(mu: float) -> float:
            z = (math.log(self.most) - mu) / self.sigma
            below = math.exp(mu + self.sigma**2 / 2) * normal.cdf(z - self.sigma)
            return below + self.most * (1 - normal.cdf(z))

        normal = statistics.NormalDist()
        low, high = math.log(self.mean) - self.sigma**2, math.log(self.most) + 4 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if cut_mean(middle) < self.mean else (low, middle)
        return low


def draw_steps(
    prompts: Lengths, responses: Lengths, rollouts: int, group: int, steps: int, seed: int = 0
) -> list[list[Sample]]:
    """Samples of some steps: ``rollouts`` in groups of ``group``, which share a prompt."""
    source = random.Random(seed)
    drawn = []
    for _ in range(steps):
        lengths = [length for length in prompts.draw(-(-rollouts // group), source) for _ in range(group)]
        drawn.append([Sample(*pair) for pair in zip(lengths, responses.draw(rollouts, source), strict=False)])
    return drawn


def mean_context(samples: Sequence[Sample]) -> float:
    """Tokens that a slot holds on average while it is in use: long responses hold theirs longer."""
    spent = sum(sample.response for sample in samples)
    return sum(sample.response * (sample.prompt + sample.response / 2) for sample in samples) / spent
