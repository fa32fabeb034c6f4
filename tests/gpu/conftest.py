import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
