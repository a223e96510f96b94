"""Small folders of transformers."""

import pytest
import torch

import plumb
from plumb import hf

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
FIVE = int(transformers.__version__.split(".")[0]) >= 5

SMALL = dict(vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32, max_position_embeddings=64)
EXPERTS = dict(SMALL, num_key_value_heads=2, num_experts_per_tok=2, num_local_experts=4)
IDS = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))


def llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False, **more))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, use_cache=False))


def gpt2():
    config = dict(n_layer=3, n_head=2, n_embd=16, vocab_size=64, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, use_cache=False))


MODELS = {"Llama": llama, "tied Llama": lambda: llama(tie_word_embeddings=True), "GPT-2": gpt2}
if FIVE:
    MODELS["Mixtral"] = mixtral


def folder_of(make, path, dtype=torch.float32):
    torch.manual_seed(0)
    model = make().to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return model.train()


def stored(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})
    return found


def refused(match, *args, **how):
    with pytest.raises(plumb.Error, match=match) as caught:
        hf.load(*args, **how)
    return caught.value
