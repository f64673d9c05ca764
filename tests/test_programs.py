"""Programs as environments: a key of OpenAI's API for each episode; what is asked for with it is the sample."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from job_processes import Job, script
from job_processes import run as run_job
from small_models import chatml_tokenizer
from test_episodes import TIMEOUT, Trial, told
from test_episodes import job as job
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.rl.episodes.journal import EpisodeJournal
from nemo_style_aligner.trainer.rl.episodes.policy import Policy
from nemo_style_aligner.trainer.rl.episodes.programs import ProgramError, program_of
from nemo_style_aligner.trainer.rl.episodes.runner import Episode, build_environment
from nemo_style_aligner.trainer.rl.sample import Prompt
from nemo_style_aligner.trainer.telemetry.log_files import read_json_lines

LIBRARY = """
import json, os, sys, time, urllib.error, urllib.request

told = json.load(sys.stdin)
line, root = told["line"], told["base_url"].removesuffix("/v1")
assert (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]) == (told["base_url"], told["api_key"])

def post(path, key=told["api_key"], **body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(root + path, json.dumps({"model": told["model"], **body}).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        return answer.read()

def chat(messages, **others):
    answer = json.loads(post("/v1/chat/completions", messages=messages, **others))
    messages.append(answer["choices"][0]["message"])
    return answer

def generate(ids, most):
    answer = json.loads(post("/inference/v1/generate", token_ids=ids,
                             sampling_params={"max_tokens": most, "logprobs": 1}))
    return answer["choices"][0]

def refusal(**body):
    try:
        post(**body)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def trial(tokenizer: Tokenizer) -> Trial:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=tokenizer.vocab_size, initializer_range=0.3)
    return Trial(tokenizer, LlamaForCausalLM(config))


Run = Callable[..., tuple[dict[int, Episode], dict[str, float]]]


@pytest.fixture
def run(trial: Trial, tmp_path: Path) -> Run:
    """Runs episodes of a program that is given by its text, or of a server."""

    def run(
        text: str = "",
        numbers: Sequence[int] = range(1),
        *,
        url: str | None = None,
        journal: EpisodeJournal | None = None,
        max_tokens: int = 150,
        **limits: Any,
    ) -> tuple[dict[int, Episode], dict[str, float]]:
        file = tmp_path / "program.py"
        file.write_text(LIBRARY + text)
        named = schema.Program(**({"command": [sys.executable, str(file)]} if url is None else {"url": url}))
        prompts = [
            Prompt(n, trial.tokenizer.text_to_ids("?"), line={"n": n}, place=f"a.jsonl:{n}")
            for n in range(max(numbers) + 1)
        ]
        requests = (GenerationRequest(n, prompts[n].token_ids, derive_seed(1, n)) for n in numbers)
        done, sampling = dict[int, Episode](), SamplingParams(max_new_tokens=max_tokens)
        section = schema.Episodes(**{"seconds": 60, "max_replies": 8, **limits})
        of = (trial.engine, trial.tokenizer, sampling, trial.tokenizer.ids_to_text, section, journal)
        with contextlib.closing(build_environment(named, "trainer.ppo.environment", *of)) as environment:
            sums = environment.generate(
                trial.engine, EngineGroup(), requests, sampling, prompts, lambda e: done.update({e.request_id: e})
            )
        return done, sums

    return run


# ---- what is asked for is the sample ------------------------------------------------------------

TALK = """
messages = [{"role": "user", "content": f"{line['n']} and {line['n'] ** 2}?"}]
for _ in range(2):
    said = chat(messages, max_tokens=20)["choices"][0]["message"]["content"]
    messages.append({"role": "tool", "content": f"{sum(map(said.lower().count, 'aeiou'))} vowels, {line['n']}"})
chat(messages, max_tokens=20)
print("any line before the last one")
print(json.dumps({"length": len(messages[-1]["content"]), "upper": sum(map(str.isupper, messages[-1]["content"]))}))
"""


async def talk(policy: Policy, line: dict[str, Any]) -> dict[str, float]:
    n = line["n"]
    said = await policy.reply({"role": "user", "content": f"{n} and {n * n}?"}, max_tokens=20)
    for _ in range(2):
        vowels = sum(map(said.text.lower().count, "aeiou"))
        said = await policy.reply({"role": "tool", "content": f"{vowels} vowels, {n}"}, max_tokens=20)
    return {"length": len(said.text), "upper": sum(map(str.isupper, said.text))}


def test_a_program_that_says_what_a_function_says_has_its_episodes(run: Run, trial: Trial) -> None:
    """To the last bit, though it knows texts alone: what the policy has said is not tokenized again."""
    done, sums = run(TALK, range(4))
    of_function, _ = trial.run(talk, range(4))
    assert told(done) == told(of_function)
    assert all(e.prompt_token_ids == of_function[n].prompt_token_ids for n, e in done.items())
    assert sums["replies"] == 12 and sums["rows"] == 4 and sums["failed_episodes"] == 0


IDS = """
ids = [3, 4, 5]
first = generate(ids, 6)
scores = [token["logprob"] for token in first["logprobs"]["content"]]
second = generate([*ids, *first["token_ids"], 7, 8], 6)  # goes on
third = generate([*ids, 9], 6)  # does not
fourth = generate([*ids, 9, *third["token_ids"], 6], 6)
fifth = generate([*ids, *first["token_ids"], 7, 8, *second["token_ids"], 6], 6)  # the first row goes on
post("/v1/completions", prompt=[3, *map(int, "45")], max_tokens=1, stream=True)
print(json.dumps({"replies": [r["token_ids"] for r in (first, second, third, fourth, fifth)], "scores": scores}))
"""


def test_requests_with_a_common_beginning_are_one_row_and_others_are_further_rows(run: Run, tmp_path: Path) -> None:
    text = IDS.replace("print(json.dumps(", "open(__file__ + '.json', 'w').write(json.dumps(") + "print(1)\n"
    done, sums = run(text)
    said = json.loads((tmp_path / "program.py.json").read_text())
    first, second, third, fourth, fifth = said["replies"]
    episode = done[0]
    rows = [
        [3, 4, 5, *first, 7, 8, *second, 6, *fifth],
        [3, 4, 5, 9, *third, 6, *fourth],
        [3, 4, 5, episode.token_ids[-1]],
    ]
    whole = episode.prompt_token_ids + episode.token_ids
    assert whole == [token for row in rows for token in row]
    assert episode.row_lengths == [len(row) for row in rows] and sums["rows"] == 3 and sums["replies"] == 6
    mask = [False] * 3 + episode.mask
    assert [t for t, of in zip(whole, mask, strict=True) if of] == [
        *first, *second, *fifth, *third, *fourth, episode.token_ids[-1],
    ]  # fmt: skip
    assert said["scores"] == episode.logprobs[: len(first)]


def test_a_program_that_rewrites_its_history_gets_a_row_for_it(run: Run) -> None:
    done, sums = run(
        """
messages = [{"role": "user", "content": "first"}]
chat(messages, max_tokens=5)
messages[1]["content"] = "something else"
messages.append({"role": "user", "content": "more"})
chat(messages, max_tokens=5)
messages.append({"role": "user", "content": "again"})
chat(messages, max_tokens=5)
print(0.5)
"""
    )
    assert len(done[0].row_lengths) == 2 and done[0].num_replies == 3 and done[0].outcome == 0.5
    assert sums["rows"] == 2


def test_an_empty_reply_may_come_back_as_null(run: Run) -> None:
    text = """
messages = [{"role": "user", "content": "a"}]
chat(messages, max_tokens=1, stop_token_ids=list(range(100)))
messages[1] = {"role": "assistant", "content": messages[1]["content"] or None}
assert messages[1]["content"] is None, messages
chat([*messages, {"role": "user", "content": "b"}], max_tokens=2)
print(1)
"""
    done, _ = run(text)
    assert done[0].problem is None and len(done[0].row_lengths) == 1


def test_the_page_s_agent_is_an_environment(run: Run, trial: Trial) -> None:
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    _, example = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    reads = "told = json.load(sys.stdin)"
    told = 'told["line"] |= {"question": "2+2?", "answer": ""}'
    done, _ = run(example.replace(reads, told))
    assert done[0].problem is None and done[0].outcome == {"right": 1.0} and done[0].num_replies == 2
    assert len(done[0].row_lengths) == 1
    spoken = trial.tokenizer.ids_to_text(done[0].token_ids, keep_special=True)
    assert "<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n" in spoken


# ---- what is refused ----------------------------------------------------------------------------


def test_a_key_opens_one_episode_while_it_lasts(run: Run, tmp_path: Path) -> None:
    text = """
ask = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
kept = __file__ + ".key"
if line["n"] == 0:
    open(kept, "w").write(told["api_key"])
else:
    assert refusal(**ask, key=open(kept).read())[0] == 401
assert refusal(**ask, key="sk-guessed")[0] == 401 and refusal(**ask, key="")[0] == 401
post(**ask)
print(1)
"""
    done, _ = run(text, range(2), max_running=1)
    assert [e.problem for e in done.values()] == [None, None]


@pytest.mark.parametrize(
    ("asked_for", "named"),
    [({"temperature": 0.5}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"seed": 1}, "seed"), ({"n": 2}, "n"),
     ({"logit_bias": {"5": 3}}, "logit_bias"), ({"min_tokens": 2}, "min_tokens"), ({"model": "gpt-4"}, "model"),
     ({"response_format": {"type": "json_object"}}, "response_format")],
)  # fmt: skip
def test_what_is_the_jobs_to_say_is_refused_by_name(run: Run, asked_for: dict[str, Any], named: str) -> None:
    done, _ = run(
        f"""
body = {{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 2, "temperature": 1}}
post("/v1/chat/completions", **body)
status, said = refusal(path="/v1/chat/completions", **(body | {asked_for!r}))
assert status in (400, 404) and {named!r} in said, said
print(1)
"""
    )
    assert done[0].problem is None and done[0].num_replies == 1


# ---- failures -----------------------------------------------------------------------------------

ONCE = 'chat([{"role": "user", "content": "a"}], max_tokens=2)\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ONCE + "sys.exit('no such tool')", "a.jsonl:0: the program ended with status 1: no such tool"),
        (ONCE + "os.kill(os.getpid(), 9)", "a.jsonl:0: the program was killed by SIGKILL"),
        ("print(1); sys.exit()", "a.jsonl:0: it ended before the policy had replied"),
        (ONCE + "time.sleep(60)", "a.jsonl:0: took more than 5 s"),
    ],
)
def test_a_program_that_fails_is_named_and_others_go_on(run: Run, text: str, why: str) -> None:
    body, hangs = "".join(f"    {part}\n" for part in text.splitlines()), "sleep" in text
    numbers, seconds = range(1 if hangs else 2), 5.0 if hangs else 60.0
    done, sums = run(f"if line['n'] == 0:\n{body}{ONCE}print(1)\n", numbers, seconds=seconds)
    assert done[0].problem is not None and why in done[0].problem, done[0].problem
    assert all(done[n].problem is None for n in numbers[1:]) and sums["failed_episodes"] == 1


def test_nothing_of_a_program_is_left_behind(run: Run, tmp_path: Path) -> None:
    """Neither one that hangs, nor what one has started."""
    run("import subprocess\n" + ONCE + "subprocess.Popen(['sleep', '61.25'])\ntime.sleep(61.25)\n", seconds=5.0)
    run("import subprocess\n" + ONCE + "subprocess.Popen(['sleep', '61.25'])\nprint(1)\n")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
        if not any(b"61.25" in c or str(tmp_path).encode() in c for c in commands):
            return
        time.sleep(0.1)
    raise AssertionError("a program is still there")


def test_a_program_that_fails_at_a_limit_is_cut_off_and_one_that_bears_it_has_its_reward(run: Run) -> None:
    text = "messages = [{'role': 'user', 'content': 'a'}]\nfor _ in range(9):\n    chat(messages, max_tokens=2)\n"
    text += "    messages.append({'role': 'user', 'content': 'on'})\n"
    done, sums = run(text, max_replies=3)
    assert (done[0].problem, done[0].outcome, done[0].finish_reason, sums["cut_episodes"]) == (None, 0.0, "length", 1)
    bearing = "try:\n" + "".join(f"    {part}\n" for part in text.splitlines())
    bearing += (
        "except urllib.error.HTTPError as error:\n    assert 'max_replies' in error.read().decode()\nprint(0.25)\n"
    )
    done, sums = run(bearing, max_replies=3)
    assert (done[0].problem, done[0].outcome, sums["cut_episodes"]) == (None, 0.25, 0)


def test_a_program_that_cannot_be_is_refused_by_name() -> None:
    for section, why in (
        ({}, "give one of"),
        ({"command": ["x"], "url": "http://a/"}, "give one of"),
        ({"command": []}, "give a program"),
        ({"command": ["no-such-program"]}, "no program no-such-program"),
        ({"url": "ftp://a/"}, "http://HOST:PORT/PATH"),
    ):
        with pytest.raises(ProgramError, match=re.escape(why)):
            program_of(schema.Program(**section), "trainer.ppo.environment", 1.0)


def test_a_program_is_no_rank_and_has_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own variables stay, also those whose names begin as a launcher's do."""
    hidden = ("RANK", "LOCAL_RANK", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "TORCHELASTIC_RUN_ID")
    hidden += ("NEMO_STYLE_ALIGNER_TOKEN", "NEMO_STYLE_ALIGNER_TOKEN_FILE", "NEMO_STYLE_ALIGNER_SUPERVISOR_PID")
    kept = ("LOCAL_MODELS", "RANKING", "NEMO_STYLE_ALIGNER_CACHE")
    for name in (*hidden, *kept):
        monkeypatch.setenv(name, "1")
    printing = f"import json, os; print(json.dumps([n for n in {[*hidden, *kept]} if n in os.environ]))"
    section = schema.Program(command=[sys.executable, "-c", printing])
    tell = program_of(section, "trainer.ppo.environment", 1.0)
    assert tell({"base_url": "http://a/v1", "api_key": "k"}).run() == list(kept)


# ---- servers ------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Asks the policy once, and gives the line's number as the reward; of 2 nothing, of 3 an error."""
    seen: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(told)
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {told['api_key']}"}
            url = f"{told['base_url']}/chat/completions"
            with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
                assert answer.read().rstrip().endswith(b"data: [DONE]")
            number = told["line"]["n"]
            self.send_response(500 if number == 3 else 200)
            self.end_headers()
            self.wfile.write(b"" if number == 2 else b"out of cards" if number == 3 else b"%d" % number)

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}/run", seen
        serving.shutdown()


def test_a_server_is_sent_each_episode_and_answers_its_reward(
    run: Run, server: tuple[str, list[dict[str, Any]]]
) -> None:
    url, seen = server
    done, _ = run(numbers=range(4), url=url)
    assert [done[n].outcome for n in range(4)] == [0.0, 1.0, None, None]
    assert [done[n].problem for n in range(3)] == [None] * 3
    assert f"a.jsonl:3: {url} answered 500: out of cards" in str(done[3].problem)
    assert len({told["api_key"] for told in seen}) == len({told["episode"] for told in seen}) == 4
    gone, _ = run(url="http://127.0.0.1:9/run")
    assert "http://127.0.0.1:9/run does not answer" in str(gone[0].problem)


GYM = Path(__file__).parents[1] / "examples" / "environments" / "nemo_gym_agent.py"
GYM_LINE = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Help."}, {"role": "user", "content": "what's it like in sf?"}],
        "tools": [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}],
    }
}


@pytest.mark.parametrize("calls", [0, 2])
def test_an_agent_plays_tasks_of_nemo_gym(calls: int, tmp_path: Path) -> None:
    """A policy that calls a tool so often before it answers; the server counts calls by its cookie."""
    seen: list[tuple[str, Any]] = []
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "sf"}'}}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            asked = sum(path == "/v1/chat/completions" for path, _ in seen)
            message = {"content": "cold"} if asked > calls else {"content": None, "tool_calls": [call]}
            answers = {
                "/v1/chat/completions": {"choices": [{"message": {"role": "assistant", **message}}]},
                "/verify": body | {"reward": float(self.headers.get("Cookie") == "session=7")},
            }
            self.send_response(200)
            if self.path == "/seed_session":
                self.send_header("Set-Cookie", "session=7")
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path, {"weather": "cold"})).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{serving.server_address[1]}"
        told = {"line": GYM_LINE, "base_url": f"{url}/v1", "api_key": "k", "model": "policy", "episode": "1"}
        said = subprocess.run([sys.executable, GYM, url], input=json.dumps(told), capture_output=True, text=True)
        serving.shutdown()
    assert json.loads(said.stdout) == {"reward": 1.0}, said.stderr
    assert [path for path, _ in seen] == [
        "/seed_session", *["/v1/chat/completions", "/get_weather"] * calls, "/v1/chat/completions", "/verify",
    ]  # fmt: skip
    output = seen[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call_output"] * calls + ["message"]
    asked = seen[-2][1]
    assert [m["role"] for m in asked["messages"]] == ["system", "user", *["assistant", "tool"] * calls]
    assert asked["tools"][0]["function"]["name"] == "get_weather"


# ---- the journal --------------------------------------------------------------------------------


def test_what_has_ended_is_not_run_again(run: Run, tmp_path: Path) -> None:
    """Unless it has failed."""
    text = f"{ONCE}open(__file__ + '.log', 'a').write(told['episode'] + chr(10))\n"
    text += "sys.exit(line['n'] == 1) if not os.path.exists(__file__ + '.mended') else print(os.getpid())\n"
    text = text.replace("sys.exit(line['n'] == 1)", "(sys.exit(1) if line['n'] == 1 else print(os.getpid()))")
    journal = EpisodeJournal(tmp_path / "journal")
    before, _ = run(text, range(3), journal=journal)
    assert before[1].problem is not None
    (tmp_path / "program.py.mended").touch()
    after, sums = run(text, range(3), journal=EpisodeJournal(tmp_path / "journal"))
    assert {n: told({n: after[n]}) for n in (0, 2)} == {n: told({n: before[n]}) for n in (0, 2)}
    assert after[1].problem is None and sums["replies"] == 3
    ran = (tmp_path / "program.py.log").read_text().split()
    assert len(ran) == 4 and len(set(ran)) == 3
    journal.of_now()()
    assert not list((tmp_path / "journal").iterdir())


def test_episodes_of_other_weights_are_run_again(trial: Trial, tmp_path: Path) -> None:
    journal = EpisodeJournal(tmp_path)
    journal.write(5, "of some weights", {"request_id": 1})
    assert journal.read(5, "of some weights") == {"request_id": 1}
    assert journal.read(5, "of others") is None and journal.read(6, "of some weights") is None


# ---- jobs ---------------------------------------------------------------------------------------

AGENT = """
import json, os, pathlib, random, signal, sys, urllib.request

told, folder = json.load(sys.stdin), pathlib.Path(__file__).parent

def ask(prompt):
    body = json.dumps({"prompt": prompt, "max_tokens": 4, "return_token_ids": True}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + told["api_key"]}
    with urllib.request.urlopen(urllib.request.Request(told["base_url"] + "/completions", body, headers)) as answer:
        (choice,) = json.load(answer)["choices"]
    return choice["prompt_token_ids"] + choice["token_ids"]

ids = ask(told["line"]["text"])
if random.random() < 0.2:
    ask("Q: ")  # something else: a row of its own
else:
    ask([*ids, ids[0]])
value = random.randrange(10**5, 10**6) / 10**6
with (folder / "ran.txt").open("a") as ran:
    ran.write(f"{told['episode']} {value}\\n")
marker = folder / "kill_at"
if marker.exists() and len((folder / "ran.txt").read_text().split()) // 2 >= int(marker.read_text()):
    marker.unlink(missing_ok=True)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
print(value)
"""


def agent_job(job: Callable[..., list[str]], folder: Path, *others: str) -> list[str]:
    command = job(folder, *others)
    (folder / "agent.py").write_text(AGENT)
    program = f"trainer.ppo.environment={{command: [{sys.executable}, {folder / 'agent.py'}]}}"
    return [program if word.startswith("trainer.ppo.environment=") else word for word in command]


def ran(folder: Path) -> dict[str, list[float]]:
    """What each episode has returned, as often as it was run."""
    lines = [line.split() for line in (folder / "ran.txt").read_text().splitlines()]
    return {name: [float(value) for other, value in lines if other == name] for name, _ in lines}


def require_all_counted(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Each sample has a reward that a program has given, and no two the same."""
    samples = [s for s in read_json_lines(folder / "log" / "samples.jsonl") if s["step"] <= steps]
    newest = {(s["step"], s["sample"]): s for s in samples}
    given = [round(s["reward"], 6) for s in newest.values()]
    assert len(given) == 16 * steps == len(set(given))
    assert set(given) <= {round(value, 6) for values in ran(folder).values() for value in values}
    return list(newest.values())


def test_a_job_that_is_killed_neither_loses_nor_doubles_an_episode(
    job: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Programs are random: what had ended is as it was."""
    folder = tmp_path / "run"
    words = agent_job(job, folder, "trainer.ppo.val_check_interval=0")
    command = script("train_gpt_ppo_actor.py", *[w.replace("max_steps=3", "max_steps=2") for w in words])
    (folder / "kill_at").write_text("24")
    victim = Job(command, folder / "out.txt")
    (folder / "pid").write_text(str(victim.process.pid))
    assert victim.wait(TIMEOUT), victim.describe()
    victim.kill()
    journal = folder / "log" / "episode_journal"
    ended = {path.stem for path in journal.glob("*.json")}
    before = ran(folder)
    assert len(ended) >= 4 and ended <= before.keys()
    run_job(command, folder / "again.txt", TIMEOUT)
    after = ran(folder)
    assert all(after[name] == before[name] and len(before[name]) == 1 for name in ended)
    samples = require_all_counted(folder, 2)
    rewards = {round(s["reward"], 6) for s in samples}
    assert all(round(before[name][0], 6) in rewards for name in ended)
    assert any(len(s.get("rows", [])) == 2 for s in samples)
    assert not list(journal.glob("*.json")) or len(list(journal.glob("*.json"))) <= 32


@pytest.mark.long
@pytest.mark.parametrize(
    "others",
    [
        ("trainer.devices=2", "trainer.ppo.batch_iterator.use_flask=True"),
        ("trainer.devices=2", "trainer.ppo.rollout_devices=1", "trainer.ppo.staleness=1"),
        ("trainer.devices=2", "trainer.ppo.generation.tensor_parallel_size=2"),
        ("trainer.ppo.loss_aggregation=sequence_mean", "model.global_batch_size=16"),
    ],
)
def test_programs_work_beside(job: Callable[..., list[str]], tmp_path: Path, others: Sequence[str]) -> None:
    folder = tmp_path / "run"
    run_job(script("train_gpt_ppo_actor.py", *agent_job(job, folder, *others)), folder / "out.txt", TIMEOUT)
    require_all_counted(folder, 3)
    assert all(len(values) == 1 for values in ran(folder).values())
