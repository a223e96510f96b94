"""The stage backward in two halves, beside backward()."""

import copy

import pytest
import torch
from pipelines import Block, Square, same
from plumb.pipelining import _backward
from plumb.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    _null_coalesce_accumulate,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import _backward as torchs
from torch.utils.checkpoint import checkpoint

import plumb


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return torch.relu(x @ self.w) @ self.w


class OffPath(nn.Module):
    """A weight whose path does not meet the input's but at the end, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.gain, self.unused, self.linear = nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(1)), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) + torch.sin(self.gain * self.gain)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Square.apply(x, self.w)


class View(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).view(4, 2, 4).transpose(1, 2)


class Checkpointed(nn.Module):
    calls = 0

    def __init__(self, reentrant):
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, x):
        def block(x):
            type(self).calls += 1
            return self.block(x)

        return checkpoint(block, x, use_reentrant=self.reentrant)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.up.requires_grad_(False)

    def forward(self, x):
        return self.block(x)


class ChannelsLast(nn.Module):
    """torch's group norm writes the gradient of such an input even if none is asked for."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.GroupNorm(1, 2)

    def forward(self, x):
        return self.norm(self.linear(x).view(4, 2, 2, 2).permute(0, 3, 1, 2))


MODULES = [Block, Shared, OffPath, Custom, View, Frozen, ChannelsLast, lambda: Checkpointed(False), lambda: Checkpointed(True)]
NAMES = ["block", "shared", "off_path", "custom", "view", "frozen", "channels_last", "checkpointed", "reentrant"]


def case(make):
    torch.manual_seed(0)
    module, x = make(), torch.randn(4, 8, requires_grad=True)
    return module, x, copy.deepcopy(module), x.detach().clone().requires_grad_()


def grads(module):
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("make", MODULES, ids=NAMES)
def test_whole_backward_is_backward(make):
    module, x, reference, ref_x = case(make)
    out = module(x)
    grad = torch.randn_like(out)
    found = stage_backward((out,), (grad,), (x, 3, None))
    reference(ref_x).backward(grad)
    assert same([found[0]], [ref_x.grad]) and found[1:] == (None, None) and x.grad is None
    assert same(grads(module), grads(reference))


@pytest.mark.parametrize("make", MODULES, ids=NAMES)
def test_two_halves_are_backward(make):
    module, x, reference, ref_x = case(make)
    out = module(x)
    grad = torch.randn_like(out)
    reference(ref_x).backward(grad)
    Checkpointed.calls = 0
    found, groups = stage_backward_input((out,), [grad], [x, "text"], module.parameters())
    assert same(found, [ref_x.grad, None]) and torch.equal(x.grad, ref_x.grad)
    # A re-entrant checkpoint runs a backward of its own, which adds to its weights' gradients then and there.
    assert getattr(module, "reentrant", False) or all(g is None for g in grads(module))
    answer = stage_backward_weight(module.parameters(), groups)
    assert same(grads(module), grads(reference)) and same(answer, grads(reference))
    assert Checkpointed.calls == isinstance(module, Checkpointed)  # computed again once in all


@pytest.mark.parametrize("reached", [(True, False), (False, True), (False, False)])
def test_the_weight_half_reaches_weights_that_no_inputs_gradient_passes(reached):
    """An input that requires no gradient, as the tokens of a first stage, has layers whose weights still learn."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    weights = [*first.parameters(), *second.parameters()]
    inputs = [torch.randn(2, 4, requires_grad=wanted) for wanted in reached]
    out = torch.relu(first(inputs[0])) * second(inputs[1])
    expected = torch.autograd.grad(out.sum(), weights, retain_graph=True)
    found, groups = stage_backward_input([out.sum()], None, inputs, weights)
    assert [g is not None for g in found] == list(reached)
    answer = stage_backward_weight(weights, groups)
    assert all(map(torch.equal, answer, expected)) and all(w.grad is a for w, a in zip(weights, answer))


def test_halves_of_several_microbatches_add_up_in_any_order():
    module, _, reference, _ = case(Block)
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    kept = []
    for x in inputs:
        _, groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
        kept.append(groups)
    for groups in kept:
        stage_backward_weight(module.parameters(), groups)
    for x in inputs:
        reference(x.detach().requires_grad_()).sum().backward()
    assert same(grads(module), grads(reference))
    with pytest.raises(plumb.Error, match="has run already"):
        stage_backward_weight(module.parameters(), kept[0])


def test_the_weight_half_may_run_again_if_the_graph_is_kept():
    module, x, reference, ref_x = case(Block)
    _, groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    stage_backward_weight(module.parameters(), groups, retain_graph=True)
    stage_backward_weight(module.parameters(), groups)
    for _ in range(2):
        reference(ref_x).sum().backward()
    assert same(grads(module), grads(reference))


def test_integer_inputs_leave_everything_to_the_weight_half():
    torch.manual_seed(0)
    module = nn.Embedding(10, 4)
    reference = copy.deepcopy(module)
    tokens = torch.tensor([1, 2, 2])
    found, groups = stage_backward_input([module(tokens).sum()], None, [tokens], module.parameters())
    assert found == (None,) and module.weight.grad is None
    stage_backward_weight(module.parameters(), groups)
    reference(tokens).sum().backward()
    assert same(grads(module), grads(reference))


def test_outputs_and_gradients_may_be_nested():
    module, x, reference, ref_x = case(Block)
    out = module(x)
    grad = torch.randn_like(out)
    nested = {"a": [out, (out.sum(), 5)], "none": None, "left": (out * 2,), "index": torch.arange(3)}
    gradients = {"a": [grad, (None, None)], "none": None, "left": None, "index": None}
    (found,) = stage_backward(nested, gradients, (x,))
    ref = reference(ref_x)
    torch.autograd.backward([ref, ref.sum()], [grad, None])
    torch.testing.assert_close(found, ref_x.grad)
    (found,) = stage_backward([module(x), module(x)], [grad, grad], (x,), outputs_with_grads_idxs=[1])
    reference.zero_grad()
    ref_x.grad = None
    reference(ref_x).backward(grad)
    assert torch.equal(found, ref_x.grad)


@pytest.mark.parametrize(
    "grads_of",
    [
        lambda out: {"b": out},
        lambda out: {"a": [out]},
        lambda out: {"a": (out, "x")},
        lambda out: {"a": (out[:1], out)},
        lambda out: {"a": (None, out)},
    ],
)
def test_gradients_that_do_not_fit_are_refused_with_outputs_gradients_and_inputs(grads_of):
    module, x, _, _ = case(Block)
    out = module(x)
    with pytest.raises(plumb.Error, match="Failed to run stage backward") as caught:
        stage_backward({"a": (out, out * 2)}, grads_of(torch.ones_like(out)), (x,))
    text = caught.value.where
    assert "Stage output: {'a': ('Tensor(torch.Size([4, 8]), grad=True" in text
    assert "Output gradient: {'" in text and text.endswith("Input: ['Tensor(torch.Size([4, 8]), grad=True, dtype=torch.float32)']")


def test_what_fails_in_the_users_backward_is_described_too():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("mine")

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(plumb.Error, match="mine") as caught:
        stage_backward(Fails.apply(x), torch.ones(2), (x,))
    assert "Input: ['Tensor(torch.Size([2])" in caught.value.where


def test_a_gradient_from_before_is_part_of_an_inputs_answer():
    module, x, reference, ref_x = case(Block)
    x.grad = torch.full_like(x, 3.0)
    ref_x.grad = torch.full_like(x, 3.0)
    (found,) = stage_backward(module(x).sum(), None, (x,))
    (expected,) = torchs.stage_backward(reference(ref_x).sum(), None, (ref_x,))
    assert torch.equal(found, expected) and x.grad is None


def test_a_tensor_that_comes_twice_has_one_gradient():
    module, x, reference, ref_x = case(Block)
    found = stage_backward(module(x).sum(), None, [x, 3, x])
    expected = torchs.stage_backward(reference(ref_x).sum(), None, [ref_x, 3, ref_x])
    assert torch.equal(found[0], expected[0]) and found[1:] == expected[1:] == (None, None)
    halves, _ = stage_backward_input([module(x).sum()], None, [x, x], module.parameters())
    assert torch.equal(halves[0], expected[0]) and halves[1] is None and torch.equal(x.grad, expected[0])


@pytest.mark.parametrize("make", MODULES[:-1], ids=NAMES[:-1])
def test_the_weight_half_touches_the_given_weights_and_no_other_leaf(make):
    module, x, reference, ref_x = case(make)
    reference(ref_x).sum().backward()
    chosen = [n for n, p in module.named_parameters() if p.requires_grad][:1]
    weights = [dict(module.named_parameters())[n] for n in chosen]
    _, groups = stage_backward_input([module(x).sum()], None, [x], weights)
    stage_backward_weight(weights, groups)
    for name, p in module.named_parameters():
        expected = dict(reference.named_parameters())[name].grad if name in chosen else None
        assert (p.grad is None and expected is None) or torch.equal(p.grad, expected), name
    _, groups = stage_backward_input([module(x).sum()], None, [x], [])
    assert groups == []


def test_parts_of_a_leaf_hand_their_gradients_on():
    module, x, reference, ref_x = case(Block)
    parts = x.chunk(2)
    for part in parts:
        part.retain_grad()
        (grad,) = stage_backward(module(part).sum(), None, (part,))
        assert grad.shape == (2, 8) and part.grad is None
    for part in ref_x.chunk(2):
        reference(part).sum().backward()
    assert torch.equal(x.grad, ref_x.grad) and same(grads(module), grads(reference))
    with pytest.raises(plumb.Error, match="no leaf"):
        stage_backward(module(x * 2).sum(), None, (x * 2,))


def edges_of(graph):
    return {node: sorted(users, key=id) for node, users in graph.items()}


@pytest.mark.parametrize("make", [Block, Shared, OffPath, Frozen], ids=["block", "shared", "off_path", "frozen"])
def test_the_graphs_picture_is_torchs(make):
    module, x, _, _ = case(make)
    roots = [_get_grad_fn_or_grad_acc(module(x))]
    inputs = [_get_grad_fn_or_grad_acc(x)]
    params = [n for n in map(_get_grad_fn_or_grad_acc, module.parameters()) if n is not None]
    ours, theirs = construct_reverse_graph(roots), torchs.construct_reverse_graph(roots)
    assert edges_of(ours) == edges_of(theirs)
    path, met = reverse_closure(inputs, set(), ours)
    assert (path, met) == torchs.reverse_closure(inputs, set(), theirs)
    assert reverse_closure(params, path, ours) == torchs.reverse_closure(params, path, theirs)
    groups = get_param_groups(inputs, params, ours)
    if make is not Shared:  # torch joins two groups by halves
        key = lambda group: sorted(map(id, group["params"]))  # noqa: E731
        expected = torchs.get_param_groups(inputs, params, theirs)
        assert sorted(map(key, groups)) == sorted(map(key, expected))
    assert set().union(*(g["params"] for g in groups)) <= set(params)


def test_a_parameter_is_in_one_group():
    a, b, c = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)
    out = x @ a @ b @ c + x @ (c + a) @ b  # a and c meet in the sum, and the input's path in other places
    x, *params = (get_gradient_edge(t).node for t in (x, a, b, c))
    groups = get_param_groups([x], params, construct_reverse_graph([out.grad_fn]))
    assert sorted(len(g["params"]) for g in groups) == [1, 2]
    assert set().union(*(g["params"] for g in groups)) == set(params)


def test_groups_made_by_hand_run_too():
    module, x, reference, ref_x = case(Block)
    out = module(x)
    reverse = construct_reverse_graph([out.grad_fn])
    params = [get_gradient_edge(p).node for p in module.parameters()]
    groups = get_param_groups([get_gradient_edge(x).node], params, reverse)
    for group in groups:
        group["intermediates"] = list(group["intermediates"])
        group["grads"] = [[None] * len(node.next_functions) for node in group["intermediates"]]
        for node, kept in zip(group["intermediates"], group["grads"]):
            node.register_prehook(lambda grads, kept=kept: kept.__setitem__(slice(None), grads))
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    stage_backward_weight(module.parameters(), groups, retain_graph=True)
    reference(ref_x).sum().backward()
    for ours, theirs in zip(grads(module), grads(reference)):
        torch.testing.assert_close(ours, theirs)


def test_small_things():
    a = torch.ones(2)
    assert _null_coalesce_accumulate(None, a) is a and _null_coalesce_accumulate(a, None) is a
    assert torch.equal(_null_coalesce_accumulate(a, a), a + a)
    assert _get_grad_fn_or_grad_acc(a) is None
    w = nn.Parameter(a)
    assert _get_grad_fn_or_grad_acc(w).variable is w
    assert stage_backward_input([torch.ones(1)], None, [w], [w]) == ((None,), [])
    assert _backward.stage_backward(torch.ones(1), None, [a]) == (None,)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x.clone(), w.clone()

    @staticmethod
    def backward(ctx, grad_x, grad_w):
        return grad_x, grad_w


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x, weight = Passing.apply(x, self.weight)
        return x @ weight


def test_the_weight_halfs_start_can_be_looked_at_and_replaced():
    module, x, reference, ref_x = case(Block)
    _, (group,) = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    assert group["params"] == {_get_grad_fn_or_grad_acc(p) for p in module.parameters()}
    assert len(group["intermediates"]) == len(group["grads"]) >= 2
    group["grads"] = [tuple(None if g is None else 3 * g for g in of) for of in group["grads"]]
    stage_backward_weight(module.parameters(), [group])
    reference(ref_x).sum().backward()
    for ours, theirs in zip(grads(module), grads(reference)):
        torch.testing.assert_close(ours, 3 * theirs)


def test_the_weight_halfs_start_is_read_as_a_dict_is():
    for read in (lambda g: "params" in g, lambda g: g.get("params"), list, len, dict, lambda g: {**g}, lambda g: g.items()):
        module, x, _, _ = case(Block)
        _, (group,) = stage_backward_input([module(x).sum()], None, [x], module.parameters())
        assert read(group), "before anything else of it is read"
        assert list(group) == ["params", "intermediates", "grads"] and dict(group) == group and group.get("other") is None
        del group["grads"], group["intermediates"]
        assert list(group) == ["params"]
        stage_backward_weight(module.parameters(), [group])
        assert all(p.grad is not None for p in module.parameters())


def test_only_looking_at_the_weight_halfs_start_changes_nothing():
    module, x, reference, ref_x = case(Block)
    _, (group,) = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    assert group["grads"] and "other" not in group
    with pytest.raises(KeyError):
        group["other"]
    stage_backward_weight(module.parameters(), [group])
    reference(ref_x).sum().backward()
    assert same(grads(module), grads(reference))


def test_a_custom_functions_gradients_can_be_given_instead():
    torch.manual_seed(0)
    module, x = Custom(), torch.randn(4, 8, requires_grad=True)
    _, (group,) = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    assert [node.name() for node in group["intermediates"]] == ["PassingBackward"]
    given = torch.randn(8, 8)
    group["grads"] = [(None, given)]
    stage_backward_weight(module.parameters(), [group])
    assert torch.equal(module.weight.grad, given)


@pytest.mark.parametrize("grads_given", [[(torch.ones(4, 8), torch.ones(8, 8), torch.ones(1))], [()] * 9])
def test_gradients_for_more_than_there_is_are_refused(grads_given):
    torch.manual_seed(0)
    module, x = Custom(), torch.randn(4, 8, requires_grad=True)
    _, (group,) = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    group["grads"] = grads_given
    with pytest.raises(plumb.Error, match="gradients for"):
        stage_backward_weight(module.parameters(), [group])
