"""Small models of x-transformers and diffusers: name -> function that makes (model, args, kwargs).

    pip install --no-deps --target SITE x-transformers torch-einops-utils einops einx loguru frozendict diffusers==0.35.2
    PYTHONPATH=SITE python tools/libraries_table.py sequence
"""

import diffusers
import torch
import x_transformers

ROWS = 2
MODELS = {}


def words():
    return (torch.randint(0, 20, (ROWS, 8)),), {}


def of_x_transformers(name, encoder=False, wrapper=None, **options):
    def make():
        layers = {"dim": 16, "depth": 2, "heads": 2, "attn_dim_head": 8, "ff_mult": 2, **options}
        kind = x_transformers.Encoder if encoder else x_transformers.Decoder
        model = x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=kind(**layers), **(wrapper or {}))
        return model, *words()

    MODELS[f"x-transformers, {name}"] = make


def of_diffusers(name, inputs, **options):
    def make():
        return getattr(diffusers, name)(**options), *inputs()

    MODELS[f"diffusers {name}"] = make


of_x_transformers("rotary, GLU, RMSNorm", rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True)
of_x_transformers("xpos, talking heads", rotary_pos_emb=True, rotary_xpos=True, attn_pre_talking_heads=True, attn_post_talking_heads=True)
of_x_transformers("ALiBi, QK norm, key-value memory", alibi_pos_bias=True, attn_qk_norm=True, attn_num_mem_kv=2)
of_x_transformers("relative bias, macaron, sandwich norm", rel_pos_bias=True, macaron=True, sandwich_norm=True)
of_x_transformers("dynamic bias, gated residual, scale norm", dynamic_pos_bias=True, gate_residual=True, use_scalenorm=True)
of_x_transformers("post norm, scaled residual, squared ReLU", pre_norm=False, scale_residual=True, ff_relu_squared=True)
of_x_transformers("value residual, hyper-connections", add_value_residual=True, num_residual_streams=2)
of_x_transformers("gates of values and heads, shifted tokens", attn_gate_values=True, attn_head_scale=True, shift_tokens=1)
of_x_transformers("CoPE, soft clamp, one key-value head", attn_use_cope=True, attn_softclamp_logits=True, attn_one_kv_head=True)
of_x_transformers("encoder, memory tokens, pooled", True, {"num_memory_tokens": 3, "average_pool_embed": True})

STEPS = torch.arange(ROWS) * 7 + 1
UNET = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 4}
CROSS = {**UNET, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 8}
DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
VAE = {"in_channels": 3, "out_channels": 3, "block_out_channels": (8, 8), "norm_num_groups": 4}
VAE |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
DIT = {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 4, "num_attention_heads": 2, "in_channels": 4}


def image(channels, size=8):
    return torch.randn(ROWS, channels, size, size)


def text(width=8):
    return torch.randn(ROWS, 5, width)


of_diffusers(
    "UNet2DModel", lambda: ((image(3), STEPS), {}), in_channels=3, out_channels=3, **UNET,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
of_diffusers(
    "UNet2DConditionModel", lambda: ((image(4), STEPS, text()), {}), **CROSS, down_block_types=DOWN, up_block_types=UP
)
of_diffusers("AutoencoderKL", lambda: ((image(3, 16),), {}), latent_channels=4, **VAE)
of_diffusers("VQModel", lambda: ((image(3, 16),), {}), latent_channels=3, num_vq_embeddings=16, **VAE)
of_diffusers(
    "DiTTransformer2DModel", lambda: ((image(4),), {"timestep": STEPS, "class_labels": torch.arange(ROWS)}), **DIT,
    out_channels=8, attention_bias=True, num_embeds_ada_norm=8, norm_type="ada_norm_zero",
)  # fmt: skip
of_diffusers(
    "SD3Transformer2DModel",
    lambda: ((image(4),), {"encoder_hidden_states": text(), "pooled_projections": torch.randn(ROWS, 16), "timestep": STEPS}),
    **DIT, caption_projection_dim=8, joint_attention_dim=8, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
)  # fmt: skip
of_diffusers(
    "ControlNetModel", lambda: ((image(4), STEPS, text(), image(3, 16)), {}), in_channels=4, layers_per_block=1,
    block_out_channels=(8, 16), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=8,
    conditioning_embedding_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
)  # fmt: skip
