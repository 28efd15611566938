"use strict";
/* Attention maps as tables and as small pictures: what the page of page.js and the one of sentence.js share.

A map has columns, names; and rows { name, writes, weights, masked }: the token that asks, the one it writes next
(null where nothing is written), a weight and whether it is masked for each column. weights is null: not yet. */

const KINDS = {
  cross: ["Cross-attention", "the output looks at the input"],
  encoder: ["Encoder self-attention", "the input looks at itself"],
  decoder: ["Decoder self-attention", "the output looks at itself"],
};

const $ = id => document.getElementById(id);

/** An element with attributes and children; on... are listeners, false and null leave an attribute out. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const two = value => value.toFixed(2).replace("-", "−");
const three = value => value.toFixed(3).replace("-", "−");
const range = length => Array.from({ length }, (_, i) => i);
const largest = row => row.indexOf(Math.max(...row));

/** Put new children into a box; what had the focus inside keeps it. */
function refill(box, children) {
  const had = box.contains(document.activeElement) ? document.activeElement.id : "";
  box.replaceChildren(...children);
  if (had) $(had)?.focus();
}

/** A box that scrolls sideways where it must, for the keyboard too. */
const scrolling = (name, table) =>
  element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table);

// -------------------------------------------------------------------------------------------------- colour

let colours;

/** The two ends of the ramp, as numbers, from the style sheet. */
function read_colours() {
  const style = getComputedStyle(document.documentElement);
  colours = ["--surface", "--blue"].map(name =>
    style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map(pair => parseInt(pair, 16)));
}

/** A weight 0..1 -> [r, g, b]. */
const ramp = weight => colours[0].map((low, i) => Math.round(low + (colours[1][i] - low) * weight));

/** Black or white, whichever has more contrast (WCAG 2, relative luminance). */
function ink_on(rgb) {
  const linear = value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = rgb.map(value => linear(value / 255));
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 ? "#fff" : "#000";
}

// ----------------------------------------------------------------------------------------------- the table

/** A cell of a map: its weight, on the colour of the ramp. */
function weight_cell(weight, attributes = {}) {
  const cell = element("td", attributes, two(weight)), rgb = ramp(weight);
  cell.style.cssText = weight < 0.005 ? "color: var(--soft)" : `background: rgb(${rgb}); color: ${ink_on(rgb)}`;
  return cell;
}

/** Fill the large table with a map of this kind. [row, column]: the chosen cell; now: the row to outline, if any;
say(row, column): a sentence about a cell. */
function fill_map(map, kind, [row, column], now, say) {
  const had = $("map").contains(document.activeElement), asks = kind !== "encoder";
  const axes = asks ? ["Row: has read → ", "writes next (asks)"] : ["Row: ", "source (asks)"];
  const looked = kind === "decoder" ? "answer so far (looked at)" : "source (looked at)";
  $("axes").replaceChildren(axes[0], element("b", {}, axes[1]), " · Column: ", element("b", {}, looked));
  const head = element("tr", {}, element("td"),
    ...map.columns.map(name => element("th", { scope: "col" }, element("span", {}, name))));
  const body = map.rows.map(({ name, writes, weights, masked }, i) => {
    const label = element("th", { scope: "row" }, ...(asks ? [element("span", {}, `${name} → `), writes] : [name]));
    const empty = () => element("td", { class: "empty", "aria-label": "not yet" });
    if (!weights) return element("tr", {}, label, ...map.columns.map(empty));
    return element("tr", { class: asks && i === now ? "now" : "" }, label, ...weights.map((weight, j) => {
      const chosen = i === row && j === column;
      const attributes = {
        "data-row": i, "data-column": j, tabindex: chosen ? 0 : -1, "aria-selected": String(chosen),
        "aria-label": say(i, j),
      };
      return masked[j] ? element("td", { ...attributes, class: "masked" }, "0") : weight_cell(weight, attributes);
    }));
  });
  const longest = Math.max(...map.columns.map(name => name.length));
  $("map").className = longest > 5 ? "many upright" : map.columns.length > 9 ? "many" : "";
  $("map").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  $("reading").textContent = say(row, column);
  if (had) $("map").querySelector('[tabindex="0"]').focus();
}

/** Mouse and keys on the large table. shown() -> map, chosen cell and `say` as they are; choose(row, column). */
function listen_to_map(shown, choose) {
  const place = event => {
    const cell = event.target.closest?.("td[data-row]");
    return cell && [Number(cell.dataset.row), Number(cell.dataset.column)];
  };
  $("map").addEventListener("mouseover", event => {
    if (place(event)) $("reading").textContent = shown().say(...place(event));
  });
  $("map").addEventListener("mouseleave", () => {
    const { cell, say } = shown();
    $("reading").textContent = say(...cell);
  });
  $("map").addEventListener("click", event => {
    if (!place(event)) return;
    choose(...place(event));
    $("map").querySelector('[tabindex="0"]').focus();
  });
  $("map").addEventListener("keydown", event => {
    const { map, cell: [row, column] } = shown();
    const last = map.columns.length - 1, rows = map.rows.filter(({ weights }) => weights).length;
    const moves = {
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column], Home: [row, 0], End: [row, last],
    };
    if (!Object.hasOwn(moves, event.key) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const [to_row, to_column] = moves[event.key];
    choose(Math.max(0, Math.min(to_row, rows - 1)), Math.max(0, Math.min(to_column, last)));
  });
}

// ---------------------------------------------------------------------------------------------- all heads

/** A small picture of a map, one dot a cell. */
function draw(canvas, map) {
  const [height, width] = [map.rows.length, map.columns.length];
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  map.rows.forEach(({ weights }, i) => range(width).forEach(j =>
    image.data.set([...ramp(weights ? weights[j] : 0), weights ? 255 : 0], 4 * (i * width + j))));
  context.putImageData(image, 0, 0);
}

/** A box for each kind of attention, with thumbnail(kind, layer, head) for every layer and head. */
function fill_heads(num_layers, num_heads, thumbnail) {
  const numbers = length => range(length).map(i => i + 1);
  refill($("heads"), Object.entries(KINDS).map(([kind, [title, what]]) => {
    const layers = numbers(num_layers).map(layer =>
      element("div", { class: "layer", role: "group", "aria-label": `${title}, layer ${layer}` },
        element("p", { class: "soft" }, `layer ${layer}`),
        ...numbers(num_heads).map(head => thumbnail(kind, layer, head))));
    return element("div", {}, element("h3", {}, `${title}: ${what}`), element("div", { class: "layers" }, ...layers));
  }));
}

/** A small map as a button that shows it large, and whatever stands below it. */
function thumbnail_of(map, state, kind, layer, head, ...below) {
  const title = `${KINDS[kind][0]}, layer ${layer}, head ${head}`;
  const canvas = element("canvas", { "aria-hidden": "true" });
  draw(canvas, map);
  return element("figure", { class: "thumb" }, element("button", {
    type: "button", id: `show.${kind}.${layer}.${head}`, "aria-label": `${title}: show large`,
    "aria-pressed": String(state.kind === kind && state.layer === layer && state.head === head),
    onclick: () => {
      change({ kind, layer, head, row: null, column: null });
      $("large").scrollIntoView({ block: "nearest" });
    },
  }, canvas, `head ${head}`), ...below);
}

// ------------------------------------------------------------------------------------------------- pickers

const name_of = ({ kind, layer, head }, num_layers, num_heads) => `${KINDS[kind][0]}, layer ${layer} of ${num_layers}, `
  + (head === "mean" ? `mean of ${num_heads} heads` : `head ${head} of ${num_heads}`);

/** Fill the fields that choose kind, layer and head. */
function fill_pickers(num_layers, num_heads) {
  for (const [id, most] of [["layer", num_layers], ["head", num_heads]])
    $(id).append(...(id === "head" ? [element("option", { value: "mean" }, "mean")] : []),
      ...range(most).map(i => element("option", { value: i + 1 }, String(i + 1))));
  for (const name of ["kind", "layer", "head"])
    $(name).addEventListener("change", event => {
      const { value } = event.target;
      change({ [name]: /^\d+$/.test(value) ? Number(value) : value, row: null, column: null });
    });
}
