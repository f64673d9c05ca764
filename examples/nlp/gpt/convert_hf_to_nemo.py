"""Make a .nemo checkpoint from a Hugging Face model directory (Llama, Mistral, Qwen, Phi, Granite and more).

    python convert_hf_to_nemo.py --input-dir Llama-3.1-8B-Instruct --output llama.nemo

A model that is too large for one process is split:

    torchrun --nproc-per-node 4 convert_hf_to_nemo.py --tensor-parallel 4 --input-dir ... --output ...

The checkpoint can be loaded with any tensor and pipeline parallel sizes. `nsa convert` does the same.
"""

from __future__ import annotations

try:
    from nemo_style_aligner.tools.cli.convert import script
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

if __name__ == "__main__":
    script(__doc__, "--input-dir", "--output")
