"""How the two ends of a connection show each other that they know the shared secret, which neither ever sends.

A client begins a connection with a random challenge and the address that it has dialled. The server answers with a
number of its own, and with the proof: an HMAC over both numbers and the address, keyed with the secret. Both ends then
have a key for this one connection. With it the client signs each request, and the server each answer: what it is, the
how manieth of the connection, and the digest of its body. So whoever listens in a service's place learns nothing; who
relays from another address or port is found out by both ends; nothing can be changed, and nothing sent a second time.

Ends without a secret sign with an empty key: that proves nothing, but still finds what was damaged on its way.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Iterable
from typing import Any

from nemo_style_aligner.guard.secret import HOW_TO_SHARE

CHALLENGE_HEADER = "X-Challenge"
PROOF_HEADER = "X-Proof"
SIGNATURE_HEADER = "X-Signature"
_PURPOSE = "nemo-style-aligner"  # so that a proof is of no use wherever else the secret may be used
_NO_SECRET = "none"
_PLACE = r"[\w.:\[\]-]{1,300}"
_CHALLENGE = re.compile(rf"([\w-]{{1,128}}) ({_PLACE})", re.ASCII)
_PROOF = re.compile(rf"({_PLACE}) ([\w-]{{1,128}}) ([0-9a-f]{{64}}|{_NO_SECRET})", re.ASCII)
# Fields that belong to the way, or that a library adds.
_UNSIGNED_FIELDS = frozenset(
    [
        *("accept", "accept-encoding", "connection", "content-length", "date", "expect", "host", "keep-alive"),
        *("server", "transfer-encoding", "user-agent", "via", SIGNATURE_HEADER.lower()),
    ]
)


class UnprovenServerError(Exception):
    """The program that listens has not proven that it knows the secret, or an answer is not what that server sent.

    ``is_final``: it says that it is a service of this project, but with another secret, with none, or in another place.
    Waiting does not help then.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Signatures:
    """The signatures of one connection's requests and answers: each end has one, and both count the requests."""

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        self._requests = 0

    def of_request(self, method: str, target: str, fields: Iterable[tuple[str, str]], digest: str) -> str:
        """The value of `SIGNATURE_HEADER` for the connection's next request.

        ``fields``: its header's names and values, the names as in HTTP or in WSGI; ``digest``: `body_digest` of its
        body.
        """
        self._requests += 1
        return self._signature("request", f"{method} {target}", fields, digest)

    def of_answer(self, status: int, fields: Iterable[tuple[str, str]], digest: str) -> str:
        """The value of `SIGNATURE_HEADER` for the answer to the latest request; see `of_request`."""
        return self._signature("answer", str(status), fields, digest)

    def _signature(self, kind: str, first_line: str, fields: Iterable[tuple[str, str]], digest: str) -> str:
        named = ((name.replace("_", "-").lower(), value) for name, value in fields)
        signed = sorted(f"{name}: {value}" for name, value in named if name not in _UNSIGNED_FIELDS)
        return f"{digest} {_code(self._key, kind, str(self._requests), first_line, digest, *signed)}"


def body_digest(body: bytes | memoryview) -> str:
    """The SHA-256 of a body, in hex: with the processor's instructions for it the fastest of the standard library."""
    return hashlib.sha256(body).hexdigest()


def place_of(address: tuple[Any, ...]) -> str:
    """A socket's address as host:port, the same at both ends."""
    host = str(address[0]).split("%")[0].removeprefix("::ffff:")
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"


def challenge(dialled: str) -> str:
    """A new value of `CHALLENGE_HEADER`, from a client that has ``dialled`` this place."""
    return f"{secrets.token_hex(16)} {dialled}"


def prove(
    secret: str | None, challenge: str, place: str, known_as: Collection[str] = ()
) -> tuple[str, Signatures] | None:
    """A server's value of `PROOF_HEADER`, and the signatures of the connection from now on.

    ``place``: where the connection has reached the server, which may be ``known_as`` other places, too. None if the
    ``challenge`` is malformed: no client would send it.
    """
    given = _CHALLENGE.fullmatch(challenge)
    if given is None:
        return None
    place, nonce = given[2] if given[2] in known_as else place, secrets.token_hex(16)
    if secret is None:
        return f"{place} {nonce} {_NO_SECRET}", Signatures()
    code = _code(secret.encode(), "proof", given[1], nonce, place)
    return f"{place} {nonce} {code}", _agreed(secret, given[1], nonce, place)


def check_proof(proof: str, secret: str, challenge: str) -> Signatures:
    """A client's signatures of the connection from now on.

    Raises `UnprovenServerError` unless ``proof``, the answer's `PROOF_HEADER`, is the one for this ``challenge``.
    """
    given = _PROOF.fullmatch(proof)
    if given is None:
        raise UnprovenServerError(f"its answer has no proof ({PROOF_HEADER})")
    number, dialled = challenge.split(" ")
    place, nonce, code = given.groups()
    if code == _NO_SECRET:
        raise UnprovenServerError(
            "the service has no secret, but this job has one: give both the same token", is_final=True
        )
    if not hmac.compare_digest(code, _code(secret.encode(), "proof", number, nonce, place)):
        raise UnprovenServerError(f"the service has another secret than this job. {HOW_TO_SHARE}", is_final=True)
    if place != dialled:
        raise UnprovenServerError(
            f"the service that answers listens on {place}: connect to that one. If {dialled} leads there on purpose "
            f"(a tunnel, a container's port mapping), start the service with its key known_as=['{dialled}']",
            is_final=True,
        )
    return _agreed(secret, number, nonce, place)


def _agreed(secret: str, *agreed: str) -> Signatures:
    return Signatures(_code(secret.encode(), "key", *agreed).encode())


def _code(key: bytes, *parts: str) -> str:
    return hmac.new(key, "\n".join((_PURPOSE, *parts)).encode(), hashlib.sha256).hexdigest()
