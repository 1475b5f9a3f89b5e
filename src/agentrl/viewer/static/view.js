// The one script of the pages: charts, tokens, keys, and pages that keep themselves fresh.
"use strict";

const colours = ["--a", "--b", "--c", "--d"];
const probe = document.createElement("i");
probe.hidden = true;
document.body.append(probe);
const css = (name) => { // a colour as a canvas takes it: resolved for light or dark
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
};
const phase = (label) => { // the colour that a phase of a step has on the step's page
  probe.className = `phase-${label.split(" ")[0]}`;
  const colour = getComputedStyle(probe).backgroundColor;
  probe.className = "";
  return colour;
};
const shown = (value, digits = 4) =>
  value == null ? "–" : Number.isInteger(value) ? String(value) : Number(value.toPrecision(digits)).toString();

// -- light and dark

const root = document.documentElement;
try {
  const kept = localStorage.getItem("theme");
  if (kept) root.dataset.theme = kept;
} catch { /* storage may be forbidden; the system's choice then holds */ }

document.getElementById("theme")?.addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* as above */ }
  document.querySelectorAll(".chart").forEach((figure) => { drop(figure); draw(figure); });
});

// -- charts

const plots = new WeakMap(); // by figure: the plot, and what it was drawn of
const overlays = new Map(); // by run: its charts

function drop(figure) {
  plots.get(figure)?.plot.destroy();
  plots.delete(figure);
}

function columns(chart) {
  const lines = chart.lines.map(([label, values]) => ({ label, steps: chart.steps, values }));
  for (const [run, charts] of chart.stacked ? [] : overlays) { // areas of two runs would hide each other
    const same = charts.find((each) => each.title === chart.title);
    for (const [label, values] of same?.lines ?? []) lines.push({ label: `${label} · ${run}`, steps: same.steps, values, other: true });
  }
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const at = new Map(steps.map((step, place) => [step, place]));
  const data = lines.map((line) => {
    const column = new Array(steps.length).fill(null);
    line.steps.forEach((step, place) => { column[at.get(step)] = line.values[place]; });
    return column;
  });
  if (chart.stacked) {
    for (let i = 1; i < chart.lines.length; i++) data[i] = data[i].map((v, p) => (v ?? 0) + (data[i - 1][p] ?? 0));
    lines.reverse(); // the highest sum first: those below are drawn over it
    data.reverse();
  }
  return { lines, data: [steps, ...data] };
}

function draw(figure) {
  const source = figure.dataset.chart;
  const known = plots.get(figure);
  const key = source + [...overlays.keys()].join();
  if (known?.key === key) return;
  const chart = JSON.parse(source);
  const { lines, data } = columns(chart);
  if (known && known.plot.series.length === data.length) {
    known.plot.setData(data);
    known.key = key;
    return;
  }
  drop(figure);
  const place = figure.querySelector(".plot");
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const series = lines.map((line, index) => ({
    label: line.label,
    stroke: chart.stacked ? phase(line.label) : css(colours[(line.other ? index + 2 : index) % colours.length]),
    width: 1.6,
    dash: line.other ? [5, 4] : undefined,
    spanGaps: true,
    points: { show: !chart.stacked && data[0].length < 30, size: 4 },
    fill: chart.stacked ? phase(line.label) : undefined,
    value: (plot, value, of, at) => {
      if (at == null) return "–";
      const below = chart.stacked ? plot.data[of + 1]?.[at] ?? 0 : 0;
      return value == null ? "–" : shown(value - below) + chart.unit;
    },
  }));
  const plot = new uPlot({
    width: place.clientWidth || 320,
    height: 190,
    scales: { x: { time: false }, ...(chart.stacked && { y: { range: (plot, low, high) => [0, high * 1.05 || 1] } }) },
    axes: [axis, { ...axis, size: 58, values: (plot, at) => at.map((value) => shown(value, 3)) }],
    series: [{ label: "step" }, ...series],
    cursor: { drag: { x: true, y: false } },
  }, data, place);
  const steps = document.getElementById("charts")?.dataset.steps;
  plot.over.addEventListener("click", () => {
    const step = plot.cursor.idx == null ? null : plot.data[0][plot.cursor.idx];
    if (steps && step > 0) location.href = steps + step;
  });
  plots.set(figure, { plot, key });
}

const drawAll = () => document.querySelectorAll(".chart").forEach(draw);
addEventListener("resize", () => document.querySelectorAll(".chart").forEach((figure) => {
  const plot = plots.get(figure)?.plot;
  if (plot) plot.setSize({ width: figure.querySelector(".plot").clientWidth, height: 190 });
}));

async function layOver() {
  const charts = document.getElementById("charts");
  const names = JSON.parse(charts?.dataset.others || "[]").flatMap((each) => each.split(/\s+/)).filter(Boolean);
  for (const name of names) {
    const answer = await fetch(`/run/${encodeURIComponent(name)}/charts`);
    if (answer.ok) overlays.set(name, await answer.json());
  }
  if (names.length) { document.querySelectorAll(".chart").forEach(drop); drawAll(); }
}

// -- a live page reads itself again, and changes in place

const kept = new Set(["open", "aria-selected", "hidden"]); // what the visitor chose
const typedInto = (form) => [...form.elements].some((field) =>
  field.matches("input, textarea") && field.value !== field.defaultValue
  || field.matches("select") && field.selectedIndex !== Math.max(0, [...field.options].findIndex((option) => option.defaultSelected)));
function say(sentence) { // above the page, which is as it was read last
  const told = document.createElement("p");
  told.className = "bad";
  told.setAttribute("role", "alert");
  told.textContent = sentence;
  document.querySelector("main").prepend(told);
}
async function refresh() {
  const main = document.querySelector("main");
  const every = Number(main.dataset.live || 0);
  if (!every) return;
  const busy = document.hidden || main.contains(document.activeElement) && document.activeElement.matches("input, select, textarea");
  if (!busy) {
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (answer.status === 401) return say("This page is not kept fresh any more: the server does not know this browser. Open the address that agentrl view printed, or log in.");
      if (answer.ok && "reload" in main.dataset) return location.reload(); // it is there now
      if (answer.ok) {
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
        Idiomorph.morph(main, fresh, {
          callbacks: {
            beforeNodeMorphed: (old, now) => {
              if (old.id === "tokens") return false;
              if (old.matches?.("form") && typedInto(old)) return false; // also its hidden fields
              if (old.classList?.contains("chart") && now.dataset?.chart) {
                old.dataset.chart = now.dataset.chart;
                return false;
              }
              return true;
            },
            beforeAttributeUpdated: (name) => !kept.has(name),
          },
        });
        drawAll();
      }
    } catch { /* the server is away for a moment: the next look tells */ }
  }
  setTimeout(refresh, every);
}

// -- tokens

const BLOCK = 400; // tokens that are drawn at once, when they come into sight
let tokens = null;

function scale(mode) { // the colour of a value, the ends of the legend as texts, and as values
  let low = Infinity, high = -Infinity;
  for (const turn of tokens) {
    for (const value of turn.values[mode] ?? []) {
      if (value == null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return null;
  const ends = [shown(low), shown(high)], around = (share) => share >= 0 ? mix("transparent", "--good", Math.min(1, share)) : mix("transparent", "--bad", Math.min(1, -share));
  switch (mode) {
    case "logprob": case "trainer": return { of: (v) => mix("--good", "--bad", Math.min(1, -v / 4)), ends: ["0", "≤ −4"], low: 0, high: -4 };
    case "advantage": {
      const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
      return { of: (v) => around(v / most), ends, low, high };
    }
    case "ratio": { // as far from 1 in a logarithm; a tenth is plain to see
      const most = Math.max(Math.abs(Math.log(low)), Math.abs(Math.log(high)), 0.1);
      return { of: (v) => around(Math.log(v) / most), ends, low, high };
    }
    case "entropy": { // a policy that is sure throughout is seen to be
      const most = Math.max(high, 0.5);
      return { of: (v) => mix("transparent", "--d", v / most), ends: ["0", `${shown(most)} nats`], low: 0, high: most };
    }
    case "mask": return { of: (v) => v ? mix("transparent", "--a", 1) : "transparent", ends: ["not trained", "trained"], low: 0, high: 1 };
    default: return { of: (v) => mix("--a", "--b", high === low ? 0 : (v - low) / (high - low)), ends, low, high };
  }
}

function mix(from, to, share) {
  const name = (each) => each.startsWith("--") ? `var(${each})` : each;
  return `color-mix(in oklab, ${name(from)}, ${name(to)} ${(share * 100).toFixed(1)}%)`;
}

function fill(block) {
  if (block.dataset.drawn) return;
  block.dataset.drawn = "yes";
  const { turn, part, start, end } = block.token;
  const texts = part === "prompt" ? turn.prompt_texts : turn.output_texts;
  if (part === "prompt") { block.textContent = texts.slice(start, end).join(""); return; }
  const pieces = document.createDocumentFragment();
  for (let at = start; at < end; at++) {
    const piece = document.createElement("span");
    piece.className = "t";
    piece.textContent = texts[at];
    piece.token = { turn, at };
    pieces.append(piece);
  }
  block.replaceChildren(pieces);
  paint(block);
}

function paint(block) {
  const mode = document.getElementById("colour").value, colour = scale.now;
  for (const piece of block.children) {
    const value = piece.token?.turn.values[mode]?.[piece.token.at];
    piece.style.background = value == null || !colour ? "" : `color-mix(in oklab, ${colour.of(value)} 35%, transparent)`;
  }
}

function repaint() {
  const mode = document.getElementById("colour").value, legend = document.getElementById("legend");
  const colour = scale.now = scale(mode);
  legend.title = colour ? colour.ends.join(" to ") : "";
  legend.hidden = !colour;
  document.getElementById("hover").textContent = colour ? `${colour.ends[0]} … ${colour.ends[1]}` : mode === "trainer" || mode === "ratio" ? "no step has trained it and kept this (--store_trainer_logprobs)" : mode === "entropy" ? "no step has trained it and kept this (--log_entropy)" : "no row of this record is stored, so this is not known";
  if (colour) {
    const { low, high } = colour;
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => colour.of(low + (high - low) * share));
    legend.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
  }
  document.querySelectorAll(".block[data-drawn]").forEach((block) => { if (block.token.part === "output") paint(block); });
}

async function showTokens() {
  const panel = document.getElementById("tokens"), stream = document.getElementById("stream");
  if (tokens) return;
  stream.textContent = "reading …";
  const answer = await fetch(panel.dataset.tokens);
  if (!answer.ok) {
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    stream.textContent = page.querySelector("[role=alert]")?.textContent ?? `the server answers ${answer.status}`;
    return;
  }
  tokens = await answer.json();
  stream.replaceChildren();
  const sight = new IntersectionObserver((seen) => seen.forEach((each) => { if (each.isIntersecting) { fill(each.target); sight.unobserve(each.target); } }), { rootMargin: "800px" });
  for (const turn of tokens) {
    const head = document.createElement("p");
    head.className = "dim";
    head.id = `tokens-${turn.turn}`;
    head.textContent = `turn ${turn.turn}, segment ${turn.segment}` + (turn.shared ? `: ${turn.shared} tokens shared with ${turn.parent}` : "");
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = "copy ids";
    copy.addEventListener("click", () => navigator.clipboard.writeText(JSON.stringify({ prompt_delta: turn.prompt_ids, output: turn.output_ids })));
    head.append(" ", copy);
    stream.append(head);
    for (const [part, ids] of [["prompt", turn.prompt_ids], ["output", turn.output_ids]]) {
      for (let start = 0; start < ids.length; start += BLOCK) {
        const block = document.createElement("div");
        block.className = `block ${part}`;
        block.token = { turn, part, start, end: Math.min(ids.length, start + BLOCK) };
        stream.append(block);
        sight.observe(block);
      }
    }
  }
  repaint();
}

document.addEventListener("mouseover", (event) => {
  const token = event.target.token;
  if (!token?.turn || token.part) return;
  const parts = [`turn ${token.turn.turn} token ${token.at}`, `id ${token.turn.output_ids[token.at]}`, JSON.stringify(token.turn.output_texts[token.at])];
  for (const [name, values] of Object.entries(token.turn.values)) parts.push(`${name} ${shown(values[token.at])}`);
  document.getElementById("hover").textContent = parts.join(" · ");
});
document.getElementById("colour")?.addEventListener("change", repaint);

// -- tabs and copies

document.querySelectorAll("[role=tab]").forEach((tab) => tab.addEventListener("click", () => {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (tab.id === "tab-tokens") { history.replaceState(null, "", "#tokens"); showTokens(); }
  else history.replaceState(null, "", location.pathname);
}));
addEventListener("click", async (event) => {
  const { copy, curl, text } = event.target.dataset ?? {};
  if (!copy && !curl && !text) return;
  const told = event.target.textContent;
  const path = copy ?? curl;
  const answer = path && await fetch(`${location.pathname}/${path}`);
  const ok = !answer || answer.ok; // else it is a page that says why
  if (ok) await navigator.clipboard.writeText(answer ? await answer.text() : text);
  event.target.textContent = ok ? "Copied" : "Cannot be copied";
  setTimeout(() => { event.target.textContent = told; }, 1500);
});

// -- keys

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const siblings = [...document.querySelectorAll(".siblings a[title]")];
  const rows = [...document.querySelectorAll("table.rows tbody tr, .turn, article.rows")];
  const chosen = rows.findIndex((row) => row.classList.contains("chosen"));
  const go = (by) => {
    const next = rows[Math.max(0, Math.min(rows.length - 1, chosen + by))];
    if (!next) return;
    rows[chosen]?.classList.remove("chosen");
    next.classList.add("chosen");
    next.scrollIntoView({ block: next.matches(".turn") ? "start" : "nearest" });
  };
  const here = siblings.findIndex((each) => each.hasAttribute("aria-current"));
  switch (event.key) {
    case "j": go(1); break;
    case "k": go(-1); break;
    case "l": siblings[here + 1]?.click(); break;
    case "h": siblings[here - 1]?.click(); break;
    case "ArrowRight": document.querySelector("a[rel=next]")?.click(); break;
    case "ArrowLeft": document.querySelector("a[rel=prev]")?.click(); break;
    case "Enter": rows[chosen]?.querySelector("a")?.click(); break;
    case "u": {
      const up = document.querySelector(".siblings")?.dataset.up ?? document.querySelector("header .run")?.href;
      if (up) location.href = up;
      break;
    }
  }
});

drawAll();
layOver();
setTimeout(refresh, Number(document.querySelector("main").dataset.live || 0) || 0);
if (location.hash === "#tokens") document.getElementById("tab-tokens")?.click();
