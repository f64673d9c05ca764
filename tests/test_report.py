"""Reports: what a reader of ``report.html`` finds, and that what runs have written cannot act in it."""

from __future__ import annotations

import html
import json
import logging
import re
import runpy
import shutil
import subprocess
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner
from omegaconf import OmegaConf

from nemo_style_aligner import activity
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.cli.main import nsa
from nemo_style_aligner.tools.reports.dashboard import Dashboard
from nemo_style_aligner.tools.reports.report import find_runs, write_report, write_sheet
from nemo_style_aligner.tools.reports.run_view import RunView
from nemo_style_aligner.tools.reports.samples import Answer, ComparisonError, Shown, find_samples
from nemo_style_aligner.trainer.config.loading import for_log
from nemo_style_aligner.trainer.telemetry import timeline
from nemo_style_aligner.trainer.telemetry.log_files import NoRunError
from nemo_style_aligner.trainer.telemetry.metric_table import METRICS, find_metric
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.timeline import write_trace
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer

ROOT = Path(__file__).parents[1]
HOSTILE = '</script><script>document.title="taken"</script><img src=x onerror=alert(1)> {{ 7*7 }} \u202e \ud800'


class Page(HTMLParser):
    """The tags of a page, its visible text, and the charts' data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.headings: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.references += [given[name] or "" for name in ("src", "href") if name in given]
        if tag not in ("meta", "input", "br", "img"):
            self._open.append("json" if given.get("type") == "application/json" else tag)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "json":
            self.charts.append(json.loads(data))
        elif self._open and re.fullmatch("h[1-6]", self._open[-1]):
            self.headings.append(data.strip())


def make_run(folder: Path, rewards: list[float], text: str = "4") -> Path:
    """A run as an actor job writes it."""
    logger = MetricsLogger(folder)
    logger.log_hyperparameters(
        *for_log(OmegaConf.create({"trainer": {"ppo": {"max_steps": 20}}, "model": {"ppo": {"x": text}}}))
    )
    logger.log_length(9)
    logger.log_metrics({"rewards": -3.0}, 0, "warm_up/train_rollouts/")
    for step, reward in enumerate(rewards):
        logger.log_metrics({"rewards": reward, "init_policy_kl": 0.01 * step}, step, "train_rollouts/")
        logger.log_metrics({"grad_norm": 1.0, "of_mine": step}, step, "train_optim/")
        times = {"step": 3.0, "step/train_time": 2.0, "step/rollout_time/generate": 0.5}
        logger.log_metrics(times, step + 1, "timers/")
    for step in (4, 8):
        rows = [[f"2+2? {text}", f"{step} {text}", reward] for reward in (0.5, float("nan"))]
        logger.log_table("table/val_rollouts", ["prompt", "response", "reward"], rows, step)
    logger.close()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run") / "actor", [-1.0, 0.0, 1.0, 2.0, 2.0, 2.5, 2.5, 3.0, 3.0])


def test_a_report_begins_with_the_outcome_and_orders_charts_by_question(run: Path, tmp_path: Path) -> None:
    path = write_report(tmp_path / "out" / "report.html", "Demo", {"PPO": run}, [("held-out accuracy", "75%")])
    page = Page(path.read_text())
    order = ["Demo", "Outcome", "PPO", "Before and after", "Reward", "Side by side", "Does it learn?", "Is it stable?"]
    places = [page.headings.index(heading) for heading in [*order, "Where does the time go?"]]
    assert places == sorted(places)
    charts = {chart["title"]: chart for chart in page.charts}
    assert list(charts)[:2] == ["Reward", "KL from the initial policy"] and "of_mine" in " ".join(charts)
    assert charts["Reward"]["series"] == [["training", list(range(9)), [-1.0, 0.0, 1.0, 2.0, 2.0, 2.5, 2.5, 3.0, 3.0]]]
    phases = {name: values[0] for name, _, values in charts["A step, by phase"]["series"]}
    assert phases == {"Training": 2.0, "Generation": 0.5, "everything else": 0.5}
    text = path.read_text()
    assert "Gradient norm <b>1</b>" in text and "9 of 9" in text and "\N{MINUS SIGN}3" in text
    assert page.references == []


def test_runs_of_one_kind_are_compared_in_one_chart_and_by_what_differs(run: Path, tmp_path: Path) -> None:
    """Also as a folder that holds them; a run of another kind stays by itself."""
    make_run(tmp_path / "runs" / "b", [1.0, 2.0, 4.0], text="other")
    sft = MetricsLogger(tmp_path / "runs" / "sft")
    sft.log_hyperparameters(*for_log(OmegaConf.create({"trainer": {"sft": {"max_steps": 3}}})))
    for step in range(3):
        sft.log_metrics({"loss": 3.0 - step}, step, "train/")
    sft.close()
    output = tmp_path / "page.html"
    result = CliRunner().invoke(nsa, ["report", str(run), str(tmp_path / "runs"), "--output", str(output)])
    assert result.exit_code == 0, result.output
    page = Page(output.read_text())
    assert [heading for heading in page.headings if heading.startswith("Side by side:")] == ["Side by side: PPO"]
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', output.read_text())
    cells = {name: re.findall("<td>(.*?)(?: <small>.*?)?</td>", row) for name, row in rows}
    assert cells["model.ppo.x"] == ["4", "other"] and cells["steps"] == ["9", "3"]
    assert cells["Reward, training"] == ["3", "4"] and "trainer.ppo.max_steps" not in cells
    both = next(chart for chart in page.charts if chart["title"] == "Reward")
    assert [[name, values[-1]] for name, _, values in both["series"]] == [["actor", 3.0], ["b", 4.0]]
    refused = CliRunner().invoke(nsa, ["report", str(run), str(tmp_path / "runs"), "--trace", str(output)])
    assert refused.exit_code == 2 and "one RUN" in refused.output


def test_a_report_warns_in_words(tmp_path: Path) -> None:
    falling = RunView("x", make_run(tmp_path / "falling", [3.0, 3.1, 3.0, 2.0, 1.0, 0.0, 0.1, 0.0]))
    assert any(alert.startswith("The reward fell: from 3.05 to 0.05") for alert in falling.alerts())
    logger = MetricsLogger(tmp_path / "drifting")
    for step in range(4):
        metrics = {"init_policy_kl": step, "advantages_std": 0.0, "fraction_of_samples_properly_ended": 0.1}
        logger.log_metrics(metrics, step, "train_rollouts/")
    logger.close()
    alerts = " ".join(RunView("x", tmp_path / "drifting").alerts())
    assert "far from where it started" in alerts and "learns nothing" in alerts and "cut off at the length" in alerts
    assert not RunView("x", make_run(tmp_path / "rising", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])).alerts()


def test_what_a_run_has_written_is_text(tmp_path: Path) -> None:
    evaluation = {"responses": [{"prompt": HOSTILE, "response": HOSTILE, "reward": 1.0, "is_right": True}]}
    files = {name: tmp_path / f"{name}.json" for name in ("before", "after")}
    for file in files.values():
        file.write_text(json.dumps(evaluation))
    run = make_run(tmp_path / "run", [0.0, 1.0], HOSTILE.replace("\ud800", ""))
    logger = MetricsLogger(run)
    name = HOSTILE.replace("\ud800", "")
    for step in (3, 4):
        logger.log_metrics({name: float(step)}, step, "train_optim/")
    logger.close()
    text = write_report(tmp_path / "r.html", HOSTILE, {HOSTILE: run}, compare=files).read_text()
    page = Page(text)
    assert "img" not in page.tags and page.references == [] and page.tags.count("script") == len(page.charts) + 1
    assert "{{ 7*7 }}" in text and any(name in chart["title"] for chart in page.charts)


@pytest.mark.parametrize("per_prompt", [1, 3])
def test_samples_are_shown_token_by_token(run: Path, tmp_path: Path, per_prompt: int) -> None:
    log_dir = shutil.copytree(run, tmp_path / "actor")
    logger = MetricsLogger(log_dir)
    for step in (7, 8):
        for sample in range(6):
            record = {
                "step": step,
                "sample": sample,
                "group": sample // per_prompt,
                "prompt": f"p{sample // per_prompt}",
            }
            numbers = {"reward": sample or "nan", "old_logprobs": [-1.0, -2.0], "advantages": [0.5, -1.0]}
            texts = {"response": "12", "pieces": ["1", f"<b>{step}"], "ended": sample != 5}
            logger.log_samples([{**record, **numbers, **texts, "reference_logprobs": [-1.5, "nan"]}])
    logger.close()
    text = write_report(tmp_path / "r.html", "Demo", {"PPO": log_dir}).read_text()
    page = Page(text)
    assert "Token by token" in page.headings and "b" in page.tags and "&lt;b&gt;8</i>" in text and "<b>8" not in text
    shown = re.findall(r'"reward">reward ([^<]*)<', text.split("Token by token")[1].split("<h3>")[0])
    assert shown == (["5", "4", "1", "3", "2"] if per_prompt == 1 else ["2", "5", "3"])
    assert 'class="a+ k+" style="--a:35%;--k:18%">1</i>' in text and "advantage \N{MINUS SIGN}1, KL" in text


def test_what_a_policy_was_told_is_no_token_of_its_own(run: Path, tmp_path: Path) -> None:
    log_dir = shutil.copytree(run, tmp_path / "actor")
    logger = MetricsLogger(log_dir)
    record = {
        "step": 9, "sample": 0, "group": 0, "prompt": "p", "response": "4", "ended": True, "reward": 1.5,
        "pieces": ["calc", "\n", "<b>4", "So 4"], "sampled": [1, 0, 0, 1], "old_logprobs": [-1.0, None, None, -2.0],
        "advantages": [1.0, None, None, 1.0], "rewards": {"environment": 1.5, "environment/tool": 0.5},
    }  # fmt: skip
    failed = {"sample": 1, "group": 1, "reward": "nan", "rewards": {}, "problem": "raised <KeyError>"}
    logger.log_samples([record, {**record, **failed}])
    logger.close()
    text = write_report(tmp_path / "r.html", "Demo", {"PPO": log_dir}).read_text()
    assert 'told the policy">\n&lt;b&gt;4</span><i ' in text and ">So 4</i>" in text and ">calc</i>" in text
    assert "environment 1.5, environment/tool 0.5" in text and "raised &lt;KeyError&gt;" in text


def test_every_rollout_is_found_page_by_page(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    of_token = {"pieces": ["a", "b"], "old_logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
    for step in range(1, 36):
        of_sample = {"step": step, "group": 0, "prompt": f"p{step}", "ended": True, **of_token}
        logger.log_samples([{**of_sample, "sample": n, "response": "ab", "reward": n} for n in (0, 1)])
    logger.close()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 36, "samp')  # being written
    before, pages = None, []
    while not pages or before is not None:
        found, before = find_samples(tmp_path, low=0.5, before=before)
        pages.append([shown.prompt for shown in found])
    assert len(pages) == 2 and [*pages[0], *pages[1]] == [f"p{step}" for step in range(35, 0, -1)]
    assert [shown.prompt for shown in find_samples(tmp_path, "P7")[0]] == ["p7", "p7"]
    assert find_samples(tmp_path, before=10**30) == find_samples(tmp_path)
    assert find_samples(tmp_path, before=-(10**30)) == ([], None)


def test_a_config_that_its_aliases_make_endless_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    bomb = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
    (tmp_path / "run" / "hyperparameters.yaml").write_text(bomb)
    with pytest.raises(UserError, match=r"hyperparameters\.yaml cannot be read: more than 20,000 values"):
        write_report(tmp_path / "r.html", "x", {"x": tmp_path / "run"})


def test_what_is_no_run_is_named(run: Path, tmp_path: Path) -> None:
    assert list(find_runs(run)) == ["actor"] and find_runs(run.parent) == {"actor": run}
    with pytest.raises(NoRunError, match=r"holds none: give the job's exp_manager\.explicit_log_dir"):
        find_runs(tmp_path)
    (tmp_path / "a.json").write_text('{"responses": [{}]}')
    with pytest.raises(ComparisonError, match=r"a\.json is not what evaluate_gpt\.py"):
        write_report(tmp_path / "r.html", "x", {"x": run}, compare={"a": tmp_path / "a.json"})


def test_the_metrics_table_is_documented_and_every_row_can_be_found() -> None:
    markdown = runpy.run_path(str(ROOT / "docs" / "make_metrics.py"))["markdown"]
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown()
    for row in METRICS:
        name = row.name.replace("*_rollouts", "val_rollouts").replace("*", "train")
        assert find_metric(name) is row, f"an earlier row hides {row.name}"
        assert row.meaning.endswith(".") and (row.low <= row.high)


@pytest.fixture(scope="module")
def chromium() -> Iterator[str]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    yield found


def test_phases_of_each_rank_become_a_trace(run: Path, tmp_path: Path) -> None:
    log_dir = shutil.copytree(run, tmp_path / "actor")
    with pytest.raises(NoRunError, match=r"exp_manager\.timeline=True"):
        write_trace(log_dir, tmp_path / "trace.json", 1, 3)
    (log_dir / timeline.FOLDER).mkdir()
    (log_dir / timeline.FOLDER / "rank_0.jsonl").write_text('[["step", 1')  # a run that was killed
    logger, timer = MetricsLogger(log_dir), ScopedTimer()
    try:
        for rank in (0, 1):
            timeline.record(log_dir, rank)
            for step in (101, 102, 103):
                with timer("step"), timer("rollout_time"), timer("generate"):
                    time.sleep(0.002)
                if rank:
                    continue
                logger.log_metrics(timer.consume_durations(), step, "timers/")
                time.sleep(0.005)
    finally:
        activity.record(None)
        logger.close()
    last = timeline.last_phases(log_dir, steps=1)
    assert {rank: [name for name, _, _ in phases][:1] for rank, phases in last.items()} == {
        0: ["Generation"],
        1: ["Generation"],
    }
    assert write_trace(log_dir, tmp_path / "trace.json", 102, 102) == 3  # rank 1 came later
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    inner, middle, outer = (event for event in events if event["ph"] == "X")
    assert [inner["name"], middle["name"], outer["name"]] == ["generate", "rollout_time", "step"]
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 100
    assert 2000 <= inner["dur"] < 1e6  # microseconds


# ---- the dashboard -------------------------------------------------------------------------------


@pytest.fixture
def dashboard(tmp_path: Path) -> Iterator[Dashboard]:
    served = Dashboard(tmp_path / "live", 0, "s3cret")
    yield served
    served.close()


def test_the_dashboard_shows_what_is_new_to_who_knows_the_secret(dashboard: Dashboard) -> None:
    address, known = f"http://127.0.0.1:{dashboard.port}", ("anybody", "s3cret")
    for path in ("/", "/state", "/elsewhere"):
        for wrong in (None, ("anybody", "s3cre"), ("s3cret", "")):
            refused = requests.get(address + path, auth=wrong, timeout=5)
            assert refused.status_code == 401 and "Basic realm=" in refused.headers["WWW-Authenticate"]
    page = requests.get(address, auth=known, timeout=5)
    assert (
        page.status_code == 200 and page.headers["Cache-Control"] == "no-store" and "Before and after" not in page.text
    )
    before = requests.get(f"{address}/state", auth=known, timeout=5).json()
    make_run(dashboard.log_dir, [0.0, 1.0, 2.0])
    with activity.phase("step"), activity.phase("generate"), activity.counting("responses", lambda: (3, 8)):
        logging.getLogger("job").warning("<b>look</b>")
        after, deadline = before, time.monotonic() + 60
        while after["version"] == before["version"] and time.monotonic() < deadline:
            after = requests.get(f"{address}/state", auth=known, timeout=5).json()
            time.sleep(0.02)
    assert (
        after["version"] != before["version"]
        and after["phase"] == "A step \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} Generation"
    )
    assert (
        after["counts"].startswith("3 of 8 responses") and "<b>look</b>" in after["log"][-1] and not after["stopping"]
    )
    assert "Before and after" in requests.get(address, auth=known, timeout=5).text

    def steps(query: str) -> list[int]:
        found = requests.get(f"{address}/rollouts?{query}", auth=known, timeout=5).json()
        assert found["older"] is None
        return [int(step) for step in re.findall(r"<b>step (\d+)</b>", found["html"])]

    assert steps("") == [8, 8, 4, 4] and steps("step=4") == [4, 4] and steps("high=0") == []
    assert steps("low=0.4") == [8, 4] and steps("text=2%2B2%3F%204&step=8") == [8, 8]  # one of the rewards is NaN
    assert requests.get(f"{address}/rollouts?low=x", auth=known, timeout=5).status_code == 400
    assert requests.get(f"{address}/rollouts", timeout=5).status_code == 401
    assert requests.get(f"{address}/../etc/passwd", auth=known, timeout=5).status_code == 404
    assert requests.post(address, auth=known, timeout=5).status_code == 405


def test_a_browser_shows_what_goes_on(
    dashboard: Dashboard, chromium: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the secret stands in the URL. That it first asks without is no alarm in the job's log."""
    caplog.set_level(logging.INFO)
    with activity.phase("step"):
        shown = drawn_by(chromium, f"http://anybody:s3cret@127.0.0.1:{dashboard.port}/", tmp_path)
    assert re.findall(r'id="phase"[^>]*>([^<]*)<', shown) == ["A step"] and "refused" not in caplog.text


def drawn_by(chromium: str, url: str, folder: Path) -> str:
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--run-all-compositor-stages-before-draw", "--virtual-time-budget=10000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout


def test_marks_of_an_axis_that_differ_have_labels_that_differ(chromium: str, tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "run")
    for step in range(4):
        logger.log_metrics({"rewards": 1000 + step / 1e5}, step, "train_rollouts/")
    logger.close()
    drawn = drawn_by(chromium, write_report(tmp_path / "r.html", "x", {"x": tmp_path / "run"}).as_uri(), tmp_path)
    labels = re.findall(r'text-anchor="end"[^>]*>([^<]*)<', drawn.split('aria-label="Reward"')[1].split("</svg>")[0])
    assert len(labels) > 3 and len(set(labels)) == len(labels)


def width_in(chromium: str, page: Path, width: int) -> int:
    """How wide a page is in a window of this width, in pixels."""
    measure = "onload = () => { document.title = frames[0].document.documentElement.scrollWidth; }"
    frame = f'<iframe width="{width}" height="900" srcdoc="{html.escape(page.read_text())}"></iframe>'
    around = page.with_suffix(".frame.html")
    around.write_text(f"<title></title>{frame}<script>{measure}</script>")
    return int(re.findall("<title>(.*?)</title>", drawn_by(chromium, around.as_uri(), page.parent))[0])


@pytest.mark.parametrize("width", [390, 1400])
def test_pages_with_long_names_fit_into_the_window(chromium: str, run: Path, tmp_path: Path, width: int) -> None:
    """Paths as names were printed over each other, and made the page of two models wider than the window."""
    long = "megatron_gpt_ppo_actor_of_a_long_name" * 3
    parts = {
        f"{source}/{part}": 1.0 for source in ("calculator", "judge") for part in ("right", "tool", "brief", "polite")
    }
    answers = [Shown("2+2?", [Answer(name, "4", "right", 0.5, parts=parts) for name in (long, f"{long}_again")])]
    rows = {name: [("0.8125", "(0.6457 to 0.9301)")] * 3 for name in ("num_with_answer", "kl_per_response")}
    table = (long, f"{long}_again", "change"), rows
    sheet = write_sheet(tmp_path / "s.html", long, [("MODEL", "/folder" * 40)], table, [("A", "B.", answers)])
    report = write_report(tmp_path / "r.html", long, {long: run, "other": run}, [(long, long)])
    assert [page.stem for page in (sheet, report) if width_in(chromium, page, width) > width] == []


def test_a_browser_draws_the_charts_and_runs_nothing_else(run: Path, chromium: str, tmp_path: Path) -> None:
    hostile = make_run(tmp_path / "run", [0.0, 1.0, 3.0], HOSTILE.replace("\ud800", ""))
    page = write_report(tmp_path / "r.html", "Demo", {"PPO": run, HOSTILE: hostile})
    drawn = drawn_by(chromium, page.as_uri(), tmp_path)
    charts = len(Page(page.read_text()).charts)
    assert drawn.count("<svg") == charts > 5 and drawn.count("<polyline") > 5 and drawn.count("<polygon") > 2
    assert "<title>Demo</title>" in drawn


def test_a_report_says_how_much_of_the_run_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loop's own length, whatever the config allows, and at the pace of the last steps."""
    logger = MetricsLogger(tmp_path)
    logger.log_hyperparameters(*for_log(OmegaConf.create({"trainer": {"sft": {"max_steps": -1}}})))
    logger.log_length(40)
    for step in range(21):
        monkeypatch.setattr(time, "time", lambda now=1e9 + 60 * step + 3600 * (step > 12): now)  # an hour off between
        logger.log_metrics({"loss": 1.0}, step, "train/")
    facts = dict(RunView("x", tmp_path).facts)
    assert facts["Steps"] == "20 of 40" and facts["Left"] == "about 20 min"
    logger.log_length(20)
    facts = dict(RunView("x", tmp_path).facts)
    assert facts["Steps"] == "20 of 20" and "Left" not in facts
    logger.close()
