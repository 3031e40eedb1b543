"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  const SHOWN = 500;

  // Text only ever goes through textContent: what a model wrote is never read as HTML.
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    for (const child of children) element.append(typeof child === "string" ? document.createTextNode(child) : child);
    return element;
  };
  const json = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
  const part = (item) => (item && item.type === "text" && typeof item.text === "string" ? item.text : json(item));
  const content = (value) => (Array.isArray(value) ? value.map(part).join("\n") : json(value));
  const short = (number) => (typeof number === "number" ? String(Number(number.toPrecision(3))) : String(number));
  const money = (cost) => (cost === null ? "-" : `$${cost.toFixed(4)}`);

  const histogram = (title, values, unit) => {
    const figure = make("figure", {}, make("figcaption", {}, `${title} (${values.length})`));
    if (!values.length) return figure;
    const low = Math.min(...values), high = Math.max(...values), bins = 24, counts = new Array(bins).fill(0);
    const width = high - low || 1;
    for (const value of values) counts[Math.min(bins - 1, Math.floor(((value - low) / width) * bins))] += 1;
    const top = Math.max(...counts), space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 240 84");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${title}: ${short(low)} to ${short(high)}${unit}`);
    counts.forEach((count, index) => {
      const height = (count / top) * 80, bar = document.createElementNS(space, "rect");
      for (const [name, value] of Object.entries({ x: index * 10 + 1, y: 84 - height, width: 8, height })) bar.setAttribute(name, value);
      svg.append(bar);
    });
    const ends = [low, high].map((value) => make("span", {}, `${short(value)}${unit}`));
    figure.append(svg, make("div", { class: "scale" }, ...ends));
    return figure;
  };

  const message = (item) => {
    const box = make("div", {}, make("div", { class: "role" }, item.toolName ? `${item.role}: ${item.toolName}` : item.role));
    if (item.content && item.content.length) box.append(make("pre", {}, content(item.content)));
    for (const call of item.toolCalls || []) box.append(make("pre", {}, `${call.name}(${call.arguments})`));
    return box;
  };

  const details = (one) => {
    const body = make("div");
    for (const item of one.assertions) {
      const state = item.passed ? "passed" : "failed";
      const score = item.score === null ? "" : ` ${short(item.score)}`;
      body.append(make("div", { class: state }, `${state} ${item.kind} ${item.name}${score}${item.message ? ": " + item.message : ""}`));
    }
    if (one.error) body.append(make("pre", { class: "error" }, `${one.error.name}: ${one.error.message}\n${one.error.traceback || ""}`));
    if (one.transcript.length) one.transcript.forEach((item) => body.append(message(item)));
    else if (one.reply) body.append(make("div", { class: "role" }, "reply"), make("pre", {}, one.reply));
    return body;
  };

  const row = (one) => {
    const head = make("summary", {}, make("span", { class: `status ${one.status}` }, one.status), make("span", { class: "name" }, one.title));
    head.append(make("span", {}, money(one.cost)), make("span", {}, `${(one.ms / 1000).toFixed(2)} s`));
    const box = make("details", {}, head);
    box.addEventListener("toggle", () => { if (box.open && box.children.length === 1) box.append(details(one)); });
    return box;
  };

  page.append(make("h1", {}, data.title));
  if (data.halted) page.append(make("p", { class: "outage" }, `Halted: ${data.halted}`));
  for (const one of data.evals) page.append(make("p", { class: one.passed ? "passed" : "failed" }, one.line));
  for (const error of data.loadErrors) page.append(make("p", { class: "error" }, `${error.file}: ${error.text}`));

  const scores = data.cases.flatMap((one) => one.assertions.filter((a) => a.kind === "soft" || a.name === "score").map((a) => a.score));
  page.append(make("h2", {}, "Distributions"), make("div", { class: "plots" },
    histogram("scores", scores.filter((score) => score !== null), ""),
    histogram("cost", data.cases.map((one) => one.cost).filter((cost) => cost !== null), " USD"),
    histogram("latency", data.cases.map((one) => one.ms / 1000), " s")));

  if (data.drift.length) {
    page.append(make("h2", {}, "Drift"));
    for (const item of data.drift) page.append(make("pre", {}, `${item.eval}[${item.case}] ${item.field}\n- ${json(item.committed)}\n+ ${json(item.current)}`));
  }

  const text = make("input", { type: "search", placeholder: "filter by name, tag or text", "aria-label": "filter" });
  const status = make("select", { "aria-label": "status" }, ...["all", "not passed", "passed", "failed", "error", "outage"].map((name) => make("option", {}, name)));
  if (data.cases.some((one) => one.status !== "passed")) status.value = "not passed";
  const list = make("div"), count = make("p");
  const show = () => {
    const wanted = text.value.toLowerCase(), state = status.value;
    const found = data.cases.filter((one) =>
      (state === "all" || state === one.status || (state === "not passed" && one.status !== "passed")) &&
      (!wanted || `${one.title} ${one.tags.join(" ")} ${one.reply}`.toLowerCase().includes(wanted)));
    list.replaceChildren(...found.slice(0, SHOWN).map(row));
    count.textContent = found.length > SHOWN ? `${SHOWN} of ${found.length} cases` : `${found.length} cases`;
  };
  text.addEventListener("input", show);
  status.addEventListener("change", show);
  page.append(make("h2", {}, "Cases"), make("div", { class: "controls" }, text, status), count, list);
  show();
})();
