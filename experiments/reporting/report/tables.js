"use strict";
// Tables that a reader sorts by their headings, and the filter that all of them obey.

const filter = {
  category: document.getElementById("category"),
  search: document.getElementById("search"),
};
const ALL = "all"; // the category of a row that stands for all categories together

function sortBy(heading) {
  const row = heading.parentElement;
  const body = heading.closest("table").tBodies[0];
  const place = Array.prototype.indexOf.call(row.cells, heading);
  const descending = heading.ariaSort === "ascending";
  for (const other of row.cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const keyed = Array.from(body.rows, (line) => ({ line, key: keyOf(line.cells[place].textContent) }));
  keyed.sort((one, other) => order(one.key, other.key, descending));
  body.append(...keyed.map((each) => each.line));
}

// A cell that begins with a number counts as that number; a dash as nothing, which stands last either way.
function keyOf(text) {
  const plain = text.trim();
  if (plain === "-" || plain === "") return null;
  const number = /^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?/i.exec(plain);
  return number ? Number(number[0].replaceAll(",", "")) : plain.toLowerCase();
}

function order(one, other, descending) {
  if (one === null || other === null) return (one === null) - (other === null);
  const sign = descending ? -1 : 1;
  if (typeof one === "number" && typeof other === "number") return sign * (one - other);
  return sign * String(one).localeCompare(String(other));
}

function applyFilter() {
  const category = filter.category.value;
  const wanted = filter.search.value.trim().toLowerCase();
  for (const row of document.querySelectorAll("tr[data-category]")) {
    const own = row.dataset.category;
    const summary = row.closest("#figures") !== null; // there, rows of single categories stand beside those of all
    const fits = category === "*" || (category === "" ? !summary || own === ALL : own === category);
    row.hidden = !(fits && (wanted === "" || row.textContent.toLowerCase().includes(wanted)));
  }
  const rows = Array.from(document.querySelectorAll("#prompts tbody tr"));
  document.getElementById("nothing").hidden = rows.length > 0 && rows.some((row) => !row.hidden);
}

document.addEventListener("click", (event) => {
  const heading = event.target.closest("th");
  if (heading && event.target.closest("th > button")) sortBy(heading);
});
filter.category.addEventListener("change", applyFilter);
filter.search.addEventListener("input", applyFilter);
