"""Checks of a model of another library (tools/libraries_table.py): `CHECKS`, name -> function of `make`.

`make()` returns a fresh (model, args, kwargs), the same in every call. A check returns a few words.
"""

import copy
import os
import pickle
import tempfile

import torch
from compared import equal, run, same, tensors, tried
from torch.utils import _pytree as pytree

import plumb
from plumb import pipelining, transforms
from plumb.transforms import fold, simulate_fp8, track_scales, unit_scale

SAME, SAME_FUNCTION = "bit for bit", "within rounding"
# Weights of several stages are sent: sums of copies have another order.
TRANSMIT = pipelining.MultiUseParameterConfig.TRANSMIT


def larger(args, kwargs, factors=(1, 0.5)):
    """Returns the inputs with as many times their rows, integers as they are. Lists have rows of their own."""
    if args and isinstance(args[0], list):
        return args, kwargs

    def more(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.cat([x * f if x.is_floating_point() else x for f in factors])

    return pytree.tree_map(more, (args, kwargs))


def draws(model, args, kwargs):
    before = torch.get_rng_state()
    copy.deepcopy(model)(*args, **kwargs)
    return not torch.equal(before, torch.get_rng_state())


def without_dropout(made):
    model, args, kwargs = made
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "prob", "dropout_p"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model, args, kwargs


def finite(results):
    assert all(t.isfinite().all() for t in [*results[0], *filter(torch.is_tensor, results[1])]), "results are not finite"


def worst(*words):
    return next((w for w in words if w != SAME), SAME)


def close(ours, theirs):
    for y, z in zip(ours[0], theirs[0], strict=True):
        off = (y - z).abs().max() / z.abs().max().clamp(min=1e-6)
        assert off < (1e-3 if y.dtype == torch.float32 else 0.05), f"differs by {off:.1g}"
    return SAME_FUNCTION


def captured(make):
    model, args, kwargs = make()
    expected = run(copy.deepcopy(model), args, kwargs)
    graph = plumb.capture(model, *args, plumb_verify=True, **kwargs)
    again = pickle.loads(pickle.dumps(graph))
    other = copy.deepcopy(graph)
    return worst(*[same(run(g, args, kwargs), expected) for g in (graph, again, other)])


def tracked(make):
    model, args, kwargs = make()
    module, words = track_scales(model), []
    for given in ((args, kwargs), (args, kwargs), larger(args, kwargs)):
        words.append(same(run(module, *given), run(model, *given)))
    module.scales_graph()
    return worst(*words)


def transformed(make):
    """Unit-scaled in FP8: twice, another batch, a copy, a pickle, a state dict, a checkpoint."""
    model, args, kwargs = make()
    module = simulate_fp8(unit_scale(model))
    for given in ((args, kwargs), (args, kwargs), larger(args, kwargs)):
        finite(run(module, *given))
    fresh = simulate_fp8(unit_scale(make()[0]))
    names = {n for n, _ in [*fresh.named_parameters(), *fresh.named_buffers()]}  # without what a forward registers
    with tempfile.TemporaryDirectory() as folder:
        plumb.checkpoint.save(folder, module, step=1)
        plumb.checkpoint.load(folder, fresh)
    others = [fresh]
    if isinstance(copied := tried(copy.deepcopy, module), str):  # the model itself, once it has run?
        run(model, args, kwargs)
        assert tried(copy.deepcopy, model) == copied, copied
    else:
        others.append(copied)
    if not isinstance(tried(pickle.dumps, model), str):
        others.append(pickle.loads(pickle.dumps(module)))
    others.append(simulate_fp8(unit_scale(make()[0])))
    others[-1].load_state_dict(module.state_dict())
    outputs, gradients, state = run(module, args, kwargs)
    expected = outputs, gradients, {n: value for n, value in state.items() if n in names}
    return worst(*[same(run(m, args, kwargs), expected) for m in others])


def compiled(make):
    model, args, kwargs = make()
    module = track_scales(unit_scale(model))
    one = transforms.compile(module, backend="aot_eager", fullgraph=True)
    return same(run(one, args, kwargs), run(module, args, kwargs))


def folded(make):
    model, args, kwargs = without_dropout(make())
    module = unit_scale(model)
    expected = run(copy.deepcopy(module), args, kwargs, False)
    close(run(fold(plumb.capture(module, *args, **kwargs)), args, kwargs, False), expected)  # factors may stay, eps follows
    run(copy.deepcopy(module), args, kwargs)
    plain = tried(lambda: fold(module, *args, **kwargs))
    return "as a graph" if isinstance(plain, str) else SAME_FUNCTION


def preserved(make):
    model, args, kwargs = without_dropout(make())
    kept = unit_scale(plumb.capture(model, *args, **kwargs), preserve=True)
    return close(run(kept, args, kwargs, False), run(model, args, kwargs, False))


def loss_of(out, target):
    return sum((y.float() - 0.5).pow(2).mean() for y in tensors(out) if y.requires_grad) * target.mean()


def cut(stages, make):
    model, args, kwargs = without_dropout(make())
    drawn = draws(model, args, kwargs)
    batch = larger(args, kwargs, (1, 0.5, -1))
    target = torch.arange(1.0, 1 + len(tensors(batch)[0]))
    rows = len(tensors((args, kwargs))[0])
    eager, losses = copy.deepcopy(model), []
    for m in range(3):
        own = pytree.tree_map(lambda x, m=m: x[m * rows : (m + 1) * rows] if isinstance(x, torch.Tensor) else x, batch)
        losses.append(loss_of(eager(*own[0], **own[1]), target[m * rows : (m + 1) * rows]))
        losses[-1].backward()
    words = []
    for schedule in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"):
        own = copy.deepcopy(model)
        pipe = pipelining.pipeline(own, args, kwargs, split_policy="balanced", num_stages=stages, multi_use_param_spec=TRANSMIT)
        parts = [pipe.build_stage(i, torch.device("cpu")) for i in range(pipe.num_stages)]
        step = getattr(pipelining, f"Schedule{schedule}")(parts, 3, loss_of)
        found = []
        step.step(*batch[0], target=target, losses=found, **batch[1])
        grads = [(p.grad, None if q.grad is None else q.grad / 3) for p, q in zip(own.parameters(), eager.parameters(), strict=True)]
        kept = dict(eager.named_buffers())  # more than its own where a forward makes tables
        buffers = [(buffer, kept[name]) for name, buffer in own.named_buffers()]
        pairs = {"losses": zip(found, losses, strict=True), "gradients": grads, "buffers": buffers}
        off = [what for what, both in pairs.items() if not all(equal(a, b) for a, b in both)]
        words.append("runs, draws random numbers" if drawn else f"{schedule}: other {', '.join(off)}" if off else SAME)
    return worst(*words)


def exported(make):
    model, args, kwargs = make()
    expected = run(copy.deepcopy(model), args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt2")
        try:
            torch.export.save(torch.export.export(model, args, kwargs), path)
        except Exception as error:  # noqa: BLE001
            return f"torch refuses: {str(error).split(chr(10))[0][:60]}"
        return same(run(plumb.load_pt2(path), args, kwargs), expected)


def saved(make):
    model, args, kwargs = make()
    expected = run(copy.deepcopy(model), args, kwargs)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.pt2")
        plumb.save_pt2(plumb.capture(model, *args, **kwargs), path)
        return worst(*[same(run(m, args, kwargs), expected) for m in (plumb.load_pt2(path), torch.export.load(path).module())])


CHECKS = {
    "captured": captured, "tracked": tracked, "transformed": transformed, "compiled": compiled, "folded": folded,
    "preserved": preserved, "cut2": lambda make: cut(2, make), "cut3": lambda make: cut(3, make), "exported": exported, "saved": saved,
}  # fmt: skip
