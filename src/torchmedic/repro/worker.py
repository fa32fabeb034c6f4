"""Turns a recipe into a script: `torchmedic.repro.worker RECIPE OUTPUT [--as-it-is]`.

Runs in a separate process, because it executes the failing operation many times, which may crash. Prints a `Made` as
JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from torchmedic.errors import TorchmedicError
from torchmedic.repro import recipe, store
from torchmedic.repro.check import Made
from torchmedic.repro.program import Program
from torchmedic.repro.script import text
from torchmedic.repro.shrink import shrunk
from torchmedic.runfolder.files import write_atomically


def main(arguments: list[str]) -> int:
    source, output = Path(arguments[0]), Path(arguments[1])
    try:
        program = _failing(store.read(recipe.read(source), recipe.values_path(source)))
        made = _write(program if "--as-it-is" in arguments else shrunk(program), program, output)
    except TorchmedicError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"cannot write {output}: {error.strerror}\n")
        return 2
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError, SyntaxError) as error:
        sys.stderr.write(f"cannot read {source}: it is damaged ({type(error).__name__}: {error})\n")
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(made))
    return 0


def _failing(program: Program) -> Program:
    """The program on the CPU if it fails there too, so that anyone can run it; else on the recorded devices."""
    return next((variant for variant in program.variants() if variant.holds()), program)


def _write(program: Program, original: Program, output: Path) -> Made:
    values = output.with_suffix(".safetensors")
    source, loads = text(program, values)
    if loads:
        data = store.encoded(program)
        assert data is not None
        write_atomically(values, data)
    write_atomically(output, source.encode())
    return Made(
        lines=source.count("\n"),
        values=str(values) if loads else None,
        before=[list(given.shape) for given in original.inputs],
        after=[list(given.shape) for given in program.inputs],
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
