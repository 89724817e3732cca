"use strict";
// The token view: a list of outputs, and the chosen one token by token. Everything is drawn when it is asked for, and
// every text enters the page as text.

const DATA = JSON.parse(document.getElementById("data").textContent);
const WORDS = {
  accepted: "accepted draft token",
  recovered: "recovered after a rejection",
  bonus: "bonus after a whole branch",
  "recovered or bonus": "recovered or bonus (a trace would tell)",
  target: "nothing was drafted",
};
const view = document.getElementById("view");
const choice = { color: "source", rejected: true };
const shades = new WeakMap(); // how dark each token is, by depth and by probability

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const classOf = (source) => (source === "recovered or bonus" ? "either" : source);

function listOutputs() {
  const body = document.querySelector("#prompts tbody");
  const rows = [];
  const several = new Set(DATA.runs.flatMap((run) => run.outputs.map((output) => output.T))).size > 1;
  for (const run of DATA.runs) {
    for (const output of run.outputs) {
      const method = several ? `${output.method}, T=${output.T}` : output.method;
      const prompt = run.prompts[output.p];
      const open = element("button", { type: "button" }, prompt.id + turnOf(output));
      const row = element(
        "tr", {},
        element("td", {}, open, ...(run.name ? [" ", element("small", {}, run.name)] : [])),
        element("td", {}, prompt.category || "-"),
        element("td", {}, method),
        element("td", { className: "right" }, output.error ? "failed" : String(output.k.length)),
        element("td", { className: "right" }, output.rounds.length ? perRound(output).toFixed(2) : "-"),
        element("td", { className: output.equal === false && !output.tie ? "missed" : "" }, equality(output)),
      );
      row.dataset.category = prompt.category;
      row.addEventListener("click", () => choose(run, output, row));
      rows.push(row);
    }
  }
  body.append(...rows);
  const compared = DATA.runs.some((run) => run.outputs.some((output) => output.equal !== null));
  document.getElementById("prompts").classList.toggle("nothing-compared", !compared);
}

function turnOf(output) {
  const turn = output.turn ? `, turn ${output.turn}` : "";
  const sample = output.sample ? `, sample ${output.sample}` : "";
  return turn + sample;
}

function perRound(output) {
  return output.rounds.reduce((sum, round) => sum + round.a + 1, 0) / output.rounds.length;
}

function equality(output) {
  if (output.equal === null) return "-";
  if (output.equal) return "equal";
  return `differs at ${output.differs}${output.tie ? " (tie)" : " (NOT a tie)"}`;
}

function choose(run, output, row) {
  for (const other of document.querySelectorAll("#prompts tr.chosen")) other.classList.remove("chosen");
  row.classList.add("chosen");
  // Beside the chosen one, the same prompt's other outputs of this run: plain decoding and the other methods.
  const same = run.outputs.filter(
    (each) => each.p === output.p && each.turn === output.turn && each.sample === output.sample && each !== output && each.T === output.T,
  );
  const prompt = run.prompts[output.p];
  const parts = [controls(), promptOf(prompt, output), outputOf(run, output)];
  if (same.length) {
    const others = element("details", {}, element("summary", {}, `The same prompt's other outputs (${same.length})`));
    others.addEventListener("toggle", () => { if (others.children.length === 1) { others.append(...same.map((each) => outputOf(run, each))); dress(); } });
    parts.push(others);
  }
  view.replaceChildren(...parts);
  dress();
}

function controls() {
  const colors = element("fieldset", {}, element("legend", {}, "color by"));
  for (const name of ["source", "depth", "probability"]) {
    const radio = element("input", { type: "radio", name: "color", value: name, checked: choice.color === name });
    radio.addEventListener("change", () => { choice.color = name; dress(); });
    colors.append(element("label", {}, radio, ` ${name}`));
  }
  const box = element("input", { type: "checkbox", id: "rejected", checked: choice.rejected });
  box.addEventListener("change", () => { choice.rejected = box.checked; dress(); });
  return element("div", { className: "controls" }, colors, element("label", {}, box, " rejected proposals"));
}

// Show the outputs as the reader has chosen. Classes say how; the style sheet does the rest.
function dress() {
  view.className = `view by-${choice.color}${choice.rejected ? "" : " hide-rejected"}`;
  for (const token of view.querySelectorAll(".t")) paint(token);
  for (const legend of view.querySelectorAll(".legend[data-sources]")) {
    legend.replaceWith(legendOf(legend.dataset.sources.split(";"), legend.dataset.rejected === "true"));
  }
}

function promptOf(prompt, output) {
  const turn = prompt.turns[output.turn];
  const made = element("details", {}, element("summary", {}, `Prompt ${prompt.id}${turnOf(output)}, ${output.promptTokens} tokens`));
  made.append(turn === undefined ? element("p", { className: "note" }, "This run has not kept its prompts.") : element("div", { className: "prompt" }, turn));
  return made;
}

function outputOf(run, output) {
  const made = element("article", { className: "output" }, element("h3", {}, `${output.method}, temperature ${output.T}`));
  if (output.error) {
    made.append(element("p", { className: "missed" }, `failed: ${output.error}`));
    return made;
  }
  const facts = [
    `${output.k.length} tokens in ${output.rounds.length} rounds`,
    `${perRound(output).toFixed(2)} tokens per target forward`,
    `ended by ${output.finish}`,
  ];
  if (output.equal !== null) facts.push(output.equal ? "equal to plain decoding" : `differs from plain decoding at token ${output.differs}, margin ${output.margin ?? "unknown"} nats`);
  const drawer = element("div", { className: "drawer", hidden: true });
  made.append(element("p", { className: "facts-line" }, facts.join("; ")), tokensOf(run, output, drawer));
  const traced = output.rounds.some((round) => round.k && round.k.length > 1);
  made.append(legendOf([...new Set(output.s.map((number) => DATA.sources[number]))], traced), drawer);
  return made;
}

function tokensOf(run, output, drawer) {
  const flow = element("div", { className: "tokens" });
  flow.setAttribute("role", "group");
  flow.setAttribute("aria-label", "Rounds; arrow keys move, Enter opens the draft");
  const rounds = [];
  let begin = 0; // where in the output the round began
  output.r.forEach((number, i) => {
    if (!rounds[number]) {
      begin = i;
      rounds[number] = roundOf(output, number);
      flow.append(rounds[number]);
    }
    const place = i - begin;
    const data = output.rounds[number];
    if (i === output.differs) rounds[number].append(element("span", { className: "diverges" }, "differs from plain decoding"));
    if (data.k && place === data.path.length) rounds[number].append(...rejectedAt(run, data));
    rounds[number].append(tokenOf(run, output, i, place, data));
  });
  const open = (number) => {
    for (const each of rounds) each.classList.toggle("open", each === rounds[number]);
    for (const each of rounds) each.tabIndex = each === rounds[number] ? 0 : -1;
    rounds[number].focus({ preventScroll: true });
    fill(drawer, run, output, number, open, rounds.length);
  };
  rounds.forEach((each, number) => {
    each.tabIndex = number ? -1 : 0;
    each.addEventListener("click", () => open(number));
    each.addEventListener("keydown", (event) => {
      const to = { ArrowRight: number + 1, ArrowLeft: number - 1, Home: 0, End: rounds.length - 1 }[event.key];
      if (event.key === "Enter" || event.key === " ") open(number);
      else if (to === undefined || !rounds[to]) return;
      else if (!drawer.hidden) open(to);
      else { each.tabIndex = -1; rounds[to].tabIndex = 0; rounds[to].focus(); }
      event.preventDefault();
    });
  });
  return flow;
}

function roundOf(output, number) {
  const made = element("span", { className: "round" });
  made.setAttribute("role", "button");
  made.setAttribute("aria-label", `round ${number}: ${output.rounds[number].a} of ${output.rounds[number].d} accepted`);
  return made;
}

function tokenOf(run, output, i, place, data) {
  const source = DATA.sources[output.s[i]];
  const text = output.x[i] ?? run.texts[output.k[i]];
  const made = element("span", { className: `t ${classOf(source)}${place ? "" : " first"}` });
  text.split("\n").forEach((line, number) => {
    if (number) made.append(element("span", { className: "break" }, "⏎"), "\n");
    made.append(line);
  });
  const p = probability(data, place);
  // Both shades at once: the reader chooses which of them is seen.
  const deep = source === "accepted" ? Math.min(1, 0.15 + 0.17 * (place + 1)) : 0;
  shades.set(made, { depth: deep, probability: p === null ? 0 : 0.06 + 0.94 * p });
  made.classList.toggle("unknown", p === null);
  made.title = `${visible(text)}   ${WORDS[source]}, round ${output.r[i]}, depth ${place + 1}   p ${share(p)}`;
  return made;
}

// The target's probability of a token of a round: of an accepted one after its parent, of the last one where it was drawn.
function probability(data, place) {
  if (!data.k) return null;
  return place < data.path.length ? data.p[data.path[place]] : data.next[1];
}

function paint(made) {
  const value = shades.get(made)[choice.color] ?? 0;
  made.style.setProperty("--shade", value);
  made.classList.toggle("deep", value > 0.75);
  made.classList.toggle("full", value > 0.93);
}

function rejectedAt(run, data) {
  const stop = data.path.length ? data.path[data.path.length - 1] : 0;
  const found = [];
  data.up.forEach((up, i) => {
    if (up !== stop || i === 0) return;
    const made = element("span", { className: "rejected-token" }, visible(run.texts[data.k[i]]));
    made.title = `rejected proposal   p ${share(data.p[i])}   q ${share(data.q[i])}`;
    found.push(made);
  });
  return found;
}

function fill(drawer, run, output, number, open, count) {
  const data = output.rounds[number];
  const step = (to, label) => {
    const made = element("button", { type: "button", disabled: to < 0 || to >= count }, label);
    made.addEventListener("click", () => open(to));
    return made;
  };
  const close = element("button", { type: "button" }, "close");
  close.addEventListener("click", () => { drawer.hidden = true; });
  const expected = data.e === undefined ? "" : ` (expected ${data.e.toFixed(2)})`;
  const words = `${data.a} accepted${expected} of ${data.n} drafted nodes, depth ${data.d}`;
  const head = element("div", { className: "drawer-head" }, step(number - 1, "← previous"), step(number + 1, "next →"), close, element("p", {}, element("strong", {}, `Round ${number}: `), words));
  const parts = [head];
  if (data.k) {
    const source = data.k.length === 1 ? "target" : data.up.includes(data.path.at(-1) ?? 0) ? "recovered" : "bonus";
    const tree = element("div", { className: "tree", tabIndex: 0 });
    tree.append(drawTree(data, (token) => run.texts[token], source));
    parts.push(tree, treeLegend(), likelyOf(run, data));
  } else {
    parts.push(element("p", { className: "note" }, data.n ? "The draft was not kept: run with trace=true to see it." : "Nothing was drafted in this round."));
  }
  drawer.replaceChildren(...parts);
  drawer.hidden = false;
}

function treeLegend() {
  const key = (className, text) => element("li", {}, element("span", { className }), text);
  return element(
    "ul", { className: "legend" },
    element("li", {}, "✓ accepted"), element("li", {}, "✗ not accepted"), element("li", {}, "↻ recovered"), element("li", {}, "+ bonus"),
    key("key-p", "p: the target's probability after the parent"), key("key-q", "q: the drafter's (– where nothing was drawn)"),
  );
}

function likelyOf(run, data) {
  const body = element("tbody", {});
  [0, ...data.path].forEach((node, place) => {
    const cells = data.likely[place].map(([token, p]) => element("td", {}, element("code", {}, visible(run.texts[token])), ` ${share(p)}`));
    body.append(element("tr", {}, element("th", { scope: "row" }, "after ", element("code", {}, visible(run.texts[data.k[node]]))), ...cells));
  });
  return element("div", { className: "scroll" }, element("table", { className: "likely" }, element("caption", {}, "The target's most likely tokens along the path, with p"), body));
}

function legendOf(sources, rejected) {
  const made = element("ul", { className: "legend" });
  made.dataset.sources = sources.join(";");
  made.dataset.rejected = String(rejected);
  if (choice.color === "source") {
    for (const source of sources) made.append(element("li", {}, element("span", { className: `swatch ${classOf(source)}` }), WORDS[source]));
  } else {
    const ends = choice.color === "depth" ? ["first drafted token", "deeper (tokens that were not drafted have no color)"] : ["p = 0", "p = 1 (dotted: unknown, without a trace)"];
    made.append(element("li", {}, ends[0], element("span", { className: "scale" }), ends[1]));
  }
  if (rejected && choice.rejected) made.append(element("li", {}, element("span", { className: "rejected-token" }, "x"), " rejected proposals"));
  made.append(element("li", {}, "click a round to see its draft"));
  return made;
}

// An output that differs from plain decoding's is what a reader has to see first; else one that was drafted.
function chooseFirst() {
  const listed = DATA.runs.flatMap((run) => run.outputs.map((output) => ({ run, output })));
  const rows = document.querySelectorAll("#prompts tbody tr");
  const tests = [(o) => o.equal === false && !o.tie, (o) => o.equal === false, (o) => o.rounds.some((round) => round.n), () => true];
  for (const test of tests) {
    const at = listed.findIndex((each) => test(each.output));
    if (at >= 0) return choose(listed[at].run, listed[at].output, rows[at]);
  }
}

listOutputs();
applyFilter();
chooseFirst();
