"""``nsa serve-critic``: PPO's critic as a service."""

from __future__ import annotations

from nemo_style_aligner.tools.cli.train import job

command = job("serve-critic", "serve_ppo_critic.py", "The critic and its training as a service.")
