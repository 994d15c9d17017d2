"""The doctor on runs that it was not tuned on: what it finds, false alarms, two log linters beside it; its cost."""

import json
import random
import resource
import time

import pytest
from corpus import BROKEN, HEALTHY, HELD_OUT, broken, healthy, write_csv

from safetrain_core import diagnose
from safetrain_core.records import BASE_COLUMNS

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Label or None -> [(path, baseline or None)], of seeds that no threshold was looked at with."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for label in BROKEN:
        for seed in range(HELD_OUT, HELD_OUT + BROKEN_SEEDS):
            rows, baseline = broken(label, seed)
            path = folder / f"{len(made)}-{seed}.csv"
            write_csv(rows, path)
            made.setdefault(label, []).append((path, baseline))
    for name in HEALTHY:
        for seed in range(HELD_OUT, HELD_OUT + HEALTHY_SEEDS):
            path = folder / f"healthy-{name.replace(' ', '_')}-{seed}.csv"
            write_csv(healthy(name, seed), path)
            made.setdefault(None, []).append((path, None))
    return made


def test_found_and_false_alarms_beside_two_linters(runs, claim):
    peers = {}
    for name, look in (("runmedic", runmedic), ("losslint", losslint)):
        pytest.importorskip(name, reason=f"{name} comes with the extra peers: make bench")
        peers[name] = look
    print(f"\n{'found, of ' + str(BROKEN_SEEDS):30} {'ours':>6} {'runmedic':>10} {'losslint':>10}")
    worst, behind = 1.0, 0
    for label, (_, names) in BROKEN.items():
        found = sum(
            any(rule in names and severity != "info" for rule, severity in ours(path, baseline))
            for path, baseline in runs[label]
        )
        theirs = {
            name: sum(
                any(check in PEER_NAMES[name].get(label, ()) and severity != "info" for check, severity in look(path))
                for path, _ in runs[label]
            )
            for name, look in peers.items()
        }
        print(f"{label:30} {found:6} {theirs['runmedic']:10} {theirs['losslint']:10}")
        worst = min(worst, found / BROKEN_SEEDS)
        behind += sum(found < count for count in theirs.values())
    alarms = {}
    for name, look in {"ours": ours, **peers}.items():
        told = [look(path) for path, _ in runs[None]]
        alarms[name] = {
            severity: sum(any(s == severity for _, s in found) for found in told) for severity in ("error", "warning")
        }
    healthy_runs = len(runs[None])
    for severity in ("error", "warning"):
        row = [alarms[name][severity] for name in ("ours", "runmedic", "losslint")]
        print(f"{f'healthy with {severity}, of {healthy_runs}':30} {row[0]:6} {row[1]:10} {row[2]:10}")
    claim("healthy runs examined", healthy_runs, ">=", 100)
    claim("symptom found least often: share of held-out runs", worst, ">=", 0.95)
    claim("share of healthy runs with an error", alarms["ours"]["error"] / healthy_runs, "<=", 0.02)
    claim("symptoms that a linter names in more runs", behind, "<=", 0)
    for name in peers:
        claim(f"false errors, ours less {name}'s", alarms["ours"]["error"] - alarms[name]["error"], "<=", 0)


def test_a_million_rows_take_seconds_and_no_gigabyte(claim, tmp_path):
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
    start = time.process_time()
    found = diagnose(path)
    seconds = time.process_time() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert json.dumps([finding.rule for finding in found])
    claim("diagnosing 10^6 rows of our CSV, processor seconds", seconds, "<=", 5)
    claim("diagnosing 10^6 rows of our CSV, GiB more at the peak", grown, "<=", 1)
