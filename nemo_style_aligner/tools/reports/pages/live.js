// Asks the job every two seconds what it does, and fetches the page again when it has logged something.

let version = null, shownTimeline = "";

function say(id, text) { document.getElementById(id).textContent = text; }

// By a URL without the name and password with which the page may have been opened: fetch refuses those.
function ask(path, seconds) {
  const url = new URL(path, location.origin + location.pathname);
  return fetch(url, { cache: "no-store", signal: AbortSignal.timeout(1000 * seconds) });
}

async function look() {
  try {
    const answer = await ask("state", 10);
    if (!answer.ok) throw new Error(`the job answers ${answer.status}`);
    const state = await answer.json();
    document.body.classList.remove("away");
    say("phase", state.stopping ? `stopping: ${state.phase}` : state.phase);
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

// What the reader has opened and chosen stays as it was.
async function refresh() {
  const text = await (await ask(".", 30)).text();
  const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("main"), old = document.getElementById("main");
  const open = [...old.querySelectorAll("details")].map(one => one.open);
  const chosen = [...old.querySelectorAll("input[type=radio]")].map(one => one.checked);
  const focused = document.activeElement?.id;
  fresh.querySelectorAll("details").forEach((one, i) => { one.open = open[i] || false; });
  if (chosen.length) fresh.querySelectorAll("input[type=radio]").forEach((one, i) => { one.checked = chosen[i] || false; });
  old.replaceWith(document.adoptNode(fresh));
  startAll();
  if (focused) document.getElementById(focused)?.focus();
}

// Samples of the whole run, the newest first, as far as the job has looked; "Older" looks on.
let wanted = "", older = null, shown = 0;

async function find(more) {
  const box = document.getElementById("rollouts"), button = document.getElementById("older");
  if (!more) {
    const fields = new FormData(document.getElementById("find"));
    wanted = new URLSearchParams([...fields].filter(([, value]) => value)).toString();
    box.replaceChildren();
    shown = 0;
  }
  button.hidden = true;
  say("found", "Looking …");
  try {
    const answer = await ask(`rollouts?${wanted}${more ? `&before=${older}` : ""}`, 60);
    if (!answer.ok) throw new Error(`the job answers ${answer.status}`);
    const page = await answer.json(), fresh = new DOMParser().parseFromString(page.html, "text/html");
    shown += fresh.querySelectorAll(".sample").length;
    box.append(...fresh.body.childNodes);
    older = page.older;
    button.hidden = older === null;
    say("found", `${shown || "Nothing"} found, ${older === null ? "of the whole run." : "so far."}`);
  } catch (error) {
    say("found", `Not found: ${error.message}.`);
  }
}

document.getElementById("find").addEventListener("submit", event => { event.preventDefault(); find(false); });
document.getElementById("older").addEventListener("click", () => find(true));
document.getElementById("every").addEventListener("toggle", event => { if (event.target.open && !shown) find(false); });

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
  const names = [...new Set(bars.map(bar => bar[0]))];
  rows.forEach(([rank, bars], i) => {
    svg.append(element("text", { x: 0, y: (i + 0.5) * row + 4 }, `rank ${rank}`));
    for (const [name, began, ended] of bars) {
      const bar = element("rect", { x: x(began), width: Math.max(0.5, x(ended) - x(began)), y: i * row + 2, height: row - 4, fill: colour(names.indexOf(name)) });
      bar.append(element("title", {}, `${name}: ${(ended - began).toFixed(3)} s`));
      svg.append(bar);
    }
  });
  for (const tick of ticks(0, last - first, Math.max(2, Math.floor(width / 110))))
    svg.append(element("text", { x: x(first + tick), y: height - 4, "text-anchor": "middle" }, `${format(tick)} s`));
  const chart = html("div", "chart");
  chart.append(svg);
  box.replaceChildren(keys(names), chart, html("p", "quiet", "A gap is time that no phase claims; where one rank's bar ends early, it waits for the others."));
}

look();
