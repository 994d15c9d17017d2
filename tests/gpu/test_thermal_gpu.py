"""Readings, the guard and device switching on a real NVIDIA card; skipped where there is none. `pytest tests/gpu -q`"""

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch
from torch import nn

from safetrain_core import AmpTrainState, GpuMonitor, SafeTrainer, TrainConfig, TrainState
from safetrain_core.train.cursor import Cursor
from safetrain_core.train.switch import DeviceSwitch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.fixture
def monitor():
    pytest.importorskip("pynvml", reason="nvidia-ml-py, an optional package, is missing")
    torch.zeros(1, device="cuda")  # CUDA runs, so torch's UUID decides
    with GpuMonitor("cuda:0") as made:
        if made.read().temperature_c is None:
            pytest.skip(f"NVML gives no temperature here: {made.trouble}")
        yield made


def smi(monitor, *names):
    """What nvidia-smi says of the same card."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi on this machine")
    command = ["nvidia-smi", f"--id={monitor.uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [value.strip() for value in done.stdout.strip().split(",")]


def test_readings_agree_with_nvidia_smi(monitor):
    ours = monitor.read()
    celsius, watts, mib, name, uuid = smi(monitor, "temperature.gpu", "power.draw", "memory.used", "name", "uuid")
    assert (monitor.name, monitor.uuid) == (name, uuid)
    assert abs(ours.temperature_c - float(celsius)) <= 3
    assert ours.power_w is None or watts.startswith("[") or abs(ours.power_w - float(watts)) < 0.5 * float(watts) + 30
    assert abs(ours.memory_used_mib - float(mib)) < 1024  # nvidia-smi counts what the driver reserves apart
    assert ours.throttle_reasons is not None
    print(f"\n{monitor.name}: {ours}; slows down at {monitor.slowdown_c} C, off at {monitor.shutdown_c} C")


def test_torchs_device_is_mapped_by_uuid_also_where_it_is_hidden_and_reordered(monitor):
    assert monitor.uuid.removeprefix("GPU-").removeprefix("MIG-") == str(torch.cuda.get_device_properties(0).uuid)
    code = (
        "import sys, torch; from safetrain_core import GpuMonitor; before = GpuMonitor('cuda:0').uuid; "
        "torch.zeros(1, device='cuda'); print(before, GpuMonitor('cuda:0').uuid)"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": monitor.uuid}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [monitor.uuid] * 2, done.stderr


def run(source=None, on_row=None, before_step=None, **config):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)).cuda()
    data = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(20)]
    options = {"max_steps": 12, "use_amp": True, "gpu_temp_guard": True, "gpu_temp_poll_interval_seconds": 0.05}
    trainer = SafeTrainer(
        net,
        TrainConfig(**{**options, "scheduler_type": "constant", **config}),
        data,
        on_row=on_row,
        before_step=before_step,
        thermal_source=source,
    )
    return net, trainer


def test_a_guard_around_the_present_temperature_pauses_and_resumes_a_real_run(monitor):
    """Heats the card by 4 degrees with matrix products, then lets the pause cool it. Two minutes at most."""
    cool = monitor.read().temperature_c
    if not 15 < cool < 80:
        pytest.skip(f"the card is at {cool} C; too near a limit to play with")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def burn(step, net):
        end = time.monotonic() + 0.5
        while not trainer.result.pauses and time.monotonic() < end:
            torch.mm(a, a)
            torch.cuda.synchronize()

    _, trainer = run(
        before_step=burn,
        max_steps=100,
        gpu_metrics_backend="nvml",
        gpu_temp_pause_threshold_c=cool + 4,
        gpu_temp_resume_threshold_c=cool + 3,
        gpu_temp_critical_threshold_c=119.0,
    )
    alarm = threading.Timer(120, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.start()
    try:
        result = trainer.fit()
    finally:
        alarm.cancel()
    print(f"\nfrom {cool:g} C: {[str(event) for event in result.thermal_events]}, paused {result.paused_s:.1f} s")
    if not result.thermal_events:
        pytest.skip("50 s of work did not heat the card by 4 degrees")
    assert result.status == "completed", "it did not cool within two minutes"
    assert result.pauses >= 1
    assert result.paused_s > 0
    assert [event.state.value for event in result.thermal_events][:2] == ["paused", "normal"]


def bits(net, optimizer):
    """Every tensor of weights, buffers and optimizer state, on the CPU."""
    state = [v for weight in net.parameters() for v in optimizer.state[weight].values() if torch.is_tensor(v)]
    return [t.detach().cpu().clone() for t in (*net.parameters(), *net.buffers(), *state)]


@pytest.mark.parametrize("fused", [True, False])
def test_a_round_trip_to_the_cpu_and_back_leaves_every_bit_and_the_scale(fused):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    amp = AmpTrainState(net, device_type="cuda", optimizer=optimizer, init_scale=2.0**10, growth_interval=3)
    cursor = Cursor([], 1, amp.device, TrainState())
    batch = torch.randn(4, 8), torch.randn(4, 2)
    on_gpu = tuple(t.cuda() for t in batch)
    for _ in range(8):
        amp.step(*on_gpu)
    before, scale, scaler = bits(net, optimizer), amp.scale, copy.deepcopy(amp.scaler.state_dict())
    switch = DeviceSwitch(amp, cursor)
    assert switch.move(torch.device("cpu"))
    assert {p.device.type for p in net.parameters()} == {"cpu"}
    assert all(torch.equal(a, b) for a, b in zip(before, bits(net, optimizer), strict=True))
    assert (amp.amp_dtype, amp.scaler.is_enabled(), cursor.device.type) == (torch.bfloat16, False, "cpu")
    assert switch.move(torch.device("cuda:0"))
    assert all(torch.equal(a, b) for a, b in zip(before, bits(net, optimizer), strict=True))
    assert (amp.scale, amp.scaler.state_dict(), amp.amp_dtype) == (scale, scaler, torch.float16)
    devices = {v.device.type for s in optimizer.state.values() for k, v in s.items() if k != "step" or fused}
    assert devices == {"cuda"}
    assert not amp.step(*on_gpu).skipped
    assert switch.move(torch.device("cpu"))
    assert not amp.step(*batch).skipped, "it trains on the CPU"


@pytest.mark.parametrize("interval", [1, 3])
def test_a_hot_run_trains_on_the_cpu_and_returns_with_its_model_on_the_gpu(interval):
    celsius, places = [60.0], []

    def heat(row):
        places.append((next(net.parameters()).device.type, row.scale is not None))
        celsius[0] = {3: 86.0, 9: 70.0}.get(row.step, celsius[0])
        trainer._thermal.poller.wait(30)
        trainer._thermal.poller.wait(30)

    net, trainer = run(lambda: celsius[0], on_row=heat, max_steps=18, switch_on_thermal=True,
                       nan_check_interval=interval, loss_jump_factor=1e6)  # fmt: skip
    result = trainer.fit()
    assert (result.status, result.switches, result.skips) == ("completed", 2, 0)
    assert {device for device, _ in places} == {"cpu", "cuda"}
    assert places[0] == ("cuda", True)
    assert ("cpu", False) in places
    assert places[-1] == ("cuda", True)
    assert {p.device.type for p in net.parameters()} == {"cuda"}


def synchronizations(function):
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in caught)


def test_the_guard_makes_the_host_wait_for_the_device_no_more_often(monitor):
    counts = []
    for guard in (False, True):
        _, trainer = run(gpu_temp_guard=guard, gpu_metrics_backend="nvml" if guard else "none",
                         gpu_temp_pause_threshold_c=110.0, gpu_temp_critical_threshold_c=119.0)  # fmt: skip
        counts.append(synchronizations(trainer.fit))
    assert counts[0] == counts[1] > 0
