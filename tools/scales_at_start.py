#!/usr/bin/env python3
"""Standard deviations of a Llama, a Qwen MoE and a T5 of transformers at the start of training, plain and unit-scaled.

Run it from the repository's root with the package on the path; it prints a table of docs/transforms.md: of the activations that a
gradient flows through, of their gradients and of those of the parameters, how many have a standard deviation between 1/4 and 4. Then,
for the unit-scaled models, the causes of the others, as plumb.transforms.scale_causes says them, and the cause of each tensor.
"""

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import transformers  # noqa: E402
from tables import table  # noqa: E402

from plumb.transforms import scale_causes, track_scales, unit_scale  # noqa: E402

DECODER = dict(
    vocab_size=512, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512,
    max_position_embeddings=64,
)  # fmt: skip
T5 = dict(
    vocab_size=512,
    d_model=256,
    d_kv=64,
    d_ff=512,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
    pad_token_id=0,
    dropout_rate=0.0,
)
MODELS = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **DECODER, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, head_dim=64
        )
    ),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}


def within(std):
    return 0.25 <= std <= 4


def share(stds):
    return f"{sum(map(within, stds))} of {len(stds)}"


def row(name, transform):
    torch.manual_seed(0)
    model = track_scales(transform(MODELS[name]()))
    model(
        input_ids=torch.randint(2, 512, (4, 64)), labels=torch.randint(2, 512, (4, 64)), use_cache=False
    ).loss.backward()
    nodes = [n for n in model.scales_graph().nodes if "metrics" in n.meta and n.meta["metrics"].bwd is not None]
    metrics = [n.meta["metrics"] for n in nodes if n.op != "get_attr" and n.meta["metrics"].fwd.numel > 1]
    gradients = [p.grad.std().item() for p in model.parameters() if p.grad is not None]
    cells = [share([m.fwd.std for m in metrics]), share([m.bwd.std for m in metrics]), share(gradients)]
    return cells, scale_causes(model)


def causes_of(name, causes):
    """Each cause, and under it every tensor outside with its cause."""
    print(f"\n{name}:\n")
    for cause in causes:
        print(f"- {cause['text']}".rstrip())
    print("\n<!--")
    for cause in causes:
        for tensor in cause["tensors"]:
            print(f"{'gradient of ' if cause['gradients'] else ''}{tensor}: {cause['target']}: {cause['reason']}")
    print("-->")


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = {
        f"{name}{label}": row(name, transform)
        for name in MODELS
        for label, transform in ((", plain", lambda m: m), (", unit-scaled", unit_scale))
    }
    print(
        table(
            ["model", "activations", "gradients", "gradients of parameters"],
            [[name, *cells] for name, (cells, _) in rows.items()],
        )
    )
    for name, (_, causes) in rows.items():
        if name.endswith("unit-scaled"):
            causes_of(name, causes)


if __name__ == "__main__":
    main()
