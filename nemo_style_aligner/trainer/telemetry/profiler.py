"""torch's profiler over some steps: what the processor and the GPU do, as a trace that Perfetto opens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from nemo_style_aligner.trainer.config.schema import ProfiledSteps


@contextlib.contextmanager
def profiled(section: ProfiledSteps | None, log_dir: Path, rank: int, done: int) -> Iterator[Callable[[], None]]:
    """Profile the steps of ``section``, ``trainer.profile``, into ``profile/rank_N_from_step_A.json.gz``.

    The body calls what it is given at the end of each step; ``done`` were made before. If it ends within the range,
    what there is is written.
    """
    first = last = 0
    if section is not None and section.start_step is not None and rank in section.ranks:
        first, last = max(done + 1, section.start_step), section.end_step or section.start_step
    if first == 0 or last < first:
        yield lambda: None
        return

    def write(profile: torch.profiler.profile) -> None:
        path = log_dir / "profile" / f"rank_{rank}_from_step_{first}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))

    before = first - 1 - done
    warm = min(before, 1)
    schedule = torch.profiler.schedule(wait=before - warm, warmup=warm, active=last - first + 1, repeat=1)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=write, acc_events=True) as profile:
        yield profile.step
