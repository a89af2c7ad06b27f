// The page over all episodes. What it shows is in its address, so every view can be linked to:
// filters by their names, `sort`, `open` (the key of an episode) and `beside` (that of another).

const AT_ONCE = 150; // rows that are drawn at a time
const CACHED = 30; // episodes
const FACETS = ["folder", "split", "step", "k", "dispatch", "temperature", "kind", "stop", "outcome", "change"];
const COLUMNS = ["accuracy", "reward", "difference", "question", "answer", "folder", "split", "step", "k",
  "dispatch", "temperature", "calls", "turns", "stop"];
const TITLES = { accuracy: "Result", difference: "Change", temperature: "Temp." };
const ALWAYS = ["accuracy", "reward", "question", "answer", "calls"];
const ORDER = { before: 0, rl: 1, curve: 1, after: 2 }; // phases of a run

const collator = new Intl.Collator(undefined, { numeric: true });
const form = document.getElementById("filters");
const body = document.getElementById("rows");

let all = []; // the row of each episode
let shown = []; // those that match, in order
let columns = []; // names of the columns with more than one value
const pages = new Map(); // promises of episodes as HTML, by key

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// --- the address ---

const query = () => new URLSearchParams(location.search);

function address(changes) {
  const changed = query();
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null) changed.delete(name);
    else changed.set(name, value);
  }
  return `?${changed}`;
}

async function get(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(await reply.text());
  return reply.text();
}

// --- rows ---

function prepare({ columns: names, rows }) {
  all = rows.map((values) => Object.fromEntries(names.map((name, n) => [name, values[n]])));
  for (const row of all) {
    row.outcome = outcome(row);
    row.text = `${row.question} ${row.answer ?? ""} ${row.id}`.toLowerCase();
  }
  compare();
  const differ = (name) => new Set(all.map((row) => row[name])).size > 1;
  columns = COLUMNS.filter((name) => ALWAYS.includes(name) || differ(name));
  form.elements.from.parentElement.before(...FACETS.filter(differ).map(facet));
  document.getElementById("columns").append(...columns.map(heading));
}

function outcome({ accuracy, answer }) {
  if (answer === null) return "no answer";
  if (accuracy === null) return "answered";
  return accuracy >= 1 ? "right" : accuracy <= 0 ? "wrong" : "partly right";
}

// Pairs what two folders played alike, and notes what the second one earned more.
function compare() {
  const step = (row) => (row.split === "after" ? null : row.step); // runs may have other lengths
  const alike = (row) => [row.same, row.k, row.dispatch, row.temperature, row.split, step(row)].join();
  const first = new Map();
  for (const row of all) {
    Object.assign(row, { difference: null, change: "" });
    const pair = first.get(alike(row));
    if (!pair) first.set(alike(row), row);
    else if (pair.folder !== row.folder && pair.reward !== null && row.reward !== null) {
      const difference = row.reward - pair.reward;
      const change = difference > 0 ? "better" : difference < 0 ? "worse" : "same";
      for (const each of [pair, row]) Object.assign(each, { difference, change });
    }
  }
}

function facet(name) {
  const counts = new Map();
  for (const row of all) counts.set(row[name], (counts.get(row[name]) ?? 0) + 1);
  const values = [...counts.keys()].filter((value) => value !== "").sort(collator.compare);
  const options = values.map((value) =>
    element("option", { value, textContent: `${value} (${counts.get(value)})` }));
  options.unshift(element("option", { value: "", textContent: "any" }));
  return element("label", {}, title(name), element("select", { name }, ...options));
}

function heading(name) {
  const link = element("a", { textContent: title(name) });
  return element("th", { scope: "col", className: name, id: `by-${name}` }, link);
}

function select() {
  const wanted = query();
  const facets = FACETS.filter((name) => wanted.get(name));
  const limit = (name, none) => (wanted.get(name) ? Number(wanted.get(name)) : none);
  const [low, high, calls] = [limit("from", null), limit("to", null), limit("calls", 0)];
  const terms = (wanted.get("q") ?? "").toLowerCase().split(/\s+/);
  shown = all.filter((row) =>
    facets.every((name) => String(row[name]) === wanted.get(name)) &&
    (low === null || (row.reward !== null && row.reward >= low)) &&
    (high === null || (row.reward !== null && row.reward <= high)) &&
    row.calls >= calls &&
    terms.every((term) => row.text.includes(term)));
  const sort = wanted.get("sort");
  if (sort) order(sort.replace("-", ""), sort.startsWith("-") ? -1 : 1);
}

function order(name, sign) {
  const missing = (row) => row[name] === null;
  shown.sort((a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const numbers = typeof a[name] === "number";
    return sign * (numbers ? a[name] - b[name] : collator.compare(a[name], b[name]));
  });
}

// --- words ---

const title = (name) => TITLES[name] ?? name[0].toUpperCase() + name.slice(1);
const number = (value) => (value === null ? "–" : String(Number(value.toPrecision(3))));

function verdict({ outcome, accuracy }) {
  const kind = { "no answer": "bad", right: "good", wrong: "bad", "partly right": "part" }[outcome];
  const text = { right: "✓ right", wrong: "✗ wrong", "partly right": `≈ ${number(accuracy)}` }[outcome];
  return element("span", { className: `verdict ${kind ?? ""}`, textContent: text ?? outcome });
}

function cell(row, name) {
  const value = row[name];
  const made = element("td", { className: name });
  made.dataset.name = title(name);
  const plain = typeof value === "string" ? value : number(value);
  const special = {
    accuracy: () => verdict(row),
    question: () => element("a", { href: address({ open: row.key }), textContent: value }),
    difference: () => (value === null ? "" : value > 0 ? `+${plain}` : plain),
  };
  made.append(special[name]?.() ?? plain);
  return made;
}

function summary() {
  const count = `${shown.length.toLocaleString()} of ${all.length.toLocaleString()} episodes`;
  const parts = [...new Set(shown.map((row) => row.folder))].map((folder, _, { length }) => {
    const own = shown.filter((row) => row.folder === folder);
    const mean = (name) => {
      const known = own.map((row) => row[name]).filter((value) => value !== null);
      return number(known.length ? known.reduce((a, b) => a + b) / known.length : null);
    };
    const means = `accuracy ${mean("accuracy")}, reward ${mean("reward")}, calls ${mean("calls")}`;
    return length > 1 ? `${folder}: ${means}` : means;
  });
  return [count, ...parts].join(" · ");
}

// --- the list ---

function drawList() {
  const wanted = query();
  for (const field of form.elements) {
    if (field.name && field !== document.activeElement) field.value = wanted.get(field.name) ?? "";
  }
  for (const name of columns) {
    const sort = wanted.get("sort") ?? "";
    const [up, down] = [sort === name, sort === `-${name}`];
    const head = document.getElementById(`by-${name}`);
    head.firstChild.href = address({ sort: down ? name : up ? null : `-${name}` });
    head.ariaSort = up ? "ascending" : down ? "descending" : "none";
  }
  document.getElementById("count").textContent = summary();
  body.replaceChildren();
  more();
}

function more(until = body.children.length + AT_ONCE) {
  for (const row of shown.slice(body.children.length, until)) {
    body.append(element("tr", {}, ...columns.map((name) => cell(row, name))));
  }
}

function focusRow(index) {
  if (index < 0 || index >= shown.length) return;
  if (index >= body.children.length) more(index + AT_ONCE);
  body.children[index].querySelector("a").focus({ preventScroll: true });
  body.children[index].scrollIntoView({ block: "nearest" });
}

// --- open episodes ---

function load(key) {
  if (!pages.has(key)) {
    if (pages.size >= CACHED) pages.delete(pages.keys().next().value);
    pages.set(key, get(`data/episode?key=${encodeURIComponent(key)}`));
    pages.get(key).catch(() => pages.delete(key));
  }
  return pages.get(key);
}

async function drawOpen(key, beside) {
  const index = shown.findIndex((row) => row.key === key);
  const place = index < 0 ? "not in the selection" : `${index + 1} of ${shown.length.toLocaleString()}`;
  document.getElementById("place").textContent = place;
  document.getElementById("back").href = address({ open: null, beside: null });
  for (const [id, step] of [["previous", -1], ["next", 1]]) {
    const link = document.getElementById(id);
    const other = index >= 0 && shown[index + step];
    if (other) link.href = address({ open: other.key, beside: null });
    else link.removeAttribute("href");
  }
  const row = all.find((each) => each.key === key);
  document.getElementById("same").replaceChildren(...(row ? sameQuestion(row, beside) : []));
  const keys = [key, beside].filter(Boolean);
  const places = keys.map((each) => element("div", { ariaBusy: "true" }, caption(each, keys)));
  const cards = document.getElementById("cards");
  cards.replaceChildren(...places);
  cards.classList.toggle("pair", keys.length > 1);
  await Promise.all(keys.map(async (each, n) => {
    const card = element("div", {});
    try {
      card.innerHTML = await load(each); // its texts are escaped
    } catch (error) {
      card.append(element("p", { className: "bad", textContent: error.message }));
    }
    places[n].append(card);
    places[n].ariaBusy = "false";
  }));
  if (index >= 0 && shown[index + 1]) load(shown[index + 1].key).catch(() => {});
}

// Two cards have a line each that says which is which.
function caption(key, keys) {
  if (keys.length === 1) return "";
  const row = all.find((each) => each.key === key);
  const only = element("a", { href: address({ open: key, beside: null }), textContent: "only this" });
  return element("h2", {}, row ? `${moment(row)}, ${setting(row)} ` : "", only);
}

// Where and when an episode was played, and how: what differs between episodes.
const moment = (row) =>
  [columns.includes("folder") && row.folder, row.split, row.step || ""].filter(Boolean).join(" ");
const setting = (row) => [
  `K = ${row.k}`,
  columns.includes("dispatch") && row.dispatch,
  columns.includes("temperature") && (row.temperature ? `temperature ${row.temperature}` : "greedy"),
].filter(Boolean).join(", ");

// The same question wherever it was played: a line per setting, a column per folder and step.
function sameQuestion(row, beside) {
  const same = all.filter((each) => each.same === row.same);
  if (same.length === 1) return [];
  const folders = [...new Set(all.map((each) => each.folder))]; // as they were named
  const time = (each) =>
    [folders.indexOf(each.folder), ORDER[each.split] ?? 0, each.step, each.split].join(" ");
  const moments = [...new Map(same.map((each) => [moment(each), time(each)]))]
    .sort((a, b) => collator.compare(a[1], b[1])).map(([name]) => name);
  const link = (each) => {
    const made = element("a", { href: address({ beside: each.key === row.key ? null : each.key }) }, verdict(each));
    if (each.key === row.key || each.key === beside) made.ariaCurrent = "true";
    return made;
  };
  const cells = (line) => moments.map((name) => {
    const members = same.filter((each) => setting(each) === line && moment(each) === name);
    return element("td", {}, ...members.map(link));
  });
  const head = moments.map((name) => element("th", { scope: "col", textContent: name }));
  const lines = [...new Set(same.map(setting))].sort(collator.compare);
  const rows = lines.map((line) =>
    element("tr", {}, element("th", { scope: "row", textContent: line }), ...cells(line)));
  const hint = element("summary", { textContent: `The same question, ${same.length} times: open one beside this` });
  const table = element("table", {}, element("tr", {}, element("th"), ...head), ...rows);
  return [element("details", { open: true }, hint, element("div", { className: "scroll" }, table))];
}

// --- everything ---

function draw() {
  select();
  const wanted = query();
  const open = wanted.get("open");
  const was = document.getElementById("open").dataset.key;
  document.getElementById("open").dataset.key = open ?? "";
  document.getElementById("open").hidden = !open;
  document.getElementById("list").hidden = Boolean(open);
  if (open) {
    if (open !== was) scrollTo(0, 0);
    drawOpen(open, wanted.get("beside"));
  } else {
    drawList();
    if (was) focusRow(shown.findIndex((row) => row.key === was));
  }
}

function filter() {
  const fields = [...form.elements].filter((field) => field.name);
  const changes = Object.fromEntries(fields.map((field) => [field.name, field.value.trim()]));
  history.replaceState(null, "", address(changes));
  draw();
}
form.addEventListener("input", filter);
form.addEventListener("reset", () => setTimeout(filter));
document.getElementById("toggle").onclick = () => form.classList.toggle("all");
form.addEventListener("submit", (event) => {
  event.preventDefault();
  focusRow(0);
});
document.getElementById("exports").addEventListener("submit", (event) => {
  event.target.elements.keys.value = shown.map((row) => row.key).join("\n");
});
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="?"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  history.pushState(null, "", link.href);
  draw();
});
document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, select");
  const open = query().get("open");
  if (event.key === "Escape" && (field || open)) {
    if (field) field.blur();
    else document.getElementById("back").click();
  }
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  const arrows = open ? { ArrowRight: 1, ArrowLeft: -1 } : { ArrowDown: 1, ArrowUp: -1 };
  const step = { j: 1, k: -1, ...arrows }[event.key];
  if (event.key === "/" && !open) form.elements.q.focus();
  else if (step && open) document.getElementById(step > 0 ? "next" : "previous").click();
  else if (step) {
    const current = [...body.children].indexOf(document.activeElement.closest("tr"));
    focusRow(Math.max(current + step, 0));
  } else return;
  event.preventDefault();
});
addEventListener("popstate", draw);
new IntersectionObserver(([bottom]) => bottom.isIntersecting && all.length && more())
  .observe(document.querySelector(".keys"));

try {
  prepare(JSON.parse(await get("data/rows")));
  draw();
  if (shown.length) load(shown[0].key).catch(() => {}); // starts what decodes videos
} catch (error) {
  document.getElementById("count").textContent = `The episodes cannot be read: ${error.message}`;
}
