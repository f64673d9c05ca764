"""How a server proves that it knows the shared secret, before a client sends the secret to it.

While a service is down, anybody on its machine may listen on its port. A client that has a secret therefore begins each
connection with a random challenge, and goes on only if the answer has the challenge's HMAC, keyed with the secret. The
port is in the proof, too: who has taken it cannot relay the proof of a service with the same secret on another port.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from nemo_style_aligner.servers.protocol import LIVE_PATH
from nemo_style_aligner.servers.secret import HOW_TO_SHARE

CHALLENGE_HEADER = "X-Challenge"
PROOF_HEADER = "X-Proof"
_PURPOSE = "nemo-style-aligner"  # so that a proof is of no use wherever else the secret may be used
_CHALLENGE = re.compile(r"[\w-]{1,128}", re.ASCII)
_NO_SECRET = "none"
_STATUS_CHARACTERS = 60  # of the answer's status line, in messages
_PROOF = re.compile(rf"(\d{{1,5}}) ([0-9a-f]{{64}}|{_NO_SECRET})", re.ASCII)


class UnprovenServerError(Exception):
    """The program that listens has not proven that it knows the secret.

    ``is_final``: it says that it is a service of this project, but with another secret, with none, or on another port.
    Waiting does not help then.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def prove(secret: str | None, challenge: str, port: int) -> str | None:
    """The proof of a server that listens on ``port``; None if ``challenge`` is malformed: no client would send it."""
    if not _CHALLENGE.fullmatch(challenge):
        return None
    return f"{port} {_NO_SECRET if secret is None else _code(secret, challenge, port)}"


def challenge_request(address: str, challenge: str) -> bytes:
    """The request that asks for a proof. ``address``: host and port."""
    return f"HEAD {LIVE_PATH} HTTP/1.1\r\nHost: {address}\r\n{CHALLENGE_HEADER}: {challenge}\r\n\r\n".encode()


def check_proof(head: bytes, secret: str, challenge: str, address: str, port: int) -> None:
    """Raise `UnprovenServerError` unless ``head``, of the answer to `challenge_request`, holds the proof."""
    given = _PROOF.fullmatch(_field(head, PROOF_HEADER))
    if given is None:
        status = head.decode("latin-1").split("\r\n")[0][:_STATUS_CHARACTERS]
        raise UnprovenServerError(
            unproven(
                address,
                f"HEAD {LIVE_PATH} was answered {status!r} without a proof ({PROOF_HEADER}) in HTTP/1.1; it is another "
                "program, or a server without authentication: see remote_critic_rm.token",
            )
        )
    if given[2] == _NO_SECRET:
        raise UnprovenServerError(
            f"the service at {address} has no secret, but this job has one: give both the same token", is_final=True
        )
    if not hmac.compare_digest(given[2], _code(secret, challenge, int(given[1]))):
        raise UnprovenServerError(
            f"the service at {address} has another secret than this job. {HOW_TO_SHARE}", is_final=True
        )
    if int(given[1]) != port:
        raise UnprovenServerError(
            f"the service that answers at {address} listens on port {given[1]}: connect to that one; a tunnel or a "
            "container's port mapping must keep the port number. The secret is not sent otherwise",
            is_final=True,
        )


def unproven(address: str, reason: str) -> str:
    """The error message about a server that gives no proof at all."""
    return (
        f"the program listening at {address} does not prove that it knows the secret, so the secret is not sent: "
        f"{reason}"
    )


def _code(secret: str, challenge: str, port: int) -> str:
    return hmac.new(secret.encode(), f"{_PURPOSE}|{challenge}|{port}".encode(), hashlib.sha256).hexdigest()


def _field(head: bytes, name: str) -> str:
    """A header field of an answer; empty if it is missing, or ``head`` is not an HTTP/1.1 answer's."""
    status, *lines = head.decode("latin-1").split("\r\n")
    if status.startswith("HTTP/1.1 "):
        for line in lines:
            key, _, value = line.partition(":")
            if key.lower() == name.lower():
                return value.strip()
    return ""
