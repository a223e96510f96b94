"""Promises that a forward relies on hold when it is unit-scaled: probabilities, rotations, distances, cosines, inverses, depth."""

import pytest
import torch
from torch import nn

import plumb
from plumb.transforms import unit_scale


@pytest.mark.parametrize("name", ["categorical", "relaxed", "one_hot"])
def test_distributions_of_a_unit_scaled_forward_have_probabilities(name):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            logits = self.layer(x)
            if name == "categorical":
                found = torch.distributions.Categorical(probs=logits.softmax(-1))
                return found.probs + 0 * found.sample()[:, None]
            if name == "relaxed":
                return torch.distributions.RelaxedOneHotCategorical(torch.tensor(0.5), logits=logits).rsample()
            found = torch.distributions.OneHotCategoricalStraightThrough(logits=logits)
            picked = found.rsample()
            found.log_prob(picked.detach())  # which checks that it is one
            return picked

    torch.manual_seed(0)
    y = unit_scale(Policy())(torch.randn(8, 4))
    torch.testing.assert_close(y.sum(-1), torch.ones(8))
    y.square().sum().backward()


@pytest.mark.parametrize("halves", [True, False])
def test_a_rotation_of_a_unit_scaled_forward_is_one(halves):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = self.layer(x)
            angles = torch.outer(torch.arange(x.shape[0]), 0.5 ** torch.arange(4))
            cos, sin = angles.cos(), angles.sin()
            a, b = y.chunk(2, -1)
            if halves:
                turned = y * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)
            else:
                turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(1)
            return y, turned

    torch.manual_seed(0)
    x, scaled = torch.randn(6, 8), unit_scale(Rotary())
    y, turned = scaled(x)
    torch.testing.assert_close(turned.norm(dim=-1), y.norm(dim=-1))
    torch.testing.assert_close(plumb.transforms.fold(scaled)(x)[1], turned)


@pytest.mark.parametrize("cell", ["share", "lerp", "difference", "lstm"])
def test_a_unit_scaled_recurrent_cell_written_by_hand_keeps_its_state(cell):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.of_input, self.of_state = nn.Linear(16, 64), nn.Linear(16, 64)

        def forward(self, steps):
            h = state = torch.zeros_like(steps[0])
            for x in steps:
                z, i, o, n = (self.of_input(x) + self.of_state(h)).chunk(4, -1)
                z, n = z.sigmoid(), n.tanh()
                if cell == "share":
                    h = z * h + (1 - z) * n
                elif cell == "lerp":
                    h = torch.lerp(n, h, z)
                elif cell == "difference":
                    h = n + z * (h - n)
                else:
                    state = z * state + i.sigmoid() * n
                    h = o.sigmoid() * state.tanh()
            return h

    torch.manual_seed(0)
    steps, scaled = torch.randn(40, 32, 16), unit_scale(Cell())
    assert 0.1 < scaled(steps).std() < 1
    assert scaled(steps[:2]).std() > 0.1


class SpelledAttention(nn.Module):
    """Attention by einsums, or by ``@``, with a projection of several dimensions."""

    def __init__(self, by_einsum):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out, self.by_einsum = nn.Parameter(torch.randn(2, 8, 16)), by_einsum

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.by_einsum:
            weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1)
            return torch.einsum("bihd,hde->bie", torch.einsum("bhij,bhjd->bihd", weights, v), self.out)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.out.reshape(16, 16)


def test_an_einsum_is_scaled_as_the_same_product_written_out():
    results, x = [], torch.randn(4, 32, 16)
    for by_einsum in (True, False):
        torch.manual_seed(0)
        scaled = unit_scale(SpelledAttention(by_einsum))
        y = scaled(x)
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        assert abs(scaled.out.std() - 1) < 1e-4
        results.append([y, *(p.grad for p in scaled.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


class Neighbors(nn.Module):
    """A graph of nearest neighbors, as networks on points make one from their features."""

    def __init__(self):
        super().__init__()
        self.features, self.edges = nn.Conv1d(3, 8, 1), nn.Linear(16, 4)

    def forward(self, x):
        x = self.features(x)
        squares = (x**2).sum(1, keepdim=True)
        near = (2 * torch.matmul(x.mT, x) - squares - squares.mT).topk(4, dim=-1)[1]
        x = x.mT
        beside = torch.stack([rows[i] for rows, i in zip(x, near, strict=True)])
        return self.edges(torch.cat([beside - x[:, :, None], beside], -1)).amax(2), x, near


def test_nearest_neighbors_are_those_of_the_distances():
    torch.manual_seed(0)
    _, x, near = unit_scale(Neighbors())(torch.randn(2, 3, 64))
    truly = torch.cdist(x, x).topk(4, dim=-1, largest=False)[1]
    assert torch.equal(near.sort(-1)[0], truly.sort(-1)[0])


class Levels(nn.Module):
    """A finite scalar quantization to five levels, from -2 to 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("most", torch.full((4,), 2.0))

    def forward(self, x):
        bounded = torch.tanh(self.linear(3 * x)) * self.most
        return bounded + (bounded.round() - bounded).detach()


def test_levels_of_a_quantizer_stay_within_its_range():
    torch.manual_seed(0)
    assert unit_scale(Levels())(torch.randn(256, 4)).abs().max() < 2.001


class ImageBlock(nn.Module):
    """A block of a residual network of images, which ends with a relu."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x):
        y = self.norms[1](self.b(torch.relu(self.norms[0](self.a(x)))))
        y += x
        return torch.relu_(y)


def test_residual_blocks_that_end_with_a_relu_do_not_grow():
    torch.manual_seed(0)
    scaled = unit_scale(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *(ImageBlock() for _ in range(16))))
    y = scaled(torch.randn(8, 3, 10, 10))
    y.backward(torch.randn_like(y))
    assert 0.3 < y.std() < 2
    assert all(0.05 < p.grad.std() < 20 for p in scaled.parameters())


class LogScan(nn.Module):
    """h = f * h + i for each step, as minGRU and others compute it at once: in the space of logarithms."""

    def __init__(self):
        super().__init__()
        self.forget, self.input = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        forget, inputs = -nn.functional.softplus(self.forget(x)), self.input(x)
        sums = forget.cumsum(1)
        return (sums + (inputs - sums).logcumsumexp(1)).exp(), forget, inputs


def test_a_scan_of_logarithms_is_the_recurrence():
    torch.manual_seed(0)
    y, forget, inputs = unit_scale(LogScan())(torch.randn(2, 16, 4))
    h = torch.zeros(2, 4)
    for t in range(16):
        h = forget[:, t].exp() * h + inputs[:, t].exp()
    torch.testing.assert_close(y[:, -1], h, rtol=1e-4, atol=1e-5)


class Paths(nn.Module):
    """Minus the logarithm of a path's probability (a linear-chain CRF), of paths of different lengths."""

    def __init__(self):
        super().__init__()
        self.first, self.moves = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5, 5))

    def forward(self, emitted, path, there):
        rows = torch.arange(len(path))
        every, score = self.first + emitted[:, 0], self.first[path[:, 0]] + emitted[rows, 0, path[:, 0]]
        for t in range(1, path.shape[1]):
            longer = torch.logsumexp(every[:, :, None] + self.moves + emitted[:, t, None], 1)
            every = torch.where(there[:, t, None], longer, every)
            score = score + (self.moves[path[:, t - 1], path[:, t]] + emitted[rows, t, path[:, t]]) * there[:, t]
        return (torch.logsumexp(every, 1) - score).mean()


def test_the_probability_of_a_path_stays_one():
    torch.manual_seed(0)
    module, emitted, path = Paths(), torch.randn(4, 6, 5, requires_grad=True), torch.randint(5, (4, 6))
    there = torch.arange(6) < torch.tensor([[6], [4], [5], [2]])
    scaled = unit_scale(module)
    loss = scaled(emitted, path, there)
    expected = torch.func.functional_call(module, dict(scaled.named_parameters()), (emitted, path, there))
    torch.testing.assert_close(loss, expected)
    for mine, plain in zip(torch.autograd.grad(loss, scaled.parameters()), torch.autograd.grad(expected, scaled.parameters())):
        torch.testing.assert_close(mine, plain)


class Pairs(nn.Module):
    """Similarities of two encodings, as contrastive losses take them (SimCLR, CLIP)."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x, y):
        a, b = (nn.functional.normalize(self.encoder(z), dim=-1) for z in (x, y))
        lengths = [torch.rsqrt(z.pow(2).sum(-1, keepdim=True) + 1e-8) for z in (a, b)]
        return a @ b.t(), torch.einsum("id,jd->ij", a * lengths[0], b * lengths[1])


def test_cosines_stay_cosines():
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    for similarity in unit_scale(Pairs())(x, x):
        torch.testing.assert_close(similarity.diagonal(), torch.ones(8))


class Streams(nn.Module):
    """A layer of manifold-constrained hyper-connections (arXiv 2512.24880)."""

    def __init__(self, width, streams=4):
        super().__init__()
        self.weights, self.layer = nn.Linear(streams * width, streams * (streams + 2)), nn.Linear(width, width)

    def forward(self, x):  # batch, streams, width
        n = x.shape[1]
        pre, post, mix = self.weights(nn.functional.rms_norm(x.flatten(1), (x[0].numel(),))).split([n, n, n * n], 1)
        mix = mix.unflatten(1, (n, n)).softmax(-1)
        for _ in range(10):  # rows and columns sum to 1
            mix = mix / mix.sum(-2, keepdim=True)
            mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
        read = (pre.sigmoid()[..., None] * x).sum(1)
        y = self.layer(nn.functional.rms_norm(read, read.shape[-1:]))
        return (2 * post.sigmoid())[..., None] * y[:, None] + mix @ x


def test_streams_that_are_mixed_neither_grow_nor_shrink_with_depth():
    torch.manual_seed(0)
    scaled = unit_scale(nn.Sequential(*(Streams(32) for _ in range(8))))
    x = torch.randn(64, 1, 32).expand(-1, 4, -1).clone().requires_grad_()
    y = scaled(x)
    y.backward(torch.randn_like(y))
    assert 0.3 < y.std() < 3
    assert 0.1 < x.grad.std() < 10


class Substitution(nn.Linear):
    """The inverse of 1 - L for a lower triangle L, row by row, as gated delta rules have it."""

    def forward(self, x):
        solved = (super().forward(x) @ x.mT).tril(-1)
        lower = solved.clone()
        for i in range(1, x.shape[-2]):
            row, above = solved[..., i, :i].clone(), solved[..., :i, :i].clone()
            solved[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
        inverse = solved + torch.eye(x.shape[-2])
        return inverse, lower, inverse @ x


def test_a_forward_substitution_solves_its_equations():
    torch.manual_seed(0)
    scaled = unit_scale(Substitution(4, 4))
    x = torch.randn(3, 6, 4)
    inverse, lower, solution = scaled(x)
    torch.testing.assert_close(inverse @ (torch.eye(6) - lower), torch.eye(6).expand(3, 6, 6), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(solution, inverse @ x)
    assert "it is a step of a forward substitution" in str(plumb.report(scaled))


class Biased(nn.Module):
    """A residual layer whose norm is an affine function alone, as MobileBERT has it (arXiv 2004.02984)."""

    def __init__(self, width, bias):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        y = (x + self.down(self.up(x).relu())) * self.weight
        return y if self.bias is None else y + self.bias


def test_a_bias_of_zeros_that_a_forward_adds_changes_no_scale():
    outputs, gradients = [], []
    for bias in (True, False):
        torch.manual_seed(0)
        scaled = unit_scale(nn.Sequential(*(Biased(32, bias) for _ in range(8))))
        x = torch.randn(64, 32, requires_grad=True)
        y = scaled(x)
        y.backward(torch.randn_like(y))
        outputs.append(y)
        gradients.append(x.grad)
        if bias:
            assert 0.1 < scaled[7].bias.grad.std() < 10
    assert torch.equal(*outputs) and torch.equal(*gradients)
