"use strict";
// The draft tree of one round as SVG: depth to the right, siblings below each other in the order they were drawn.

const SVG = "http://www.w3.org/2000/svg";
const SIZE = { width: 112, height: 48, gapX: 26, gapY: 8, margin: 6 };

// Draws a round. `textOf` gives a token's text, `source` the word for the token that followed.
function drawTree(round, textOf, source) {
  const nodes = round.k.map((token, i) => ({
    word: textOf(token), p: round.p[i], q: round.q[i], up: round.up[i],
    kind: i === 0 ? "root" : round.path.includes(i) ? "accepted" : "rejected",
  }));
  const stop = round.path.length ? round.path[round.path.length - 1] : 0;
  const [token, p, q] = round.next;
  nodes.push({ word: textOf(token), p, q, up: stop, kind: source });
  place(nodes);
  const right = Math.max(...nodes.map((node) => node.x)) + SIZE.width + SIZE.margin;
  const low = Math.max(...nodes.map((node) => node.y)) + SIZE.height + SIZE.margin;
  const svg = make("svg", { width: right, height: low, viewBox: `0 0 ${right} ${low}`, role: "img" });
  svg.append(make("title", {}, `Draft tree: ${round.path.length} of ${round.k.length - 1} drafted nodes accepted`));
  for (const node of nodes) if (node.up >= 0) svg.append(edge(nodes[node.up], node));
  for (const node of nodes) svg.append(box(node));
  return svg;
}

// Leaves stand below each other, a parent in the middle of its children; the token that followed comes first.
function place(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.up >= 0) children[node.up].push(i); });
  for (const below of children) if (below.includes(nodes.length - 1)) below.unshift(below.pop());
  let row = 0;
  const settle = (i, depth) => {
    nodes[i].x = SIZE.margin + depth * (SIZE.width + SIZE.gapX);
    const rows = children[i].map((child) => settle(child, depth + 1));
    const own = rows.length ? (rows[0] + rows[rows.length - 1]) / 2 : row++;
    nodes[i].y = SIZE.margin + own * (SIZE.height + SIZE.gapY);
    return own;
  };
  settle(0, 0);
}

function edge(from, to) {
  const x = from.x + SIZE.width, y = from.y + SIZE.height / 2, end = to.y + SIZE.height / 2;
  const middle = (x + to.x) / 2;
  const kind = to.kind === "accepted" ? "on" : to.kind === "rejected" ? "" : `follow ${to.kind}`;
  return make("path", { d: `M${x} ${y}C${middle} ${y} ${middle} ${end} ${to.x} ${end}`, class: `edge ${kind}` });
}

function box(node) {
  const group = make("g", { class: `node ${node.kind}`, transform: `translate(${node.x} ${node.y})` });
  const { width, height } = SIZE;
  const sign = { accepted: "✓ ", rejected: "✗ ", root: "", recovered: "↻ ", bonus: "+ ", target: "" }[node.kind] || "";
  group.append(make("title", {}, `${node.kind}: ${visible(node.word)}   p ${share(node.p)}   q ${share(node.q)}`));
  group.append(make("rect", { class: "box", width, height, rx: 6 }));
  group.append(make("text", { x: 8, y: 16 }, sign), make("text", { x: sign ? 24 : 8, y: 16, class: "word" }, short(node.word)));
  if (node.kind === "root") {
    group.append(make("text", { x: 8, y: 33, class: "small" }, "last token"));
    return group;
  }
  [["p", node.p, 23], ["q", node.q, 34]].forEach(([name, value, y]) => {
    group.append(make("text", { x: 8, y: y + 7, class: "small" }, `${name} ${share(value)}`));
    if (value === null) return;
    group.append(make("rect", { class: "rail", x: 60, y: y + 1, width: 46, height: 5 }));
    group.append(make("rect", { class: `bar-${name}`, x: 60, y: y + 1, width: 46 * value, height: 5 }));
  });
  return group;
}

function make(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A token in one line, with what cannot be seen made visible.
function visible(word) {
  return word.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍").replaceAll(" ", "·");
}

function short(word) {
  const letters = Array.from(visible(word));
  return letters.length > 11 ? letters.slice(0, 10).join("") + "…" : letters.join("");
}

function share(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return value < 0.001 ? value.toExponential(0) : value.toFixed(3);
}
