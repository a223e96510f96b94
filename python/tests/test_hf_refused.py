"""Folders of transformers that cannot be read, and configs that ask for too much."""

import json
import os
import sys
import time

import pytest
from hf_folders import FIVE, SMALL, folder_of, llama, refused, stored

import plumb
from plumb import hf


def test_folders_that_cannot_be_read_are_refused_by_name(tmp_path):
    refused("holds no config.json", tmp_path)
    refused("holds no config.json", "meta-llama/Llama-3.2-1B")  # a name is not fetched
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "config.json")
    refused("config.json: is not a regular file", tmp_path / "pipe")
    folder = tmp_path / "in"
    folder_of(llama, folder)
    config = json.loads((folder / "config.json").read_text())

    def change(**more):
        (folder / "config.json").write_text(json.dumps({**config, **more}))

    change(intermediate_size=48)
    refused(r"'model.layers.0.mlp.\w+.weight' is \[\d+, \d+\] in the folder, and", folder, batch=1, length=8)
    change(num_hidden_layers=5)
    refused("no tensor for parameter 'model.layers.4", folder, batch=1, length=8)
    change(num_hidden_layers=2000)
    refused("has 2000 layers", folder)
    change(num_hidden_layers=-5)
    refused("has -5 layers", folder)
    change(num_hidden_layers="two")
    refused("'num_hidden_layers'.*int.*two" if FIVE else "interpreted as an integer", folder)
    change(hidden_act="none_such")
    refused("KeyError: 'none_such'", folder, batch=1, length=8)
    change(dtype="float8_e4m3fn", torch_dtype="float8_e4m3fn")
    assert "bfloat16" in refused("float8_e4m3fn' is no dtype of weights", folder, batch=1, length=8).remedy
    change(get_text_config=5)
    refused("config.json", folder, batch=1, length=8)
    change(architectures=5)  # names none, so that the kind's own counts
    assert len(hf.load(folder, batch=1, length=8).state_dict()) == len(stored(folder))
    (folder / "generation_config.json").touch()
    os.truncate(folder / "generation_config.json", 1 << 36)
    refused("generation_config.json: is larger than any config", folder, batch=1, length=8)
    os.remove(folder / "generation_config.json")
    change(quantization_config={"quant_method": "gptq", "bits": 4})
    refused("quantized", folder)
    (folder / "config.json").write_text("{" * 100_000)
    refused("cannot read it", folder)
    change(num_hidden_layers=3)  # fewer than the folder has
    assert any("are not the model's" in note for note in hf.load(folder, batch=1, length=8).notes)
    change()
    index = folder / "model.safetensors.index.json"
    index.touch()
    hf.load(folder, batch=1, length=8)  # from_pretrained passes it over beside model.safetensors, too
    os.rename(folder / "model.safetensors", folder / "other.safetensors")
    os.truncate(index, 1 << 36)
    refused("index.json: has 68719476736 bytes", folder, batch=1, length=8)
    os.remove(index)
    os.rename(folder / "other.safetensors", folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    refused("model.safetensors", folder, batch=1, length=8)
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    assert "save_pretrained" in refused("safetensors files alone", folder, batch=1, length=8).remedy


@pytest.mark.parametrize("read", [hf.load, hf.import_folder])
def test_a_folder_whose_name_is_no_utf8_is_refused_by_it(read, tmp_path):
    folder = tmp_path / os.fsdecode(b"in\xff")
    folder_of(llama, folder)
    with pytest.raises(plumb.Error, match=r"in\\udcff': its name is no UTF-8"):
        read(folder, batch=1, length=8)


BART = dict(model_type="bart", architectures=["BartForConditionalGeneration"], d_model=16, encoder_attention_heads=2)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (dict(SMALL, model_type="llama", num_hidden_layers=10**9), "'num_hidden_layers' is 1000000000"),
        (dict(SMALL, model_type="llama", num_labels=10**9), "'num_labels' is 1000000000"),
        (dict(BART, encoder_layers=10**30), "'encoder_layers' is 1000"),
        (dict(BART, decoder_layers=10**6, decoder_attention_heads=2), "more than 1000 parameters"),
        (dict(model_type="resnet", depths=[3, [10**9]]), "'depths' is 1000000000"),
        (dict(model_type="resnet", depths=[10**6], hidden_sizes=[8], embedding_size=8, architectures=["ResNetForImageClassification"]), "more than 1000 parameters"),
        (dict(SMALL, model_type="llama", hidden_size=10**12), "cannot build LlamaForCausalLM"),
        (dict(SMALL, model_type="mixtral", num_local_experts=10**9), "'num_local_experts' is 1000000000"),
        (dict(SMALL, model_type="llama", extra=json.loads("[" * 480 + "]" * 480)), "'extra' is nested more than 64 levels deep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_that_asks_for_ever_so_much_is_refused_at_once(config, says, tmp_path, monkeypatch):
    monkeypatch.setattr(hf._model, "_MOST_PARAMETERS", 1000)
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    refused(says, tmp_path, batch=1, length=8)
    assert time.process_time() - start < 120, "before so many modules are built"


def test_sizes_of_images_that_are_none_are_refused(tmp_path):
    config = dict(SMALL, model_type="vit", architectures=["ViTForImageClassification"], image_size=[8, 8, 8], patch_size=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(plumb.Error):
        hf.import_folder(tmp_path)


def test_code_of_a_folder_is_never_run(tmp_path):
    (tmp_path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    config = dict(model_type="evil", architectures=["EvilModel"], auto_map={"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused("config.json", tmp_path)
    config["model_type"] = "llama"
    for name in ("EvilModel", "__class__", "pipeline", "os.system"):
        config["architectures"] = [name]
        (tmp_path / "config.json").write_text(json.dumps({**config, **SMALL}))
        program = hf.import_folder(tmp_path, batch=1, length=8)
        assert "model.layers.0.self_attn.q_proj.weight" in dict(program.named_parameters())
    assert not (tmp_path / "ran").exists() and "modeling_evil" not in sys.modules
