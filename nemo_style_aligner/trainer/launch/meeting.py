"""How the ranks of a job find each other: in a store that rank 0 opens, with messages for those who wait."""

from __future__ import annotations

import datetime
import logging
import socket
import threading
import time
from collections.abc import Sequence

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from nemo_style_aligner.engine.parallel.detection import LOOPBACK, LaunchError, LaunchInfo
from nemo_style_aligner.trainer.launch.ending import failures
from nemo_style_aligner.wording import some_of

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_QUIET_SECONDS = 5.0  # after which a rank that waits says so
_REPEAT_SECONDS = 30.0
_NAMED = 10  # missing ranks that a message names


def meet(info: LaunchInfo, backend: str, timeout: datetime.timedelta) -> Store:
    """Wait until all ranks are there, and return the store that they share. Collective.

    Args:
        info: has the address at which all are to meet. Under torchrun its agents have opened the store there.
        backend: that this rank is about to use, ``nccl`` or ``gloo``: all must use the same.
        timeout: for opening or finding the store, and again for waiting until all are there.

    Raises:
        LaunchError: rank 0 cannot be reached, the others do not come, or a rank has no GPU where others have one.
            Rank 0's error says which; those of the others, that rank 0 has ended or waits in vain.
    """
    if info.launcher == "torchrun":
        store, _, _ = next(iter(rendezvous("env://", timeout=timeout)))
    else:
        store = _open_store(info, timeout)
    try:
        store.set(_place(info.rank), f"{backend} {socket.gethostname()}")
        if info.rank == 0:
            _await_others(store, info, timeout)
            check_backends([tuple(store.get(_place(rank)).decode().split(" ", 1)) for rank in range(info.world_size)])
            store.set("complete", "")
        store.wait(["complete"], timeout)
    except DistError as error:
        raise LaunchError(
            f"rank 0, at {_address(info)}, has ended or is still waiting for other ranks (see its messages): {error}"
        ) from error
    return store


def check_backends(places: Sequence[tuple[str, ...]]) -> None:
    """Compare the backends of all ranks, each given with its host.

    Raises:
        LaunchError: some ranks have a GPU and others have none.
    """
    if len({backend for backend, _ in places}) > 1:
        without = [f"{rank} ({host})" for rank, (backend, host) in enumerate(places) if backend != "nccl"]
        raise LaunchError(
            f"of {len(places)} ranks these have no GPU that torch can use: {some_of(without, _NAMED)}; check the "
            f"driver there (nvidia-smi), and CUDA_VISIBLE_DEVICES"
        )


def _open_store(info: LaunchInfo, timeout: datetime.timedelta) -> Store:
    """Open the store on rank 0, and connect to it on the others."""
    assert info.master_addr is not None and info.master_port is not None  # `launch.initialize` has seen to it
    is_master = info.rank == 0
    is_one_machine = info.master_addr == LOOPBACK and info.local_world_size == info.world_size
    say = threading.Timer(_QUIET_SECONDS, _logger.warning, ("waiting for rank 0 at %s", _address(info)))
    say.daemon = True
    if info.local_rank == 0:  # once per machine
        say.start()
    try:
        return TCPStore(
            info.master_addr,
            info.master_port,
            info.world_size,
            is_master,
            timeout=timeout,
            wait_for_workers=False,  # `_await_others` does, with messages
            master_listen_fd=_loopback_listener(info) if is_master and is_one_machine else None,
        )
    except (OSError, DistError) as error:
        if is_master:
            raise LaunchError(
                f"port {info.master_port}, on which the ranks were to meet, cannot be used ({error}): "
                f"start the job again, with another MASTER_PORT if you have set one"
            ) from error
        raise LaunchError(
            f"rank {info.rank} has not found rank 0 at {_address(info)} within {timeout} "
            f"(trainer.distributed_timeout_minutes): {error}"
        ) from error
    finally:
        say.cancel()


def _loopback_listener(info: LaunchInfo) -> int:
    """A socket for the store of ranks on one machine: torch's own would listen everywhere, without authentication."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((LOOPBACK, info.master_port))
        opened.listen(info.world_size)
        return opened.detach()  # the store closes it


def _await_others(store: Store, info: LaunchInfo, timeout: datetime.timedelta) -> None:
    """Rank 0 waits for the other ranks."""
    started = time.monotonic()
    say_at = started + _QUIET_SECONDS
    missing = [str(rank) for rank in range(info.world_size)]
    while missing := [rank for rank in missing if not store.check([_place(rank)])]:
        now = time.monotonic()
        there = f"{info.world_size - len(missing)} of {info.world_size} ranks are there"
        status = f"{there}; missing: {some_of(missing, _NAMED)}"
        if line := failures.first():
            raise LaunchError(f"another rank has failed: {line}")
        if now - started > timeout.total_seconds():
            raise LaunchError(
                f"not all ranks have connected to {_address(info)} within {timeout} "
                f"(trainer.distributed_timeout_minutes): {status}"
            )
        if now > say_at:
            say_at = now + _REPEAT_SECONDS
            _logger.warning("waiting at %s: %s", _address(info), status)
        time.sleep(_POLL_SECONDS)


def _place(rank: int | str) -> str:
    return f"place/{rank}"


def _address(info: LaunchInfo) -> str:
    return f"{info.master_addr}:{info.master_port}"
