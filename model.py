"""The encoder-decoder Transformer by hand (Vaswani et al. 2017, with pre-norm). Chapter sections 20.2-20.7.

Shape letters, used everywhere below:
    B        batch: how many sequences at once
    L        length of a sequence in tokens; Ls of the source, Lt of the target, Lq / Lk of queries / keys
    h        number of attention heads
    d_model  width of the vector that stands for one token
    d_k      width of one head, d_model / h
    dff      inner width of the feed-forward part

Masks are bool and True means MASKED: that key may not be seen. Nothing in this file uses `nn.Transformer` or
`nn.MultiheadAttention`; the tests compare against both.

Read down to the double line of `=`: that is the chapter. What stands below it makes the model faster or lets
it be varied. Four names from there are used above: `Dropout` (nn.Dropout, faster on the CPU), `KVCache` (None
in training), and `check_settings` and `apply_options` (variants of the model).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD_ID = 0  # fills short rows up to the longest; never attended to, never counted in the loss


# ---------------------------------------------------------------------------------------------- 20.2 input


def sinusoidal_position_encoding(max_len: int, d_model: int) -> Tensor:
    """Table of position vectors, [max_len, d_model], float32, every entry in [-1, 1].

        PE[pos, 2i]   = sin(pos / 10000^(2i / d_model))
        PE[pos, 2i+1] = cos(pos / 10000^(2i / d_model))

    An odd d_model ends on a sine column. Source: Vaswani et al. 2017, section 3.5.
    """
    position = torch.arange(max_len, dtype=torch.float32).unsqueeze(1)  # (max_len, 1)
    frequency = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    table = torch.zeros(max_len, d_model)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency[: d_model // 2])
    return table


class TokenAndPosition(nn.Module):
    """Token embedding times sqrt(d_model), plus position, then dropout: ids [B, L] -> [B, L, d_model].

    With a cache the ids are the newest ones, and stand behind those that the cache has seen.
    Raises ValueError when the last position exceeds max_len.
    """

    def __init__(self, vocab_size: int, d_model: int, max_len: int, dropout: float = 0.1):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, d_model, padding_idx=PAD_ID)
        # PyTorch's default initialisation, N(0, 1), times sqrt(128) = 11.3 would drown positions, which lie
        # in [-1, 1]. With this one the product has standard deviation 1: about as strong as a position.
        nn.init.normal_(self.emb.weight, std=d_model**-0.5)
        nn.init.zeros_(self.emb.weight[PAD_ID])
        # A buffer moves with .to(device) but is not trained. It can be recomputed, so it is not saved.
        self.register_buffer("pe", sinusoidal_position_encoding(max_len, d_model), persistent=False)
        self.scale = math.sqrt(d_model)
        self.drop = Dropout(dropout)

    def forward(self, ids: Tensor, cache: "KVCache | None" = None) -> Tensor:
        start = 0 if cache is None else cache.start
        length, max_len = start + ids.size(1), self.pe.size(0)
        if length > max_len:
            raise ValueError(f"sequence length {length} exceeds the model's max_len={max_len}")
        return self.drop(self.emb(ids) * self.scale + self.pe[start:length])


# ------------------------------------------------------------------------------------------ 20.3 attention


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, drop: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

    q [B, h, Lq, d_k], k and v [B, h, Lk, d_k], mask bool, broadcastable to [B, h, Lq, Lk], True = masked
    -> output [B, h, Lq, d_k], weights [B, h, Lq, Lk] as they are before dropout.

    A row with all keys masked gets uniform weights: finite, and meaningless.
    Source: Vaswani et al. 2017, equation 1.
    """
    # A sum of d_k products of independent numbers of mean 0 and variance 1 has variance d_k. Divided by
    # sqrt(d_k) it is 1 again: with larger scores the softmax would pick one key and pass almost no gradient
    # to the others.
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, h, Lq, Lk)
    if mask is not None:
        # The most negative number of this dtype: its weight is exactly 0. -1e9 does not fit fp16, and -inf
        # would turn a row with every key masked into NaN.
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return (weights if drop is None else drop(weights)) @ v, weights


class MultiHeadAttention(nn.Module):
    """h attentions side by side, each in its own d_k dimensions, joined by an output projection.

    q [B, Lq, d_model], k and v [B, Lk, d_model], attn_mask bool, broadcastable to [B, h, Lq, Lk],
    True = masked -> output [B, Lq, d_model], weights [B, h, Lq, Lk] as they are before dropout.
    `cache`: a `SelfAttentionCache` or a `CrossAttentionCache`; Lk then counts the keys it holds as well.
    Raises ValueError when num_heads does not divide d_model. Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1):
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"num_heads={num_heads}: must be at least 1 and divide d_model={d_model}")
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.drop = Dropout(dropout)
        self.attend = scaled_dot_product_attention  # an attribute, so that `apply_options` can replace it

    def _split(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        return x.view(B, L, self.num_heads, self.d_k).transpose(1, 2)  # (B, h, L, d_k)

    def _merge(self, x: Tensor) -> Tensor:
        B, _, L, _ = x.shape
        # After transpose the memory is no longer in order: view would refuse, reshape copies.
        return x.transpose(1, 2).reshape(B, L, self.num_heads * self.d_k)  # (B, L, d_model)

    def keys_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B, Lk, d_model] -> projected and split into heads, [B, h, Lk, d_k] each.

        Apart from `forward`, so that a cache can keep the result.
        """
        return self._split(self.W_k(k)), self._split(self.W_v(v))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, cache=None
    ) -> tuple[Tensor, Tensor]:
        Q = self._split(self.W_q(q))
        K, V = self.keys_values(k, v) if cache is None else cache.keys_values(self, k, v)
        context, weights = self.attend(Q, K, V, attn_mask, self.drop)
        return self.W_o(self._merge(context)), weights


# ---------------------------------------------------------------------------------------- 20.4 feed-forward


class FeedForward(nn.Module):
    """Linear -> GELU -> Linear -> Dropout, at every position alike: [B, L, d_model] -> [B, L, d_model]."""

    def __init__(self, d_model: int, dff: int, dropout: float = 0.1):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(d_model, dff), nn.GELU(), nn.Linear(dff, d_model), Dropout(dropout)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# --------------------------------------------------------------------------------------------- 20.5 encoder


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each as x + Sublayer(LN(x)): pre-norm.

    x [B, Ls, d_model], pad_mask [B, 1, 1, Ls] -> x [B, Ls, d_model], weights [B, h, Ls, Ls].
    Source: Xiong et al. 2020 (pre-norm).
    """

    def __init__(self, d_model: int, num_heads: int, dff: int, dropout: float = 0.1):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mha = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, dff, dropout)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, pad_mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.ln1(x)
        attended, weights = self.mha(y, y, y, attn_mask=pad_mask)
        x = x + self.drop(attended)
        x = x + self.ffn(self.ln2(x))  # the feed-forward part ends in a dropout of its own
        return x, weights


class Encoder(nn.Module):
    """Embedding, num_layers encoder layers, and a last LayerNorm.

    src [B, Ls], pad_mask [B, 1, 1, Ls] -> memory [B, Ls, d_model], weights: one [B, h, Ls, Ls] per layer.
    """

    def __init__(
        self, vocab_size: int, d_model: int, num_heads: int, dff: int, num_layers: int, max_len: int,
        dropout: float = 0.1,
    ):  # fmt: skip
        super().__init__()
        self.embed = TokenAndPosition(vocab_size, d_model, max_len, dropout)
        # In a plain list the layers would be neither trained nor moved to the GPU.
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, num_heads, dff, dropout) for _ in range(num_layers)
        )  # fmt: skip
        # Each layer only adds to x and never normalises it: by now x has grown with every layer.
        self.ln_final = nn.LayerNorm(d_model)

    def forward(self, src: Tensor, pad_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, all_weights = self.embed(src), []
        for layer in self.layers:
            x, weights = layer(x, pad_mask)
            all_weights.append(weights)
        return self.ln_final(x), all_weights


# --------------------------------------------------------------------------------------------- 20.6 decoder


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention into the memory, feed-forward, each as x + Sublayer(LN(x)).

    x [B, Lt, d_model], memory [B, Ls, d_model], self_mask [B, 1, Lt, Lt], cross_mask [B, 1, 1, Ls]
    -> x [B, Lt, d_model], self weights [B, h, Lt, Lt], cross weights [B, h, Lt, Ls].
    `cache`: this layer's pair in `KVCache.layers`. Lt then counts the new tokens only, and self-attention
    looks at all Lk so far: self_mask [B, 1, Lt or 1, Lk], self weights [B, h, Lt, Lk].
    """

    def __init__(self, d_model: int, num_heads: int, dff: int, dropout: float = 0.1):
        super().__init__()
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.self_mha = MultiHeadAttention(d_model, num_heads, dropout)
        self.cross_mha = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, dff, dropout)
        self.drop = Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Tensor, self_mask: Tensor, cross_mask: Tensor, cache=(None, None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = self.ln1(x)
        attended, self_weights = self.self_mha(y, y, y, attn_mask=self_mask, cache=cache[0])
        x = x + self.drop(attended)
        # The target asks, the source answers. The memory has left its stack through ln_final, normalised.
        y = self.ln2(x)
        attended, cross_weights = self.cross_mha(y, memory, memory, attn_mask=cross_mask, cache=cache[1])
        x = x + self.drop(attended)
        x = x + self.ffn(self.ln3(x))
        return x, self_weights, cross_weights


class Decoder(nn.Module):
    """Embedding, num_layers decoder layers, and a last LayerNorm, as in the encoder.

    tgt_in [B, Lt], memory [B, Ls, d_model], self_mask [B, 1, Lt, Lt], cross_mask [B, 1, 1, Ls]
    -> x [B, Lt, d_model], self weights and cross weights: a [B, h, Lt, Lt] and a [B, h, Lt, Ls] per layer.
    With a `cache`, a `KVCache`: the shapes are those of `DecoderLayer` with one.
    """

    def __init__(
        self, vocab_size: int, d_model: int, num_heads: int, dff: int, num_layers: int, max_len: int,
        dropout: float = 0.1,
    ):  # fmt: skip
        super().__init__()
        self.embed = TokenAndPosition(vocab_size, d_model, max_len, dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(d_model, num_heads, dff, dropout) for _ in range(num_layers)
        )  # fmt: skip
        self.ln_final = nn.LayerNorm(d_model)

    def forward(
        self, tgt_in: Tensor, memory: Tensor, self_mask: Tensor, cross_mask: Tensor, cache=None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x, all_self, all_cross = self.embed(tgt_in, cache), [], []
        caches = [(None, None)] * len(self.layers) if cache is None else cache.layers
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            x, self_weights, cross_weights = layer(x, memory, self_mask, cross_mask, layer_cache)
            all_self.append(self_weights)
            all_cross.append(cross_weights)
        return self.ln_final(x), all_self, all_cross


# ------------------------------------------------------------------------------------- 20.7 masks and model


def make_padding_mask(ids: Tensor) -> Tensor:
    """ids [B, L] -> bool [B, 1, 1, L], True at PAD: no query may look at that key."""
    return (ids == PAD_ID)[:, None, None, :]


def make_causal_mask(L: int, device: torch.device | str) -> Tensor:
    """bool [1, 1, L, L] on `device`, True above the diagonal: position i sees 0..i, never the future."""
    return torch.ones(L, L, dtype=torch.bool, device=device).triu(diagonal=1)[None, None]


class Transformer(nn.Module):
    """The whole model: `encode` once, `decode` as often as you like, `forward` for training.

    `settings` holds the constructor's arguments as a plain dict; `Transformer(**settings)` rebuilds it.
    `options`: see `check_settings`, which also says what raises ValueError. Source: Vaswani et al. 2017.
    """

    def __init__(
        self, src_vocab: int, tgt_vocab: int, d_model: int = 128, num_heads: int = 4, dff: int = 512,
        num_layers: int = 2, max_len: int = 64, dropout: float = 0.1, **options,
    ):  # fmt: skip
        super().__init__()
        self.settings = check_settings(
            src_vocab, tgt_vocab, d_model, num_heads, dff, num_layers, max_len, dropout, **options
        )
        self.encoder = Encoder(src_vocab, d_model, num_heads, dff, num_layers, max_len, dropout)
        self.decoder = Decoder(tgt_vocab, d_model, num_heads, dff, num_layers, max_len, dropout)
        self.out_proj = nn.Linear(d_model, tgt_vocab)
        # Xavier keeps the variance about the same from layer to layer, forwards and backwards. PyTorch's
        # default gives weights a third of that variance (where inputs and outputs are equally many).
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        apply_options(self)

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, Ls] -> memory [B, Ls, d_model], src_mask [B, 1, 1, Ls]. ValueError when Ls > max_len."""
        src_mask = make_padding_mask(src)
        memory, _ = self.encoder(src, src_mask)
        return memory, src_mask

    def decode(
        self, tgt_in: Tensor, memory: Tensor, src_mask: Tensor, cache: "KVCache | None" = None
    ) -> tuple[Tensor, list[Tensor]]:
        """tgt_in [B, Lt] and what `encode` returned -> logits [B, Lt, tgt_vocab], cross weights.

        The logits at position t score the token that follows tgt_in[:, t]. The weights are a list, one
        [B, h, Lt, Ls] per layer. ValueError when Lt > max_len.

        To decode step by step, give the same `KVCache` each time, and as tgt_in only the new tokens.
        """
        if cache is None:  # a target position sees neither the future nor padding
            self_mask = make_padding_mask(tgt_in) | make_causal_mask(tgt_in.size(1), tgt_in.device)
        else:
            self_mask = cache.append(tgt_in)
        # Cross-attention looks at the source, which has no future, only padding.
        x, _, cross_weights = self.decoder(tgt_in, memory, self_mask, src_mask, cache)
        return self.out_proj(x), cross_weights

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """src [B, Ls], tgt_in [B, Lt] -> logits [B, Lt, tgt_vocab]."""
        memory, src_mask = self.encode(src)
        logits, _ = self.decode(tgt_in, memory, src_mask)
        return logits


# =========================================================================================================
# Beyond the chapter. Nothing below changes what the model above computes, unless an option asks for it.
# =========================================================================================================

# -------------------------------------------------------------------------- the KV cache: decoding in steps


class SelfAttentionCache:
    """Keys and values of all tokens so far; each call puts the new tokens' behind them."""

    def __init__(self):
        self.kept, self.length = None, 0  # keys and values [B, h, room, d_k], of which `length` are filled

    def keys_values(self, attention: MultiHeadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B, L, d_model], the new tokens -> keys and values of all tokens, [B, h, Lk, d_k] each."""
        new, start = attention.keys_values(k, v), self.length
        self.length += k.size(1)
        if self.kept is None:
            self.kept = new
            return new
        if self.length > self.kept[0].size(2):  # double the room, so that not every step copies everything
            self.kept = [
                torch.cat([old[:, :, :start], old.new_empty(*old.shape[:2], self.length, old.size(3))], dim=2)
                for old in self.kept
            ]
        for kept, part in zip(self.kept, new, strict=True):
            kept[:, :, start : self.length] = part
        return tuple(kept[:, :, : self.length] for kept in self.kept)


class CrossAttentionCache:
    """The memory's keys and values: it stays the same, so they are projected once."""

    def __init__(self):
        self.kept = None

    def keys_values(self, attention: MultiHeadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [B, Ls, d_model], looked at in the first call only -> [B, h, Ls, d_k] each."""
        if self.kept is None:
            self.kept = attention.keys_values(k, v)
        return self.kept


class KVCache:
    """What decoding keeps from step to step, so that each step computes the newest tokens only.

        cache = KVCache(num_layers)
        logits, _ = model.decode(newest_ids, memory, src_mask, cache)  # as often as needed

    ids: all tokens so far, [B, L]; start: how many of them came before the latest call.
    """

    def __init__(self, num_layers: int):
        self.ids, self.start = None, 0
        self.layers = [(SelfAttentionCache(), CrossAttentionCache()) for _ in range(num_layers)]

    def append(self, new_ids: Tensor) -> Tensor:
        """Take in the new tokens [B, L] -> their rows of the self-attention mask, [B, 1, L or 1, Lk]."""
        self.start = 0 if self.ids is None else self.ids.size(1)
        self.ids = new_ids if self.ids is None else torch.cat([self.ids, new_ids], dim=1)
        padding = make_padding_mask(self.ids)
        if new_ids.size(1) == 1:
            return padding  # the last position has no future to hide
        return padding | make_causal_mask(self.ids.size(1), self.ids.device)[:, :, self.start :]

    def select(self, rows: Tensor) -> None:
        """Choose and reorder the sequences: rows [n] -> everything kept has batch size n. For beam search."""
        self.ids = self.ids.index_select(0, rows)
        for pair in self.layers:
            for cache in pair:
                cache.kept = [kept.index_select(0, rows) for kept in cache.kept]


# ----------------------------------------------------------------------------- speed: the same, but cheaper


class Dropout(nn.Dropout):
    """`nn.Dropout` with cheaper random numbers on the CPU: a training step takes about a tenth less time.

    One draw of 64 bits decides four entries, by 16 bits each, so p is met to within 2^-17. Other devices use
    nn.Dropout's own kernel. x of any shape -> the same shape and dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return super().forward(x)
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        values = draws.view(torch.int16)[: x.numel()].view(x.shape)
        keep = values >= round(self.p * 2**16) - 2**15
        return x * (keep.to(x.dtype) / (1 - self.p))


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, drop: nn.Dropout | None = None
) -> tuple[Tensor, None]:
    """`scaled_dot_product_attention` by PyTorch's fused kernel, which has no weights to return.

    A row with all keys masked comes out as 0. TypeError when the mask is not bool; ValueError when k and v
    differ in length: the kernel would not notice. Source: Dao et al. 2022 (FlashAttention).
    """
    keep = None if mask is None else ~mask  # SDPA's bool masks have the opposite sense: True = may be seen
    return sdpa_attention(q, k, v, keep, drop)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, drop: nn.Dropout | None):
    """`fused_attention` whose mask is already as SDPA takes it."""
    if k.size(-2) != v.size(-2):
        raise ValueError(f"{k.size(-2)} keys and {v.size(-2)} values: must be equally many")
    dropout = drop.p if drop is not None and drop.training else 0.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout), None


def layer_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, drop: nn.Dropout | None = None
) -> tuple[Tensor, None]:
    """`fused_attention` in a layer, whose mask may also be what `additive_mask` made of it."""
    added = mask is not None and mask.is_floating_point()
    return (sdpa_attention if added else fused_attention)(q, k, v, mask, drop)


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """bool mask, True = masked -> what SDPA adds to the scores: -inf there and 0 elsewhere.

    It would make this of a bool mask itself, in every layer anew. dtype: of the weights; under autocast its.
    """
    device = mask.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


class FusedEncoder(Encoder):
    """`Encoder` whose layers all use `layer_attention`: the mask is converted once."""

    def forward(self, src: Tensor, pad_mask: Tensor) -> tuple[Tensor, list]:
        return super().forward(src, additive_mask(pad_mask, self.embed.emb.weight.dtype))


class FusedDecoder(Decoder):
    """`Decoder` whose layers all use `layer_attention`: the masks are converted once."""

    def forward(
        self, tgt_in: Tensor, memory: Tensor, self_mask: Tensor, cross_mask: Tensor, cache=None
    ) -> tuple[Tensor, list, list]:
        masks = (additive_mask(mask, self.embed.emb.weight.dtype) for mask in (self_mask, cross_mask))
        return super().forward(tgt_in, memory, *masks, cache)


# --------------------------------------------------------------------------- options: variants of the model


class PostNormEncoderLayer(EncoderLayer):
    """LN(x + Sublayer(x)), as in the paper of 2017; arguments and results as in `EncoderLayer`."""

    def forward(self, x: Tensor, pad_mask: Tensor) -> tuple[Tensor, Tensor]:
        attended, weights = self.mha(x, x, x, attn_mask=pad_mask)
        x = self.ln1(x + self.drop(attended))
        x = self.ln2(x + self.ffn(x))
        return x, weights


class PostNormDecoderLayer(DecoderLayer):
    """LN(x + Sublayer(x)), as in the paper of 2017; arguments and results as in `DecoderLayer`."""

    def forward(
        self, x: Tensor, memory: Tensor, self_mask: Tensor, cross_mask: Tensor, cache=(None, None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, self_weights = self.self_mha(x, x, x, attn_mask=self_mask, cache=cache[0])
        x = self.ln1(x + self.drop(attended))
        attended, cross_weights = self.cross_mha(x, memory, memory, attn_mask=cross_mask, cache=cache[1])
        x = self.ln2(x + self.drop(attended))
        x = self.ln3(x + self.ffn(x))
        return x, self_weights, cross_weights


ATTENTION = {"manual": scaled_dot_product_attention, "sdpa": layer_attention}
ACTIVATION = {"gelu": nn.GELU, "relu": nn.ReLU}


def check_settings(
    src_vocab: int, tgt_vocab: int, d_model: int, num_heads: int, dff: int, num_layers: int, max_len: int,
    dropout: float, attention: str = "manual", norm_first: bool = True, activation: str = "gelu",
    share_embeddings: bool = False, tie_output: bool = False,
) -> dict:  # fmt: skip
    """A Transformer's arguments and options -> all of them as a plain dict.

    attention      "manual": by hand; "sdpa": PyTorch's fused kernel, same output
    norm_first     True: pre-norm; False: post-norm
    activation     of the feed-forward part, "gelu" or "relu"
    share_embeddings  one matrix for source, target and output (Press & Wolf 2017). Its PAD row is then
                   trained, as an output that is never right
    tie_output     the same for target and output alone; the source keeps a matrix of its own

    ValueError, naming the argument, for a size below 1, a dropout outside [0, 1), heads that do not divide
    d_model, an unknown attention or activation, a norm_first, share_embeddings or tie_output that is no
    bool, or shared embeddings of two vocabulary sizes.
    """
    sizes = dict(src_vocab=src_vocab, tgt_vocab=tgt_vocab, d_model=d_model, num_heads=num_heads, dff=dff,
                 num_layers=num_layers, max_len=max_len)  # fmt: skip
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout!r}: must be at least 0 and below 1")
    for name, value, legal in (("attention", attention, ATTENTION), ("activation", activation, ACTIVATION)):
        if value not in legal:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(legal)}")
    switches = dict(share_embeddings=share_embeddings, tie_output=tie_output, norm_first=norm_first)
    for name, value in switches.items():
        if not isinstance(value, bool):  # "post" would count as True
            raise ValueError(f"{name}={value!r}: must be True or False")
    if share_embeddings and src_vocab != tgt_vocab:
        raise ValueError(f"share_embeddings: src_vocab={src_vocab} and tgt_vocab={tgt_vocab} must be equal")
    return sizes | dict(dropout=dropout, attention=attention) | switches | dict(activation=activation)


def apply_options(model: Transformer) -> None:
    """Make the finished model what its `settings` ask for. The parameters keep their names and values."""
    settings = model.settings
    if settings["attention"] == "sdpa":
        model.encoder.__class__, model.decoder.__class__ = FusedEncoder, FusedDecoder
        # SDPA prefers cuDNN's kernel on an H100. It plans anew for every shape, half a second for each, and
        # with some masks its gradients are NaN (pytorch#196678). The switch is the whole process's.
        torch.backends.cuda.enable_cudnn_sdp(False)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = ATTENTION[settings["attention"]]
        elif isinstance(module, FeedForward):
            module.net[1] = ACTIVATION[settings["activation"]]()
        elif isinstance(module, TokenAndPosition) and module.pe.is_meta:
            module.register_load_state_dict_post_hook(compute_table)
    if not settings["norm_first"]:
        for stack, kind in ((model.encoder, PostNormEncoderLayer), (model.decoder, PostNormDecoderLayer)):
            for layer in stack.layers:
                layer.__class__ = kind  # the same parts, called in another order
            stack.ln_final = nn.Identity()  # each layer ends in a norm of its own
    if settings["share_embeddings"]:
        model.decoder.embed.emb.weight = model.encoder.embed.emb.weight
    if settings["share_embeddings"] or settings["tie_output"]:  # Xavier, applied above, cannot overwrite it
        model.out_proj.weight = model.decoder.embed.emb.weight
        # With one matrix the logit of the token just read starts too high: its own vector is still in x.
        # Half the gain of the last norm keeps the first loss near log(tgt_vocab).
        last = model.decoder.ln_final if settings["norm_first"] else model.decoder.layers[-1].ln3
        nn.init.constant_(last.weight, 0.5)


def compute_table(embed: TokenAndPosition, _) -> None:
    """For a model built on the `meta` device, without memory: its weights are loaded, this table is not."""
    embed.pe = sinusoidal_position_encoding(*embed.pe.shape).to(embed.emb.weight.device)


def attention_weights(model: Transformer, src: Tensor, tgt_in: Tensor) -> dict[str, list[Tensor]]:
    """src [B, Ls], tgt_in [B, Lt] -> the weights of all three kinds of attention, for drawing.

    Each is a list over the layers: "encoder" [B, h, Ls, Ls], "decoder" [B, h, Lt, Lt], "cross"
    [B, h, Lt, Ls]. Call it in eval() mode.
    """
    before = {m: m.attend for m in model.modules() if getattr(m, "attend", None) in ATTENTION.values()}
    src_mask = make_padding_mask(src)
    self_mask = make_padding_mask(tgt_in) | make_causal_mask(tgt_in.size(1), tgt_in.device)
    try:
        for module in before:  # a fused kernel has no weights to show
            module.attend = scaled_dot_product_attention
        # Not model.encoder(...): where that is a `FusedEncoder`, it would convert the masks.
        memory, encoder_weights = Encoder.forward(model.encoder, src, src_mask)
        _, self_weights, cross_weights = Decoder.forward(model.decoder, tgt_in, memory, self_mask, src_mask)
    finally:
        for module, attend in before.items():
            module.attend = attend
    return {"encoder": encoder_weights, "decoder": self_weights, "cross": cross_weights}
