"""``python -m nemo_style_aligner.cli`` is ``nsa``, also under ``torchrun -m``."""

from nemo_style_aligner.cli.main import main

if __name__ == "__main__":
    main()
