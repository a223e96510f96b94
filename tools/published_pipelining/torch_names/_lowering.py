"""Tables with messages as torch's have them: in torch's order, between neighbors. A run does without; it finds its messages
in the table that computes (plumb/schedule/lower.h follows a time line for this)."""

from __future__ import annotations

from collections.abc import Callable

from plumb.pipelining._actions import RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, _Action

from plumb import Error, ErrorKind

Rows = list[list["_Action | None"]]
RankOf = Callable[[int, int], int]  # the rank of a stage for a microbatch

# By kind: how far the value goes, and the kinds of its messages.
_MAKES = {F: (1, SEND_F, RECV_F), I: (-1, SEND_B, RECV_B), B: (-1, SEND_B, RECV_B)}
_OTHER_END = {SEND_F: 1, RECV_B: 1, SEND_B: -1, RECV_F: -1}  # by kind: where the other stage is


def parts_of(action: _Action | None) -> tuple[_Action, ...]:
    return () if action is None else action.sub_actions or (action,)


class Known(set):
    """Values that a rank has made, sent and received: kind (of backwards the input half), stage and microbatch."""

    def put(self, action: _Action) -> None:
        kind = I if action.computation_type is B else action.computation_type
        self.add((kind, action.stage_index, action.microbatch_index))

    def has_inputs(self, action: _Action | None, num_stages: int) -> bool:
        """Returns whether the values that a forward or backward, or both of a pair, start from are here."""
        for stage, kind, microbatch, _ in parts_of(action):
            step, _, receive = _MAKES.get(kind, (0, None, None))
            if step == 0 or stage == (0 if kind is F else num_stages - 1):
                continue
            if (receive, stage, microbatch) not in self and (F if kind is F else I, stage - step, microbatch) not in self:
                return False
        return True


def check_rows(rows: Rows, ranks: list[int]) -> None:
    """Raises `plumb.Error` for a stage that is on no rank, and for an entry of no stage."""
    for rank in ranks:
        if not 0 <= rank < len(rows):
            raise Error(f"the schedule has a stage on rank {rank} and rows for {len(rows)} ranks", kind=ErrorKind.Schedule)
    for action in (part for row in rows for a in row for part in parts_of(a)):
        stages = {action.stage_index, action.stage_index + _OTHER_END.get(action.computation_type, 0)}
        if not stages <= set(range(len(ranks))):
            raise Error(f"the schedule has {len(ranks)} stages, and an entry {action}", kind=ErrorKind.Schedule)


def stuck(rows: Rows, done: list[int]) -> Error:
    where = ", ".join(f"rank {r} at {row[done[r]]}" for r, row in enumerate(rows) if done[r] < len(row))
    return Error(
        f"the schedule stops: nothing can run of {where}",
        kind=ErrorKind.Schedule,
        remedy="check the table; every entry needs its input from an entry before it",
    )


def rank_of_entries(rows: Rows, ranks: list[int]) -> RankOf:
    """Returns the rank where the rows run a stage's microbatch, for tables with every stage on two ranks."""
    places = {(p.stage_index, p.microbatch_index): r for r, row in enumerate(rows) for a in row for p in parts_of(a)}
    return lambda stage, microbatch: places.get((stage, microbatch), ranks[stage])


def with_messages(rows: Rows, ranks: list[int], rank_of: RankOf | None = None) -> Rows:
    """Puts sends and receives into a table that only computes; `ranks`: by stage.

    In every round each rank, from the first on, runs its next entry if its input is there. A send stands right behind the
    entry that makes the value, and at the same moment its receive is appended to the other rank's row. A pair runs when both
    parts can. Idle entries take a turn and are dropped. Raises `plumb.Error` that names the entries that cannot run.
    """
    check_rows(rows, ranks)
    rank_of = rank_of or (lambda stage, _: ranks[stage])
    lowered: Rows = [[] for _ in rows]
    known, done = [Known() for _ in rows], [0] * len(rows)

    def put(rank: int, action: _Action) -> None:
        lowered[rank].append(action)
        known[rank].put(action)

    while left := [rank for rank, row in enumerate(rows) if done[rank] < len(row)]:
        progress = False
        for rank in left:
            action = rows[rank][done[rank]]
            if not known[rank].has_inputs(action, len(ranks)):
                continue
            progress, done[rank] = True, done[rank] + 1
            if action is not None:
                lowered[rank].append(action)
            for part in parts_of(action):
                known[rank].put(part)
                stage, kind, microbatch, _ = part
                step, send, receive = _MAKES.get(kind, (0, None, None))
                if step == 0 or not 0 <= stage + step < len(ranks):
                    continue
                peer = rank_of(stage + step, microbatch)
                if peer != rank:
                    put(rank, _Action(stage, send, microbatch))
                    put(peer, _Action(stage + step, receive, microbatch))
        if not progress:
            raise stuck(rows, done)
    return lowered


def late_receives(rows: Rows, ranks: list[int], rank_of: RankOf | None = None) -> Rows:
    """Moves receives to right before the entry that uses them. If two ranks send to each other the lower one still receives
    first, so that blocking messages meet. Raises `plumb.Error` for a receive that nothing uses."""
    check_rows(rows, ranks)
    rank_of = rank_of or (lambda stage, _: ranks[stage])

    def peer(action: _Action) -> int:
        return rank_of(action.stage_index + _OTHER_END[action.computation_type], action.microbatch_index)

    late: Rows = []
    for rank, row in enumerate(rows):
        held: list[_Action] = []
        out: list[_Action | None] = []

        def release(wanted: Callable[[_Action], bool], held: list = held, out: list = out) -> None:
            out.extend(filter(wanted, held))
            held[:] = [action for action in held if not wanted(action)]

        for action in row:
            if action is not None and action.computation_type in (RECV_F, RECV_B):
                held.append(action)
                continue
            if action is not None and action.computation_type in (SEND_F, SEND_B) and rank < (to := peer(action)):
                release(lambda a, to=to: peer(a) == to)
            for stage, kind, microbatch, _ in parts_of(action):
                if kind in _MAKES:
                    release(lambda a, used=(stage, _MAKES[kind][2], microbatch): a[:3] == used)
            out.append(action)
        if held:
            raise Error(f"rank {rank} of the schedule receives {held[0]} and nothing after it uses that", kind=ErrorKind.Schedule)
        late.append(out)
    return late
