"""Make a .nemo checkpoint from a GGUF file (llama.cpp's format), quantised or not, with its tokenizer.

python convert_gguf_to_nemo.py --input SmolLM2-135M-Instruct.Q4_1.gguf --output smollm2.nemo
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
    parser.add_argument("--input", required=True, help="the GGUF file (architecture llama, qwen2 or qwen3)")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    arguments = parser.parse_args()

    # Imported here: it takes seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.models.conversion import gguf_to_nemo, run_conversion

    run_conversion(gguf_to_nemo, arguments.input, arguments.output, arguments)


if __name__ == "__main__":
    main()
