"""Make a .nemo checkpoint from a Hugging Face model directory (Llama, Mistral, Qwen, Phi, Granite and more).

docs/checkpoints.md lists the families.

    python convert_hf_to_nemo.py --input-dir Llama-3.1-8B-Instruct --output llama.nemo

A model that is too large for one process is split:

    torchrun --nproc-per-node 4 convert_hf_to_nemo.py --tensor-parallel 4 --input-dir ... --output ...

The checkpoint can be loaded with any tensor and pipeline parallel sizes, whatever sizes it was written with.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.arguments import conversion_arguments
from nemo_style_aligner.launch.ending import install_excepthook


def main() -> None:
    install_excepthook()
    parser = conversion_arguments(__doc__)
    parser.add_argument("--input-dir", required=True, help="Hugging Face directory: config, safetensors, tokenizer")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    arguments = parser.parse_args()

    # Imported here: it takes seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.models.conversion import hf_to_nemo, run_conversion

    run_conversion(hf_to_nemo, arguments.input_dir, arguments.output, arguments)


if __name__ == "__main__":
    main()
