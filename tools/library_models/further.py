"""Small models of four dozen more libraries, one or two of each: name -> function that makes (model, args, kwargs).

    pip install --no-deps --target SITE einops einx frozendict loguru torch-einops-utils hyper-connections axial-positional-embedding \
        local-attention product-key-memory colt5-attention rotary-embedding-torch assoc-scan tensordict pyvers orjson x-transformers \
        x-mlps-pytorch discrete-continuous-embed-readout ema-pytorch beartype polars polars-runtime-32 pyfaidx jaxtyping wadler-lindig \
        linear-operator opt-einsum opt-einsum-fx pyro-api tensorly tensorly-torch trampoline boltons torchdiffeq nir nirtorch skorch mne \
        decorator pooch lazy_loader narwhals scipy scikit-learn joblib threadpoolctl cloudpickle psutil accelerate timm \
        torchvision==0.28.0 ftfy pyarrow h5py lightning-utilities torchmetrics omegaconf \
        mixture-of-experts st-moe-pytorch soft-moe-pytorch routing-transformer reformer-pytorch sinkhorn-transformer titans-pytorch \
        memory-efficient-attention-pytorch block-recurrent-transformer-pytorch hourglass-transformer-pytorch tab-transformer-pytorch \
        lambda-networks x-clip denoising-diffusion-pytorch enformer-pytorch egnn-pytorch se3-transformer-pytorch e3nn gpytorch \
        pyro-ppl monai segmentation-models-pytorch facenet-pytorch lpips pytorch-msssim resnest lightly neuraloperator torch-harmonics \
        nnAudio julius demucs torchsde torchcde FrEIA geoopt pykan spikingjelly norse braindecode deepctr-torch \
        pytorch-crf litgpt loralib peft
    PYTHONPATH=SITE python tools/libraries_table.py further --check captured,tracked,transformed,cut2,saved
"""

import importlib

import torch
import torchvision_names  # noqa: F401 (before what imports torchvision)
from assorted import ROWS, First, floats, maker, words
from torch import nn


class Sde(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, m):
        super().__init__()
        self.drift, self.diffusion, self.integrate = nn.Linear(4, 4), nn.Linear(4, 4), m.sdeint
        self.register_buffer("times", torch.linspace(0, 1, 4))
        self.noise = m.BrownianInterval(0, 1, size=(ROWS, 4), entropy=0)

    def f(self, t, y):
        return torch.tanh(self.drift(y))

    def g(self, t, y):
        return torch.sigmoid(self.diffusion(y))

    def forward(self, x):
        return self.integrate(self, x, self.times, bm=self.noise, dt=0.25, method="euler")[-1]


class Cde(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.spline, self.coefficients = m.CubicSpline, m.hermite_cubic_coefficients_with_backward_differences
        self.integrate, self.start, self.field = m.cdeint, nn.Linear(3, 4), nn.Linear(4, 12)

    def forward(self, x):
        path = self.spline(self.coefficients(x))
        start = self.start(path.evaluate(path.interval[0]))
        field = lambda t, z: torch.tanh(self.field(z)).view(*z.shape[:-1], 4, 3)  # noqa: E731
        return self.integrate(path, field, start, path.interval, adjoint=False, method="rk4", options={"step_size": 1.0})[:, -1]


def invertible(m):
    flow = m.framework.SequenceINN(6)
    for _ in range(2):
        flow.append(m.modules.AllInOneBlock, subnet_constructor=lambda i, o: nn.Sequential(nn.Linear(i, 8), nn.ReLU(), nn.Linear(8, o)))
    return flow


class Spikes(nn.Module):
    def __init__(self, m):
        super().__init__()
        functional, layer, neuron = [importlib.import_module(f"{m.__name__}.{part}") for part in ("functional", "layer", "neuron")]
        self.reset = functional.reset_net
        self.net = nn.Sequential(layer.Linear(6, 8), neuron.LIFNode(), layer.Linear(8, 3), neuron.IFNode())

    def forward(self, x):
        self.reset(self.net)
        return sum(self.net(x) for _ in range(3))


class Tagger(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.scores, self.crf = nn.Linear(8, 5), m.CRF(5, batch_first=True)

    def forward(self, x, tags):
        return -self.crf(self.scores(x), tags)


class Compared(nn.Module):
    """A loss between images: of what a small net makes of one, to the image."""

    def __init__(self, loss):
        super().__init__()
        self.net, self.loss = nn.Conv2d(3, 3, 3, padding=1), loss

    def forward(self, x):
        x = x.sigmoid()
        return self.loss(self.net(x).sigmoid(), x)


def deep_kernel(m):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
            self.kernel = m.kernels.ScaleKernel(m.kernels.MaternKernel(nu=2.5, ard_num_dims=2))

        def forward(self, x):
            z = self.features(x)
            covariance = self.kernel(z).add_jitter(1e-2)
            return covariance.to_dense(), covariance.inv_quad_logdet(z[:, :1], logdet=True)[0]

    return Net()


def gaussian_process(m):
    class Process(m.models.ApproximateGP):
        def __init__(self):
            points = torch.randn(6, 3)
            distribution = m.variational.CholeskyVariationalDistribution(6)
            super().__init__(m.variational.VariationalStrategy(self, points, distribution))
            self.mean_module = m.means.ConstantMean()
            self.covar_module = m.kernels.ScaleKernel(m.kernels.RBFKernel())

        def forward(self, x):
            return m.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return First(run_once(Process(), floats(3)), lambda p, x: p(x).mean)


def run_once(model, *inputs):
    """Layers that initialize themselves on their first batch have done so."""
    model(*(x() for x in inputs))
    return model


def adapted(m, **options):
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return m.get_peft_model(net, m.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False, **options))


def poincare(m):
    class Ball(nn.Module):
        def __init__(self):
            super().__init__()
            self.ball = m.PoincareBall()
            self.points = m.ManifoldParameter(torch.randn(5, 4) * 0.1, manifold=self.ball)

        def forward(self, x):
            return self.ball.dist(self.ball.expmap0(x)[:, None], self.points)

    return Ball()




def clicks(m):
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat("a", 5, embedding_dim=4), SparseFeat("b", 4, embedding_dim=4), DenseFeat("c", 1)]
    return m.DeepFM(columns, columns, dnn_hidden_units=(8,))


def contrastive(m):
    return m.CLIP(
        dim_text=16, dim_image=16, dim_latent=16, num_text_tokens=20, text_enc_depth=1, text_seq_len=8, text_heads=2, text_dim_head=8,
        visual_enc_depth=1, visual_heads=2, visual_dim_head=8, visual_image_size=16, visual_patch_size=8, visual_patch_dropout=0.0,
    )  # fmt: skip




def litgpt(m, **options):
    return m.GPT(m.Config(block_size=16, n_layer=2, n_embd=16, vocab_size=20, padded_vocab_size=20, n_head=2, **options))


LLAMA = {
    "norm_class_name": "RMSNorm", "bias": False, "mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2,
    "intermediate_size": 32, "parallel_residual": False, "rotary_percentage": 1.0,
}  # fmt: skip
IMAGE, VOLUME, SOUND, WORDS = floats(3, 32, 32), floats(1, 16, 16), floats(64), words(16)
NETS = "monai.networks.nets"

MODELS = {
    "mixture-of-experts MoE": maker("mixture_of_experts", lambda m: m.MoE(dim=16, num_experts=4), floats(8, 16)),
    "st-moe-pytorch MoE": maker("st_moe_pytorch", lambda m: m.MoE(16, num_experts=4, gating_top_n=2), floats(8, 16)),
    "soft-moe-pytorch SoftMoE": maker("soft_moe_pytorch", lambda m: m.SoftMoE(16, seq_len=8, num_experts=4), floats(8, 16)),
    "routing-transformer": maker(
        "routing_transformer",
        lambda m: run_once(
            m.RoutingTransformerLM(
                num_tokens=20, dim=16, depth=2, max_seq_len=32, heads=2, dim_head=8, window_size=8, _register_kmeans_update=False
            ),
            words(32),
        ),
        words(32),
    ),
    "reformer-pytorch ReformerLM": maker(
        "reformer_pytorch",
        lambda m: m.ReformerLM(20, 16, 2, 32, heads=2, bucket_size=8, n_hashes=2, ff_chunks=2, causal=True),
        words(32),
    ),
    "sinkhorn-transformer": maker(
        "sinkhorn_transformer", lambda m: m.SinkhornTransformerLM(20, 16, 32, 2, heads=2, bucket_size=8), words(32)
    ),
    "memory-efficient-attention-pytorch Attention": maker(
        "memory_efficient_attention_pytorch",
        lambda m: m.Attention(dim=16, heads=2, dim_head=8, memory_efficient=True, q_bucket_size=4, k_bucket_size=4, causal=True),
        floats(8, 16),
    ),
    "memory-efficient-attention-pytorch FlashAttention": maker(
        "memory_efficient_attention_pytorch",
        lambda m: m.FlashAttention(dim=16, heads=2, dim_head=8, q_bucket_size=4, k_bucket_size=4, causal=True),
        floats(8, 16),
    ),
    "block-recurrent-transformer-pytorch": maker(
        "block_recurrent_transformer_pytorch",
        lambda m: m.BlockRecurrentTransformer(num_tokens=20, dim=16, depth=2, dim_head=8, heads=2, max_seq_len=16, block_width=8),
        WORDS,
    ),
    "hourglass-transformer-pytorch": maker(
        "hourglass_transformer_pytorch",
        lambda m: m.HourglassTransformerLM(
            num_tokens=20, dim=16, max_seq_len=16, depth=(1, 2, 1), shorten_factor=2, heads=2, dim_head=8
        ),
        WORDS,
    ),
    "titans-pytorch NeuralMemory": maker("titans_pytorch", lambda m: m.NeuralMemory(dim=16, chunk_size=4), floats(8, 16)),
    "titans-pytorch MemoryAsContextTransformer": maker(
        "titans_pytorch",
        lambda m: run_once(
            m.MemoryAsContextTransformer(
                num_tokens=20, dim=16, depth=2, segment_len=4, heads=2, dim_head=8, num_longterm_mem_tokens=2
            ),
            WORDS,
        ),
        WORDS,
    ),
    "tab-transformer-pytorch FTTransformer": maker(
        "tab_transformer_pytorch",
        lambda m: m.FTTransformer(categories=(5, 4), num_continuous=3, dim=8, depth=1, heads=2, dim_head=4),
        words(2, high=4),
        floats(3),
    ),
    "lambda-networks LambdaLayer": maker("lambda_networks", lambda m: m.LambdaLayer(16, dim_k=8, r=5, heads=2, dim_u=2), floats(16, 8, 8)),
    "x-clip CLIP": maker("x_clip", lambda m: First(contrastive(m), lambda c, t, i: c(t, i, return_loss=True)), words(8), floats(3, 16, 16)),
    "denoising-diffusion-pytorch Unet": maker(
        "denoising_diffusion_pytorch",
        lambda m: m.Unet(8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2),
        floats(3, 16, 16),
        lambda: torch.arange(ROWS),
    ),
    "denoising-diffusion-pytorch GaussianDiffusion": maker(
        "denoising_diffusion_pytorch",
        lambda m: m.GaussianDiffusion(m.Unet(8, dim_mults=(1, 2), attn_dim_head=8, attn_heads=2), image_size=16, timesteps=10),
        floats(3, 16, 16),
    ),
    "enformer-pytorch Enformer": maker(
        "enformer_pytorch",
        lambda m: m.Enformer.from_hparams(
            dim=24, depth=1, heads=2, output_heads={"human": 4}, target_length=4, num_downsamples=3, dim_divisible_by=4
        ),
        words(64, high=4),
    ),
    "egnn-pytorch EGNN_Network": maker(
        "egnn_pytorch", lambda m: m.EGNN_Network(depth=2, dim=8, num_nearest_neighbors=3), floats(6, 8), floats(6, 3)
    ),
    "se3-transformer-pytorch": maker(
        "se3_transformer_pytorch",
        lambda m: First(
            m.SE3Transformer(dim=4, heads=1, dim_head=4, depth=1, num_degrees=2, num_neighbors=3), lambda t, *x: t(*x, return_type=0)
        ),
        floats(6, 4),
        floats(6, 3),
    ),
    "e3nn FullyConnectedTensorProduct": maker(
        "e3nn.o3", lambda m: m.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "4x0e + 2x1o"), floats(10), floats(4)
    ),
    "e3nn SimpleNetwork": maker(
        "e3nn.nn.models.v2106.gate_points_networks",
        lambda m: First(
            m.SimpleNetwork("3x0e", "2x0e", 2.0, 3.0, 4.0, mul=2, layers=1, lmax=1),
            lambda net, pos, x: net({"pos": pos, "x": x, "batch": torch.zeros(len(pos), dtype=torch.long)}),
        ),
        floats(3),
        floats(3),
    ),
    "gpytorch deep kernel": maker("gpytorch", deep_kernel, floats(3)),
    "gpytorch ApproximateGP": maker("gpytorch", gaussian_process, floats(3)),
    "pyro-ppl AutoRegressiveNN": maker("pyro.nn", lambda m: m.AutoRegressiveNN(4, [8], permutation=torch.arange(4)), floats(4)),
    "monai UNet": maker(NETS, lambda m: m.UNet(2, 1, 2, (4, 8, 16), (2, 2), num_res_units=1), VOLUME),
    "monai SegResNet": maker(NETS, lambda m: m.SegResNet(2, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)), VOLUME),
    "monai UNETR": maker(
        NETS,
        lambda m: m.UNETR(1, 2, (32, 32), feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2, spatial_dims=2),
        floats(1, 32, 32),
    ),
    "monai DynUNet": maker(
        NETS,
        lambda m: m.DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16], deep_supervision=True, deep_supr_num=1),
        VOLUME,
    ),
    "monai DiffusionModelUNet": maker(
        NETS,
        lambda m: m.DiffusionModelUNet(
            2, 1, 1, num_res_blocks=1, channels=(8, 16), attention_levels=(False, True), norm_num_groups=4, num_head_channels=8
        ),
        VOLUME,
        lambda: torch.arange(ROWS),
    ),
    "segmentation-models-pytorch Unet": maker(
        "segmentation_models_pytorch",
        lambda m: m.Unet("resnet18", encoder_depth=3, encoder_weights=None, decoder_channels=(16, 8, 8)),
        IMAGE,
    ),
    "segmentation-models-pytorch Segformer": maker(
        "segmentation_models_pytorch", lambda m: m.Segformer("resnet18", encoder_weights=None, decoder_segmentation_channels=16), IMAGE
    ),
    "facenet-pytorch PNet": maker("facenet_pytorch.models.mtcnn", lambda m: m.PNet(pretrained=False), IMAGE),
    "lpips LPIPS": maker("lpips", lambda m: Compared(m.LPIPS(pretrained=False, pnet_rand=True, net="squeeze", verbose=False)), IMAGE),
    "pytorch-msssim SSIM": maker("pytorch_msssim", lambda m: Compared(m.SSIM(data_range=1.0, channel=3)), IMAGE),
    "resnest ResNeSt": maker(
        "resnest.torch.resnet",
        lambda m: m.ResNet(
            m.Bottleneck, [1, 1, 1, 1], radix=2, bottleneck_width=8, num_classes=5, deep_stem=True, stem_width=8, avg_down=True
        ),
        IMAGE,
    ),
    "lightly heads": maker(
        "lightly.models.modules", lambda m: nn.Sequential(m.SimSiamProjectionHead(8, 16, 8), m.SimSiamPredictionHead(8, 4, 8)), floats(8)
    ),
    "neuraloperator FNO": maker("neuralop.models", lambda m: m.FNO((4, 4), 1, 1, 8, n_layers=2), VOLUME),
    "torch-harmonics RealSHT": maker("torch_harmonics", lambda m: nn.Sequential(nn.Linear(16, 16), First(m.RealSHT(8, 16), lambda t, x: t(x).abs())), floats(8, 16)),
    "nnAudio MelSpectrogram": maker(
        "nnAudio.features", lambda m: nn.Sequential(m.MelSpectrogram(n_fft=32, n_mels=8, hop_length=8, verbose=False, trainable_STFT=True)), SOUND
    ),
    "julius LowPassFilter": maker("julius", lambda m: nn.Sequential(nn.Linear(64, 64), m.LowPassFilter(0.2), nn.Linear(64, 4)), SOUND),
    "julius LowPassFilter by FFT": maker(
        "julius", lambda m: nn.Sequential(nn.Linear(64, 64), m.LowPassFilter(0.2, fft=True), nn.Linear(64, 4)), SOUND
    ),
    "julius ResampleFrac": maker("julius", lambda m: nn.Sequential(nn.Linear(64, 64), m.ResampleFrac(4, 3)), SOUND),
    "demucs Demucs": maker(
        "demucs.demucs",
        lambda m: m.Demucs(
            ["a", "b"], audio_channels=1, channels=4, depth=3, norm_starts=1, norm_groups=2, dconv_attn=2, dconv_lstm=2, resample=False
        ),
        floats(1, 256),
    ),
    "demucs HTDemucs": maker(
        "demucs.htdemucs",
        lambda m: m.HTDemucs(["a", "b"], audio_channels=1, channels=8, nfft=512, depth=3, t_layers=2, t_heads=2, use_train_segment=False),
        floats(1, 2048),
    ),
    "torchsde sdeint": maker("torchsde", Sde, floats(4)),
    "torchcde cdeint": maker("torchcde", Cde, floats(6, 3)),
    "FrEIA AllInOneBlock": maker("FrEIA", invertible, floats(6)),
    "geoopt PoincareBall": maker("geoopt", poincare, floats(4)),
    "pykan KAN": maker("kan", lambda m: m.KAN(width=[4, 3, 2], grid=3, k=2, auto_save=False, symbolic_enabled=False), floats(4)),
    "spikingjelly LIFNode": maker("spikingjelly.activation_based", Spikes, floats(6)),
    "norse LIFBoxCell": maker("norse.torch", lambda m: First(m.SequentialState(nn.Linear(6, 8), m.LIFBoxCell(), nn.Linear(8, 3)), lambda n, x: n(x)[0]), floats(6)),
    "braindecode EEGNet": maker("braindecode.models", lambda m: m.EEGNet(n_chans=4, n_outputs=2, n_times=64), floats(4, 64)),
    "deepctr-torch DeepFM": maker("deepctr_torch.models", clicks, lambda: torch.cat([torch.randint(0, 4, (ROWS, 2)).float(), torch.randn(ROWS, 1)], 1)),
    "pytorch-crf CRF": maker("torchcrf", Tagger, floats(6, 8), words(6, high=5)),
    "litgpt GPT": maker("litgpt", lambda m: litgpt(m, n_query_groups=1), WORDS),
    "litgpt Llama, mixture": maker("litgpt", lambda m: litgpt(m, **LLAMA), WORDS),
    "loralib": maker(
        "loralib", lambda m: nn.Sequential(m.Linear(6, 16, r=4), nn.ReLU(), m.MergedLinear(16, 6, r=2, enable_lora=[True, False])), floats(6)
    ),
    "peft LoRA": maker("peft", adapted, floats(6)),
    "peft DoRA": maker("peft", lambda m: adapted(m, use_dora=True), floats(6)),
}
