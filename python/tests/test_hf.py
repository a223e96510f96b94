"""Folders of transformers: programs from them, weights stage by stage, and folders from programs."""

import copy
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch
from command import COMMAND
from hf_folders import EXPERTS, FIVE, IDS, MODELS, folder_of, llama, refused, stored, transformers

import plumb
from plumb import hf


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_reads_its_own_tensors_and_the_saved_folder_is_the_one_read(name, tmp_path):
    model = folder_of(MODELS[name], tmp_path / "in")
    pipe = hf.load(tmp_path / "in", stages=3, batch=2, length=8)
    for s in range(3):
        before = pipe.weights.bytes_read
        stage = pipe.build_stage(s, torch.device("cpu")).submod
        own = sum(t.nbytes for t in stage.state_dict().values())
        assert pipe.weights.bytes_read - before <= 1.05 * own
        assert own < 0.8 * sum(p.nbytes for p in model.parameters())
    assert torch.equal(pipe(IDS)[0], model(IDS).logits)
    hf.save(pipe, tmp_path / "out")
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "in" / file).read_bytes()
    again = type(model).from_pretrained(tmp_path / "out").train()
    state = again.state_dict()
    assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())
    tied = again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)


def test_a_whole_program_trains_and_comes_back(tmp_path):
    model = folder_of(llama, tmp_path / "in", torch.bfloat16)
    program = hf.load(tmp_path / "in", batch=2, length=8)
    assert torch.equal(program(IDS).logits, model(IDS).logits)
    for module in (program, model):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(IDS).logits.float().pow(2).mean().backward()
        optimizer.step()
    hf.save(program, tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_another_dtype_is_the_written_folders_too(tmp_path):
    folder_of(llama, tmp_path / "in", torch.bfloat16)
    hf.save(hf.load(tmp_path / "in", batch=1, length=8, dtype="float32"), tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == torch.float32
    assert {t.dtype for t in stored(tmp_path / "out").values()} == {torch.float32}


def test_a_config_without_a_dtype_means_the_stored_one(tmp_path):
    model = folder_of(llama, tmp_path / "in", torch.bfloat16)
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in ("dtype", "torch_dtype")}))
    program = hf.load(tmp_path / "in", batch=2, length=8)
    assert torch.equal(program(IDS).logits, model(IDS).logits)
    hf.save(program, tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "in/config.json").read_bytes()
    assert {t.dtype for t in stored(tmp_path / "out").values()} == {torch.bfloat16}
    hf.save(hf.load(tmp_path / "in", batch=2, length=8, dtype="float32"), tmp_path / "wide")
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "wide", dtype="auto").dtype == torch.float32


def test_what_a_class_keeps_in_float32_is_float32(tmp_path):
    """T5's last products of each block overflow in float16."""
    config = transformers.T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, use_cache=False)
    folder_of(lambda: transformers.T5ForConditionalGeneration(config), tmp_path / "in", torch.float16)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "in", dtype="auto").eval()
    for how in (dict(), dict(fresh=0)):
        program = hf.import_folder(tmp_path / "in", batch=2, length=8, training=False, **how)
        dtypes = {name: p.dtype for name, p in program.named_parameters()}
        assert dtypes == {name: p.dtype for name, p in model.named_parameters()} and len(set(dtypes.values())) == 2
    program = hf.load(tmp_path / "in", batch=2, length=8, training=False)
    ids = dict(input_ids=IDS, decoder_input_ids=IDS)
    assert torch.equal(program(**ids).logits, model(**ids).logits)


@pytest.mark.skipif(not FIVE, reason="GPT-J of 4.57 is refused")
def test_buffers_that_no_folder_has_are_as_wide_as_from_pretrained_makes_them(tmp_path):
    """GPT-J's table of positions is made in torch's default dtype, in which narrow weights are made."""
    config = transformers.GPTJConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, n_positions=32, rotary_dim=4, use_cache=False)
    folder_of(lambda: transformers.GPTJForCausalLM(config), tmp_path, torch.bfloat16)
    model = transformers.GPTJForCausalLM.from_pretrained(tmp_path, dtype="auto")
    expected = {name: b for name, b in model.named_buffers() if name not in model.state_dict()}
    for how in (dict(), dict(fresh=0)):
        found = dict(hf.import_folder(tmp_path, batch=2, length=8, **how).named_buffers())
        assert expected and all(torch.equal(found[name], value) for name, value in expected.items())


def test_two_different_tensors_of_one_tied_weight_are_refused(tmp_path):
    from safetensors.torch import save_file

    folder_of(lambda: llama(tie_word_embeddings=True), tmp_path / "in")
    tensors = stored(tmp_path / "in")
    embedding = tensors["model.embed_tokens.weight"]
    for head in (embedding, embedding.half().float() + 1, embedding[:32].clone()):
        save_file({**tensors, "lm_head.weight": head.clone()}, tmp_path / "in/model.safetensors", {"format": "pt"})
        if head is embedding:
            hf.load(tmp_path / "in", batch=2, length=8)
            continue
        with pytest.raises(plumb.Error, match="'model.embed_tokens.weight' and 'lm_head.weight' are one tensor, and they differ") as caught:
            hf.load(tmp_path / "in", batch=2, length=8)
        assert caught.value.kind is plumb.ErrorKind.TensorMismatch and '"tie_word_embeddings": false' in caught.value.remedy


@pytest.mark.parametrize("given", [{"labels": torch.tensor([0, 1])}, {}], ids=["labels", "images"])
def test_what_a_library_remembers_has_values_after_an_import(tmp_path, given):
    """BEiT of transformers 5 keeps its table of positions in an lru_cache. With labels it also writes into its config, so that
    the capture tries a second call."""
    config = transformers.BeitConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        use_relative_position_bias=True, out_indices=[1],
    )  # fmt: skip
    model = transformers.BeitForImageClassification(config).eval()
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.2 if "relative" in name else 0.05)
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    given = {"pixel_values": images, **given}
    pipe = hf.load(tmp_path, stages=2, inputs=given, training=False)
    for s in range(2):
        pipe.build_stage(s, torch.device("cpu"))
    expected = model(**given).to_tuple()
    outputs = pipe(**given) if len(given) > 1 else pipe(images)
    outputs = outputs.values() if isinstance(outputs, dict) else outputs
    assert all(torch.equal(y, z) for y, z in zip(outputs, expected, strict=True))
    other = copy.deepcopy(model)
    assert torch.equal(other(**given).logits, expected[-1])


def test_a_program_without_weights_says_so_when_it_runs(tmp_path):
    folder_of(llama, tmp_path / "in")
    program = hf.import_folder(tmp_path / "in", tmp_path / "llama.pt2", batch=2, length=8)
    assert all(p.is_meta for p in program.parameters())
    assert (tmp_path / "llama.pt2").stat().st_size < 400_000
    for module in (program, plumb.load_pt2(tmp_path / "llama.pt2")):
        with pytest.raises(plumb.Error, match="'model.embed_tokens.weight' has a shape and no values") as caught:
            module(IDS)
        assert caught.value.kind is plumb.ErrorKind.InvalidState
        assert "weights" in caught.value.remedy
    torch.export.load(tmp_path / "llama.pt2")


def test_a_file_of_an_import_says_which_package_its_outputs_are_of(tmp_path):
    folder_of(llama, tmp_path / "in")
    hf.import_folder(tmp_path / "in", tmp_path / "llama.pt2", batch=2, length=8)
    code = (
        "import sys; sys.modules['transformers'] = None\nimport plumb\n"
        "try: plumb.load_pt2(sys.argv[1])\n"
        "except plumb.Error as error: print(error.kind, error.message, error.remedy)\n"
    )
    said = subprocess.run([sys.executable, "-c", code, tmp_path / "llama.pt2"], capture_output=True, text=True, check=True).stdout
    assert "ErrorKind.Unsupported" in said and "llama.pt2: its inputs or outputs hold a 'transformers.modeling_outputs." in said, said
    assert "import transformers.modeling_outputs first" in said and "the package transformers" in said


def test_fresh_weights_are_those_of_the_class_and_the_seed(tmp_path):
    llama().config.save_pretrained(tmp_path / "in")
    first = hf.import_folder(tmp_path / "in", tmp_path / "fresh.pt2", batch=2, length=8, fresh=5)
    torch.manual_seed(5)
    model = llama()
    assert all(torch.equal(p, dict(first.named_parameters())[n]) for n, p in model.named_parameters())
    assert torch.equal(plumb.load_pt2(tmp_path / "fresh.pt2")(IDS).logits, model(IDS).logits)
    hf.save(first, tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.skipif(not FIVE, reason="4.57 stores experts as it has them")
def test_experts_of_a_config_alone_are_stored_one_by_one(tmp_path):
    config = transformers.MixtralConfig(**EXPERTS, architectures=["MixtralForCausalLM"])
    config.save_pretrained(tmp_path / "in")
    hf.save(hf.import_folder(tmp_path / "in", batch=1, length=8, fresh=0), tmp_path / "out")
    assert any("experts.3.w2.weight" in name for name in stored(tmp_path / "out"))


def test_saving_refuses_what_would_be_another_model(tmp_path):
    folder_of(llama, tmp_path / "in")
    program = hf.load(tmp_path / "in", batch=2, length=8)
    with pytest.raises(plumb.Error, match="is not empty"):
        hf.save(program, tmp_path / "in")
    with pytest.raises(plumb.Error, match="was not imported"):
        hf.save(plumb.capture(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "out")
    with pytest.raises(TypeError, match="Linear"):
        hf.save(torch.nn.Linear(2, 2), tmp_path / "out")
    unread = hf.import_folder(tmp_path / "in", batch=2, length=8)
    hf.save(unread, tmp_path / "copy")  # what has no values is the folder's
    before, after = stored(tmp_path / "in"), stored(tmp_path / "copy")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    os.rename(tmp_path / "in", tmp_path / "gone")
    with pytest.raises(plumb.Error, match="has no values"):
        hf.save(unread, tmp_path / "out")


def test_a_tokenizer_that_cannot_be_copied_does_not_cost_the_weights(tmp_path):
    model = folder_of(llama, tmp_path / "in")
    program = hf.load(tmp_path / "in", batch=2, length=8)
    (tmp_path / "in" / "added_tokens.json").touch()
    os.truncate(tmp_path / "in" / "added_tokens.json", 1 << 40)  # all zeros, of no blocks
    with pytest.raises(plumb.Error, match="added_tokens.json: has 1099511627776 bytes"):
        hf.save(program, tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_every_file_of_a_tokenizer_that_transformers_names_is_kept(tmp_path):
    llama().config.save_pretrained(tmp_path / "in")
    names = {"additional_chat_templates/tools.jinja", "audio_tokenizer_config.json", "chat_template.jinja", "tokenizer_config.json"}
    for source in pathlib.Path(transformers.__file__).parent.glob("models/*/tokenization_*.py"):
        for table in re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", source.read_text(), re.DOTALL):
            names |= set(re.findall(r': "([^"]+)"', table))
    assert {"normalizer.json", "source.spm", "spm.model", "tokenizer.json", "vocab.json"} <= names
    (tmp_path / "in/additional_chat_templates").mkdir()
    for name in names:
        (tmp_path / "in" / name).write_text(name)
    hf.save(hf.import_folder(tmp_path / "in", batch=1, length=8, fresh=0), tmp_path / "out")
    assert not [name for name in names if not (tmp_path / "out" / name).is_file() or (tmp_path / "out" / name).read_text() != name]


def start_training(folder, stages, more):
    """Returns the command of a training with --save-hf, and its process once the first step is done."""
    folder_of(llama, folder / "in")
    hf.import_folder(folder / "in", folder / "llama.pt2", batch=2, length=8)
    (folder / "tokens.bin").write_bytes(bytes(range(64)) * 20)
    command = f"{COMMAND} train llama.pt2 --data tokens.bin --save-hf out --json --stages {stages} --microbatches {stages} {more}".split()
    process = subprocess.Popen(
        [*command, "--steps", "1000000"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    while '"step":' not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    return command, process


@pytest.mark.parametrize("stages", [1, 2])
def test_a_folder_that_can_no_longer_be_written_does_not_cost_the_file(stages, tmp_path):
    _, process = start_training(tmp_path, stages, "--save out.pt2")
    (tmp_path / "out").rmdir()
    (tmp_path / "out").touch()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode != 0 and "out/model" in said and "cannot be written: Not a directory" in said, said
    weights = plumb.load_pt2(tmp_path / "out.pt2").state_dict()
    before = stored(tmp_path / "in")
    assert not torch.equal(weights["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_folder_of_what_cannot_be_written_is_refused_before_the_training(tmp_path):
    folder_of(llama, tmp_path / "in")
    program = hf.load(tmp_path / "in", batch=2, length=8)
    with pytest.raises(plumb.Error, match="--save-hf /proc/self/out: cannot be written") as caught:
        plumb.Trainer(program, [(IDS, IDS)], steps=1, save_hf="/proc/self/out")
    assert caught.value.kind is plumb.ErrorKind.CannotWrite


@pytest.mark.parametrize("stages", [1, 2])
def test_a_training_that_is_stopped_and_goes_on_writes_its_folder_at_its_end(stages, tmp_path):
    command, process = start_training(tmp_path, stages, "--checkpoints run")
    process.send_signal(signal.SIGTERM)
    assert "--save-hf out is written at the end" in process.communicate(timeout=120)[0]
    assert process.returncode == 75 and not list((tmp_path / "out").iterdir())
    last = int(max((tmp_path / "run").glob("step-*")).name[5:])
    subprocess.run([*command, "--steps", str(last + 1)], cwd=tmp_path, check=True, capture_output=True)
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")


def test_a_folder_that_can_no_longer_be_written_does_not_cost_the_callers_model(tmp_path):
    folder_of(llama, tmp_path / "in")
    program = hf.load(tmp_path / "in", batch=2, length=8)

    class Hooks:
        def on_step(self, event):
            (tmp_path / "out").rmdir()
            (tmp_path / "out").touch()

    before = {name: p.detach().clone() for name, p in program.named_parameters()}
    trainer = plumb.Trainer(program, [(IDS, IDS)], steps=1, save_hf=tmp_path / "out", hooks=Hooks())
    with pytest.raises(plumb.Error, match="cannot be written") as caught:
        trainer.run()
    assert caught.value.kind is plumb.ErrorKind.CannotWrite
    assert not any(torch.equal(p, before[name]) for name, p in program.named_parameters())


@pytest.mark.parametrize("enter", [hf.load, hf.import_folder])
def test_a_trainer_saves_the_folder_of_a_graph_and_the_file_still_knows_it(enter, tmp_path):
    folder_of(llama, tmp_path / "in")
    program = enter(tmp_path / "in", batch=2, length=8)
    plumb.Trainer(program, [(IDS, IDS)], steps=1, save_hf=tmp_path / "out", save=tmp_path / "out.pt2").run()
    trained = stored(tmp_path / "out")
    assert not any(torch.equal(trained[name], value) for name, value in stored(tmp_path / "in").items())
    hf.save(plumb.load_pt2(tmp_path / "out.pt2"), tmp_path / "again")
    hf.save(program, tmp_path / "in place")
    for other in (stored(tmp_path / "again"), stored(tmp_path / "in place")):
        assert trained.keys() == other.keys() and all(torch.equal(trained[name], other[name]) for name in trained)


def test_inputs_that_do_not_follow_from_the_config_are_given(tmp_path):
    config = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, conv_dim=(8, 8),
                  conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
                  num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0)  # fmt: skip
    folder_of(lambda: transformers.HubertModel(transformers.HubertConfig(**config)), tmp_path / "in")
    assert "inputs=" in refused("'input_values'", tmp_path / "in").remedy
    masked = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    model = folder_of(llama, tmp_path / "llama")
    program = hf.load(tmp_path / "llama", inputs=masked)
    assert torch.equal(program(**masked).loss, model(**masked).loss)


def test_a_record_from_anywhere_is_checked():
    good = {"folder": "", "files": {}, "names": {}, "conversions": [], "graphs": []}
    hf.Weights(json.dumps(good), "")
    graph = "graph {\n  %x: f32[2] = placeholder \"x\"\n  output(%x)\n}\n"
    opens = graph.replace("output(%x)", '%y: f32[2] = aten::from_file("/etc/passwd", None, 2)\n  output(%y)')
    bad = [
        "[]", "{}", "{" * 1000, json.dumps({**good, "files": {"../x": ""}}), json.dumps({**good, "files": {".x": ""}}),
        json.dumps({**good, "names": {"a": 1}}), json.dumps({**good, "graphs": [{"load": "", "save": ""}]}),
        json.dumps({**good, "graphs": [{"load": opens, "save": graph}]}),
        json.dumps({**good, "conversions": [{"state": ["a"], "stored": ["b"], "graphs": 0}]}),
        json.dumps({**good, "graphs": [{"load": graph, "save": graph}], "conversions": [{"state": ["a"], "stored": ["b", "c"], "graphs": 0}]}),
        json.dumps({**good, "graphs": [{"load": graph, "save": graph}], "conversions": [{"state": [], "stored": [], "graphs": 0}]}),
    ]  # fmt: skip
    for text in bad:
        with pytest.raises(plumb.Error) as caught:
            hf.Weights(text, "")
        assert caught.value.kind is plumb.ErrorKind.BadFile, text


def test_a_model_that_takes_more_than_token_ids_says_how_it_is_given_them(tmp_path):
    part = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.CLIPConfig(
        text_config=dict(part, vocab_size=50, max_position_embeddings=8),
        vision_config=dict(part, image_size=8, patch_size=4),
        projection_dim=8,
    )
    config.architectures = ["CLIPModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(plumb.Error, match="CLIPModel cannot be captured") as caught:
        hf.load(tmp_path)
    assert "inputs={...} where the model takes more than 'input_ids'" in caught.value.remedy
