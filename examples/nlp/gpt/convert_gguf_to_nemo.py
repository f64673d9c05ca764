"""Make a .nemo checkpoint from a GGUF file (llama.cpp's format), quantised or not, with its tokenizer.

    python convert_gguf_to_nemo.py --input SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.nemo

`nsa convert` does the same.
"""

from __future__ import annotations

try:
    from nemo_style_aligner.tools.cli.convert import script
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

if __name__ == "__main__":
    script(__doc__, "--input", "--output")
