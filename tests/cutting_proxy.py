"""A TCP proxy that can cut connections, hold data up, and let answers arrive in part."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import threading
import time


class CuttingProxy:
    """Forwards `HOST`:``target`` to 127.0.0.1:``target``; connections are closed while nobody listens there.

    The service must be ``known_as`` the former: it proves that it knows the secret to nobody who was sent elsewhere.

    Args:
        target: the port.
        seed: of delays and of where answers are truncated.

    Attributes:
        counts: faults that met data: ``cut`` connections, ``delayed`` chunks, ``truncated`` answers, and answers whose
            head was whole and whose ``body`` was not.
    """

    HOST = "127.0.0.2"

    def __init__(self, target: int, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._live: set[socket.socket] = set()
        self._to_truncate = {"truncated": 0, "body": 0}  # by the name of the count
        self._delay_until = 0.0
        self.counts = {"cut": 0, "delayed": 0, "truncated": 0, "body": 0}
        self._listener = socket.create_server((self.HOST, target), backlog=64)
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections now, whatever is under way."""
        with self._lock:
            live = list(self._live)
        for connection in live:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
                self.counts["cut"] += 1

    def delay(self, seconds: float) -> None:
        """For so long, hold up every chunk of data for a random part of a second."""
        self._delay_until = time.monotonic() + seconds

    def truncate(self, answers: int) -> None:
        """Break off the next answers somewhere."""
        with self._lock:
            self._to_truncate["truncated"] += answers

    def truncate_bodies(self, answers: int) -> None:
        """Let the next answers that have a body arrive with their whole head and a part of the body."""
        with self._lock:
            self._to_truncate["body"] += answers

    def close(self) -> None:
        """Stop, and close everything."""
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._live |= {client, server}
            for source, sink, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._pump, args=(source, sink, is_answer), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if time.monotonic() < self._delay_until:
                    self.counts["delayed"] += 1
                    time.sleep(self._random.uniform(0.0, 0.5))
                if is_answer and self._take("truncated"):
                    sink.sendall(data[: self._random.randrange(len(data))])
                    break
                if is_answer and data.startswith(b"HTTP/1.") and self._to_truncate["body"]:
                    while not (head := re.match(rb"(?s).*?\r\n\r\n", data)):
                        data += source.recv(65536) or b"\r\n\r\n"
                    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head[0])
                    if length and int(length[1]) and self._take("body"):
                        size = head.end() + self._random.randrange(int(length[1]))
                        while len(data) < size and (more := source.recv(65536)):
                            data += more
                        sink.sendall(data[:size])
                        break
                sink.sendall(data)
        for connection in (source, sink):
            with self._lock:
                self._live.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _take(self, kind: str) -> bool:
        """Whether this answer shall be truncated so."""
        with self._lock:
            if not self._to_truncate[kind]:
                return False
            self._to_truncate[kind] -= 1
            self.counts[kind] += 1
            return True
