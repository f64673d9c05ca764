"""Make a .nemo checkpoint from a training checkpoint, to evaluate it, convert it or start another job from it.

    python convert_checkpoint_to_nemo.py --input sft/checkpoints/*-step=20-* --output step20.nemo

The result is what the job (SFT, reward model, actor or critic, at any parallel layout) would have written at the end of
training. `nsa convert` does the same.
"""

from __future__ import annotations

try:
    from nemo_style_aligner.tools.cli.convert import script
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

if __name__ == "__main__":
    script(__doc__, "--input", "--output")
