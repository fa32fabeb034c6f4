"""What `torchmedic preflight` sees in a script without running it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pages import FENCE, PAGES
from preflights import LOADER, problems, situation

from torchmedic.supervise.preflight import forking, memory, processors, script, waits


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        ("DataLoader(d, num_workers=4)", 4),
        ("DataLoader(d)", 0),
        ("DataLoader(d, 8, True, None, None, 3)", 3),
        ("W = 2\nDataLoader(d, num_workers=W)", 2),
        ("W = 2\nW = 3\nDataLoader(d, num_workers=W)", None),
        ("options = dict(num_workers=5, pin_memory=True)\nDataLoader(d, **options)", 5),
        ("options = {'num_workers': 6}\nDataLoader(d, **options)", 6),
        ("config = {'workers': 7}\nDataLoader(d, num_workers=config['workers'])", 7),
        ("p.add_argument('-j', '--num-workers', default=9)\nDataLoader(d, num_workers=args.num_workers)", 9),
        ("class Config:\n    workers: int = 3\nDataLoader(d, num_workers=Config.workers)", 3),
        ("def make(data, workers=2):\n    return DataLoader(data, num_workers=workers)", 2),
        ("def make(workers):\n    return DataLoader(d, num_workers=workers)\nmake(workers=6)", 6),
        ("DataLoader(d, num_workers=min(4, os.cpu_count() or 1) * 0 + 11)", 11),
        ("DataLoader(d, num_workers=len(os.sched_getaffinity(0)) // 2)", 4),
        ("TrainingArguments(output_dir='x', dataloader_num_workers=5)", 5),
        ("n = n + n\nDataLoader(d, num_workers=n)", None),
        ("DataLoader(d, num_workers=int(sys.argv[1]))", None),
    ],
)
def test_workers_that_can_be_seen(tmp_path: Path, source: str, workers: int | None) -> None:
    facts = situation(LOADER + source, tmp_path).script
    assert facts is not None
    assert [loader.workers for loader in facts.loaders] == [workers]


HEALTHY_LOOPS = Path(__file__).parents[2] / "integration" / "healthy_loops"
SPAWNED = LOADER + "import torch.multiprocessing as mp\nmp.set_start_method('spawn')\n"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (SPAWNED + "loader = DataLoader(d, num_workers=2)\nfor x in loader: pass", "fail"),
        (SPAWNED + "l = DataLoader(d, num_workers=2)\ndef main():\n    for x in enumerate(l): pass\nmain()", "fail"),
        (LOADER + "def f():\n  for x in DataLoader(d, num_workers=2, multiprocessing_context='spawn'): 1\nf()", "fail"),
        (LOADER + "class T:\n  def fit(self):\n"
         "    self.l = DataLoader(d, num_workers=2, multiprocessing_context='forkserver')\n"
         "    for x in self.l: pass\nT().fit()", "fail"),
        (SPAWNED + "mp.spawn(work, nprocs=2)", "fail"),
        (SPAWNED + "if 1 < x:\n    mp.spawn(work, nprocs=2)", "warn"),
        (SPAWNED + "loader = DataLoader(d, num_workers=2)", "warn"),  # nobody was seen to go through it
        (SPAWNED + "loader = DataLoader(d, num_workers=0)\nfor x in loader: pass", "ok"),
        (SPAWNED + "def go():\n    for x in DataLoader(d, num_workers=2): 1\nif __name__ == '__main__': go()", "ok"),
        (SPAWNED + "def main():\n    mp.spawn(work, nprocs=2)\nif '__main__' == __name__:\n    main()", "ok"),
        (LOADER + "for x in DataLoader(d, num_workers=2, multiprocessing_context='fork'): pass", "ok"),
    ],
)  # fmt: skip
def test_main_guard(tmp_path: Path, source: str, status: str) -> None:
    (found,) = [each for each in script.check(situation(source, tmp_path)) if each.check == "main guard"]
    assert found.status == status, found


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("x = 1\nbreakpoint()", 2),
        ("import pdb; pdb.set_trace()", 1),
        ("from ipdb import set_trace\nset_trace()", 2),
        ("def train():\n    for x in y:\n        if input('go on? ') == 'n':\n            return", 3),
        ("def forward(self, input):\n    return self.layer(input)", None),
        ("input = load()\nprint(input(3))", None),
        ("if args.debug:\n    breakpoint()", None),
        ("if args.debug:\n    pass\nelse:\n    breakpoint()", 4),
        ("if sys.stdin.isatty():\n    input('ready? ')", None),
    ],
)
def test_prompts(tmp_path: Path, source: str, line: int | None) -> None:
    found = problems(script.check(situation(source, tmp_path))).get("prompts")
    if line is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith("warn")
        assert f"train.py:{line}:" in found
    assert "prompts" not in problems(script.check(situation("breakpoint()", tmp_path, PYTHONBREAKPOINT="0")))


DATASET = """
import torch
from torch.utils.data import DataLoader, Dataset
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
class Data(Dataset):
    def __getitem__(self, index):
        return {get}
class Other(Dataset):
    def __getitem__(self, index):
        return self.x[index].cuda()
for x in DataLoader(Data(), {options}):
    model(x.to(device)).sum().backward()
"""


@pytest.mark.parametrize(
    ("get", "options", "warns"),
    [
        ("torch.ones(3).cuda()", "num_workers=2", True),
        ("torch.ones(3, device='cuda:0')", "num_workers=2", True),
        ("self.x[index].to(device)", "num_workers=2", True),
        ("self.x[index].to(torch.float32)", "num_workers=2", False),
        ("self.x[index]", "num_workers=2", False),
        ("torch.ones(3).cuda()", "num_workers=0", False),
        ("torch.ones(3).cuda()", "num_workers=2, multiprocessing_context='spawn'", False),
    ],
)
def test_cuda_in_forked_workers(tmp_path: Path, get: str, options: str, warns: bool) -> None:
    if warns and sys.version_info >= (3, 14):
        options += ", multiprocessing_context='fork'"
    source = DATASET.replace("{get}", get).replace("{options}", options)
    found = problems(forking.check(situation(source, tmp_path)))
    assert ("CUDA after fork" in found) == warns, found
    if warns:
        assert "train.py:7 uses CUDA in `__getitem__`" in found["CUDA after fork"]


def test_openmp_after_fork(tmp_path: Path) -> None:
    source = """
import multiprocessing as mp
import torch
mp.set_start_method("fork")
def child():{first}
    (a @ b).sum()
if __name__ == "__main__":
    model(x).sum().backward()
    mp.Process(target=child).start()
"""
    found = problems(forking.check(situation(source.replace("{first}", ""), tmp_path)))
    assert "train.py:9 forks" in found["OpenMP after fork"]
    assert "train.py:8 has computed before" in found["OpenMP after fork"]
    for healthy in (
        source.replace("{first}", "\n    torch.set_num_threads(1)"),
        source.replace("{first}", "").replace('"fork"', '"spawn"'),
        source.replace("{first}", "").replace("    model(x).sum().backward()\n", ""),
    ):
        assert problems(forking.check(situation(healthy, tmp_path))) == {}


def test_cuda_after_fork(tmp_path: Path) -> None:
    source = """
import torch.multiprocessing as mp
mp.set_start_method("fork")
def actor(queue):
    queue.put(torch.ones(3, device="cuda"))
if __name__ == "__main__":
    model = Model().cuda()
    mp.Process(target=actor, args=(queue,)).start()
"""
    found = problems(forking.check(situation(source, tmp_path)))["CUDA after fork"]
    assert "train.py:8 forks" in found
    assert "train.py:5), and " in found
    for healthy in (source.replace('"fork"', '"spawn"'), source.replace("Model().cuda()", "Model()")):
        assert problems(forking.check(situation(healthy, tmp_path))) == {}


QUEUE = """
import multiprocessing as mp
def work(out, n):
    out.put([0] * n)
if __name__ == "__main__":
    queue = mp.Queue()
    process = mp.Process(target=work, args=(queue, 10**6))
    process.start()
    {first}
    {second}
"""


def test_a_join_before_the_queue_is_emptied(tmp_path: Path) -> None:
    def found(first: str, second: str) -> dict[str, str]:
        return problems(waits.check(situation(QUEUE.format(first=first, second=second), tmp_path)))

    assert "train.py:9 waits for the process of" in found("process.join()", "print(queue.get())")["queues"]
    assert found("print(queue.get())", "process.join()") == {}
    assert found("process.join(5)", "print(queue.get())") == {}
    assert found("process.join()", "pass") == {}


def test_hangs_that_can_be_foretold_and_no_others(tmp_path: Path) -> None:
    """The failing scripts of some pages, and the healthy scripts of all pages and loops."""
    foretold = {"TM311": "CUDA after fork", "TM503": "locks after fork", "TM504": "OpenMP after fork"}
    foretold["TM513"] = "empty loaders"
    sources = [(path.name, path.read_text(), "") for path in HEALTHY_LOOPS.glob("*.py")]
    for page in PAGES.glob("TM*.md"):
        code = page.name.split("-")[0]
        for kind, _, source in FENCE.findall(page.read_text()):
            if kind == "passes" or code in foretold:
                sources.append((f"{code} {kind}", source, foretold[code] if kind == "fails" else ""))
    looked = 0
    for name, source, told in sources:
        known = situation(source, tmp_path)
        found: dict[str, str] = {}
        for check in (script.check, forking.check, waits.check, memory.check, processors.check):
            found |= problems(check(known))
        if name.startswith("TM5"):
            found.pop("prompts", None)  # the page about a run that waits for a keyboard has two such scripts
        assert list(found) == ([told] if told else []), (name, found)
        looked += 1
    assert looked > 100


def test_helper_modules_are_read(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("from .data import make\n")
    (tmp_path / "package" / "data.py").write_text(LOADER + "def make():\n    return DataLoader(d, num_workers=99)\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    found = problems(processors.check(situation("import broken\nfrom package import make\n", tmp_path)))
    assert "data.py:4 starts 99 workers on 8 CPUs" in found["DataLoader workers"]


def test_settings_of_openmp(tmp_path: Path) -> None:
    late = problems(script.check(situation("import torch\nimport os\nos.environ['OMP_NUM_THREADS'] = '2'", tmp_path)))
    assert "train.py:3 sets OMP_NUM_THREADS after torch was imported" in late["OpenMP settings"]
    early = situation("import os\nos.environ['OMP_THREAD_LIMIT'] = '4'\nimport torch", tmp_path)
    assert problems(script.check(early)) == {}
    assert problems(processors.check(early)) == {
        "OpenMP threads": "warn: OMP_THREAD_LIMIT=4, and torch counts on 8 threads: "
        "a kernel that waits for all of them never ends"
    }
