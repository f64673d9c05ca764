"""``nsa launch``: the jobs of a plan, on this machine or on a cluster."""

from nemo_style_aligner.placement.commands import launch as command

__all__ = ["command"]
