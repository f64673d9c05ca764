"""The ranks that serve one model together: the first answers requests, all compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from nemo_style_aligner.engine.parallel.detection import detect_launch
from nemo_style_aligner.engine.parallel.groups import (
    control_group,
    initialize_model_parallel,
    neighbour_group,
    single_process,
)
from nemo_style_aligner.engine.shard import EngineGroup, TensorParallel
from nemo_style_aligner.trainer.launch.ending import install_excepthook, shutdown
from nemo_style_aligner.trainer.launch.initialization import initialize

_MINUTES = 30.0  # for a collective; loading a model may take some


@contextlib.contextmanager
def serving_ranks() -> Iterator[EngineGroup]:
    """This process's place among those that a launcher has started, with process groups, for a ``with`` statement.

    A single process is a group of its own. Leaving it is collective.

    Raises:
        LaunchError: the ranks cannot find each other.
    """
    info = detect_launch(os.environ)
    if info.world_size == 1:
        with single_process():
            yield EngineGroup()
        return
    install_excepthook()  # a rank that fails ends them all
    initialize(info, _MINUTES)
    size = dist.get_world_size()
    initialize_model_parallel(size, 1, seed=1234, timeout_minutes=_MINUTES)
    ranks = TensorParallel(dist.get_rank(), size, neighbour_group(size, _MINUTES))
    yield EngineGroup(ranks, control=control_group(size, _MINUTES))
    shutdown()
