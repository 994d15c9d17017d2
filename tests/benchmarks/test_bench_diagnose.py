"""The doctor on runs that it was not tuned on: what it finds, false alarms, two log linters beside it; its cost."""

import csv
import json
import random
import resource
import time
from collections import deque

import pytest
from corpus import HEALTHY, HELD_OUT, healthy, write_csv
from damaged import LABELS, broken_log
from measure import Measured

from safetrain_core import diagnose
from safetrain_core.records import BASE_COLUMNS

AREA = "doctor"
BROKEN_SEEDS, HEALTHY_SEEDS = 20, 12

#: What each linter calls the symptom; a label that is not here has no name in it.
PEER_NAMES = {
    "runmedic": {
        "spike without clipping": {"loss_spikes", "grad_spikes", "divergence"},
        "NaN that stays": {"non_finite"},
        "divergence": {"divergence", "non_finite", "loss_spikes"},
    },
    "losslint": {
        "spike without clipping": {"loss_spike", "divergence"},
        "NaN that stays": {"nan_inf"},
        "divergence": {"divergence", "nan_inf", "loss_spike"},
        "steps backwards": {"step_backtrack"},
        "header twice": {"parse"},
    },
}


def runmedic(path):
    """Names and severities of its findings."""
    from runmedic import checks, loaders, roles

    (run,) = loaders.load(str(path))
    return [
        (found.check, "error" if found.severity == "critical" else found.severity)
        for found in checks.run_checks(run, roles.detect(run))
    ]


def losslint(path):
    from losslint.checks import run_all_checks
    from losslint.parsing import ColumnOverrides, load_run

    return [(found.check, found.severity) for found in run_all_checks(load_run(path, ColumnOverrides()))]


def ours(path, baseline=None):
    return [(found.rule, found.severity) for found in diagnose(path, baseline=baseline)]


LINTERS = {"runmedic": runmedic, "losslint": losslint}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Label -> [(path, baseline or None)], healthy ones under None, of seeds that no threshold was looked at with."""
    folder = tmp_path_factory.mktemp("runs")
    made = {label: [] for label in (*LABELS, None)}
    for number, label in enumerate(LABELS):
        for seed in range(HELD_OUT, HELD_OUT + BROKEN_SEEDS):
            path = folder / f"{number}-{seed}.csv"
            made[label].append((path, broken_log(label, seed, path)))
    for number, name in enumerate(HEALTHY):
        for seed in range(HELD_OUT, HELD_OUT + HEALTHY_SEEDS):
            path = folder / f"healthy-{number}-{seed}.csv"
            write_csv(healthy(name, seed), path)
            made[None].append((path, None))
    return made


def found(told, names):
    """In how many runs one of these names is among what was told, what is good to know not counted."""
    return sum(any(name in names and severity != "info" for name, severity in run) for run in told)


def with_severity(told, severity):
    return sum(any(s == severity for _, s in run) for run in told)


def test_what_is_found_in_runs_that_it_was_not_tuned_on(runs, claim):
    counts = {}
    for label, names in LABELS.items():
        counts[label] = found([ours(path, baseline) for path, baseline in runs[label]], names)
        claim(f"found: {label}", counts[label], ">=", 0.95 * BROKEN_SEEDS, f"of {BROKEN_SEEDS}")
    claim("found least often of all symptoms", min(counts.values()), ">=", 0.95 * BROKEN_SEEDS, f"of {BROKEN_SEEDS}")


def test_false_alarms_in_healthy_runs(runs, claim, compare):
    told, count = [ours(path) for path, _ in runs[None]], len(runs[None])
    claim("healthy runs examined", count, ">=", 100)
    claim("healthy runs with an error", with_severity(told, "error"), "<=", int(0.02 * count), f"of {count}")
    compare("healthy runs with a warning", with_severity(told, "warning"), f"of {count}")


@pytest.mark.parametrize("name", LINTERS)
def test_a_linter_on_the_same_runs(runs, claim, compare, name):
    pytest.importorskip(name, reason=f"{name} is not installed; make bench installs it")
    look, behind = LINTERS[name], 0
    for label, names in PEER_NAMES[name].items():
        theirs = found([look(path) for path, _ in runs[label]], names)
        behind += found([ours(path, baseline) for path, baseline in runs[label]], LABELS[label]) < theirs
        compare(f"found by {name}: {label}", theirs, f"of {BROKEN_SEEDS}")
    compare(f"symptoms that {name} has no name for", len(LABELS) - len(PEER_NAMES[name]), f"of {len(LABELS)}")
    claim(f"symptoms that {name} names in more runs than ours", behind, "<=", 0)
    told, count = [look(path) for path, _ in runs[None]], len(runs[None])
    errors = with_severity(told, "error")
    compare(f"healthy runs with an error by {name}", errors, f"of {count}")
    compare(f"healthy runs with a warning by {name}", with_severity(told, "warning"), f"of {count}")
    ours_too = with_severity([ours(path) for path, _ in runs[None]], "error")
    claim(f"healthy runs with an error, ours less {name}'s", ours_too - errors, "<=", 0)


def test_a_million_rows_take_seconds_and_no_gigabyte(claim, compare, tmp_path):
    path, dice = tmp_path / "million.csv", random.Random(0)
    with path.open("w") as file:
        file.write(",".join(BASE_COLUMNS) + "\n")
        for step in range(1, 10**6 + 1):
            loss, norm = 2 + dice.random(), 1 + dice.random()
            skip = step % 1000 == 0
            file.write(
                f"{step},{step},{step // 1000},{loss},0.001,{'inf' if skip else norm},{'' if skip else 1.0},"
                f"{65536.0 if step % 2 else 32768.0},{int(skip)},{'non_finite_grad' if skip else ''},0,16,12.3,300.5,"
                f"{loss if step % 500 == 0 else ''}\n"
            )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told, processor, wall, ratios = [], [], [], []
    for _ in range(5):
        start = time.process_time()
        with path.open(newline="") as file:
            deque(csv.reader(file), maxlen=0)
        split = time.process_time() - start
        start, began = time.process_time(), time.perf_counter()
        told.append(diagnose(path))
        processor.append(time.process_time() - start)
        wall.append(time.perf_counter() - began)
        ratios.append(processor[-1] / split)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert json.dumps([finding.rule for finding in told[0]])
    compare("10^6 rows of our CSV / the csv module splitting them, processor time", Measured.of(ratios), "x")
    claim("10^6 rows of our CSV, processor time", Measured.of(processor), "<=", 5, "s")
    claim("10^6 rows of our CSV, wall time", Measured.of(wall), "<=", 5, "s")
    claim("10^6 rows of our CSV, more memory at the peak", grown, "<=", 1, "GiB")
