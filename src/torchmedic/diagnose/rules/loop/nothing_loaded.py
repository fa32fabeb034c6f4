"""A state was loaded into a module with `strict=False`, and no name of the state is one of the module's.

What: `load_state_dict(state, strict=False)` leaves out names that the module does not have. None fitted, so the module
has the weights that it had before, and is trained or used with them.

Why: `DistributedDataParallel` puts `module.` before each name, `torch.compile` puts `_orig_mod.`, and a checkpoint is
often a dictionary that holds the state beside other things. No error is raised.

Cure: change the names of the state, or load the entry that holds the state. Look at what `load_state_dict` returns.
"""

from __future__ import annotations

from torchmedic.detect.loop.incident import NothingLoaded
from torchmedic.diagnose.rule import Draft, loop_rule
from torchmedic.diagnose.words.tensors import count
from torchmedic.evidence.loop import LoopEvidence


@loop_rule("TM653", "nothing-loaded", NothingLoaded)
def check(evidence: LoopEvidence, incident: NothingLoaded) -> Draft | None:
    load = incident.load
    is_known = bool(load.inside or load.strip or load.add)
    draft = check.draft(evidence, "proven" if is_known else "likely")
    draft.message = "nothing was loaded: no name of the state is one of the module's"
    draft.cause = (
        f"the state has `{load.given}`, the module `{load.own}`, and strict=False leaves out what does not fit"
    )
    draft.at(evidence.at("cause", incident.cause, "loads nothing", "load_state_dict"))
    draft.because(f"{count(load.entries, 'name')} of the state, {load.wanted} of the module, none in common")
    if load.inside:
        draft.help(f"load the entry `{load.inside}` of the state")
    elif load.strip:
        draft.help(f"remove `{load.strip}` from the names of the state")
    elif load.add:
        draft.help(f"put `{load.add}` before the names of the state, or load it into that part of the module")
    else:
        draft.help("compare the names of both, and look at what `load_state_dict` returns")
    return draft.rated("warning")
