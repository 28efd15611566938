"use strict";
/* The page around model.js and maps.js. `state` says what is looked at, `show` draws all of it, and the address
keeps it. */

const data = JSON.parse(document.getElementById("data").textContent);
const MODELS = data.models.map(({ settings, shapes }, number) => {
  let tensors; // read when first needed: half of the file may never be
  return (faults, off) => {
    tensors ??= read_tensors(document.getElementsByClassName("weights")[number].textContent, shapes);
    return apply_faults(new Transformer(settings, tensors), faults, off);
  };
});
const { num_layers, num_heads, max_len } = data.models[0].settings;
const LONGEST = max_len - 2, SHORTEST = 3; // digits; <bos> and <eos> need places too
const NUM_OFFSET = 3; // digit d is id d + NUM_OFFSET, as in train.py
const D_K = data.models[0].settings.d_model / num_heads;
const FAULTS = {
  causal: ["Causal mask", "It hides later positions from earlier ones. Without it every step computes the earlier "
    + "positions again with the later ones in view, which never happened in training."],
  padding: ["Padding mask", `Every string is filled up with <pad> to ${max_len} tokens, and the mask hides them. `
    + "Without it they can be looked at like any other token."],
  positions: ["Positions", "A token's vector is its embedding plus its position. Without positions every 7 is the "
    + "same 7, and the encoder cannot tell 73 from 37."],
  scale: ["Division by √d_k", `Without it the scores are √${D_K} ≈ ${Math.sqrt(D_K).toFixed(2)} times as large, and `
    + "the softmax puts more on the largest."],
};

const start = () => ({
  digits: data.digits, step: Infinity, kind: "cross", layer: num_layers, head: "mean", row: null, column: null,
  faults: new Set(), off: new Set(), model: 0, padding: false,
});
let state = start();

// ------------------------------------------------------------------------------------------- small helpers

const token_name = id => ["<pad>", "<bos>", "<eos>"][id] ?? String(id - NUM_OFFSET);
const to_ids = digits => [...[...digits].map(digit => Number(digit) + NUM_OFFSET), EOS_ID];
const reversed = digits => [...digits].reverse().join("");
const percent = share => `${Number((100 * share).toFixed(2))}\u00a0%`;
const count = number => number.toLocaleString("en");
/** What was typed -> the digits, or null, and what to say about it. Spaces and commas do not count. */
function read_digits(text) {
  const digits = text.normalize("NFKC").replace(/[\s,]/g, "");
  const foreign = [...digits].find(character => !/[0-9]/.test(character));
  if (!digits) return [null, "Type a digit, 0 to 9."];
  if (foreign) return [null, `“${foreign}” is no digit: the model knows 0 to 9 only.`];
  const length = digits.length === 1 ? "1 digit" : `${digits.length} digits`;
  if (digits.length > LONGEST)
    return [null, `${length}: the model has positions for ${LONGEST}, and <bos> and <eos>. Remove some.`];
  if (digits.length < SHORTEST)
    return [digits, `${length}: training had ${SHORTEST} to ${LONGEST}, so anything may come out.`];
  return [digits, ""];
}

// ------------------------------------------------------------------------------------------------- results

const results = new Map();

/** The digits' whole decoding by a model with faults; the last few are kept. */
function decoded(digits, model, faults, off = new Set()) {
  const key = [digits, model, [...faults].sort(), [...off].sort()].join("|");
  if (!results.has(key)) {
    const begin = performance.now();
    const result = greedy_decode(MODELS[model](faults, off), to_ids(digits));
    result.milliseconds = performance.now() - begin;
    result.output = result.ids.slice(1).filter(id => id !== EOS_ID).map(token_name).join("");
    result.right = result.output === reversed(digits) && result.ids[result.ids.length - 1] === EOS_ID;
    results.set(key, result);
    if (results.size > 24) results.delete(results.keys().next().value);
  }
  return results.get(key);
}

/** The second model was trained without a causal mask, and is shown as it was trained. */
const faults_of = ({ model, faults }) => model === 1 ? new Set(["causal"]) : faults;
const current = () => decoded(state.digits, state.model, faults_of(state), state.model ? new Set() : state.off);
const step_of = result => Math.min(state.step, result.steps.length - 1);

/** The step in question: the current one or, once all is written, that of the chosen row. */
function focus_of(result) {
  const wanted = Number.isFinite(state.step) ? state.step : state.kind === "encoder" ? 0 : state.row ?? 0;
  return Math.min(wanted, step_of(result));
}

/** The heads of a kind and a layer, from 1, at a step. */
function heads_at(result, step, kind, layer) {
  return (kind === "encoder" ? result.encoder : result.steps[step][kind])[layer - 1];
}

/** One map: its names, and weights and masks by row and column. Rows that the decoder has not reached are null. */
function map_of(result, step, kind, layer, head) {
  const heads = heads_at(result, step, kind, layer);
  const source = result.source.map(token_name), read = pad(result.ids.slice(0, -1), max_len - 1).map(token_name);
  const length = { source: state.digits.length + 1, read: result.steps.length };
  const row_side = kind === "encoder" ? "source" : "read", column_side = kind === "decoder" ? "read" : "source";
  const padded = state.padding || faults_of(state).has("padding");
  const so_far = read.map((name, j) => j > step && j < length.read ? "·" : name);
  const columns = column_side === "source" ? source : so_far;
  const shown = padded ? columns.length : length[column_side];
  const chosen = head === "mean" ? heads : [heads[head - 1]];
  const rows = range(length[row_side]).map(i => {
    const name = (row_side === "source" ? source : read)[i], known = kind === "encoder" || i <= step;
    if (!known) return { name: "·", writes: "·", weights: null };
    const weights = range(shown).map(j => chosen.reduce((sum, one) => sum + one.weights[i][j], 0) / chosen.length);
    const masked = range(shown).map(j => heads[0].mask[i % heads[0].mask.length][j]);
    return { name, writes: kind === "encoder" ? null : token_name(result.ids[i + 1]), weights, masked };
  });
  return { rows, columns: columns.slice(0, shown) };
}

/** The chosen cell, or where the row in question looks most. */
function cell_of(result, map) {
  const known = map.rows.filter(({ weights }) => weights).length;
  const row = Math.min(state.row ?? (state.kind === "encoder" ? 0 : focus_of(result)), known - 1);
  return [row, Math.min(state.column ?? largest(map.rows[row].weights), map.columns.length - 1)];
}

// -------------------------------------------------------------------------------------------- first screen

function show_answer(result, step, focus) {
  const chips = result.ids.slice(1).map((id, i) => element("button", {
    type: "button", class: (i > step ? "later" : "") + (id === EOS_ID ? " end" : ""),
    "aria-current": i === focus && "step",
    "aria-label": `Step ${i + 1}: ${i > step ? "not written yet" : `writes ${token_name(id)}`}`,
    onclick: () => change({ step: i, row: null, column: null }),
  }, i > step ? "·" : token_name(id)));
  const had = [...$("answer").children].indexOf(document.activeElement);
  $("answer").replaceChildren(...chips);
  if (had >= 0) chips[Math.min(had, chips.length - 1)].focus();

  const done = step === result.steps.length - 1, all = !Number.isFinite(state.step);
  $("verdict").className = done ? (result.right ? "good" : "bad") : "";
  $("verdict").textContent = !done ? `Step ${step + 1} of ${result.steps.length}`
    : result.right ? `✓ ${state.digits} backwards` : `✗ right would be ${reversed(state.digits)}`;
  $("first").disabled = $("back").disabled = step === 0;
  $("next").disabled = $("last").disabled = all;
  $("play").textContent = playing ? "■ Stop" : "▶ Play";

  const { probabilities } = result.steps[focus];
  const order = [...probabilities.keys()].sort((a, b) => probabilities[b] - probabilities[a]).slice(0, 3);
  $("likely-title").textContent = `The likeliest tokens at step ${focus + 1} of ${result.steps.length}`;
  $("likely").replaceChildren(...order.map(id => {
    const bar = element("i");
    bar.style.width = `${100 * probabilities[id]}%`;
    return element("li", {}, element("b", {}, token_name(id)), element("div", { class: "bar" }, bar),
      element("span", {}, `${(100 * probabilities[id]).toFixed(1)} %`));
  }));
}

/** One sentence about a cell. */
function reading(map, row, column) {
  const { name, writes, weights, masked } = map.rows[row];
  const is_digit = state.kind !== "decoder" && column < state.digits.length;
  const place = is_digit ? `, digit ${column + 1} of the string,` : "";
  const who = writes === null ? `${name}${row < state.digits.length ? `, digit ${row + 1},` : ""} looks`
    : `To write ${writes} after ${name}, it looks`;
  return masked[column] ? `${who} not at ${map.columns[column]}${place || ","} which is masked.`
    : `${who} at ${map.columns[column]}${place} with weight ${two(weights[column])}.`;
}

// --------------------------------------------------------------------------------------- inside one cell

/** Numbers as bars up and down from a middle line. */
function bars(numbers, name) {
  const most = Math.max(...numbers.map(Math.abs), 1e-9);
  const ends = `${two(Math.min(...numbers))} to ${two(Math.max(...numbers))}`;
  const label = `${name}: ${numbers.length} numbers from ${ends}`;
  const strip = element("div", { class: "bars", role: "img", "aria-label": label });
  for (const value of numbers) {
    const bar = element("b", { class: value < 0 ? "minus" : "" });
    const height = 50 * Math.abs(value) / most;
    bar.style.cssText = `height: ${height}%; ${value < 0 ? "top" : "bottom"}: 50%`;
    strip.append(element("i", { title: two(value) }, bar));
  }
  return element("div", { class: "strip" }, element("span", {}, name, element("br"),
    element("span", { class: "soft" }, ends)), strip);
}

const formula = (...parts) => element("p", { class: "formula" }, ...parts);
const strong = text => element("strong", {}, text);

function data_table(caption, head, rows, now = -1) {
  const body = rows.map(([name, ...cells], i) => element("tr", { class: i === now ? "now" : "" },
    element("th", { scope: "row" }, name), ...cells.map(text => element("td", {}, text))));
  return scrolling(caption, element("table", { class: "data" }, element("caption", { class: "soft" }, caption),
    element("thead", {}, element("tr", {}, ...head.map(text => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...body)));
}

function show_cell(result, map, step, row, column) {
  const heads = heads_at(result, step, state.kind, state.layer);
  const number = state.head === "mean" ? 1 + largest(heads.map(head => head.weights[row][column])) : state.head;
  const { q, k, v, weights, scores, mask, output } = heads[number - 1];
  const asks = map.rows[row].name, key = map.columns[column], d_k = q[0].length;
  const scale = faults_of(state).has("scale") ? 1 : Math.sqrt(d_k);
  const masked = j => mask[row % mask.length][j];

  $("cell-what").textContent = `${reading(map, row, column)} `
    + `${KINDS[state.kind][0]}, layer ${state.layer}. Each head works this out for itself; below, head ${number}.`;
  $("cell-heads").replaceChildren(...heads.map((head, i) => element("button", {
    type: "button", "aria-pressed": i + 1 === number ? "true" : "false",
    onclick: () => { change({ head: i + 1, row, column }); $("cell-heads").children[i].focus(); },
  }, `head ${i + 1}: ${two(head.weights[row][column])}`)));

  const products = q[row].map((value, d) => value * k[column][d]);
  const sum = dot(q[row], k[column]), visible = scores[row].filter((_, j) => !masked(j));
  const most = Math.max(...visible), shown = map.columns.length;
  const exponential = j => masked(j) ? 0 : Math.exp(scores[row][j] - most);
  const power = j => masked(j) ? "0" : exponential(j).toPrecision(3);
  const total = range(scores[row].length).reduce((all, j) => all + exponential(j), 0);
  $("cell-steps").replaceChildren(
    element("div", { class: "card" }, element("h3", {}, "1. The question meets the key"),
      element("p", {}, `q comes from the row's token, k from the column's, ${d_k} numbers each. Where both have the `
        + "same sign, the product counts for this key."),
      bars(q[row], `q of ${asks}`), bars(k[column], `k of ${key}`), bars(products, "q × k"),
      element("details", {}, element("summary", {}, `the ${d_k} numbers`),
        data_table("q, k and their product", ["", "q", "k", "q × k"],
          range(d_k).map(d => [String(d + 1), three(q[row][d]), three(k[column][d]), three(products[d])]))),
      formula("sum of the products: q·k = ", strong(two(sum))),
      element("h3", {}, "2. Divide by √d_k"),
      formula(scale === 1 ? "not divided, as that is switched off: score = "
        : `${two(sum)} ÷ √${d_k} = ${two(sum)} ÷ ${two(scale)} = `, strong(two(sum / scale))),
      element("h3", {}, "3. Masked?"),
      formula(...(masked(column) ? ["yes: the score becomes −3.4 · 10³⁸, and the weight ", strong("0")]
        : ["no: the score stays ", strong(two(sum / scale))]))),
    element("div", { class: "card" }, element("h3", {}, "4. Softmax over the row"),
      element("p", {}, "The row's scores become weights that sum to 1. The largest score, max, is subtracted first: "
        + "that changes no weight, and e to the power of a large number would overflow."),
      data_table(`Row ${asks}, all keys`, ["key", "score", "e^(score − max)", "÷ sum"],
        range(shown).map(j => [map.columns[j],
          ...(masked(j) ? ["masked", "0", "0"] : [two(scores[row][j]), power(j), three(weights[row][j])])]), column),
      formula(`${power(column)} ÷ ${total.toPrecision(4)} = `, strong(three(weights[row][column]))),
      element("h3", {}, "5. Take so much of the value"),
      element("p", {}, "Each key has a value v. The head's output is their sum, each times its weight. With a weight "
        + "near 1 it is the value of that one key."),
      bars(v[column], `v of ${key}`),
      bars(v[column].map(value => value * weights[row][column]), `${two(weights[row][column])} × v of ${key}`),
      bars(output[row], `output of head ${number}, all keys`)));
}

// --------------------------------------------------------------------------------------------- all heads

/** A box that puts a name into a set of the state, or takes it out. */
function switch_box(what, name, text, label) {
  const box = element("input", {
    type: "checkbox", id: `${what}.${name}`, "aria-label": label ?? null, onchange: event => {
      const names = new Set(state[what]);
      names[event.target.checked ? "add" : "delete"](name);
      change({ [what]: names });
    },
  });
  box.checked = state[what].has(name);
  box.disabled = state.model === 1; // the second model is shown as it was trained
  return element("label", { class: "check" }, box, text);
}

function show_heads(result, step) {
  fill_heads(num_layers, num_heads, (kind, layer, head) => {
    const name = `${kind}.${layer}.${head}`, share = percent(data.models[0].heads[name]);
    const label = `${KINDS[kind][0]}, layer ${layer}, head ${head}, off: ${share} right`;
    const box = switch_box("off", name, `off: ${share}`, label);
    const figure = thumbnail_of(map_of(result, step, kind, layer, head), state, kind, layer, head, box);
    figure.classList.toggle("off", state.off.has(name));
    return figure;
  });
}

// ------------------------------------------------------------------------------------------------ what if

function written(result) {
  const text = result.ids.slice(1).map(token_name).join(" ");
  return [element("span", { class: result.right ? "good" : "bad" }, result.right ? "✓ " : "✗ "), text];
}

let waiting; // the rest of a table that is computed row by row, so that typing is never held up

function show_faults() {
  const { shares } = data.models[0], outputs = [];
  const row = (name, title, text, faults) => {
    const out = element("td", { class: "out", "data-fault": name }, "…");
    outputs.push(() => out.replaceChildren(...written(decoded(state.digits, 0, faults))));
    const box = name ? switch_box("faults", name, `no ${title[0].toLowerCase()}${title.slice(1)}`) : title;
    return element("tr", {}, element("th", { scope: "row" }, box, element("p", {}, text)), out,
      element("td", { class: "share" }, percent(shares[name])));
  };
  const head = ["switched off", "this string", "right of " + count(data.models[0].scored)];
  refill($("faults"), [
    element("thead", {}, element("tr", {}, ...head.map(text => element("th", { scope: "col" }, text)))),
    element("tbody", {}, row("", "nothing", "The model as it was trained.", new Set()),
      ...Object.entries(FAULTS).map(([name, [title, text]]) => row(name, title, text, new Set([name])))),
  ]);
  clearTimeout(waiting);
  const work = () => {
    const next = outputs.shift();
    if (next) next();
    if (outputs.length) waiting = setTimeout(work, 0);
    else show_unmasked();
  };
  waiting = setTimeout(work, 0);
}

const RECIPES = { chapter: "the chapter's recipe", fast: "the fast recipe" };

/** The second model: reading the right answer, and on its own. */
function show_unmasked() {
  if (data.models.length === 1) return;
  const { run, shares, forced, scored, peek } = data.models[1];
  const model = MODELS[1](new Set(["causal"]), new Set());
  const [memory, src_mask] = model.encode(pad(to_ids(state.digits), max_len));
  const right = [BOS_ID, ...to_ids(reversed(state.digits))], tgt_in = pad(right, max_len).slice(0, -1);
  const [logits, decoder] = model.decode(tgt_in, memory, src_mask);
  const said = logits.slice(0, right.length - 1).map(row => row.indexOf(Math.max(...row.slice(EOS_ID))));
  const forced_result = { ids: [BOS_ID, ...said], right: said.every((id, i) => id === right[i + 1]) };

  const { weights } = decoder[peek.layer - 1][peek.head - 1], names = right.slice(0, max_len - 1).map(token_name);
  const rows = names.slice(0, right.length - 1).map((name, i) => element("tr", {},
    element("th", { scope: "row" }, name), ...names.map((_, j) => weight_cell(weights[i][j]))));
  const head = element("tr", {}, element("td"), ...names.map(name => element("th", { scope: "col" }, name)));
  const table = element("table", { class: "map" }, element("thead", {}, head), element("tbody", {}, ...rows));

  refill($("unmasked"), [
    element("h3", {}, "… and if there was no causal mask in training?"),
    element("p", {}, `Without its causal mask the finished model still gets ${percent(data.models[0].shares.causal)} right. `
      + `The mask is there for training. This second model was trained without one, by ${RECIPES[run.recipe]}, seed `
      + `${run.seed}. In training the decoder reads the whole right answer: whenever it had to write a token, that token `
      + "already stood in what it read."),
    element("div", { class: "two" },
      element("div", { class: "card" }, element("h3", {}, "Reading the right answer, as in training"),
        element("p", { class: "tokens", id: "forced" }, ...written(forced_result)),
        element("p", {}, `${percent(forced)} of all tokens right, in ${count(scored)} unseen strings. Its decoder looks up `
          + `what it is to write: in layer ${peek.layer}, head ${peek.head}, the next token gets a weight of `
          + `${two(peek.weight)} on average. Here for this string; the token to be written stands one place to the right `
          + "of the one just read:"),
        scrolling("Decoder self-attention of the second model", table)),
      element("div", { class: "card" }, element("h3", {}, "Reading what it wrote itself"),
        element("p", { class: "tokens", id: "alone" }, ...written(decoded(state.digits, 1, new Set(["causal"])))),
        element("p", {}, `${percent(shares[""])} of ${count(scored)} unseen strings right; with the mask put back now, `
          + `${percent(shares.causal)}. Now there is nothing to look up.`))),
    element("button", {
      type: "button", id: "swap",
      onclick: () => change({ ...start(), digits: state.digits, model: 1 - state.model }),
    }, state.model ? "Back to the model trained with the mask" : "Look at this model in the maps above"),
  ]);
}

// -------------------------------------------------------------------------------------------- from a token

function show_vectors(result) {
  const { embed } = MODELS[state.model](faults_of(state), new Set()).encoder;
  const place = Math.min(state.column ?? 0, state.digits.length), id = result.source[place];
  const scaled = embed.emb[id].map(value => value * embed.scale), position = embed.pe[place];
  const sum = scaled.map((value, k) => value + position[k]);
  $("vectors").replaceChildren(
    element("p", {}, `What the encoder gets for ${token_name(id)}, place ${place + 1} of the string: the token's `
      + `embedding, ${sum.length} trained numbers, times √${sum.length}; plus sines and cosines of the place, which are `
      + "the same for every token there. The column of the cell chosen above decides which token."),
    bars(scaled, `embedding of ${token_name(id)}`), bars(position, `position ${place + 1}`), bars(sum, "their sum"));
}

function show_facts(result) {
  const { parameters, settings } = data.models[0];
  const models = data.models.map(({ run, torch, strings, exact_match }, number) => element("li", {},
    `${number ? "The second model, without a causal mask," : "It"} was trained by ${RECIPES[run.recipe]}, seed ${run.seed}, `
    + `${run.epochs} ${run.epochs === 1 ? "epoch" : "epochs"}. Of ${count(strings)} unseen strings it reverses `
    + `${count(Math.round(strings * exact_match))} without a mistake, measured with PyTorch ${torch}.`));
  $("facts").replaceChildren(element("ul", {},
    element("li", {}, `The model is that of model.py: ${count(parameters)} parameters, d_model ${settings.d_model}, `
      + `${num_heads} heads, ${num_layers} layers on either side.`), ...models,
    element("li", {}, "The weights are rounded to 16 bits (fp16), and every figure here is that of the rounded ones. "
      + "“Unseen” means: not among the training strings."),
    element("li", {}, "It runs in page/model.js, the same parts under the same names as model.py, and took "
      + `${result.milliseconds.toFixed(0)} ms for these digits. Decoding is greedy and has no KV cache: all positions are `
      + "computed again at each step."),
    element("li", {}, "This file was written by python viz.py --html attention.html. It loads nothing and sends nothing.")));
}

// --------------------------------------------------------------------------------------------- everything

function show() {
  const result = current(), step = step_of(result), focus = focus_of(result);
  const map = map_of(result, step, state.kind, state.layer, state.head), [row, column] = cell_of(result, map);
  $("kind").value = state.kind;
  $("layer").value = state.layer;
  $("head").value = state.head;
  $("padding").checked = state.padding || faults_of(state).has("padding");
  $("padding").disabled = faults_of(state).has("padding");
  show_answer(result, step, focus);
  $("map").setAttribute("aria-label", name_of(state, num_layers, num_heads));
  fill_map(map, state.kind, [row, column], focus, (i, j) => reading(map, i, j));
  show_cell(result, map, step, row, column);
  show_heads(result, step);
  show_faults();
  show_vectors(result);
  show_facts(result);

  const head_name = name => {
    const [kind, layer, head] = name.split(".");
    return `${KINDS[kind][0].toLowerCase()}, layer ${layer}, head ${head}`;
  };
  const missing = [...[...state.faults].map(name => FAULTS[name][0].toLowerCase()), ...[...state.off].map(head_name)];
  $("broken").hidden = !missing.length && !state.model;
  $("broken").firstElementChild.textContent = state.model
    ? "This is the second model, trained without a causal mask." : `Switched off: ${missing.join("; ")}.`;
  write_address();
}

function change(some) {
  Object.assign(state, some);
  show();
}

/** Go to a step, and say so to those who do not see the map. */
function go(step) {
  const result = current(), last = result.steps.length - 1;
  change({ step: step > last ? Infinity : Math.max(0, step), row: null, column: null });
  const row = map_of(result, step_of(result), "cross", num_layers, "mean").rows[focus_of(result)];
  $("announce").textContent = `Step ${focus_of(result) + 1} of ${last + 1}: writes ${row.writes}, looks at `
    + `${token_name(result.source[largest(row.weights)])}, weight ${two(Math.max(...row.weights))}.`;
}

let playing = null;

function play() {
  if (playing) stop();
  else {
    const last = () => step_of(current()) === current().steps.length - 1;
    playing = setInterval(() => last() ? stop() : go(step_of(current()) + 1), 900);
    go(last() ? 0 : step_of(current()));
  }
}

function stop() {
  clearInterval(playing);
  playing = null;
  show();
}

// --------------------------------------------------------------------------------------------- the address

function write_address() {
  const fresh = start(), parts = new URLSearchParams();
  if (state.digits !== fresh.digits) parts.set("digits", state.digits);
  if (Number.isFinite(state.step)) parts.set("step", state.step + 1);
  for (const name of ["kind", "layer", "head"]) if (state[name] !== fresh[name]) parts.set(name, state[name]);
  if (state.row !== null && state.column !== null) parts.set("cell", `${state.row + 1}.${state.column + 1}`);
  if (state.faults.size) parts.set("faults", [...state.faults].join(","));
  if (state.off.size) parts.set("off", [...state.off].join(","));
  if (state.padding) parts.set("padding", "shown");
  if (state.model) parts.set("model", "unmasked");
  const hash = parts.size || String(parts) ? `#${parts}`.replaceAll("%2C", ",") : "";
  if (hash !== location.hash) history.replaceState(null, "", hash || location.href.replace(/#.*/, ""));
}

/** The state that the address asks for; what is no such thing is left out and said. */
function read_address() {
  const found = start(), wrong = [];
  const number = (text, most) => /^\d{1,4}$/.test(text) && text >= 1 && text <= most ? Number(text) : null;
  const set = (name, value) => value === null || value === undefined ? false : (found[name] = value, true);
  const all_of = (text, legal) => text.split(",").every(legal) ? new Set(text.split(",")) : null;
  const is_head = text => Object.hasOwn(data.models[0].heads, text);
  const readers = {
    digits: text => set("digits", read_digits(text)[0]),
    step: text => set("step", number(text, max_len - 1) && number(text, max_len - 1) - 1),
    kind: text => set("kind", Object.hasOwn(KINDS, text) ? text : null),
    layer: text => set("layer", number(text, num_layers)),
    head: text => set("head", text === "mean" ? text : number(text, num_heads)),
    cell: text => {
      const [row, column, more] = text.split(".").map(part => number(part, max_len));
      return row && column && more === undefined ? set("row", row - 1) && set("column", column - 1) : false;
    },
    faults: text => set("faults", all_of(text, name => Object.hasOwn(FAULTS, name))),
    off: text => set("off", all_of(text, is_head)),
    padding: text => set("padding", text === "shown" || null),
    model: text => set("model", text === "unmasked" && data.models.length === 2 ? 1 : null),
  };
  for (const part of location.hash.slice(1).split("&").filter(Boolean)) {
    const [[name, value]] = [...new URLSearchParams(part), ["", ""]];
    if (!Object.hasOwn(readers, name) || !readers[name](value)) wrong.push(`${name}=${value}`.slice(0, 60));
  }
  $("trouble").hidden = !wrong.length;
  $("trouble").textContent = "The address asks for something that this page does not have, and it was left out: "
    + wrong.join(", ");
  state = found;
  $("digits").value = state.digits;
  typed();
}

// ----------------------------------------------------------------------------------------------- listening

/** What is in the field has changed: answer it, or say why not. */
function typed() {
  const [digits, complaint] = read_digits($("digits").value);
  $("complaint").textContent = complaint;
  $("complaint").classList.toggle("mild", digits !== null);
  $("digits").setAttribute("aria-invalid", digits === null);
  if (digits !== null && digits !== state.digits) {
    change({ digits, step: Infinity, row: null, column: null });
    const { output, right } = current();
    $("announce").textContent = `${digits}: the model writes ${[...output].join(" ")}, ${right ? "right" : "wrong"}.`;
  } else show();
}

function listen() {
  $("digits").addEventListener("input", typed);
  const moves = { first: () => 0, back: now => now - 1, next: now => now + 1, last: () => Infinity };
  for (const [id, step] of Object.entries(moves))
    $(id).addEventListener("click", () => {
      const focused = document.activeElement === $(id);
      go(step(step_of(current())));
      if (focused && $(id).disabled) $(id === "next" || id === "last" ? "back" : "next").focus();
    });
  $("play").addEventListener("click", play);
  $("repair").addEventListener("click", () => {
    change({ faults: new Set(), off: new Set(), model: 0 });
    $("digits").focus();
  });
  $("padding").addEventListener("change", event => change({ padding: event.target.checked, column: null, row: null }));

  $("inside").addEventListener("click", () => $("cell").focus());
  listen_to_map(() => {
    const map = map_of(current(), step_of(current()), state.kind, state.layer, state.head);
    return { map, cell: cell_of(current(), map), say: (row, column) => reading(map, row, column) };
  }, (row, column) => change({ row, column }));
  window.addEventListener("hashchange", read_address);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { read_colours(); show(); });
}

fill_pickers(num_layers, num_heads);
for (const place of document.querySelectorAll("[data-fill]"))
  place.textContent = count(data.models[0][place.dataset.fill]);
read_colours();
listen();
read_address();
