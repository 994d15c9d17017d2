"""launch: results in order, a fall told with its cause, an end within its bound, and no process left."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rank_workers
import torch

from safetrain_core import RankFailed, launch

#: Far below each worker's own 600 s, far above what a busy machine needs.
SOON_S = 45.0


def alive(pid):
    """Whether a process is there that still runs: one that only waits to be reaped has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def left(folder, within_s=0.0):
    """The processes that noted themselves in ``folder`` and are still there."""
    until = time.monotonic() + within_s
    while True:
        noted = [int(path.stem) for path in folder.glob("*.pid")]
        still = [pid for pid in noted if alive(pid)]
        assert noted, "no rank had begun"
        if not still or time.monotonic() >= until:
            return still
        time.sleep(0.02)


# --- a good end -------------------------------------------------------------------------------------------------


def test_results_come_in_order_of_rank_from_processes_that_have_ended():
    got = launch(rank_workers.who, 3, "a", [1], timeout_s=60)
    assert [(r, n, *rest) for r, n, _, *rest in got] == [(r, 3, "a", [1]) for r in range(3)]
    pids = [pid for _, _, pid, *_ in got]
    assert len({*pids, os.getpid()}) == 4
    assert not any(map(alive, pids))


def test_one_rank_is_a_launch_too():
    assert launch(rank_workers.who, 1, timeout_s=60)[0][:2] == (0, 1)


def test_tensors_come_back_whole_and_a_rank_cannot_write_into_the_callers_or_anothers():
    given = torch.zeros(300_000)
    got = launch(rank_workers.writes_into, 2, given, timeout_s=60)
    assert [t.unique().tolist() for t in got] == [[1.0], [2.0]]
    assert given.count_nonzero() == 0


def test_a_rank_sees_the_environment_and_the_folder_of_now_and_one_thread(monkeypatch, tmp_path):
    monkeypatch.setenv("SAFETRAIN_TEST", "set after the first launch")
    monkeypatch.chdir(tmp_path)
    (seen,) = launch(rank_workers.environment, 1, "SAFETRAIN_TEST", timeout_s=60)
    assert seen[:2] == ("set after the first launch", str(tmp_path))
    monkeypatch.delenv("SAFETRAIN_TEST")
    assert launch(rank_workers.environment, 1, "SAFETRAIN_TEST", timeout_s=60)[0][0] is None


def test_a_rank_may_load_data_with_workers_of_its_own():
    assert launch(rank_workers.loads_with_workers, 2, timeout_s=60) == [([0.0, 2.0, 4.0, 6.0], True)] * 2


def test_two_launches_at_once_do_not_meet():
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(launch, rank_workers.meets_slowly, 2 + i, f"run {i}", timeout_s=60) for i in range(2)]
        assert asked[0].result() == [("run 0", 3.0)] * 2
        assert asked[1].result() == [("run 1", 6.0)] * 3


# --- a fall -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("raises", "KeyError", "rank 1 raised KeyError: 'no such layer'; the other ranks were ended"),
        ("returns an object that cannot be sent", None, "rank 1 raised"),
        ("sys.exit", "SystemExit", "rank 1 raised SystemExit: 3"),
        ("os._exit", "exited", "rank 1 exited with status 3 and no result; it said: the last words of rank 1"),
        ("killed", "killed", "rank 1 was killed by SIGKILL; it said: the last words of rank 1"),
    ],
)
def test_a_rank_that_falls_ends_the_launch_with_its_own_error_and_leaves_no_process(tmp_path, how, kind, told):
    start = time.monotonic()
    with pytest.raises(RankFailed) as stop:
        launch(rank_workers.reaches_for_the_others, 3, str(tmp_path), how, timeout_s=300)
    assert time.monotonic() - start < SOON_S
    assert stop.value.rank == 1
    assert kind is None or stop.value.kind == kind
    assert str(stop.value).startswith(told), stop.value
    assert "Connection closed" not in stop.value.args[0]
    assert left(tmp_path) == []


def test_the_traceback_of_the_rank_is_shown_below():
    with pytest.raises(RankFailed) as stop:
        launch(rank_workers.reaches_for_the_others, 2, "no-such-folder", "raises", timeout_s=60)
    assert stop.value.kind == "FileNotFoundError"
    assert stop.value.text in str(stop.value)
    assert "in note_pid" in stop.value.trace
    assert stop.value.trace.strip() in str(stop.value)


def test_a_rank_that_hangs_is_named_when_the_time_is_up_and_not_those_that_had_ended(tmp_path):
    launch(rank_workers.who, 1, timeout_s=60)  # the server that forks is up
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 had not ended after timeout_s=3 \(1 of 3 ranks\)") as stop:
        launch(rank_workers.reaches_for_the_others, 3, str(tmp_path), "hangs", timeout_s=3)
    assert 3 <= time.monotonic() - start < SOON_S
    assert (stop.value.rank, stop.value.kind) == (1, "timeout")
    assert left(tmp_path) == []


def test_what_a_rank_has_started_goes_with_it(tmp_path):
    with pytest.raises(RankFailed, match="had not ended"):
        launch(rank_workers.ends_with_a_child, 2, str(tmp_path), timeout_s=3)
    assert len(list(tmp_path.glob("*.pid"))) == 4
    assert left(tmp_path, within_s=5) == []


# --- refused before anything starts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"world_size": 0}, "world_size=0 must be at least 1"),
        ({"world_size": 2.0}, "world_size=2.0 must be an integer"),
        ({"world_size": True}, "world_size=True must be an integer"),
        ({"worker": "who"}, "worker is a str, expected a function"),
        ({"timeout_s": 0}, "timeout_s=0 must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be above 0"),
        ({"worker": lambda: None}, "lambda.* cannot be sent to another process"),
        ({"args": (threading.Lock(),)}, "the worker who or its arguments cannot be sent to another process"),
    ],
)
def test_what_cannot_be_launched_is_refused_and_no_process_is_started(monkeypatch, options, told):
    started = []
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda process: started.append(process))
    asked = {"worker": rank_workers.who, "world_size": 2, "args": (), "timeout_s": 60, **options}
    with pytest.raises(ValueError, match=told):
        launch(asked["worker"], asked["world_size"], *asked["args"], timeout_s=asked["timeout_s"])
    assert started == []


def run_python(code, *, at_prompt=False, folder=None, **options):
    """A script of its own, or code at a prompt, that can import rank_workers."""
    code = textwrap.dedent(code)
    asked = ["-c", code]
    if not at_prompt:
        path = folder / "script.py"
        path.write_text(code)
        asked = [str(path)]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    here.pop("OMP_NUM_THREADS", None)
    return subprocess.Popen(
        [sys.executable, *asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=here, **options
    )


def said_by(process):
    try:
        out, error = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, error
    return out.splitlines()


def test_a_worker_or_an_argument_of_a_notebook_cell_is_refused():
    lines = said_by(
        run_python(
            """
            import rank_workers
            from safetrain_core import launch
            def cell(): pass
            class Settings: pass
            for asked in ((cell, 2), (rank_workers.who, 2, Settings())):
                try:
                    launch(*asked, timeout_s=60)
                except ValueError as error:
                    print(error)
            print(launch(rank_workers.who, 1, timeout_s=60)[0][:2])
            """,
            at_prompt=True,
        )
    )
    assert [line.split(",")[0] for line in lines[:2]] == ["the worker cell", "the worker who"]
    assert all("was defined in a notebook or at a prompt; put it into a module" in line for line in lines[:2])
    assert lines[2] == "(0, 1)"


def test_a_script_without_a_main_guard_is_not_run_again_in_the_ranks(tmp_path):
    lines = said_by(
        run_python(
            """
            import os, rank_workers
            from safetrain_core import launch
            print("the script runs")
            for name in ("first", "second"):
                print(*(r[0] for r in launch(rank_workers.who, 2, name, timeout_s=60)))
            print(launch(rank_workers.environment, 1, "OMP_NUM_THREADS", timeout_s=60)[0][::2])
            print("OMP_NUM_THREADS" in os.environ)
            """,
            folder=tmp_path,
        )
    )
    assert lines == ["the script runs", "0 1", "0 1", "('1', 1)", "False"]


def test_a_worker_that_lives_in_a_script_with_a_guard_runs(tmp_path):
    lines = said_by(
        run_python(
            """
            from dataclasses import dataclass
            from safetrain_core import launch
            from safetrain_core.distributed import rank
            @dataclass
            class Settings:
                base: int
            def worker(settings):
                return Settings(settings.base + rank())
            if __name__ == "__main__":
                print([s.base for s in launch(worker, 2, Settings(5), timeout_s=60)])
            """,
            folder=tmp_path,
        )
    )
    assert lines == ["[5, 6]"]


# --- the launching process ends -----------------------------------------------------------------------------------


def begun(folder):
    """A launching process whose ranks have all begun."""
    process = run_python(
        f"""
        import rank_workers
        from safetrain_core import launch
        launch(rank_workers.stays, 2, {str(folder)!r}, timeout_s=300)
        """,
        folder=folder,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not (folder / "all are there").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


def test_a_launching_process_that_is_killed_leaves_no_rank_behind(tmp_path):
    process = begun(tmp_path)
    try:
        assert len(left(tmp_path)) == 2
        os.kill(process.pid, signal.SIGKILL)
        assert left(tmp_path, within_s=20) == []
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_in_the_launching_process_ends_the_ranks_at_once(tmp_path):
    process = begun(tmp_path)
    try:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the whole group
        _, error = process.communicate(timeout=20)
        assert error.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode == -signal.SIGINT
        assert left(tmp_path) == []
    finally:
        process.kill()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_signals_reach_every_rank_where_that_is_asked_for_and_the_results_come(tmp_path, name):
    before = signal.getsignal(getattr(signal, name))

    def send():
        until = time.monotonic() + 60
        while not (tmp_path / "all are there").exists() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, name))

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send)
        got = launch(rank_workers.counts_signals, 2, str(tmp_path), timeout_s=60, forward_signals=True)
        sent.result()
    assert got == [[name], [name]]
    assert signal.getsignal(getattr(signal, name)) is before
    assert left(tmp_path) == []


def test_the_ranks_take_the_package_from_where_the_caller_does_not_from_the_current_folder(tmp_path):
    (tmp_path / "safetrain_core").mkdir()
    (tmp_path / "safetrain_core" / "__init__.py").write_text("raise RuntimeError('another checkout')\n")
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text("import os\nfrom safetrain_core import launch\nprint(launch(os.getpid, 2)[0] > 0)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.stdout == "True\n", done.stderr
