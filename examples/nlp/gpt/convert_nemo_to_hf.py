"""Make a Hugging Face model directory from a .nemo checkpoint; a reward model becomes a sequence classifier.

    python convert_nemo_to_hf.py --input llama.nemo --output-dir llama-hf

`nsa convert` does the same.
"""

from __future__ import annotations

try:
    from nemo_style_aligner.tools.cli.convert import script
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

if __name__ == "__main__":
    script(__doc__, "--input", "--output-dir")
