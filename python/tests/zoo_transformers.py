"""Models of the package transformers, small and with random weights: name -> function that makes (model, args, kwargs).

Language models in training, with labels and a padding mask where they take one; vision models with labels; no caches.
"""

import torch

DECODER = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, max_position_embeddings=64)
GPT = dict(vocab_size=64, n_embd=16, n_layer=2, n_head=4, n_positions=64)
SEQ2SEQ = dict(
    vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32,
    decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=1, decoder_start_token_id=2, eos_token_id=2, bos_token_id=0,
    encoder_layerdrop=0.0, decoder_layerdrop=0.0,
)  # fmt: skip
T5 = dict(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0)
IMAGE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=32, patch_size=8)
SPEECH = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, conv_dim=(8, 8), conv_stride=(5, 2),
    conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
    layerdrop=0.0,
)  # fmt: skip
MOE = dict(num_key_value_heads=2, num_experts_per_tok=2)
MASK = [[1] * 8, [1] * 6 + [0] * 2]


def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


def ids(*shape):
    return torch.randint(5, 50, shape or (2, 8))


def tokens(labels=True, mask=True, **more):
    def inputs():
        given = ids()
        return dict(
            input_ids=given, **(dict(attention_mask=torch.tensor(MASK)) if mask else {}), **(dict(labels=given) if labels else {}), **more
        )

    return inputs


def classes(count=2):
    return dict(input_ids=ids(), attention_mask=torch.tensor(MASK), labels=torch.tensor([0, 1]))


def pairs():
    return dict(input_ids=ids(), attention_mask=torch.tensor(MASK), labels=ids(2, 5), use_cache=False)


def images(size=32, labels=lambda: torch.tensor([0, 1])):
    return lambda: dict(pixel_values=torch.randn(2, 3, size, size), **(dict(labels=labels()) if labels else {}))


LM, PLAIN, ENCODER = tokens(use_cache=False), tokens(mask=False, use_cache=False), tokens(labels=False)
WAVE = lambda: dict(input_values=torch.randn(2, 400))  # noqa: E731

# name -> (prefix of the config's class, the model's class after it, config, inputs)
TABLE = {
    "Mistral": ("Mistral", "ForCausalLM", dict(DECODER, num_key_value_heads=2), LM),
    "Mistral, sliding window": ("Mistral", "ForCausalLM", dict(DECODER, num_key_value_heads=2, sliding_window=4), PLAIN),
    "Mixtral": ("Mixtral", "ForCausalLM", dict(DECODER, **MOE, num_local_experts=4), LM),
    "Qwen2": ("Qwen2", "ForCausalLM", dict(DECODER, num_key_value_heads=2), LM),
    "Qwen2-MoE": ("Qwen2Moe", "ForCausalLM", dict(DECODER, **MOE, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16), LM),
    "Qwen3": ("Qwen3", "ForCausalLM", dict(DECODER, num_key_value_heads=2, head_dim=8), LM),
    "Qwen3-MoE": ("Qwen3Moe", "ForCausalLM", dict(DECODER, **MOE, num_experts=4, moe_intermediate_size=16, head_dim=8), LM),
    "DeepSeek-V3": (
        "DeepseekV3", "ForCausalLM",
        dict(
            DECODER, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
            first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1,
        ),
        LM,
    ),
    "GPT-OSS": ("GptOss", "ForCausalLM", dict(DECODER, **MOE, num_local_experts=4, head_dim=4), LM),
    "OLMoE": ("Olmoe", "ForCausalLM", dict(DECODER, **MOE, num_experts=4, pad_token_id=0), LM),
    "Granite MoE": ("GraniteMoe", "ForCausalLM", dict(DECODER, **MOE, num_local_experts=4), LM),
    "PhiMoE": ("Phimoe", "ForCausalLM", dict(DECODER, **MOE, num_local_experts=4), LM),
    "JetMoE": ("JetMoe", "ForCausalLM", dict(without(DECODER, "num_attention_heads"), kv_channels=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2), LM),
    "GLM-4 MoE": (
        "Glm4Moe", "ForCausalLM",
        dict(DECODER, **MOE, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, head_dim=8), LM,
    ),
    "dots1": (
        "Dots1", "ForCausalLM",
        dict(DECODER, **MOE, n_routed_experts=4, n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1, n_group=1, topk_group=1), LM,
    ),
    "Ernie 4.5 MoE": (
        "Ernie4_5_Moe", "ForCausalLM",
        dict(DECODER, num_key_value_heads=2, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=1, moe_layer_start_index=1,
             pad_token_id=0), LM,
    ),
    "DeepSeek-V2": (
        "DeepseekV2", "ForCausalLM",
        dict(DECODER, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
             q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_shared_experts=1, n_group=1, topk_group=1), LM,
    ),
    "Gemma": ("Gemma", "ForCausalLM", dict(DECODER, num_key_value_heads=2, head_dim=4), LM),
    "Gemma 2": ("Gemma2", "ForCausalLM", dict(DECODER, num_key_value_heads=2, head_dim=4), LM),
    "Gemma 3": ("Gemma3Text", "Gemma3ForCausalLM", dict(DECODER, num_key_value_heads=2, head_dim=4), LM),
    "Phi": ("Phi", "ForCausalLM", DECODER, LM),
    "Phi-3": ("Phi3", "ForCausalLM", dict(DECODER, pad_token_id=0), LM),
    "OPT": ("OPT", "ForCausalLM", dict(DECODER, ffn_dim=32, word_embed_proj_dim=16), LM),
    "GPT-NeoX": ("GPTNeoX", "ForCausalLM", DECODER, LM),
    "GPT-J": ("GPTJ", "ForCausalLM", dict(GPT, rotary_dim=4), LM),
    "GPT-Neo": (
        "GPTNeo", "ForCausalLM",
        dict(vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, intermediate_size=32, max_position_embeddings=64,
             attention_types=[[["global", "local"], 1]]), LM,
    ),
    "Falcon": ("Falcon", "ForCausalLM", DECODER, LM),
    "Falcon, ALiBi": ("Falcon", "ForCausalLM", dict(DECODER, alibi=True), LM),
    "BLOOM": ("Bloom", "ForCausalLM", dict(DECODER, n_layer=2, n_head=4), LM),
    "GPT-2, eager attention": ("GPT2", "LMHeadModel", dict(GPT, attn_implementation="eager"), LM),
    "GPT-BigCode": ("GPTBigCode", "ForCausalLM", GPT, LM),
    "Cohere": ("Cohere", "ForCausalLM", dict(DECODER, num_key_value_heads=2), LM),
    "OLMo 2": ("Olmo2", "ForCausalLM", dict(DECODER, pad_token_id=0), LM),
    "StableLM": ("StableLm", "ForCausalLM", dict(DECODER, num_key_value_heads=2), LM),
    "StarCoder 2": ("Starcoder2", "ForCausalLM", dict(DECODER, num_key_value_heads=2), LM),
    "Granite": ("Granite", "ForCausalLM", dict(DECODER, num_key_value_heads=2), LM),
    "Mamba": ("Mamba", "ForCausalLM", dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4), PLAIN),
    "Mamba 2": (
        "Mamba2", "ForCausalLM",
        dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4), PLAIN,
    ),
    "RWKV": (
        "Rwkv", "ForCausalLM",
        dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, intermediate_size=32, attention_hidden_size=16, context_length=64), PLAIN,
    ),
    "Jamba": (
        "Jamba", "ForCausalLM",
        dict(DECODER, num_key_value_heads=2, num_experts=2, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
             use_mamba_kernels=False, mamba_dt_rank=4), PLAIN,
    ),
    "DistilBERT": ("DistilBert", "ForSequenceClassification", dict(vocab_size=64, dim=16, n_layers=2, n_heads=4, hidden_dim=32), classes),
    "RoBERTa": ("Roberta", "ForMaskedLM", DECODER, tokens()),
    "ALBERT": ("Albert", "ForMaskedLM", dict(DECODER, embedding_size=8), tokens()),
    "ELECTRA": ("Electra", "ForMaskedLM", dict(DECODER, embedding_size=8), tokens()),
    "DeBERTa": ("Deberta", "ForSequenceClassification", dict(DECODER, relative_attention=True, pos_att_type=["c2p", "p2c"]), classes),
    "DeBERTa v2": (
        "DebertaV2", "ForSequenceClassification", dict(DECODER, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4), classes,
    ),
    "MPNet": ("MPNet", "ForSequenceClassification", DECODER, classes),
    "ModernBERT": (
        "ModernBert", "ForSequenceClassification",
        dict(DECODER, pad_token_id=0, eos_token_id=1, bos_token_id=2, cls_token_id=2, sep_token_id=1, attn_implementation="sdpa",
             reference_compile=False), classes,
    ),
    "XLNet": ("XLNet", "ForSequenceClassification", dict(vocab_size=64, d_model=16, n_layer=2, n_head=4, d_inner=32), classes),
    "FNet": ("FNet", "ForMaskedLM", without(DECODER, "num_attention_heads"), tokens(mask=False)),
    "Longformer": ("Longformer", "Model", dict(DECODER, attention_window=4), ENCODER),
    "ConvBERT": ("ConvBert", "Model", dict(DECODER, embedding_size=16), ENCODER),
    "Funnel": ("Funnel", "Model", dict(vocab_size=64, block_sizes=[1, 1], num_decoder_layers=1, d_model=16, n_head=4, d_head=4, d_inner=32), ENCODER),
    "Nyströmformer": ("Nystromformer", "Model", dict(DECODER, num_landmarks=4, segment_means_seq_len=8), ENCODER),
    "BigBird": ("BigBird", "Model", dict(DECODER, attention_type="original_full"), ENCODER),
    "RoFormer": ("RoFormer", "ForMaskedLM", DECODER, tokens()),
    "T5": ("T5", "ForConditionalGeneration", T5, pairs),
    "T5, gated": ("T5", "ForConditionalGeneration", dict(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False), pairs),
    "UMT5": ("UMT5", "ForConditionalGeneration", T5, pairs),
    "BART": ("Bart", "ForConditionalGeneration", SEQ2SEQ, pairs),
    "mBART": ("MBart", "ForConditionalGeneration", SEQ2SEQ, pairs),
    "Pegasus": ("Pegasus", "ForConditionalGeneration", SEQ2SEQ, pairs),
    "Marian": ("Marian", "MTModel", dict(SEQ2SEQ, pad_token_id=0), pairs),
    "M2M100": ("M2M100", "ForConditionalGeneration", SEQ2SEQ, pairs),
    "LED": (
        "LED", "ForConditionalGeneration",
        dict(without(SEQ2SEQ, "max_position_embeddings"), attention_window=4, max_encoder_position_embeddings=64,
             max_decoder_position_embeddings=64), pairs,
    ),
    "ProphetNet": (
        "ProphetNet", "ForConditionalGeneration",
        dict(vocab_size=64, hidden_size=16, encoder_ffn_dim=32, num_encoder_layers=1, num_encoder_attention_heads=4, decoder_ffn_dim=32,
             num_decoder_layers=1, num_decoder_attention_heads=4, max_position_embeddings=64, decoder_start_token_id=0), pairs,
    ),
    "Whisper": (
        "Whisper", "ForConditionalGeneration",
        dict(without(SEQ2SEQ, "max_position_embeddings"), num_mel_bins=8, max_source_positions=10, max_target_positions=20),
        lambda: dict(input_features=torch.randn(2, 8, 20), labels=ids(2, 5), use_cache=False),
    ),
    "wav2vec 2.0": ("Wav2Vec2", "Model", SPEECH, WAVE),
    "HuBERT": ("Hubert", "Model", SPEECH, WAVE),
    "WavLM": ("WavLM", "Model", SPEECH, WAVE),
    "ViT of transformers": ("ViT", "ForImageClassification", IMAGE, images()),
    "DeiT": ("DeiT", "ForImageClassification", IMAGE, images()),
    "DINOv2": ("Dinov2", "ForImageClassification", IMAGE, images()),
    "BEiT": ("Beit", "ForImageClassification", dict(IMAGE, use_relative_position_bias=True), images()),
    "Swin": ("Swin", "ForImageClassification", dict(image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4), images()),
    "Swin v2": ("Swinv2", "ForImageClassification", dict(image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4), images()),
    "ConvNeXt": ("ConvNext", "ForImageClassification", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), images()),
    "ConvNeXt v2": ("ConvNextV2", "ForImageClassification", dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), images()),
    "ResNet": ("ResNet", "ForImageClassification", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"), images()),
    "RegNet": ("RegNet", "ForImageClassification", dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4), images()),
    "MobileNet v2": ("MobileNetV2", "ForImageClassification", dict(depth_multiplier=0.35), images()),
    "SegFormer": (
        "Segformer", "ForSemanticSegmentation",
        dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3], strides=[2, 2],
             num_attention_heads=[2, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3),
        images(labels=lambda: torch.randint(3, (2, 32, 32))),
    ),
    "MobileViT": (
        "MobileViT", "ForImageClassification",
        dict(hidden_sizes=[16, 16, 16], neck_hidden_sizes=[8, 8, 8, 8, 8, 8, 16], image_size=32, num_attention_heads=4), images(),
    ),
    "PoolFormer": ("PoolFormer", "ForImageClassification", dict(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1]), images(64)),
    "YOLOS": ("Yolos", "ForObjectDetection", dict(IMAGE, image_size=[32, 32], num_detection_tokens=4), images(labels=None)),
}  # fmt: skip


def _of_table(name):
    import transformers

    prefix, model, config, inputs = TABLE[name]
    model = getattr(transformers, model if hasattr(transformers, model) else prefix + model)
    return model(getattr(transformers, prefix + "Config")(**config)).train(), (), inputs()


def _detr():
    import transformers as t

    backbone = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"])
    config = t.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5,
    )  # fmt: skip
    return t.DetrForObjectDetection(config).train(), (), dict(pixel_values=torch.randn(2, 3, 32, 32))


def _clip():
    import transformers as t

    text = dict(without(DECODER, "max_position_embeddings", "num_hidden_layers"), num_hidden_layers=1, max_position_embeddings=16, eos_token_id=63)
    model = t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16))
    mask = torch.ones(2, 8, dtype=torch.long)
    return model, (), dict(input_ids=ids(), pixel_values=torch.randn(2, 3, 32, 32), attention_mask=mask, return_loss=True)


MODELS = {**{name: (lambda n=name: _of_table(n)) for name in TABLE}, "DETR": _detr, "CLIP": _clip}
