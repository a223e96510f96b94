"""A run of a model, and whether two runs are equal: what the tables of models compare by."""

import torch
from torch.utils import _pytree as pytree

import plumb


def tensors(tree):
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def run(model, args, kwargs, gradients=True):
    """Outputs, gradients of inputs, and by name gradients of parameters and the buffers that were there before the run: what
    a forward registers is not a graph's."""

    def given(x):
        return x.detach().clone().requires_grad_(gradients and x.is_floating_point()) if isinstance(x, torch.Tensor) else x

    args, kwargs = pytree.tree_map(given, (args, kwargs))
    model.zero_grad()
    before = [n for n, _ in model.named_buffers()]
    torch.manual_seed(7)
    out = tensors(model(*args, **kwargs))
    roots = [y for y in out if y.requires_grad]
    torch.manual_seed(8)
    torch.autograd.backward(roots, [torch.randn_like(y) for y in roots])
    state = {n: p.grad for n, p in model.named_parameters()} | {n: b for n, b in model.named_buffers() if n in before}
    return [y.detach() for y in out], [x.grad for x in tensors((args, kwargs))], state


def equal(a, b):
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def same(ours, theirs, state=True):
    pairs = [*zip(ours[0], theirs[0], strict=True), *zip(ours[1], theirs[1], strict=True)]
    if state:  # further names of a tensor are not in the model's
        pairs += [(ours[2][n], value) for n, value in theirs[2].items()]
    return "bit for bit" if all(equal(a, b) for a, b in pairs) else "differs"


def tried(function, *args):
    """Returns the result of a function, or the first words of its error."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001
        text = str(error).split("\n")[0]
        if "takes a value out of a tensor" in text:
            return "refused: it takes values out of tensors"
        return ("refused: " if isinstance(error, plumb.Error) else "fails: ") + text[:100].replace("|", "/")
