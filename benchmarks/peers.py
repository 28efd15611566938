"""Other people's models of the same sizes, for the benchmarks; one that is not installed is left out.

Install them with `pip install x-transformers transformers`.
"""

from torch import Tensor, nn

from model import PAD_ID
from toolbox.command_line import say
from train import BOS_ID, EOS_ID


def missing(package: str) -> None:
    say(f"  {package} is not installed and left out: pip install {package}")


def x_transformer(settings: dict) -> nn.Module | None:
    """x-transformers' encoder-decoder, `model(src, tgt_in) -> logits`, or None where it is not installed."""
    try:
        from x_transformers import XTransformer
    except ModuleNotFoundError:
        return missing("x-transformers")
    sizes = dict(depth=settings["num_layers"], heads=settings["num_heads"], max_seq_len=settings["max_len"])
    sizes |= dict(attn_dim_head=settings["d_model"] // settings["num_heads"])
    sizes |= dict(ff_mult=settings["dff"] // settings["d_model"])
    for name in ("attn_dropout", "ff_dropout", "emb_dropout"):
        sizes[name] = settings["dropout"]
    both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    vocabularies = dict(enc_num_tokens=settings["src_vocab"], dec_num_tokens=settings["tgt_vocab"])
    model = XTransformer(dim=settings["d_model"], pad_value=PAD_ID, **vocabularies, **both)

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
            real = src != PAD_ID
            memory = self.model.encoder(src, mask=real, return_embeddings=True)
            return self.model.decoder.net(tgt_in, context=memory, context_mask=real)

    return Adapter()


def bart(settings: dict) -> nn.Module | None:
    """transformers' Bart of the same sizes, or None where it is not installed."""
    try:
        from transformers import BartConfig, BartForConditionalGeneration
    except ModuleNotFoundError:
        return missing("transformers")
    layers, heads, dff = (settings[name] for name in ("num_layers", "num_heads", "dff"))
    config = BartConfig(
        vocab_size=settings["tgt_vocab"],
        d_model=settings["d_model"],
        max_position_embeddings=settings["max_len"] + 2,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=dff,
        decoder_ffn_dim=dff,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        decoder_start_token_id=BOS_ID,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config).eval()
