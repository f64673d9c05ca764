"""Merge an adapter into its base model, or write it as a directory that PEFT loads.

    python convert_adapter.py --adapter lora.nemo --base llama.nemo --output merged.nemo
    python convert_adapter.py --adapter lora.nemo --base llama.nemo --output lora-peft

An adapter is a PEFT directory, an archive that a job wrote with model.peft.archive=adapter, or a training checkpoint.
`nsa convert` does the same.
"""

from __future__ import annotations

try:
    from nemo_style_aligner.tools.cli.convert import script
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

if __name__ == "__main__":
    script(__doc__, "--adapter", "--output")
