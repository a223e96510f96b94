"""Plans of pipelines from Python: made, kept in a file, and run."""

import pickle

import pytest
import torch
from plumb.pipelining import MultiUseParameterConfig, Plan, pipeline, plan
from plumb.pipelining.schedules import ScheduleTable
from torch import nn

import plumb


class Net(nn.Module):
    def __init__(self, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.head = nn.Linear(16, 64)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_a_plan_is_made_kept_in_a_file_and_cuts_the_model(net, tmp_path):
    x = torch.randn(4, 16)
    best = plan(net, (x,), ranks=2, microbatches=4, loss=lambda y: y.pow(2).mean(), tables=500)
    assert best.ranks == 2 and best.microbatches == 4 and len(best.memory) == 2 and best.seconds > 0
    assert {row["schedule"] for row in best.rows} >= {"1F1B", "Joint", "ZBVZeroBubble"} and best.conclusion
    best.save(tmp_path / "best.json")
    best.page(tmp_path / "best.html")
    assert "time line" in (tmp_path / "best.html").read_text() or "<svg" in (tmp_path / "best.html").read_text()
    again = Plan(tmp_path / "best.json")
    assert again.cut == best.cut and again.schedule.csv() == best.schedule.csv() and again.recompute == best.recompute
    pipe = pipeline(net, (x,), split_policy=again)
    assert pipe.num_stages == again.schedule.num_stages
    assert torch.equal(pipe(x)[0], net(x))
    whole = pipeline(net, (x,))
    with pytest.raises(plumb.Error, match=rf"the pipe has 1 stages, and the plan {pipe.num_stages}(?s:.*)split_policy=plan"):
        again.build_stages(whole, 0, "cpu")


def test_a_plan_of_one_rank_trains_with_the_bits_of_the_model(net):
    x, y = torch.randn(8, 16), torch.randint(64, (8,))
    best = plan(net, (x[:2],), ranks=1, microbatches=4, take="InterleavedZeroBubble", tables=500)
    pipe = pipeline(net, (x[:2],), split_policy=best)
    stages = best.build_stages(pipe, 0, "cpu")
    assert len(stages) == pipe.num_stages > 1
    losses: list[torch.Tensor] = []
    schedule = ScheduleTable(stages, 4, nn.functional.cross_entropy, table=best.schedule)
    schedule.step(x, target=y, losses=losses)
    parts = [nn.functional.cross_entropy(net(a), b) for a, b in zip(x.chunk(4), y.chunk(4))]
    assert [loss.item() for loss in losses] == [part.item() for part in parts]


class Shared(nn.Module):
    """Two parts read one table."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.encoder, self.decoder = (nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]) for _ in range(2))

    def forward(self, ids, targets):
        x = self.decoder(self.encoder(self.table(ids)).mean(1, keepdim=True) + self.table(targets))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("sent", [MultiUseParameterConfig.TRANSMIT, {"table.weight": MultiUseParameterConfig.TRANSMIT}])
def test_a_plan_that_transmits_a_shared_parameter_trains_with_the_bits_of_the_model(tmp_path, sent):
    torch.manual_seed(0)
    net, (ids, targets) = Shared(), torch.randint(64, (2, 8, 32))
    best = plan(net, (ids[:2], targets[:2]), ranks=1, microbatches=4, stages_per_rank=[4], take="InterleavedZeroBubble", loss="output",
                schedules=["InterleavedZeroBubble"], multi_use_param_spec=sent, estimate=True)  # fmt: skip
    best.save(tmp_path / "best.json")
    best = pickle.loads(pickle.dumps(best))
    assert repr(best) == repr(Plan(tmp_path / "best.json")) and best.transmit in (["all"], ["table.weight"])
    pipe = pipeline(net, (ids[:2], targets[:2]), split_policy=best, output_loss_value_spec=True)
    holders = [s for s in range(4) if any("table" in name for name, _ in pipe.get_stage_module(s).named_parameters())]
    assert len(holders) == 1 and not pipe.replicated_params
    copied = pipeline(net, (ids[:2], targets[:2]), split_policy=best, multi_use_param_spec=MultiUseParameterConfig.REPLICATE)
    assert copied.replicated_params, "as asked for, whatever the plan says"
    for a, b in zip(ids.chunk(4), targets.chunk(4)):
        (net(a, b) / 4).backward()
    expected = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    schedule = ScheduleTable(best.build_stages(pipe, 0, "cpu"), 4, table=best.schedule)
    schedule.step(ids, targets)
    for name, gradient in expected.items():
        assert torch.equal(net.get_parameter(name).grad, gradient), name


def test_names_that_are_no_parameters_are_refused_where_they_were_given(net, tmp_path):
    net.register_buffer("scale", torch.ones(1))
    x, spec = torch.randn(4, 16), MultiUseParameterConfig.TRANSMIT
    best = plan(net, (x,), ranks=2, schedules=["1F1B"], estimate=True)
    best.save(tmp_path / "best.json")
    for name in ("nobody", "scale", 3):
        match = rf"no parameter {name!r}(?s:.*)multi_use_param_spec(?s:.*)named_parameters"
        with pytest.raises(plumb.Error, match=match):
            plan(net, (x,), ranks=2, multi_use_param_spec={name: spec})
        with pytest.raises(plumb.Error, match=match):
            pipeline(net, (x,), multi_use_param_spec={name: spec})
        if isinstance(name, str):
            text = (tmp_path / "best.json").read_text().replace('"transmit": []', f'"transmit": ["{name}"]')
            (tmp_path / "other.json").write_text(text)
            with pytest.raises(plumb.Error, match=rf"no parameter '{name}'(?s:.*)the plan's transmit"):
                pipeline(net, (x,), split_policy=Plan(tmp_path / "other.json"))


def test_each_rank_gets_the_stages_of_its_plan(net):
    x = torch.randn(4, 16)

    class Pipe:
        num_stages = 2

        def build_stage(self, index, device, group, recompute):
            return index

    best = plan(net, (x,), ranks=2, microbatches=4, schedules=["1F1B", "DualPipe"], take="DualPipe", estimate=True)
    assert [best.build_stages(Pipe(), rank, "cpu") for rank in (0, 1)] == [[0, 1], [0, 1]], "a stage has two ranks"
    best = plan(net, (x,), ranks=2, microbatches=4, schedules=["1F1B"], estimate=True)
    assert [best.build_stages(Pipe(), rank, "cpu") for rank in (0, 1)] == [[0], [1]]
    for rank in ("0", 0.5):
        with pytest.raises(plumb.Error, match=rf"rank is {rank!r}, not a whole number(?s:.*)build_stages\(\)"):
            best.build_stages(Pipe(), rank, "cpu")
    for rank in (-1, 2):
        with pytest.raises(plumb.Error, match=f"there is no rank {rank}: the plan is for 2"):
            best.build_stages(Pipe(), rank, "cpu")


def test_a_plan_of_another_model_is_refused_with_what_to_do(net):
    x = torch.randn(4, 16)
    best = plan(net, (x,), ranks=2, microbatches=4, schedules=["1F1B"], estimate=True)
    with pytest.raises(plumb.Error, match="the graph has no value(?s:.*)the model that the plan was made for"):
        pipeline(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4), *(nn.Tanh() for _ in range(14))), (x,), split_policy=best)
    with pytest.raises(plumb.Error, match="for a graph of 17 operators, and this one has 25(?s:.*)the model that the plan was made for"):
        pipeline(Net(12), (x,), split_policy=best)


def test_a_search_beside_a_bidirectional_schedule_starts_from_the_others(net):
    best = plan(net, (torch.randn(4, 16),), ranks=2, microbatches=4, schedules=["DualPipe", "Joint"], take="Joint", tables=100)
    assert best.schedule.name == "Joint" and best.ranks == 2


def test_what_cannot_be_planned_says_why(net, tmp_path):
    x = torch.randn(4, 16)
    with pytest.raises(plumb.Error, match="the least that a rank needs"):
        plan(net, (x,), ranks=2, memory=1.0, tables=100)
    for memory in (0, -1, float("nan")):
        with pytest.raises(plumb.Error, match="no number of bytes above zero"):
            plan(net, (x,), ranks=2, memory=memory)
    for link in ((0, 1), (float("inf"), 1), (1, float("nan"))):
        with pytest.raises(plumb.Error, match="the link has no rate"):
            plan(net, (x,), ranks=2, link=link)
    for wrong in ({"link": 12.5}, {"link": (1,)}, {"link": ("a", "b")}, {"memory": "1GiB"}):
        with pytest.raises(plumb.Error, match=next(iter(wrong)) + " is .*(?s:.*)try: "):
            plan(net, (x,), ranks=2, **wrong)
    with pytest.raises(plumb.Error, match="the plan is a int"):
        Plan(3)
    for counts in ([], [0], [1, -3], [10**9]):
        with pytest.raises(plumb.Error, match="stages_per_rank are no numbers from 1 to 1024"):
            plan(net, (x,), ranks=2, stages_per_rank=counts)
    for counts in ({"ranks": 0}, {"ranks": 2000}, {"microbatches": -1}, {"replicas": 0}, {"replicas": 10**6}):
        with pytest.raises(plumb.Error, match="cannot be(?s:.*)from 1 to 1024 ranks, and to 65536 of the others"):
            plan(net, (x,), **{"ranks": 2, **counts})
    for loss, says in ((lambda y: 3.0, "type <class 'float'>"), (lambda y: None, "type <class 'NoneType'>"), (lambda y: y[99], "IndexError")):
        with pytest.raises(plumb.Error, match=says):
            plan(net, (x,), ranks=2, loss=loss)
    with pytest.raises(plumb.Error, match="there is no loss named 'huber'"):
        plan(net, (x,), ranks=2, loss="huber")
    (tmp_path / "bad.json").write_text('{"plumb_plan": 1}')
    with pytest.raises(plumb.Error, match="is no plan of plumb"):
        Plan(tmp_path / "bad.json")
