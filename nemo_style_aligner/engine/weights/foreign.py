"""Checkpoints of other projects, which are known and not read."""

from __future__ import annotations

from pathlib import Path


def refuse_nemo_2(path: Path) -> None:
    """Raise ValueError for a directory of NeMo 2.0 or Megatron-Bridge, saying what to do with it."""
    if (path / "context").is_dir() and (path / "weights").is_dir():
        raise ValueError(
            f"{path} is a NeMo 2.0 checkpoint (context/ and weights/), which is not read here: export it as a Hugging "
            "Face directory with NeMo (nemo.collections.llm.export_ckpt(path, target='hf', output_path=...)), and "
            "convert that with nsa convert"
        )
    if any(path.glob("run_config.yaml")) or any(path.glob("iter_*/run_config.yaml")):
        raise ValueError(
            f"{path} is a Megatron-Bridge checkpoint (run_config.yaml), which is not read here: export it as a Hugging "
            "Face directory (AutoBridge.export_ckpt), and convert that with nsa convert"
        )
