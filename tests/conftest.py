"""What holds for every test: how helpers are found, what a process is started with, and who comes first."""

import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest

from torchmedic.source import user_code

sys.path.insert(0, str(Path(__file__).parent))
# Where Python may not keep bytecode, each of the hundreds of processes that the tests start compiles all of torchmedic.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every script that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # until all tests are collected: to look for garbage meanwhile takes a tenth of the time


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _own_module_only(request: pytest.FixtureRequest) -> None:
    """Take other test modules for a library: a user has a few files, and not hundreds, which are all looked through."""
    tests = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for file in tests:
        if file is not None and os.path.basename(file).startswith("test_"):
            user_code.verdicts[file] = file == str(request.path)
    if (variables := sys.modules.get("torchmedic.source.user_variables")) is not None:
        variables._modules = (0, [])


_SLEEPERS = ("test_hangs.py", "test_stalls.py", "test_interrupts.py")


# Of long lists, how many cases of a code `make test` runs beside the page of the code; the further ones are slow.
_CASES_PER_CODE = {
    "test_autograd_rules.py": 1,
    "test_checkup.py": 1,
    "test_device_rules.py": 1,
    "test_graph_rules.py": 1,
    "test_leaks.py": 1,
    "test_memory_mechanisms.py": 1,
    "test_memory_rules.py": 1,
    "test_memory_structures.py": 1,
    "test_memory_verdicts.py": 1,
    "test_number_rules.py": 1,
    "test_rule_cases.py": 1,
    "test_trajectory_rules.py": 1,
}

# Long lists of healthy or like scripts without a code: every second one is slow.
_HALVED = frozenset(
    {
        "test_nothing_is_found_in_a_healthy_loop",
        "test_a_healthy_script_is_told_nothing",
        "test_what_only_looks_like_a_leak_is_not_told_of",
        "test_the_step_before_is_blamed",
        "test_what_is_trained_on",
        "test_the_line_is_named",
        "test_ranks_that_differ_on_purpose_are_left_alone",
    }
)


@pytest.hookimpl(tryfirst=True)  # before items are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What mostly sleeps begins first, so that it does not end last, with the cores idle."""
    items.sort(key=lambda item: item.path.name not in _SLEEPERS)
    seen: Counter[tuple[str, str, str]] = Counter()
    for item in items:
        name = (item.path.name, item.name.partition("[")[0], "")
        seen[name] += 1
        if name[1] in _HALVED and seen[name] % 2 == 0:
            item.add_marker(pytest.mark.slow)
        code = _code_of(item)
        if code.startswith("TM"):
            kind = (item.path.name, item.name.partition("[")[0], code)
            seen[kind] += 1
            if seen[kind] > _CASES_PER_CODE[item.path.name]:
                item.add_marker(pytest.mark.slow)


def _code_of(item: pytest.Item) -> str:
    """The code that a case of a long list expects; empty for other tests."""
    call = getattr(item, "callspec", None)
    if call is None or item.path.name not in _CASES_PER_CODE:
        return ""
    case = call.params.get("case")
    codes = getattr(case, "codes", None) or getattr(case, "code", None) or call.params.get("code")
    if codes is None and "name" in call.params:
        codes = getattr(item.module, "FAILURES", {}).get(call.params["name"], ("",))[0]
    if codes == "healthy":
        codes = call.id.partition("-")[0]
    return codes if isinstance(codes, str) else str(codes[0]) if codes else ""


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the connection that pytest-rerunfailures leaves open in a worker: Python warns of it at the very end."""
    if "PYTEST_XDIST_WORKER" in os.environ and (connection := getattr(config, "failures_db", None)) is not None:
        connection.sock.close()
