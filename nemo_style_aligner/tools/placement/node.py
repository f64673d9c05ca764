"""A plan's job on one node: its ranks, with the environment that they need."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_style_aligner.engine.parallel.detection import LaunchInfo
from nemo_style_aligner.trainer.launch.supervisor import Ranks, rank_environment


@dataclasses.dataclass(frozen=True)
class Share:
    """A node's share of a job.

    Attributes:
        log_dir: the job's.
        node, nodes: this node's place among the job's.
        devices: ranks on each node.
        master_addr, master_port: where rank 0, on the first node, waits for the others.
    """

    log_dir: Path
    node: int
    nodes: int
    devices: int
    master_addr: str
    master_port: int


def start_ranks(arguments: Sequence[str], env: Mapping[str, str], share: Share, cwd: str) -> Ranks:
    """Start a node's ranks of a job; what they print goes to ``output-NODE.log`` in its log directory.

    Args:
        arguments: of the Python interpreter.
        env: of the ranks, beside torchrun's variables.
        cwd: the folder that they start in.
    """
    share.log_dir.mkdir(parents=True, exist_ok=True)
    ranks = Ranks(share.log_dir / f"output-{share.node}.log")
    try:
        for local_rank in range(share.devices):
            rank, ranks_in_all = share.node * share.devices + local_rank, share.nodes * share.devices
            meeting = (share.master_addr, share.master_port)
            place = LaunchInfo(rank, ranks_in_all, local_rank, share.devices, "supervisor", *meeting)
            ranks.start([sys.executable, *arguments], rank_environment(env, place), cwd=cwd)
    except BaseException:
        ranks.end()
        raise
    return ranks


def visible_gpus() -> list[str]:
    """The GPUs that processes started here may use, by their numbers or names, without loading CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu and gpu != "-1"]
    found = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in Path("/dev").iterdir())
    return [str(number) for number in range(len([*filter(None, found)]))]
