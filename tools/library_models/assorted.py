"""Small models of two dozen libraries, one or two of each: name -> function that makes (model, args, kwargs).

    pip install --no-deps --target SITE einops einx frozendict loguru torch-einops-utils hyper-connections torchdiffeq zuko \
        pytorch-tabnet mambapy vector-quantize-pytorch local-attention linformer linear-attention-transformer axial-positional-embedding \
        product-key-memory performer-pytorch nystrom-attention perceiver-pytorch rtdl_revisiting_models \
        rtdl_num_embeddings nflows snntorch entmax efficientnet_pytorch ncps conformer pytorch-tcn kornia torch-geometric normflows \
        rotary-embedding-torch colt5-attention scipy xxhash psutil aiohttp kornia_rs
    PYTHONPATH=SITE python tools/libraries_table.py assorted --check captured,tracked,transformed,cut2,saved
"""

import importlib

import torch
from torch import nn

ROWS = 4
MODELS = {}


def maker(module, make, *inputs):
    """Returns a function that makes (model, args, kwargs). `make` takes the library's module, which is imported only then."""
    return lambda: (make(importlib.import_module(module)), tuple(x() for x in inputs), {})


def add(name, *made_of):
    MODELS[name] = maker(*made_of)


def floats(*shape):
    return lambda: torch.randn(ROWS, *shape)


def words(*shape, high=20):
    return lambda: torch.randint(0, high, (ROWS, *shape))


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, t, y):
        return self.layers(y) * torch.cos(t)


class Ode(nn.Module):
    def __init__(self, integrate, **options):
        super().__init__()
        self.field, self.integrate, self.options = Field(), integrate, options
        self.register_buffer("times", torch.linspace(0, 1, 4))

    def forward(self, x):
        return self.integrate(self.field, x, self.times, **self.options)[-1]


class LogProb(nn.Module):
    """A flow as a model: the log probability of its input."""

    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x, *context):
        flow = self.flow if hasattr(self.flow, "log_prob") else self.flow(*context)
        return flow.log_prob(x)


class First(nn.Module):
    """The first output of a model that returns what no graph shows."""

    def __init__(self, model, call=lambda model, *x: model(*x)):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *x):
        return self.call(self.model, *x)


class OnGraph(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x):
        return self.model(x, self.edges)


add("torchdiffeq odeint, rk4", "torchdiffeq", lambda m: Ode(m.odeint, method="rk4"), floats(4))
add("torchdiffeq odeint_adjoint, rk4", "torchdiffeq", lambda m: Ode(m.odeint_adjoint, method="rk4"), floats(4))
add("torchdiffeq odeint, dopri5", "torchdiffeq", lambda m: Ode(m.odeint), floats(4))
add("zuko NSF", "zuko", lambda m: LogProb(m.flows.NSF(4, transforms=2, hidden_features=(16,))), floats(4))
add(
    "zuko MAF, context",
    "zuko",
    lambda m: LogProb(m.flows.MAF(4, 3, transforms=2, hidden_features=(16,))),
    floats(4),
    floats(3),
)
add("zuko CNF", "zuko", lambda m: LogProb(m.flows.CNF(4, hidden_features=(16,))), floats(4))
add("zuko GMM", "zuko", lambda m: LogProb(m.mixtures.GMM(4, components=3)), floats(4))
add(
    "nflows MaskedAutoregressiveFlow",
    "nflows.flows.autoregressive",
    lambda m: LogProb(m.MaskedAutoregressiveFlow(4, 8, 2, 1, batch_norm_between_layers=False)),
    floats(4),
)
add("nflows SimpleRealNVP", "nflows.flows.realnvp", lambda m: LogProb(m.SimpleRealNVP(4, 8, 2, 1)), floats(4))
add(
    "pytorch-tabnet TabNet",
    "pytorch_tabnet.tab_network",
    lambda m: First(
        m.TabNet(6, 3, n_d=4, n_a=4, n_steps=2, virtual_batch_size=2, group_attention_matrix=torch.eye(6)),
        lambda t, x: t(x)[0],
    ),
    floats(6),
)
add("mambapy Mamba", "mambapy.mamba", lambda m: m.Mamba(m.MambaConfig(d_model=8, n_layers=2, d_state=4)), floats(8, 8))
add(
    "mambapy Mamba, sequential",
    "mambapy.mamba",
    lambda m: m.Mamba(m.MambaConfig(d_model=8, n_layers=2, d_state=4, pscan=False)),
    floats(6, 8),
)
add(
    "vector-quantize-pytorch VectorQuantize", "vector_quantize_pytorch", lambda m: m.VectorQuantize(8, 16), floats(6, 8)
)
add(
    "vector-quantize-pytorch ResidualVQ",
    "vector_quantize_pytorch",
    lambda m: m.ResidualVQ(dim=8, codebook_size=16, num_quantizers=2),
    floats(6, 8),
)
add(
    "vector-quantize-pytorch FSQ",
    "vector_quantize_pytorch",
    lambda m: nn.Sequential(nn.Linear(3, 3), m.FSQ(levels=[8, 5, 5])),
    floats(6, 3),
)
add(
    "vector-quantize-pytorch LFQ",
    "vector_quantize_pytorch",
    lambda m: nn.Sequential(nn.Linear(4, 4), m.LFQ(codebook_size=16, dim=4)),
    floats(6, 4),
)
add(
    "linear-attention-transformer",
    "linear_attention_transformer",
    lambda m: m.LinearAttentionTransformerLM(
        20, 16, 2, 16, heads=2, dim_head=8, causal=False, local_attn_window_size=4
    ),
    words(16),
)
add(
    "performer-pytorch Performer",
    "performer_pytorch",
    lambda m: m.Performer(dim=16, depth=2, heads=2, dim_head=8, nb_features=12),
    floats(8, 16),
)
add(
    "nystrom-attention Nystromformer",
    "nystrom_attention",
    lambda m: m.Nystromformer(dim=16, depth=2, heads=2, dim_head=8, num_landmarks=4),
    floats(8, 16),
)
add(
    "perceiver-pytorch Perceiver",
    "perceiver_pytorch",
    lambda m: m.Perceiver(
        num_freq_bands=2, depth=2, max_freq=4, num_latents=4, latent_dim=16, latent_heads=2, cross_dim_head=8, latent_dim_head=8,
        num_classes=5,
    ),
    floats(8, 8, 3),
)  # fmt: skip
add(
    "rtdl_revisiting_models FTTransformer",
    "rtdl_revisiting_models",
    lambda m: m.FTTransformer(
        n_cont_features=3, cat_cardinalities=[5, 4], d_out=1, n_blocks=2, d_block=16, attention_n_heads=2, attention_dropout=0.0,
        ffn_d_hidden=None, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    ),
    floats(3),
    words(2, high=4),
)  # fmt: skip
add(
    "rtdl_num_embeddings PeriodicEmbeddings",
    "rtdl_num_embeddings",
    lambda m: nn.Sequential(m.PeriodicEmbeddings(4, 8, lite=False), nn.Flatten(), nn.Linear(32, 2)),
    floats(4),
)
add(
    "snntorch Leaky",
    "snntorch",
    lambda m: First(m.Leaky(beta=0.9), lambda leaky, x: leaky(x, torch.zeros_like(x))),
    floats(6),
)
add(
    "snntorch Leaky, hidden",
    "snntorch",
    lambda m: nn.Sequential(nn.Linear(6, 6), m.Leaky(beta=0.9, init_hidden=True)),
    floats(6),
)
add("entmax Entmax15", "entmax", lambda m: nn.Sequential(nn.Linear(6, 6), m.Entmax15(-1), nn.Linear(6, 2)), floats(6))
add("entmax Sparsemax", "entmax", lambda m: nn.Sequential(nn.Linear(6, 6), m.Sparsemax(-1), nn.Linear(6, 2)), floats(6))
add(
    "efficientnet_pytorch EfficientNet b0",
    "efficientnet_pytorch",
    lambda m: m.EfficientNet.from_name("efficientnet-b0", num_classes=5, drop_connect_rate=0.0),
    floats(3, 32, 32),
)
add("ncps LTC", "ncps.torch", lambda m: First(m.LTC(4, 6), lambda ltc, x: ltc(x)[0]), floats(5, 4))
add("ncps CfC", "ncps.torch", lambda m: First(m.CfC(4, 6), lambda cfc, x: cfc(x)[0]), floats(5, 4))
add(
    "conformer Conformer",
    "conformer",
    lambda m: m.Conformer(16, depth=2, dim_head=8, heads=2, conv_kernel_size=5),
    floats(8, 16),
)
add("pytorch-tcn TCN", "pytorch_tcn", lambda m: m.TCN(4, [8, 8], kernel_size=3, dropout=0.0), floats(4, 12))
add("torch-geometric GCN", "torch_geometric.nn", lambda m: OnGraph(m.GCN(6, 8, 2, 3)), floats(6))
add("torch-geometric GAT", "torch_geometric.nn", lambda m: OnGraph(m.GAT(6, 8, 2, 3)), floats(6))
add("torch-geometric GIN", "torch_geometric.nn", lambda m: OnGraph(m.GIN(6, 8, 2, 3)), floats(6))
add(
    "colt5-attention ConditionalRoutedFeedForward",
    "colt5_attention",
    lambda m: m.ConditionalRoutedFeedForward(16, num_heavy_tokens=4),
    floats(8, 16),
)
add(
    "kornia TinyViT",
    "kornia.contrib",
    lambda m: m.TinyViT(
        img_size=64,
        num_classes=5,
        embed_dims=(16, 16, 32, 32),
        depths=(1, 1, 1, 1),
        num_heads=(2, 2, 2, 2),
        window_sizes=(4, 4, 4, 2),
    ),
    floats(3, 64, 64),
)
