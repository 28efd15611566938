"use strict";
/* The Transformer of model.py in plain JavaScript: the same parts under the same names, in the same order.

It reads one string at a time, so there is no B in the shapes, and no dropout, as nothing is trained here. A
matrix [L, d] is an array of L rows, each a Float32Array of d numbers. All other letters are model.py's: L
length (Ls source, Lt target, Lq / Lk queries / keys), h heads, d_model, d_k, dff. Masks are bool and true
means MASKED. Attention returns what it computed on the way, so that the page can show it.

`tensors` holds the trained weights under the names that PyTorch gives them: "encoder.layers.0.mha.W_q.weight". */

const PAD_ID = 0, BOS_ID = 1, EOS_ID = 2;

// ------------------------------------------------------------------- what PyTorch has and JavaScript has not

/** a, b: two rows of n numbers, n even -> their dot product. */
function dot(a, b) {
  let even = 0, odd = 0; // two sums at once: no addition has to wait for the one before it
  for (let k = 1; k < a.length; k += 2) {
    even += a[k - 1] * b[k - 1];
    odd += a[k] * b[k];
  }
  return even + odd;
}

/** a, b [L, d] -> a + b [L, d]. */
const add = (a, b) => a.map((row, i) => row.map((value, k) => value + b[i][k]));

/** A row of numbers -> the same row as weights that sum to 1. */
function softmax(row) {
  const largest = Math.max(...row);
  const exponentials = row.map(value => Math.exp(value - largest));
  const sum = exponentials.reduce((a, b) => a + b, 0);
  return exponentials.map(value => value / sum);
}

/** The error function, to within 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26). */
function erf(x) {
  const t = 1 / (1 + 0.3275911 * Math.abs(x));
  const series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t;
  return Math.sign(x) * (1 - series * Math.exp(-x * x));
}

const gelu = x => 0.5 * x * (1 + erf(x / Math.SQRT2));

class Linear {
  constructor(tensors, name) {
    this.weight = tensors[`${name}.weight`];
    this.bias = tensors[`${name}.bias`];
  }

  /** x [L, inputs] -> [L, outputs]. */
  forward(x) {
    return x.map(row => this.bias.map((bias, j) => dot(this.weight[j], row) + bias));
  }
}

class LayerNorm {
  constructor(tensors, name) {
    this.weight = tensors[`${name}.weight`];
    this.bias = tensors[`${name}.bias`];
  }

  /** x [L, d_model] -> every row with mean 0 and variance 1, then times weight, plus bias. */
  forward(x) {
    return x.map(row => {
      const mean = row.reduce((a, b) => a + b, 0) / row.length;
      const variance = row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / row.length;
      const deviation = Math.sqrt(variance + 1e-5);
      return row.map((value, k) => (value - mean) / deviation * this.weight[k] + this.bias[k]);
    });
  }
}

// ------------------------------------------------------------------------------------------------ 20.2 input

/** PE[pos, 2i] = sin(pos / 10000^(2i / d_model)), PE[pos, 2i+1] = cos of the same -> [max_len, d_model]. */
function sinusoidal_position_encoding(max_len, d_model) {
  return Array.from({ length: max_len }, (_, pos) => Float32Array.from({ length: d_model }, (_, k) => {
    const angle = pos * Math.exp((k - k % 2) * -Math.log(10000) / d_model);
    return k % 2 ? Math.cos(angle) : Math.sin(angle);
  }));
}

class TokenAndPosition {
  constructor(tensors, name, d_model, max_len) {
    this.emb = tensors[`${name}.emb.weight`];
    this.pe = sinusoidal_position_encoding(max_len, d_model);
    this.scale = Math.sqrt(d_model);
  }

  /** ids [L] -> [L, d_model]. */
  forward(ids) {
    return ids.map((id, pos) => this.emb[id].map((value, k) => value * this.scale + this.pe[pos][k]));
  }
}

// -------------------------------------------------------------------------------------------- 20.3 attention

const LOWEST = -3.4028234663852886e38; // the most negative number in 32 bits: its weight is exactly 0

/** Attention(Q, K, V) = softmax(Q K^T / scale) V, for one head.

q [Lq, d_k], k and v [Lk, d_k], mask [Lq, Lk], or [1, Lk] for all queries alike
-> output [Lq, d_k], weights [Lq, Lk], and scores [Lq, Lk] as they were before the mask. */
function scaled_dot_product_attention(q, k, v, mask, scale = Math.sqrt(q[0].length)) {
  const scores = q.map(query => Float32Array.from(k, key => dot(query, key) / scale));
  const masked = scores.map((row, i) => row.map((score, j) => mask[i % mask.length][j] ? LOWEST : score));
  const weights = masked.map(softmax);
  const output = weights.map(row => v[0].map((_, d) => row.reduce((sum, weight, j) => sum + weight * v[j][d], 0)));
  return { output, weights, scores };
}

class MultiHeadAttention {
  constructor(tensors, name, d_model, num_heads) {
    this.num_heads = num_heads;
    this.d_k = d_model / num_heads;
    for (const part of ["W_q", "W_k", "W_v", "W_o"]) this[part] = new Linear(tensors, `${name}.${part}`);
    this.attend = scaled_dot_product_attention; // an attribute, so that `apply_faults` can replace it
  }

  /** x [L, d_model] -> for each head [L, d_k]: its own d_k of the d_model numbers. */
  split(x) {
    return Array.from({ length: this.num_heads }, (_, head) =>
      x.map(row => row.subarray(head * this.d_k, (head + 1) * this.d_k)));
  }

  /** For each head [L, d_k] -> [L, d_model]. */
  merge(heads) {
    return heads[0].map((_, i) => Float32Array.from(heads.flatMap(head => [...head[i]])));
  }

  /** q [Lq, d_model], k and v [Lk, d_model] -> output [Lq, d_model], and for each head all that it computed. */
  forward(q, k, v, attn_mask) {
    const Q = this.split(this.W_q.forward(q));
    const K = this.split(this.W_k.forward(k));
    const V = this.split(this.W_v.forward(v));
    const heads = Q.map((_, head) => {
      const result = this.attend(Q[head], K[head], V[head], attn_mask, head);
      return { q: Q[head], k: K[head], v: V[head], mask: attn_mask, ...result };
    });
    return [this.W_o.forward(this.merge(heads.map(head => head.output))), heads];
  }
}

// ----------------------------------------------------------------------------------------- 20.4 feed-forward

class FeedForward {
  constructor(tensors, name) {
    this.first = new Linear(tensors, `${name}.net.0`);
    this.last = new Linear(tensors, `${name}.net.2`);
  }

  /** Linear -> GELU -> Linear, at every position alike: [L, d_model] -> [L, d_model]. */
  forward(x) {
    return this.last.forward(this.first.forward(x).map(row => row.map(gelu)));
  }
}

// ---------------------------------------------------------------------------------------------- 20.5 encoder

class EncoderLayer {
  constructor(tensors, name, d_model, num_heads) {
    this.ln1 = new LayerNorm(tensors, `${name}.ln1`);
    this.ln2 = new LayerNorm(tensors, `${name}.ln2`);
    this.mha = new MultiHeadAttention(tensors, `${name}.mha`, d_model, num_heads);
    this.ffn = new FeedForward(tensors, `${name}.ffn`);
  }

  /** Self-attention, then feed-forward, each as x + Sublayer(LN(x)): pre-norm. */
  forward(x, pad_mask) {
    const y = this.ln1.forward(x);
    const [attended, heads] = this.mha.forward(y, y, y, pad_mask);
    x = add(x, attended);
    x = add(x, this.ffn.forward(this.ln2.forward(x)));
    return [x, heads];
  }
}

class Encoder {
  constructor(tensors, { d_model, num_heads, num_layers, max_len }) {
    this.embed = new TokenAndPosition(tensors, "encoder.embed", d_model, max_len);
    this.layers = Array.from({ length: num_layers }, (_, i) =>
      new EncoderLayer(tensors, `encoder.layers.${i}`, d_model, num_heads));
    this.ln_final = new LayerNorm(tensors, "encoder.ln_final");
  }

  /** src [Ls], pad_mask [1, Ls] -> memory [Ls, d_model], and the heads of each layer. */
  forward(src, pad_mask) {
    let x = this.embed.forward(src), heads;
    const all_heads = [];
    for (const layer of this.layers) {
      [x, heads] = layer.forward(x, pad_mask);
      all_heads.push(heads);
    }
    return [this.ln_final.forward(x), all_heads];
  }
}

// ---------------------------------------------------------------------------------------------- 20.6 decoder

class DecoderLayer {
  constructor(tensors, name, d_model, num_heads) {
    for (const ln of ["ln1", "ln2", "ln3"]) this[ln] = new LayerNorm(tensors, `${name}.${ln}`);
    this.self_mha = new MultiHeadAttention(tensors, `${name}.self_mha`, d_model, num_heads);
    this.cross_mha = new MultiHeadAttention(tensors, `${name}.cross_mha`, d_model, num_heads);
    this.ffn = new FeedForward(tensors, `${name}.ffn`);
  }

  /** Self-attention, cross-attention, feed-forward. In the second the target asks and the source answers. */
  forward(x, memory, self_mask, cross_mask) {
    let y = this.ln1.forward(x);
    const [attended, self_heads] = this.self_mha.forward(y, y, y, self_mask);
    x = add(x, attended);
    y = this.ln2.forward(x);
    const [answer, cross_heads] = this.cross_mha.forward(y, memory, memory, cross_mask);
    x = add(x, answer);
    x = add(x, this.ffn.forward(this.ln3.forward(x)));
    return [x, self_heads, cross_heads];
  }
}

class Decoder {
  constructor(tensors, { d_model, num_heads, num_layers, max_len }) {
    this.embed = new TokenAndPosition(tensors, "decoder.embed", d_model, max_len);
    this.layers = Array.from({ length: num_layers }, (_, i) =>
      new DecoderLayer(tensors, `decoder.layers.${i}`, d_model, num_heads));
    this.ln_final = new LayerNorm(tensors, "decoder.ln_final");
  }

  /** tgt_in [Lt], memory [Ls, d_model] and masks -> x [Lt, d_model], and of each layer both kinds of heads. */
  forward(tgt_in, memory, self_mask, cross_mask) {
    let x = this.embed.forward(tgt_in), self_heads, cross_heads;
    const all_self = [], all_cross = [];
    for (const layer of this.layers) {
      [x, self_heads, cross_heads] = layer.forward(x, memory, self_mask, cross_mask);
      all_self.push(self_heads);
      all_cross.push(cross_heads);
    }
    return [this.ln_final.forward(x), all_self, all_cross];
  }
}

// ------------------------------------------------------------------------------------- 20.7 masks and model

/** ids [L] -> [1, L], true at PAD: no query may look at that key. */
const make_padding_mask = ids => [ids.map(id => id === PAD_ID)];

/** [L, L], true above the diagonal: position i sees 0..i, never the future. */
const make_causal_mask = L => Array.from({ length: L }, (_, i) => Array.from({ length: L }, (_, j) => j > i));

class Transformer {
  constructor(settings, tensors) {
    this.settings = settings;
    this.encoder = new Encoder(tensors, settings);
    this.decoder = new Decoder(tensors, settings);
    this.out_proj = new Linear(tensors, "out_proj");
    this.make_padding_mask = make_padding_mask; // attributes, as `attend` is one
    this.make_causal_mask = make_causal_mask;
  }

  /** src [Ls] -> memory [Ls, d_model], src_mask [1, Ls], and the heads of each layer. */
  encode(src) {
    const src_mask = this.make_padding_mask(src);
    const [memory, heads] = this.encoder.forward(src, src_mask);
    return [memory, src_mask, heads];
  }

  /** tgt_in [Lt] and what `encode` returned -> logits [Lt, tgt_vocab], and of each layer both kinds of heads.

  The logits at position t score the token that follows tgt_in[t]. */
  decode(tgt_in, memory, src_mask) {
    const [padding] = this.make_padding_mask(tgt_in);
    const causal = this.make_causal_mask(tgt_in.length);
    const self_mask = causal.map(row => row.map((future, j) => future || padding[j]));
    const [x, self_heads, cross_heads] = this.decoder.forward(tgt_in, memory, self_mask, src_mask);
    return [this.out_proj.forward(x), self_heads, cross_heads];
  }
}

// ------------------------------------------------------------------------------------------ 20.11 inference

/** The ids with PAD behind them, `length` in all. */
const pad = (ids, length) => [...ids, ...Array(length - ids.length).fill(PAD_ID)];

/** Free-running decoding: src [Ls] without padding -> the encoder's heads, and every step of the answer.

A step has what the decoder read, tgt_in [max_len - 1]; how many of them are no padding, `read`; the logits of
all positions; the likeliest next token, `next`; and the heads of each layer. Each step computes all positions
again: with a KV cache no position would ever see a later one, and the causal mask would have nothing to do. */
function greedy_decode(model, src) {
  const { max_len } = model.settings;
  const source = pad(src, max_len);
  const [memory, src_mask, encoder] = model.encode(source);
  const ids = [BOS_ID], steps = [];
  while (ids.length < max_len && ids[ids.length - 1] !== EOS_ID) {
    const tgt_in = pad(ids, max_len - 1);
    const [logits, decoder, cross] = model.decode(tgt_in, memory, src_mask);
    const last = logits[ids.length - 1].slice();
    last[PAD_ID] = last[BOS_ID] = -Infinity; // never a target
    const next = last.indexOf(Math.max(...last));
    steps.push({ tgt_in, read: ids.length, logits, probabilities: softmax(last), next, decoder, cross });
    ids.push(next);
  }
  return { source, encoder, ids, steps };
}

// =========================================================================================================
// Beyond model.py: what the page's switches break on purpose, and how the weights get in.
// =========================================================================================================

/** Make a model faulty. `faults`: a Set of "causal", "padding" (no such mask), "positions" (none), "scale" (no
division by sqrt(d_k)). `off`: a Set of heads whose output becomes 0, such as "cross.2.1": kind, layer, head. */
function apply_faults(model, faults, off = new Set()) {
  if (faults.has("causal")) model.make_causal_mask = L => make_causal_mask(L).map(row => row.map(() => false));
  if (faults.has("padding")) model.make_padding_mask = ids => [ids.map(() => false)];
  for (const embed of [model.encoder.embed, model.decoder.embed])
    if (faults.has("positions")) embed.pe = embed.pe.map(row => row.map(() => 0));
  const parts = { encoder: ["encoder", "mha"], decoder: ["decoder", "self_mha"], cross: ["decoder", "cross_mha"] };
  for (const [kind, [stack, part]] of Object.entries(parts))
    model[stack].layers.forEach((layer, number) => {
      layer[part].attend = (q, k, v, mask, head) => {
        const result = scaled_dot_product_attention(q, k, v, mask, faults.has("scale") ? 1 : undefined);
        if (off.has(`${kind}.${number + 1}.${head + 1}`))
          result.output = result.output.map(row => row.map(() => 0));
        return result;
      };
    });
  return model;
}

const POWERS = Array.from({ length: 31 }, (_, exponent) => 2 ** (Math.max(exponent, 1) - 25));

/** The 16 bits of a finite fp16 number -> its value. */
function half(bits) {
  const exponent = bits >> 10 & 31, fraction = bits & 1023;
  return (bits & 0x8000 ? -1 : 1) * POWERS[exponent] * (exponent ? 1024 + fraction : fraction);
}

/** base64 of all tensors in fp16, little-endian, one after the other; shapes: name -> shape -> name -> rows. */
function read_tensors(base64, shapes) {
  const text = atob(base64), tensors = {};
  let place = 0;
  const row_of = length => Float32Array.from({ length }, () => {
    place += 2;
    return half(text.charCodeAt(place - 2) | text.charCodeAt(place - 1) << 8);
  });
  for (const [name, [rows, columns]] of Object.entries(shapes))
    tensors[name] = columns ? Array.from({ length: rows }, () => row_of(columns)) : row_of(rows);
  return tensors;
}
