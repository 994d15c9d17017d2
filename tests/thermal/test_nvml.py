"""GpuMonitor against a real shared library under the real pynvml: readings, each failure, each way to name a card."""

import os
import subprocess
import sys

import pytest
from fake_nvml.build import ROOT

UNKNOWN = {
    "temperature_c": None,
    "power_w": None,
    "utilization_pct": None,
    "memory_used_mib": None,
    "sm_clock_mhz": None,
    "memory_clock_mhz": None,
    "throttle_reasons": None,
}

ALL = {
    "temperature_c": 61.0,
    "power_w": 123.456,
    "utilization_pct": 98.0,
    "memory_used_mib": 3072.0,
    "sm_clock_mhz": 1980.0,
    "memory_clock_mhz": 2619.0,
    "throttle_reasons": [],
}


def ask(fake, arguments="", **env):
    return fake.run(f"print(json.dumps(told({arguments})))", **env)


def test_a_reading_has_all_values_in_their_units_and_the_cards_own_limits(fake):
    told = ask(fake.set(gpu0_throttle=0x24))
    assert told["reading"] == {**ALL, "throttle_reasons": ["the power cap", "heat (software)"]}
    assert (told["name"], told["uuid"], told["slowdown"], told["shutdown"]) == ("Fake A", "GPU-aaaa", 90, 100)
    assert told["warnings"] == []


def test_the_newer_calls_are_used_and_the_older_are_the_fallback(fake):
    assert ask(fake)["reading"] == ALL
    new = {name for name, _, _ in fake.calls()}
    assert "nvmlDeviceGetTemperatureV" in new
    assert "nvmlDeviceGetTemperature" not in new
    assert "nvmlDeviceGetCurrentClocksThrottleReasons" not in new
    fake.log.unlink()
    old = ask(fake, old_driver=True)
    assert (old["reading"], old["warnings"]) == (ALL, [])
    assert "nvmlDeviceGetTemperature" in {name for name, _, _ in fake.calls()}
    for code in (3, 13, 25):  # not supported, not there, another version of its structure
        fake.values["error.nvmlDeviceGetTemperatureV"] = code
        assert ask(fake.set())["reading"] == ALL


def test_where_a_card_tells_the_distance_to_its_slowdown_only_the_slowdown_is_worked_out(fake):
    told = ask(fake.set(gpu0_slowdown=None, gpu0_shutdown=None, gpu0_margin=26))
    assert (told["slowdown"], told["shutdown"]) == (61 + 26, None)
    assert ask(fake, old_driver=True)["slowdown"] is None


INIT = {
    9: "the NVIDIA driver is not loaded",
    18: "NVML and the loaded driver differ in version",
    4: "this user may not read it",
    12: "no NVIDIA driver, or a container without its GPUs",
    999: "NVML failed",
    77: "NVML failed",
}


@pytest.mark.parametrize("code", INIT)
def test_an_nvml_that_cannot_begin_is_an_unknown_reading_and_one_warning(fake, code):
    fake.values["error.nvmlInitWithFlags"] = code
    told = ask(fake.set(), "reads=3")
    assert told["reading"] == UNKNOWN
    assert len(told["warnings"]) == 1
    assert INIT[code] in told["warnings"][0]


LATER = {
    15: "the GPU has fallen off the bus",
    16: "the GPU needs a reset",
    4: "this user may not read it",
    3: "or its MIG mode, does not tell it",
    13: "this driver is too old",
    999: "NVML failed",
}


@pytest.mark.parametrize("code", LATER)
def test_a_card_that_fails_during_the_run_is_an_unknown_reading_one_warning_and_can_come_back(fake, code):
    lines = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    monitor = GpuMonitor()
    good = monitor.read()
    state = open(os.environ["FAKE_NVML"]).read()
    open(os.environ["FAKE_NVML"], "a").write("gpu0.error CODE\\n")
    bad = [monitor.read() for _ in range(4)]
    open(os.environ["FAKE_NVML"], "w").write(state)
    trouble, back = monitor.trouble, monitor.read()
warned = [str(w.message) for w in caught if w.category is UserWarning]
assert trouble in warned[0] and monitor.trouble is None
print(json.dumps([good == back, [dataclasses.asdict(b) for b in bad], warned]))
""".replace("CODE", str(code))
    same, bad, warned = fake.run(lines)
    assert same
    assert bad == [UNKNOWN] * 4
    assert len(warned) == 1
    assert LATER[code] in warned[0]
    assert "Fake A: temperature" in warned[0]


def test_a_lost_card_is_asked_once_per_reading_not_for_each_value(fake):
    fake.values["gpu0.error.nvmlDeviceGetTemperatureV"] = 15
    ask(fake.set(), "reads=1")
    asked = [name for name, _, _ in fake.calls()]
    assert "nvmlDeviceGetPowerUsage" not in asked


@pytest.mark.parametrize("code", [3, 4])
def test_one_value_that_is_not_supported_or_not_permitted_leaves_the_others(fake, code):
    fake.values["gpu0.error.nvmlDeviceGetPowerUsage"] = fake.values["gpu0.error.nvmlDeviceGetUtilizationRates"] = code
    told = ask(fake.set())
    assert told["reading"] == {**ALL, "power_w": None, "utilization_pct": None}
    assert len(told["warnings"]) == 1
    assert "Fake A: power, utilization unknown" in told["warnings"][0]


def test_without_library_or_package_the_warning_says_what_to_install():
    def told(code):
        env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        run = [sys.executable, "-c", code + "from safetrain_core import GpuMonitor; print(GpuMonitor().read())"]
        return subprocess.run(run, capture_output=True, text=True, env={**env, "PYTHONPATH": str(ROOT)}, timeout=60)

    hidden = told("import sys; sys.modules['pynvml'] = None\n")
    assert "temperature unknown" in hidden.stdout
    assert "pip install 'safetrain-core[gpu]'" in hidden.stderr
    pytest.importorskip("pynvml")
    if "NVIDIA" not in "".join(os.listdir("/dev")) and not os.path.exists("/dev/nvidiactl"):
        bare = told("")
        assert "temperature unknown" in bare.stdout
        assert "no NVIDIA driver" in bare.stderr


def test_a_library_that_is_not_nvml_is_an_unknown_reading_too(fake, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    told = ask(fake, LD_LIBRARY_PATH=str(tmp_path))
    assert told["reading"] == UNKNOWN
    assert len(told["warnings"]) == 1


def test_no_card_and_an_index_out_of_range_are_told_with_the_range(fakes):
    told = ask(fakes, "nvml_device_index=3")
    assert told["reading"] == UNKNOWN
    assert "nvml_device_index=3 is out of range: NVML has 3 GPUs, 0..2" in told["warnings"][0]
    assert "there is no GPU 5: NVML has 3, 0..2" in ask(fakes, "'cuda:5'")["warnings"][0]
    assert "NVML finds no GPU" in ask(fakes.set(count=0))["warnings"][0]


VISIBLE = [
    (None, "'cuda:1'", "GPU-bbbb"),
    (None, "'cuda'", "GPU-aaaa"),
    (None, "2", "GPU-cccc"),
    ("2,0", "0", "GPU-cccc"),
    ("2,0", "1", "GPU-aaaa"),
    (" 1 , 2", "1", "GPU-cccc"),
    ("GPU-cccc,GPU-aaaa", "0", "GPU-cccc"),
    ("GPU-b", "0", "GPU-bbbb"),
    ("0,GPU-cccc", "1", "GPU-cccc"),
    ("2", "'GPU-bbbb'", "GPU-bbbb"),
    ("2", "0, nvml_device_index=1", "GPU-bbbb"),
    ("", "0, nvml_device_index=1", "GPU-bbbb"),
    ("1,-1,2", "0", "GPU-bbbb"),
]


@pytest.mark.parametrize(("setting", "arguments", "uuid"), VISIBLE)
def test_cuda_visible_devices_decides_which_card_a_torch_device_is(fakes, setting, arguments, uuid):
    env = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    told = ask(fakes, arguments, **env)
    assert told["uuid"] == uuid
    assert told["reading"]["temperature_c"] == {"GPU-aaaa": 61, "GPU-bbbb": 62, "GPU-cccc": 63}[uuid]
    assert told["warnings"] == []


@pytest.mark.parametrize(
    ("setting", "arguments", "why"),
    [
        ("", "0", "cuda:0 is hidden: CUDA_VISIBLE_DEVICES= shows 0 devices"),
        ("2", "1", "cuda:1 is hidden"),
        ("1,-1,2", "1", "cuda:1 is hidden"),
        ("0,0", "0", "cuda:0 is hidden"),
        ("GPU-zzzz", "0", "GPU-zzzz is the UUID of 0 GPUs here"),
        ("GPU-", "0", "GPU- is the UUID of 3 GPUs here"),
        ("7", "0", "there is no GPU 7"),
        ("NoDevFiles", "0", "cuda:0 is hidden"),
        ("0", "'cpu'", "cpu is none; train on cuda, or set nvml_device_index"),
    ],
)
def test_a_hidden_or_unknown_card_is_an_unknown_reading_and_one_warning(fakes, setting, arguments, why):
    told = ask(fakes, arguments, CUDA_VISIBLE_DEVICES=setting)
    assert told["reading"] == UNKNOWN
    assert len(told["warnings"]) == 1
    assert why in told["warnings"][0]


def test_cards_of_several_kinds_are_not_guessed_at_unless_cuda_counts_by_the_bus(fakes):
    fakes.set(gpu2_name="Fake B")
    told = ask(fakes, "1")
    assert told["reading"] == UNKNOWN
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in told["warnings"][0]
    assert ask(fakes, "1", CUDA_DEVICE_ORDER="PCI_BUS_ID")["uuid"] == "GPU-bbbb"
    assert ask(fakes, "0, nvml_device_index=2")["name"] == "Fake B"


def test_a_mig_slice_has_its_cards_temperature_its_own_memory_and_no_utilization(fakes):
    fakes.set(gpu1_mig_uuid="MIG-1234", gpu1_mig_memory=2**30)
    told = ask(fakes, CUDA_VISIBLE_DEVICES="MIG-1234")
    assert told["uuid"] == "MIG-1234"
    assert (told["reading"]["temperature_c"], told["reading"]["memory_used_mib"]) == (62.0, 1024.0)
    assert told["reading"]["utilization_pct"] is None
    assert len(told["warnings"]) == 1
    assert "utilization unknown" in told["warnings"][0]
    told = ask(fakes, CUDA_VISIBLE_DEVICES="MIG-9999")
    assert told["reading"] == UNKNOWN
    assert "NVML knows no such device" in told["warnings"][0]
    fakes.values["error.nvmlDeviceGetDeviceHandleFromMigDeviceHandle"] = 4
    told = ask(fakes.set(), CUDA_VISIBLE_DEVICES="MIG-1234")
    assert told["reading"] == UNKNOWN
    assert "this user may not read it" in told["warnings"][0]


COUNTED = """
monitors = [GpuMonitor(i) for i in range(3)]
for monitor in monitors:
    monitor.read(), monitor.close(), monitor.close()
assert monitors[0].read().temperature_c is None
again = GpuMonitor()
print(json.dumps(again.read().temperature_c))
"""


def test_nvml_is_begun_once_for_several_monitors_and_ended_once_also_at_the_end_of_the_program(fakes):
    assert fakes.run(COUNTED) == 61
    marks = [name for name, _, _ in fakes.calls() if name in ("nvmlInitWithFlags", "nvmlShutdown")]
    assert marks == ["nvmlInitWithFlags", "nvmlShutdown"] * 2


FORKED = """
monitor = GpuMonitor()
first = monitor.read().temperature_c
pid = os.fork()
if pid == 0:
    own = monitor.read().temperature_c  # a handle from before the fork is dead
    monitor.close()
    open(os.environ["FAKE_NVML"] + ".child", "w").write(str(own))
    sys.exit(0)
_, status = os.waitpid(pid, 0)
pid = os.fork()
if pid == 0:
    sys.exit(0)  # a child that never reads leaves the parent's NVML alone
_, silent = os.waitpid(pid, 0)
child = float(open(os.environ["FAKE_NVML"] + ".child").read())
print(json.dumps([first, status, silent, child, monitor.read().temperature_c, os.getpid()]))
"""


def test_a_forked_child_opens_nvml_anew_and_the_parents_goes_on(fake):
    first, status, silent, child, after, parent = fake.run(FORKED)
    assert (first, status, silent, child, after) == (61, 0, 0, 61, 61)
    marks = [(name, pid) for name, pid, _ in fake.calls() if name in ("nvmlInitWithFlags", "nvmlShutdown")]
    own = [name for name, pid in marks if pid == parent]
    others = [name for name, pid in marks if pid != parent]
    assert own == ["nvmlInitWithFlags", "nvmlShutdown"]
    assert others == ["nvmlInitWithFlags", "nvmlShutdown"]


def test_another_library_that_shuts_nvml_down_does_not_blind_the_monitor(fake):
    code = """
import pynvml
monitor = GpuMonitor()
pynvml.nvmlShutdown()
print(json.dumps([monitor.read().temperature_c, monitor.read().temperature_c]))
"""
    assert fake.run(code) == [61, 61]


def test_leaving_the_program_while_a_thread_reads_does_not_crash(fake):
    code = """
import threading
from safetrain_core.thermal.poller import Poller
poller = Poller(GpuMonitor(), 0.001)
poller.__enter__()
poller.wait(5)
print(json.dumps(poller.reading.temperature_c))
"""
    for _ in range(3):
        assert fake.run(code) == 61


def test_the_backend_none_loads_nothing_and_warns_of_nothing(fake):
    told = ask(fake, "backend='none'")
    assert (told["reading"], told["warnings"]) == (UNKNOWN, [])
    assert fake.calls() == []


def test_a_monitor_needs_no_torch(fake):
    assert fake.run("GpuMonitor().read(); print(json.dumps('torch' in sys.modules))") is False
