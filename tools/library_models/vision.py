"""Small models of timm, torchvision and vit-pytorch: name -> function that makes (model, args, kwargs).

    pip install --no-deps --target SITE timm torchvision==0.28.0 vit-pytorch einops huggingface_hub safetensors pyyaml pillow tqdm
    PYTHONPATH=SITE python tools/libraries_table.py vision
"""

import functools
import importlib
import inspect

import torchvision_names  # noqa: F401 (before what imports torchvision)

# isort: split
import timm
import torch
import torchvision
import torchvision.models.feature_extraction
import torchvision.models.optical_flow

ROWS = 2
MODELS = {}


def add(name, make, *inputs):
    MODELS[name] = lambda: (make(), tuple(x() for x in inputs), {})


def image(size, channels=3):
    return lambda: torch.randn(ROWS, channels, size, size)


def of_timm(name, size=64, **options):
    add(f"timm {name}", functools.partial(timm.create_model, name, num_classes=7, **options), image(size))


def of_torchvision(kind, name, *shape, **options):
    def make():
        return getattr(importlib.import_module("torchvision.models" + kind), name)(weights=None, **options)

    add(f"torchvision {name}", make, lambda: torch.randn(ROWS, 3, *shape))


# Arguments of vit-pytorch's constructors, by the names of their parameters.
VIT = {
    "image_size": 32, "image_patch_size": 8, "patch_size": 8, "num_classes": 7, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64,
    "dim_head": 16, "frames": 4, "frame_patch_size": 2, "cls_depth": 1, "freq_patch_size": 8, "num_residual_streams": 2, "seq_len": 64,
    "max_tokens_per_depth": (12, 8), "spatial_depth": 1, "temporal_depth": 1, "num_frames": 4,
}  # fmt: skip


def of_vit_pytorch(module, cls, *shape, **options):
    def make():
        made = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)
        asked = inspect.signature(made).parameters
        needed = {k: v for k, v in VIT.items() if k in asked and (asked[k].default is inspect.Parameter.empty or k in ("depth", "dim_head"))}
        return made(**{**needed, **options})

    add(f"vit-pytorch {module}", make, lambda: torch.randn(ROWS, *(shape or (3, 32, 32))))


# At 64 pixels.
TIMM = """
resnet10t test_resnet resnetblur18 gcresnet33ts resnetv2_18 resnetv2_18d test_byobnet mobileone_s0 repvgg_a0 regnetx_002 regnety_002 test_efficientnet
test_efficientnet_gn test_efficientnet_evos efficientnet_lite0 tf_efficientnetv2_b0 mixnet_s tf_mobilenetv3_small_minimal_100
mobilenetv4_conv_small_035 mobilenetv4_hybrid_medium_075 hardcorenas_a test_convnext test_convnext2 convnextv2_atto convnext_zepto_rms
focalnet_tiny_srf edgenext_xx_small efficientvit_b0 efficientvim_m1 fastvit_t8 fastvit_sa12 repvit_m0_9 repghostnet_050 poolformer_s12 caformer_s18
poolformerv2_s12 nextvit_small convmixer_768_32 shvit_s1 starnet_s050 swiftformer_xs mobilevit_xxs mobilevitv2_050 inception_next_atto hrnet_w18_small
rdnet_tiny legacy_xception test_nfnet nf_regnet_b0 dpn48b dla46_c dla60_res2net vovnet39a ese_vovnet19b_slim_dw resnest14d skresnet18
legacy_seresnet18 selecsls42 rexnet_100 ghostnet_050 ghostnetv2_100 ghostnetv3_050 cspresnet50 cspnext_tiny hgnetv2_b0 lcnet_035 fasternet_t0
lowformer_b0 csatv2 iformer_t
"""
# Models that need their size as an argument.
TIMM_SIZED = """
botnet26t_256 lambda_resnet26rpt_256 test_vit test_vit2 test_vit3 test_vit4 test_vit_relpos maxvit_pico_rw_256 coatnet_pico_rw_224
coatnext_nano_rw_224 levit_128s levit_conv_128s mvitv2_tiny efficientvit_m0 mixer_s16_224 gmlp_ti16_224 resmlp_12_224 gmixer_12_224 volo_d1_224
visformer_tiny nest_tiny
"""
for name in TIMM.split():
    of_timm(name)
for name in TIMM_SIZED.split():
    of_timm(name, img_size=64)

of_timm("resnet26d", drop_path_rate=0.0, block_args={"attn_layer": "cbam"})
of_timm("halonet26t", size=256)
of_timm("bat_resnext26ts", size=256)
of_timm("vit_tiny_patch16_224", img_size=64, depth=2, dynamic_img_size=True)
of_timm("vit_base_patch16_siglip_224", img_size=64, depth=2, embed_dim=64, num_heads=4)
of_timm("vit_tiny_r_s16_p8_224", img_size=64, depth=2)
of_timm("samvit_base_patch16_224", img_size=64, depth=3, embed_dim=64, num_heads=4, global_attn_indexes=(2,))
of_timm("naflexvit_base_patch16_gap", depth=2, embed_dim=64, num_heads=4)
of_timm("deit_tiny_distilled_patch16_224", img_size=64, depth=2)
of_timm("deit3_small_patch16_224", img_size=64, depth=2, embed_dim=64, num_heads=4)
of_timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 2, 2), num_heads=(2, 2, 4))
of_timm("swinv2_tiny_window8_256", img_size=64, window_size=4, embed_dim=24, depths=(2, 2, 2), num_heads=(2, 2, 4))
of_timm("swinv2_cr_tiny_ns_224", img_size=64, embed_dim=24, depths=(2, 2), num_heads=(2, 4))
of_timm("maxvit_tiny_pm_256", img_size=64, depths=(1, 1), embed_dim=(32, 64))
of_timm("eva02_tiny_patch14_224", size=56, img_size=56, depth=2)
of_timm("vit_small_patch16_rope_mixed_224", img_size=64, depth=2)
of_timm("vit_pe_spatial_tiny_patch16_512", img_size=64, depth=2)
of_timm("beit_base_patch16_224", img_size=64, depth=2, embed_dim=64, num_heads=4)
of_timm("cait_xxs24_224", img_size=64, depth=2)
of_timm("xcit_nano_12_p16_224", img_size=64, depth=2)
of_timm("hiera_tiny_224", img_size=(64, 64), stages=(1, 1, 2, 1), embed_dim=32)
of_timm("sam2_hiera_tiny", stages=(1, 1, 2, 1), embed_dim=32, global_att_blocks=(3,), window_spec=(4, 2, 4, 2))
of_timm("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(24, 32, 48, 64), num_heads=(2, 2, 4, 4))
of_timm("efficientformer_l1", size=224)
of_timm("efficientformerv2_s0", size=224)
of_timm("twins_svt_small", img_size=64, depths=(1, 1, 2, 1))
of_timm("twins_pcpvt_small", img_size=64, depths=(1, 1, 1, 1))
of_timm("pvt_v2_b0", depths=(1, 1, 1, 1))
of_timm("pvt_v2_b2_li", depths=(1, 1, 1, 1))
of_timm("tnt_s_patch16_224", img_size=64, depth=2)
of_timm("crossvit_tiny_240", size=240, depth=((1, 1, 0),))
of_timm("coat_lite_tiny", img_size=64, serial_depths=(1, 1, 1, 1))
of_timm("coat_tiny", img_size=64, serial_depths=(1, 1, 1, 1), parallel_depth=1)
of_timm("convit_tiny", img_size=64, depth=3, local_up_to_layer=2)
of_timm("gcvit_xxtiny", size=224)
of_timm("pit_ti_224", img_size=64, depth=(1, 1, 1))
of_timm("sequencer2d_s", img_size=64, layers=(1, 1, 1, 1), embed_dims=(24, 32, 32, 32), hidden_sizes=(8, 8, 8, 8))
of_timm("tiny_vit_5m_224", size=224)
of_timm("vitamin_small_224", img_size=64, depth=2)
of_timm("mambaout_femto", depths=(1, 1, 1, 1))
of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2))
of_timm("densenetblur121d", growth_rate=8, block_config=(2, 2, 2, 2))
of_timm("inception_v3", size=128, aux_logits=True)
of_timm("res2net50_48w_2s", layers=(1, 1, 1, 1))
of_timm("tresnet_m", layers=(1, 1, 1, 1))

of_torchvision("", "resnet18", 64, 64)
of_torchvision("", "googlenet", 64, 64, init_weights=False)
of_torchvision("", "inception_v3", 128, 128, init_weights=False)
of_torchvision("", "squeezenet1_1", 64, 64)
of_torchvision("", "shufflenet_v2_x0_5", 64, 64)
of_torchvision("", "mnasnet0_5", 64, 64)
of_torchvision("", "mobilenet_v3_small", 64, 64)
of_torchvision("", "regnet_y_400mf", 64, 64)
of_torchvision("", "maxvit_t", 64, 64, input_size=(64, 64), partition_size=2)
of_torchvision(".segmentation", "deeplabv3_mobilenet_v3_large", 64, 64, weights_backbone=None, aux_loss=True)
of_torchvision(".segmentation", "fcn_resnet50", 32, 32, weights_backbone=None, aux_loss=True)
of_torchvision(".segmentation", "lraspp_mobilenet_v3_large", 64, 64, weights_backbone=None)
of_torchvision(".video", "r3d_18", 4, 32, 32)
of_torchvision(".video", "s3d", 14, 224, 224)
of_torchvision(".video", "swin3d_t", 4, 32, 32)
add("torchvision raft_small", functools.partial(torchvision.models.optical_flow.raft_small, num_flow_updates=2), image(128), image(128))
VIDEO = (3, 4, 32, 32)
VIT_PYTORCH = """
vit:ViT ats_vit:ViT attn_residual_with_dca_simple_vit:SimpleViT deepvit:DeepViT jet_vit:JetViT learnable_memory_vit:ViT normalized_vit:nViT
parallel_vit:ViT rvt:RvT simple_vit:SimpleViT simple_vit_attn_residual:SimpleViTAttnResidual simple_vit_orthog_residual_update:SimpleViT
simple_vit_with_fft:SimpleViT simple_vit_with_hyper_connections:SimpleViT simple_vit_with_qk_norm:SimpleViT simple_vit_with_register_tokens:SimpleViT
simple_vit_with_relative_proj_pos_bias:SimpleViT simple_vit_with_sparse_gating:SimpleViTWithSparseGating simple_vit_with_specialized_cls:SimpleViT
simple_vit_with_value_residual:SimpleViT vit_for_small_dataset:ViT vit_with_decorr:ViT
"""
for entry in VIT_PYTORCH.split():
    of_vit_pytorch(*entry.split(":"))
of_vit_pytorch("vit_with_patch_dropout", "ViT", patch_dropout=0.25)
of_vit_pytorch("cait", "CaiT", layer_dropout=0.05)
of_vit_pytorch("cct", "CCT", img_size=32, embedding_dim=32, n_conv_layers=1, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=7)
of_vit_pytorch("cct_3d", "CCT", 3, 8, 32, 32, img_size=32, num_frames=8, embedding_dim=32, n_conv_layers=1, frame_kernel_size=3, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=7)
of_vit_pytorch("cross_vit", "CrossViT", sm_dim=16, lg_dim=32, sm_patch_size=8, sm_enc_depth=1, sm_enc_heads=2, sm_enc_mlp_dim=32, lg_patch_size=16, lg_enc_depth=1, lg_enc_heads=2, lg_enc_mlp_dim=32, cross_attn_depth=1, cross_attn_heads=2, depth=1)
of_vit_pytorch("crossformer", "CrossFormer", 3, 64, 64, dim=(32, 32, 32, 64), depth=(1, 1, 1, 1), global_window_size=(4, 2, 2, 1), local_window_size=2)
of_vit_pytorch("cvt", "CvT", s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=32, s1_heads=1, s2_heads=1, s3_heads=2, s2_depth=1, s3_depth=2)
of_vit_pytorch("jumbo_vit", "JumboViT", num_jumbo_cls=1, jumbo_cls_k=2, jumbo_ff_mult=2)
of_vit_pytorch("levit", "LeViT", 3, 64, 64, image_size=64, stages=2, dim=(32, 48), depth=1, heads=(2, 2), mlp_mult=2)
of_vit_pytorch("look_vit", "LookViT", patch_size=16, highres_patch_size=8)
of_vit_pytorch("looped_vit", "LoopedViT", image_size=32, patch_size=8, pre_loop_depth=1, post_loop_depth=1, num_looped_blocks=1, loop_depth=2)
of_vit_pytorch("max_vit", "MaxViT", 3, 64, 64, dim=16, depth=(1, 1), window_size=4, dim_conv_stem=16)
of_vit_pytorch("max_vit_with_registers", "MaxViT", 3, 64, 64, dim=16, depth=(1, 1), window_size=4, dim_conv_stem=16)
of_vit_pytorch("mobile_vit", "MobileViT", 3, 64, 64, image_size=(64, 64), dims=[16, 24, 32], channels=[8, 8, 16, 16, 16, 16, 16, 16, 24, 24, 32])
of_vit_pytorch("nest", "NesT", 3, 32, 32, patch_size=4, num_hierarchies=2, block_repeats=(1, 1))
of_vit_pytorch("pit", "PiT", depth=(1, 1))
of_vit_pytorch("regionvit", "RegionViT", 3, 64, 64, dim=(16, 16, 32, 32), depth=(1, 1, 1, 1), window_size=2)
of_vit_pytorch("scalable_vit", "ScalableViT", 3, 64, 64, dim=16, depth=(1, 1), heads=(1, 2), reduction_factor=(4, 2), window_size=(8, None))
of_vit_pytorch("sep_vit", "SepViT", 3, 56, 56, dim=16, depth=(1, 1), heads=(1, 2))
of_vit_pytorch("simple_flash_attn_vit", "SimpleViT", use_flash=True)
of_vit_pytorch("simple_uvit", "SimpleUViT", depth=3)
of_vit_pytorch("simple_vit_1d", "SimpleViT", 3, 64)
of_vit_pytorch("simple_vit_3d", "SimpleViT", *VIDEO)
of_vit_pytorch("t2t", "T2TViT", t2t_layers=((7, 4), (3, 2)), depth=2, heads=2, mlp_dim=64)
of_vit_pytorch("twins_svt", "TwinsSVT", 3, 64, 64, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=16, s4_emb_dim=32, s1_local_patch_size=4, s2_local_patch_size=4, s3_local_patch_size=2, s4_local_patch_size=2, s3_depth=1, s1_global_k=2, s2_global_k=2, s3_global_k=2, s4_global_k=1)
of_vit_pytorch("vit_3d", "ViT", *VIDEO)
of_vit_pytorch("vit_with_patch_merger", "ViT", patch_merge_layer=1, patch_merge_num_tokens=4)
of_vit_pytorch("vivit", "ViViT", *VIDEO)
of_vit_pytorch("xcit", "XCiT", layer_dropout=0.05)


def wrapped(name, wrap, base="test_vit", size=64, **options):
    """A way in which libraries and users change a model."""
    given = {"img_size": size, **options} if "vit" in base else options
    add(f"timm {base}, {name}", lambda: wrap(timm.create_model(base, num_classes=7, **given)), image(size))


def checkpointed(model):
    model.set_grad_checkpointing()
    return model


def with_dropout(model):
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.1
    return model


def of_vit(module, cls, keyword=None, **options):
    """Returns a module that holds a ViT."""
    vit = importlib.import_module("vit_pytorch.vit").ViT(**{k: VIT[k] for k in VIT_ARGS}, pool="mean")
    made = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)
    return made(**{keyword: vit}, **options) if keyword else made(vit, **options)


VIT_ARGS = ("image_size", "patch_size", "num_classes", "dim", "depth", "heads", "mlp_dim", "dim_head")
IMAGE = image(32)
add("vit-pytorch mae", lambda: of_vit("mae", "MAE", "encoder", decoder_dim=32, decoder_depth=1, decoder_heads=2, decoder_dim_head=16), IMAGE)
add("vit-pytorch extractor", lambda: of_vit("extractor", "Extractor"), IMAGE)
add("vit-pytorch recorder", lambda: of_vit("recorder", "Recorder"), IMAGE)


def navit():
    made = importlib.import_module("vit_pytorch.na_vit").NaViT
    return made(image_size=32, patch_size=8, num_classes=7, dim=32, depth=2, heads=2, mlp_dim=64, dim_head=16)


MODELS["vit-pytorch na_vit"] = lambda: (navit(), ([[torch.randn(3, 16, 32), torch.randn(3, 32, 16)], [torch.randn(3, 32, 32)]],), {})

wrapped("checkpointed", checkpointed)
wrapped("checkpointed", checkpointed, "test_resnet")
wrapped("features", lambda m: m, "test_resnet", features_only=True)
wrapped("features", lambda m: m, features_only=True)
wrapped("headless", lambda m: m.reset_classifier(0) or m, "test_convnext")
wrapped("split batch norm", timm.layers.convert_splitbn_model, "test_resnet")
wrapped("sync batch norm", torch.nn.SyncBatchNorm.convert_sync_batchnorm, "test_resnet")
wrapped("frozen batch norm", lambda m: timm.layers.freeze_batch_norm_2d(m) and m, "test_resnet")
add("timm test_convnext, bfloat16", lambda: timm.create_model("test_convnext", num_classes=7).bfloat16(), lambda: image(64)().bfloat16())
add("timm test_vit, channels last", lambda: timm.create_model("test_vit", img_size=64).to(memory_format=torch.channels_last),
    lambda: image(64)().to(memory_format=torch.channels_last))
add("timm test_resnet, channels last", lambda: timm.create_model("test_resnet").to(memory_format=torch.channels_last),
    lambda: image(64)().to(memory_format=torch.channels_last))
wrapped("drop path", with_dropout, drop_path_rate=0.3)
wrapped("drop block", with_dropout, "test_resnet", drop_block_rate=0.2)
add("timm fastvit_t8, reparametrised", lambda: timm.utils.reparameterize_model(timm.create_model("fastvit_t8", num_classes=7)), image(64))
add("torchvision feature extractor", lambda: torchvision.models.feature_extraction.create_feature_extractor(
    torchvision.models.resnet18(weights=None), {"layer2": "a", "layer4": "b"}), image(64))
