"""Make a Hugging Face model directory from a .nemo checkpoint; a reward model becomes a sequence classifier.

    python convert_nemo_to_hf.py --input llama.nemo --output-dir llama-hf

A model that is too large for one process is split:

    torchrun --nproc-per-node 4 convert_nemo_to_hf.py --tensor-parallel 4 --input ... --output-dir ...
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
    parser.add_argument("--input", required=True, help="the .nemo file or directory")
    parser.add_argument("--output-dir", required=True, help="the directory to write; must not exist or be empty")
    arguments = parser.parse_args()

    # Imported here: it takes seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.models.conversion import nemo_to_hf, run_conversion

    run_conversion(nemo_to_hf, arguments.input, arguments.output_dir, arguments)


if __name__ == "__main__":
    main()
