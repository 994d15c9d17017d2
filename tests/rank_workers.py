"""What the ranks of the tests run: a worker has to live in a module that each rank can import."""

import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from safetrain_core import AmpTrainState
from safetrain_core.distributed import agree, is_main, mains, rank, world_size


def note_pid(folder):
    """So that the test can ask whether this process is still there."""
    Path(folder, f"{os.getpid()}.pid").touch()
    dist.barrier()  # every rank has, before one goes on to fall


def who(*args):
    return rank(), world_size(), os.getpid(), *args


def environment(name):
    return os.environ.get(name), os.getcwd(), torch.get_num_threads()


def writes_into(tensor):
    tensor += rank() + 1
    return tensor


def reaches_for_the_others(folder, how):
    """Rank 1 falls in the way that is asked for, while the others wait for it in an all-reduce."""
    note_pid(folder)
    if rank() == 1:
        print("the last words of rank 1", flush=True)
        match how:
            case "raises":
                raise KeyError("no such layer")
            case "returns an object that cannot be sent":
                return lambda: None
            case "sys.exit":
                sys.exit(3)
            case "os._exit":
                os._exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(600)
    if how == "returns an object that cannot be sent":
        return None
    if how == "hangs":
        return rank()  # done, and told
    dist.all_reduce(torch.ones(1))
    return rank()


def meets_slowly(name):
    """Two launches at once: each has its own group, in which only its own ranks are."""
    time.sleep(0.2)
    told = torch.full((1,), float(rank() + 1))
    dist.all_reduce(told)
    return mains(name), told.item()


def stays(folder):
    note_pid(folder)
    if rank() == 0:
        Path(folder, "all are there").touch()
    time.sleep(600)


class Doubler(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(float(2 * i)), os.getpid()


def loads_with_workers():
    rows = list(torch.utils.data.DataLoader(Doubler(), batch_size=2, num_workers=1))
    return torch.cat([x for x, _ in rows]).tolist(), rows[0][1][0].item() != os.getpid()


def ends_with_a_child(folder):
    """A child of the rank's own, as a DataLoader's worker is; then the rank hangs."""
    import subprocess

    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    Path(folder, f"{child.pid}.pid").touch()
    stays(folder)


def counts_signals(folder):
    """Says which signal it got, in its result."""
    got = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda n, _: got.append(signal.Signals(n).name))
    note_pid(folder)
    if rank() == 0:
        Path(folder, "all are there").touch()
    until = time.monotonic() + 20
    while not got and time.monotonic() < until:
        time.sleep(0.01)
    return got


# --- agreement ----------------------------------------------------------------------------------------------------


def steps_with_faults_on_rank_1():
    """Whether this rank is the main one, what ``agree`` makes of 0 and 3, and four steps, two of them bad on rank 1."""
    agreed = agree(3 * rank())
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    state = AmpTrainState(model, amp_dtype=torch.float16, init_scale=1024.0, check_loss_before_backward=True)
    for step in range(4):
        target = torch.full((3, 2), math.nan if rank() == 1 and step == 1 else 0.0)
        hook = model.weight.register_hook(lambda grad: grad * math.inf) if rank() == 1 and step == 2 else None
        state.step(torch.ones(3, 4), target)
        if hook is not None:
            hook.remove()
    return is_main(), {
        "agreed": agreed,
        "looks early": state.check_loss_before_backward,
        "rows": [(row.skipped, row.skip_reason, row.scale) for row in state.log],
        "scale": (state.scale, state.scaler.state_dict()["_growth_tracker"]),
        "weights": model.weight.tolist(),
    }


# --- checkpoints --------------------------------------------------------------------------------------------------


def shard_of(number, length=5):
    """The state of one rank: its piece of a flat parameter, Adam's moments of it, and what is equal on all."""
    flat = torch.arange(float(length)) + 100 * number
    return {
        "param_shard": flat,
        "exp_avg": flat / 2,
        "exp_avg_sq": flat**2,
        "steps": [torch.tensor(7.0), {"lr": 0.1}],
        "rng": torch.tensor([number, 3], dtype=torch.uint8),
    }


def saves_its_shard(folder, step, trouble=None):
    """What the save raised or returned, and the shard read back."""
    from safetrain_core import CheckpointError
    from safetrain_core.checkpoint.sharded import save_shard
    from safetrain_core.checkpoint.sharded_read import load_shard

    state, here = shard_of(rank(), 3 + rank()), rank() == world_size() - 1
    if trouble == "no such folder" and here:
        folder = Path(folder, "a file", "cannot hold this")
    if trouble == "a function in the state" and here:
        state["hook"] = print
    if trouble == "a list that holds itself" and here:
        state["loop"] = []
        state["loop"].append(state["loop"])
    if trouble == "another step" and here:
        step += 1
    try:
        manifest = save_shard(state, folder, rank=rank(), world_size=world_size(), step=step)
    except CheckpointError as error:
        return str(error)
    again = load_shard(folder, rank(), world_size())[1]
    return manifest, all(torch.equal(again[k], state[k]) for k in ("param_shard", "exp_avg", "exp_avg_sq", "rng"))


def claims_another_rank(folder):
    from safetrain_core.checkpoint.sharded import save_shard

    try:
        save_shard({}, folder, rank=0, world_size=3, step=1)
    except ValueError as error:
        return str(error)
