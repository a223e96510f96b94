"""Models cut by `pipeline` under schedules, over real processes, beside the whole model in one."""

import pytest
import ranks
import torch
from pipelines import SINGLE, V, cross_entropy
from plumb.pipelining import SplitPoint, pipeline
from plumb.pipelining.schedules import get_schedule_class
from torch import nn

MICROBATCHES = 4


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_head=2, n_embd=16, vocab_size=50, n_positions=32, use_cache=False, tie_word_embeddings=False
    )
    return GPT2LMHeadModel(config).eval(), "transformer.h"


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=50,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval(), "model.layers"


class Gated(nn.Module):
    """Cut at part 1, the half of a tensor goes to the next stage: SiLU rounds otherwise where rows follow each other."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.parts = nn.ModuleList([nn.Linear(16, 40), nn.SiLU(), nn.Linear(20, 16), nn.Linear(16, 50)])

    def forward(self, input_ids):
        from transformers.modeling_outputs import CausalLMOutput

        value, gate = self.parts[0](self.table(input_ids)).chunk(2, -1)
        return CausalLMOutput(logits=self.parts[3](self.parts[2](value * self.parts[1](gate))))


def gated():
    torch.manual_seed(0)
    return Gated(), "parts"


MODELS = {"gpt2": gpt2, "llama": llama, "gated": gated}


def ids(rows):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 50, (rows, 8), generator=generator), torch.randint(0, 50, (rows, 8), generator=generator)


def work(rank, size, cases):
    found = {}
    for model_name, name in cases:
        model, layers = MODELS[model_name]()
        tokens, labels = ids(8)
        count = size if name in SINGLE else 2 * size
        cuts = {f"{layers}.{i * 4 // count}": SplitPoint.BEGINNING for i in range(1, count)}
        pipe = pipeline(model, (), {"input_ids": tokens[:2]}, split_spec=cuts)
        assert pipe.num_stages == count
        here = [rank] if name in SINGLE else [rank, 2 * size - 1 - rank] if name in V else [rank, rank + size]
        stages = [pipe.build_stage(i, torch.device("cpu")) for i in here]
        schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, MICROBATCHES, cross_entropy)
        losses = []
        # Masks and rotary tables are made from the tokens on whichever stage needs them.
        out = schedule.step(input_ids=tokens, target=labels if count - 1 in here else None, losses=losses)
        grads = {n: p.grad for i in here for n, p in pipe.get_stage_module(i).named_parameters()}
        found[model_name, name] = out, losses, grads
    return found


def reference(model_name):
    model, _ = MODELS[model_name]()
    tokens, labels = ids(8)
    outs, losses = [], []
    for mb in range(MICROBATCHES):
        outs.append(model(input_ids=tokens.chunk(MICROBATCHES)[mb]).logits)
        losses.append(cross_entropy(outs[-1], labels.chunk(MICROBATCHES)[mb]))
        losses[-1].backward()
    return torch.cat(outs), losses, {n: p.grad / MICROBATCHES for n, p in model.named_parameters()}


def check(results, model_name, names):
    outs, losses, grads = reference(model_name)
    for name in names:
        seen = set()
        for found in results:
            out, own_losses, own = found[model_name, name]
            assert out is None or torch.equal(out, outs)
            assert all(torch.equal(a, b) for a, b in zip(own_losses, losses))
            for n, grad in own.items():
                seen.add(n)
                assert torch.equal(grad, grads[n]), (name, n)
        assert seen == grads.keys()


TWO = [(model, name) for model in MODELS for name in ("GPipe", "1F1B", "ZBH1", "ZBVZeroBubble", "DualPipeV")]
FOUR = [(model, name) for model in MODELS for name in ("1F1B", "ZBH2")]


@pytest.mark.parametrize("size, cases", [(2, TWO), (4, FOUR)])
def test_processes_equal_the_whole_model(size, cases):
    results = ranks.run(work, size, cases)
    for model in MODELS:
        check(results, model, [name for m, name in cases if m == model])
