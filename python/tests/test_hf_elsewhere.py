"""A folder's config runs no code, fetches nothing, and names nothing that lies elsewhere. An importer writes inside
alone."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import plumb
from plumb import hf

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SMALL = dict(
    model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, max_position_embeddings=64,
)  # fmt: skip

# The last transformers for Python 3.10 (5.20) refuses attention of a package that is not there by itself.
REFUSES_KERNELS = sys.version_info < (3, 11)
# Both versions that folders are read with: the one that is installed, and one in a folder of its own.
OTHER = os.environ.get("PLUMB_OTHER_TRANSFORMERS", "")
VERSIONS = [
    pytest.param("", id=transformers.__version__),
    pytest.param(
        OTHER,
        id="other",
        marks=pytest.mark.skipif(
            not OTHER,
            reason="PLUMB_OTHER_TRANSFORMERS names no folder of pip install --no-deps --target FOLDER 'transformers==4.57.*' "
            "'tokenizers==0.22.*' 'huggingface_hub==0.36.*' requests tqdm",
        ),
    ),
]

# Runs in a process of its own. `names`: config.json as it is; `guard`: nothing reads the names before transformers does.
EVERY_TYPE = r"""
import json, os, socket, sys, warnings
warnings.simplefilter("ignore")
which, every, here = sys.argv[1], int(sys.argv[2]), os.getcwd()
os.environ["HF_HOME"] = here + "/cache"
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
import plumb
from plumb import hf
from plumb.hf import _elsewhere, _model

def bad_hook(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        open(here + "/connected", "a").write(f"{event} {args}\n")
        raise OSError("no network")

transformers.logging.set_verbosity_error()
os.makedirs("model/bone")
open("model/bone/config.json", "w").write(json.dumps({"model_type": "bone", "auto_map": {"AutoConfig": "bone.Bone", "AutoBackbone": "bone.Bone"}}))
open("model/bone/bone.py", "w").write("open('" + here + "/ran', 'w').close()\nclass Bone: pass\n")
os.makedirs("folder")
with _elsewhere.only_folder("folder", {}):
    pass
sys.addaudithook(bad_hook)
_model._MOST_PARAMETERS = 400  # backbones are made first
transformers.PreTrainedModel.init_weights = lambda self: None  # values are nobody's concern here
for name in ("kaiming_uniform_", "uniform_", "normal_"):
    setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
REMOTE = {"trust_remote_code": True}
BAD = {
    "path, pretrained": {"backbone": "model/bone", "backbone_kwargs": REMOTE, "use_timm_backbone": False, "use_pretrained_backbone": True},
    "hub": {"backbone": "someone/bone", "use_timm_backbone": False},
    "kernel": {"attn_implementation": "someone/kernel"},
}
tried = built = refused = 0
kernels = []  # kinds that were refused for a kernel
for kind in sorted(CONFIG_MAPPING_NAMES)[::every]:
    for name, keys in BAD.items():
        for nested in (False, True) if which == "names" else (False,):
            values = {"model_type": kind, **({"backbone_config": {"model_type": "resnet", **keys}, "text_config": keys} if nested else keys)}
            open("folder/config.json", "w").write(json.dumps(values))
            tried += 1
            if which == "names":
                try:
                    hf.import_folder("folder", batch=1, length=8)
                except plumb.Error as error:
                    said = str(error)
                    assert "lies elsewhere" in said and any(f"'{key}'" in said or f".{key}'" in said for key in ("backbone", "backbone_kwargs.trust_remote_code", "attn_implementation")), (kind, name, said)
                    refused += 1
                    continue
                raise SystemExit(f"{kind}: {name} was taken")
            try:
                with _elsewhere.only_folder("folder", values):
                    config = _model.read_config("folder")
                    config._attn_implementation = keys.get("attn_implementation")
                    if "attn_implementation" in keys or hasattr(config, "backbone_config") or hasattr(config, "backbone"):
                        built += 1
                        try:
                            model_class = _model.model_class(config)
                        except plumb.Error:
                            model_class = transformers.AutoModel._model_mapping[type(config)]
                            model_class = model_class[0] if isinstance(model_class, tuple) else model_class
                        with _model._parameters_on_meta(), torch.device("meta"):
                            model_class._from_config(config)
            except plumb.Error as error:
                refused += "nothing is fetched, and no code of a folder is run" in str(error)
                if "a kernel" in str(error):
                    kernels.append(kind)
            except Exception:
                pass  # as transformers says
print(json.dumps({"tried": tried, "built": built, "refused": refused, "types": len(CONFIG_MAPPING_NAMES), "kernels": len(set(kernels))}))
"""

# As much of the package `kernels` as transformers imports. What it would fetch leaves a mark.
KERNELS = r"""
import os

class Anything:
    def __init__(self, *args, **kwargs): pass
    def __or__(self, other): return self

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything

class Mode:
    INFERENCE = TRAINING = TORCH_COMPILE = Anything()

def use_kernel_forward_from_hub(name): return lambda found: found
def use_kernelized_func(*names): return lambda found: found
def get_kernel(*args, **kwargs): open(os.environ["KERNEL_MARK"], "a").write(f"{args}\n"); return Anything()
def replace_kernel_forward_from_hub(*args, **kwargs): pass
def register_kernel_mapping(*args, **kwargs): pass
"""


def run_python(text, arguments, cwd, other=""):
    packages = cwd / "packages"
    about = packages / "kernels-0.18.2.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    (packages / "kernels.py").write_text(KERNELS)
    path = [os.fspath(packages), *([other] if other else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, str(pathlib.Path(plumb.__file__).parents[1])])}
    env["KERNEL_MARK"] = os.fspath(cwd / "fetched")
    env.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("other", VERSIONS)
@pytest.mark.parametrize("which", ["names", "guard"])
def test_no_type_of_model_runs_code_or_fetches_what_its_config_names(which, other, tmp_path):
    every = 1 if os.environ.get("PLUMB_LONG_TESTS") or which == "names" else 4  # a type's model takes a second
    found = json.loads(run_python(EVERY_TYPE, [which, str(every)], tmp_path, other).splitlines()[-1])
    assert not (tmp_path / "ran").exists(), "code of a folder was run"
    assert not (tmp_path / "connected").exists(), (tmp_path / "connected").read_text()
    assert not (tmp_path / "fetched").exists(), (tmp_path / "fetched").read_text()
    assert which == "names" or REFUSES_KERNELS or found["kernels"] > 50 // every, found
    assert found["tried"] > 800 // every and found["refused"] > 20 // every, found
    assert which == "guard" or found["refused"] == found["tried"], found


def folder_of(path, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SMALL, **config}))
    return path


IMPORT = """
import os
os.environ["HF_HOME"] = "cache"
import plumb
from plumb import hf
try:
    hf.import_folder("folder", batch=1, length=8)
except plumb.Error as error:
    print(error.kind, error.message)
"""


@pytest.mark.parametrize("other", VERSIONS)
def test_attention_of_a_package_that_is_not_there_is_not_fetched_from_the_hub_instead(other, tmp_path):
    folder_of(tmp_path / "folder", attn_implementation="flash_attention_2")
    said = run_python(IMPORT, [], tmp_path, other)
    assert not (tmp_path / "fetched").exists(), (tmp_path / "fetched").read_text()
    if said or not other:  # 4.57 builds the model with the attention that is there
        own = REFUSES_KERNELS and "the package for FlashAttention2 doesn't seem to be installed" in said
        assert own or ("a kernel, 'kernels-community/flash-attn" in said and "nothing is fetched" in said), said


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            dict(attn_implementation="someone/kernel"),
            "'attn_implementation' names 'someone/kernel', a kernel that lies elsewhere",
        ),
        (dict(_attn_implementation="paged|someone/kernel"), "'_attn_implementation' names 'paged|someone/kernel'"),
        (dict(text_config={"attn_implementation": {"": "someone/kernel"}}), "'text_config.attn_implementation.' names"),
        (dict(backbone="resnet50"), "'backbone' names 'resnet50', a model that lies elsewhere"),
        (dict(vision_config=[{"backbone_config": "/a/b"}]), "'vision_config.backbone_config' names '/a/b'"),
        (dict(backbone="hf_hub:a/b", use_timm_backbone=True), "'backbone' names 'hf_hub:a/b'"),
        (dict(detector={"trust_remote_code": True}), "'detector.trust_remote_code' is true"),
        (dict(text_config={"quantization_config": {"quant_method": "gptq"}}), "quantized"),
        (dict(transformers_weights="other.safetensors"), "'transformers_weights' names 'other.safetensors'"),
    ],
)
def test_a_config_that_names_what_lies_elsewhere_is_refused_by_the_name_of_the_key(config, says, tmp_path):
    with pytest.raises(plumb.Error) as caught:
        hf.import_folder(folder_of(tmp_path / "in", **config), batch=1, length=8)
    assert says in caught.value.message and caught.value.remedy


def test_names_of_timms_own_models_are_no_names_of_what_lies_elsewhere():
    from plumb.hf._elsewhere import refuse_names

    refuse_names("config.json", {"backbone": "resnet50.a1_in1k", "use_timm_backbone": True})
    refuse_names("config.json", {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet50"}})
    refuse_names("config.json", {"attn_implementation": "sdpa", "trust_remote_code": False, "backbone": None})


def test_a_key_that_nobody_knows_neither_runs_nor_fetches(tmp_path, monkeypatch):
    """The guard does not go by keys: whatever makes a library look elsewhere is refused, and said also where the library goes on."""
    import importlib.util
    import socket
    import urllib.request

    from plumb.hf._elsewhere import only_folder
    from transformers.utils import cached_file

    folder = folder_of(tmp_path / "in")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")

    def load_code():
        spec = importlib.util.spec_from_file_location("evil", folder / "evil.py")
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    reaching = {
        "'unforeseen.name' of config.json names 'someone/model'": lambda: cached_file("someone/model", "config.json"),
        "'.*', which lies elsewhere": lambda: cached_file(str(tmp_path), "config.json"),
        "code, 'evil.py'": lambda: cached_file(str(folder), "evil.py"),
        "code, '.*evil.py'": load_code,
        "something elsewhere": lambda: socket.create_connection(("localhost", 9)),
        "something else": lambda: urllib.request.urlopen("http://someone.invalid/"),
    }
    for says, reach in reaching.items():
        with (
            pytest.raises(plumb.Error, match=says) as caught,
            only_folder(os.fspath(folder), {"unforeseen": {"name": "someone/model"}}),
        ):
            try:
                reach()
            except Exception:
                pass  # a library that goes on without what it could not have
        assert caught.value.kind is plumb.ErrorKind.BadFile
    assert not (tmp_path / "ran").exists()
    with only_folder(os.fspath(folder), {}):
        assert cached_file(str(folder), "config.json")
        import colorsys  # noqa: F401, a module of an installed package
    assert cached_file(str(folder), "evil.py")  # the guard is over


def test_a_program_takes_along_no_file_but_what_the_importer_wrote(tmp_path):
    folder = folder_of(tmp_path / "in")
    program = hf.import_folder(folder, batch=1, length=8, fresh=0)
    record = json.loads(program._program.pretrained)
    for name in ("model.safetensors", "modeling_evil.py", "tokenizer_config.json", "CONFIG.json"):
        program._program.pretrained = json.dumps({**record, "files": {**record["files"], name: "evil"}})
        with pytest.raises(plumb.Error, match=f"'{name}' is no file that an imported program takes along") as caught:
            hf.save(program, tmp_path / "out")
        assert caught.value.kind is plumb.ErrorKind.BadFile
    assert not list((tmp_path / "out").iterdir())


def test_links_that_lead_out_of_a_folder_are_not_followed(tmp_path):
    folder = folder_of(tmp_path / "in")
    (tmp_path / "key").write_text('{"secret": 1}')
    program = hf.import_folder(folder, batch=1, length=8, fresh=0)
    (folder / "tokenizer.json").symlink_to("../key")
    with pytest.raises(plumb.Error, match="tokenizer.json: is a symbolic link that leads out of the folder, to .*key"):
        hf.save(program, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")  # the weights are not lost with it
    (folder / "generation_config.json").symlink_to(tmp_path / "key")
    with pytest.raises(plumb.Error, match="generation_config.json: is a symbolic link that leads out"):
        hf.import_folder(folder, batch=1, length=8, fresh=0)
    os.rename(folder / "config.json", tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(plumb.Error, match="config.json: is a symbolic link that leads out"):
        hf.import_folder(folder, batch=1, length=8, fresh=0)


def test_a_folder_of_the_hubs_cache_is_taken_with_its_links(tmp_path):
    cache = tmp_path / "models--someone--model"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for name, text in {"config.json": json.dumps(SMALL), "tokenizer.json": "{}", "beside.json": ""}.items():
        (cache / "blobs" / f"hash-{name}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")
    (snapshot / "vocab.json").symlink_to("beside.json")  # within the folder, on to the blobs
    program = hf.import_folder(snapshot, batch=1, length=8, fresh=0)
    hf.save(program, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}" and (tmp_path / "out" / "vocab.json").exists()
    (cache / "blobs" / "hash-tokenizer.json").unlink()
    (tmp_path / "key").write_text("secret")
    (cache / "blobs" / "hash-tokenizer.json").symlink_to("../../key")
    with pytest.raises(plumb.Error, match="leads out of the folder"):
        hf.save(program, tmp_path / "again")


# --- weights of unit-scaled models ---


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{k: v for k, v in SMALL.items() if k != "model_type"}, use_cache=False)
    )


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_that_a_unit_scaled_model_saved_is_refused_wherever_weights_enter(shards, tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    program = hf.import_folder(tmp_path / "plain", tmp_path / "llama.pt2", batch=1, length=8)
    scaled = plumb.transforms.unit_scale(llama())
    state = {n: t.contiguous().clone() for n, t in scaled.state_dict().items()}
    folder = folder_of(tmp_path / "scaled")
    names = sorted(state)
    if shards == 1:
        safetensors_torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    else:
        files = {name: f"model-0000{i % shards + 1}-of-0000{shards}.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            safetensors_torch.save_file(
                {n: state[n] for n in names if files[n] == file}, folder / file, {"format": "pt"}
            )
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for enter in (
        lambda: hf.load(folder, batch=1, length=8),
        lambda: hf.import_folder(folder, batch=1, length=8),
        lambda: hf.Weights(program._program.pretrained, os.fspath(folder)).read_into(program),
    ):
        with pytest.raises(plumb.Error, match="the folder's weights are unit-scaled") as caught:
            enter()
        assert caught.value.kind is plumb.ErrorKind.InvalidState and "fold" in caught.value.remedy
    assert all(p.is_meta for p in program.parameters())


def test_save_pretrained_of_a_unit_scaled_model_bears_the_mark(tmp_path):
    plumb.transforms.unit_scale(llama()).save_pretrained(tmp_path)
    with pytest.raises(plumb.Error, match="the folder's weights are unit-scaled"):
        hf.load(tmp_path, batch=1, length=8)
