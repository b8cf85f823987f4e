// Draws the page from the data that stands in it. Whatever comes from a run is set as text, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const run of data.runs) run.config = { ...data.groups[run.group].config, ...run.config };
  const OWN = "";
  const MOST_DRAWN = 8; // methods at the start; more lines than that cannot be told apart
  const MOST_ROWS = 500; // of a table at the start; a browser takes seconds to lay out thousands
  const COLOURS = 7, DASHES = ["", "7 4", "2 3", "9 3 2 3"];
  const metrics = new Map(data.metrics.map((metric) => [metric.name, metric]));
  const seeds = d3.sort(new Set(data.runs.map((run) => run.seed)));
  const costs = data.costs.filter((cost) => data.runs.some((run) => Number.isFinite(run.costs[cost.name])));
  const state = { metric: "acc", rule: OWN, seeds: new Set(seeds), drawn: new Map(), run: 0, row: null, cost: costs[0]?.name, control: 0 };
  const sorted = { methods: { key: "acc", down: true }, differences: { key: "difference", down: true }, runs: { key: "method", down: false } };
  const whole = new Set(); // tables that show all their rows
  /** What is drawn of a method: `state.drawn` has its place among the colours, which it keeps while it is drawn. */
  class Group {
    constructor(group, index) {
      Object.assign(this, group, { index });
    }
    get colour() { return state.drawn.has(this.index) ? `var(--c${state.drawn.get(this.index) % COLOURS})` : "none"; }
    get kind() { return Math.floor((state.drawn.get(this.index) ?? 0) / COLOURS) % DASHES.length; }
    get dashes() { return DASHES[this.kind]; }
    set drawn(wanted) {
      const taken = new Set(state.drawn.values());
      if (wanted) state.drawn.set(this.index, d3.range(taken.size + 1).find((place) => !taken.has(place)));
      else state.drawn.delete(this.index);
    }
  }
  data.groups = data.groups.map((group, index) => new Group(group, index));

  // --- elements

  const $ = (id) => document.getElementById(id);
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child != null));
    return element;
  }
  /** A method's expression, which may be broken after brackets and commas. */
  const breakable = (text) => make("span", {}, ...text.split(/(?<=[(,])/).flatMap((part) => [part, make("wbr")]));
  /** A heading, which may be broken after an underscore too, but not before its arrow. */
  const foldable = (text) => make("span", {}, ...text.split(/(?<=_)|(?<= )(?=\S+ [↑↓]$)/).flatMap((part) =>
    [make("span", { class: /[↑↓]/.test(part) ? "whole" : null }, part), make("wbr")]));
  function options(select, entries, chosen, changed) {
    select.replaceChildren(...entries.map(([value, text]) => make("option", { value, selected: value === chosen }, text)));
    if (changed) select.addEventListener("change", () => changed(select.value));
  }
  /** A short piece of a method's line. */
  function mark(group) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "mark");
    svg.setAttribute("viewBox", "0 0 26 10");
    svg.setAttribute("aria-hidden", "true");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    const attributes = { x1: 1, x2: 25, y1: 5, y2: 5, "stroke-width": 3, "stroke-dasharray": group.dashes };
    for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
    line.style.stroke = group.colour;
    svg.append(line);
    return svg;
  }

  // --- numbers

  const decimals = (name) => metrics.get(name)?.decimals ?? 1;
  const number = (value, places) => Number.isFinite(value) ? value.toFixed(places).replace("-", "−") : "–";
  const signed = (value, places) => value >= 0 ? `+${number(value, places)}` : number(value, places);
  const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;
  function valueOf(run, name, rule = state.rule) {
    if (name === "seconds") return run.costs.seconds ?? NaN;
    return run.rules[rule || data.groups[run.group].rule]?.values[name] ?? NaN;
  }
  /** As functional/statistics.py: sample standard deviation, Student-t interval, none for too few seeds. */
  function summarise(values) {
    const n = values.length, mean = n ? d3.sum(values) / n : NaN;
    const std = n > 1 ? Math.sqrt(d3.sum(values, (value) => (value - mean) ** 2) / (n - 1)) : NaN;
    const whole = values.every(Number.isFinite);
    const half = n in data.quantiles ? data.quantiles[n] * std / Math.sqrt(n) : NaN;
    return whole ? { n, mean, std, half } : { n, mean: NaN, std: NaN, half: NaN };
  }
  /** P(|T| > |t|) for Student's t with whole degrees of freedom, a finite sum: Abramowitz and Stegun, 26.7.3 and 26.7.4. */
  function tails(t, freedom) {
    const angle = Math.atan(Math.abs(t) / Math.sqrt(freedom)), cos = Math.cos(angle), odd = freedom % 2 === 1;
    let term = odd ? cos : 1, sum = freedom > 1 ? term : 0;
    for (let power = odd ? 3 : 2; power <= freedom - 2; power += 2) sum += term *= cos * cos * (power - 1) / power;
    return 1 - (odd ? 2 / Math.PI * (angle + Math.sin(angle) * sum) : Math.sin(angle) * sum);
  }
  /** Holm's step-down correction; what is not a number stays so and does not count. */
  function holm(values) {
    const order = d3.sort(d3.range(values.length).filter((index) => Number.isFinite(values[index])), (index) => values[index]);
    const corrected = values.map(() => NaN);
    order.reduce((largest, index, rank) => corrected[index] = Math.max(largest, Math.min(1, (order.length - rank) * values[index])), 0);
    return corrected;
  }
  const chosenRuns = (group) => data.runs.filter((run) => run.group === group.index && run.finished && state.seeds.has(run.seed));
  const summaryOf = (group, name) => summarise(chosenRuns(group).map((run) => valueOf(run, name)));
  const drawn = () => [...state.drawn.keys()].map((index) => data.groups[index]).filter((group) => chosenRuns(group).length);
  function best() {
    const order = d3.sort(data.groups, (group) => {
      const { mean } = summaryOf(group, state.metric);
      return Number.isFinite(mean) ? (metrics.get(state.metric).higher ? -mean : mean) : Infinity;
    });
    return order.slice(0, MOST_DRAWN);
  }

  // --- tables

  /** Columns have: key, title, cell(item) -> Node or text, sort(item) -> value, and maybe about, class, descending. */
  function table(element, which, columns, items) {
    const order = sorted[which], by = columns.find((column) => column.key === order.key) ?? columns[0];
    const last = (value) => value == null || Number.isNaN(value);
    const rows = d3.sort(items, (a, b) => {
      const [x, y] = [by.sort(a), by.sort(b)];
      return last(x) - last(y) || (order.down ? d3.descending(x, y) : d3.ascending(x, y));
    });
    const head = columns.map((column) => make("th", {
      scope: "col", class: column.class, "aria-sort": column === by ? (order.down ? "descending" : "ascending") : null,
    }, column.sort ? make("button", { type: "button", title: column.about, "data-key": column.key, onclick: () => {
      sorted[which] = { key: column.key, down: column === by ? !order.down : column.descending ?? false };
      render();
      element.querySelector(`[data-key="${CSS.escape(column.key)}"]`).focus();
    } }, foldable(column.title)) : column.title));
    const body = (whole.has(which) ? rows : rows.slice(0, MOST_ROWS)).map((item) => make("tr", {}, ...columns.map((column) =>
      make("td", { class: column.class }, column.cell(item)))));
    if (body.length < rows.length) {
      const all = make("button", { type: "button", onclick: () => { whole.add(which); render(); } }, `show all ${rows.length} rows`);
      body.push(make("tr", {}, make("td", { colspan: columns.length }, all)));
    }
    element.replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  }
  function shownMetrics() {
    const names = data.compared.filter((name) => metrics.has(name));
    return names.includes(state.metric) ? names : [state.metric, ...names];
  }
  const heading = (name) => `${name} ${metrics.get(name).higher ? "↑" : "↓"}`;
  function methodsTable() {
    const summaries = new Map(data.groups.map((group) =>
      [group, new Map([...shownMetrics(), "seconds"].map((name) => [name, summaryOf(group, name)]))]));
    const ranks = new Map(shownMetrics().map((name) => {
      const means = d3.sort(new Set([...summaries.values()].map((found) => found.get(name).mean).filter(Number.isFinite)),
        (value) => metrics.get(name).higher ? -value : value);
      return [name, means];
    }));
    const several = data.groups.length > 1;
    const columns = [
      { key: "method", title: "method", sort: (group) => group.label, cell: (group) => make("label", {}, make("input", {
        type: "checkbox", checked: state.drawn.has(group.index), onchange: (event) => {
          group.drawn = event.target.checked;
          event.target.nextElementSibling.replaceWith(mark(group));
          charts();
        } }), mark(group), breakable(group.label)) },
      { key: "n", title: "seeds", descending: true, sort: (group) => chosenRuns(group).length,
        cell: (group) => `${chosenRuns(group).length}${group.unfinished ? ` (${group.unfinished} unfinished)` : ""}` },
      ...shownMetrics().flatMap((name) => [{
        key: name, title: heading(name), about: metrics.get(name).about, descending: metrics.get(name).higher,
        class: name === state.metric ? "chosen" : null, sort: (group) => summaries.get(group).get(name).mean,
        cell: (group) => {
          const found = summaries.get(group).get(name);
          return spread(found, name, name === state.metric, several ? ["best", "second"][ranks.get(name).indexOf(found.mean)] : null);
        },
      }, ...besidePaper(name, (group) => summaries.get(group).get(name).mean)]),
      { key: "seconds", title: "seconds ↓", about: "training time without evaluation",
        sort: (group) => summaries.get(group).get("seconds").mean, cell: (group) => spread(summaries.get(group).get("seconds"), "seconds") },
      { key: "rule", title: "predicted by", sort: (group) => state.rule || group.rule, cell: (group) => state.rule || group.rule },
    ];
    table($("methods"), "methods", columns, data.groups);
  }
  /** The paper's value of the chosen metric and the difference to it, where it has one for any method. */
  function besidePaper(name, ours) {
    if (name !== state.metric || !data.groups.some((group) => name in group.paper)) return [];
    const theirs = (group) => group.paper[name] ?? NaN, minus = (group) => ours(group) - theirs(group);
    return [
      { key: `paper ${name}`, title: "paper", about: `${name} in the paper`, class: "paper", descending: metrics.get(name).higher,
        sort: theirs, cell: (group) => number(theirs(group), 1) },
      { key: `difference ${name}`, title: "Δ", about: `ours minus the paper's ${name}`, class: "paper", descending: true,
        sort: minus, cell: (group) => signed(minus(group), 1) },
    ];
  }
  /** Every other method against the chosen one, on the seeds that both have and on which they saw the same stream. */
  function differences() {
    const control = data.groups[state.control], pair = (run) => JSON.stringify([run.seed, run.config.stream, run.config.stream_hash]);
    const theirs = new Map(chosenRuns(control).map((run) => [pair(run), valueOf(run, state.metric)]));
    const found = data.groups.filter((group) => group !== control).map((group) => {
      const shared = chosenRuns(group).filter((run) => theirs.has(pair(run)));
      const difference = summarise(shared.map((run) => valueOf(run, state.metric) - theirs.get(pair(run))));
      const { n, mean, std, half } = difference;
      const certain = mean ? 0 : 1; // where all differences are equal
      return { group, ...difference, p: Number.isFinite(half) ? (std ? tails(mean / std * Math.sqrt(n), n - 1) : certain) : NaN };
    }).filter((row) => row.n);
    const corrected = holm(found.map((row) => row.p));
    return found.map((row, index) => ({ ...row, p: corrected[index] }));
  }
  function inWords({ group, n, mean, p }) {
    const control = data.groups[state.control].label, seeds = `${n} seed${n > 1 ? "s" : ""}`;
    if (!Number.isFinite(p)) return `Nothing can be said about ${group.label} and ${control} from ${seeds}.`;
    if (p >= .05) return `No evidence of a difference in ${state.metric} between ${group.label} and ${control} at ${seeds}.`;
    const better = mean > 0 === metrics.get(state.metric).higher;
    return `${group.label} is ${better ? "better" : "worse"} than ${control} in ${state.metric} at ${seeds}.`;
  }
  function differencesTable() {
    const places = decimals(state.metric);
    const columns = [
      { key: "method", title: "method", sort: (row) => row.group.label, cell: (row) => breakable(row.group.label) },
      { key: "n", title: "seeds", descending: true, sort: (row) => row.n, cell: (row) => String(row.n) },
      { key: "difference", title: `difference in ${heading(state.metric)}`, descending: true, sort: (row) => row.mean,
        cell: (row) => signed(row.mean, places) },
      { key: "interval", title: "95 % interval", cell: (row) => Number.isFinite(row.half)
        ? `${signed(row.mean - row.half, places)} to ${signed(row.mean + row.half, places)}` : "no interval" },
      { key: "p", title: "p, Holm", about: "paired t-test, corrected for the number of rows", sort: (row) => row.p,
        cell: (row) => row.p < .001 ? "< 0.001" : number(row.p, 3) },
      { key: "words", title: "in words", class: "words", cell: inWords },
    ];
    table($("differences"), "differences", columns, differences());
  }
  /** `61.20 ± 0.42`, and the interval in a second line where it is asked for. */
  function spread({ n, mean, std, half }, name, interval = false, rank = null) {
    const places = decimals(name), cell = make("span", { class: rank }, number(mean, places));
    if (Number.isFinite(std)) cell.append(` ± ${number(std, places)}`);
    if (!interval || !Number.isFinite(mean)) return cell;
    const range = Number.isFinite(half) ? `${number(mean - half, places)} to ${number(mean + half, places)}`
      : `${n} seed${n > 1 ? "s" : ""}: no interval`;
    return make("span", {}, cell, make("small", {}, range));
  }
  function runsTable() {
    const columns = [
      { key: "method", title: "method", sort: (run) => data.groups[run.group].label, cell: (run) => breakable(data.groups[run.group].label) },
      { key: "seed", title: "seed", sort: (run) => run.seed, cell: (run) => String(run.seed) },
      ...shownMetrics().map((name) => ({
        key: name, title: heading(name), about: metrics.get(name).about, descending: metrics.get(name).higher,
        class: name === state.metric ? "chosen" : null, sort: (run) => valueOf(run, name),
        cell: (run) => number(valueOf(run, name), decimals(name)),
      })),
      { key: "seconds", title: "seconds ↓", sort: (run) => valueOf(run, "seconds"), cell: (run) => number(valueOf(run, "seconds"), 1) },
      { key: "state", title: "state", sort: (run) => run.finished, cell: (run) => run.finished ? "finished" : "unfinished" },
      { key: "look", title: "", cell: (run) => make("span", { class: "buttons" },
        make("button", { type: "button", onclick: () => look(run) }, "look"),
        make("button", { type: "button", onclick: () => details(run) }, "configuration")) },
    ];
    table($("runs"), "runs", columns, data.runs.filter((run) => state.seeds.has(run.seed)));
  }
  function look(run) {
    state.run = data.runs.indexOf(run);
    $("run").value = state.run;
    oneRun();
    $("run").focus();
    $("run").scrollIntoView({ block: "center" });
  }
  const titleOf = (run) => `${data.groups[run.group].label}, seed ${run.seed}`;
  function details(run) {
    $("details-title").textContent = titleOf(run);
    $("command").textContent = run.command;
    $("copy").textContent = "copy";
    const shown = { folder: run.folder, ...run.config };
    $("config").replaceChildren(make("tbody", {}, ...Object.entries(shown).map(([name, value]) =>
      make("tr", {}, make("td", {}, name), make("td", {}, make("code", {}, typeof value === "string" ? value : JSON.stringify(value)))))));
    $("details").showModal();
  }
  async function copy() {
    try {
      await navigator.clipboard.writeText($("command").textContent);
      $("copy").textContent = "copied";
    } catch { // a page that was opened from a folder may not be allowed to
      getSelection().selectAllChildren($("command"));
      $("copy").textContent = "selected";
    }
  }

  // --- charts

  function plot(id, options, ...before) {
    const figure = $(id), width = Math.max(280, Math.floor(figure.clientWidth));
    const style = { fontFamily: "inherit", fontSize: "12px", background: "none" };
    const margins = { marginLeft: 44, marginRight: 14, marginTop: 28, marginBottom: 40 };
    figure.replaceChildren(...before.filter(Boolean), Plot.plot({ width, height: 330, ...margins, style, ...options(width) }));
  }
  const nothing = (id, text) => $(id).replaceChildren(make("p", { class: "hint" }, text));
  const legend = (groups) => make("ul", { class: "legend" }, ...groups.map((group) => make("li", {}, mark(group), breakable(group.label))));
  const lineOf = (group) => ({ stroke: group.colour, strokeDasharray: group.dashes, strokeWidth: 2 });
  const tip = (points, x, y, title) => Plot.tip(points, Plot.pointer({ x, y, title, fontSize: 12, maxRadius: Infinity }));
  /** Over the tasks that have test images. */
  const average = (row) => d3.mean(row) ?? NaN;

  /** The mean over seeds where all of them are evaluated; between two evaluations a seed's curve is straight. */
  function curve(group) {
    const curves = chosenRuns(group).map((run) => {
      const rows = run.rules[state.rule || group.rule]?.rows ?? [];
      return run.evals.steps.map((step, index) => [step, average(rows[index] ?? [])]).filter(([, value]) => Number.isFinite(value));
    }).filter((points) => points.length);
    if (!curves.length) return [];
    const first = d3.max(curves, (points) => points[0][0]), last = d3.min(curves, (points) => points.at(-1)[0]);
    const steps = d3.sort(new Set(curves.flat().map(([step]) => step).filter((step) => first <= step && step <= last)));
    const between = (points, step) => {
      const at = d3.bisector(([x]) => x).left(points, step);
      if (points[at][0] === step) return points[at][1];
      const [[x0, y0], [x1, y1]] = [points[at - 1], points[at]];
      return y0 + (y1 - y0) * (step - x0) / (x1 - x0);
    };
    return steps.map((step) => ({ step, group, ...summarise(curves.map((points) => between(points, step))) }));
  }
  function streamChart() {
    const groups = drawn(), curves = groups.map(curve), points = curves.flat();
    if (!points.length) return nothing("stream", "No method is ticked, or none has these seeds and this rule.");
    const title = (point) => `${point.group.label}\nstep ${point.step}\n${number(point.mean, 1)} %` +
      (Number.isFinite(point.std) ? ` ± ${number(point.std, 1)}` : "") + ` (${point.n} seed${point.n > 1 ? "s" : ""})`;
    const banded = curves.filter((part) => part.some((point) => Number.isFinite(point.std)));
    plot("stream", () => ({
      ariaLabel: "Accuracy on the tasks seen so far, over the steps of the stream",
      x: { label: "step" }, y: { label: "accuracy on the tasks seen so far (%)", grid: true, nice: true },
      marks: [
        Plot.ruleX(boundaries(chosenRuns(groups[0])[0]), { stroke: "var(--faint)" }),
        ...(groups.length <= MOST_DRAWN ? banded : []).map((part) => Plot.areaY(part, {
          x: "step", y1: (point) => point.mean - point.std, y2: (point) => point.mean + point.std, fill: part[0].group.colour, fillOpacity: .13 })),
        ...curves.filter((part) => part.length).map((part) => Plot.lineY(part, { x: "step", y: "mean", ...lineOf(part[0].group) })),
        ...curves.filter((part) => part.length === 1).map((part) => Plot.dot(part, { x: "step", y: "mean", fill: part[0].group.colour })),
        tip(points, "step", "mean", title),
      ],
    }), legend(groups));
  }
  /** Where a run's tasks begin, but the first. */
  const boundaries = (run) => run.evals.steps.filter((_, index) => run.evals.ends[index]).slice(0, -1);
  function finalChart() {
    const name = state.metric, groups = drawn();
    const rows = groups.map((group) => ({ group, label: group.label, ...summaryOf(group, name) })).filter((row) => Number.isFinite(row.mean));
    if (!rows.length) return nothing("final", "No ticked method has this metric.");
    const single = groups.flatMap((group) => chosenRuns(group).map((run) => ({ group, label: group.label, seed: run.seed, value: valueOf(run, name) })));
    const order = d3.sort(rows, (row) => metrics.get(name).higher ? -row.mean : row.mean).map((row) => row.label);
    const title = (row) => `${row.label}\n` + ("seed" in row ? `seed ${row.seed}: ${number(row.value, decimals(name))}`
      : `mean ${number(row.mean, decimals(name))}` + (Number.isFinite(row.half) ? `\n95 % interval ± ${number(row.half, decimals(name))}`
        : `\n${row.n} seed${row.n > 1 ? "s" : ""}: no interval`));
    plot("final", (width) => {
      const letters = Math.max(10, Math.floor(width / 20));
      const longest = Math.min(letters, d3.max(order, (label) => label.length));
      return {
        ariaLabel: `${name} of every drawn method: seeds, mean and 95 % interval`,
        height: 74 + Math.max(26, Math.min(64, 240 / order.length)) * order.length, marginLeft: 14 + 6.6 * longest,
        x: { label: `${heading(name)}: seeds, mean, 95 % interval`, grid: true, nice: true },
        y: { domain: order, label: null, tickFormat: (label) => short(label, letters) },
        marks: [
          Plot.ruleY(rows.filter((row) => Number.isFinite(row.half)), { x1: (row) => row.mean - row.half, x2: (row) => row.mean + row.half,
            y: "label", stroke: (row) => row.group.colour, strokeWidth: 2 }),
          Plot.dot(single, { x: "value", y: "label", r: 3.5, stroke: (row) => row.group.colour, strokeWidth: 1.4, fill: "var(--panel)" }),
          Plot.tickX(rows, { x: "mean", y: "label", stroke: (row) => row.group.colour, strokeWidth: 3 }),
          tip([...single, ...rows], (row) => row.value ?? row.mean, "label", title),
        ],
        color: { type: "identity" },
      };
    });
  }
  function tradeChart() {
    const cost = costs.find((one) => one.name === state.cost);
    const points = drawn().map((group) => ({ group, ...summaryOf(group, state.metric),
      cost: average(chosenRuns(group).map((run) => run.costs[cost?.name] ?? NaN)) }))
      .filter((point) => Number.isFinite(point.mean) && Number.isFinite(point.cost));
    if (!points.length) return nothing("trade", "No ticked method has this metric and this cost.");
    const title = (point) => `${point.group.label}\n${state.metric} ${number(point.mean, decimals(state.metric))}\n${cost.name} ${point.cost.toLocaleString("en", { maximumFractionDigits: 1 })}`;
    const [least, most] = d3.extent(points, (point) => point.cost);
    const far = least > 0 && (most > 20 * least || ["flops", "bytes"].includes(cost.name));
    plot("trade", () => ({
      ariaLabel: `${state.metric} against ${cost.name}`,
      x: { label: cost.about, grid: true, nice: true, type: far ? "log" : "linear", tickFormat: "~s", ticks: far ? undefined : 6 },
      y: { label: heading(state.metric), grid: true, nice: true },
      marks: [
        ...points.map((point) => Plot.dot([point], { x: "cost", y: "mean", r: 5, fill: point.group.colour, symbol: ["circle", "square", "triangle", "diamond"][point.group.kind] })),
        tip(points, "cost", "mean", title),
      ],
    }), legend(points.map((point) => point.group)));
  }

  // --- one run

  function tasksChart(run, rule) {
    const rows = run.rules[rule]?.rows ?? [];
    const points = rows.flatMap((row, index) => row.map((value, task) => ({ step: run.evals.steps[index], task, value })));
    if (!points.length) return nothing("tasks", "This run was not evaluated by this rule.");
    const count = d3.max(points, (point) => point.task) + 1, shade = shades(count);
    plot("tasks", () => ({
      ariaLabel: "Accuracy on each task over the steps of the stream",
      x: { label: "step" }, y: { label: "accuracy (%)", grid: true, domain: [0, 100] },
      marks: [
        Plot.ruleX(boundaries(run), { stroke: "var(--faint)" }),
        Plot.lineY(points, { x: "step", y: "value", z: "task", stroke: (point) => shade(point.task), strokeWidth: 1.8 }),
        Plot.dot(points, { x: "step", y: "value", r: 2.2, fill: (point) => shade(point.task) }),
        tip(points, "step", "value", (point) => `task ${point.task + 1}, step ${point.step}\n${number(point.value, 1)} %`),
      ],
      color: { type: "identity" },
    }), scaleLegend("task", count));
  }
  /** Early ones and late ones in the order of one map, cut where it comes too near to the ground. */
  function shades(count) {
    const [first, last] = document.documentElement.dataset.theme === "dark" ? [.42, 1] : [.08, .78];
    return (index) => d3.interpolateViridis(first + (last - first) * (count > 1 ? index / (count - 1) : 0));
  }
  function scaleLegend(what, count) {
    if (count < 2) return null;
    const shade = shades(count), named = count > 10 ? [0, count - 1] : d3.range(count);
    return make("ul", { class: "legend" }, ...named.map((index) =>
      make("li", {}, mark({ colour: shade(index), dashes: "" }), `${what} ${index + 1}`)));
  }
  function matrixChart(run, rule) {
    const ends = run.evals.steps.map((_, index) => index).filter((index) => run.evals.ends[index]);
    const cells = ends.flatMap((index) => (run.rules[rule]?.rows[index] ?? []).map((value, task) => ({ after: run.evals.tasks[index] + 1, task: task + 1, value })));
    if (!cells.length) return nothing("matrix", "No task has ended yet, or this run was not evaluated by this rule.");
    const size = d3.max(cells, (cell) => cell.after), domain = d3.range(1, size + 1);
    const ticks = domain.filter((task) => size <= 12 || task % 5 === 0);
    plot("matrix", (width) => ({
      ariaLabel: "Accuracy on each task after each task", height: Math.min(380, Math.max(220, width * .62)), padding: .04,
      x: { domain, label: "accuracy on task", ticks, tickSize: 0 }, y: { domain, label: "after task", ticks, tickSize: 0 },
      color: { scheme: "cividis", domain: [0, 100] },
      marks: [
        Plot.cell(cells, { x: "task", y: "after", fill: "value", rx: 2 }),
        size <= 12 ? Plot.text(cells, { x: "task", y: "after", text: (cell) => number(cell.value, 0), fill: (cell) => cell.value < 55 ? "white" : "black" }) : null,
        tip(cells, "task", "after", (cell) => `task ${cell.task} after task ${cell.after}\n${number(cell.value, 1)} %`),
      ],
    }));
  }
  /** Shows a part of "One run" if the run has something for it. */
  function part(id, wanted) {
    $(`${id}-part`).hidden = !wanted;
    $(id).replaceChildren();
    return wanted;
  }
  const LINES = [{ colour: "var(--c0)", dashes: "" }, { colour: "var(--c1)", dashes: "" }, { colour: "var(--quiet)", dashes: "7 4" }, { colour: "var(--ink)", dashes: "2 3" }];
  function prequentialChart(run) {
    if (!part("prequential", run.prequential)) return;
    const { about, steps, curves } = run.prequential, names = Object.keys(curves);
    $("prequential-about").textContent = `Percent of the stream's images that were right before they were learned: ${about}. The dashed lines know the labels so far and no image.`;
    const points = names.flatMap((name, index) => curves[name].map((value, at) => ({ name, index, step: steps[at], value })));
    plot("prequential", () => ({
      ariaLabel: "Percent right before learning over the steps of the stream, beside blind baselines",
      x: { label: "step" }, y: { label: "right before learning (%)", grid: true, domain: [0, 100] },
      marks: [
        Plot.ruleX(boundaries(run), { stroke: "var(--faint)" }),
        ...names.map((name, index) => Plot.lineY(points.filter((point) => point.name === name), { x: "step", y: "value",
          stroke: LINES[index].colour, strokeDasharray: LINES[index].dashes, strokeWidth: 1.8 })),
        tip(points, "step", "value", (point) => `${point.name}, step ${Math.floor(point.step)}\n${number(point.value, 1)} %`),
      ],
    }), make("ul", { class: "legend" }, ...names.map((name, index) => make("li", {}, mark(LINES[index]), name))));
  }
  function gapsChart(run) {
    if (!part("gaps", run.gaps.length)) return;
    const gaps = run.gaps.map((values) => Object.fromEntries(data.gap.map((name, index) => [name, values[index]])));
    for (const gap of gaps) gap.depth = gap.before - gap.low;
    const count = d3.max(gaps, (gap) => gap.task) + 1, shade = shades(count);
    const back = (gap) => gap.steps_to_recover == null ? "never came back" : `came back after ${gap.steps_to_recover} steps`;
    plot("gaps", () => ({
      ariaLabel: "How far each old task falls after a task has ended",
      x: { label: "step at which a task ended" }, y: { label: "fall of an old task (points)", grid: true, nice: true },
      marks: [
        Plot.ruleY([0], { stroke: "var(--faint)" }),
        Plot.dot(gaps, { x: "step", y: "depth", r: 4, stroke: (gap) => shade(gap.task), strokeWidth: 1.6,
          fill: (gap) => gap.steps_to_recover == null ? "none" : shade(gap.task) }),
        tip(gaps, "step", "depth", (gap) => `task ${gap.task + 1} after task ${gap.boundary}\n${number(gap.before, 1)} → ${number(gap.low, 1)} % in ${gap.steps_to_low} steps\n${back(gap)}`),
      ],
      color: { type: "identity" },
    }), scaleLegend("task", count));
  }
  function calibrationChart(run) {
    if (!part("calibration", run.calibration.length)) return;
    const names = ["ece", "nll", "brier"];
    const points = run.calibration.flatMap((row) => names.map((name, index) => ({ name, index, step: row.step, value: row[name] })));
    plot("calibration", () => ({
      ariaLabel: "Calibration error, negative log-likelihood and Brier score at each mark",
      x: { label: "step" }, y: { label: "ECE, NLL (nats), Brier score", grid: true, nice: true, zero: true },
      marks: [
        ...names.map((name, index) => Plot.lineY(points.filter((point) => point.name === name), { x: "step", y: "value", stroke: `var(--c${index})`, strokeWidth: 1.8 })),
        Plot.dot(points, { x: "step", y: "value", r: 2.4, fill: (point) => `var(--c${point.index})` }),
        tip(points, "step", "value", (point) => `${point.name}, step ${point.step}\n${number(point.value, 3)}`),
      ],
      color: { type: "identity" },
    }), make("ul", { class: "legend" }, ...names.map((name, index) => make("li", {}, mark({ colour: `var(--c${index})`, dashes: "" }), name))));
  }
  function confusionChart(run) {
    if (!part("confusion", run.confusion.length)) return;
    const sums = d3.rollup(run.confusion, (rows) => d3.sum(rows, (row) => row[2]), (row) => row[0]);
    const cells = run.confusion.map(([label, predicted, images]) => ({ label, predicted, images, share: 100 * images / sums.get(label) }));
    const size = d3.max(cells, (cell) => Math.max(cell.label, cell.predicted)) + 1, domain = d3.range(size);
    const ticks = domain.filter((label) => size <= 12 || label % Math.ceil(size / 12) === 0);
    plot("confusion", (width) => ({
      ariaLabel: "How many images of each class were taken for each class at the end", height: Math.min(420, Math.max(240, width * .8)), padding: 0,
      x: { domain, label: "predicted class", ticks, tickSize: 0 }, y: { domain, label: "class", ticks, tickSize: 0 },
      color: { scheme: "cividis", domain: [0, 100] },
      marks: [
        Plot.cell(cells, { x: "predicted", y: "label", fill: "share" }),
        tip(cells, "predicted", "label", (cell) => `class ${cell.label} taken for ${cell.predicted}\n${cell.images} images, ${number(cell.share, 1)} %`),
      ],
    }));
  }
  function layersChart(run) {
    const names = Object.keys(run.series);
    if (!names.includes(state.row)) state.row = names[0] ?? null;
    options($("row"), names.map((name) => [name, data.rows[name] ?? name]), state.row);
    $("row").disabled = !names.length;
    if (!names.length) return nothing("layers", "Nothing was recorded at its steps.");
    const { steps, values } = run.series[state.row];
    const points = values.flatMap((line, layer) => line.map((value, index) => ({ step: steps[index], layer, value })));
    const shade = shades(values.length);
    plot("layers", () => ({
      ariaLabel: `${state.row} at each layer over the steps of the stream`, height: 280, marginLeft: 58,
      x: { label: "step" }, y: { label: data.rows[state.row] ?? state.row, grid: true, nice: true },
      marks: [
        Plot.ruleX(boundaries(run), { stroke: "var(--faint)" }),
        Plot.lineY(points, { x: "step", y: "value", z: "layer", stroke: (point) => shade(point.layer), strokeWidth: 1.7 }),
        tip(points, "step", "value", (point) => `layer ${point.layer + 1}, step ${point.step}\n${Number(point.value).toPrecision(4)}`),
      ],
      color: { type: "identity" },
    }), scaleLegend("layer", values.length));
  }
  function oneRun() {
    const run = data.runs[state.run], rule = state.rule || data.groups[run.group].rule;
    tasksChart(run, rule);
    matrixChart(run, rule);
    prequentialChart(run);
    gapsChart(run);
    calibrationChart(run);
    confusionChart(run);
    layersChart(run);
  }

  // --- the page

  function charts() {
    streamChart();
    finalChart();
    tradeChart();
  }
  function render() {
    $("meaning").textContent = `${state.metric}: ${metrics.get(state.metric).about}`;
    methodsTable();
    differencesTable();
    runsTable();
    charts();
    oneRun();
  }
  function theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme").textContent = name === "dark" ? "light" : "dark";
    $("theme").setAttribute("aria-label", `${$("theme").textContent} colours`);
  }
  function draw(groups) {
    state.drawn = new Map(groups.map((group, place) => [group.index, place]));
    render();
  }
  function start() {
    document.title = data.title;
    $("title").textContent = data.title;
    $("setting").replaceChildren(...data.setting.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
    $("reading").textContent = data.reading;
    $("differing").hidden = data.groups.length < 2;
    $("differing-reading").textContent = data.differing;
    $("footer").textContent = data.footer;
    theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    $("theme").addEventListener("click", () => {
      theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
      oneRun();
    });
    options($("metric"), data.metrics.map((metric) => [metric.name, heading(metric.name)]), state.metric, (value) => {
      state.metric = value;
      sorted.methods = { key: value, down: metrics.get(value).higher };
      render();
    });
    options($("rule"), [[OWN, "each method's own rule"], ...data.rules.map((rule) => [rule, rule])], OWN, (value) => {
      state.rule = value;
      render();
    });
    options($("control"), data.groups.map((group) => [String(group.index), group.label]), "0", (value) => {
      state.control = Number(value);
      differencesTable();
    });
    $("seeds").append(...seeds.map((seed) => make("label", {}, make("input", { type: "checkbox", value: seed, checked: true, onchange: (event) => {
      state.seeds[event.target.checked ? "add" : "delete"](seed);
      render();
    } }), String(seed))));
    const layers = (run) => run.series["log/H"]?.values.length ?? 0;
    state.run = Math.max(0, d3.greatestIndex(data.runs, (a, b) => d3.ascending(layers(a), layers(b)))); // has the most to show
    options($("run"), data.runs.map((run, index) => [String(index), titleOf(run) + (run.finished ? "" : " (unfinished)")]), String(state.run),
      (value) => {
        state.run = Number(value);
        oneRun();
      });
    $("row").addEventListener("change", () => {
      state.row = $("row").value;
      layersChart(data.runs[state.run]);
    });
    options($("cost"), costs.map((cost) => [cost.name, cost.about]), state.cost, (value) => {
      state.cost = value;
      tradeChart();
    });
    $("configuration").addEventListener("click", () => details(data.runs[state.run]));
    $("copy").addEventListener("click", copy);
    $("draw-all").addEventListener("click", () => draw(data.groups));
    $("draw-best").addEventListener("click", () => draw(best()));
    $("draw-none").addEventListener("click", () => draw([]));
    let width = 0;
    new ResizeObserver(() => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      charts();
      oneRun();
    }).observe(document.body);
    draw(best());
  }
  start();
})();
