"""Trains a byte-level GPT and a small convnet in several number formats, each at its best learning rate of a sweep and
over batch sizes, and writes the tables and curves of docs/training.md.

    python examples/training_comparison.py [--models gpt convnet] [--runs fp32 fp8 ...] [--out docs/data/training] [--verdict]
    python examples/training_comparison.py --remedies
    python examples/training_comparison.py --others
    python examples/training_comparison.py --seeds

Formats are simulated in the inputs of every matrix product and convolution, forward and backward (``simulate_format``);
sums, norms, losses and the optimizer's weights stay in float32, as on hardware with such units. Results are kept in
OUT/results.json run by run: what is there already is not run again, so an interrupted comparison goes on. With
``--verdict``, plumb.verdict judges every run from four of its steps in full precision (OUT/verdicts.json), and the tables
have its class behind each loss. ``--remedies`` trains runs that fail once more with the recipe that the verdict recommends. ``--others`` judges and trains
models and formats that the verdict's rule was not made with (OUT/others.json). ``--seeds`` trains every judged run with two
further seeds (OUT/seeds.json): at the highest rates a run of full precision goes astray by chance, too.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from gpt import GPT
from torch import nn
from torch.nn import functional as F

import plumb
from plumb import optim
from plumb.transforms import simulate_format, unit_scale

# name -> (unit-scaled, forward format, backward format)
RUNS = {
    "FP32": (False, None, None),
    "FP16": (False, "fp16-RN", "fp16-RN"),
    "FP8 nearest": (False, "e4m3fn-RN", "e5m2-RN"),
    "FP8 stochastic": (False, "e4m3fn-SR", "e5m2-SR"),
    "MXFP8 nearest": (False, "mxfp8e4m3-RN", "mxfp8e5m2-RN"),
    "MXFP8 stochastic": (False, "mxfp8e4m3-SR", "mxfp8e5m2-SR"),
    "MXFP4 nearest": (False, "mxfp4-RN", "mxfp4-RN"),
    "MXFP4 stochastic": (False, "mxfp4-SR", "mxfp4-SR"),
    "unit-scaled FP32": (True, None, None),
    "unit-scaled FP8 nearest": (True, "e4m3fn-RN", "e5m2-RN"),
    "unit-scaled FP8 stochastic": (True, "e4m3fn-SR", "e5m2-SR"),
}
RATES = {
    ("gpt", False): [0.001, 0.003, 0.01],
    ("gpt", True): [0.2, 0.4, 0.8],
    ("convnet", False): [0.003, 0.01, 0.03],
    ("convnet", True): [0.3, 1.0, 2.0, 3.0, 5.0],
}
REMEDIES = [  # model, rate, batch, recipe
    ("gpt", 0.003, 64, "fp8"),
    ("gpt", 0.003, 64, "mxfp4"),
    ("gpt", 0.003, 16, "mxfp4"),
    ("gpt", 0.003, 16, "E3M2"),
    ("convnet", 0.003, 16, "mxfp4"),
    ("convnet", 0.01, 64, "mxfp4"),
    ("convnet", 0.01, 64, "mxfp4-SR/mxfp4-SR"),
    ("convnet", 0.003, 256, "mxfp4"),
    ("convnet", 0.01, 64, "e4m3fn-RN/e4m3fn-RN"),
    ("mlp", 0.003, 64, "mxfp4"),
    ("gru", 0.01, 16, "mxfp4"),
]
OTHERS = {  # rates and batches of models that the rule was not made with
    "mlp": [(0.001, 16), (0.003, 64), (0.01, 256)],
    "gru": [(0.003, 16), (0.01, 16), (0.01, 64)],
    "encoder": [(0.001, 16), (0.003, 64), (0.003, 256)],
    "branches": [(0.001, 16), (0.003, 64), (0.003, 256)],
}
OTHER_RECIPES = [
    "bf16", "fp8", "e4m3fn-RN/e4m3fn-RN", "E3M2", "mxfp8", "mxfp6e3m2-RN/mxfp6e3m2-RN", "mxfp4", "mxfp4-SR/mxfp4-SR", "nvfp4",
    "mxfp4-RN/bf16-RN", "bf16-RN/mxfp4-RN",
]  # fmt: skip
FOUND = ("backward", "drift", "forward", "verdict")  # in the files of verdicts
STEPS = {"gpt": 160, "convnet": 250, "mlp": 250, "gru": 160, "encoder": 250, "branches": 250}
BATCHES = {"gpt": [4, 16, 64], "convnet": [16, 64, 256]}
COLORS = ["C7", "C0", "C1", "C1", "C3", "C3", "C5", "C5", "C4", "C2", "C2"]
LENGTH, WIDTH, LAYERS, HEADS = 48, 64, 2, 2


class Gpt(GPT):
    def __init__(self) -> None:
        super().__init__(256, WIDTH, LAYERS, HEADS, LENGTH, bias=True, std=0.02)

    def forward(self, x, y):
        return super().forward(x, y)[1]


class Convnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1, stride=2)
        self.conv3 = nn.Conv2d(24, 48, 3, padding=1, stride=2)
        self.head = nn.Linear(48 * 16, 10)

    def forward(self, x, y):
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.gelu(conv(x))
        return F.cross_entropy(self.head(x.flatten(1)), y)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(256, 128), nn.Linear(128, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)) for _ in range(3))
        self.scales = [1] * 3

    def forward(self, x, y):
        x = self.first(x.flatten(1))
        for scale, layer in zip(self.scales, self.layers):
            x = x + scale * layer(x)
        return F.cross_entropy(self.head(x), y)


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gates, self.head = nn.Embedding(256, WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 256)
        self.new = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, y):
        h, outputs = torch.zeros(x.shape[0], WIDTH), []
        for e in self.embed(x[:, :24]).unbind(1):
            reset, update = self.gates(torch.cat([e, h], 1)).sigmoid().chunk(2, 1)
            h = update * h + (1 - update) * self.new(torch.cat([e, reset * h], 1)).tanh()
            outputs.append(h)
        return F.cross_entropy(self.head(torch.stack(outputs, 1)).flatten(0, 1), y[:, :24].flatten())


class Encoder(nn.Module):
    """Attention over 16 patches of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(1, 48, 4, stride=4), nn.Linear(48, 10)
        self.places = nn.Parameter(0.02 * torch.randn(16, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, y):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return F.cross_entropy(self.head(self.layers(x).mean(1)), y)


class Branches(Mlp):
    """Its residual layers start at a ten-thousandth, as LayerScale has them (arXiv 2103.17239), and so do their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.full((3, 128), 1e-4))


MODELS = {"gpt": Gpt, "convnet": Convnet, "mlp": Mlp, "gru": Gru, "encoder": Encoder, "branches": Branches}


class Text:
    """The bytes of the machine's own Python standard library."""

    def __init__(self) -> None:
        folder = Path(os.__file__).parent
        files = sorted(folder.glob("*.py"))
        self.bytes = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def draw(self, batch, generator):
        starts = torch.randint(len(self.bytes) - LENGTH - 1, (batch,), generator=generator)
        rows = self.bytes[starts[:, None] + torch.arange(LENGTH + 1)].long()
        return rows[:, :-1], rows[:, 1:]


class Shapes:
    """Drawn on the fly: ten outlines of 16 x 16 pixels (stars of 1 to 5 waves and polygons of 3 to 7 corners), turned,
    moved, of any size, under noise."""

    def draw(self, batch, generator):
        label = torch.randint(10, (batch,), generator=generator)
        u = torch.rand(batch, 4, 1, 1, generator=generator)
        grid = torch.arange(16.0)
        x = grid[None, None, :] - 7.5 - 3 * (u[:, 0] - 0.5)
        y = grid[None, :, None] - 7.5 - 3 * (u[:, 1] - 0.5)
        angle, distance = torch.atan2(y, x) + 6.2832 * u[:, 2], torch.hypot(x, y)
        waves = (label % 5 + 1).view(-1, 1, 1).float()
        star = 1 + 0.3 * torch.cos(waves * angle)
        part = 6.2832 / (waves + 2)
        polygon = math.cos(0.5) / torch.cos(torch.remainder(angle, part) - part / 2)
        radius = (4 + 2 * u[:, 3]) * torch.where((label < 5).view(-1, 1, 1), star, polygon)
        image = torch.exp(-((distance - radius) ** 2))
        return (image + 0.15 * torch.randn(batch, 16, 16, generator=generator))[:, None], label


def build(model: str, run: str, seed: int = 0):
    scaled, fwd, bwd = RUNS[run]
    torch.manual_seed(seed)
    net = MODELS[model]()
    if scaled:
        net = unit_scale(net)
    return net if fwd is None else simulate_format(net, fwd, bwd)


def make_optimizer(parameters, scaled: bool, rate: float):
    return (optim if scaled else torch.optim).AdamW(parameters, lr=rate, weight_decay=0)


class WarmingUp:
    """The optimizer of the first steps: as train() has it."""

    def __init__(self, optimizer, warm: int) -> None:
        self.optimizer, self.zero_grad = optimizer, optimizer.zero_grad
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / warm, 1))

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()


def verdict_on(model: str, scaled: bool, rate: float, batch: int, data, recipes: list[str], explain: bool):
    """By four steps of the full-precision run, two of them behind the warm-up."""
    generator, warm = torch.Generator().manual_seed(1), STEPS[model] // 10
    torch.manual_seed(2)
    return plumb.verdict(
        build(model, "unit-scaled FP32" if scaled else "FP32"),
        iter(lambda: data.draw(batch, generator), None),
        recipes=recipes,
        warmup=warm,
        optimizer=lambda p: WarmingUp(make_optimizer(p, scaled, rate), warm),
        explain=explain,
    )


def judge(model: str, scaled: bool, rate: float, batch: int, data) -> dict[str, list]:
    """Returns [backward error, drift, forward error, class] of each run with this rate and batch."""
    runs = {run: f"{fwd}/{bwd}" for run, (of_scaled, fwd, bwd) in RUNS.items() if fwd and of_scaled == scaled}
    found = verdict_on(model, scaled, rate, batch, data, list(runs.values()), explain=False)
    return {run: [found.recipes[name][what] for what in FOUND] for run, name in runs.items()}


def remedies(data) -> str:
    """A row for each run of REMEDIES: its loss in full precision, in the recipe, and in the one that is recommended."""
    rows = ["| model, rate, batch | recipe | FP32 | as it is | with the remedy | of the gap closed | remedy | gradients |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for model, rate, batch, recipe in REMEDIES:
        of = data[model]
        found = verdict_on(model, False, rate, batch, of, [recipe], explain=True)
        full, failing, better = (
            tail(train(model, "FP32", rate, batch, of, lambda net: simulate_format(net, recipe=r) if r else net))
            for r in (None, recipe, found.recipe)
        )
        kept = [line for line in found.recipe.splitlines() if not line.startswith("#") and line]
        closed = (failing - better) / (failing - full)
        rows.append(
            f"| {model}, {rate:g}, {batch} | `{recipe}` | {full:.3f} | {failing:.3f} | {better:.3f} | {closed:.0%} | "
            f"{'; '.join(kept)} | {found.gradients} |"
        )
        print(rows[-1], flush=True)
    return "\n".join(rows)


def judge_others(data, keep, kept: dict) -> str:
    """Judges and trains OTHERS in OTHER_RECIPES: for each [backward error, drift, forward error, class, loss, loss in FP32]."""
    for model, settings in OTHERS.items():
        of = data[model]
        for rate, batch in settings:
            missing = [r for r in OTHER_RECIPES if key(model, r.replace("/", " "), rate, batch) not in kept]
            found = verdict_on(model, False, rate, batch, of, missing, explain=False).recipes if missing else {}
            full = tail(train(model, "FP32", rate, batch, of)) if missing else 0
            for recipe in missing:
                loss = tail(train(model, "FP32", rate, batch, of, lambda net, r=recipe: simulate_format(net, recipe=r)))
                errors = [found[recipe][what] for what in FOUND]
                k = key(model, recipe.replace("/", " "), rate, batch)
                kept[k] = [*errors, loss, full]
                keep(kept)
                print(f"{k}: {errors} {loss:.3f} of {full:.3f}", flush=True)
    return counts((verdict, loss - full) for *_, verdict, loss, full in kept.values())


def train(model: str, run: str, rate: float, batch: int, data, change=lambda net: net, seed: int = 0) -> list[float]:
    net = change(build(model, run, seed))
    steps, generator = STEPS[model], torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed + 2)
    optimizer = make_optimizer(net.parameters(), RUNS[run][0], rate)
    warm = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * max(0, i - warm) / (steps - warm)))
    )
    losses = []
    for _ in range(steps):
        loss = net(*data.draw(batch, generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(round(loss.item(), 4))
        if not math.isfinite(losses[-1]):
            losses += [float("inf")] * (steps - len(losses))
            break
    return losses


def tail(losses) -> float:
    """Mean loss of the last 20 steps: what runs are compared by."""
    return float(np.mean(losses[-20:]))


def key(model, run, rate, batch) -> str:
    return f"{model}/{run}/lr {rate:g}/batch {batch}"


def tried(results: dict, model: str, run: str, batch: int) -> dict[float, float]:
    """Rates and the losses they gave."""
    rates = RATES[model, RUNS[run][0]]
    return {r: tail(results[k]) for r in rates if (k := key(model, run, r, batch)) in results}


def full_of(k: str) -> str:
    """The key of a run's full-precision run."""
    model, run, rate, batch = k.split("/")
    return "/".join([model, "unit-scaled FP32" if RUNS[run][0] else "FP32", rate, batch])


def counted(losses: dict[str, list[float]], verdicts: dict) -> str:
    """A row a class: how many runs it has, and how many of them lose more than 0.05 and 0.2 nats against the
    full-precision run of the same rate, batch and seed: the middle of the seeds. `losses`: a number a seed. Runs whose
    full-precision run does not learn count not."""
    gaps = []
    for k, (*_, verdict) in verdicts.items():
        full = losses.get(full_of(k))
        if k not in losses or full is None or (k.startswith("convnet") and np.median(full) > 2.0):
            continue
        gaps.append((verdict, np.median(np.subtract(losses[k], full))))
    return counts(gaps)


def train_other_seeds(results: dict, verdicts: dict, data, keep, kept: dict) -> str:
    """Trains what `counted` counts with two further seeds; the table of all three."""
    for k in sorted(verdicts, key=lambda k: (full_of(k), k)):
        for one in (full_of(k), k):
            if one in kept or one not in results:
                continue
            model, run, rate, batch = one.split("/")
            how = (model, run, float(rate.split()[1]), int(batch.split()[1]), data[model])
            kept[one] = [tail(train(*how, seed=seed)) for seed in (100, 200)]
            keep(kept)
            print(f"{one}: {tail(results[one]):.3f} {kept[one]}", flush=True)
    return counted({k: [tail(results[k]), *others] for k, others in kept.items()}, verdicts)


def counts(gaps) -> str:
    """From (class, nats lost) of each run."""
    rows = {name: [0, 0, 0] for name in ("ok", "doubtful", "no")}
    for verdict, gap in gaps:
        for i, much in enumerate((True, not gap <= 0.05, not gap <= 0.2)):
            rows[verdict][i] += much
    lines = ["| verdict | runs | lose more than 0.05 nats | more than 0.2 |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(str, row))} |" for name, row in rows.items())])


def markdown(results: dict, model: str, verdicts: dict) -> str:
    lines = [
        "| run | " + " | ".join(f"batch {b}" for b in BATCHES[model]) + " |",
        "|---|" + "---|" * len(BATCHES[model]),
    ]
    for run in RUNS:
        cells = []
        for batch in BATCHES[model]:
            losses = tried(results, model, run, batch)
            best = min(losses.values(), default=None)
            classes = {r: verdicts.get(key(model, run, r, batch), [""])[-1] for r in losses}
            others = ", ".join(f"{r:g}: {v:.3f} {classes[r]}".rstrip() for r, v in losses.items())
            cells.append(f"**{best:.3f}** ({others})" if losses else "")
        if any(cells):
            lines.append(f"| {run} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(results: dict, model: str, batch: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "plumb", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10.5, 4.2), layout="constrained")
    highest = 0.0
    for i, run in enumerate(RUNS):
        rates = tried(results, model, run, batch)
        if not rates:
            continue
        rate = min(rates, key=lambda r: rates[r])
        losses = results[key(model, run, rate, batch)]
        smooth = [np.mean(losses[max(0, j - 9) : j + 1]) for j in range(len(losses))]
        if run == "FP32":
            highest = smooth[len(smooth) // 10]
        axes.plot(
            smooth,
            label=f"{run}, rate {rate:g}",
            color=COLORS[i],
            ls="--" if "stoch" in run else "-",
            lw=4 if run.endswith("FP32") else 1.5,
        )
    axes.set(xlabel="step", ylabel="loss in nats (mean of 10 steps)", title=f"{model}, batch {batch}")
    axes.set_ylim(top=highest)  # without the first steps, in which all fall alike, and what diverges
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def kept_in(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["gpt", "convnet"], default=["gpt", "convnet"])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs" / "data" / "training"
    )
    parser.add_argument("--verdict", action="store_true")
    parser.add_argument("--remedies", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--seeds", action="store_true")
    args = parser.parse_args()
    text, shapes = Text(), Shapes()
    data_of = {"gpt": text, "gru": text, "convnet": shapes, "mlp": shapes, "encoder": shapes, "branches": shapes}
    if args.remedies:
        print(remedies(data_of))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    store = args.out / "results.json"
    results = kept_in(store)

    judged = store.with_name("verdicts.json")
    verdicts = kept_in(judged)

    def keep(path, values):
        beside = path.with_suffix(".part")
        beside.write_text(
            "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(values.items())) + "\n}\n"
        )
        beside.replace(path)

    if args.others:
        of_others = args.out / "others.json"
        print(judge_others(data_of, lambda values: keep(of_others, values), kept_in(of_others)))
        return

    if args.seeds:
        of_seeds = args.out / "seeds.json"
        print(train_other_seeds(results, verdicts, data_of, lambda values: keep(of_seeds, values), kept_in(of_seeds)))
        return

    def run_once(model, run, rate, batch, data):
        k = key(model, run, rate, batch)
        if k in results:
            return
        start = time.perf_counter()
        results[k] = train(model, run, rate, batch, data)
        keep(store, results)
        print(f"{k}: {tail(results[k]):.3f} in {time.perf_counter() - start:.1f} s", flush=True)

    def judge_once(model, scaled, rate, batch, data):
        runs = [run for run, (of_scaled, fwd, _) in RUNS.items() if fwd and of_scaled == scaled]
        if all(key(model, run, rate, batch) in verdicts for run in runs):
            return
        found = judge(model, scaled, rate, batch, data)
        verdicts.update({key(model, run, rate, batch): of_run for run, of_run in found.items()})
        keep(judged, verdicts)
        print(
            key(model, "unit-scaled" if scaled else "plain", rate, batch),
            {k: v[-1] for k, v in found.items()},
            flush=True,
        )

    for model in args.models:
        data = data_of[model]
        for batch in BATCHES[model]:
            for scaled in (False, True) if args.verdict else ():
                for rate in RATES[model, scaled]:
                    judge_once(model, scaled, rate, batch, data)
            for run in args.runs:
                for rate in RATES[model, RUNS[run][0]]:
                    run_once(model, run, rate, batch, data)
            picture(results, model, batch, args.out / f"{model}_batch_{batch}.svg")
        (args.out / f"{model}.md").write_text(markdown(results, model, verdicts) + "\n")
        print(markdown(results, model, verdicts), flush=True)
    print(counted({k: [tail(losses)] for k, losses in results.items()}, verdicts))


if __name__ == "__main__":
    main()
