"""RLHF for Megatron-Core models: PPO with a refitted generation engine, SFT and reward models."""

from nemo_style_aligner.parallel.cpu import install_import_hook

__version__ = "0.1.0"

# Before anything can import megatron.core: where CUDA is absent it needs the rewriting of parallel/cpu.py.
install_import_hook()
