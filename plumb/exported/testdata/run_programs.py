"""Runs exported programs and holds what they compute against what they computed before.

`programs`: name -> (function that gives (module, args, kwargs), options), as in make_programs.py.
"""

import torch
import torch.utils._pytree as pytree


def plain(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def run(path, args, kwargs, gradients=True):
    """Everything a program computes on these inputs: outputs, gradients, buffers afterwards."""
    module = torch.export.load(path).module()
    args, kwargs = pytree.tree_map(plain, (args, kwargs))
    torch.manual_seed(7)
    outputs = pytree.tree_leaves(module(*args, **kwargs))
    torch.manual_seed(11)
    roots = [o for o in outputs if gradients and isinstance(o, torch.Tensor) and o.requires_grad]
    grads = [torch.randn(o.shape).to(o.dtype) for o in roots]
    if roots:
        torch.autograd.backward(roots, grads)
    return {
        "outputs": [plain(o) for o in outputs],
        "output_gradients": grads,
        "gradients": {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None},
        "buffers": {n: b.clone() for n, b in module.named_buffers()},
        "inputs_after": [plain(x) for x in pytree.tree_leaves((args, kwargs))],
    }


def make(programs, folder):
    for name, (function, options) in programs.items():
        torch.manual_seed(1)
        module, args, kwargs = function()
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=options.get("dynamic"), strict=False)
        if options.get("decompose"):
            exported = exported.run_decompositions()
        path = folder / f"{name}.pt2"
        torch.export.save(exported, path)
        cases = [(args, kwargs)] + ([(options["other"](), {})] if "other" in options else [])
        expect = []
        for case in cases:
            torch.manual_seed(5)
            result = run(path, *case, options.get("gradients", True))
            # In the order of the program's signature, whatever the order of keyword arguments.
            order = exported.module_call_graph[0].signature.in_spec.child(1).context
            leaves = pytree.tree_leaves((case[0], {k: case[1][k] for k in order}))
            expect.append({"inputs": [plain(x) for x in leaves], "args": case[0], "kwargs": case[1], **result})
        torch.save({"cases": expect, "parameters": [n for n, _ in module.named_parameters(remove_duplicate=False)]}, folder / f"{name}.expect.pt")


def same(a, b):
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
                and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))  # fmt: skip
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def check(programs, folder):
    failed = []
    files = sorted(folder.glob("*.back.pt2"))
    for path in files:
        name = path.name.removesuffix(".back.pt2")
        expect = torch.load(folder / f"{name}.expect.pt")
        for i, case in enumerate(expect["cases"]):
            try:
                result = run(path, case["args"], case["kwargs"], programs[name][1].get("gradients", True))
            except Exception as e:  # noqa: BLE001
                failed.append(f"{name}[{i}]: {type(e).__name__}: {str(e)[-1500:]}")
                continue
            for what, value in result.items():
                if not same(value, case[what]):
                    failed.append(f"{name}[{i}]: other {what}")
    print("\n".join(failed) or f"{len(files)} programs are the same")
    return 1 if failed or not files else 0
