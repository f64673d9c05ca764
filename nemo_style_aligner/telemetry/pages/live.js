// Asks the job every two seconds what it does, and fetches the page again when it has logged something.

const NAMES = {
  step: "Step", rollout_time: "Rollouts", offload: "Moving the optimizer", unload: "Freeing the engine",
  refit: "Refit", generate: "Generation", logprobs: "Log-probs", init_logprobs: "Log-probs, initial policy",
  critic_wait: "Waiting for scores", train_time: "Training", critic_train_wait: "Waiting for the critic",
  train_step_time: "A step", validation_time: "Validation", save_time: "Saving", save_wait: "Waiting for a save",
};
let version = null, shownTimeline = "";

function say(id, text) { document.getElementById(id).textContent = text; }

async function look() {
  try {
    const answer = await fetch("state", { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`the job answers ${answer.status}`);
    const state = await answer.json();
    document.body.classList.remove("away");
    const phase = state.phase.split("/").map(part => (NAMES[part] || part.replaceAll("_", " "))).join(" › ");
    say("phase", state.stopping ? `stopping: ${phase}` : phase);
    say("counts", state.counts);
    say("quiet", state.quiet > 30 ? `nothing has moved for ${Math.round(state.quiet)} s` : "");
    showLog(state.log);
    showTimeline(state.timeline);
    if (version !== null && version !== state.version) await refresh();
    version = state.version;
  } catch (error) {
    document.body.classList.add("away");
    say("phase", `The job is out of reach: it has ended, or the tunnel is closed (${error.message}).`);
    say("counts", "");
    say("quiet", "This page shows what it last knew.");
  }
  setTimeout(look, 2000);
}

function showLog(lines) {
  const box = document.getElementById("log"), text = lines.join("\n");
  if (box.textContent === text) return;
  const atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.textContent = text;
  if (atEnd) box.scrollTop = box.scrollHeight;
}

// What the reader has opened, chosen and filtered stays as it was.
async function refresh() {
  const text = await (await fetch(".", { cache: "no-store", signal: AbortSignal.timeout(30000) })).text();
  const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("main"), old = document.getElementById("main");
  const open = [...old.querySelectorAll("details")].map(one => one.open);
  const chosen = [...old.querySelectorAll("input[type=radio]")].map(one => one.checked);
  const filter = old.querySelector("input[type=search]")?.value, focused = document.activeElement?.id;
  fresh.querySelectorAll("details").forEach((one, i) => { one.open = open[i] || false; });
  if (chosen.length) fresh.querySelectorAll("input[type=radio]").forEach((one, i) => { one.checked = chosen[i] || false; });
  old.replaceWith(document.adoptNode(fresh));
  startAll();
  const search = document.querySelector("input[type=search]");
  if (search && filter) { search.value = filter; search.dispatchEvent(new Event("input")); }
  if (focused) document.getElementById(focused)?.focus();
}

// A row for each rank, a bar for each phase.
function showTimeline(ranks) {
  const box = document.getElementById("timeline"), text = JSON.stringify(ranks) + box.clientWidth;
  if (text === shownTimeline || !box.clientWidth) return;
  shownTimeline = text;
  const rows = Object.entries(ranks), bars = rows.flatMap(([, bars]) => bars);
  if (!bars.length) { box.replaceChildren(html("p", "quiet", "No step is complete yet.")); return; }
  const first = Math.min(...bars.map(bar => bar[1])), last = Math.max(...bars.map(bar => bar[2]));
  const width = box.clientWidth, left = 62, row = rows.length > 16 ? 14 : 22, height = rows.length * row + 24;
  const x = time => left + (time - first) / (last - first || 1) * (width - left - 14);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Phases of the last steps by rank" });
  const names = [...new Set(bars.map(bar => bar[0].split("/").at(-1)))];
  rows.forEach(([rank, bars], i) => {
    svg.append(element("text", { x: 0, y: (i + 0.5) * row + 4 }, `rank ${rank}`));
    for (const [name, began, ended] of bars) {
      const short = name.split("/").at(-1);
      const bar = element("rect", { x: x(began), width: Math.max(0.5, x(ended) - x(began)), y: i * row + 2, height: row - 4, fill: colour(names.indexOf(short)) });
      bar.append(element("title", {}, `${NAMES[short] || short}: ${(ended - began).toFixed(3)} s`));
      svg.append(bar);
    }
  });
  for (const tick of ticks(0, last - first, Math.max(2, Math.floor(width / 110))))
    svg.append(element("text", { x: x(first + tick), y: height - 4, "text-anchor": "middle" }, `${format(tick)} s`));
  const keys = html("div", "keys");
  names.forEach((name, i) => {
    const key = html("span", "", NAMES[name] || name.replaceAll("_", " ")), swatch = html("span", "swatch");
    swatch.style.background = colour(i);
    key.prepend(swatch);
    keys.append(key);
  });
  const chart = html("div", "chart");
  chart.append(svg);
  box.replaceChildren(keys, chart, html("p", "quiet", "A gap is time that no phase claims; where one rank's bar ends early, it waits for the others."));
}

look();
