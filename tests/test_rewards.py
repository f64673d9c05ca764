"""Sources of rewards, as a config names them: functions, answers, services, and sums of them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.util
import json
import logging
import math
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from served_critic import CountingBackend, serve

from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.http_client import ClientLimits, ServerUnavailableError
from nemo_style_aligner.trainer.config.schema import ListedReward
from nemo_style_aligner.trainer.rl.remote_critic import RemoteCritic
from nemo_style_aligner.trainer.rl.reward_config import build_reward_source, reward_problems
from nemo_style_aligner.trainer.rl.rewards import Reward, RewardSource, RewardSum, WeightedSource
from nemo_style_aligner.trainer.rl.sample import Sample
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.trainer.services.score_client import Scores, SequencesToScore
from nemo_style_aligner.trainer.services.scores import REWARDS, ScoreEndpoint

pytestmark = pytest.mark.timeout(120)

LIMITS = ClientLimits(total_s=5.0, internal_errors=1, first_backoff_s=0.01)
FUNCTIONS = """
import asyncio
import threading
import time

import numpy as np

forever = threading.Event()

def right(prompt, response, line):
    return np.float32(response == line["answer"])

def parts(prompt, response, line):
    line["answer"] = "spoilt"  # a copy
    return {"length": len(response), "bonus": 0.5}

async def named(prompt, response, line):
    await asyncio.sleep(0.2)
    return {"reward": 7, "length": len(response)}

class _Mute:
    def __repr__(self):
        raise RuntimeError("no text")
    __str__ = __float__ = __repr__

class _MuteError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def shout():
    raise _MuteError

async def forking(prompt, response, line):
    return branching(prompt, response, line)

def branching(prompt, response, line):
    import os
    from pathlib import Path
    child = os.fork()
    if not child:
        if response == "raise":
            raise ValueError
        return -1
    os.waitpid(child, 0)
    with open(line["file"], "a") as file:
        file.write("here")
    return 1

def curriculum(prompt, response, line, step):
    return step

def odd(prompt, response, line):
    return eval(response)

async def judge(prompt, response, line):
    await asyncio.sleep(float(response))
    return 1

def slow(prompt, response, line):
    if response == "never":
        forever.wait()
    time.sleep(float(response))
    return 2

def two(prompt, response):
    return 0
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("rewards") / "functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def no_source(*_: str) -> RewardSource:
    raise AssertionError("no source is a service or an archive")


@pytest.fixture
def build() -> Iterator[Any]:
    built: list[RewardSum] = []

    def make(*sections: dict[str, Any], **options: Any) -> RewardSum:
        built.append(
            build_reward_source(
                [ListedReward(**section) for section in sections],
                service=no_source,
                reward_model=no_source,
                limits=LIMITS,
                token=None,
                **options,
            )
        )
        return built[-1]

    yield make
    for source in built:
        source.close()


def responses(*texts: str, **line: Any) -> list[Sample]:
    line = {"text": "1+1=", "answer": "2"} | line
    ids = [7, 8, 9]
    return [
        Sample(n, n, line, [*ids, n], 3, True, lambda _, text=text: text, f"x.jsonl:{n}")  # type: ignore[misc]
        for n, text in enumerate(texts)
    ]


def score(source: RewardSum, given: Sequence[Sample]) -> list[Reward]:
    return source.score(given).result(60)


def values(source: RewardSum, given: Sequence[Sample]) -> list[float]:
    rewards = score(source, given)
    assert [reward.problem for reward in rewards] == [None] * len(given)
    return [reward.value for reward in rewards]


def test_functions_give_numbers_or_parts_and_are_summed(build: Any, functions: str) -> None:
    source = build(
        {"source": f"{functions}:right", "weight": 2},
        {"source": f"{functions}:parts", "name": "style", "weight": 0.1},
        {"source": f"{functions}:named"},
        {"source": "exact_match", "weight": 0},
    )
    began = time.monotonic()
    (first, *_, last) = score(source, responses(*["2"] * 40, "333"))
    assert time.monotonic() - began < 5  # coroutines run at once: one after the other they take 8 s
    assert first.value == pytest.approx(2 * 1 + 0.1 * 1.5 + 7) and last.value == pytest.approx(0.1 * 3.5 + 7)
    assert first.parts == {
        "right": 1,
        "exact_match": 1,
        "style": 1.5,
        "style/length": 1,
        "style/bonus": 0.5,
        "named": 7,
        "named/length": 1,
    }


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("float('nan')", "returned nan, which is not a finite number, for the prompt of x.jsonl:0 with the response"),
        ("1e39", "returned 1e\\+39, which is not a finite number"),
        ("'1'", "returned '1', which is not a finite number"),
        ("None", "returned None, which is not"),
        ("[1, 2]", "returned \\[1, 2\\], which is not"),
        ("{}", "returned {}, which are not named numbers with a finite sum"),
        ("{'a': 1, 'b': None}", "returned {'a': 1, 'b': None}, which are not named"),
        ("{'a': 1e38, 'b': 3e38}", "returned {'a': 1e\\+38, 'b': 3e\\+38}, which are not"),
        ("{1: 1}", "returned {1: 1}, which are not named"),
        ("1 / 0", r"raised ZeroDivisionError: .* for the prompt of x.jsonl:0 with the response '1 / 0'; the traceback"),
        ("exit('x')", "raised SystemExit: x"),
        ("_Mute()", "returned <_Mute instance at 0x[0-9a-f]+>, which is not a finite number"),
        ("[_Mute()]", "returned \\[<_Mute instance at 0x[0-9a-f]+>\\], which is not a finite number"),
        ("shout()", "raised _MuteError: its text cannot be had, for RuntimeError"),
    ],
)
def test_a_failing_function_gives_no_reward_but_a_problem(
    returns: str, message: str, build: Any, functions: str
) -> None:
    source = build({"source": f"{functions}:odd"}, {"source": "exact_match"})
    failed, scored = score(source, responses(returns, "True"))
    assert math.isnan(failed.value) and failed.problem is not None
    assert re.search(f"^reward odd: the reward function .*functions.py:odd {message}", failed.problem), failed.problem
    assert scored == Reward(1.0, {"odd": 1.0, "exact_match": 0.0})


@pytest.mark.parametrize("function", ["branching", "forking"])
def test_a_child_that_a_function_forks_does_not_come_back(
    function: str, build: Any, functions: str, tmp_path: Path
) -> None:
    source = build({"source": f"{functions}:{function}"})
    asked = [dataclasses.replace(r, line={"file": str(tmp_path / "calls")}) for r in responses("2", "raise")]
    assert [reward.value for reward in score(source, asked)] == [1, 1]
    assert (tmp_path / "calls").read_text() == "herehere"


def test_a_function_may_take_the_step(build: Any, functions: str) -> None:
    source = build({"source": f"{functions}:curriculum"})
    assert values(source, [dataclasses.replace(response, step=7) for response in responses("a", "b")]) == [7, 7]


def test_a_part_that_is_only_logged_fails_alone(build: Any, functions: str, caplog: pytest.LogCaptureFixture) -> None:
    source = build({"source": f"{functions}:odd", "weight": 0}, {"source": "exact_match"})
    failed, scored = score(source, responses("1/0", "2"))
    assert failed.value == 0.0 and failed.problem is None and math.isnan(failed.parts["odd"])
    assert scored == Reward(1.0, {"odd": 2.0, "exact_match": 1.0})
    assert "reward odd, which is only logged: the reward function" in caplog.text


def test_calls_over_their_limit_fail(build: Any, functions: str, caplog: pytest.LogCaptureFixture) -> None:
    judge = build({"source": f"{functions}:judge"}, seconds=0.2)
    late, *others = score(judge, responses("30", *["0"] * 20))
    assert "functions.py:judge took more than 0.2 s for the prompt of x.jsonl:0" in str(late.problem)
    assert str(late.problem).removeprefix("reward judge: ") in caplog.text, "hours of such calls would be silent"
    assert [other.value for other in others] == [1] * 20
    for _ in range(3):  # coroutines end, so there may be any number
        assert all(reward.problem for reward in score(judge, responses(*["30"] * 10)))

    slow = build({"source": f"{functions}:slow"}, seconds=0.2, threads=4)
    late, *others = score(slow, responses("never", *["0"] * 20))
    assert "took more than 0.2 s" in str(late.problem) and "a thread cannot be ended" in str(late.problem)
    assert [other.value for other in others] == [2] * 20
    assert score(judge, responses("0"))[0].value == 1


def test_a_mistake_is_shown_once_and_counted(build: Any, functions: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the function's own lines alone, however many responses meet it; another mistake is another kind."""
    failed = score(build({"source": f"{functions}:odd"}), responses(*["1 / 0"] * 32, "None", "None"))
    assert all(reward.problem for reward in failed)
    shown = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.exc_info is not None for record in shown] == [True, False, False]
    first, counted, other = (logging.Formatter().format(record) for record in shown)
    assert first.count('File "') == 2 and "functions.py" in first and "reward_functions.py" not in first
    assert counted.startswith("10 responses have failed like this one") and "returned None" in other


def test_a_call_that_hangs_does_not_keep_the_process(functions: str) -> None:
    program = """
        import time
        from nemo_style_aligner.trainer.rl.reward_functions import FunctionRewards
        from nemo_style_aligner.trainer.rl.sample import Sample
        source = FunctionRewards(lambda *_: time.sleep(1000), "sleep")
        future = source.score([Sample(0, 0, {"text": "a"}, [1, 2], 1, True, str)])
        source.close()
        print(type(future.exception(10)).__name__, future.exception())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "RewardError the reward function sleep was closed\n"


def test_sources_are_chosen_by_the_line_and_lines_are_checked_at_the_start(build: Any, functions: str) -> None:
    source = build(
        {"source": "exact_match", "only": {"task": "math"}},
        {"source": f"{functions}:right", "weight": 3, "only": {"task": ["code", None], "level": 1}},
    )
    assert values(source, responses("2", task="math", level=1)) == [1]
    assert values(source, responses("2", task="code", level=1)) == [3]
    assert values(source, responses("2", level=1.0)) == [3]

    def check(*lines: dict[str, Any]) -> str | None:
        try:
            source.check({f"p.jsonl:{n}": {"text": "1+1="} | line for n, line in enumerate(lines, start=1)})
        except DataError as error:
            return str(error)
        return None

    code = {"task": "code", "level": 1}
    assert check({"task": "math", "answer": "2"}, code) is None
    assert "p.jsonl:2: no source of rewards takes it" in str(
        check({"task": "math", "answer": 2}, {"task": "art", "level": 1}, code)
    )
    assert "p.jsonl:1: no source of rewards takes it" in str(  # true is no number
        check({"task": "code", "level": True}, {"task": "math", "answer": 2}, code)
    )
    problem = str(check(*[{"task": "math", "question": "?"}] * 8, code))
    assert "p.jsonl:1: reward exact_match: key 'answer' is missing" in problem
    assert "p.jsonl:5:" in problem and problem.endswith("\n... and 3 more lines")
    assert "'answer' should be a text" in str(check({"task": "math", "answer": None}, code))
    assert "no line of the prompts is for reward exact_match: none has the field 'task'" in str(check({"level": 1}))
    assert "for reward right: 'level' is never 1, but 2" in str(
        check({"task": "math", "answer": 2}, {**code, "level": 2})
    )


@pytest.mark.parametrize(
    ("sections", "messages"),
    [
        (
            [
                {"source": "exact", "wieght": 2},
                {"source": "exact_match", "weight": "x", "name": "a/b", "only": []},
                "exact_match",
                {"weight": 1},
                {"source": "exact_match", "only": {"task": {}, "level": []}},
                {"source": "http://localhost/reward_model"},
                {"source": "https://localhost:1/reward_model"},
                {"source": "rewards.py"},
                {"source": "exact_match"},
                {"source": "exact_match"},
            ],
            [
                r"\[0\] has no wieght: its keys are name, source, weight, only",
                r"\[0\].source=exact: choose exact_match, math_verify, service,",
                r"\[1\].name=a/b: give a plain word",
                r"\[1\].weight=x: must be a finite number",
                r"\[1\].only=\[\]: give fields",
                r"\[2\]=exact_match: give {name: NAME, source: SOURCE}",
                r"\[3\].source=None: choose",
                r"\[4\].only.task={}: give a text, a number",
                r"\[4\].only.level=\[\]: give a text, a number",
                r"\[5\].source=http://localhost/reward_model: choose",
                r"\[6\].source=https:",
                r"\[7\].source=rewards.py: choose",
                r"\[9\].name=exact_match: another source has this name",
            ],
        ),
        ([{"source": "/nowhere.py:reward"}], [r"\[0\].source=/nowhere.py:reward: /nowhere.py: no such file"]),
        ([{"source": "FILE:three"}], [r"\[0\].source=.*functions.py has no function three; it has [a-z_]+, "]),
    ],
)
def test_mistakes_in_the_config_are_told_at_once(sections: list[Any], messages: list[str], functions: str) -> None:
    listed = json.loads(json.dumps(sections).replace("FILE", functions))
    if not (lines := [*reward_problems(listed)]):
        with pytest.raises(UserError) as error:
            rewards = [ListedReward(**section) for section in listed]
            build_reward_source(rewards, service=no_source, reward_model=no_source, limits=LIMITS, token=None)
        lines = str(error.value).splitlines()
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert re.search(f"^trainer.ppo.rewards{message}", line), line


def test_a_function_must_take_what_it_gets(build: Any, functions: str) -> None:
    with pytest.raises(UserError, match=r"functions.py:two takes \(prompt, response\), but is called with"):
        build({"source": f"{functions}:two"})


def test_a_service_is_a_source(build: Any, functions: str) -> None:
    class Backend(CountingBackend):
        def infer(self, tokens: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
            rewards = super().infer(tokens, lengths)["rewards"].double()
            return {"rewards": torch.where(rewards == 25, torch.nan, rewards)}

    sequences = SequencesToScore(10, 1000, "")
    with serve(Backend(), endpoints=[ScoreEndpoint("rm", [REWARDS])]) as server:
        source = build({"source": f"{server.url}/rm", "weight": 0.5}, {"source": "exact_match"})
        source.wait_until_ready(10, sequences)
        right, failed = score(source, responses("2", "3"))
        assert right == Reward(13.0, {"rm": 24.0, "exact_match": 1.0})
        assert failed.problem == (
            f"reward rm: the reward service at {server.url} gave nan for the prompt of x.jsonl:1 with the response '3'"
        )
        wrong = build({"source": f"{server.url}/other"})
        with pytest.raises(ValueError, match="has no model 'other'"):
            wrong.wait_until_ready(10, sequences)
    with pytest.raises(ServerUnavailableError):
        score(source, responses("2"))


def test_a_critic_with_rewards_is_asked_once_whoever_gets_them() -> None:
    """Values and rewards come with one answer, also where only some of the rewards count, or each elsewhere."""
    asked: list[int] = []

    def infer(tokens: torch.Tensor, *_: object) -> concurrent.futures.Future[Scores]:
        asked.append(len(tokens))
        answer: concurrent.futures.Future[Scores] = concurrent.futures.Future()
        answer.set_result({"values": tokens[:, 1:].float(), "rewards": 10.0 * tokens[:, 0]})
        return answer

    client: Any = SimpleNamespace(infer_async=infer)
    critic = RemoteCritic(client, None, "refuse")
    of_kinds = [WeightedSource(kind, critic, weight, {"kind": [kind]}) for kind, weight in (("a", 1.0), ("b", 2.0))]
    for rewards in (critic, RewardSum([WeightedSource("all", critic)]), RewardSum(of_kinds)):
        samples = [
            Sample(0, 0, {"kind": kind}, [n, n + 1, n + 2], 1, True, str) for n, kind in ((3, "a"), (5, "b"), (7, "a"))
        ]
        found = [*Scorer(rewards, critic, 60, "the critic").score(samples).result()]
        assert [columns["values"].tolist() for *_, columns in found] == [[4.0, 5.0], [6.0, 7.0], [8.0, 9.0]]
        middle = 100.0 if len(asked) == 3 else 50.0
        assert [reward.value for _, reward, _ in found] == [30.0, middle, 70.0]
    assert asked == [3, 3, 3]


def test_the_function_in_the_documentation_works(build: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text()
    (tmp_path / "my_rewards.py").write_text(*re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    source = build({"source": f"{tmp_path}/my_rewards.py:polite"})
    assert values(source, responses("2, please", "2")) == pytest.approx([0.991, -0.001])


def test_without_the_package_math_verify_says_what_to_install(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'math-verify==0\.9"):
        build({"source": "math_verify"})


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="the package math-verify is not installed")
def test_math_verify_compares_by_value_within_limits(build: Any) -> None:
    source = build({"source": "math_verify"})
    assert values(source, responses(r"so \boxed{\frac{4}{2}}", "I think $x$", "It is 3.", answer="2")) == [1, 0, 0]
    assert values(source, responses("$1+x$", "$x-1$", answer="x + 1")) == [1, 0]
    assert values(
        source, responses("#### $\\sqrt{2}$ m", "1.41", answer="2^{1/2}", answer_extraction="after ####")
    ) == [1, 0]
    (huge,) = score(source, responses(r"\boxed{9^{9^{9^9}}}", answer="2"))
    assert huge == Reward(0.0, {"math_verify": 0.0, "math_verify/undecided": 1.0})
    for response, answer in (  # of what it knows, nothing is left to the package, which leaves out letters
        *[
            ("It is 5 million", "5"),
            (r"\boxed{2t}", "2"),
            ("it is 2x", "2"),
            ("$2$ million", "2"),
            (r"\boxed{7²}", "7"),
        ],
        *[(r"\boxed{101_2}", "101"), (r"$\sqrt{2}$ km", r"\sqrt{2}\text{ m}"), ("<think>$1+x$", "x + 1")],
    ):
        assert values(source, responses(response, answer=answer)) == [0], response
    assert values(source, responses(r"\boxed{\sqrt{12}}", "2√3", answer=r"2\sqrt{3}")) == [1, 1]
    assert values(source, responses("1.414214", "1.42", answer=r"\sqrt{2}")) == [1, 0]  # by its own tolerance
    assert values(source, responses("0.333333", "0.33", answer="1/3")) == [1, 0]
    assert values(source, responses(r"\boxed{18.9}", r"\boxed{18}", answer=r"\$18.90")) == [1, 0]
    (unreadable,) = score(source, responses("3", answer="$ $"))
    assert math.isnan(unreadable.value) and "the right answer '$ $' cannot be read" in str(unreadable.problem)
    with pytest.raises(DataError, match=r"x:2: reward math_verify: the right answer '\$' cannot be read as math"):
        source.check({f"x:{n}": {"text": "?", "answer": answer} for n, answer in enumerate((r"\$5", "US$5", "$"))})
