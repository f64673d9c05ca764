"""Chat templates: a model's own programs, rendered in a process that can take little time and memory.

jinja2's sandbox keeps a template from reaching anything but its arguments, not from an endless loop or from a text that
fills the machine. The kernel's limits do, whatever the template is made of; and that process has no secret to tell.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

from nemo_style_aligner.engine.text.helper_process import HelperProcess
from nemo_style_aligner.guard.wanted import CHECK_SECONDS, wanted

_CPU_SECONDS = 5  # for each text; the longest real ones take hundredths
_MEMORY_BYTES = 512 << 20
_TEXT_LENGTH = 64 << 20  # characters
_WAIT_SECONDS = 300.0  # for a text, on a machine that has hardly time for it
_SHORT = {"conversations": [[{"role": "user", "content": "Hi"}]], "tools": None}  # what any good template renders
_TOO_MUCH = f"it takes more than {_CPU_SECONDS} s of computing or {_MEMORY_BYTES >> 20} MiB of memory"


class TemplateError(ValueError):
    """A template refuses its arguments, or cannot be rendered within the limits."""


class _Renderer:
    """The process that renders this one's templates, and the templates that take too much."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: HelperProcess | None = None
        self._refused: set[str] = set()

    def render(self, template: str, arguments: dict[str, Any]) -> str:
        """Render a template, as transformers does; thread-safe.

        Args:
            template: jinja2 source.
            arguments: of transformers' ``render_jinja_template``, as JSON has them.

        Raises:
            TemplateError: the template raises an error; or it takes too much time or memory. One that does so for a
                short text, too, is not tried again.
            TypeError: a variable that JSON does not have.
        """
        request = json.dumps([template, arguments])
        while not self._lock.acquire(timeout=CHECK_SECONDS):
            wanted.get()()
        try:
            if template in self._refused:
                raise TemplateError(_TOO_MUCH)
            reply = self._ask(request)
            if reply is None:
                if self._ask(json.dumps([template, arguments | _SHORT])) is None:
                    self._refused.add(template)
                raise TemplateError(_TOO_MUCH)
        finally:
            self._lock.release()
        if "error" in reply:
            raise TemplateError(reply["error"])
        return reply["text"]

    def _ask(self, request: str) -> dict[str, str] | None:
        """The process's reply; None if the request ends it, or it is silent. The next one starts another process."""
        for _ in range(2):  # it may have been killed from outside
            process, self._process = self._process, None
            if process is None or process.owner != os.getpid():
                process = HelperProcess(__name__)
            process.send(request)
            reply: dict[str, str] | None = process.answer(_WAIT_SECONDS)
            if reply is not None:
                self._process = process
                return reply
            if process.close() == -signal.SIGXCPU:
                return None
        return None


render = _Renderer().render


# ---- in the process of its own ------------------------------------------------------------------


def answerer() -> Callable[[str], dict[str, str]]:
    """Limit this process, and return what renders a text."""
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MEMORY_BYTES,) * 2)

    def render(request: str) -> dict[str, str]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = math.ceil(used.ru_utime + used.ru_stime) + _CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        return _rendered(render_jinja_template, *json.loads(request))

    return render


def _rendered(render_jinja_template: Any, template: str, arguments: dict[str, Any]) -> dict[str, str]:
    from jinja2 import TemplateError as JinjaError

    try:
        (text,), _ = render_jinja_template(chat_template=template, **arguments)
    except MemoryError:
        return {"error": _TOO_MUCH}
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        kind = "" if isinstance(error, JinjaError | TypeError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{error}"[:1000]}
    return {"text": text} if len(text) <= _TEXT_LENGTH else {"error": f"its text has {len(text):,} characters"}
