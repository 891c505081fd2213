"""Ranks that do not come, die, stop or hang: the others end in time, and each of them says which rank it was."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from small_ranks import Scenario, play, record

from runtime import environment, watch
from runtime.environment import Machine
from runtime.watch import Beat, Judge, Watch, in_time, join

CPU = torch.device("cpu")
PATIENT = 60.0  # seconds in which ranks meet that do meet, on a busy machine too
OTHER = socket.socket()  # of a program that is not ours
STEPS, LAST = 30, 20  # steps of a run, and the one at which something happens


# ---------------------------------------------------------------------------------------------------------------------
# What ranks do when this file is run as a script: nobody is here but processes that may be lost


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me(seconds=None):
    """No thread of this process runs any more, for so long."""
    if seconds:
        wake = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {signal.SIGCONT:d})"
        subprocess.Popen([sys.executable, "-Sc", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def compute(seconds):
    """As a compiler does: in Python, without an end to be seen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))


def fail(error):
    raise error


def meet(limit=PATIENT, prepare=lambda: None, victim=None):
    """Join as the trainer does."""
    if victim in (None, int(os.environ["RANK"])):
        prepare()
    try:
        machine = environment.start("cpu", limit)
    except ValueError as error:
        return environment.leave(environment.refuse(error, 2))
    print(*machine.names, machine.all_reduce(torch.tensor(machine.rank)).item())
    return environment.leave(0)


def instead_of_the_sum(action):
    watch.first_sum = lambda *rest: action()


def miscalculate():
    right = dist.all_reduce

    def wrong(tensor):
        right(tensor)
        tensor += 1

    dist.all_reduce = wrong


def look_elsewhere():
    os.environ["MASTER_ADDR"] = "nowhere.invalid"


def take_the_port():
    OTHER.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    OTHER.bind(("", int(os.environ["MASTER_PORT"])))
    OTHER.listen()


def work(limit, action=lambda: None, victims=(1,), finish=environment.leave):
    """A run of collectives, in which `action` happens to the victims."""
    machine = environment.start("cpu", PATIENT)
    code = 0
    with Watch(machine, limit) as guard:
        guard.on_loss = lambda: print("last words", flush=True)
        for step in range(STEPS):
            guard.step = step
            try:
                dist.all_reduce(torch.ones(1))  # as an optimizer does: not through the machine
            except RuntimeError as error:
                code = environment.refuse(RuntimeError(guard.blame() or error), 1)
                break
            time.sleep(0.02)
            if step == LAST and machine.rank in victims:
                action()
    return finish(code)


def finish_late(limit):
    """Rank 0 goes at once, and the store with it, while rank 1 still has something to do."""
    watch.GRACE = 0.2
    machine = environment.start("cpu", PATIENT)
    with Watch(machine, limit):
        machine.all_reduce(torch.ones(1))
        time.sleep(2 * limit if machine.rank else 0)
    return 0


SCENARIOS = {
    "all come": Scenario(meet, (0, 1, 2), 3),
    "one does not come": Scenario(partial(meet, 5.0), (0, 2), 3),
    "two do not come": Scenario(partial(meet, 5.0), (1, 0), 4),
    "the first does not come": Scenario(partial(meet, 2.0), (1,), 2),
    "one comes twice": Scenario(meet, (0, 1, 1), 2),
    "unknown address": Scenario(partial(meet, 1.0, look_elsewhere), (1,), 2),
    "port taken": Scenario(partial(meet, 5.0, take_the_port), (0,), 2),
    "dies in the sum": Scenario(partial(meet, 4.0, partial(instead_of_the_sum, kill_me), 1), (0, 1, 2), 3),
    "stops in the sum": Scenario(partial(meet, 4.0, partial(instead_of_the_sum, stop_me), 1), (0, 1, 2), 3, (1,)),
    "miscalculates": Scenario(partial(meet, PATIENT, miscalculate, 1), (0, 1), 2),
    "is killed": Scenario(partial(work, 3.0, kill_me), (0, 1, 2), 3),
    "the first is killed": Scenario(partial(work, 3.0, kill_me, (0,)), (0, 1, 2), 3),
    "stops": Scenario(partial(work, 3.0, stop_me), (0, 1, 2), 3, (1,)),
    "the first stops": Scenario(partial(work, 3.0, stop_me, (0,)), (0, 1, 2), 3, (0,)),
    "fails": Scenario(partial(work, 3.0, partial(fail, OSError("disk of rank 1"))), (0, 1, 2), 3),
    "the first fails": Scenario(partial(work, 3.0, partial(fail, OSError("disk of rank 0")), (0,)), (0, 1, 2), 3),
    "hangs": Scenario(partial(work, 0.6, partial(time.sleep, 1000)), (0, 1, 2), 3),
    "stops for a moment": Scenario(partial(work, 4.0, partial(stop_me, 2.0)), (0, 1), 2),
    "all stop": Scenario(partial(work, 1.5, partial(stop_me, 3.0), (0, 1)), (0, 1), 2),
    "compiles": Scenario(partial(work, 1.5, partial(compute, 3.0)), (0, 1), 2),
    "is late": Scenario(partial(finish_late, 1.0), (0, 1), 2),
}  # fmt: skip

if __name__ == "__main__":
    play(SCENARIOS)


# ---------------------------------------------------------------------------------------------------------------------
# Joining


@pytest.fixture(scope="module")
def left():
    return record(__file__)


def said(ranks):
    """The errors of ranks, one a rank, without what torch says of its sockets."""
    lines = [[line for line in rank.err.splitlines() if line.startswith("error: ")] for rank in ranks]
    assert all(len(each) == 1 for each in lines), ranks
    return [each[0].removeprefix("error: ") for each in lines]


def test_ranks_that_all_come_know_each_other_by_host_and_process(left):
    ranks = left["all come"]
    assert [rank.code for rank in ranks] == [0, 0, 0]
    assert len({rank.out for rank in ranks}) == 1
    assert re.fullmatch(r"(\S+ pid \d+ ){3}3\n", ranks[0].out)


@pytest.mark.parametrize(
    ("scenario", "absent"),
    [("one does not come", "rank 1 of 3 has"), ("two do not come", "rank 2, rank 3 of 4 have")],
)  # fmt: skip
def test_a_rank_that_does_not_come_is_named_by_all_that_did(left, scenario, absent):
    ranks = left[scenario]
    assert [rank.code for rank in ranks] == [2, 2]
    one, other = said(ranks)
    assert one == other
    assert one.startswith(f"{absent} not appeared within 5 s; started: rank 0 (")
    assert "--rank-timeout" in one


@pytest.mark.parametrize(
    ("scenario", "rank"), [("the first does not come", 1), ("unknown address", 1), ("port taken", 0)])
def test_without_the_store_of_the_first_rank_its_address_is_told(left, scenario, rank):
    (alone,) = left[scenario]
    assert alone.code == 2
    host = "nowhere.invalid" if scenario == "unknown address" else "127.0.0.1"
    assert re.match(rf"rank {rank} of 2 has no connection to rank 0 at {host}:\d+: .*MASTER_PORT", said([alone])[0])
    assert ("in use" in alone.err) == (scenario == "port taken")


def test_a_rank_that_comes_twice_is_refused_and_both_processes_are_named(left):
    first, *twins = left["one comes twice"]
    assert first.code == 0
    accepted, refused = sorted(twins, key=lambda rank: rank.code)
    assert (accepted.code, refused.code) == (0, 2)
    (text,) = said([refused])
    accepted_name = re.match(r"\S+ pid \d+ (\S+ pid \d+)", accepted.out)[1]
    assert text.startswith(f"rank 1 was started twice: {accepted_name} and ")


@pytest.mark.parametrize(("scenario", "code"), [("dies in the sum", -9), ("stops in the sum", -9)])
def test_a_rank_that_goes_silent_in_the_first_all_reduce_is_named(left, scenario, code):
    first, victim, last = left[scenario]
    assert (first.code, victim.code, last.code) == (2, code, 2)
    for text in said([first, last]):
        assert re.match(r"rank 1 \(\S+ pid \d+\) did not come through a first all-reduce within 4 s: nothing is", text)


def test_a_rank_with_a_wrong_sum_is_named(left):
    ranks = left["miscalculates"]
    assert [rank.code for rank in ranks] == [2, 2]
    for text in said(ranks):
        assert re.match(r"rank 1 \(.*\) did not come through .*: the sum of all ranks is 2, not 1\. ", text)


def test_a_process_of_several_without_a_meeting_point_is_told_what_is_missing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"^WORLD_SIZE=2 without MASTER_ADDR: use torchrun, or unset WORLD_SIZE\.$"):
        join(CPU, 2, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# The watch


@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        ("is killed", r"rank 1 \(.*\) has not been heard of for [123] s"),
        ("stops", r"rank 1 \(.*\) has not been heard of for [34] s"),
        ("the first is killed", r"rank 0 \(.*\) and its store do not answer"),
        ("the first stops", r"rank 0 \(.*\) and its store do not answer"),
    ],
)  # fmt: skip
def test_the_others_end_and_name_a_rank_that_is_silent(left, scenario, what):
    victims = [rank for rank in left[scenario] if rank.code == -9]
    others = [rank for rank in left[scenario] if rank not in victims]
    assert len(victims) == 1
    assert [rank.code for rank in others] == [1, 1]
    for text in said(others):
        assert re.fullmatch(rf"{what}: it died or its machine is lost; last heard of at step \d+", text)


def test_what_is_left_to_do_is_done_before_a_process_that_waits_is_ended(left):
    first, _, last = left["stops"]
    assert first.out == last.out == "last words\n"


@pytest.mark.parametrize(("scenario", "victim"), [("fails", 1), ("the first fails", 0)])
def test_the_others_end_and_tell_the_error_of_a_rank_that_failed(left, scenario, victim):
    failed, *others = sorted(left[scenario], key=lambda rank: rank.rank != victim)
    assert f"OSError: disk of rank {victim}" in failed.err
    assert {rank.code for rank in left[scenario]} == {1}
    for text in said(others):
        assert re.match(rf"rank {victim} \(.*\) ended before the others \(OSError: disk of rank {victim}\); ", text)


def test_a_rank_that_lives_but_keeps_others_waiting_is_named_and_ended_with_them(left):
    assert {rank.code for rank in left["hangs"]} == {1}
    for text in said(left["hangs"]):
        assert re.match(r"rank 1 \(.*\) lives but has kept the others waiting for 6 s: it hangs; last heard", text)


@pytest.mark.parametrize("scenario", ["stops for a moment", "all stop", "compiles", "is late"])
def test_nobody_is_accused_who_comes_back(left, scenario):
    """One stops shorter than the limit; all stop longer; one computes longer; one ends when the store is gone."""
    assert [(rank.code, "error" in rank.err) for rank in left[scenario]] == [(0, False)] * 2


# ---------------------------------------------------------------------------------------------------------------------
# The rules, by hand


def judge(*beats, seconds=1.0, times=1):
    """One that has heard first beats, and then `beats` so many times."""
    judge = Judge(len(beats), lambda rank: f"rank {rank}")
    for _ in range(times):
        judge.hear([Beat(*beat) for beat in beats], seconds)
    return judge


def test_a_beat_that_stands_still_is_silence_and_a_new_one_ends_it():
    heard = judge((1, 5), (1, 5), times=4)
    assert [each.silence for each in heard.ranks] == [3, 3]
    heard.hear([Beat(2, 5), Beat(1, 5)], 1.0)
    assert [each.silence for each in heard.ranks] == [0, 4]
    assert heard.verdict(silence=4.5, hang=99) is None
    assert "rank 1 has not been heard of for 4 s" in heard.verdict(silence=4, hang=99)
    assert heard.verdict(silence=4, hang=99, exempt=1) is None


def test_a_rank_is_behind_only_while_others_wait_and_it_does_not_move():
    heard = judge((1, 5), (1, 4), times=3)
    assert [each.behind for each in heard.ranks] == [0, 2]
    assert "rank 1 lives but has kept the others waiting for 2 s" in heard.verdict(silence=99, hang=2)
    heard.hear([Beat(2, 7), Beat(2, 5)], 1.0)  # it moves
    assert heard.ranks[1].behind == 0


def test_one_that_died_is_named_before_one_that_it_pulled_down():
    heard = judge((1, 5, 9, "RuntimeError: connection closed"), (1, 4), times=5)
    assert heard.verdict(silence=3, hang=99).startswith("rank 1 has not been heard of")


def test_a_rank_that_ended_in_order_is_accused_only_when_others_wait_for_it():
    heard = judge((1, 5, 9, ""), (1, 5), times=99)
    assert heard.verdict(silence=999, hang=999) is None
    heard.hear([Beat(1, 5, 9, ""), Beat(2, 6)], 1.0)
    assert heard.verdict(silence=999, hang=999).startswith("rank 0 ended before the others (without an error)")


def guard_of_two():
    """The watch of rank 0, to be led by hand: its process is in no group, so it tells no beats."""
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"watch/{rank}", json.dumps(Beat()))
    guard = Watch(Machine(CPU, 0, 2, ("a", "b"), store), rank_timeout=10.0)
    guard._tell = lambda: None
    return guard


def test_the_time_in_which_this_process_was_stopped_makes_nobody_silent():
    guard = guard_of_two()
    guard._heard_at -= 100
    assert not guard._round()
    guard._judge.hear([Beat(), Beat()], 10.0)
    assert guard._round()
    assert re.fullmatch(r"rank 0 \(a\) has not been heard of for 1[012] s: .*; last heard of at step 0", guard._verdict)


def test_the_verdict_of_one_rank_is_that_of_all():
    guard = guard_of_two()
    guard._machine.store.set("watch/verdict", "rank 7 is lost")
    assert guard._round()
    assert guard._verdict == "rank 7 is lost"


def test_a_call_that_does_not_return_is_given_up_and_one_that_raises_raises():
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        in_time(partial(time.sleep, 5), 0.1)
    assert time.monotonic() - begun < 4
    with pytest.raises(OSError, match="gone"):
        in_time(partial(fail, OSError("gone")), 1.0)
    assert in_time(lambda: 7, 1.0) == 7
