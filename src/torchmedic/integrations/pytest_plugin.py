"""pytest: with `pytest --torchmedic`, a test that fails in a training step gets the diagnosis as a section.

The plugin does nothing without the option, but for the fixture `checkup`. It imports torch in no case: a test that has
not imported torch trains nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchmedic.integrations.session import Session
    from torchmedic.records import Diagnosis

_SECTION = "torchmedic"
_found: pytest.StashKey[list[Diagnosis]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchmedic", "cause and line of failed training steps")
    group.addoption("--torchmedic", action="store_true", help="explain tests that fail in a PyTorch training step")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    watching = _session(item.config)
    if watching is None:
        return (yield)
    watching.begin()
    try:
        return (yield)
    except Exception as error:
        watching.failed(error)
        item.stash[_found] = list(watching.of_part)
        raise
    finally:
        watching.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = item.stash.get(_found, [])
    if call.when == "call" and report.failed and found:
        text = _text(found)
        if text:
            report.sections.append((_SECTION, text))
    return report


@pytest.fixture
def checkup() -> Callable[..., None]:
    """A function `checkup(model, batch, loss_fn, ignore=())`: one training step that must show no silent mistake.

    The arguments are those of `torchmedic.checkup`; the codes in `ignore` are accepted. The test fails with the
    diagnosis of whatever is found.
    """
    from torchmedic.examine.unit_check import checkup as look

    def check(model: Any, batch: Any, loss_fn: Any, *, ignore: Iterable[str] = ()) -> None:
        __tracebackhide__ = True
        accepted = set(ignore)
        found = [each for each in look(model, batch, loss_fn) if each.code not in accepted]
        if found:
            pytest.fail(_text(found), pytrace=False)

    return check


def _session(config: pytest.Config) -> Session | None:
    """The session of this process, if the tests are to be watched and have imported torch."""
    if not config.getoption("--torchmedic") or "torch" not in sys.modules:
        return None
    from torchmedic.integrations.session import session
    from torchmedic.settings import load

    found = session(load({}, folder=config.rootpath), "pytest")
    if found is not None:
        found.say = _silent  # the section says it
    return found


def _silent(diagnosis: Diagnosis) -> None: ...


def _text(found: Iterable[Diagnosis]) -> str:
    """The diagnoses as they are printed, without those that say no more than the traceback."""
    from torchmedic.report import terminal
    from torchmedic.report.console import recording_console

    shown = [each for each in found if each.severity != "note" and not each.in_traceback]
    console = recording_console(100)
    terminal.print_all(console, shown, "full", None)
    return console.export_text().rstrip("\n")
