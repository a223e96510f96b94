"""Functions in place of actions, stages with methods of their own, stages run by hand, and values that are compared."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch
from pipelines import LOOPED, MSE, SINGLE, Nested, V, accumulate, batch, blocks, grads, same, schedule_for
from plumb.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, pipe_split, pipeline
from plumb.pipelining._backward import map_debug_info
from plumb.pipelining._utils import PipeliningMetadataError
from plumb.pipelining.schedules import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    REDUCE_GRAD,
    RESHARD,
    SEND_F,
    UNSHARD,
    PipelineScheduleMulti,
    get_schedule_class,
)
from torch import nn
from torch_names import schedules  # noqa: F401  (gives schedules their pipeline_order_with_comms)
from torch_names._utils import (
    extract_tensor_meta,
    flatten_args,
    generate_rank_to_stage_mapping,
    generate_stage_to_rank_mapping,
    validate_tensors_metadata,
)
from torch_names.stage import _RecvInfo

import plumb

MICROBATCHES = 4


def watch(schedule, kind, seen):
    """Puts a function in place of a kind that does what the schedule would have done, and notes it."""

    def function(action, context):
        assert context.schedule_ref is schedule and len(context.arg_mbs) == MICROBATCHES
        seen.append(str(action))
        schedule._run.perform(action)

    schedule.register_custom_function(kind, function)


@pytest.mark.parametrize("name", SINGLE + LOOPED + V)
def test_a_function_for_complete_gradients_scales_them(name):
    count = 1 if name in SINGLE else 2 if name in V else 3
    modules = blocks(count)
    reference = copy.deepcopy(modules)
    x, target = batch()
    seen, losses = [], []
    schedule = schedule_for(name, modules, MICROBATCHES)
    watch(schedule, REDUCE_GRAD, seen)
    out = schedule.step(x, target=target, losses=losses)
    expected, reference_losses = accumulate(reference, x, target, MICROBATCHES)
    torch.testing.assert_close(out, expected)
    assert not out.requires_grad and same(losses, reference_losses)
    for ours, theirs in zip(grads(modules), grads(reference)):
        torch.testing.assert_close(ours, theirs)
    assert sorted(seen) == [f"{s}REDUCE_GRAD" for s in range(count)]


@pytest.mark.parametrize("kind", [FORWARD, FULL_BACKWARD])
def test_a_function_runs_in_place_of_every_action_of_its_kind(kind):
    modules = blocks(3)
    reference = copy.deepcopy(modules)
    x, target = batch()
    seen = []
    schedule = schedule_for("Interleaved1F1B", modules, MICROBATCHES)
    watch(schedule, kind, seen)
    schedule.step(x, target=target)
    accumulate(reference, x, target, MICROBATCHES)
    for ours, theirs in zip(grads(modules), grads(reference)):
        torch.testing.assert_close(ours, theirs)
    assert sorted(seen) == sorted(f"{s}{kind.value}{m}" for s in range(3) for m in range(MICROBATCHES))


def test_parts_of_a_pair_go_to_their_own_functions_and_a_pair_to_its_own():
    x, target = batch()
    parts, pairs = [], []
    for kind, seen in ((FORWARD, parts), (OVERLAP_F_B, pairs)):
        schedule = schedule_for("DualPipeV", blocks(2), MICROBATCHES)
        if kind is OVERLAP_F_B:
            def together(action, context, schedule=schedule, seen=seen):
                seen.append(str(action))
                schedule._run.perform(action)

            schedule.register_custom_function(kind, together)
        else:
            watch(schedule, kind, seen)
        schedule.step(x, target=target)
        expected = [str(a) for row in schedule.pipeline_order.values() for a in row if a is not None]
        wanted = [a for a in expected if a.endswith("OVERLAP_F_B")]
        assert pairs == (wanted if kind is OVERLAP_F_B else [])
    assert len(parts) == 2 * MICROBATCHES and pairs


def by_torchs_rules(schedule, seen):
    """Functions as in torch's documentation: they wait, compute, and pass values to neighbors of the same rank."""
    from plumb.pipelining.schedules import _wait_batch_p2p

    stages = {stage.stage_index: stage for stage in schedule._stages}

    def forward(action, context):
        index, m = action.stage_index, action.microbatch_index
        stage = stages[index]
        if not stage.is_first and index - 1 not in stages:
            assert (index, m) in schedule.fwd_recv_ops
            _wait_batch_p2p(schedule.fwd_recv_ops.pop((index, m)))
        output = stage.forward_one_chunk(m, context.arg_mbs[m], context.kwarg_mbs[m])
        schedule._maybe_compute_loss(stage, output, context.target_mbs, m)
        if index + 1 in stages:
            stages[index + 1].set_local_fwd_input(output, m)
        seen.append(str(action))

    def backward(action, context):
        index, m = action.stage_index, action.microbatch_index
        stage = stages[index]
        if not stage.is_last and index + 1 not in stages:
            assert (index, m) in schedule.bwd_recv_ops
            _wait_batch_p2p(schedule.bwd_recv_ops.pop((index, m)))
        loss = schedule._maybe_get_loss(stage, m)
        schedule.backward_counter[index] += 1
        last = schedule.backward_counter[index] == schedule._n_microbatches
        whole = action.computation_type is FULL_BACKWARD
        stage.backward_one_chunk(m, loss=loss, full_backward=whole, last_backward=last)
        if index - 1 in stages:
            stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(m), m)
        seen.append(str(action))

    def together(action, context):
        with ThreadPoolExecutor(2) as threads:
            works = zip((forward, backward), action.sub_actions)
            for done in [threads.submit(function, part, context) for function, part in works]:
                done.result()

    for kind, function in zip((FORWARD, FULL_BACKWARD, BACKWARD_INPUT, OVERLAP_F_B), (forward, backward, backward, together)):
        schedule.register_custom_function(kind, function)


def functions_step(rank, size, name):
    found = []
    for functions in (False, True):
        count = 2 * size
        here = sorted([rank, count - 1 - rank]) if name in V else list(range(rank, count, size))
        modules = blocks(count)
        stages = [PipelineStage(modules[i], i, count, "cpu") for i in here]
        schedule = get_schedule_class(name)(stages, MICROBATCHES, MSE)
        seen, losses = [], []
        if functions:
            by_torchs_rules(schedule, seen)
        x, target = batch(8)
        for _ in range(2):
            schedule.step(*([x] if 0 in here else []), target=target if count - 1 in here else None, losses=losses)
        assert len(seen) == (2 * 2 * 2 * MICROBATCHES if functions else 0)
        found.append(losses + grads([modules[i] for i in here]))
    return found


@pytest.mark.parametrize("name, size", [("Interleaved1F1B", 2), ("LoopedBFS", 1), ("DualPipeV", 2), ("DualPipeV", 1)])
def test_functions_by_torchs_rules_change_no_bit(name, size):
    for plain, own in ranks.run(functions_step, size, name) if size > 1 else [functions_step(0, 1, name)]:
        assert same(plain, own)


def test_a_function_may_give_a_stage_other_inputs():
    modules = blocks(2)
    reference = copy.deepcopy(modules)
    x, target = batch()
    schedule = schedule_for("LoopedBFS", modules, MICROBATCHES)
    first, second = schedule._stages

    def forward(action, context):
        m = action.microbatch_index
        stage = schedule._stages[action.stage_index]
        output = stage.forward_one_chunk(m, (context.arg_mbs[m][0] * 2,))
        schedule._maybe_compute_loss(stage, output, context.target_mbs, m)
        if stage is first:
            second.set_local_fwd_input(output * 3, m)

    schedule.register_custom_function(FORWARD, forward)
    losses = []
    schedule.step(x, target=target, losses=losses)
    with torch.no_grad():
        expected = [MSE(reference[1](reference[0](a * 2) * 3), b) for a, b in zip(x.chunk(4), target.chunk(4))]
    assert same(losses, expected)


def test_a_function_that_leaves_its_action_out_is_named():
    x, target = batch()
    for kind, what in ((FORWARD, "0F0 left out the forward"), (FULL_BACKWARD, "left out the backward of its stage")):
        schedule = schedule_for("LoopedBFS", blocks(2), MICROBATCHES)
        schedule.register_custom_function(kind, lambda action, context: None)
        with pytest.raises(plumb.Error, match=what):
            schedule.step(x, target=target)


def test_what_a_function_raises_is_the_cause_of_the_error():
    x, target = batch()
    schedule = schedule_for("LoopedBFS", blocks(2), MICROBATCHES)
    schedule.register_custom_function(FORWARD, lambda action, context: {}["nothing"])
    with pytest.raises(plumb.Error, match="rank 0 at 0F0: KeyError") as raised:
        schedule.step(x, target=target)
    assert isinstance(raised.value.__cause__, KeyError)


def test_functions_around_the_use_of_a_stage_run_where_the_table_has_them():
    x, target = batch()
    seen = []
    schedule = schedule_for("LoopedBFS", blocks(2), MICROBATCHES)
    for kind in (UNSHARD, RESHARD, REDUCE_GRAD):
        schedule.register_custom_function(kind, lambda action, context: seen.append(str(action)))
    schedule.step(x, target=target)
    around = [str(a) for a in schedule.pipeline_order_with_comms[0] if "SHARD" in str(a)]
    assert [s for s in seen if "SHARD" in s] == around and around
    assert sorted(s for s in seen if "REDUCE" in s) == ["0REDUCE_GRAD", "1REDUCE_GRAD"]


def test_messages_of_a_stages_own_are_refused():
    class Own(PipelineStage):
        def get_fwd_send_ops(self, chunk):
            return super().get_fwd_send_ops(chunk)

    x, target = batch()
    schedule = ScheduleGPipe(Own(nn.Linear(8, 8), 0, 1, "cpu"), MICROBATCHES, MSE)
    with pytest.raises(plumb.Error, match="(?s)stage 0 makes messages of its own .get_fwd_send_ops.*leave these methods out"):
        schedule.step(x, target=target)
    with pytest.raises(plumb.Error, match="run the stage in a schedule"):
        PipelineStage(nn.Linear(8, 8), 0, 1, "cpu").get_bwd_recv_ops(0)


def test_a_backward_of_a_stages_own_that_the_engine_does_not_call_is_refused():
    x, target = batch()
    stage = PipelineStage(nn.Linear(8, 8), 0, 1, "cpu")
    stage.backward_maybe_with_nosync = lambda *args, **kwargs: None
    schedule = ScheduleGPipe(stage, MICROBATCHES, MSE)
    with pytest.raises(plumb.Error, match="(?s)stage 0 has a backward of its own.*override backward_one_chunk"):
        schedule.step(x, target=target)


def test_functions_that_cannot_be_are_refused():
    schedule = schedule_for("LoopedBFS", blocks(2), MICROBATCHES)
    with pytest.raises(ValueError, match="SEND_F"):
        schedule.register_custom_function(SEND_F, print)
    schedule.register_custom_function(FORWARD, print)
    with pytest.warns(UserWarning, match="replaced"):
        schedule.register_custom_function(FORWARD, print)


def test_rows_count_with_functions_too():
    modules = blocks(2)
    reference = copy.deepcopy(modules)
    x, target = batch(7)
    schedule = schedule_for("ZBVZeroBubble", modules, 3)
    schedule.register_custom_function(REDUCE_GRAD, lambda action, context: schedule._run.perform(action))
    schedule.step(x, target=target)
    accumulate(reference, x, target, 3)
    for ours, theirs in zip(grads(modules), grads(reference)):
        torch.testing.assert_close(ours, theirs)


class Skipping(nn.Module):
    """A value that the first stage makes is used in all others; two stages are neighbors on one rank under a loop."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        first = torch.tanh(self.layers[0](x))
        x = first
        for layer in self.layers[1:]:
            pipe_split()
            x = torch.relu(layer(x)) + first
        return x


def cut_step(rank, size, name):
    torch.manual_seed(3)
    model = Skipping()
    x, target = batch(8)
    pipe = pipeline(model, (x[:2],))
    per_rank = 4 // size
    here = [rank + i * size for i in range(per_rank)]
    if name == "ZBVZeroBubble":
        here = [s for s, r in generate_stage_to_rank_mapping(size, 4, "v").items() if r == rank]
    stages = [pipe.build_stage(s, torch.device("cpu")) for s in here]
    schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, MICROBATCHES, MSE)
    for stage in stages:
        stage._runtime_validate = True
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        schedule.step(*([x] if 0 in here else []), **({"target": target} if 3 in here else {}))
    return {n: p.grad for stage in stages for n, p in stage.submod.named_parameters()}


@pytest.mark.parametrize("name, size", [("1F1B", 4), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("LoopedBFS", 1)])
def test_skip_connections_over_processes_of_stages_that_compare_values(name, size):
    ours = ranks.run(cut_step, size, name)
    torch.manual_seed(3)
    model = Skipping()
    x, target = batch(8)
    for inputs, targets in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
        (MSE(model(inputs), targets) / MICROBATCHES).backward()
    found = {n: g for part in ours for n, g in part.items()}
    assert found.keys() == dict(model.named_parameters()).keys()
    for n, p in model.named_parameters():
        torch.testing.assert_close(found[n], p.grad)


def nested_step(rank, size):
    modules = blocks(size, make=Nested)
    stage = PipelineStage(modules[rank], rank, size, "cpu")
    stage._runtime_validate = True
    x, target = batch(8)
    schedule = Schedule1F1B(stage, MICROBATCHES, lambda out, t: MSE(out["pair"][0], t))
    losses = []
    out = schedule.step(*([x] if rank == 0 else []), target=target if rank == size - 1 else None, losses=losses)
    evaluated = schedule.eval(*([x] if rank == 0 else []))
    assert (out is None) == (rank < size - 1) and (evaluated is None) == (out is None)
    assert not stage.fwd_cache and not stage.bwd_cache
    return losses, [p.grad for p in modules[rank].parameters()]


def test_nested_values_cross_between_ranks_of_stages_that_compare_values():
    ours = ranks.run(nested_step, 2)
    modules = blocks(2, make=Nested)
    x, target = batch(8)
    losses = []
    for inputs, targets in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
        middle = modules[0](inputs)
        out = modules[1](*middle) if isinstance(middle, tuple) else modules[1](middle)
        loss = MSE(out["pair"][0], targets)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    assert same(ours[1][0], losses) and ours[0][0] == []
    for (_, found), module in zip(ours, modules):
        for ours_grad, p in zip(found, module.parameters()):
            assert (ours_grad is None) == (p.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(ours_grad, p.grad)


# --- values that are compared ---
def test_a_step_raises_the_type_of_its_stages_error():
    stage = PipelineStage(nn.Linear(8, 8), 0, 1, "cpu")
    stage._runtime_validate = True
    schedule = ScheduleGPipe(stage, 2)
    schedule.step(torch.randn(4, 8))
    with pytest.raises(PipeliningMetadataError, match="rank 0 at 0F0: .*shape mismatch") as raised:
        schedule.step(torch.randn(6, 8))
    assert raised.value.kind is plumb.ErrorKind.TensorMismatch and raised.value.__cause__ is not None


def compared():
    stage = PipelineStage(nn.Linear(8, 8), 0, 2, "cpu")
    stage._runtime_validate = True
    stage.chunks = 8
    stage.forward_one_chunk(0, (torch.randn(2, 8),))
    return stage


def test_values_unlike_the_first_microbatchs_are_named_when_asked_for():
    stage = compared()
    stage.forward_one_chunk(1, (torch.randn(2, 8),))
    with pytest.raises(PipeliningMetadataError, match="Stage 0: forward inputs.*shape mismatch"):
        stage.forward_one_chunk(2, (torch.randn(3, 8),))
    with pytest.raises(PipeliningMetadataError, match="dtype mismatch"):
        stage.forward_one_chunk(2, (torch.ones(2, 8, dtype=torch.int32),))
    stage.submod.register_forward_hook(lambda module, inputs, output: output.flatten())
    with pytest.raises(PipeliningMetadataError, match="forward outputs.*shape mismatch"):
        stage.forward_one_chunk(2, (torch.randn(2, 8),))
    free = PipelineStage(nn.Linear(8, 8), 0, 2, "cpu")
    for rows in (2, 3):
        free.forward_one_chunk(rows, (torch.randn(rows, 8),))
    assert [outputs[0].shape[0] for outputs, *_ in free.fwd_cache.values()] == [2, 3]


# --- a stage's own methods ---
def test_a_stage_goes_forward_and_back_by_hand():
    first, second = (PipelineStage(m, i, 2, "cpu") for i, m in enumerate(blocks(2)))
    reference = copy.deepcopy([first.submod, second.submod])
    for stage in (first, second):
        stage.has_backward, stage.chunks, stage.stage_index_to_group_rank = True, 2, {0: 0, 1: 0}
    x, target = batch(4)
    for m, (inputs, targets) in enumerate(zip(x.chunk(2), target.chunk(2))):
        second.set_local_fwd_input(first.forward_one_chunk(m, (inputs,)), m)
        loss = MSE(second.forward_one_chunk(m, ()), targets)
        second.backward_one_chunk(m, loss=loss, full_backward=False)
        first.set_local_bwd_input(second.get_local_bwd_output(m), m)
        assert (reference[1].up.weight.grad is None) == (second.submod.up.weight.grad is None)
        first.backward_one_chunk(m)
        second.backward_weight_one_chunk(m)
        MSE(reference[1](reference[0](inputs)), targets).backward()
    for stage, module in zip((first, second), reference):
        for ours, theirs in zip(stage.submod.parameters(), module.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(second.output_chunks) == 2 and not first.output_chunks
    second.scale_grads(2)
    torch.testing.assert_close(second.submod.up.weight.grad * 2, reference[1].up.weight.grad)


def test_steps_by_hand_in_the_wrong_order_are_refused():
    stage = PipelineStage(nn.Linear(8, 8), 1, 2, "cpu", dw_builder=lambda: None)
    stage.has_backward, stage.chunks = True, 2
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        stage.backward_weight_one_chunk(bwd_chunk_id=0)
    with pytest.raises(AssertionError, match="forward_one_chunk"):
        stage.backward_one_chunk(0)
    with pytest.raises(AssertionError, match="stage 0"):
        stage.forward_one_chunk(0, ())
    with pytest.raises(AssertionError, match="none of the step's 2"):
        stage.backward_one_chunk(5)


class Counting(PipelineStage):
    def forward_one_chunk(self, fwd_chunk_id, args, kwargs=None, save_forward_output=True):
        self.calls.append(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)


def test_a_stage_with_a_method_of_its_own_is_run_by_it():
    (module,) = blocks(1)
    reference = [copy.deepcopy(module)]
    stage = Counting(module, 0, 1, "cpu")
    stage.calls = []
    x, target = batch()
    out = ScheduleGPipe(stage, MICROBATCHES, MSE).step(x, target=target)
    expected, _ = accumulate(reference, x, target, MICROBATCHES)
    torch.testing.assert_close(out, expected)
    assert stage.calls == list(range(MICROBATCHES)) and stage.output_chunks
    for ours, theirs in zip(grads([module]), grads(reference)):
        torch.testing.assert_close(ours, theirs)


class Far(PipelineStage):
    """Says whom it talks to, and makes no messages."""

    def _prepare_forward_infra(self, *args):
        self.args_recv_info = {0: tuple(_RecvInfo("x", source=s) for s in self.receives)}
        self.act_send_info = {0: list(self.sends)}

    def get_fwd_recv_ops(self, chunk):
        return []


@pytest.mark.parametrize("receives, sends, far", [([0], [2], None), ([], [3], 3), ([3], [], 3)])
def test_stages_with_messages_of_their_own_may_talk_to_neighbors_only(receives, sends, far):
    stage = Far(nn.Linear(8, 8), 1, 4, "cpu")
    stage.receives, stage.sends = receives, sends
    schedule = PipelineScheduleMulti([stage], 1)
    schedule.pipeline_order = {r: [None] for r in range(4)}
    if far is None:
        assert schedule.step() is None
        return
    with pytest.raises(RuntimeError, match=r"adjacent-stage communication"):
        schedule.step()


# --- small things that are imported ---
def test_stages_are_placed_round_or_forth_and_back():
    assert generate_stage_to_rank_mapping(3, 7) == {s: s % 3 for s in range(7)}
    assert list(generate_stage_to_rank_mapping(3, 9, style="v").values()) == [0, 1, 2, 2, 1, 0, 0, 1, 2]
    assert generate_rank_to_stage_mapping(2, 4, style="v") == {0: [0, 3], 1: [1, 2]}
    with pytest.raises(ValueError, match="multiple"):
        generate_stage_to_rank_mapping(2, 5, style="v")
    with pytest.raises(ValueError, match="spiral"):
        generate_stage_to_rank_mapping(2, 4, style="spiral")


def test_pictures_of_tensors_say_what_differs():
    a, b = torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int32).t()
    meta = extract_tensor_meta(a)
    assert meta.get_diff(extract_tensor_meta(a.clone().requires_grad_())) == []
    assert [d.split()[0] for d in meta.get_diff(extract_tensor_meta(b))] == ["stride", "dtype"]
    assert meta.to_tensor("cpu").shape == a.shape
    assert validate_tensors_metadata("here", (meta, None), (a, None)) == []
    with pytest.raises(PipeliningMetadataError, match="here: 1 values where 2"):
        validate_tensors_metadata("here", (meta, None), (a,))
    with pytest.warns(UserWarning, match="value 0: stride"):
        validate_tensors_metadata("here", (meta,), (b,), raise_on_mismatch=False, warn_on_mismatch=True)


def test_arguments_are_flattened_and_described():
    w = torch.ones(2, requires_grad=True) * 2
    (again, leaves) = flatten_args(({"w": w}, 3), detach=True)
    assert again[1] == 3 and leaves[0] is again[0]["w"] and leaves[0].is_leaf and leaves[0].requires_grad
    text = map_debug_info({"w": w, "n": (1,)})
    assert text["n"] == ("1",) and "grad=True" in text["w"] and "[2]" in text["w"]
