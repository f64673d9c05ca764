"""``nsa plan``: which placements of a run fit, and how long a step takes in each."""

from nemo_style_aligner.placement.commands import plan as command

__all__ = ["command"]
