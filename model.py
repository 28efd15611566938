"""The encoder-decoder Transformer by hand (Vaswani et al. 2017, pre-norm). Chapter sections 20.2-20.7.

Shape letters, used everywhere below:
    B        batch: how many sequences at once
    L        length of a sequence in tokens; Ls of the source, Lt of the target, Lq / Lk of queries / keys
    h        number of attention heads
    d_model  width of the vector that stands for one token
    d_k      width of one head, d_model / h
    dff      inner width of the feed-forward part

Masks are bool and True means MASKED: that key may not be seen. Nothing in this file uses `nn.Transformer` or
`nn.MultiheadAttention`; the tests compare against both.
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


class Dropout(nn.Dropout):
    """`nn.Dropout` with cheaper random numbers on the CPU, where a training step gains a tenth by it.

    One draw of 64 bits decides four entries, by 16 bits each, so p is met to within 2^-17. Other devices have
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


class TokenAndPosition(nn.Module):
    """Token embedding times sqrt(d_model), plus position, then dropout.

    Embeddings start with standard deviation d_model^-0.5, so that after the factor sqrt(d_model) a token has
    about its position's size. PyTorch's own N(0, 1) would drown the positions. PAD's row is zero.

    ids [B, L], integers -> [B, L, d_model]. The first id stands at position `start`: 0, unless earlier calls
    had the ids before it. Raises ValueError when start + L > max_len.
    """

    def __init__(self, vocab_size: int, d_model: int, max_len: int, dropout: float = 0.1):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=PAD_ID)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        nn.init.zeros_(self.embedding.weight[PAD_ID])
        # A buffer moves with .to(device) but is not trained; it can be recomputed, so no checkpoint needs it.
        self.register_buffer("position", sinusoidal_position_encoding(max_len, d_model), persistent=False)
        self.scale = math.sqrt(d_model)
        self.drop = Dropout(dropout)

    def forward(self, ids: Tensor, start: int = 0) -> Tensor:
        length, max_len = start + ids.size(1), self.position.size(0)
        if length > max_len:
            raise ValueError(f"sequence length {length} exceeds the model's max_len={max_len}")
        return self.drop(self.embedding(ids) * self.scale + self.position[start:length])


# ------------------------------------------------------------------------------------------ 20.3 attention


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, drop: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

    q [B, h, Lq, d_k], k and v [B, h, Lk, d_k], mask bool, broadcastable to [B, h, Lq, Lk], True = masked
    -> output [B, h, Lq, d_k], weights [B, h, Lq, Lk] as they are before dropout.

    A masked score becomes the most negative number of its dtype, so its weight is exactly 0. A row with all
    keys masked gets uniform weights: finite, and meaningless. Source: Vaswani et al. 2017, equation 1.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))  # (B, h, Lq, Lk)
    if mask is not None:
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1)
    return (weights if drop is None else drop(weights)) @ v, weights


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, drop: nn.Dropout | None = None
) -> tuple[Tensor, None]:
    """The same output from PyTorch's fused kernel, which keeps no weights to return.

    A row with all keys masked comes out as 0. Source: Dao et al. 2022 (FlashAttention).
    """
    dropout = drop.p if drop is not None and drop.training else 0.0
    keep = None if mask is None else ~mask  # SDPA's bool masks have the opposite sense: True = may be seen
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout), None


ATTENTION = {"manual": scaled_dot_product_attention, "sdpa": fused_attention}


def put_behind(kept: Tensor, used: int, new: Tensor) -> Tensor:
    """kept [B, h, room, d_k], of which `used` are filled, and new [B, h, L, d_k] -> kept with new in it.

    When the room runs out it is doubled, so that a long output does not copy all of it at each step.
    """
    end = used + new.size(2)
    if end > kept.size(2):
        kept = torch.cat([kept[:, :, :used], kept.new_empty(*kept.shape[:2], end, kept.size(3))], dim=2)
    kept[:, :, used:end] = new
    return kept


class MultiHeadAttention(nn.Module):
    """h attentions side by side, each in its own d_k dimensions, joined by an output projection.

    query [B, Lq, d_model], key and value [B, Lk, d_model], mask bool, broadcastable to [B, h, Lq, Lk],
    True = masked -> output [B, Lq, d_model], weights [B, h, Lq, Lk] as they are before dropout (None from
    attention="sdpa"). A dict given as `cache`, empty at first, keeps keys and values from call to call: new
    ones go behind those it holds; with key and value None there are no new ones.
    Raises ValueError when num_heads does not divide d_model. Source: Vaswani et al. 2017, section 3.2.2.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1, attention: str = "manual"):
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"num_heads={num_heads}: must be at least 1 and divide d_model={d_model}")
        self.num_heads, self.d_k, self.attention = num_heads, d_model // num_heads, attention
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.drop = Dropout(dropout)

    def _split(self, x: Tensor) -> Tensor:
        B, L, _ = x.shape
        return x.view(B, L, self.num_heads, self.d_k).transpose(1, 2)  # (B, h, L, d_k)

    def _merge(self, x: Tensor) -> Tensor:
        B, _, L, _ = x.shape
        # After transpose the memory is no longer in order: view would refuse, reshape copies.
        return x.transpose(1, 2).reshape(B, L, self.num_heads * self.d_k)  # (B, L, d_model)

    def _keys_values(self, key: Tensor | None, value: Tensor | None, cache: dict) -> tuple[Tensor, Tensor]:
        used = cache.get("length", 0)
        if key is not None:
            for name, new in (("k", self._split(self.W_k(key))), ("v", self._split(self.W_v(value)))):
                cache[name] = put_behind(cache[name], used, new) if used else new
            used += key.size(1)
            cache["length"] = used
        return cache["k"][:, :, :used], cache["v"][:, :, :used]  # (B, h, Lk, d_k) each

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, mask: Tensor | None = None, cache=None
    ) -> tuple[Tensor, Tensor | None]:
        q = self._split(self.W_q(query))
        k, v = self._keys_values(key, value, {} if cache is None else cache)
        context, weights = ATTENTION[self.attention](q, k, v, mask, self.drop)
        return self.W_o(self._merge(context)), weights


# ---------------------------------------------------------------------------------------- 20.4 feed-forward


ACTIVATION = {"gelu": F.gelu, "relu": F.relu}


class FeedForward(nn.Module):
    """Linear -> GELU or ReLU -> Linear -> Dropout at every position: [B, L, d_model] -> [B, L, d_model]."""

    def __init__(self, d_model: int, dff: int, dropout: float = 0.1, activation: str = "gelu"):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(d_model, dff), nn.Linear(dff, d_model)
        self.activation = ACTIVATION[activation]
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear2(self.activation(self.linear1(x))))


# --------------------------------------------------------------------------------------------- 20.5 encoder


class ResidualLayer(nn.Module):
    """Where a layer normalises: x + Sublayer(LN(x)), pre-norm, or LN(x + Sublayer(x)), post-norm.

    Pre-norm (Xiong et al. 2020) leaves x itself unnormalised from end to end, post-norm is the original.
    """

    def __init__(self, norm_first: bool = True):
        super().__init__()
        self.norm_first = norm_first

    def before(self, ln: nn.LayerNorm, x: Tensor) -> Tensor:
        return ln(x) if self.norm_first else x

    def after(self, ln: nn.LayerNorm, x: Tensor) -> Tensor:
        return x if self.norm_first else ln(x)


class EncoderLayer(ResidualLayer):
    """Self-attention, then feed-forward, each with a residual connection and a LayerNorm.

    x [B, Ls, d_model], mask [B, 1, 1, Ls] -> x [B, Ls, d_model], weights [B, h, Ls, Ls].
    """

    def __init__(
        self, d_model: int, num_heads: int, dff: int, dropout: float = 0.1, norm_first: bool = True,
        activation: str = "gelu",
    ):  # fmt: skip
        super().__init__(norm_first)
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mha = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, dff, dropout, activation)
        self.drop = Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y = self.before(self.ln1, x)
        attended, weights = self.mha(y, y, y, mask)
        x = self.after(self.ln1, x + self.drop(attended))
        x = self.after(self.ln2, x + self.ffn(self.before(self.ln2, x)))
        return x, weights


class Encoder(nn.Module):
    """Embedding, num_layers encoder layers, and the last LayerNorm that pre-norm needs (`ln_final`).

    src [B, Ls], mask [B, 1, 1, Ls] -> memory [B, Ls, d_model], weights: one [B, h, Ls, Ls] per layer.
    """

    def __init__(
        self, vocab_size: int, d_model: int, num_heads: int, dff: int, num_layers: int, max_len: int,
        dropout: float = 0.1, norm_first: bool = True, activation: str = "gelu",
    ):  # fmt: skip
        super().__init__()
        self.embed = TokenAndPosition(vocab_size, d_model, max_len, dropout)
        self.layers = nn.ModuleList(
            EncoderLayer(d_model, num_heads, dff, dropout, norm_first, activation) for _ in range(num_layers)
        )
        self.ln_final = nn.LayerNorm(d_model) if norm_first else nn.Identity()

    def forward(self, src: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, all_weights = self.embed(src), []
        for layer in self.layers:
            x, weights = layer(x, mask)
            all_weights.append(weights)
        return self.ln_final(x), all_weights


# --------------------------------------------------------------------------------------------- 20.6 decoder


class DecoderLayer(ResidualLayer):
    """Causal self-attention, cross-attention into the memory, feed-forward, each with residual and LayerNorm.

    x [B, Lt, d_model], memory [B, Ls, d_model], tgt_mask [B, 1, Lt, Lt], src_mask [B, 1, 1, Ls]
    -> x [B, Lt, d_model], self weights [B, h, Lt, Lt], cross weights [B, h, Lt, Ls]. `cache`: as in
    `Transformer.decode`.
    """

    def __init__(
        self, d_model: int, num_heads: int, dff: int, dropout: float = 0.1, norm_first: bool = True,
        activation: str = "gelu",
    ):  # fmt: skip
        super().__init__(norm_first)
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.self_mha = MultiHeadAttention(d_model, num_heads, dropout)
        self.cross_mha = MultiHeadAttention(d_model, num_heads, dropout)
        self.ffn = FeedForward(d_model, dff, dropout, activation)
        self.drop = Dropout(dropout)

    def forward(
        self, x: Tensor, memory: Tensor, tgt_mask: Tensor, src_mask: Tensor, cache: dict | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cache = {} if cache is None else cache
        y = self.before(self.ln1, x)
        attended, self_weights = self.self_mha(y, y, y, tgt_mask, cache.setdefault("self", {}))
        x = self.after(self.ln1, x + self.drop(attended))
        seen = cache.setdefault("cross", {})
        new = None if seen else memory  # the memory stays the same: its keys and values are made once
        attended, cross_weights = self.cross_mha(self.before(self.ln2, x), new, new, src_mask, seen)
        x = self.after(self.ln2, x + self.drop(attended))
        x = self.after(self.ln3, x + self.ffn(self.before(self.ln3, x)))
        return x, self_weights, cross_weights


class Decoder(nn.Module):
    """Embedding, num_layers decoder layers, and the last LayerNorm that pre-norm needs (`ln_final`).

    tgt_in [B, Lt], memory [B, Ls, d_model], tgt_mask [B, 1, Lt, Lt], src_mask [B, 1, 1, Ls]
    -> x [B, Lt, d_model], self weights and cross weights: a [B, h, Lt, Lt] and a [B, h, Lt, Ls] per layer.
    `cache`: as in `Transformer.decode`; tgt_mask then has rows for the new tokens only.
    """

    def __init__(
        self, vocab_size: int, d_model: int, num_heads: int, dff: int, num_layers: int, max_len: int,
        dropout: float = 0.1, norm_first: bool = True, activation: str = "gelu",
    ):  # fmt: skip
        super().__init__()
        self.embed = TokenAndPosition(vocab_size, d_model, max_len, dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(d_model, num_heads, dff, dropout, norm_first, activation) for _ in range(num_layers)
        )
        self.ln_final = nn.LayerNorm(d_model) if norm_first else nn.Identity()

    def forward(
        self, tgt_in: Tensor, memory: Tensor, tgt_mask: Tensor, src_mask: Tensor, cache: dict | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        cache = {} if cache is None else cache
        start = cache.get("length", 0)
        x, all_self, all_cross = self.embed(tgt_in, start), [], []
        cache["length"] = start + tgt_in.size(1)
        for number, layer in enumerate(self.layers):
            layer_cache = cache.setdefault(number, {})
            x, self_weights, cross_weights = layer(x, memory, tgt_mask, src_mask, layer_cache)
            all_self.append(self_weights)
            all_cross.append(cross_weights)
        return self.ln_final(x), all_self, all_cross


# ------------------------------------------------------------------------------------- 20.7 masks and model


def make_padding_mask(ids: Tensor) -> Tensor:
    """ids [B, L] -> bool [B, 1, 1, L], True at PAD: a column of keys that no query may look at."""
    return (ids == PAD_ID)[:, None, None, :]


def make_causal_mask(L: int, device: torch.device | str | None = None, start: int = 0) -> Tensor:
    """bool [1, 1, L, L] on `device`, True above the diagonal: position i sees 0..i, never the future.

    With `start` only the rows from there on, [1, 1, L - start, L].
    """
    return torch.ones(L - start, L, dtype=torch.bool, device=device).triu(diagonal=1 + start)[None, None]


class Transformer(nn.Module):
    """The whole model: `encode` once, `decode` as often as you like, `forward` for training.

    `settings` holds the constructor's arguments as a plain dict; `Transformer(**settings)` rebuilds it.
    Linear layers start Xavier uniform with zero bias, embeddings as `TokenAndPosition` says.
    Options beyond the chapter: attention="sdpa" leaves the inside of attention to PyTorch's fused kernel,
    same output; norm_first=False is post-norm; activation="relu"; share_embeddings makes source, target and
    output matrix one tensor (its PAD row is then trained, as an output that is never right).
    Raises ValueError, naming the argument, for a size below 1, a dropout outside [0, 1), heads that do not
    divide d_model, an unknown attention or activation, or shared embeddings of two vocabulary sizes.
    Source: Vaswani et al. 2017; pre-norm: Xiong et al. 2020; shared embeddings: Press & Wolf 2017.
    """

    def __init__(
        self,
        src_vocab: int,
        tgt_vocab: int,
        d_model: int = 128,
        num_heads: int = 4,
        dff: int = 512,
        num_layers: int = 2,
        max_len: int = 64,
        dropout: float = 0.1,
        attention: str = "manual",
        norm_first: bool = True,
        activation: str = "gelu",
        share_embeddings: bool = False,
    ):
        super().__init__()
        sizes = dict(src_vocab=src_vocab, tgt_vocab=tgt_vocab, d_model=d_model, num_heads=num_heads, dff=dff,
                     num_layers=num_layers, max_len=max_len)  # fmt: skip
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout!r}: must be at least 0 and below 1")
        for name, value, legal in (
            ("attention", attention, ATTENTION),
            ("activation", activation, ACTIVATION),
        ):
            if value not in legal:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(legal)}")
        if share_embeddings and src_vocab != tgt_vocab:
            raise ValueError(
                f"share_embeddings: src_vocab={src_vocab} and tgt_vocab={tgt_vocab} must be equal"
            )
        options = dict(norm_first=norm_first, activation=activation)
        self.settings = sizes | dict(dropout=dropout, attention=attention, share_embeddings=share_embeddings)
        self.settings |= options
        stack = (d_model, num_heads, dff, num_layers, max_len, dropout)
        self.encoder = Encoder(src_vocab, *stack, **options)
        self.decoder = Decoder(tgt_vocab, *stack, **options)
        self.out = nn.Linear(d_model, tgt_vocab)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        if share_embeddings:  # last, or Xavier would overwrite the embeddings
            self.decoder.embed.embedding.weight = self.out.weight = self.encoder.embed.embedding.weight
            # The token just read has the same vector as an output: halved, its logit does not rule the start.
            nn.init.constant_(
                (self.decoder.ln_final if norm_first else self.decoder.layers[-1].ln3).weight, 0.5
            )
        self._use(attention)

    def _use(self, attention: str) -> None:
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                module.attention = attention

    def encode(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """src [B, Ls] -> memory [B, Ls, d_model], src_mask [B, 1, 1, Ls]. ValueError when Ls > max_len."""
        src_mask = make_padding_mask(src)
        memory, _ = self.encoder(src, src_mask)
        return memory, src_mask

    def decode(
        self, tgt_in: Tensor, memory: Tensor, src_mask: Tensor, cache: dict | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """tgt_in [B, Lt] and what `encode` returned -> logits [B, Lt, tgt_vocab], cross weights.

        The logits at position t score the token that follows tgt_in[:, t]. The weights are a list, one
        [B, h, Lt, Ls] per layer. ValueError when Lt > max_len.

        To decode step by step give the same dict as `cache` each time, empty at first, and as tgt_in only the
        tokens that are new: keys and values of all earlier ones are kept there, not computed again.
        """
        cache = {} if cache is None else cache
        past = cache.get("tgt", tgt_in[:, :0])
        tgt = torch.cat([past, tgt_in], dim=1)
        tgt_mask = self._tgt_mask(tgt, start=past.size(1))
        x, _, cross_weights = self.decoder(tgt_in, memory, tgt_mask, src_mask, cache)
        cache["tgt"] = tgt
        return self.out(x), cross_weights

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """src [B, Ls], tgt_in [B, Lt] -> logits [B, Lt, tgt_vocab]."""
        memory, src_mask = self.encode(src)
        logits, _ = self.decode(tgt_in, memory, src_mask)
        return logits

    def attention_weights(self, src: Tensor, tgt_in: Tensor) -> dict[str, list[Tensor]]:
        """src [B, Ls], tgt_in [B, Lt] -> the weights of all three kinds of attention, for drawing.

        Each is a list over the layers: "encoder" [B, h, Ls, Ls], "decoder" [B, h, Lt, Lt], "cross"
        [B, h, Lt, Ls]. Call it in eval() mode.
        """
        src_mask = make_padding_mask(src)
        try:
            self._use("manual")  # the fused kernel has no weights to show
            memory, encoder_weights = self.encoder(src, src_mask)
            _, self_weights, cross_weights = self.decoder(tgt_in, memory, self._tgt_mask(tgt_in), src_mask)
        finally:
            self._use(self.settings["attention"])
        return {"encoder": encoder_weights, "decoder": self_weights, "cross": cross_weights}

    @staticmethod
    def _tgt_mask(tgt: Tensor, start: int = 0) -> Tensor:
        padding, length = make_padding_mask(tgt), tgt.size(1)
        if start == length - 1:
            return padding  # the last position has no future
        return padding | make_causal_mask(length, tgt.device, start)  # (B, 1, Lt - start, Lt)
