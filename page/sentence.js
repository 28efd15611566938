"use strict";
/* The page of one translated sentence: every attention weight is in `data`, nothing is computed but means. */

const data = JSON.parse($("data").textContent);
const num_layers = data.weights.cross.length, num_heads = data.weights.cross[0].length;
const state = { kind: "cross", layer: num_layers, head: "mean", row: null, column: null };

/** The map of a kind, a layer and a head or "mean". */
function map_of(kind, layer, head) {
  const heads = data.weights[kind][layer - 1], chosen = head === "mean" ? heads : [heads[head - 1]];
  const names = kind === "encoder" ? data.source : data.read, columns = kind === "decoder" ? data.read : data.source;
  const rows = names.map((name, i) => ({
    name, writes: kind === "encoder" ? null : data.writes[i],
    weights: columns.map((_, j) => chosen.reduce((sum, weights) => sum + weights[i][j], 0) / chosen.length),
    masked: columns.map((_, j) => kind === "decoder" && j > i),
  }));
  return { rows, columns };
}

/** One sentence about a cell. */
function reading(map, row, column) {
  const { name, writes, weights, masked } = map.rows[row];
  const who = writes === null ? `${name} looks` : `To write ${writes} after ${name}, it looks`;
  return masked[column] ? `${who} not at ${map.columns[column]}, which is masked.`
    : `${who} at ${map.columns[column]} with weight ${two(weights[column])}.`;
}

/** The chosen cell, or where the first row looks most. */
function cell_of(map) {
  const row = state.row ?? 0;
  return [row, state.column ?? largest(map.rows[row].weights)];
}

function show() {
  const map = map_of(state.kind, state.layer, state.head), cell = cell_of(map);
  for (const name of ["kind", "layer", "head"]) $(name).value = state[name];
  $("map").setAttribute("aria-label", name_of(state, num_layers, num_heads));
  fill_map(map, state.kind, cell, cell[0], (row, column) => reading(map, row, column));
  fill_heads(num_layers, num_heads, (kind, layer, head) =>
    thumbnail_of(map_of(kind, layer, head), state, kind, layer, head));
}

function change(some) {
  Object.assign(state, some);
  show();
}

$("source").textContent = data.sentence;
$("translation").textContent = data.translation || "(nothing)";
$("facts").textContent = data.facts;
fill_pickers(num_layers, num_heads);
listen_to_map(() => {
  const map = map_of(state.kind, state.layer, state.head);
  return { map, cell: cell_of(map), say: (row, column) => reading(map, row, column) };
}, (row, column) => change({ row, column }));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { read_colours(); show(); });
read_colours();
show();
