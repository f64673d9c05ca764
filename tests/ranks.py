"""Ranks as forks of this process: they need not import torch and megatron-core again."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.parallel.groups import set_up_cuda_arithmetic


class RanksFailedError(RuntimeError):
    """Some ranks did not come to their end. ``exit_codes``: every rank's; None where it was still running."""

    def __init__(self, exit_codes: Sequence[int | None]) -> None:
        num_failed = sum(code != 0 for code in exit_codes)
        super().__init__(f"of {len(exit_codes)} ranks {num_failed} failed: exit codes {list(exit_codes)}")
        self.exit_codes = exit_codes


def fork_ranks(world_size: int, action: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Run ``action`` on forked ranks of one world, each with a GPU of its own where there are GPUs.

    Returns what it returns on rank 0. Raises as `fork_processes` does. Where there are GPUs, this process must not have
    used them: set PYTORCH_NVML_BASED_CUDA_CHECK=1 in its environment, so that looking for them does not count.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder, 'store')}"

        def in_world(rank: int) -> Any:
            timeout = timedelta(seconds=60)
            backend = "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(rank)
                set_up_cuda_arithmetic()
                backend = "nccl"
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=timeout)
            result = action()
            dist.barrier()  # who ends first takes the connections of the others along
            return result

        return fork_processes(world_size, in_world, seconds)


def fork_processes(count: int, action: Callable[[int], Any], seconds: float) -> Any:
    """Run ``action`` in forked processes of one thread each, with their numbers; what it returns in the first.

    Raises:
        RanksFailedError: in some process it raised (whose traceback is printed), was killed, or took longer.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def process_main(number: int) -> None:
        torch.set_num_threads(1)
        logging.basicConfig(level=logging.WARNING)
        try:
            result = action(number)
            if number == 0:
                sender.send(result)
        except BaseException:  # noqa: BLE001  (shown, and the parent sees the exit code)
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)

    deadline = time.monotonic() + seconds
    result = None
    processes = [context.Process(target=process_main, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    sender.close()
    with contextlib.suppress(EOFError):  # none is left that could say it
        if receiver.poll(seconds):
            result = receiver.recv()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if any(code != 0 for code in exit_codes):
        raise RanksFailedError(exit_codes)
    return result
