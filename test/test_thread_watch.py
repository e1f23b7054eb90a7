"""Where OpenMP's threads run, and how they wait for each other (runtime/thread_watch.h)."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
import torch

import llga_fuser
from llga_fuser import _C

TWO = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="one processor: no place for a second thread"
)


def in_child(code: str, **environment: str) -> str:
    """What a process of its own prints: its threads and how they wait are nobody else's."""
    root = str(pathlib.Path(llga_fuser.__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(HEAD) + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HEAD = """
    import contextlib, os, pathlib, time
    import torch
    import llga_fuser
    from llga_fuser import _C
    from llga_fuser._config import config

    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    llga_fuser.enable(True)

    def names():
        found = []
        for task in pathlib.Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found.append((task / "comm").read_text().strip())
        return found

    def masks():
        return {t: os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")}

    def comes(what, limit=60):
        end = time.monotonic() + limit
        while not (came := what()) and time.monotonic() < end:
            time.sleep(0.01)
        return came

    net = torch.nn.Sequential(torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU()).eval()
    x = torch.randn(1, 32, 40, 40)
    script = torch.jit.freeze(torch.jit.trace(net, x))

    def is_right():
        return torch.allclose(script(x), net(x), rtol=1e-4, atol=1e-5)

    for _ in range(4):
        assert is_right()
    assert llga_fuser.cache_info().hits
"""


# ----------------------------------------------------------------------------------- how they wait


def test_waits_awake_while_runs_are_fast() -> None:
    choice = _C.WaitingChoice()
    assert not any(choice.waits_asleep(1.5, True, now) for now in range(10))


def test_waits_awake_while_threads_have_processors() -> None:
    """Late runs alone may be cold caches, or another clock rate."""
    choice = _C.WaitingChoice()
    assert not any(choice.waits_asleep(10.0, False, now) for now in range(10))


def test_waits_asleep_where_that_is_faster_and_looks_again() -> None:
    choice = _C.WaitingChoice()
    assert choice.waits_asleep(8.0, True, 0.0)  # a trial
    assert choice.waits_asleep(3.0, False, 0.1)  # it is better
    assert choice.waits_asleep(3.0, False, 1.0)
    assert not choice.waits_asleep(3.0, False, 2.2)  # the other way may be as good by now
    assert choice.waits_asleep(8.0, True, 2.3)  # it is not
    assert choice.waits_asleep(3.0, False, 2.4)
    assert choice.waits_asleep(3.0, False, 6.3)  # which is believed for twice as long
    assert not choice.waits_asleep(3.0, False, 6.5)
    assert not choice.waits_asleep(1.1, False, 6.6)  # now it is
    assert choice.waits_asleep(8.0, True, 6.7)
    assert choice.waits_asleep(3.0, False, 6.8)
    assert not choice.waits_asleep(3.0, False, 8.9)  # and patience begins anew


def test_waits_awake_where_sleeping_is_no_better() -> None:
    choice = _C.WaitingChoice()
    assert choice.waits_asleep(8.0, True, 0.0)
    assert not choice.waits_asleep(7.0, True, 0.1)
    assert not choice.waits_asleep(8.0, True, 2.0)  # not so soon
    assert choice.waits_asleep(8.0, True, 2.2)
    assert not choice.waits_asleep(8.0, True, 2.3)
    assert not choice.waits_asleep(8.0, True, 6.2)  # and later each time
    assert choice.waits_asleep(8.0, True, 6.4)


@TWO
def test_idle_threads_come_and_go() -> None:
    printed = in_child("""
        assert "llga_idle" not in names()
        _C.wait_asleep(True)
        assert config()["threads wait"] == "asleep"
        assert comes(lambda: "llga_idle" in names())
        assert is_right()
        _C.wait_asleep(False)
        assert config()["threads wait"] == "awake"
        assert comes(lambda: "llga_idle" not in names()), names()
        assert is_right()
        print("done")
    """)
    assert printed == "done\n"


@TWO
def test_numbers_stay_right_while_it_changes() -> None:
    printed = in_child("""
        for i in range(60):
            _C.wait_asleep(i % 3 == 0)
            _C.spread_threads()
            assert is_right()
        _C.wait_asleep(True)
        print("done")
    """)  # and the process ends while they wait
    assert printed == "done\n"


@TWO
def test_what_one_thread_computes_goes_on_after_a_fork() -> None:
    """A loop on several threads would wait for those that have stayed behind."""
    printed = in_child("""
        small = torch.nn.Linear(160, 160).eval()
        x = torch.randn(1, 160)
        script = torch.jit.freeze(torch.jit.trace(small, x))
        for _ in range(4):
            first = script(x)
        child = os.fork()
        if child == 0:
            right = all(torch.equal(script(x), first) for _ in range(30_000))
            os._exit(0 if right else 1)
        assert comes(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
        print("done")
    """)
    assert printed == "done\n"


# ---------------------------------------------------------------------------------- where they run


@pytest.mark.parametrize(
    ("places", "allowed", "targets"),
    [
        ([0, 1], [0, 1], [-1, -1]),
        ([1, 1], [0, 1], [-1, 0]),
        ([0, 0], [0], [-1, -1]),
        ([0, 0], [], [-1, -1]),  # of more processors than there are names for
        ([2, 2, 2, 5], [0, 2, 3, 5, 7], [-1, 0, 3, -1]),
        ([4, 4, 4], [4, 6], [-1, 6, -1]),
        ([], [0, 1], []),
    ],
)
def test_places_apart(places: list[int], allowed: list[int], targets: list[int]) -> None:
    assert _C.places_apart(places, allowed) == targets


@TWO
def test_threads_may_run_where_they_might_before() -> None:
    printed = in_child("""
        everywhere = os.sched_getaffinity(0)
        place, other = sorted(everywhere)[:2]
        before = masks()
        assert len(_C.spread_threads()) == 2
        assert masks() == before
        # All on one processor, and allowed on two from now on: one goes, or the system was faster.
        for task in before:
            os.sched_setaffinity(int(task), {place})
        assert _C.spread_threads() == [place, place]  # to which they are bound
        assert set(map(frozenset, masks().values())) == {frozenset({place})}
        for task in before:
            os.sched_setaffinity(int(task), {place, other})
        assert set(_C.spread_threads()) <= {place, other}
        assert set(map(frozenset, masks().values())) == {frozenset({place, other})}
        assert is_right()
        print("done")
    """)
    assert printed == "done\n"


def test_one_thread_has_no_other() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert len(_C.spread_threads()) == 1
    finally:
        torch.set_num_threads(threads)


@TWO
@pytest.mark.parametrize("switch", ["on", "off"])
def test_switch(switch: str) -> None:
    """Off: threads of a busy machine stay as they are, however long it takes."""
    printed = in_child(
        """
        import subprocess, sys
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in os.sched_getaffinity(0)]
        try:
            end = time.monotonic() + 3
            slept = False
            while time.monotonic() < end:
                assert is_right()
                slept = slept or config()["threads wait"] == "asleep"
        finally:
            for process in busy:
                process.kill()
        assert not (slept and os.environ["LLGA_FUSER_WATCH_THREADS"] == "off")
        print("done")
        """,
        LLGA_FUSER_WATCH_THREADS=switch,
    )
    assert printed == "done\n"
